"""Grammars in llguidance's kind of Lark, as text; without torch, for servers write them too."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from outrider.core.grammar_spec import GrammarSpec

# The tokens of a text that must follow are the target's choice too. llguidance would choose them itself, and its masks
# would then depend on more than the bytes of tokens.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
# A schema's own x-guidance could say that keywords are to be ignored.
_STRICT: Any = {"lenient": False, "coerce_one_of": False}


def llguidance() -> Any:
    """The library, which most runs never need."""
    return import_module("llguidance")


def as_lark(spec: GrammarSpec) -> str:
    """The grammar in llguidance's kind of Lark, with the options under which masks depend on bytes alone."""
    return (spec.text if spec.parameter == "grammar" else lark_rule(spec, "start")) + _NO_FORCING


def lark_rule(spec: GrammarSpec, name: str) -> str:
    """Anything but a whole grammar as one rule, in one line."""
    if spec.parameter == "choice":
        return f"{name}: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
    if spec.parameter == "regex":
        return f"{name}: /{llguidance().regex_to_lark(spec.text, '')}/"
    schema = json.loads(spec.text)
    given = schema.get("x-guidance")
    schema["x-guidance"] = {**(given if isinstance(given, dict) else {}), **_STRICT}
    return f"{name}: %json {json.dumps(schema, ensure_ascii=False)}"
