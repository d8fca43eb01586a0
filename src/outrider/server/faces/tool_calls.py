"""CallWriter: the text of a choice as OpenAI's messages and deltas have it, with `tool_calls`."""

from __future__ import annotations

from typing import Any

from outrider.server.faces.tool_fields import ToolFields
from outrider.server.tools import ModelTools
from outrider.server.tools.parser import CallDelta, CallParser


class CallWriter:
    """Of one choice. Where no tool can be called, all text is content."""

    def __init__(self, body: ToolFields, model: ModelTools) -> None:
        self._format = model.format
        only_first = model.format.only_first or body.constraint() is not None
        self._parser = CallParser(model.format, only_first) if body.shown_tools() else None

    def read(self, text: str, last: bool) -> dict[str, Any]:
        """What new text adds: `content`, `tool_calls`, both or none of them. `last`: no text follows."""
        if self._parser is None:
            return {"content": text} if text else {}
        words, deltas = self._parser.feed(text, last)
        said: dict[str, Any] = {"content": words} if words else {}
        return {**said, "tool_calls": [self._call(delta) for delta in deltas]} if deltas else said

    def message(self, text: str) -> dict[str, Any]:
        """All of it at once."""
        said = self.read(text, last=True)
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in said.get("tool_calls", ())]
        message = {"role": "assistant", "content": said.get("content", None if calls else ""), "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def finish(self, reason: str | None) -> str | None:
        called = self._parser is not None and self._parser.called
        return "tool_calls" if reason == "stop" and called else reason

    def _call(self, delta: CallDelta) -> dict[str, Any]:
        if not delta.name:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"index": delta.index, "id": self._format.new_id(), "type": "function", "function": function}
