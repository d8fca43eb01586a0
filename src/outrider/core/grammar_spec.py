"""GrammarSpec: which text an answer may be, as a plain value. Checked when it is made; nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import OutriderError, one_line, quoted

# Characters of a grammar. This many hold an object of 4,500 properties, which takes 2 s to compile, and the time grows
# with their square; nested parts recurse to a depth that the stack of the compiling thread has memory for.
LONGEST = 1 << 17
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class GrammarSpec:
    """What is allowed, as text, and which of the sampling parameters said so."""

    parameter: str  # json_schema, json_object, regex, choice or grammar
    text: str  # JSON for the first two and for choice


def grammar_spec(json_schema: Any, json_object: Any, regex: Any, choice: Any, grammar: Any) -> GrammarSpec | None:
    """Of the parameters of these names; None: the text is free. An OutriderError says what is wrong with one."""
    if not isinstance(json_object, bool):
        raise OutriderError(f"json_object must be true or false, not {quoted(json_object)}")
    given = {"json_schema": json_schema, "regex": regex, "choice": choice, "grammar": grammar}
    named = [name for name, value in given.items() if value is not None] + ["json_object"] * json_object
    if len(named) > 1:
        raise OutriderError(f"{' and '.join(named)} cannot be given together; one of them says what the text may be")
    if not named:
        return None
    (name,) = named
    if name == "json_object":
        return GrammarSpec(name, ANY_OBJECT)
    readers = {"json_schema": _schema, "regex": _text, "choice": _choice, "grammar": _text}
    text = readers[name](name, given[name])
    _check_size(name, text)
    return GrammarSpec(name, text)


def _schema(name: str, schema: Any) -> str:
    """JSON text of the schema, in the order of its properties, in which they are written too."""
    try:
        if isinstance(schema, str):
            _check_size(name, schema)
            schema = json.loads(schema)
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise OutriderError(f"{name} is no JSON ({reason}); give a JSON schema, such as {ANY_OBJECT}") from None
    if not isinstance(schema, Mapping):
        raise OutriderError(f"{name} must be a JSON object, such as {ANY_OBJECT}, not {quoted(schema)}")
    return text


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise OutriderError(f"{name} must be text that is not empty, not {quoted(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OutriderError(f"{name} has half a character in it (a lone surrogate); write it as UTF-8") from None
    return value


def _choice(name: str, choice: Any) -> str:
    texts = list(choice) if isinstance(choice, Iterable) and not isinstance(choice, str | Mapping) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise OutriderError(f"{name} must be a list of texts that are not empty, not {quoted(choice)}")
    return json.dumps([_text(name, text) for text in texts], ensure_ascii=False)


def _check_size(name: str, text: str) -> None:
    if len(text) > LONGEST:
        raise OutriderError(f"{name} has {len(text):,} characters; at most {LONGEST:,} can be used")
