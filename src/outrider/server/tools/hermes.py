"""Hermes and Qwen: each call between tags.

<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
"""

from __future__ import annotations

import re

from outrider.server.tools.base import ToolFormat, literal

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD = '\n{"name": "'
# What the template tells the model to write. Others have the same tags around another form, such as <function=...>.
TOLD = re.compile(r'\\?"name\\?": .*\\?"arguments\\?": ', re.S)


class HermesFormat(ToolFormat):
    def fits(self, template: str) -> bool:
        return BEGIN in template and TOLD.search(template) is not None

    def rules(self, several: bool) -> list[str]:
        more = f"({literal(chr(10) + BEGIN)} call)*" if several else ""
        return [f"calls: call {more}", f"call: {literal(HEAD)} pick {literal('}' + chr(10) + END)}"]


HERMES = HermesFormat("hermes", BEGIN)
