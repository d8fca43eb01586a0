"""LoRAX's API: one model, and an adapter that each request chooses: LoRA, or a head that drafts."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from outrider.core.errors import OutriderError
from outrider.core.request import Result, Token
from outrider.server.context import VERSION, ServerContext, server_of
from outrider.server.errors import Bad, ServerError
from outrider.server.faces.adapters import ChosenAdapter, choose, mix
from outrider.server.faces.lorax_bodies import (
    MAX_BEST_OF,
    MAX_STOP,
    LoraxBody,
    LoraxParameters,
    LoraxStreamableBody,
    Unprocessable,
)
from outrider.server.fleet.fleet import Description
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.responses import EventStream, checked, result_of, submit, time_limit
from outrider.server.stops import stop_found

router = APIRouter(tags=["LoRAX"])

Json = dict[str, Any]


@dataclass(frozen=True)
class LoraxCall:
    """A request under way."""

    body: LoraxBody
    stream: ServerStream
    model: str
    seed: int | None


@router.post("/generate")
async def generate(request: HttpRequest, body: LoraxBody) -> Response:
    """The whole answer."""
    answer, headers = await _generate(request, body)
    return JSONResponse(answer, headers=headers)


@router.post("/generate_stream")
async def generate_stream(request: HttpRequest, body: LoraxBody) -> Response:
    """One event per token; the last has the text and the details."""
    body.asked.refuse_for_streams()
    call = await _start(request, body, stream=True)
    headers = _names(call) | {"x-compute-characters": str(len(body.inputs))}
    return EventStream(request, call.stream, _events(call), headers)


@router.post("/", response_model=None)
async def compat_generate(request: HttpRequest, body: LoraxStreamableBody) -> Response:
    """Either of the two, by `stream`; the whole answer comes in a list of one."""
    if body.stream:
        return await generate_stream(request, body)
    answer, headers = await _generate(request, body)
    return JSONResponse([answer], headers=headers)


@router.get("/info")
async def info(request: HttpRequest) -> Json:
    """What is served."""
    model = _model(server_of(request))
    settings, context = model.spec.settings, model.info.get("context", 0)
    return {
        "model_id": settings.model,
        "model_sha": None,
        "model_dtype": settings.dtype,
        "model_device_type": settings.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": settings.max_batch + server_of(request).fleet.limits.queue,
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOP,
        "max_input_length": max(context - 1, 0),
        "max_total_tokens": context,
        "draft": settings.drafter,
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


def _model(server: ServerContext) -> Description:
    """LoRAX's requests name no model: of several they mean the first, which is the command's own."""
    launched = server.fleet.list()
    return launched[0] if launched else server.fleet.describe()


async def _generate(request: HttpRequest, body: LoraxBody) -> tuple[Json, dict[str, str]]:
    call = await _start(request, body)
    result = await result_of(request, call.stream)
    best, *others = sorted(result.samples, key=_mean_logprob, reverse=True)
    answer: Json = {"generated_text": _whole_text(call, best)}
    if body.asked.wants_details:
        answer["details"] = _details(call, best)
        if others:
            answer["details"]["best_of_sequences"] = [_sequence(call, other) for other in others]
    return answer, _headers(call, best)


async def _start(request: HttpRequest, body: LoraxBody, stream: bool = False) -> LoraxCall:
    server, asked = server_of(request), body.asked
    asked.refuse()
    model = _model(server)
    async with time_limit(request):
        chosen = await _chosen(server, model, asked)
    seed, clip = asked.chosen_seed(), asked.max_new_tokens is None
    try:
        wanted = body.request(seed, chosen, stream)
        running = await submit(request, model.uid, wanted, pieces=True, clip=clip, truncate=asked.truncate or 0)
    except ServerError:
        raise
    except OutriderError as error:
        raise (Unprocessable if chosen == ChosenAdapter() else Bad)(str(error)) from error
    return LoraxCall(body, running, model.spec.settings.model, seed if asked.samples else None)


async def _chosen(server: ServerContext, model: Description, asked: LoraxParameters) -> ChosenAdapter:
    merged = asked.merged_adapters
    if merged is None:
        return await choose(server, model, asked.adapter_id, asked.adapter_source)
    return await mix(server, model, merged.ids, asked.adapter_source, **merged.how())


async def _events(call: LoraxCall) -> AsyncGenerator[Json]:
    """An event per token; the last waits for the result."""
    texts, last = _Texts(call), None
    async for chunk in call.stream:
        over = chunk.finish_reason is not None
        shown = _tokens(call, chunk.tokens, texts, over)
        if over and shown:
            last = shown.pop()
        for token in shown:
            yield {"token": token, "generated_text": None, "details": None}
    result = checked(await call.stream.result())
    details = _counts(call, result) if call.body.asked.details else None
    if last is not None:
        yield {"token": last, "generated_text": _whole_text(call, result), "details": details}


class _Texts:
    """The text that each token adds: a character that several tokens make up comes with its last."""

    def __init__(self, call: LoraxCall) -> None:
        self._call = call
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, token: Token, last: bool) -> str:
        return self._decoder.decode(self._call.stream.piece(token.id), last)


def _token(call: LoraxCall, token: Token, text: str) -> Json:
    shown: Json = {"id": token.id, "text": text, "logprob": token.logprob, "special": call.stream.special(token.id)}
    if call.body.asked.return_k_alternatives:
        shown["alternative_tokens"] = [
            {"id": id, "text": _text(call, id), "logprob": logprob} for id, logprob in token.top
        ]
    return shown


def _text(call: LoraxCall, id: int) -> str:
    return call.stream.piece(id).decode("utf-8", "replace")


def _tokens(call: LoraxCall, tokens: Sequence[Token], texts: _Texts, over: bool = True) -> list[Json]:
    """`over`: nothing follows them."""
    ends = len(tokens) - 1 if over else -1
    return [_token(call, token, texts(token, place == ends)) for place, token in enumerate(tokens)]


def _finish(call: LoraxCall, result: Result) -> str:
    if result.finish_reason == "stop":
        ended = not call.body.asked.stop or call.stream.special(result.tokens[-1].id)
        return "eos_token" if ended else "stop_sequence"
    return "length"


def _whole_text(call: LoraxCall, result: Result) -> str:
    """With the stop sequence, as LoRAX gives it, and after the prompt where that is wanted."""
    text = result.text
    if _finish(call, result) == "stop_sequence":
        text += stop_found(result, call.stream, call.body.asked.stop) or ""
    return call.body.inputs + text if call.body.asked.return_full_text else text


def _counts(call: LoraxCall, result: Result) -> Json:
    return {
        "finish_reason": _finish(call, result),
        "prompt_tokens": len(result.prompt_token_ids),
        "generated_tokens": len(result.tokens),
        "skipped_tokens": result.stats.accepted,
        "seed": call.seed,
    }


def _details(call: LoraxCall, result: Result) -> Json:
    return {
        **_counts(call, result),
        "prefill": _prefill(call, result),
        "tokens": _tokens(call, result.tokens, _Texts(call)),
    }


def _prefill(call: LoraxCall, result: Result) -> list[Json]:
    """The prompt's tokens. Their log-probabilities are not computed, and null says so."""
    if not call.body.asked.decoder_input_details:
        return []
    return [{"id": id, "text": _text(call, id), "logprob": None} for id in result.prompt_token_ids]


