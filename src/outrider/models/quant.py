"""Quantised weights as numbers: w = scale * (q - zero) + minimum, per group of inputs; from GGUF's blocks or made here.

What is taken from a file is exact: the same integers and the same scales, only laid out anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.models.gguf import GGUFTensor


@dataclass(frozen=True, eq=False)
class Quantised:
    q: Tensor  # [out, in] uint8
    scales: Tensor  # [out, in / group] float16; or int8, and then multiplied by those of the super-block
    minimums: Tensor | None  # the same; where they are, zero is 0
    bits: int  # 4, 6 or 8
    zero: int = 0
    group: int = 32
    super_scales: Tensor | None = None  # [out, in / 256] float16
    super_minimums: Tensor | None = None

    def rows(self, places: Tensor | slice) -> Quantised:
        """Some of its rows."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        some: dict[str, Any] = {name: part[places] for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(self, **some)

    def dense(self) -> Tensor:
        """[out, in] float32."""
        q = (self.q.float() - self.zero).unflatten(1, (-1, self.group))
        w = q * _spread(self.scales, self.super_scales).unsqueeze(2)
        if self.minimums is not None:
            w = w + _spread(self.minimums, self.super_minimums).unsqueeze(2)
        return w.flatten(1)


def _spread(groups: Tensor, supers: Tensor | None) -> Tensor:
    """[out, groups] float32"""
    if supers is None:
        return groups.float()
    return groups.float() * supers.float().repeat_interleave(groups.shape[1] // supers.shape[1], 1)


def from_gguf(tensor: GGUFTensor) -> Quantised | None:
    """The file's own integers and scales; None for kinds that are not kept as they are."""
    reader = _READERS.get(tensor.kind)
    return None if reader is None or len(tensor.shape) != 2 else reader(tensor.raw)


def quantise(weight: Tensor, bits: int) -> Quantised:
    """A dense [out, in] matrix, rounded: 4 bits between minimum and maximum, or 8 bits around zero; groups of 32."""
    groups = weight.float().unflatten(1, (-1, 32))
    if bits == 8:
        scales = (groups.abs().amax(2) / 127).half()
        q = (groups / scales.float().clamp(min=1e-8).unsqueeze(2)).round().clamp(-127, 127) + 128
        return Quantised(q.to(torch.uint8).flatten(1), scales, None, 8, zero=128)
    low, high = groups.amin(2), groups.amax(2)
    scales, minimums = ((high - low) / 15).half(), low.half()
    q = (groups - minimums.float().unsqueeze(2)) / scales.float().clamp(min=1e-8).unsqueeze(2)
    return Quantised(q.round().clamp(0, 15).to(torch.uint8).flatten(1), scales, minimums, 4)


def _halves(raw: np.ndarray) -> np.ndarray:
    """[..., 2] bytes -> [...] float16."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _nibbles(qs: np.ndarray) -> Tensor:
    """[out, blocks, 16] bytes -> [out, blocks * 32]: the low halves come first in each block."""
    return _tensor(np.concatenate([qs & 15, qs >> 4], 2).reshape(qs.shape[0], -1))


def _q4_0(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 18)
    return Quantised(_nibbles(blocks[..., 2:]), _tensor(_halves(blocks[..., :2])), None, 4, zero=8)


def _q4_1(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 20)
    return Quantised(
        _nibbles(blocks[..., 4:]), _tensor(_halves(blocks[..., :2])), _tensor(_halves(blocks[..., 2:4])), 4
    )


def _fifth_bits(high: np.ndarray) -> np.ndarray:
    """[out, blocks, 4] bytes -> [out, blocks, 32] of 0 or 16."""
    return np.unpackbits(high, axis=2, bitorder="little") << 4


def _q5(blocks: np.ndarray, scale_bytes: int) -> Tensor:
    low = blocks[..., scale_bytes + 4 :]
    q = np.concatenate([low & 15, low >> 4], 2) | _fifth_bits(blocks[..., scale_bytes : scale_bytes + 4])
    return _tensor(q.reshape(q.shape[0], -1))


def _q5_0(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 22)
    return Quantised(_q5(blocks, 2), _tensor(_halves(blocks[..., :2])), None, 8, zero=16)


def _q5_1(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 24)
    return Quantised(_q5(blocks, 4), _tensor(_halves(blocks[..., :2])), _tensor(_halves(blocks[..., 2:4])), 8)


def _q8_0(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 34)
    q = blocks[..., 2:] ^ np.uint8(128)  # two's complement -> offset by 128
    return Quantised(_tensor(q.reshape(raw.shape[0], -1)), _tensor(_halves(blocks[..., :2])), None, 8, zero=128)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, blocks, 12] bytes -> 6-bit scales and minimums of the 8 groups, [out, blocks, 8] each."""
    a, b, c = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], 2)
    minimums = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], 2)
    return scales, minimums


def _k_quantised(blocks: np.ndarray, q: np.ndarray, bits: int) -> Quantised:
    """Q4_K and Q5_K: a scale or minimum is a half, one for 256 inputs, times a small integer, one for 32."""
    rows = blocks.shape[0]
    scales, minimums = (_tensor(part.reshape(rows, -1).astype(np.int8)) for part in _k_scales(blocks[..., 4:16]))
    supers, lows = _tensor(_halves(blocks[..., :2])), _tensor(-_halves(blocks[..., 2:4]))
    return Quantised(_tensor(q.reshape(rows, -1)), scales, minimums, bits, super_scales=supers, super_minimums=lows)


def _k_nibbles(qs: np.ndarray) -> np.ndarray:
    """[out, blocks, 128] bytes -> [out, blocks, 4, 2, 32]: 32 low halves, then the 32 high halves of the same bytes."""
    parts = qs.reshape(*qs.shape[:2], 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], 3)


def _q4_k(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 144)
    return _k_quantised(blocks, _k_nibbles(blocks[..., 16:]), 4)


def _q5_k(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 176)
    bits = np.unpackbits(blocks[..., 16:48][..., None], axis=3, bitorder="little")  # [out, blocks, 32, 8 groups]
    q = _k_nibbles(blocks[..., 48:]) | (bits.swapaxes(2, 3).reshape(*bits.shape[:2], 4, 2, 32) << 4)
    return _k_quantised(blocks, q, 8)


def _q6_k(raw: np.ndarray) -> Quantised:
    blocks = raw.reshape(raw.shape[0], -1, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], 3).reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
    scales = _tensor(blocks[..., 192:208].reshape(raw.shape[0], -1).view(np.int8))
    q = _tensor((low | (high << 4)).reshape(raw.shape[0], -1))
    return Quantised(q, scales, None, 6, zero=32, group=16, super_scales=_tensor(_halves(blocks[..., 208:])))


_READERS: dict[str, Callable[[np.ndarray], Quantised]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
KINDS = tuple(_READERS)
