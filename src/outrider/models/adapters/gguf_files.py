"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OutriderError, quoted
from outrider.models.adapters.adapter import EMBEDDING, Adapter, LowRank
from outrider.models.gguf import ARCHITECTURES, FLOATS, GGUFTensor, hub_name, map_file, read_header, split_halves

_NAME = re.compile(r"(?P<tensor>token_embd|output|blk\.\d{1,6}\.[a-z_]+)\.weight\.lora_(?P<part>[ab])")
_PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")  # whose rows llama's converter reorders


def read(path: Path, heads: int, kv_heads: int) -> Adapter:
    """`heads`, `kv_heads`: of the model that it is for, whose query and key rows the file has in another order."""
    metadata, tensors = read_header(path, map_file(path))
    alpha = _alpha(path, metadata)
    parts: dict[str, dict[str, GGUFTensor]] = {}
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        matrix = None if found is None else hub_name(f"{found['tensor']}.weight")
        if found is None or matrix is None or len(tensor.shape) != 2:
            raise OutriderError(f"{path} has the tensor {quoted(name)}, which is no part of a LoRA adapter")
        parts.setdefault(matrix.removesuffix(".weight"), {})[found["part"]] = tensor
    llama = metadata["general.architecture"] == "llama"
    pairs = {}
    for name, own in parts.items():
        if own.keys() != {"a", "b"}:
            raise OutriderError(f"{path} has only one of the two matrices for {name}; download it again")
        a, b = _floats(path, own["a"]), _floats(path, own["b"])
        if name == EMBEDDING:
            a = a.T.contiguous()
        elif llama and name.endswith(_PERMUTED):
            count = heads if name.endswith("q_proj") else kv_heads
            if b.shape[0] % (2 * count):
                raise OutriderError(f"{path}: {name} has {b.shape[0]} rows for {count} heads; it is for another model")
            b = torch.from_numpy(split_halves(b.numpy(), count))
        pairs[name] = LowRank(a, b, alpha / a.shape[0] if alpha else 1.0)
    return Adapter(pairs, str(metadata.get("general.base_model.0.name", "")))


def _alpha(path: Path, metadata: dict[str, Any]) -> float:
    """The file's alpha, after the checks of what kind of file it is."""
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise OutriderError(
            f"{path} is a GGUF file of type {quoted(metadata.get('general.type'))}, not a LoRA adapter; "
            "give a file that convert_lora_to_gguf.py has written, or a PEFT folder"
        )
    if metadata.get("general.architecture") not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise OutriderError(
            f"{path} is an adapter for {quoted(metadata.get('general.architecture'))}; Outrider runs {known}"
        )
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise OutriderError(f"{path} is broken: adapter.lora.alpha is {quoted(alpha)}; convert it again")
    return float(alpha)


def _floats(path: Path, tensor: GGUFTensor) -> Tensor:
    if tensor.kind not in FLOATS and tensor.kind != "Q8_0":
        raise OutriderError(
            f"{path} is stored as {tensor.kind}; convert it again with --outtype f32, f16, bf16 or q8_0"
        )
    return tensor.dequantize().clone()  # not a part of the mapped file, which may be overwritten
