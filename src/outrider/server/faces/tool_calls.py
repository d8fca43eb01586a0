"""CallWriter: the text of a choice as OpenAI's messages and deltas have it: words, reasoning and calls of tools."""

from __future__ import annotations

from typing import Any

from outrider.server.faces.tool_fields import ToolFields
from outrider.server.tools import Dialect
from outrider.server.tools.parser import CallDelta, CallParser
from outrider.server.tools.reasoning import ReasoningParser


class CallWriter:
    """Of one choice. Where the model does not think and no tool can be called, all text is content."""

    def __init__(self, body: ToolFields, model: Dialect) -> None:
        self._format = model.format
        only_first = model.format.only_first or body.constraint() is not None
        self._reasoning = None if model.thinking is None else ReasoningParser(model.thinking)
        self._parser = CallParser(model.format, only_first) if body.shown_tools() else None

    def read(self, text: str, last: bool) -> dict[str, Any]:
        """What new text adds: `reasoning_content`, `content`, `tool_calls`, any or none of them. `last`: no text
        follows."""
        thought, text = ("", text) if self._reasoning is None else self._reasoning.feed(text, last)
        words, deltas = (text, []) if self._parser is None else self._parser.feed(text, last)
        calls = [self._call(delta) for delta in deltas]
        said = {"reasoning_content": thought, "content": words, "tool_calls": calls}
        return {name: value for name, value in said.items() if value}

    def message(self, text: str) -> dict[str, Any]:
        """All of it at once."""
        said = self.read(text, last=True)
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in said.get("tool_calls", ())]
        message = {"role": "assistant", "content": said.get("content", None if calls else ""), "refusal": None}
        if self._reasoning is not None:
            message["reasoning_content"] = said.get("reasoning_content")
        return {**message, "tool_calls": calls} if calls else message

    def finish(self, reason: str | None) -> str | None:
        called = self._parser is not None and self._parser.called
        return "tool_calls" if reason == "stop" and called else reason

    def _call(self, delta: CallDelta) -> dict[str, Any]:
        if not delta.name:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        function = {"name": delta.name, "arguments": delta.arguments}
        return {"index": delta.index, "id": self._format.new_id(), "type": "function", "function": function}
