"""GGUF files: what they say about a model, and its weights as they are stored, under Hugging Face names.

The header is read here and not with `gguf.GGUFReader`: that needs 2 s for the 100,000 strings of a vocabulary (this:
0.1 s) and trusts every length it finds. Sizes of blocks and the arithmetic of dequantising are the `gguf` package's.
Drop the `GGUFFile` and its tensors once the weights are packed: the mapped pages count as resident memory until then.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import OutriderError, quoted

ARCHITECTURES = ("llama", "qwen2", "qwen3")
FLOATS = ("F32", "F16", "BF16")
QUANTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

_CHUNK = 1 << 22  # weights dequantised at a time: 16 MiB of float32
_ARRAYS = {"F32": np.float32, "F16": np.float16}
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One weight as the file stores it. Blocks run along a row, so rows can be moved without touching a value."""

    kind: str  # ggml's name of the type: 'Q4_1', 'F32', ...
    shape: tuple[int, ...]  # (out, in) or (n,)
    raw: np.ndarray  # F32, F16: the array; otherwise uint8 [out, bytes per row]; mapped from the file

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor with exactly the stored values, as far as `dtype` can hold them."""
        columns = self.shape[-1]
        rows = self.raw.reshape(-1, self.raw.shape[-1])
        out = torch.empty(len(rows), columns, dtype=dtype)
        step = max(1, _CHUNK // columns)
        for start in range(0, len(rows), step):
            out[start : start + step] = self._values(rows[start : start + step])
        return out.view(self.shape)

    def _values(self, rows: np.ndarray) -> Tensor:
        if self.kind in _ARRAYS:
            return torch.from_numpy(rows)
        if self.kind == "BF16":
            return torch.from_numpy(rows).view(torch.bfloat16)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(invalid="ignore", over="ignore"):  # a broken scale gives NaN, not a warning on the terminal
            return torch.from_numpy(dequantize(rows, GGMLQuantizationType[self.kind]))


class GGUFFile:
    """A model in one GGUF file, checked on opening: every tensor is there, has its shape and lies inside the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        data = map_file(self.path)
        self.metadata, self._tensors = read_header(self.path, data)
        self.architecture = self._architecture()
        self._refuse_kinds()
        self._config = self._read_config()
        self._check_tensors()

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def tensors(self) -> Iterator[tuple[str, GGUFTensor]]:
        """Names and weights in the Hugging Face layout: rotary halves are [first half, second half] of each head."""
        for name, tensor in self._tensors.items():
            found = None if name == _ROPE_FACTORS else hub_name(name)
            if found is not None:  # the names were checked on opening
                yield found, self._split_halves(name, tensor)

    def _architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise OutriderError(
                f"{self.path} holds a model of architecture {quoted(name)}; from GGUF files Outrider runs "
                f"{', '.join(ARCHITECTURES)}: use such a file, or load the model from its Hugging Face folder"
            )
        return name

    def _refuse_kinds(self) -> None:
        """Files that hold another kind of model than the forward runs."""
        if self._whole("split.count", 1) > 1:
            raise OutriderError(f"{self.path} is one part of a split model; join the parts (llama-gguf-split --merge)")
        if self._count("expert_count", 0):
            raise OutriderError(f"{self.path} is a mixture of experts, which Outrider does not run; use a dense model")

    def _read_config(self) -> dict[str, Any]:
        heads, kv_heads = self._heads()
        hidden = self._count("embedding_length")
        head_dim = self._count("attention.key_length", hidden // heads)
        if head_dim % 2 or self._count("rope.dimension_count", head_dim) != head_dim:
            raise OutriderError(
                f"{self.path} rotates a part of each head only, which Outrider does not; use another model"
            )
        rope_factors = self._tensors.get(_ROPE_FACTORS)
        return {
            "vocab_size": self._shape("token_embd.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_layers": self._count("block_count"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "norm_eps": self._positive("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._positive("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            # [head_dim / 2]: inverse frequencies are divided by these (Llama 3.1 and later)
            "rope_factors": None if rope_factors is None else rope_factors.dequantize().numpy(),
            "max_context": self._count("context_length", least=1),
            "tie_embeddings": "output.weight" not in self._tensors,
            "sliding_window": self._count("attention.sliding_window", 0) or None,
            "qkv_bias": "blk.0.attn_q.bias" in self._tensors,
            "qk_norm": "blk.0.attn_q_norm.weight" in self._tensors,
        }

    def _heads(self) -> tuple[int, int]:
        heads = self._count("attention.head_count", least=1)
        kv_heads = self._count("attention.head_count_kv", heads, least=1)
        if heads % kv_heads:
            raise self._broken(f"{self.architecture}.attention.head_count_kv", kv_heads)
        return heads, kv_heads

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "linear")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))  # the latter in old files
        if kind == "none" or factor <= 0 or factor == 1:
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise OutriderError(
                f"{self.path} scales rotary positions by {quoted(kind)}; Outrider knows linear and yarn"
            )
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = self._count("rope.scaling.original_context_length", least=1)
        for key in ("beta_fast", "beta_slow"):
            if f"{self.architecture}.rope.scaling.yarn_{key}" in self.metadata:
                scaling[key] = self._number(f"rope.scaling.yarn_{key}")
        if f"{self.architecture}.rope.scaling.attn_factor" in self.metadata:
            # ggml multiplies its own 1 + ln(factor) / 10 by this; Hugging Face's word replaces the product
            scaling["attention_factor"] = self._number("rope.scaling.attn_factor") * (1 + 0.1 * math.log(factor))
        return scaling

    def _number(self, key: str, default: float | None = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            what = "lacks" if value is None else "has no single number for"
            raise OutriderError(f"{self.path} {what} {self.architecture}.{key}; use a file made by a current converter")
        if not math.isfinite(value):
            raise self._broken(f"{self.architecture}.{key}", value)
        return value

    def _positive(self, key: str, default: float | None = None) -> float:
        value: float = self._number(key, default)
        if value <= 0:
            raise self._broken(f"{self.architecture}.{key}", value)
        return value

    def _count(self, key: str, default: int | None = None, least: int = 0) -> int:
        self._number(key, default)
        return self._whole(f"{self.architecture}.{key}", default, least)

    def _whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._broken(key, value)
        return value

    def _broken(self, key: str, value: Any) -> OutriderError:
        return OutriderError(f"{self.path} is broken: {key} is {quoted(value)}; download it again")

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise OutriderError(f"{self.path} lacks the tensor {name}; download it again or use another file")
        return self._tensors[name].shape

    def _check_tensors(self) -> None:
        expected = set()
        for name, shape in self._expected():
            if self._shape(name) != shape:
                raise OutriderError(
                    f"{self.path}: tensor {name} has shape {self._shape(name)} where its metadata ask for {shape}; "
                    f"the file is broken, use another one"
                )
            expected.add(name)
        if surplus := self._tensors.keys() - expected:
            raise OutriderError(
                f"{self.path} has {len(surplus)} tensors that Outrider's forward of {self.architecture} does not use "
                f"(such as {min(surplus)}); load the model from its Hugging Face folder"
            )

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self._config
        hidden, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        query, key = c["num_heads"] * head_dim, c["num_kv_heads"] * head_dim
        yield "token_embd.weight", (c["vocab_size"], hidden)
        yield "output_norm.weight", (hidden,)
        if not c["tie_embeddings"]:
            yield "output.weight", (c["vocab_size"], hidden)
        if c["rope_factors"] is not None:
            yield _ROPE_FACTORS, (head_dim // 2,)
        for layer in range(c["num_layers"]):
            at = f"blk.{layer}."
            yield at + "attn_norm.weight", (hidden,)
            yield at + "ffn_norm.weight", (hidden,)
            for part, width in ("attn_q", query), ("attn_k", key), ("attn_v", key):
                yield f"{at}{part}.weight", (width, hidden)
                if c["qkv_bias"]:
                    yield f"{at}{part}.bias", (width,)
            yield at + "attn_output.weight", (hidden, query)
            if c["qk_norm"]:
                yield at + "attn_q_norm.weight", (head_dim,)
                yield at + "attn_k_norm.weight", (head_dim,)
            yield at + "ffn_gate.weight", (inner, hidden)
            yield at + "ffn_up.weight", (inner, hidden)
            yield at + "ffn_down.weight", (hidden, inner)

    def _split_halves(self, name: str, tensor: GGUFTensor) -> GGUFTensor:
        """Undo the converter's reordering of query and key rows.

        For llama it stores each head's rows as pairs (0, d/2), (1, d/2 + 1), ... that ggml rotates together.
        """
        part = name.split(".")[-2]
        if self.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return tensor
        heads = self._config["num_heads" if part == "attn_q" else "num_kv_heads"]
        return GGUFTensor(tensor.kind, tensor.shape, split_halves(tensor.raw, heads))


def split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs that are rotated together to [first half, second half]."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def hub_name(name: str) -> str | None:
    """The Hugging Face name of a tensor; None: there is no such tensor."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, ending = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{ending}" if part in _LAYER_NAMES else None


class _Truncated(Exception):
    """The header goes on past the end of the file."""


class _Cursor:
    """Reads values one after the other, and never past the end."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.data
        self.at = 0

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.data):
            raise _Truncated
        part = self.data[self.at : end]
        self.at = end
        return part

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(count * np.dtype(kind).itemsize), kind).tolist()

    def string(self) -> str:
        return str(self.take(int.from_bytes(self.take(8), "little")), "utf-8")

    def value(self) -> Any:
        kind = self.number("<u4")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return self.numbers(_SCALARS[kind], count)


def map_file(path: Path) -> np.ndarray:
    try:
        if path.stat().st_size < _HEADER.size:
            raise OutriderError(f"{path} is no GGUF file: it has {path.stat().st_size} bytes; download it again")
        # 'c' (private): torch takes the arrays without a warning about read-only memory, and the file stays as it is
        return np.memmap(path, np.uint8, "c").view(np.ndarray)
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror or error}") from None


