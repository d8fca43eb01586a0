"""The registry: a name, a size and a quantisation -> where the weights lie. Users add their own in a YAML file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from outrider.core.errors import OutriderError, one_line
from outrider.models.sources import user_folder

ROUNDED = {"int8": "int8", "8-bit": "int8", "int4": "int4", "4-bit": "int4"}  # how we quantise dense weights


@dataclass(frozen=True)
class Entry:
    """A model that can be launched by its name."""

    name: str
    source: str  # known name, folder, hub id or GGUF file
    size: float | None = None  # billions of parameters
    quantization: str = "none"  # as the file has it: q4_1, q8_0, ...; none: dense weights


@dataclass(frozen=True)
class Head:
    """A trained drafter (EAGLE, Medusa) that requests can choose by its name."""

    name: str
    source: str  # folder or hub id


@dataclass(frozen=True)
class Choice:
    """What a request's words came to."""

    name: str
    source: str
    size: float | None = None
    quantization: str = "none"
    quantize: str = "none"  # dense weights, rounded on loading

    def family(self) -> dict[str, Any]:
        """What a launched model is remembered by, in Xinference's words."""
        return {
            "model_name": self.name,
            "model_size_in_billions": self.size,
            "quantization": self.quantization,
        }


@dataclass(frozen=True)
class Registry:
    entries: tuple[Entry, ...]
    heads: tuple[Head, ...] = ()

    def choose(
        self, name: str, size: object = None, quantization: str | None = None, direct: Callable[[str], str] = str
    ) -> Choice:
        """The model that is meant. What the words leave open the first entry decides, the user's own before ours.

        `direct`: what becomes of a name that has no entry (a hub id, a path); it may refuse it.
        """
        wanted = "" if quantization is None else quantization.lower()
        billions = None if size is None else parse_size(size)
        named = [entry for entry in self.entries if entry.name == name]
        if not named:
            return _direct(name, direct(name), billions, wanted)
        for entry in named:
            if billions is not None and entry.size is not None and not math.isclose(billions, entry.size):
                continue
            if wanted in ("", entry.quantization):
                return Choice(name, entry.source, entry.size, entry.quantization)
            if entry.quantization == "none" and wanted in ROUNDED:
                return Choice(name, entry.source, entry.size, wanted, ROUNDED[wanted])
        raise OutriderError(f"{name} does not come in {_words(billions, wanted)}; there is: {_offers(named)}")

    def sources(self) -> dict[str, str]:
        """Name -> source, of heads and models."""
        models = {entry.name: entry.source for entry in reversed(self.entries)}
        return models | {head.name: head.source for head in self.heads}

    def names(self) -> list[str]:
        return list(dict.fromkeys(entry.name for entry in self.entries))


BUILT_IN = Registry(
    (
        Entry("smollm2-135m", "smollm2-135m", 0.135, "q4_1"),
        Entry("smollm2", "smollm2-135m", 0.135, "q4_1"),
    )
)


def _direct(name: str, source: str, size: float | None, wanted: str) -> Choice:
    """A hub id or a path. Of dense weights we know how to round them; a GGUF file is what its name says."""
    if wanted in ("", "none"):
        return Choice(name, source, size)
    if wanted in ROUNDED:
        return Choice(name, source, size, wanted, ROUNDED[wanted])
    if source.lower().endswith(".gguf") and wanted in source.lower():
        return Choice(name, source, size, wanted)
    raise OutriderError(
        f"quantization {wanted!r} of {name}: name the file itself (org/name:file.gguf), "
        f"or round dense weights with one of {', '.join(ROUNDED)}"
    )


def config_dir() -> Path:
    if own := os.environ.get("OUTRIDER_CONFIG"):
        return Path(own).expanduser()
    return user_folder("XDG_CONFIG_HOME", ".config", "OUTRIDER_CONFIG")


def load(file: Path | None = None) -> Registry:
    """The built-in entries and those of a YAML file; by default of `registry.yaml` in the config folder, if there."""
    path = file or _usual_file()
    if path is None:
        return BUILT_IN
    content = _read(path)
    entries = _records(path, Entry, content.get("models"), "models")
    heads = _records(path, Head, content.get("heads"), "heads")
    _refuse_twins(path, entries)
    return Registry((*entries, *BUILT_IN.entries), tuple(heads))


def _usual_file() -> Path | None:
    try:
        path = config_dir() / "registry.yaml"
    except OutriderError:  # no home folder, so there is no file in it
        return None
    return path if path.is_file() else None


def parse_size(value: object) -> float:
    """7, 0.5, "7", "0.5", or "1_8" for 1.8, as Xinference writes it."""
    try:
        size = float(str(value).replace("_", "."))
    except ValueError:
        size = math.nan
    if isinstance(value, bool) or not 0 < size < math.inf:
        raise OutriderError(f"a size is given in billions of parameters, such as 7, 0.5 or '1_8', not {value!r}")
    return size


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OutriderError(f"cannot read the registry {path}: {error.strerror}; check --registry") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OutriderError(f"the registry {path} is not YAML: {one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not set(content) <= {"models", "heads"}:
        raise OutriderError(f"the registry {path} must have the keys models and heads, each a list, and no others")
    return content


T = TypeVar("T", Entry, Head)


def _records(path: Path, kind: type[T], rows: object, where: str) -> list[T]:
    if rows is None:
        return []
    if not isinstance(rows, list):
        raise OutriderError(f"{where} in the registry {path} must be a list, not {type(rows).__name__}")
    return [
        _record(kind, row, f"{where}[{number}] in the registry {path}", path.parent) for number, row in enumerate(rows)
    ]


def _record(kind: type[T], row: object, where: str, folder: Path) -> T:
    known = {field.name: field for field in fields(kind)}
    if not isinstance(row, Mapping):
        raise OutriderError(f"{where} must have the keys {', '.join(known)}, not be {row!r}")
    unknown = [key for key in row if key not in known]
    if unknown:
        raise OutriderError(f"{where} has an unknown key {unknown[0]!r}; known: {', '.join(known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and not row.get(name)]
    if missing:
        raise OutriderError(f"{where} has no {missing[0]}")
    return kind(**{key: _value(key, value, where, folder) for key, value in row.items()})


def _value(key: str, value: object, where: str, folder: Path) -> Any:
    if key == "size":
        return None if value is None else parse_size(value)
    if not isinstance(value, str):
        raise OutriderError(f"{key} of {where} must be text, not {value!r}")
    if key == "quantization":
        return value.lower()
    if key == "source" and value.startswith((".", "~")):  # a path is meant from where the file lies
        return str((folder / Path(value).expanduser()).resolve())
    return value


def _refuse_twins(path: Path, entries: list[Entry]) -> None:
    seen: set[tuple[str, float | None, str]] = set()
    for entry in entries:
        key = (entry.name, entry.size, entry.quantization)
        if key in seen:
            raise OutriderError(f"the registry {path} has {entry.name} twice with one size and quantization")
        seen.add(key)


def _words(size: float | None, quantization: str) -> str:
    return " and ".join(
        filter(None, [f"size {size:g}" if size else "", quantization and f"quantization {quantization}"])
    )


def _offers(entries: list[Entry]) -> str:
    return ", ".join(
        f"size {entry.size:g} {entry.quantization}" if entry.size else entry.quantization for entry in entries
    )
