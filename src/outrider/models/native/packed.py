"""Packed matrices: quantised weights in the layout that the kernels read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.native import structs
from outrider.models.native.library import library
from outrider.models.quant import Quantised

TILE, BLOCK = 16, 32


def packable(outputs: int, inputs: int) -> bool:
    return outputs % TILE == 0 and inputs % BLOCK == 0


class Packed:
    """One or more quantised matrices that read the same input; their outputs lie side by side. y = x W^T + b."""

    def __init__(self, matrices: Sequence[Quantised], biases: Sequence[Tensor | None] = (None,)) -> None:
        parts = _merge(list(matrices))
        self._keep = [_tiles(part) for part in parts]  # the tensors that the structures point into
        bias = None if biases[0] is None else torch.cat([b.float() for b in biases if b is not None]).contiguous()
        self._keep_bias = bias
        self.outputs, self.inputs = sum(part.q.shape[0] for part in parts), parts[0].q.shape[1]
        self.joint = structs.Joint(count=len(parts), outputs=self.outputs)
        offset = 0
        for place, (part, tensors) in enumerate(zip(parts, self._keep, strict=True)):
            at = None if bias is None else bias.data_ptr() + 4 * offset
            self.joint.parts[place] = _matrix(part, tensors, at)
            offset += part.q.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        y = torch.empty(x.shape[0], self.outputs)
        work = Workspace(x.shape[0], self.inputs)
        library().outrider_linear(
            ctypes.byref(self.joint),
            ctypes.c_void_p(x.data_ptr()),
            None,
            ctypes.c_float(0.0),
            ctypes.c_int64(x.shape[0]),
            ctypes.c_void_p(y.data_ptr()),
            ctypes.byref(work.struct),
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the first part as float32 [n, in]: an embedding."""
        to = torch.empty(ids.shape[0], self.inputs)
        library().outrider_rows(
            ctypes.byref(self.joint.parts[0]),
            ctypes.c_void_p(ids.contiguous().data_ptr()),
            ctypes.c_int64(ids.shape[0]),
            ctypes.c_void_p(to.data_ptr()),
        )
        return to

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for tensors in self._keep for t in tensors if t is not None)


class Workspace:
    """Buffers of a pass, kept between passes."""

    def __init__(self, rows: int, widest: int) -> None:
        """`widest`: the most inputs of any matrix."""
        self.rows = rows
        blocks = widest // BLOCK
        self._keep = {
            "q": torch.empty(rows, 2 * widest, dtype=torch.int8),
            "scale": torch.empty(rows, blocks),
            "sum": torch.empty(rows, blocks, 3),
            "normed": torch.empty(rows, widest),
        }
        self.struct = structs.Work(**{name: tensor.data_ptr() for name, tensor in self._keep.items()})

    def add(self, **tensors: Tensor) -> None:
        """More buffers of the structure."""
        self._keep.update(tensors)
        for name, tensor in tensors.items():
            setattr(self.struct, name, tensor.data_ptr())


def _merge(matrices: list[Quantised]) -> list[Quantised]:
    """Matrices of one kind become one: the threads share it evenly."""
    first = matrices[0]
    if any(_kind(matrix) != _kind(first) for matrix in matrices):
        return matrices
    minimums = None if first.minimums is None else torch.cat([m.minimums for m in matrices if m.minimums is not None])
    return [
        Quantised(
            torch.cat([m.q for m in matrices]),
            torch.cat([m.scales for m in matrices]),
            minimums,
            first.bits,
            first.zero,
            first.group,
        )
    ]


def _kind(m: Quantised) -> tuple[object, ...]:
    return m.bits, m.zero, m.group, m.scales.dtype, m.minimums is None


def _tiles(m: Quantised) -> tuple[Tensor, Tensor, Tensor | None]:
    outputs, inputs = m.q.shape
    # [tile, lane, block, vector, 4] -> [tile, block, vector, lane, 4]
    q = m.q.view(outputs // TILE, TILE, inputs // BLOCK, 8, 4).permute(0, 2, 3, 1, 4)
    q = (q[:, :, :4] | (q[:, :, 4:] << 4)) if m.bits == 4 else q
    return q.contiguous(), _lanes(m.scales), None if m.minimums is None else _lanes(m.minimums)


def _lanes(groups: Tensor) -> Tensor:
    """[out, groups] -> [tile, groups, lane]"""
    return groups.view(groups.shape[0] // TILE, TILE, -1).transpose(1, 2).contiguous()


def _matrix(m: Quantised, tensors: tuple[Tensor, Tensor, Tensor | None], bias: int | None) -> structs.Matrix:
    q, scales, minimums = tensors
    return structs.Matrix(
        q=q.data_ptr(),
        scales=scales.data_ptr(),
        minimums=None if minimums is None else minimums.data_ptr(),
        bias=bias,
        outputs=m.q.shape[0],
        inputs=m.q.shape[1],
        bits=m.bits,
        zero=m.zero,
        group=m.group,
        wide=int(m.scales.dtype == torch.float32),
    )
