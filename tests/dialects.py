"""Tiny models whose templates are of other families: they call tools and think in their ways. And tools to call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["red", "blue"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
PARAMETERS = {"add": ADD, "now": NOW}
# As short as a template of each format can be that writes tools, calls and results.
MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments.keys()|list }}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TEMPLATES = {
    "hermes": '{% if tools %}{{ tools|tojson }}<tool_call>{"name": name, "arguments": ...}{% endif %}' + MESSAGES,
    "llama": '{% if tools %}{{ tools|tojson }} {"name": name, "parameters": ...}{% endif %}{# ipython #}' + MESSAGES,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools|tojson }}{% endif %}{# [TOOL_CALLS] #}" + MESSAGES,
}
CONTEXT = 8192  # tokens: those of the tiny model are short, and tools take hundreds of them


def save_dialect(
    original: Path, folder: Path, template: str | None, special: Iterable[str] = (), added: Iterable[str] = ()
) -> Path:
    """The model with a longer context and another template; `special` and `added`: tokens that it has beside its own,
    the first of them no text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(added))
    torch.manual_seed(4)  # of the new tokens' weights: what the model writes must not depend on the tests before
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = template or tokenizer.chat_template
    model.config.max_position_embeddings = CONTEXT
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def without_spaces(folder: Path) -> dict[str, float]:
    """A bias against spaces: a random model would write them without end between the parts of JSON."""
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    return {str(token): -100.0 for text, token in vocabulary.items() if set(text) <= set("ĠĊčĉ")}
