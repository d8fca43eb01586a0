"""Adapters as the kernels read them: 8 bits a value, one scale for each of the inner values.

A pass with one row is as fast as memory; in float32 an adapter of rank 16 would be a fifth of what it reads, in 8 bits
it is a twentieth (docs/decisions/0009).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.adapters.adapter import EMBEDDING, OUTPUT, Adapter, AdapterBase, LowRank
from outrider.models.adapters.dense import EndPairs, end_pairs, joined
from outrider.models.large_pages import ALIGN, PAGE, large
from outrider.models.native import structs
from outrider.models.native.packed import TILE

QUAD = 4  # values of a row that one instruction multiplies
READ_OVER = 256  # bytes after the last matrix that may be read
STEPS = 127  # the largest number of 8 bits with a sign


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    layers: ctypes.Array[structs.AdapterLayer]
    ends: EndPairs
    widest: int  # the most inner values of any matrix
    nbytes: int
    memory: Tensor  # what the structures point into

    @functools.cached_property
    def address(self) -> int:
        return ctypes.addressof(self.layers)


@dataclass(frozen=True, eq=False)
class _PackedPairs:
    """The pairs of one joined matrix, not yet where they will lie."""

    a: Tensor  # uint8 [rank / 16, inputs / 4, 16, 4]
    scales: Tensor  # [rank]
    b: Sequence[Tensor]  # uint8 [outputs / 16, rank / 4, 16, 4] each
    parts: Sequence[tuple[int, LowRank]]  # the first output of each


def packed_bytes(adapter: Adapter) -> int:
    """At most what `pack` takes."""
    small = sum(
        pair.a.shape[1] * (pair.rank + TILE) + pair.b.shape[0] * (pair.rank + QUAD) + 8 * pair.rank
        for pair in _in_layers(adapter)
    )
    ends = (adapter.pairs[name] for name in (EMBEDDING, OUTPUT) if name in adapter.pairs)
    places = 3 * ALIGN * len(adapter.pairs) + READ_OVER
    return small + places + sum(pair.a.nbytes + pair.b.nbytes for pair in ends)


def pack(adapter: Adapter, base: AdapterBase, layers: int) -> PackedAdapter:
    found = [{field: _packed(own) for field, own in joined(adapter, base, i).items()} for i in range(layers)]
    tensors = [tensor for layer in found for each in layer.values() for tensor in (each.a, each.scales, *each.b)]
    size = sum(_aligned(tensor.nbytes) for tensor in tensors) + READ_OVER
    memory = large(size) if size >= PAGE else torch.zeros(size + ALIGN, dtype=torch.uint8)
    place = _Placing(memory)
    array = (structs.AdapterLayer * layers)()
    for struct, layer in zip(array, found, strict=True):
        for field, each in layer.items():
            setattr(struct, field, _matrix(each, place))
    ends = end_pairs(adapter, torch.float32, torch.device("cpu"))
    widest = max((len(each.scales) for layer in found for each in layer.values()), default=0)
    return PackedAdapter(array, ends, widest, size + ends.nbytes, memory)


def _in_layers(adapter: Adapter) -> list[LowRank]:
    return [pair for name, pair in adapter.pairs.items() if name not in (EMBEDDING, OUTPUT)]


def _packed(parts: Sequence[tuple[int, LowRank]]) -> _PackedPairs:
    """The inner values of all parts side by side, filled up to a tile."""
    a = torch.cat([pair.a for _, pair in parts])
    fill = -len(a) % TILE
    a = torch.cat([a, a.new_zeros(fill, a.shape[1])])
    whole, scales = _rounded(a, 1)
    columns = [_rounded(pair.b, 0) for _, pair in parts]
    factors = [step * pair.scale for (_, step), (_, pair) in zip(columns, parts, strict=True)]
    scales = scales * torch.cat([*factors, a.new_zeros(fill)])
    return _PackedPairs(
        _tiles(whole),
        scales,
        [_tiles(b) for b, _ in columns],
        parts,
    )


def _rounded(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Whole numbers of 8 bits along `dim`, and what one step is worth."""
    step = values.abs().amax(dim) / STEPS
    step = torch.where(step > 0, step, torch.ones_like(step))
    return (values / step.unsqueeze(dim)).round().to(torch.int8), step


def _tiles(whole: Tensor) -> Tensor:
    """Rows of 8 bits as those of a packed matrix: 16 of them side by side, 4 values of each at a time, 128 added."""
    filled = torch.nn.functional.pad(whole, (0, -whole.shape[1] % QUAD))
    tiles = filled.view(-1, TILE, filled.shape[1] // QUAD, QUAD).transpose(1, 2).contiguous()
    return tiles.view(torch.uint8) ^ 128


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class _Placing:
    """Tensors one after the other, in the order in which a pass reads them."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._at = memory, -memory.data_ptr() % ALIGN

    def __call__(self, tensor: Tensor) -> int:
        """The address of a copy."""
        space = self._memory[self._at : self._at + tensor.nbytes]
        space.copy_(tensor.contiguous().view(torch.uint8).view(-1))
        self._at += _aligned(tensor.nbytes)
        return space.data_ptr()


def _matrix(each: _PackedPairs, place: _Placing) -> structs.AdapterMatrix:
    matrix = structs.AdapterMatrix(
        a=place(each.a), scales=place(each.scales), rank=len(each.scales), count=len(each.parts)
    )
    low = 0
    for i, ((first, pair), b) in enumerate(zip(each.parts, each.b, strict=True)):
        matrix.parts[i] = structs.AdapterPart(b=place(b), first=first, outputs=pair.b.shape[0], low=low, rank=pair.rank)
        low += pair.rank
    return matrix
