"""ToolFormat: how a family of models writes calls of tools. Each file beside this one is such a format."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.request import Message

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
ID_BYTES = 12  # random bytes of a call's id: no two of a conversation are ever equal


@dataclass(frozen=True)
class ToolFormat:
    """A call is `{"name": "...", "arguments": {...}}` in every format; what is around it differs."""

    name: str
    trigger: str  # the text, or the special token, that begins a call
    key: str = "arguments"
    only_first: bool = False  # the trigger counts only where the answer begins
    takes_tools: bool = True  # the model's template writes tools, calls and results itself

    def fits(self, template: str) -> bool:
        """Whether a model with this chat template writes calls so."""
        raise NotImplementedError

    def rules(self, several: bool) -> list[str]:
        """Rules of a grammar: `calls` is what follows the trigger. `pick` is a call from its name on, up to the end of
        the arguments. `several`: one call may follow the other."""
        raise NotImplementedError

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(ID_BYTES)}"

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """As the template is to read them."""
        return list(messages)


def literal(text: str) -> str:
    """Text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Text inside of an expression of a grammar."""
    return re.escape(text).replace("/", r"\/")


def template_of(tokenizer: Any) -> str:
    """A folder may have several templates: the one for tools is used where there are tools."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return str(found.get("tool_use", found.get("default", "")) if isinstance(found, dict) else found)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that are no text, by their names."""
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return {str(token.content): id for id, token in added.items() if token.special}