def _sequence(call: LoraxCall, result: Result) -> Json:
    details = _details(call, result)
    del details["prompt_tokens"]
    return {"generated_text": _whole_text(call, result), **details}


def _mean_logprob(result: Result) -> float:
    return sum(token.logprob or 0.0 for token in result.tokens) / max(len(result.tokens), 1)


def _headers(call: LoraxCall, result: Result) -> dict[str, str]:
    milliseconds = 1000 * (time.perf_counter() - call.stream.begun)
    prompt, written = len(result.prompt_token_ids), len(result.tokens)
    counts = {
        "x-compute-characters": len(call.body.inputs),
        "x-compute-time": round(milliseconds),
        "x-total-time": round(milliseconds),
        "x-prompt-tokens": prompt,
        "x-generated-tokens": written,
        "x-skipped-tokens": result.stats.accepted,
        "x-total-tokens": prompt + written,
        "x-time-per-token": round(milliseconds / max(written, 1)),
    }
    return _names(call) | {name: str(count) for name, count in counts.items()}


def _names(call: LoraxCall) -> dict[str, str]:
    named = {"x-model-id": call.model, "x-adapter-id": call.body.asked.adapter_id}
    return {name: _header(value) for name, value in named.items() if value}


def _header(value: str) -> str:
    """What a header can carry."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in value)
