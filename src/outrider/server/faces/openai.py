"""OpenAI's API: chat and completions, whole or as a stream of events.

Beside OpenAI's own fields a request may say who drafts for it (`speculative`), and an answer says what became of the
drafts (`metrics`). With `"outrider": {"tokens": true}` each choice of each streamed chunk carries
`"outrider": {"tokens": [{"id", "text", "drafter", "depth", "logprob", "special"}]}`: `drafter` is null and `depth` 0
for the target's own tokens, `logprob` is null unless log-probabilities are asked for; the last event brings usage and
metrics.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request as HttpRequest, Response
from fastapi.responses import JSONResponse

from outrider.core.request import Chunk, Result, Token
from outrider.core.stats import Stats
from outrider.drafters import PREDICTION
from outrider.server import tools
from outrider.server.context import VERSION, id_of, server_of
from outrider.server.faces.asking import Json, chosen_by, converse, drafting, naming_the_field, respond, shows
from outrider.server.faces.measured import measured
from outrider.server.faces.openai_bodies import ChatBody, CompletionBody, OpenAIBody
from outrider.server.faces.tool_calls import CallWriter
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.responses import checked, submit
from outrider.server.tools import Dialect

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/chat/completions", response_class=JSONResponse)
async def chat_completions(request: HttpRequest, body: ChatBody) -> Response:
    """Answer a conversation."""
    stream, dialect = await converse(request, body)
    return await respond(request, bool(body.stream), ChatWriter(request, body, [stream], dialect))


@router.post("/completions", response_class=JSONResponse)
async def completions(request: HttpRequest, body: CompletionBody) -> Response:
    """Continue a prompt, or each of several."""
    server = server_of(request)
    model, chosen = await chosen_by(request, body)
    streams: list[ServerStream] = []
    group = uuid.uuid4().hex  # not the request's id: that may be a client's own choice, and another client's
    try:
        with naming_the_field(body, tools.of(None)):
            for asked in body.requests(*drafting(server, model, chosen)):
                asked = replace(asked, draft=asked.draft or chosen.draft, adapter=chosen.adapter, group=group)
                streams.append(await submit(request, model.uid, asked, shows(body, asked)))
    except BaseException:  # one was refused: the others run for nobody
        for stream in streams:
            stream.cancel()
        raise
    return await respond(request, bool(body.stream), CompletionWriter(request, body, streams))


class AnswerWriter:
    """How an answer is written; chat and completions differ in names and in the shape of a choice."""

    kind = chunk_kind = prefix = ""
    named = False

    def __init__(self, request: HttpRequest, body: OpenAIBody, streams: Sequence[ServerStream]) -> None:
        self.streams, self._body, self._timings = streams, body, server_of(request).options.timings
        self._head = {
            "id": f"{self.prefix}-{id_of(request)}",
            "created": int(time.time()),
            "model": streams[0].model,
            "system_fingerprint": f"outrider-{VERSION}",
        }
        self._offsets: dict[int, int] = {}  # choice -> characters written so far

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    def whole(self, results: Sequence[Result]) -> Json:
        """The answer to a request that does not stream."""
        pairs = [(sample, at) for at, result in enumerate(results) for sample in result.samples]
        choices = [self.choice(index, sample, self.streams[at]) for index, (sample, at) in enumerate(pairs)]
        return {**self._head, "object": self.kind, "choices": choices, **self._totals(results)}

    async def events(self) -> AsyncGenerator[Json | str]:
        for index in range(sum(stream.samples for stream in self.streams)):
            for first in self.opening(index):
                yield self._event([first])
        results: list[Result | None] = [None] * len(self.streams)
        last: Json | None = None
        async for place, item in _merged(self.streams):
            if isinstance(item, Result):
                results[place] = checked(item)
            elif choice := self._chunk(place, item):
                if last is not None:
                    yield last
                last = self._event([choice])
                if not self._timings or choice["finish_reason"] is None:
                    yield last
                    last = None
        found = [result for result in results if result is not None]
        if last is not None:  # llama.cpp's clients read its times from the last chunk
            yield {**last, **({} if self._body.wants_usage else self._measured(found))}
        if self._body.wants_usage:
            yield {**self._event([]), **self._totals(found)}
        yield "[DONE]"

    def _event(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._body.wants_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _chunk(self, place: int, chunk: Chunk) -> Json | None:
        """A chunk as a choice; None when there is nothing to say yet."""
        stream = self.streams[place]
        index = sum(other.samples for other in self.streams[:place]) + chunk.index
        if not chunk.text and chunk.finish_reason is None and not self.shows(chunk):
            return None
        choice = self.delta(index, chunk, stream)
        if choice is not None and self._body.wants_tokens:
            choice["outrider"] = {"tokens": [_told(token, stream) for token in chunk.tokens]}
        return choice

    def shows(self, chunk: Chunk) -> bool:
        """Whether its tokens are wanted, also without text."""
        return bool(chunk.tokens) and (self._body.wants_tokens or self._wants_logprobs)

    def _totals(self, results: Sequence[Result]) -> Json:
        samples = [sample for result in results for sample in result.samples]
        prompt = sum(len(result.prompt_token_ids) for result in results)
        written = sum(len(sample.token_ids) for sample in samples)
        usage: Json = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        # of the first sample: a prompt counts once, and the other samples always find it
        usage["prompt_tokens_details"] = {"cached_tokens": sum(result.stats.cached for result in results)}
        if self._body.prediction is not None:
            stats = sum((sample.stats for sample in samples), Stats())
            drafted, kept = stats.drafted_by_drafter[PREDICTION], stats.accepted_by_drafter[PREDICTION]
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": kept,
                "rejected_prediction_tokens": drafted - kept,
            }
        return {"usage": usage, **self._measured(results)}

    def _measured(self, results: Sequence[Result]) -> Json:
        return measured(results, self.streams[0], self._timings)

    @property
    def _wants_logprobs(self) -> bool:
        return self._body.logprobs not in (None, False)  # type: ignore[attr-defined]

    def opening(self, index: int) -> Iterable[Json]:
        """What comes before the first token of a choice."""
        return ()

    def choice(self, index: int, sample: Result, stream: ServerStream) -> Json:
        raise NotImplementedError

    def delta(self, index: int, chunk: Chunk, stream: ServerStream) -> Json | None:
        """None when there is nothing to say yet."""
        raise NotImplementedError


class ChatWriter(AnswerWriter):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: HttpRequest, body: ChatBody, streams: Sequence[ServerStream], model: Dialect) -> None:
        super().__init__(request, body, streams)
        self._calls = [CallWriter(body, model) for _ in range(sum(stream.samples for stream in streams))]

    def opening(self, index: int) -> Iterable[Json]:
        delta = {"role": "assistant", "content": ""}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, sample: Result, stream: ServerStream) -> Json:
        return {
            "index": index,
            "message": self._calls[index].message(sample.text),
            "logprobs": self._logprobs(sample.tokens, stream),
            "finish_reason": self._calls[index].finish(_finish(sample.finish_reason)),
        }

    def delta(self, index: int, chunk: Chunk, stream: ServerStream) -> Json | None:
        said = self._calls[index].read(chunk.text, last=chunk.finish_reason is not None)
        logprobs = self._logprobs(chunk.tokens, stream)
        if not said and chunk.finish_reason is None and not self.shows(chunk):
            return None
        return {
            "index": index,
            "delta": said or ({} if chunk.finish_reason is not None else {"content": ""}),
            "logprobs": logprobs,
            "finish_reason": self._calls[index].finish(_finish(chunk.finish_reason)),
        }

    def _logprobs(self, tokens: Iterable[Token], stream: ServerStream) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [_with_logprob(token, stream) for token in tokens if not stream.special(token.id)]}


class CompletionWriter(AnswerWriter):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, index: int, sample: Result, stream: ServerStream) -> Json:
        return {
            "index": index,
            "text": sample.text,
            "logprobs": self._logprobs(index, sample.tokens, stream),
            "finish_reason": _finish(sample.finish_reason),
        }

    def delta(self, index: int, chunk: Chunk, stream: ServerStream) -> Json:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk.tokens, stream),
            "finish_reason": _finish(chunk.finish_reason),
        }

    def _logprobs(self, index: int, tokens: Iterable[Token], stream: ServerStream) -> Json | None:
        """The shape of the older interface: four lists, and the place of each token in the text."""
        if not self._wants_logprobs:
            return None
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if stream.special(token.id):
                continue
            text, offset = _text(token.id, stream), self._offsets.get(index, 0)
            lists["tokens"].append(_key(token.id, stream))
            lists["token_logprobs"].append(_finite(token.logprob))
            lists["top_logprobs"].append({_key(id, stream): _finite(logprob) for id, logprob in token.top})
            lists["text_offset"].append(offset)
            self._offsets[index] = offset + len(text)
        return lists


async def _merged(streams: Sequence[ServerStream]) -> AsyncIterator[tuple[int, Chunk | Result]]:
    """The chunks of the streams as they come, and the result of each."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        yield 0, await streams[0].result()
        return
    news: asyncio.Queue[tuple[int, Chunk | Result | Exception]] = asyncio.Queue()

    async def follow(place: int, stream: ServerStream) -> None:
        try:
            async for chunk in stream:
                news.put_nowait((place, chunk))
            news.put_nowait((place, await stream.result()))
        except Exception as error:
            news.put_nowait((place, error))

    tasks = [asyncio.create_task(follow(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            place, item = await news.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item, Result)
            yield place, item
    finally:
        for task in tasks:
            task.cancel()


def _finish(reason: str | None) -> str | None:
    return "stop" if reason == "cancelled" else reason


def _told(token: Token, stream: ServerStream) -> Json:
    return {
        "id": token.id,
        "text": _text(token.id, stream),
        "drafter": token.drafter,
        "depth": token.depth,
        "logprob": _finite(token.logprob),
        "special": stream.special(token.id),
    }


def _with_logprob(token: Token, stream: ServerStream) -> Json:
    top = [_piece_of(id, logprob, stream) for id, logprob in token.top]
    return {**_piece_of(token.id, token.logprob, stream), "top_logprobs": top}


def _piece_of(id: int, logprob: float | None, stream: ServerStream) -> Json:
    return {"token": _text(id, stream), "logprob": _finite(logprob), "bytes": list(stream.piece(id))}


def _text(id: int, stream: ServerStream) -> str:
    return stream.piece(id).decode(errors="replace")


def _key(id: int, stream: ServerStream) -> str:
    """Parts of characters look alike as text, so they are told apart by their bytes, as OpenAI writes them."""
    piece = stream.piece(id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes this for what can never be."""
    return logprob if logprob is None else max(logprob, -9999.0)
