"""An adapter from a path: a PEFT folder or a GGUF file, checked against the model that it is for."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import OutriderError
from outrider.models.adapters import gguf_files, peft_files
from outrider.models.adapters.adapter import Adapter, AdapterBase, check

Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, size, time of change and inode


def read(path: Path, base: AdapterBase, allow_pickle: bool = False) -> Adapter:
    """An OutriderError says in one line why it cannot be used with this model."""
    if peft_files.is_folder(path):
        adapter = peft_files.read(path, allow_pickle)
    elif path.is_file():
        adapter = gguf_files.read(path, base.heads, base.kv_heads)
    else:
        raise OutriderError(
            f"{path} is no adapter: give a PEFT folder (with {peft_files.CONFIG}) or a GGUF file of type adapter"
        )
    check(adapter, base.shapes, f"the adapter {path}")
    return adapter


def stamp(path: Path) -> Stamp:
    """Changes when a file of the adapter is written again or replaced."""
    names = (peft_files.CONFIG, peft_files.WEIGHTS, peft_files.PICKLE)
    files = [path / name for name in names if (path / name).is_file()] if path.is_dir() else [path]
    try:
        found = [(file.name, file.stat()) for file in files]
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror or error}") from error
    return tuple((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in found)
