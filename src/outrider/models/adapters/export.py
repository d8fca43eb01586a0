"""A model and its adapters written out as one: a Hugging Face folder with the sums of their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from outrider.core.adapter import AdapterMix
from outrider.core.errors import OutriderError, one_line
from outrider.models.adapters import files
from outrider.models.adapters.adapter import EMBEDDING, OUTPUT, Adapter, AdapterBase
from outrider.models.adapters.merge import merged

INDEX = "model.safetensors.index.json"
_SKIPPED = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")  # other forms of the weights, now wrong


def write_merged(
    folder: Path,
    paths: Sequence[Path],
    mix: AdapterMix,
    out: Path,
    show: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> None:
    """`folder`: the model's. The new folder is there as a whole or not at all; one that is there is left alone."""
    if out.exists():
        raise OutriderError(f"{out} is there already; choose another --out, or remove it first")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        raise OutriderError(f"{folder} is no model folder with safetensors weights")
    config = _read_json(folder / "config.json")
    base = _base(weights, config)
    adapters = [files.read(path, base) for path in paths]
    whole = _replaced(adapters, base)
    adapter = merged(adapters, mix)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
            target = Path(scratch) / "whole"
            target.mkdir()
            _copy_rest(folder, target)
            _write(weights, target, adapter, whole, config, show)
            target.rename(out)
    except OSError as error:
        raise OutriderError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def _base(weights: Sequence[Path], config: dict[str, Any]) -> AdapterBase:
    """The matrices of the folder's files. A tied output matrix has no tensor of its own, and the embedding's shape."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, int]] = {}
    for path in weights:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    shape = tuple(file.get_slice(name).get_shape())
                    if len(shape) == 2 and name.endswith(".weight"):
                        shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
        except (SafetensorError, OSError) as error:
            raise OutriderError(f"{path} cannot be read ({one_line(error)}); download it again") from error
    if EMBEDDING in shapes:
        vocab, hidden = shapes[EMBEDDING]
        shapes[EMBEDDING] = (hidden, vocab)
        shapes.setdefault(OUTPUT, (vocab, hidden))
    heads = int(config.get("num_attention_heads") or 1)
    return AdapterBase(shapes, heads, int(config.get("num_key_value_heads") or heads))


def _replaced(adapters: Sequence[Adapter], base: AdapterBase) -> dict[str, Tensor]:
    """Matrices that one adapter has as a whole."""
    found: dict[str, Tensor] = {}
    for adapter in adapters:
        for name, tensor in adapter.replaced.items():
            shape = base.shapes.get(name, (0, 0))
            wanted = tuple(reversed(shape)) if name == EMBEDDING else shape
            if name in found or tuple(tensor.shape) != wanted:
                raise OutriderError(
                    f"an adapter replaces {name} by a matrix of {tuple(tensor.shape)}, the model's is {wanted}, and "
                    "only one adapter may; merge it with PEFT"
                )
            found[name] = tensor
    return found


def _write(
    weights: Sequence[Path],
    target: Path,
    adapter: Adapter,
    whole: dict[str, Tensor],
    config: dict[str, Any],
    show: Callable[[str, int, int], None],
) -> None:
    from safetensors.torch import load_file, save_file

    left = {*adapter.pairs, *whole}
    tied: Tensor | None = None
    for number, path in enumerate(weights):
        show("merging", number, len(weights))
        tensors = load_file(path)
        if f"{EMBEDDING}.weight" in tensors:
            tied = tensors[f"{EMBEDDING}.weight"].clone()
        for name in [each for each in left if f"{each}.weight" in tensors]:
            tensors[f"{name}.weight"] = _summed(tensors[f"{name}.weight"], name, adapter, whole)
            left.discard(name)
        if number == len(weights) - 1:
            tensors |= _untied(left, tied, adapter, whole, config, target)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / path.name, {"format": "pt"})
    _write_index(target)


def _summed(weight: Tensor, name: str, adapter: Adapter, whole: dict[str, Tensor]) -> Tensor:
    """In float32, then in the type of the model's own."""
    total = whole.get(name, weight).float()
    pair = adapter.pairs.get(name)
    if pair is not None:
        total = total + (pair.delta.T if name == EMBEDDING else pair.delta)
    if not torch.isfinite(total.to(weight.dtype)).all():
        raise OutriderError(f"the sum of {name} does not fit {weight.dtype}; use smaller weights")
    return total.to(weight.dtype)


def _untied(
    left: set[str],
    tied: Tensor | None,
    adapter: Adapter,
    whole: dict[str, Tensor],
    config: dict[str, Any],
    target: Path,
) -> dict[str, Tensor]:
    """An output matrix of its own, where the model's was the embedding and one of the two is changed."""
    changed = {EMBEDDING, OUTPUT} & {*adapter.pairs, *whole}
    if not config.get("tie_word_embeddings") or not changed or tied is None:
        return {}
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=1))
    return {f"{OUTPUT}.weight": _summed(tied, OUTPUT, adapter, whole)}


def _write_index(target: Path) -> None:
    """Which file holds which tensor, where there are several files."""
    from safetensors import safe_open

    paths = sorted(target.glob("*.safetensors"))
    if len(paths) < 2:
        return
    where: dict[str, str] = {}
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path.name)
    size = sum(path.stat().st_size for path in paths)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1))


def _copy_rest(folder: Path, target: Path) -> None:
    """Config and tokenizer; weights in other forms would not be those of the sum."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in (*_SKIPPED, ".safetensors") and path.name != INDEX:
            shutil.copyfile(path, target / path.name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OutriderError(f"{path} cannot be read ({one_line(error)}); download it again") from error
    if not isinstance(found, dict):
        raise OutriderError(f"{path} is not a JSON object; download it again")
    return found