def read_header(path: Path, data: np.ndarray) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    cursor = _Cursor(data)
    magic, version, tensor_count, entry_count = cursor.unpack(_HEADER)
    if magic != b"GGUF":
        raise OutriderError(f"{path} is no GGUF file: it begins with {magic!r}; check the path or download it again")
    if version not in (2, 3):
        raise OutriderError(
            f"{path} has GGUF version {version}; Outrider reads 2 and 3 (little-endian): convert it again"
        )
    try:
        metadata = {cursor.string(): cursor.value() for _ in range(entry_count)}
        infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    except _Truncated:
        raise OutriderError(
            f"{path} is truncated: its header goes on past byte {len(data)}; download it again"
        ) from None
    except (KeyError, UnicodeDecodeError):  # an unknown type of value; text that is none
        raise OutriderError(
            f"{path} is broken: its header makes no sense before byte {cursor.at}; download it again"
        ) from None
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8 or alignment > len(data):
        raise OutriderError(f"{path} is broken: general.alignment is {quoted(alignment)}; download it again")
    start = -(-cursor.at // alignment) * alignment
    return metadata, {name: _tensor(path, data, start + at, name, shape, code) for name, shape, code, at in infos}


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    shape = tuple(reversed(cursor.numbers("<u8", cursor.number("<u4"))))  # ggml counts dimensions from the fastest
    return name, shape, cursor.number("<u4"), cursor.number("<u8")


def _tensor(path: Path, data: np.ndarray, begin: int, name: str, shape: tuple[int, ...], code: int) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = next((k.name for k in GGMLQuantizationType if k == code), f"number {code}")
    if kind not in FLOATS + QUANTS:
        known = ", ".join(FLOATS + QUANTS)
        raise OutriderError(f"{path} stores {name} as {kind}, which Outrider does not read; use a file of kind {known}")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
    if not shape or len(shape) > 2 or 0 in shape or shape[-1] % block or begin % 8:
        raise OutriderError(
            f"{path} is broken: tensor {name} ({kind}) cannot have shape {shape} at byte {begin}; download it again"
        )
    row_bytes = shape[-1] // block * block_bytes
    end = begin + math.prod(shape[:-1]) * row_bytes
    if end > len(data):
        raise OutriderError(
            f"{path} is truncated: tensor {name} ends at byte {end} but the file has {len(data)}; download it again"
        )
    raw = data[begin:end]
    if kind in _ARRAYS:
        return GGUFTensor(kind, shape, raw.view(_ARRAYS[kind]).reshape(shape))
    return GGUFTensor(kind, shape, raw.reshape(*shape[:-1], row_bytes))
