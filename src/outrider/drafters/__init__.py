"""The table of drafters: name -> "module:Class". Other packages add theirs by the entry point `outrider.drafters`."""

from __future__ import annotations

import dataclasses
import typing
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from outrider.core.errors import OutriderError
from outrider.drafters.base import Drafter, Parts

TABLE = {
    "none": "outrider.drafters.base:Drafter",
    "ngram": "outrider.drafters.ngram:Ngram",
    "draft_model": "outrider.drafters.draft_model:DraftModel",
    "prediction": "outrider.drafters.prediction:Prediction",
    "layer_skip": "outrider.drafters.layer_skip:LayerSkip",
    "eagle": "outrider.drafters.eagle.drafter:Eagle",
    "medusa": "outrider.drafters.medusa.drafter:Medusa",
    "oracle": "outrider.drafters.oracle:Oracle",
}


def names() -> list[str]:
    return [*TABLE, *sorted(point.name for point in entry_points(group="outrider.drafters"))]


def find(name: str) -> type[Drafter]:
    place = TABLE.get(name)
    if place is not None:
        module, _, attribute = place.partition(":")
        return typing.cast("type[Drafter]", getattr(import_module(module), attribute))
    for point in entry_points(group="outrider.drafters", name=name):
        return typing.cast("type[Drafter]", point.load())
    raise OutriderError(f"unknown drafter {name!r}; known: {', '.join(names())}")


def build(spec: str, parts: Parts) -> Drafter:
    """The drafter that "NAME" or "NAME:key=value,..." asks for."""
    name, options = parse(spec)
    return find(name)(options, parts)


def parse(spec: str) -> tuple[str, Any]:
    """ "ngram:max_n=4,length=10" -> ("ngram", Ngram.Options(max_n=4, length=10))"""
    name, _, text = spec.strip().partition(":")
    kind = find(name).Options
    types = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        key = key.strip()
        if key not in types:
            raise OutriderError(f"drafter {name} has no option {key!r}; it has: {', '.join(types) or 'none'}")
        if not equals:
            raise OutriderError(f"option {key} of drafter {name} needs a value: {key}=...")
        given[key] = _convert(f"{name}:{key}", types[key], value.strip())
    missing = [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in given]
    if missing:
        raise OutriderError(f"drafter {name} needs {missing[0]}: write {name}:{missing[0]}=...")
    return name, kind(**given)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(where: str, kind: Any, value: str) -> Any:
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        if value not in choices:
            raise OutriderError(f"{where} must be one of {', '.join(choices)}, not {value!r}")
        return value
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise OutriderError(f"{where} must be true or false, not {value!r}")
        return value.lower() in ("true", "1", "yes")
    try:
        return kind(value)
    except ValueError:
        noun = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise OutriderError(f"{where} must be {noun}, not {value!r}") from None
