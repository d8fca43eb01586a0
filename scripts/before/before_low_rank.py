"""What adapters add to a product: y += B (A x) for rows of different adapters and of none.

The inner values A x of each row are computed by a kernel of their own, before the product; the product adds B's part
where it stores its outputs. An adapter is cut into units of UNIT inner values, so a rank is any number of units, and a
pass reads the units of its own adapters only.

The order of a row's sums is fixed by the model and by the row's own adapter. Inner values are summed over their inputs
in parts whose sizes the matrix decides, by the matrix units, and the parts are added in order. Outputs are summed over
the units of all adapters of the pass; those of another adapter count as zeros, which change no bit, and a row's own
come in their own order, UNIT values at a time, which is what the matrix units take at once (docs/decisions/0004).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.batch import FEW_ROWS
from outrider.models.cuda.launch import begin_after, early, nearly_done

UNIT = 16  # inner values of a unit: what the matrix units sum at once; a smaller rank is filled up with zeros
PLACES = 16  # units of one adapter, at most: rank 256 (models/adapters/adapter.py, MOST_RANK)
HEADER = 4  # numbers before the units of a table: how many units the pass has, and what makes 16 bytes of it
PART = 512  # inputs of one part of an inner value's sum, about: short sums end soon, and few parts are added
MOST_PARTS = 8  # of one sum: every program of the product adds them up
BLOCK = 64  # inputs at a time

_UNIT, _PLACES, _HEADER = tl.constexpr(UNIT), tl.constexpr(PLACES), tl.constexpr(HEADER)


@dataclass(frozen=True, eq=False)
class LowRankSum:
    """What the adapters of a pass add to one joined matrix."""

    a: Tensor  # [units, matrices, UNIT, inputs]
    b: Tensor  # [units, outputs, UNIT]
    ends: tuple[int, ...]  # the outputs of the joined matrix at which each of its matrices ends
    inner: Tensor  # float32: where the inner values go
    units: Tensor  # [HEADER + 3 most] int32: how many; of each its number, its adapter, its place in the adapter
    owners: Tensor  # [rows] int32: the adapter of each row; 0: none
    order: Tensor  # [rows] int32: the rows, those of one adapter side by side
    tiles: Tensor  # [4, tiles] int32: rows of one adapter: its first unit, its units, the first in `order`, rows
    tile: int  # rows of a tile, at most

    @property
    def most(self) -> int:
        """Units that a pass can have."""
        return (len(self.units) - HEADER) // 3

    @property
    def width(self) -> int:
        """Inner values of a row."""
        return len(self.ends) * PLACES * UNIT


def part_size(inputs: int) -> int:
    """Inputs of one part of a sum over as many."""
    parts = min(MOST_PARTS, triton.cdiv(inputs, PART))
    return triton.cdiv(triton.cdiv(inputs, BLOCK), parts) * BLOCK


def part_count(inputs: int) -> int:
    return triton.cdiv(inputs, part_size(inputs))


@triton.jit(do_not_specialize=["count", "tiles"])
def _multiply_inner(
    x_ptr, a_ptr, inner_ptr, units_ptr, order_ptr, tiles_ptr, count, tiles, most,
    MATRICES: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    SOON: tl.constexpr,
):  # fmt: skip
    """inner [parts, count, MATRICES, PLACES, UNIT]: one part of A x for some rows of one adapter."""
    tile, matrix, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, held = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + tiles + tile)
    start, size = tl.load(tiles_ptr + 2 * tiles + tile), tl.load(tiles_ptr + 3 * tiles + tile)
    lane, inner, value = tl.arange(0, ROWS), tl.arange(0, BK), tl.arange(0, _UNIT)
    live = lane < size
    rows = tl.load(order_ptr + start + lane, mask=live, other=0).to(tl.int64)
    begin_after(SOON)
    nearly_done(SOON)  # x is there: the product may begin, and waits for this kernel before it reads inner values
    for number in range(first, first + held):
        unit = tl.load(units_ptr + _HEADER + number).to(tl.int64)
        place = tl.load(units_ptr + _HEADER + 2 * most + number)
        a_rows = a_ptr + ((unit * MATRICES + matrix) * _UNIT + value[:, None]) * K + inner[None, :]
        x_rows = x_ptr + rows[:, None] * K + inner[None, :]
        total = tl.zeros([ROWS, _UNIT], tl.float32)
        for k in range(part * SIZE, tl.minimum((part + 1) * SIZE, K), BK):
            fits = (k + inner < K)[None, :]
            x = tl.load(x_rows + k, mask=live[:, None] & fits, other=0.0)
            a = tl.load(a_rows + k, mask=fits, other=0.0)
            total = tl.dot(x, a.T, total, input_precision="ieee")
        to = inner_ptr + (((part * count + rows) * MATRICES + matrix) * _PLACES + place)[:, None] * _UNIT
        tl.store(to + value[None, :], total, mask=live[:, None])


@triton.jit
def _added(
    delta, inner_ptr, b_ptr, units_ptr, most, count, rows, owner, outputs, inside, size, matrix,
    MATRICES: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, WIDE)
    value = lane % _UNIT
    held = tl.load(units_ptr)
    at_row = inner_ptr + rows.to(tl.int64)[:, None] * (MATRICES * _PLACES * _UNIT) + value[None, :]
    at_output = b_ptr + outputs.to(tl.int64)[:, None] * _UNIT + value[None, :]
    stride = count.to(tl.int64) * (MATRICES * _PLACES * _UNIT)
    for begin in tl.range(0, held, WIDE // _UNIT, num_stages=STAGES):
        number = begin + lane // _UNIT
        live = number < held
        unit = tl.load(units_ptr + _HEADER + number, mask=live, other=0).to(tl.int64)
        adapter = tl.load(units_ptr + _HEADER + most + number, mask=live, other=-1)
        place = tl.load(units_ptr + _HEADER + 2 * most + number, mask=live, other=0)
        own = owner[:, None] == adapter[None, :]
        at = at_row + ((place + matrix * _PLACES) * _UNIT)[None, :]
        inner = tl.zeros(own.shape, tl.float32)
        for part in tl.static_range(PARTS):
            inner += tl.load(at + part * stride, mask=own, other=0.0)
        b = tl.load(at_output + (unit * (size.to(tl.int64) * _UNIT))[None, :],
                    mask=inside[:, None] & live[None, :], other=0.0)  # fmt: skip
        inner = inner.to(b.dtype)
        if ROWS_FIRST:
            delta = tl.dot(inner, b.T, delta, input_precision="ieee")
        else:
            delta = tl.dot(b, inner.T, delta, input_precision="ieee")
    return delta


@triton.jit
def added(
    delta, inner_ptr, b_ptr, units_ptr, most, count, rows, owner, outputs, inside, column, size, matrix,
    MATRICES: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, WIDTH: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """What each row's adapter adds to WIDTH outputs from `column` on, before any scale: [rows, outputs], or
    transposed. `delta`: zeros of that form. `owner`: of each row, 0 for rows of none. `size`: outputs of the joined
    matrix. With three matrices that of an output is told by FIRST_END and SECOND_END, else it is `matrix`."""
    if MATRICES == 3:
        if column < FIRST_END:
            delta = _added(
                delta, inner_ptr, b_ptr, units_ptr, most, count, rows, owner, outputs, inside & (outputs < FIRST_END),
                size, 0, MATRICES, PARTS, WIDE, STAGES, ROWS_FIRST,
            )  # fmt: skip
        if (column < SECOND_END) & (column + WIDTH > FIRST_END):
            delta = _added(
                delta, inner_ptr, b_ptr, units_ptr, most, count, rows, owner, outputs,
                inside & (outputs >= FIRST_END) & (outputs < SECOND_END),
                size, 1, MATRICES, PARTS, WIDE, STAGES, ROWS_FIRST,
            )  # fmt: skip
        if column + WIDTH > SECOND_END:
            delta = _added(
                delta, inner_ptr, b_ptr, units_ptr, most, count, rows, owner, outputs, inside & (outputs >= SECOND_END),
                size, 2, MATRICES, PARTS, WIDE, STAGES, ROWS_FIRST,
            )  # fmt: skip
    else:
        delta = _added(
            delta, inner_ptr, b_ptr, units_ptr, most, count, rows, owner, outputs, inside,
            size, matrix, MATRICES, PARTS, WIDE, STAGES, ROWS_FIRST,
        )  # fmt: skip
    return delta


class _Arguments(NamedTuple):
    """Of a product's kernel."""

    tensors: tuple[Tensor | None, ...] = (None,) * 4
    most: int = 0
    sizes: tuple[int, ...] = (0,) * 6


