"""How models call tools: the table of formats, and which one a model has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.server.tools.base import ToolFormat
from outrider.server.tools.generic import GENERIC
from outrider.server.tools.hermes import HERMES
from outrider.server.tools.llama import LLAMA
from outrider.server.tools.mistral import MISTRAL

TABLE = (HERMES, MISTRAL, LLAMA, GENERIC)  # the first that fits a template; the last fits every one


@dataclass(frozen=True)
class ModelTools:
    """How a model calls tools."""

    format: ToolFormat
    special: Mapping[str, int]  # the trigger, where it is one special token


def describe(tokenizer: Any) -> dict[str, Any]:
    """What the server is told of a model, as plain values."""
    format = next(each for each in TABLE if each.fits(_template(tokenizer)))
    if format.takes_tools and not _shows_tools(tokenizer):
        format = GENERIC
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    special = {str(token.content): id for id, token in added.items() if token.special}
    return {"format": format.name, "special": {text: id for text, id in special.items() if text == format.trigger}}


def of(described: Mapping[str, Any] | None) -> ModelTools:
    """Back from what `describe` says; None: of a worker that is not ready yet."""
    if described is None:
        return ModelTools(GENERIC, {})
    named = {each.name: each for each in TABLE}
    return ModelTools(named[described["format"]], described["special"])


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


def _template(tokenizer: Any) -> str:
    """A folder may have several templates: the one for tools is used where there are tools."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return str(found.get("tool_use", found.get("default", "")) if isinstance(found, dict) else found)
