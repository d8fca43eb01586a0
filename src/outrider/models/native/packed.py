"""Packed matrices: quantised weights in the layout that the kernels read."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.models.large_pages import Arena
from outrider.models.native import structs
from outrider.models.native.library import library
from outrider.models.quant import Quantised

TILE, BLOCK, ROWS = 16, 32, 8  # outputs of a tile, inputs of a block, rows of a group: as in kernels.cpp
WORDS = 16  # bits of activations where nothing else is asked for: with 8 half of the greedy texts change (kernels.cpp)
LARGE = 1 << 17  # bytes: from this size on a matrix is put into large pages; smaller ones stay in the processor's cache
ARENA = Arena()
# What the kernels run, by bits: inputs of a group, whether there are super-blocks, whether there are minimums.
KINDS = {
    4: ((32, False, False), (32, False, True), (32, True, True)),
    6: ((16, True, False),),
    8: ((32, False, False), (32, False, True), (32, True, True)),
}
ZEROS = {4: 8, 6: 32}  # by bits, without minimums: what the kernels take off (start_of)


def packable(outputs: int, inputs: int) -> bool:
    return outputs % TILE == 0 and inputs % BLOCK == 0


class Packed:
    """One or more quantised matrices that read the same input; their outputs lie side by side. y = x W^T + b."""

    def __init__(
        self, matrices: Sequence[Quantised], biases: Sequence[Tensor | None] = (None,), activations: int = WORDS
    ) -> None:
        """`activations`: bits that its inputs are rounded to, 16 or 8."""
        parts = _merge(list(matrices))
        self._keep = [_placed(_tiles(part)) for part in parts]  # the tensors that the structures point into
        bias = self._keep_bias = _bias(matrices, biases)
        self.outputs, self.inputs = sum(part.q.shape[0] for part in parts), parts[0].q.shape[1]
        self._work: PackedWorkspace | None = None
        self.joint = structs.JoinedMatrices(count=len(parts), outputs=self.outputs, activations=activations)
        offset = 0
        for place, (part, tensors) in enumerate(zip(parts, self._keep, strict=True)):
            at = None if bias is None else bias.data_ptr() + 4 * offset
            self.joint.parts[place] = _matrix(part, tensors, at)
            offset += part.q.shape[0]

    def __call__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """With `norm` [in]: of x normalised by its root mean square."""
        if x.dim() != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"x must be [rows, {self.inputs}], not {list(x.shape)}")
        x = x.float().contiguous()
        y = torch.empty(x.shape[0], self.outputs)
        if self._work is None or self._work.rows < x.shape[0]:
            self._work = PackedWorkspace(x.shape[0], self.inputs)
        use_torch_threads()
        library().outrider_linear(
            ctypes.byref(self.joint),
            ctypes.c_void_p(x.data_ptr()),
            None if norm is None else ctypes.c_void_p(norm.data_ptr()),
            ctypes.c_float(eps),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_void_p(y.data_ptr()),
            ctypes.byref(self._work.struct),
        )
        return y

    def rows(self, ids: Tensor, part: int = 0) -> Tensor:
        """Rows of the first part (or another) as float32 [n, in]: an embedding."""
        ids = ids.long().contiguous()
        to = torch.empty(ids.shape[0], self.inputs)
        written = library().outrider_rows(
            ctypes.byref(self.joint.parts[part]),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_int64(ids.shape[0]),
            ctypes.c_void_p(to.data_ptr()),
        )
        if written < ids.shape[0]:
            raise IndexError(f"row {int(ids[written])} of a matrix of {self.joint.parts[part].outputs}")
        return to

    def put(self, place: int, row: Quantised) -> None:
        """Outputs from this one to the end of its tile become a row [1, in] of the same kind. Of one part without
        super-blocks, while no pass runs."""
        numbers = [_lanes_of(row), *(each.unflatten(1, (self.inputs // BLOCK, -1)) for each in _groups(row))]
        tile, lane = place // TILE, place % TILE
        for lanes, each in zip(self._lanes, numbers, strict=True):
            lanes[tile // 2, :, tile % 2, :, lane:] = each.numpy()[0][:, :, None]

    @functools.cached_property
    def _lanes(self) -> list[np.ndarray]:
        """Of the first part: what a record has of an output, [pair of tiles, block, tile of the pair, vector or group,
        lane, ...], views of the records."""
        matrix, records = self.joint.parts[0], self._keep[0]["records"]
        weights, groups = 2 * TILE * BLOCK * matrix.bits // 8, 2 * TILE * BLOCK // matrix.group * 2
        sizes = [weights, *[groups] * (2 if matrix.minimums else 1)]
        views = [part if place == 0 else part.view(torch.float16) for place, part in enumerate(records.split(sizes, 2))]
        lanes = [views[0].unflatten(2, (2, -1, TILE, 4)), *(view.unflatten(2, (2, -1, TILE)) for view in views[1:])]
        return [each.numpy() for each in lanes]

    @property
    def weight(self) -> Tensor:
        """All of it as float32 [out, in]."""
        parts = (torch.arange(self.joint.parts[part].outputs) for part in range(self.joint.count))
        return torch.cat([self.rows(ids, part) for part, ids in enumerate(parts)])

    @property
    def bias(self) -> Tensor | None:
        return self._keep_bias

    @property
    def numbers(self) -> list[Tensor | str | None]:
        """All that its products depend on: the tensors, and how they are read."""
        parts = [self.joint.parts[place] for place in range(self.joint.count)]
        kinds = [(part.outputs, part.inputs, part.bits, part.zero, part.group) for part in parts]
        tensors = [tensor for tensors in self._keep for tensor in tensors.values()]
        return [f"{kinds} {self.joint.activations}", *tensors, self._keep_bias]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._keep for tensor in tensors.values())


class PackedWorkspace:
    """Buffers of a pass, kept between passes."""

    def __init__(self, rows: int, widest: int) -> None:
        """`widest`: the most inputs of any matrix."""
        self.rows = rows
        self._keep = {**activations(rows, widest), "normed": torch.empty(rows, widest)}
        self.struct = structs.Work(**{name: tensor.data_ptr() for name, tensor in self._keep.items()})

    def add(self, **tensors: Tensor) -> None:
        """More buffers of the structure."""
        self._keep.update(tensors)
        for name, tensor in tensors.items():
            setattr(self.struct, name, tensor.data_ptr())


def activations(rows: int, inputs: int, prefix: str = "") -> dict[str, Tensor]:
    """Memory for the rounded inputs of a product."""
    blocks, over = inputs // BLOCK, ROWS * 6  # what a whole group of rows would have may be read
    found = {
        f"{prefix}q": torch.empty(rows, 2 * inputs, dtype=torch.int8),
        f"{prefix}scale": torch.zeros(rows * blocks + over),
        f"{prefix}sums": torch.zeros(rows * blocks * 6 + over),
    }
    kernels = library()
    kernels.outrider_amx_bytes.restype = ctypes.c_int64
    if size := kernels.outrider_amx_bytes(ctypes.c_int64(rows), ctypes.c_int64(inputs)):
        found[f"{prefix}amx"] = torch.zeros(size, dtype=torch.uint8)
    return found


def use_torch_threads() -> None:
    """The kernels share the work among as many threads as torch would."""
    library().outrider_threads(ctypes.c_int64(torch.get_num_threads()))


def _bias(matrices: Sequence[Quantised], biases: Sequence[Tensor | None]) -> Tensor | None:
    """One bias for all of the outputs; where a matrix has none, zeros."""
    if all(bias is None for bias in biases):
        return None
    parts = zip(matrices, biases, strict=True)
    return torch.cat([torch.zeros(m.q.shape[0]) if bias is None else bias.float() for m, bias in parts])


def _merge(matrices: list[Quantised]) -> list[Quantised]:
    """Matrices of one kind become one: the threads share it evenly."""
    first = matrices[0]
    if any(_kind(matrix) != _kind(first) for matrix in matrices):
        return matrices
    joined: dict[str, Any] = {
        field.name: torch.cat([getattr(matrix, field.name) for matrix in matrices])
        for field in fields(Quantised)
        if isinstance(getattr(first, field.name), Tensor)
    }
    return [replace(first, **joined)]


def _kind(m: Quantised) -> tuple[int, int, int, bool, bool]:
    return m.bits, m.zero, m.group, m.super_scales is not None, m.minimums is not None


def _tiles(m: Quantised) -> dict[str, Tensor]:
    """The tensors of a matrix as the kernels read them, under the structure's names."""
    # [tile, lane, block, vector, 4] -> [tile, block, vector, lane, 4]
    q = _lanes_of(m).unflatten(0, (-1, TILE)).permute(0, 2, 3, 1, 4)
    groups = [_by_tiles(each).unflatten(1, (m.q.shape[1] // BLOCK, -1)) for each in _groups(m)]
    supers = {"super_scales": m.super_scales, "super_minimums": m.super_minimums}
    found = {name: _even(_by_tiles(each)) for name, each in supers.items() if each is not None}
    return {"records": _records([_even(each) for each in (q, *groups)]), **found}


def _lanes_of(m: Quantised) -> Tensor:
    """Its integers as a record has them, [out, block, vector, 4]: at 4 bits vectors j and j + 4 share bytes, at 6 bits
    the last of each four lies in the upper bits of the others."""
    q = m.q.unflatten(1, (-1, 8, 4))
    if m.bits == 4:
        return q[:, :, :4] | (q[:, :, 4:] << 4)
    return _sixes(q.unflatten(2, (2, 4))).flatten(2, 3) if m.bits == 6 else q


def _sixes(q: Tensor) -> Tensor:
    """[..., 4 vectors, 4] of 6 bits -> [..., 3 vectors, 4] of 8."""
    upper = q[..., 3:, :] >> torch.tensor([[0], [2], [4]], dtype=torch.uint8)
    return upper.bitwise_left_shift_(6).bitwise_or_(q[..., :3, :])  # in place: an output matrix has 200 MB


def _groups(m: Quantised) -> list[Tensor]:
    """What its groups have, [out, groups] each."""
    return [each for each in (m.scales, m.minimums) if each is not None]


def _even(tiles: Tensor) -> Tensor:
    """With a tile of zeros where their number is odd: a record has two."""
    return torch.cat([tiles, torch.zeros_like(tiles[:1])]) if len(tiles) % 2 else tiles


def _records(parts: Sequence[Tensor]) -> Tensor:
    """[pair of tiles, block, bytes] of parts [tile, block, ...]: of each block the bytes of both tiles in the first
    part, then in the next. Copied once: an output matrix may have half a gigabyte."""
    pairs, blocks = len(parts[0]) // 2, parts[0].shape[1]
    sizes = [2 * part[0, 0].nbytes for part in parts]
    records = torch.empty(pairs, blocks, sum(sizes), dtype=torch.uint8)
    for part, place in zip(parts, records.split(sizes, 2), strict=True):
        place.view(part.dtype).unflatten(2, (2, *part.shape[2:])).copy_(part.unflatten(0, (pairs, 2)).transpose(1, 2))
    return records


def _placed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where a pass streams through them without waiting; what is small is in a cache anyway."""
    return ARENA.copies(tensors) if sum(tensor.nbytes for tensor in tensors.values()) >= LARGE else tensors


def _by_tiles(groups: Tensor) -> Tensor:
    """[out, groups] -> [tile, groups, lane]"""
    return groups.view(groups.shape[0] // TILE, TILE, -1).transpose(1, 2).contiguous()


def _matrix(m: Quantised, tensors: dict[str, Tensor], bias: int | None) -> structs.Matrix:
    dtype = torch.float16 if m.super_scales is None else torch.int8
    assert _kind(m)[2:] in KINDS[m.bits], f"the kernels have no such matrix: {_kind(m)}"
    known = m.minimums is not None or m.zero == ZEROS.get(m.bits, m.zero)
    assert known, f"the kernels have no such matrix: zero {m.zero}"
    assert m.scales.dtype == dtype, f"the kernels have no such matrix: scales are {m.scales.dtype}"
    return structs.Matrix(
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        bias=bias,
        outputs=m.q.shape[0],
        inputs=m.q.shape[1],
        bits=m.bits,
        zero=m.zero,
        group=m.group,
        minimums=m.minimums is not None,
    )
