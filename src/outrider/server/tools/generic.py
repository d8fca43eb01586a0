"""Models whose template knows no tools: these are described in the system message, and calls are as in Hermes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.request import Message
from outrider.server.tools.base import Tool
from outrider.server.tools.hermes import BEGIN, END, HermesFormat

INSTRUCTIONS = """\
# Tools

You may call one or more functions to help with the user's query. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each function call, write a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-as-JSON>}}
</tool_call>"""


class GenericFormat(HermesFormat):
    def fits(self, template: str) -> bool:
        return True

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Calls and results as text; results that follow each other are one message, for turns alternate."""
        said: list[Message] = []
        for message in messages:
            plain = _as_text(message)
            if _is_result(message) and said and _is_answered(said[-1]):
                plain = {**plain, "content": f"{said.pop()['content']}\n{plain['content']}"}
            said.append(plain)
        return _with_instructions(said, tools) if tools else said


def _is_result(message: Message) -> bool:
    return bool(message["role"] == "tool")


def _is_answered(message: Message) -> bool:
    return bool(message["role"] == "user" and str(message["content"]).endswith("</tool_response>"))


def _as_text(message: Message) -> Message:
    if _is_result(message):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(f"{BEGIN}\n{_call(call['function'])}\n{END}" for call in message["tool_calls"])
    content = "\n".join(filter(None, (message["content"], calls)))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _with_instructions(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


GENERIC = GenericFormat("generic", BEGIN, takes_tools=False)
