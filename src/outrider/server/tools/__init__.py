"""How models write what is not plain text: the table of formats of calls, and which one a model has; its reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.tools.base import ToolFormat, special_tokens, template_of
from outrider.server.tools.generic import GENERIC
from outrider.server.tools.hermes import HERMES
from outrider.server.tools.llama import LLAMA
from outrider.server.tools.mistral import MISTRAL
from outrider.server.tools.reasoning import Thinking, describe_thinking

TABLE = (HERMES, MISTRAL, LLAMA, GENERIC)  # the first that fits a template; the last fits every one


@dataclass(frozen=True)
class Dialect:
    """How a model calls tools and thinks."""

    format: ToolFormat
    special: Mapping[str, int]  # the trigger, where it is one special token
    thinking: Thinking | None = None


def describe(tokenizer: Any) -> dict[str, Any]:
    """What the server is told of a model, as plain values."""
    format = next(each for each in TABLE if each.fits(template_of(tokenizer)))
    if format.takes_tools and not _shows_tools(tokenizer):
        format = GENERIC
    special = {text: id for text, id in special_tokens(tokenizer).items() if text == format.trigger}
    return {"format": format.name, "special": special, "thinking": describe_thinking(tokenizer)}


def of(described: Mapping[str, Any] | None) -> Dialect:
    """Back from what `describe` says; None: of a worker that is not ready yet."""
    if described is None:
        return Dialect(GENERIC, {})
    named = {each.name: each for each in TABLE}
    thinking = described["thinking"]
    return Dialect(named[described["format"]], described["special"], None if thinking is None else Thinking(**thinking))


PROBE = "is_it_shown"  # name of the tool by which we see whether a template writes tools into the prompt


def _shows_tools(tokenizer: Any) -> bool:
    """Whether the template writes tools into a prompt: some want them under another name."""
    asked = [{"role": "user", "content": "?"}]
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {"type": "object"}}}
    try:
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, tools=[tool])
    except Exception:  # the template is the model's own code
        return False
    return PROBE in text