_NO_ADAPTERS = _Arguments()


def low_rank_arguments(own: LowRankSum | None, inputs: int, rows: int) -> _Arguments:
    """What the kernel of a product with `inputs` inputs takes that has `rows` rows in a program."""
    if own is None:
        return _NO_ADAPTERS
    first, second = own.ends[0], own.ends[min(1, len(own.ends) - 1)]
    # units at once: many of them where rows are few, so that few steps wait for memory; fewer where registers are short
    parts = part_count(inputs)
    few = rows <= FEW_ROWS and parts <= 4
    wide = 4 * UNIT if few else 2 * UNIT
    stages = 2 if few else 1  # steps that are read ahead: what they take grows with rows and parts
    tensors = own.inner, own.b, own.units, own.owners
    return _Arguments(tensors, own.most, (len(own.ends), first, second, parts, wide, stages))


def multiply_inner(x: Tensor, own: LowRankSum) -> None:
    """The inner values of the rows x [rows, inputs]."""
    rows, inputs = x.shape
    matrices, soon = len(own.ends), early(x.device)
    _multiply_inner[(own.tiles.shape[1], matrices, part_count(inputs))](
        x, own.a, own.inner, own.units, own.order, own.tiles, rows, own.tiles.shape[1], own.most,
        matrices, inputs, part_size(inputs), BLOCK, own.tile, soon,
        num_warps=4 if own.tile > UNIT else 2, num_stages=4, launch_pdl=soon,
    )  # fmt: skip
