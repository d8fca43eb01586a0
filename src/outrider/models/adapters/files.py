"""An adapter from a path: a PEFT folder or a GGUF file, checked against the model that it is for."""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import OutriderError
from outrider.models.adapters import gguf_files, peft_files
from outrider.models.adapters.adapter import Adapter, AdapterBase, check
from outrider.models.adapters.paths import CONFIG, is_folder


def read(path: Path, base: AdapterBase, allow_pickle: bool = False) -> Adapter:
    """An OutriderError says in one line why it cannot be used with this model."""
    if is_folder(path):
        adapter = peft_files.read(path, allow_pickle)
    elif path.is_file():
        adapter = gguf_files.read(path, base.heads, base.kv_heads)
    else:
        raise OutriderError(f"{path} is no adapter: give a PEFT folder (with {CONFIG}) or a GGUF file of type adapter")
    check(adapter, base.shapes, f"the adapter {path}")
    return adapter
