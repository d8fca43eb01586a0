"""Mistral: a special token, and then all calls in one list.

[TOOL_CALLS] [{"name": "...", "arguments": {...}}, ...]
"""

from __future__ import annotations

import secrets
import string

from outrider.server.tools.base import ToolFormat, literal

BEGIN, HEAD = "[TOOL_CALLS]", '{"name": "'
OTHER = "[ARGS]"  # newer Mistral models write the name before it, and no list
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # letters of an id: its template takes no other length


class MistralFormat(ToolFormat):
    def fits(self, template: str) -> bool:
        return BEGIN in template and OTHER not in template

    def rules(self, several: bool) -> list[str]:
        more = f"({literal(', ')} call)*" if several else ""
        return [rf"calls: / ?\[/ call {more} {literal(']')}", f"call: {literal(HEAD)} pick {literal('}')}"]

    def new_id(self) -> str:
        return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


MISTRAL = MistralFormat("mistral", BEGIN)
