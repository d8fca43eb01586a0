"""option(): a dataclass field that a user can set on the command line, with its help text beside its default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

KEY = "option"  # in the field's metadata


@dataclass(frozen=True)
class Option:
    """What the command line says about a field. Its type and default are the field's own."""

    help: str
    panel: str = ""  # the heading in --help; "": the command's choice
    flags: tuple[str, ...] = ()  # "--model", "-m"; (): from the field's name
    shown: str | bool = True  # the default in --help: True: as it is; text: in these words; False: nothing
    least: float | None = None
    most: float | None = None
    env: str = ""  # the environment variable that sets it
    parse: Callable[[Any], Any] | None = None  # from the text given to the value; None: by the field's type
    repeated: bool = False  # it may be given several times: `parse` then takes the list


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field with this default and these words for the command line; `more`: other fields of Option."""
    return field(default=default, metadata={KEY: Option(help, **more)})


def option_of(each: Field[Any]) -> Option | None:
    """What the command line says about a field; None: it is not an option."""
    found: Option | None = each.metadata.get(KEY)
    return found
