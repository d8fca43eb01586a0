"""Anthropic's Messages API, over the same request as OpenAI's chat."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request as HttpRequest, Response
from fastapi.responses import JSONResponse

from outrider.core.request import Result
from outrider.server.context import id_of, server_of
from outrider.server.faces.anthropic_bodies import AnthropicBody
from outrider.server.faces.asking import Json, converse, respond
from outrider.server.faces.blocks import Block, BlockNews, BlockWriter
from outrider.server.faces.chat_form import ChatForm
from outrider.server.fleet.supervisor import ServerStream
from outrider.server.stops import stop_found
from outrider.server.tools import Dialect

router = APIRouter(prefix="/v1", tags=["anthropic"])
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
CALL_DELTA = ("input_json_delta", "partial_json")


@router.post("/messages", response_class=JSONResponse)
async def messages(request: HttpRequest, body: AnthropicBody) -> Response:
    """Answer a conversation."""
    form = body.as_chat()
    with form.in_its_words():
        stream, dialect = await converse(request, form.chat, pieces=True, check=body.check)
    return await respond(request, bool(body.stream), MessagesWriter(request, body, form, stream, dialect))


class MessagesWriter(BlockWriter):
    def __init__(
        self, request: HttpRequest, body: AnthropicBody, form: ChatForm, stream: ServerStream, dialect: Dialect
    ) -> None:
        super().__init__(form.chat, stream, dialect, server_of(request).options.timings)
        self._stops = body.stop_sequences or []
        self._id = f"msg_{id_of(request)}"

    def answer(self, result: Result) -> Json:
        content = [_block(block) for block in self._reader.blocks if block.text or block.name]
        return {**self._message(), "content": content, **self._ending(result), "usage": self._usage(result)}

    def head(self) -> list[Json]:
        """All tokens of the prompt; which of them came from the cache is told with the end."""
        usage = {"input_tokens": self._stream.prompt_tokens, "output_tokens": 0}
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": {**self._message(), **nothing}}]

    def block(self, news: BlockNews) -> list[Json]:
        block, index = news.block, news.block.index
        if news.what == "begin":
            empty = _block(Block(block.kind, index, block.id, block.name))
            return [{"type": "content_block_start", "index": index, "content_block": empty}]
        if news.what == "end":
            return [{"type": "content_block_stop", "index": index}]
        kind, key = DELTAS.get(block.kind, CALL_DELTA)
        return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, key: news.text}}]

    def tail(self, result: Result) -> list[Json]:
        more = {"usage": self._usage(result), **self._measured(result)}
        return [{"type": "message_delta", "delta": self._ending(result), **more}, {"type": "message_stop"}]

    def _message(self) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._stream.model}

    def _ending(self, result: Result) -> Json:
        reason = self._reader.finish(result.finish_reason)
        stop = stop_found(result, self._stream, self._stops) if reason == "stop" else None
        return {"stop_reason": REASONS[reason] if stop is None else "stop_sequence", "stop_sequence": stop}

    def _usage(self, result: Result) -> Json:
        """Anthropic counts what came from the cache apart."""
        cached = result.stats.cached
        return {
            "input_tokens": len(result.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(result.token_ids),
        }


def _block(block: Block) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _arguments(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _arguments(text: str) -> Any:
    """A limit or a stop sequence may have cut them off; `stop_reason` says so."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}
