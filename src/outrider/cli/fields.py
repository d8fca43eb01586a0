"""Commands whose options are fields of dataclasses. A field has its help text in the dataclass (core/option.py);
`command` turns these fields into a command's parameters, and hands it the object that is made of what the user gave."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields as fields_of, replace
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar

import typer

from outrider.core.option import Option, option_of
from outrider.interrupt import ends_at_once

SOURCE_LINE = 90  # characters: a longer line of a docstring goes on in the next one; the source has up to 116
EXAMPLE = "[dim]$[/]"  # begins a line that shows a command
SIMPLE = (str, int, float, bool, Path)  # types that the command line reads by itself
T = TypeVar("T")


class Given(dict[str, Any]):
    """The options that the user gave, by the names of their fields; without those at their defaults."""


@dataclass(frozen=True)
class FieldOption:
    """A field as an option of one command."""

    name: str
    typed: Any  # as the command line reads it
    default: Any  # MISSING: it must be given
    words: Option

    def parameter(self) -> inspect.Parameter:
        """For typer, which makes options of a function's parameters."""
        default = self.default if self.typed in SIMPLE or self.default else None
        words, flags = self.words, self.words.flags
        if default is False and not flags:  # typer would add a --no-... to it
            flags = (f"--{self.name.replace('_', '-')}",)
        info = typer.Option(
            *flags,
            help=words.help,
            show_default=words.shown,
            rich_help_panel=words.panel or None,
            envvar=words.env or None,
            min=words.least,
            max=words.most,
        )
        kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        typed = Annotated[self.typed, info]  # type: ignore[name-defined]
        return inspect.Parameter(self.name, kind, annotation=typed, default=empty if default is MISSING else default)


@dataclass(frozen=True)
class OptionSource(Generic[T]):
    """Fields that become options, and the object that is made of what was given for them."""

    entries: Mapping[str, FieldOption]
    make: Callable[[Given], T]

    def given(self, values: Mapping[str, Any]) -> Given:
        mine = {name: value for name, value in values.items() if name in self.entries}
        return Given({name: self._parsed(name, value) for name, value in mine.items()})

    def _parsed(self, name: str, value: Any) -> Any:
        parse = self.entries[name].words.parse
        return value if parse is None else parse(value)


def fields(
    kind: type[T], *names: str, panel: str = "", make: Callable[[Given], T] | None = None, **changes: Any
) -> OptionSource[T]:
    """The fields of a dataclass that are options, or those of `names`. `changes`: field -> what this command says
    differently about it, as values of its Option; `default` there is another default."""
    known = {each.name: each for each in fields_of(kind)}  # type: ignore[arg-type]
    taken = names or tuple(name for name, each in known.items() if option_of(each))
    entries = {name: _entry(kind, known[name], panel, dict(changes.pop(name, {}))) for name in taken}
    assert not changes, f"{kind.__name__}: changes of fields that are not taken: {', '.join(changes)}"
    other = {name: each.default for name, each in entries.items() if each.default != known[name].default}
    return OptionSource(entries, lambda given: (make or _built(kind))(Given({**other, **given})))


def _built(kind: type[T]) -> Callable[[Given], T]:
    return lambda given: kind(**given)


def _entry(kind: type, each: Field[Any], panel: str, change: dict[str, Any]) -> FieldOption:
    words = option_of(each)
    assert words is not None, f"{kind.__name__}.{each.name} has no words for the command line"
    default = change.pop("default", each.default)
    words = replace(words, **{"panel": words.panel or panel, **change})
    return FieldOption(each.name, _typed(kind, each, words), default, words)


def _typed(kind: type, each: Field[Any], words: Option) -> Any:
    """The field's type as the command line reads it: one word, several, or text that is parsed later."""
    owner = next(base for base in kind.__mro__ if each.name in vars(base).get("__annotations__", {}))
    hint = eval(each.type, vars(sys.modules[owner.__module__])) if isinstance(each.type, str) else each.type
    parts = [part for part in typing.get_args(hint) if part not in (NoneType, ...)] or [hint]
    first = parts[0] if parts[0] in SIMPLE else str
    if words.repeated:
        return list[str] | None
    if words.parse is None and typing.get_origin(hint) in (tuple, list, Sequence):
        return list[first] | None  # type: ignore[valid-type]
    return hint if words.parse is None and first is parts[0] else str | None


def joined(make: Callable[[Given], T], *sources: OptionSource[Any]) -> OptionSource[T]:
    """The fields of several sources, of which one object is made."""
    return OptionSource({name: each for source in sources for name, each in source.entries.items()}, make)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The command with the options that its parameters ask for: `name: Annotated[Kind, source]` gives what the source
    makes, `Annotated[Given, source]` only what the user gave for it. Other parameters are as typer has them.

    Torch and the engine are imported when it runs: its help does not wait for them."""
    return _command(function, import_engine)


def light_command(function: Callable[..., None]) -> Callable[..., None]:
    """A command that needs no engine, or imports it by itself."""
    return _command(function, lambda: None)


def import_engine() -> None:
    """Torch, and all that runs a model."""
    with ends_at_once():
        import_module("outrider.llm")


def _command(function: Callable[..., None], prepare: Callable[[], None]) -> Callable[..., None]:
    """`prepare`: what is done when the options have been read."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = {name: _source(hint) for name, hint in hints.items()}
    sources = {name: source for name, source in found.items() if source is not None}
    taken = {name for source in sources.values() for name in source.entries}

    @functools.wraps(function)
    def run(ctx: typer.Context, **values: Any) -> None:
        given = {name: value for name, value in values.items() if was_given(ctx, name)}
        own: dict[str, Any] = {name: value for name, value in values.items() if name not in taken}
        for name, source in sources.items():
            mine = source.given(given)
            own[name] = mine if typing.get_args(hints[name])[0] is Given else source.make(mine)
        prepare()
        function(**own, **({"ctx": ctx} if "ctx" in hints else {}))

    parameters = _parameters(function, hints, sources)
    run.__doc__ = _reflowed(function.__doc__ or "")
    del run.__wrapped__  # or typer would look at the parameters of the function itself
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _reflowed(text: str) -> str:
    """Help text without the line breaks of the source: typer keeps them, and a narrower terminal would show both. A
    short line ends where its author wanted it to."""
    joined, goes_on = [""], True
    for line in inspect.cleandoc(text).splitlines():
        if goes_on and line:
            joined[-1] = f"{joined[-1]} {line}".strip()
        else:
            joined.append(line)
        goes_on = len(line) > SOURCE_LINE and EXAMPLE not in line
    return "\n".join(joined)


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether the user gave this option, on the command line or in the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _source(hint: Any) -> OptionSource[Any] | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, OptionSource)), None)


def _parameters(
    function: Callable[..., None], hints: Mapping[str, Any], sources: Mapping[str, OptionSource[Any]]
) -> list[inspect.Parameter]:
    own = inspect.Parameter.KEYWORD_ONLY
    made = [inspect.Parameter("ctx", own, annotation=typer.Context)]
    for name, each in inspect.signature(function).parameters.items():
        if name in sources:
            made += [entry.parameter() for entry in sources[name].entries.values()]
        elif name != "ctx":
            made.append(each.replace(annotation=hints[name], kind=own))
    return made
