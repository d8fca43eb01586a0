"""Where an adapter lies and whether it has changed, without reading it; without torch, for servers ask it too."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import OutriderError

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"  # of PEFT's folders
Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, size, time of change and inode


def is_folder(path: Path) -> bool:
    """Whether PEFT has saved an adapter there."""
    return (path / CONFIG).is_file()


def stamp(path: Path) -> Stamp:
    """Changes when a file of the adapter is written again or replaced."""
    files = [path / name for name in (CONFIG, WEIGHTS, PICKLE) if (path / name).is_file()] if path.is_dir() else [path]
    try:
        found = [(file.name, file.stat()) for file in files]
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror or error}") from error
    return tuple((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in found)
