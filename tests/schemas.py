"""Random JSON schemas, small enough that a random model comes to the end of them."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "name", "the sea", "fox", 'x"y', "naïve", "1")
TEXTS = ("red", "blue", "one", "two, three", 'a "quoted" one', "狐", "")
PATTERNS = ("^[ab]{1,3}$", "^(red|blue)$", r"^\d{2}-\d$", "^x?y?z?$", "^fox")
FORMATS = ("date", "uuid", "ipv4")


def schema(seed: int) -> dict[str, Any]:
    luck = random.Random(seed)
    made = _any(luck, depth=2)
    if luck.random() < 0.2:  # the same by reference
        made = {"$ref": "#/$defs/part", "$defs": {"part": made}}
    if luck.random() < 0.2:
        made |= {"title": "T", "description": "no rule", "x-unknown": [1]}
    return made


def _any(luck: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_boolean, _integer, _number, _text, _enum, _const]
    made: dict[str, Any] = luck.choice([*leaves, _array, _object, _object, _either] if depth else leaves)(luck, depth)
    return made


def _boolean(luck: random.Random, depth: int) -> dict[str, Any]:
    return {"type": luck.choice(["boolean", "null"])}


def _integer(luck: random.Random, depth: int) -> dict[str, Any]:
    low = luck.randrange(-200, 200)
    made: dict[str, Any] = {"type": "integer", luck.choice(["minimum", "exclusiveMinimum"]): low}
    if luck.random() < 0.3:
        made["multipleOf"] = luck.choice([2, 5])
        made["maximum"] = low + 50
        return made
    return made | {luck.choice(["maximum", "exclusiveMaximum"]): low + luck.randrange(3, 5000)}


def _number(luck: random.Random, depth: int) -> dict[str, Any]:
    low = luck.choice([-1.5, 0, 0.25, 10])
    return {"type": "number", "minimum": low, "maximum": low + luck.choice([0.5, 1, 100])}


def _text(luck: random.Random, depth: int) -> dict[str, Any]:
    kind = luck.randrange(3)
    if kind == 0:
        low = luck.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + luck.randrange(4)}
    return {"type": "string"} | (
        {"pattern": luck.choice(PATTERNS[:4])} if kind == 1 else {"format": luck.choice(FORMATS)}
    )


def _enum(luck: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": luck.sample([*TEXTS, 1, 2.5, None, True, [1, 2], {"a": "b"}], luck.randrange(1, 5))}


def _const(luck: random.Random, depth: int) -> dict[str, Any]:
    return {"const": luck.choice([*TEXTS, 7, None, [True], {"a": {}}])}


def _array(luck: random.Random, depth: int) -> dict[str, Any]:
    low = luck.randrange(3)
    made = {"type": "array", "items": _any(luck, depth - 1), "minItems": low, "maxItems": low + luck.randrange(3)}
    if luck.random() < 0.3:
        made["prefixItems"] = [_any(luck, 0)]
    return made


def _object(luck: random.Random, depth: int) -> dict[str, Any]:
    names = luck.sample(NAMES, luck.randrange(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _any(luck, depth - 1) for name in names}}
    made["required"] = [name for name in names if luck.random() < 0.6]
    made["additionalProperties"] = luck.choice([False, False, {"type": "boolean"}])
    return made


def _either(luck: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(luck, depth - 1) for _ in range(luck.randrange(1, 4))]}
