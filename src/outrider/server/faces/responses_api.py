"""OpenAI's Responses API, over the same request as the chat API. Nothing is kept: each request has the whole
conversation."""

from __future__ import annotations

import itertools
import time
from typing import Any

from fastapi import APIRouter, Request as HttpRequest, Response
from fastapi.responses import JSONResponse

from outrider.core.request import Result
from outrider.server.context import id_of, server_of
from outrider.server.faces.asking import Json, converse, respond
from outrider.server.faces.blocks import Block, BlockNews, BlockWriter
from outrider.server.faces.chat_form import ChatForm
from outrider.server.faces.responses_bodies import ResponsesBody
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.tools import Dialect

router = APIRouter(prefix="/v1", tags=["openai"])
PREFIXES = {"text": "msg", "call": "fc", "reasoning": "rs"}  # of the ids of items
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}  # what the text of an item is called


@router.post("/responses", response_class=JSONResponse)
async def responses(request: HttpRequest, body: ResponsesBody) -> Response:
    """Answer a conversation."""
    form = body.as_chat()
    with form.in_its_words():
        stream, dialect = await converse(request, form.chat, pieces=True)
    return await respond(request, bool(body.stream), ResponsesWriter(request, body, form, stream, dialect))


class ResponsesWriter(BlockWriter):
    def __init__(
        self, request: HttpRequest, body: ResponsesBody, form: ChatForm, stream: ServerStream, dialect: Dialect
    ) -> None:
        super().__init__(form.chat, stream, dialect, server_of(request).options.timings)
        self._body, self._id, self._created = body, id_of(request), int(time.time())
        self._number = itertools.count()  # of the events

    def answer(self, result: Result) -> Json:
        status = "incomplete" if result.finish_reason == "length" else "completed"
        *before, last = self._reader.blocks
        items = [*(self._item(block, "completed") for block in before), self._item(last, status)]
        return {**self._response(status), "output": items, "usage": self._usage(result)}

    def head(self) -> list[Json]:
        begun = {**self._response("in_progress"), "output": [], "usage": None}
        return [self._event(f"response.{what}", response=begun) for what in ("created", "in_progress")]

    def block(self, news: BlockNews) -> list[Json]:
        block = news.block
        if news.what == "delta":
            return [self._event(self._kind(block, "delta"), **self._place(block), delta=news.text)]
        if news.what == "begin":
            added = self._event("response.output_item.added", output_index=block.index, item=self._empty(block))
            return [added, *self._part_event("added", block, "")]
        text = {"arguments" if block.kind == "call" else "text": block.text}
        done = self._event(self._kind(block, "done"), **self._place(block), **text)
        events = [done, *self._part_event("done", block, block.text)]
        # the end of the answer alone tells whether its last item is complete
        return events if news.last else [*events, self._item_event(self._item(block, "completed"), block)]

    def tail(self, result: Result) -> list[Json]:
        answer = {**self.answer(result), **self._measured(result)}
        item = self._item_event(answer["output"][-1], self._reader.blocks[-1])
        return [item, self._event(f"response.{answer['status']}", response=answer)]

    def _item_event(self, item: Json, block: Block) -> Json:
        return self._event("response.output_item.done", output_index=block.index, item=item)

    def _response(self, status: str) -> Json:
        body, cut = self._body, status == "incomplete"
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._stream.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": _plain(body.text and body.text.format) or {"type": "text"}},
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [_plain(tool) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
        }

    def _usage(self, result: Result) -> Json:
        prompt, written = len(result.prompt_token_ids), len(result.token_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": result.stats.cached, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens(result)},
            "total_tokens": prompt + written,
        }

    def _item(self, block: Block, status: str) -> Json:
        item: Json = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            called = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **called}
        parts = [_part(block, block.text)]
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        return {**item, "type": "message", "role": "assistant", "content": parts}

    def _empty(self, block: Block) -> Json:
        """An item that has just begun."""
        item = self._item(Block(block.kind, block.index, block.id, block.name), "in_progress")
        return item if block.kind == "call" else {**item, "content": []}

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        return {**place, "logprobs": []} if block.kind == "text" else place

    def _part_event(self, what: str, block: Block, text: str) -> list[Json]:
        if block.kind == "call":
            return []
        place = {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}
        return [self._event(f"response.content_part.{what}", **place, part=_part(block, text))]

    def _kind(self, block: Block, what: str) -> str:
        return f"response.{PARTS.get(block.kind, 'function_call_arguments')}.{what}"

    def _event(self, type: str, **fields: Any) -> Json:
        return {"type": type, "sequence_number": next(self._number), **fields}


def _part(block: Block, text: str) -> Json:
    part: Json = {"type": PARTS[block.kind], "text": text}
    return {**part, "annotations": [], "logprobs": []} if block.kind == "text" else part


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value
