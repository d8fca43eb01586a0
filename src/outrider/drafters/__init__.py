"""The table of drafters: name -> "module:Class". Other packages add theirs by the entry point `outrider.drafters`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.core.errors import OutriderError, quoted

if TYPE_CHECKING:  # reading a spec needs no torch
    from outrider.drafters.base import BuildContext, Drafter

# Drafters that other packages refer to by their role.
PLAIN = "none"  # drafts nothing
AUTO = "auto"  # every drafter that fits the target, together: the default
LOOKUP = "ngram"  # copies from the text; needs nothing else
HISTORY = "history"  # copies from what was written before, for other requests
PREDICTION = "prediction"  # drafts the text that the caller expects
GRAMMAR = "grammar"  # drafts what the grammar of a request forces, and nothing for a request without one
DRAFT_MODEL = "draft_model"  # a smaller model that the caller names
TABLE = {
    PLAIN: "outrider.drafters.base:Drafter",
    AUTO: "outrider.drafters.auto:Auto",
    LOOKUP: "outrider.drafters.ngram:Ngram",
    HISTORY: "outrider.drafters.history.drafter:History",
    DRAFT_MODEL: "outrider.drafters.draft_model:DraftModel",
    PREDICTION: "outrider.drafters.prediction:Prediction",
    "layer_skip": "outrider.drafters.layer_skip:LayerSkip",
    "eagle": "outrider.drafters.eagle.drafter:Eagle",
    "block": "outrider.drafters.block.drafter:BlockDrafter",
    "medusa": "outrider.drafters.medusa.drafter:Medusa",
    GRAMMAR: "outrider.drafters.grammar:GrammarDrafter",
    "oracle": "outrider.drafters.oracle:Oracle",
}


MOST_MEMBERS = 8  # drafters in one spec: more than there are kinds, and few enough to ask all of them in every step


def names() -> list[str]:
    return [*TABLE, *sorted(point.name for point in entry_points(group="outrider.drafters"))]


def find(name: str) -> type[Drafter]:
    place = TABLE.get(name)
    if place is not None:
        module, _, attribute = place.partition(":")
        return typing.cast("type[Drafter]", getattr(import_module(module), attribute))
    for point in entry_points(group="outrider.drafters", name=name):
        return typing.cast("type[Drafter]", point.load())
    raise OutriderError(f"unknown drafter {quoted(name)}; known: {', '.join(names())}")


class DrafterSpec(NamedTuple):
    """A drafter and its options, typed: what `NAME:key=value,...` and the options of a request are read into."""

    name: str  # of several drafters: their names, with + between
    options: Any  # of the drafter's class Options; of several drafters: CombinedOptions

    @property
    def members(self) -> tuple[DrafterSpec, ...]:
        """The drafters that are asked; of most specs one."""
        return self.options.members if isinstance(self.options, CombinedOptions) else (self,)

    def text(self) -> str:
        """As one writes it: NAME or NAME:key=value,..., several with + between; read again it is an equal spec."""
        if len(self.members) > 1:
            return "+".join(member.text() for member in self.members)
        fields = dataclasses.fields(self.options)
        values = {field.name: getattr(self.options, field.name) for field in fields}
        changed = {field.name: values[field.name] for field in fields if values[field.name] != field.default}
        return ":".join(filter(None, (self.name, ",".join(f"{key}={_written(key, changed[key])}" for key in changed))))


@dataclasses.dataclass(frozen=True)
class CombinedOptions:
    """Several drafters that guess together, each with its own options."""

    members: tuple[DrafterSpec, ...]


def fetch(spec: DrafterSpec, context: BuildContext) -> None:
    """What building its drafters in this context takes from files and the network."""
    for name, options in spec.members:
        find(name).fetch(options, context)


def build(spec: str | DrafterSpec, context: BuildContext) -> Drafter:
    """The drafter that a spec asks for, parsed or not."""
    spec = parse(spec) if isinstance(spec, str) else spec
    from outrider.drafters.combined import Combined
    from outrider.drafters.rounds.writer import round_writer

    built = [find(name).build(options, context) for name, options in spec.members]
    members = [member for each in built for member in each.members]
    drafter = built[0] if len(built) == 1 else Combined(spec.name, members)
    drafter.writer = round_writer(context.target, drafter.guessers)
    return drafter


def parse(spec: str) -> DrafterSpec:
    """ "ngram:max_n=4,length=10" -> ("ngram", Ngram.Options(max_n=4, length=10)); "a+b": both, as one spec."""
    return combine([_parsed(member) for member in split_members(spec)])


def _parsed(spec: str) -> DrafterSpec:
    name, values = split(spec)
    return DrafterSpec(name, read_options(name, find(name).Options, values, convert=True))


def combine(members: Sequence[DrafterSpec]) -> DrafterSpec:
    """The spec of drafters that guess together, or of the only one; an OutriderError says why they cannot."""
    if len(members) == 1:
        return members[0]
    known = [member.name for member in members]
    for name in known:
        if known.count(name) > 1:
            raise OutriderError(f"the drafter {name} is named twice; leave out one of them")
        if name == PLAIN:
            raise OutriderError(f"the drafter {PLAIN} drafts nothing, so it goes with no other; leave it out")
        if name == AUTO:
            raise OutriderError(f"the drafter {AUTO} already asks every drafter that fits; name it alone")
    return DrafterSpec("+".join(known), CombinedOptions(tuple(members)))


def kinds(spec: str | DrafterSpec) -> tuple[type[Drafter], ...]:
    """The classes of the drafters that a spec, or a name, asks for or may ask for."""
    if isinstance(spec, str):
        named = [split(member)[0] for member in split_members(spec)]
    else:
        named = [member.name for member in spec.members]
    found = map(find, named)
    return tuple(each for kind in found for each in (map(find, kind.parts) if kind.parts else (kind,)))


def reads_prediction(spec: str | DrafterSpec) -> bool:
    """Whether any of its drafters drafts from the answer that the caller expects."""
    return any(kind.reads_prediction for kind in kinds(spec))


def needs_prediction(spec: str | DrafterSpec) -> bool:
    """Whether it drafts nothing without that answer."""
    return all(kind.reads_prediction for kind in kinds(spec))


def needs_grammar(spec: str | DrafterSpec) -> bool:
    """Whether it drafts nothing for a request without a grammar."""
    return all(kind.reads_grammar for kind in kinds(spec))


def names_model(spec: DrafterSpec) -> bool:
    """Whether any of its drafters drafts with a model that the spec names."""
    return any(getattr(member.options, "model", "") for member in spec.members)


def from_values(name: str, values: Mapping[str, Any]) -> DrafterSpec:
    """The same from options as JSON has them: numbers are numbers, and no name or value is text to be taken apart."""
    return DrafterSpec(name, read_options(name, find(name).Options, values))


# A plus sign that begins another drafter: a name follows, and then its options, another drafter or the end. In
# "eagle:head=a+b/c" none does.
_PLUS = re.compile(r"\+(?=\s*[\w-]+\s*(?:[:+]|$))")


def split_members(spec: str) -> list[str]:
    """ "eagle:length=5+ngram" -> ["eagle:length=5", "ngram"]"""
    members = _PLUS.split(spec)
    if len(members) > MOST_MEMBERS:
        raise OutriderError(f"at most {MOST_MEMBERS} drafters guess together, not {len(members)}")
    return members


def split(spec: str) -> tuple[str, dict[str, str]]:
    """Of one drafter: "ngram:max_n=4,length=10" -> ("ngram", {"max_n": "4", "length": "10"})"""
    name, _, text = spec.strip().partition(":")
    values: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise OutriderError(f"option {quoted(key)} of drafter {quoted(name)} needs a value: {key[:80]}=...")
        if key in values:
            raise OutriderError(f"option {quoted(key)} of drafter {quoted(name)} is given twice; leave out one of them")
        values[key] = value
    return name, values


def read_options(name: str, kind: type, values: Mapping[str, Any], convert: bool = False) -> Any:
    """Values by name -> the dataclass `kind`. `convert`: they are text; else each must have its type already."""
    hints = typing.get_type_hints(kind)
    unknown = next((key for key in values if key not in hints), None)
    if unknown is not None:
        raise OutriderError(f"drafter {name} has no option {quoted(unknown)}; it has: {', '.join(hints) or 'none'}")
    read = _converted if convert else _checked
    given = {key: read(f"{name}:{key}", hints[key], value) for key, value in values.items()}
    missing = [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in given]
    if missing:
        raise OutriderError(f"drafter {name} needs {missing[0]}: write {name}:{missing[0]}=...")
    return kind(**given)


def varied(spec: DrafterSpec, values: Mapping[str, Any]) -> DrafterSpec:
    """The spec with some options changed, of every member that has them."""
    known = [{field.name for field in dataclasses.fields(member.options)} for member in spec.members]
    unknown = next((key for key in values if not any(key in each for each in known)), None)
    if unknown is not None:
        raise OutriderError(f"no drafter of {spec.name} has an option {quoted(unknown)}")
    changed = [{key: value for key, value in values.items() if key in each} for each in known]
    return combine(
        [from_values(own.name, vars(own.options) | new) for own, new in zip(spec.members, changed, strict=True)]
    )


def free_text(kind: type) -> set[str]:
    """The options that hold any text: they name models and files."""
    plain = {key: _plain_type(hint) for key, hint in typing.get_type_hints(kind).items()}
    return {key for key, (each, choices) in plain.items() if each is str and not choices}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _converted(where: str, kind: Any, text: str) -> Any:
    """Text as a value of that type."""
    plain, _ = _plain_type(kind)
    value: Any = text
    if plain is bool:
        value = _TRUTHS.get(text.lower(), text)
    elif plain in (int, float):
        with contextlib.suppress(ValueError):
            value = plain(text)
    return _checked(where, kind, value)


def _checked(where: str, kind: Any, value: Any) -> Any:
    """A value that has the type already; a whole number is a number too."""
    plain, choices = _plain_type(kind)
    if choices and value not in choices:
        raise OutriderError(f"{where} must be one of {', '.join(choices)}, not {quoted(value)}")
    if value is None and kind != plain and not choices:
        return None
    if plain is float and type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    if type(value) is not plain or (plain is float and not math.isfinite(value)):
        raise OutriderError(f"{where} must be {_NOUNS.get(plain, plain.__name__)}, not {quoted(value)}")
    return value


def _plain_type(kind: Any) -> tuple[Any, tuple[str, ...]]:
    """The type of an option without `| None`, and the values it is limited to; () for any."""
    if typing.get_origin(kind) is typing.Literal:
        return str, typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(each for each in typing.get_args(kind) if each is not type(None)), ()
    return kind, ()


def _written(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if "," in text or text != text.strip():
        raise OutriderError(f"{key} cannot hold a comma or spaces at its ends: {quoted(value)}; rename the file")
    if _PLUS.search(text):
        raise OutriderError(f"{key} cannot hold a plus sign before a word: {quoted(value)}; rename the file")
    return text
