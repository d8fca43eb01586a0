"""Random JSON schemas: small ones, which even a random model comes to the end of, and a collection of 2,000 different
ones of all that schemas are made of. All of them are our own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
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


THINGS = ("a person", "an order", "a book", "a city", "a recipe", "a sensor", "a ticket", "a route", "a bill", "a song")
FIELDS = (
    *(
        "name",
        "id",
        "kind",
        "price",
        "tags",
        "owner",
        "size",
        "notes",
        "when",
        "place",
        "count",
        "rate",
        "code",
        "parts",
    ),
    *("first name", "e-mail", "größe", "x-y", "is_open", "2nd", "url", "status", "score", "parent", "items", "meta"),
)
WORDS = ("red", "green", "small", "large", "open", "closed", "new", "used", "north", "south", "kg", "lb", "café", "a b")
MORE_PATTERNS = (
    *("^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$", r"^\d{1,3}(\.\d{2})?$", "^[^aeiou]{2,5}$"),
    *(r"^v[0-9]{1,2}\.[0-9]$", "^[a-z]{1,9}(_[a-z]{1,4}){0,2}$", "^(mon|tue)(day)?$", "^$|^-$", "^[à-ÿ]{1,3}$"),
)
MORE_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "duration")


def collection(count: int = 2000) -> Iterator[tuple[str, dict[str, Any]]]:
    """So many different schemas, each with the name of what it describes."""
    seen: set[str] = set()
    for seed in range(10 * count):
        luck = random.Random(f"collection {seed}")
        made = _root(luck)
        text = json.dumps(made, sort_keys=True)
        if text in seen:
            continue
        seen.add(text)
        yield luck.choice(THINGS), made
        if len(seen) == count:
            return


def _root(luck: random.Random) -> dict[str, Any]:
    kinds = (_record, _record, _record, _record, _union, _merged, _mapping, _list, _chain, _leaf)
    made = luck.choice(kinds)(luck, luck.randrange(1, 3))
    if luck.random() < 0.15 and "$defs" not in made:
        made = {"$defs": {"whole": made}, "$ref": "#/$defs/whole"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made} if luck.random() < 0.2 else made


def _part(luck: random.Random, depth: int) -> dict[str, Any]:
    kinds = (_leaf, _leaf, _leaf, _list, _record, _union, _mapping, _tuple) if depth else (_leaf,)
    made = luck.choice(kinds)(luck, depth - 1)
    return {"description": f"{luck.choice(WORDS)} or not", **made} if luck.random() < 0.1 else made


def _leaf(luck: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = luck.choice((_words, _words, _number_of, _number_of, _shaped, _values, _fixed, _maybe))(luck)
    return made


def _words(luck: random.Random) -> dict[str, Any]:
    low = luck.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + luck.randrange(1, 14)}


def _number_of(luck: random.Random) -> dict[str, Any]:
    low, span = luck.choice([-100, -1, 0, 1, 18, 1000, -0.5, 2.25]), luck.choice([1, 9, 50, 10_000])
    kind = luck.choice(["integer", "number"]) if isinstance(low, int) else "number"
    made: dict[str, Any] = {"type": kind, luck.choice(["minimum", "exclusiveMinimum"]): low}
    made[luck.choice(["maximum", "exclusiveMaximum"])] = low + span + 1
    return made | (
        {"multipleOf": luck.choice([2, 5])} if kind == "integer" and span > 9 and luck.random() < 0.3 else {}
    )


def _shaped(luck: random.Random) -> dict[str, Any]:
    if luck.random() < 0.5:
        return {"type": "string", "format": luck.choice(MORE_FORMATS)}
    return {"type": "string", "pattern": luck.choice(MORE_PATTERNS)}


def _values(luck: random.Random) -> dict[str, Any]:
    found = luck.sample([*WORDS, 0, 1, 7.5, -3, None, True, False, ["a", 1], {"k": "v"}], luck.randrange(2, 6))
    return {"enum": found}


def _fixed(luck: random.Random) -> dict[str, Any]:
    return {"const": luck.choice([*WORDS, 42, 0.5, None, False, [], {}, ["x", {"y": [1, 2]}], {"deep": {"er": None}}])}


def _maybe(luck: random.Random) -> dict[str, Any]:
    """Nullable, in the two ways in which people write it."""
    kind: dict[str, Any] = luck.choice([{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 99}])
    if luck.random() < 0.5:
        return {**kind, "type": [kind["type"], "null"]}
    return {"anyOf": [kind, {"type": "null"}]}


def _list(luck: random.Random, depth: int) -> dict[str, Any]:
    low = luck.randrange(3)
    return {"type": "array", "items": _part(luck, depth), "minItems": low, "maxItems": low + luck.randrange(1, 3)}


def _tuple(luck: random.Random, depth: int) -> dict[str, Any]:
    parts = [_leaf(luck, 0) for _ in range(luck.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _record(luck: random.Random, depth: int) -> dict[str, Any]:
    names = luck.sample(FIELDS, luck.randrange(1, 5))
    made: dict[str, Any] = {"type": "object", "properties": {name: _part(luck, depth) for name in names}}
    made["required"] = [name for name in names if luck.random() < 0.7]
    more = luck.random()
    if more < 0.8:
        return made | {"additionalProperties": False}
    if more < 0.82:  # a bound beside properties that may be left out cannot be expressed, and is refused
        return made | {"maxProperties": len(names)}
    kind = {"type": "boolean"} if more < 0.9 else _words(luck)
    return made | {"required": names, "additionalProperties": kind, "maxProperties": len(names) + 1}


def _mapping(luck: random.Random, depth: int) -> dict[str, Any]:
    """Objects whose keys are open."""
    made: dict[str, Any] = {"type": "object", "minProperties": luck.randrange(2), "maxProperties": 3}
    if luck.random() < 0.5:
        return made | {"additionalProperties": _leaf(luck, 0)}
    return made | {"patternProperties": {"^[a-z]{1,4}$": _leaf(luck, 0)}, "additionalProperties": False}


def _union(luck: random.Random, depth: int) -> dict[str, Any]:
    if luck.random() < 0.5:
        return {"anyOf": [_part(luck, depth) for _ in range(luck.randrange(2, 4))]}
    kinds = luck.sample(WORDS, 2)  # told apart by a tag, so that exactly one fits
    parts = [{"type": "object", "properties": {"type": {"const": kind}, "v": _leaf(luck, 0)}} for kind in kinds]
    return {"oneOf": [{**part, "required": ["type", "v"], "additionalProperties": False} for part in parts]}


def _merged(luck: random.Random, depth: int) -> dict[str, Any]:
    first, second = luck.sample(FIELDS, 2)
    parts = [{"type": "object", "properties": {name: _leaf(luck, 0)}, "required": [name]} for name in (first, second)]
    return {"allOf": parts, "maxProperties": 2}


def _chain(luck: random.Random, depth: int) -> dict[str, Any]:
    """A part that refers to itself."""
    name = luck.choice(FIELDS)
    more = {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}
    link = {"type": "object", "properties": {name: _leaf(luck, 0), "next": more}, "required": [name, "next"]}
    return {"$ref": "#/$defs/link", "$defs": {"link": {**link, "additionalProperties": False}}}
