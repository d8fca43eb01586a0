"""Atomic writes: a file is there as a whole or not at all, for it is written beside its place and moved onto it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from outrider.core.errors import OutriderError


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    from safetensors.torch import save

    write_bytes(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, dict(metadata or {})))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """What was there before stays whole until the new content is safe on the disk."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OutriderError(
            f"cannot write {path} ({error.strerror or error}); what was there before is untouched: "
            "free disk space or choose another --out, then go on with --resume"
        ) from error
