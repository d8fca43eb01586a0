"""One model in several formats: GGUF files written from one, so that each engine is measured on the format it likes.

Formats that the gguf package can write are written with it; Q4_K_M, a recipe of llama.cpp, by its own llama-quantize.
Rounding what was rounded before costs accuracy, not speed: these files are for measurements only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.errors import OutriderError
from outrider.models.sources import cache_dir

WRITTEN = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}  # by the gguf package; values: its names
RECIPES = {"q4_k_m": "Q4_K_M", "q5_k_m": "Q5_K_M", "q6_k": "Q6_K"}  # by llama-quantize
FORMATS = (*WRITTEN, *RECIPES)
_KEPT = (
    "token_embd.weight",
    "output.weight",
)  # stay as they are, as in llama.cpp's own files: the texts need them most
_ROWS = 1 << 22  # numbers quantised at a time: 16 MiB of float32


def parse(text: str) -> tuple[str, ...]:
    """ "q4_0,q4_1" -> formats."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            raise OutriderError(f"--formats: unknown format {name!r}; known: {', '.join(FORMATS)}")
    return names


def check(formats: Sequence[str], quantizes: bool) -> None:
    """`quantizes`: whether there is, or will be, a llama-quantize."""
    for name in formats:
        if name in RECIPES and not quantizes:
            raise OutriderError(f"--formats {name}: only llama-quantize writes it; add --build-peers")


def write(source: Path, name: str, quantizer: str | None) -> Path:
    """The model of a GGUF file in another format, kept in the cache; the file itself where it has that format."""
    if not source.is_file():
        raise OutriderError(f"--formats writes files from a GGUF file, and {source.name} is a folder; leave it out")
    if _named(source) == name:
        return source
    state = f"{source.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns}"
    path = cache_dir() / "formats" / f"{source.stem}-{hashlib.sha256(state.encode()).hexdigest()[:8]}.{name}.gguf"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            part = Path(scratch) / path.name
            if name in WRITTEN:
                _rewrite(source, part, WRITTEN[name])
            else:
                _quantize(source, part, RECIPES[name], quantizer)
            os.replace(part, path)
    except OSError as error:
        raise OutriderError(f"cannot write {path.name} into {path.parent}: {error.strerror or error}") from error
    return path


def _named(source: Path) -> str:
    """The format that most of a file is said to have, in our words."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(source).get_field("general.file_type")
    try:
        kind = LlamaFileType(int(field.contents())) if field is not None else None
    except ValueError:
        return ""
    return "" if kind is None else kind.name.removeprefix("MOSTLY_").lower()


def _quantize(source: Path, to: Path, recipe: str, quantizer: str | None) -> None:
    if quantizer is None:
        raise OutriderError(f"--formats {recipe.lower()}: only llama-quantize writes it; add --build-peers")
    command = [quantizer, "--allow-requantize", str(source), str(to), recipe]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode or not to.is_file():
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise OutriderError(f"llama-quantize could not write {recipe}: {(lines or ['it gave no reason'])[-1][:200]}")


def _rewrite(source: Path, to: Path, kind: str) -> None:
    """A copy in which the matrices of the layers have another format."""
    import gguf

    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(to, _text(reader, "general.architecture"))
    _copy_metadata(reader, writer, gguf.LlamaFileType[f"MOSTLY_{kind}"])
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    changed = {
        tensor.name: len(tensor.shape) == 2 and tensor.name not in _KEPT and int(tensor.shape[0]) % block == 0
        for tensor in reader.tensors
    }
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        if changed[tensor.name]:
            data = _quantised(tensor, shape, wanted)
            writer.add_tensor(tensor.name, data, raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantised(tensor: Any, shape: Sequence[int], wanted: Any) -> np.ndarray:
    from gguf import quants

    raw = tensor.data.reshape(shape[0], -1)
    step = max(1, _ROWS // shape[1])
    parts = [
        quants.quantize(quants.dequantize(raw[at : at + step], tensor.tensor_type), wanted)
        for at in range(0, shape[0], step)
    ]
    return np.concatenate(parts)


def _text(reader: Any, key: str) -> str:
    return str(reader.get_field(key).contents())


def _copy_metadata(reader: Any, writer: Any, file_type: Any) -> None:
    import gguf

    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer's own
        value = int(file_type) if field.name == gguf.Keys.General.FILE_TYPE else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
