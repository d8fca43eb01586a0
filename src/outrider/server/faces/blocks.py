"""An answer as the blocks that other APIs than OpenAI's chat have: reasoning, text and calls, one after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.request import Result
from outrider.server.faces.asking import Json
from outrider.server.faces.measured import measured
from outrider.server.faces.openai_bodies import ChatBody
from outrider.server.faces.tool_calls import CallWriter
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.responses import checked
from outrider.server.tools import Dialect

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    kind: Kind
    index: int
    id: str = ""  # of a call
    name: str = ""  # of the tool that is called
    text: str = ""  # so far; of a call: its arguments
    over: bool = False  # nothing can be added to it


@dataclass(frozen=True)
class BlockNews:
    what: Literal["begin", "delta", "end"]
    block: Block
    text: str = ""  # what is new
    last: bool = False  # the answer ends with it


class BlockReader:
    """The blocks of one answer, as its text comes."""

    def __init__(self, body: ChatBody, dialect: Dialect) -> None:
        self._calls = CallWriter(body, dialect)
        self.blocks: list[Block] = []

    def read(self, text: str, last: bool) -> list[BlockNews]:
        """`last`: no text follows; an answer of nothing is then one empty text."""
        return [*self._news(self._calls.read(text, last)), *(self._ending() if last else ())]

    def finish(self, reason: str) -> str:
        """As OpenAI's chat has it: stop, length, tool_calls."""
        return self._calls.finish("stop" if reason == "cancelled" else reason) or reason

    def _news(self, said: Mapping[str, Any]) -> Iterator[BlockNews]:
        kinds: tuple[tuple[str, Kind], ...] = (("reasoning_content", "reasoning"), ("content", "text"))
        for key, kind in kinds:
            if key in said:
                yield from self._begin(kind)
                yield self._delta(said[key])
        for call in said.get("tool_calls", ()):
            if "id" in call:
                yield from self._begin("call", call["id"], call["function"]["name"])
            if call["function"]["arguments"]:
                yield self._delta(call["function"]["arguments"])

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Iterator[BlockNews]:
        """A new block, unless the last one is of that kind and goes on."""
        if self.blocks and self.blocks[-1].kind == kind != "call":
            return
        yield from self._end()
        self.blocks.append(Block(kind, len(self.blocks), id, name))
        yield BlockNews("begin", self.blocks[-1])

    def _delta(self, text: str) -> BlockNews:
        self.blocks[-1].text += text
        return BlockNews("delta", self.blocks[-1], text)

    def _end(self, last: bool = False) -> Iterator[BlockNews]:
        if self.blocks and not self.blocks[-1].over:
            self.blocks[-1].over = True
            yield BlockNews("end", self.blocks[-1], last=last)

    def _ending(self) -> Iterator[BlockNews]:
        if not any(block.kind != "reasoning" for block in self.blocks):
            yield from self._begin("text")
        yield from self._end(last=True)


class BlockWriter:
    """How an answer in blocks is written: one choice, whole or as events with types. An API says what each looks like.

    `head` are the events before the first block, `block` those of news about a block, `tail` the last.
    """

    named = True

    def __init__(self, body: ChatBody, stream: ServerStream, dialect: Dialect, timings: bool) -> None:
        """`timings`: of its time and its drafts it tells as other engines do, too."""
        self.streams: Sequence[ServerStream] = [stream]
        self._timings = timings
        self._stream, self._reader, self._dialect = stream, BlockReader(body, dialect), dialect

    def cancel(self) -> None:
        self._stream.cancel()

    def whole(self, results: Sequence[Result]) -> Json:
        (result,) = results
        self._reader.read(result.text, last=True)
        return {**self.answer(result), **self._measured(result)}

    async def events(self) -> AsyncGenerator[Json | str]:
        for event in self.head():
            yield event
        async for chunk in self._stream:
            for news in self._reader.read(chunk.text, last=chunk.finish_reason is not None):
                for event in self.block(news):
                    yield event
        for event in self.tail(checked(await self._stream.result())):
            yield event

    def _measured(self, result: Result) -> Json:
        return measured([result], self._stream, self._timings)

    def reasoning_tokens(self, result: Result) -> int:
        """How many of its tokens are reasoning, the marks around it among them."""
        thinking = self._dialect.thinking
        if thinking is None:
            return 0
        pieces = [self._stream.piece(token.id) for token in result.tokens]
        begin, end = thinking.begin.encode(), thinking.end.encode()
        if not thinking.begun and not b"".join(pieces[: len(begin)]).startswith(begin):
            return 0
        last = b""
        for count, piece in enumerate(pieces, 1):
            if end in last + piece:
                return count
            last = (last + piece)[-len(end) :]
        return len(pieces)

    def answer(self, result: Result) -> Json:
        raise NotImplementedError

    def head(self) -> list[Json]:
        raise NotImplementedError

    def block(self, news: BlockNews) -> list[Json]:
        raise NotImplementedError

    def tail(self, result: Result) -> list[Json]:
        raise NotImplementedError
