"""Hermes and Qwen: each call between tags.

<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
"""

from __future__ import annotations

from outrider.server.tools.base import ToolFormat, literal

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD = '\n{"name": "'
OTHER = "<function="  # what newer Qwen models write between the same tags, which is no JSON


class HermesFormat(ToolFormat):
    def fits(self, template: str) -> bool:
        return BEGIN in template and "tools" in template and OTHER not in template

    def rules(self, several: bool) -> list[str]:
        more = f"({literal(chr(10) + BEGIN)} call)*" if several else ""
        return [f"calls: call {more}", f"call: {literal(HEAD)} pick {literal('}' + chr(10) + END)}"]


HERMES = HermesFormat("hermes", BEGIN)
