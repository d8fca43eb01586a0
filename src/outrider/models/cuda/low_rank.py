"""What adapters add to a product: y += B (A x) for rows of different adapters and of none.

The inner values A x of each row are computed beside the product, and rounded once: by its first programs, which the
others wait for, or by a kernel of their own. The product goes on with B's part where its own sums end. An adapter is
cut into units of UNIT inner values, so a rank is any number of units, and a pass reads the units of its own adapters
only. They are listed in the order in which their adapters' rows come, those of an adapter side by side, so a row's
units are a range of the list.

The order of a row's sums is fixed by the model and by the row's own adapter. Inner values are summed over their inputs
in CHAINS sums, whose inputs the matrix decides, which are added in order. Outputs are summed on over the units of the
pass; those of another adapter count as zeros, which change no bit, and a row's own come in their own order, UNIT values
at a time, which is what the matrix units take at once (docs/decisions/0004).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.batch import FEW_ROWS
from outrider.models.cuda.launch import begin_after, early, fetch, nearly_done
from outrider.models.cuda.tickets import Tickets, tell_done

UNIT = 16  # inner values of a unit: what the matrix units sum at once; a smaller rank is filled up with zeros
PLACES = 16  # units of one adapter, at most: rank 256 (models/adapters/adapter.py, MOST_RANK)
HEADER = 4  # numbers before the units of a table: how many units and tiles the pass has; the most units of an adapter
CHAINS = 4  # sums of one inner value: a sum of many steps waits for itself at each
BLOCK = 64  # inputs that each of them takes at a time
SHARES = 2  # programs that share the units of an adapter
FIRST_SHARES = 4  # the same where they are the product's own
FIRST_TILES = 16  # programs of a product that write the inner values of one matrix
STAGES = 6  # blocks of inputs that such a program has on their way at once, at most
WARPS = 4  # of a product of few rows with adapters, at least
LANES = 192  # inner values and factors of B that a thread of a product holds at once, at most
FEW_WIDE = 64  # inner values that a product takes at once where its pass has no more: a smaller step is over sooner
MANY_WIDE = 32  # inner values that a product of many rows takes at once: rows of a tile are mostly of one adapter

_UNIT, _PLACES, _HEADER, _CHAINS = tl.constexpr(UNIT), tl.constexpr(PLACES), tl.constexpr(HEADER), tl.constexpr(CHAINS)


@dataclass(frozen=True, eq=False)
class LowRankSum:
    """What the adapters of a pass add to one joined matrix."""

    a: Tensor  # [units, matrices, UNIT, inputs]
    b: Tensor  # [units, outputs, UNIT]
    ends: tuple[int, ...]  # the outputs of the joined matrix at which each of its matrices ends
    inner: Tensor  # where the inner values go, in the model's dtype
    units: Tensor  # [HEADER + most] int32: how many units and tiles, the most of an adapter; the units' numbers
    firsts: Tensor  # [rows] int32: the first unit of each row, in the list
    counts: Tensor  # [rows] int32: its units; 0: no adapter
    order: Tensor  # [rows] int32: the rows, those of one adapter side by side
    tiles: Tensor  # [4, tiles] int32: rows of one adapter: its first unit, its units, the first in `order`, rows
    tile: int  # rows of a tile, at most
    tickets: Tickets  # of the products of a pass
    place: int  # which of these products this is


@triton.jit
def _inner_values(
    x_ptr, a_ptr, inner_ptr, units_ptr, rows, live, matrix, number, place,
    MATRICES: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of some rows and one unit."""
    each, value = tl.arange(0, BK), tl.arange(0, _UNIT)
    unit = tl.load(units_ptr + _HEADER + number).to(tl.int64)
    a_rows = a_ptr + ((unit * MATRICES + matrix) * _UNIT + value[:, None]) * K + each[None, :]
    x_rows = x_ptr + rows[:, None] * K + each[None, :]
    first = tl.zeros([ROWS, _UNIT], tl.float32)
    second = tl.zeros([ROWS, _UNIT], tl.float32)
    third = tl.zeros([ROWS, _UNIT], tl.float32)
    fourth = tl.zeros([ROWS, _UNIT], tl.float32)
    for k in tl.range(0, K, _CHAINS * BK, num_stages=STAGES):
        first = _step(first, x_rows, a_rows, k, each, live, K)
        second = _step(second, x_rows, a_rows, k + BK, each, live, K)
        third = _step(third, x_rows, a_rows, k + 2 * BK, each, live, K)
        fourth = _step(fourth, x_rows, a_rows, k + 3 * BK, each, live, K)
    total = (first + second) + (third + fourth)
    to = inner_ptr + ((rows * MATRICES + matrix) * _PLACES + place)[:, None] * _UNIT + value[None, :]
    tl.store(to, total.to(inner_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _fetch(wanted, a_ptr, units_ptr, number, matrix, MATRICES: tl.constexpr, K: tl.constexpr, LINES: tl.constexpr):
    """One unit's A on its way to the cache: lines of 128 bytes."""
    EACH: tl.constexpr = 1024 // a_ptr.dtype.element_ty.primitive_bitwidth
    if wanted:
        unit = tl.load(units_ptr + _HEADER + number).to(tl.int64)
        value, line = tl.arange(0, _UNIT), tl.arange(0, LINES)
        at = ((unit * MATRICES + matrix) * _UNIT + value[:, None]) * K + tl.minimum(line * EACH, K - 1)[None, :]
        fetch(a_ptr + at)


@triton.jit
def _step(total, x_rows, a_rows, k, each, live, K: tl.constexpr):
    fits = (k + each < K)[None, :]
    x = tl.load(x_rows + k, mask=live[:, None] & fits, other=0.0, cache_modifier=".cg")
    a = tl.load(a_rows + k, mask=fits, other=0.0)
    return tl.dot(x, a.T, total, input_precision="ieee")


@triton.jit
def _tile_rows(order_ptr, tiles_ptr, tile, tiles, ROWS: tl.constexpr):
    """Its rows and which of them there are; its first unit, and how many."""
    first, held = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + tiles + tile)
    start, size = tl.load(tiles_ptr + 2 * tiles + tile), tl.load(tiles_ptr + 3 * tiles + tile)
    lane = tl.arange(0, ROWS)
    rows = tl.load(order_ptr + start + lane, mask=lane < size, other=0).to(tl.int64)
    return rows, lane < size, first, held


@triton.jit(do_not_specialize=["tiles"])
def _multiply_inner(
    x_ptr, a_ptr, inner_ptr, units_ptr, order_ptr, tiles_ptr, tiles,
    MATRICES: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr,
    LINES: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """inner [rows, MATRICES, PLACES, UNIT]: A x for some rows of one adapter."""
    tile, matrix, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, live, first, held = _tile_rows(order_ptr, tiles_ptr, tile, tiles, ROWS)
    if LINES > 0:
        _fetch(share < held, a_ptr, units_ptr, first + share, matrix, MATRICES, K, LINES)
    begin_after(SOON)
    nearly_done(SOON)  # x is there: the product may begin, and waits for this kernel before it reads inner values
    for place in range(share, held, SHARES):
        _inner_values(x_ptr, a_ptr, inner_ptr, units_ptr, rows, live, matrix, first + place, place,
                      MATRICES, K, BK, ROWS, 3)  # fmt: skip


@triton.jit
def write_inner(
    number, x_ptr, a_ptr, inner_ptr, units_ptr, order_ptr, tiles_ptr, tiles, tickets_ptr,
    MATRICES: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    SHARES: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The same by the first PROGRAMS programs of the product itself. What they do first is looked up before x is there:
    all that then comes after it is A x."""
    tasks, shares = tl.load(units_ptr + 1) * MATRICES, tl.minimum(tl.load(units_ptr + 2), SHARES)
    within = tl.maximum(tasks, 1)
    rows, live, first, held = _tile_rows(order_ptr, tiles_ptr, number % within // MATRICES, tiles, ROWS)
    if LINES > 0:
        share = number // within
        _fetch(share < tl.minimum(held, shares), a_ptr, units_ptr, first + share, number % MATRICES, MATRICES, K, LINES)
    begin_after(SOON)
    nearly_done(SOON)
    for task in range(number, tasks * shares, PROGRAMS):
        if task != number:
            rows, live, first, held = _tile_rows(order_ptr, tiles_ptr, task % tasks // MATRICES, tiles, ROWS)
        for place in range(task // tasks, held, shares):
            _inner_values(x_ptr, a_ptr, inner_ptr, units_ptr, rows, live, task % MATRICES, first + place, place,
                          MATRICES, K, BK, ROWS, STAGES)  # fmt: skip
    tell_done(tickets_ptr)


@triton.jit
def outer_factors(b_ptr, units_ptr, held, begin, outputs, inside, size, WIDE: tl.constexpr):
    """[outputs, WIDE] of B: of the units from `begin` on. `size`: outputs of the joined matrix."""
    lane = tl.arange(0, WIDE)
    number = begin + lane // _UNIT
    unit = tl.load(units_ptr + _HEADER + number, mask=number < held, other=0).to(tl.int64)
    at = outputs.to(tl.int64)[:, None] * _UNIT + (lane % _UNIT)[None, :]
    return tl.load(b_ptr + (unit * (size.to(tl.int64) * _UNIT))[None, :] + at,
                   mask=inside[:, None] & (number < held)[None, :], other=0.0)  # fmt: skip


@triton.jit
def fetch_factors(b_ptr, units_ptr, held, column, size, BN: tl.constexpr, WIDE: tl.constexpr):
    """What `outer_factors` reads of the first units for BN outputs from `column` on, on its way to the cache."""
    EACH: tl.constexpr = 1024 // b_ptr.dtype.element_ty.primitive_bitwidth
    if held > 0:
        number = tl.minimum(tl.arange(0, WIDE // _UNIT), held - 1)
        unit = tl.load(units_ptr + _HEADER + number).to(tl.int64)
        line = tl.minimum(column * _UNIT + tl.arange(0, BN * _UNIT // EACH) * EACH, size * _UNIT - 1)
        at = b_ptr + (unit * (size.to(tl.int64) * _UNIT))[:, None] + line[None, :]
        fetch(at)


@triton.jit
def first_factors(b_ptr, units_ptr, held, outputs, inside, size, WIDE: tl.constexpr, FEW: tl.constexpr):
    """The same of the first units, [outputs, WIDE] and [outputs, FEW]: one is read, by how many units there are."""
    few, many = 0, held
    if FEW < WIDE:
        few = tl.where(held <= FEW // _UNIT, held, 0)
        many = held - few
    wide = outer_factors(b_ptr, units_ptr, many, 0, outputs, inside, size, WIDE)
    narrow = wide
    if FEW < WIDE:
        narrow = outer_factors(b_ptr, units_ptr, few, 0, outputs, inside, size, FEW)
    return wide, narrow


@triton.jit
def _own_values(inner_ptr, rows, firsts, counts, matrix, begin, MATRICES: tl.constexpr, WIDE: tl.constexpr,
                ROWS_FIRST: tl.constexpr):  # fmt: skip
    """[rows, WIDE] or transposed: inner values of the units from `begin` on, where they are the row's own, else 0."""
    lane = tl.arange(0, WIDE)
    at = (rows.to(tl.int64) * MATRICES + matrix) * (_PLACES * _UNIT)
    shift = begin - firsts
    if ROWS_FIRST:
        lane, at, shift, counts = lane[None, :], at[:, None], shift[:, None], counts[:, None]
    else:
        lane, at, shift, counts = lane[:, None], at[None, :], shift[None, :], counts[None, :]
    place = lane // _UNIT + shift
    own = (place >= 0) & (place < counts)
    return tl.load(inner_ptr + at + shift * _UNIT + lane, mask=own, other=0.0, cache_modifier=".cg")


@triton.jit
def matrix_of(outputs, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr):
    """Which of three matrices."""
    return (outputs >= FIRST_END).to(tl.int32) + (outputs >= SECOND_END).to(tl.int32)


@triton.jit
def added(
    total, b, b_few, inner_ptr, b_ptr, units_ptr, rows, firsts, counts, outputs, inside, column, last_column, size,
    matrix, low, high, MATRICES: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, WIDE: tl.constexpr,
    FEW: tl.constexpr, READ: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """`total` and what each row's adapter adds to outputs from `column` to `last_column`, before any scale: [rows,
    outputs], or transposed. READ: `b` is what `first_factors` found of the first units, `b_few` where there are few.
    With three matrices that of an output is told by FIRST_END and SECOND_END, else it is `matrix`. `low`, `high`: the
    units of these rows are among those."""
    last = matrix
    if MATRICES == 3:
        matrix = matrix_of(column, FIRST_END, SECOND_END)
        last = matrix_of(last_column, FIRST_END, SECOND_END)
    if READ:
        if FEW < WIDE and high <= FEW // _UNIT:
            inner = _own_values(inner_ptr, rows, firsts, counts, matrix, low, MATRICES, FEW, ROWS_FIRST)
            total = _summed_on(total, b_few, inner, ROWS_FIRST)
        else:
            values = _own_values(inner_ptr, rows, firsts, counts, matrix, low, MATRICES, WIDE, ROWS_FIRST)
            total = _summed_on(total, b, values, ROWS_FIRST)
    for each in range(matrix, last + 1):
        own = inside
        if MATRICES == 3:
            own = inside & (matrix_of(outputs, FIRST_END, SECOND_END) == each)
        begin = low
        if READ:
            begin = tl.where(each == matrix, low + WIDE // _UNIT, low)
        for number in tl.range(begin, high, WIDE // _UNIT, num_stages=1):
            factors = outer_factors(b_ptr, units_ptr, high, number, outputs, own, size, WIDE)
            values = _own_values(inner_ptr, rows, firsts, counts, each, number, MATRICES, WIDE, ROWS_FIRST)
            total = _summed_on(total, factors, values, ROWS_FIRST)
    return total


@triton.jit
def added_both(
    gate, up, gate_b, gate_few, up_b, up_few, inner_ptr, b_ptr, units_ptr, rows, firsts, counts, outputs, inside, half,
    size, high, WIDE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The same for gate and up, whose outputs begin at `half`: inner values of both are on their way at once."""
    if FEW < WIDE and high <= FEW // _UNIT:
        few_gate = _own_values(inner_ptr, rows, firsts, counts, 0, 0, 2, FEW, False)
        few_up = _own_values(inner_ptr, rows, firsts, counts, 1, 0, 2, FEW, False)
        gate, up = _summed_on(gate, gate_few, few_gate, False), _summed_on(up, up_few, few_up, False)
    else:
        of_gate = _own_values(inner_ptr, rows, firsts, counts, 0, 0, 2, WIDE, False)
        of_up = _own_values(inner_ptr, rows, firsts, counts, 1, 0, 2, WIDE, False)
        gate, up = _summed_on(gate, gate_b, of_gate, False), _summed_on(up, up_b, of_up, False)
    for number in tl.range(WIDE // _UNIT, high, WIDE // _UNIT, num_stages=1):
        factors = outer_factors(b_ptr, units_ptr, high, number, outputs, inside, size, WIDE)
        values = _own_values(inner_ptr, rows, firsts, counts, 0, number, 2, WIDE, False)
        gate = _summed_on(gate, factors, values, False)
        factors = outer_factors(b_ptr, units_ptr, high, number, outputs + half, inside, size, WIDE)
        values = _own_values(inner_ptr, rows, firsts, counts, 1, number, 2, WIDE, False)
        up = _summed_on(up, factors, values, False)
    return gate, up


@triton.jit
def _summed_on(total, b, inner, ROWS_FIRST: tl.constexpr):
    if ROWS_FIRST:
        total = tl.dot(inner, b.T, total, input_precision="ieee")
    else:
        total = tl.dot(b, inner, total, input_precision="ieee")
    return total


class _Arguments(NamedTuple):
    """Of a product's kernel."""

    tensors: tuple[Tensor | None, ...] = (None,) * 5
    sizes: tuple[int, ...] = (0,) * 5


_NO_ADAPTERS = _Arguments()


def low_rank_arguments(own: LowRankSum | None, lanes: int, threads: int, many: bool = False) -> _Arguments:
    """What the kernel of a product takes. `lanes`: rows and outputs of a program; `threads`: of it."""
    if own is None:
        return _NO_ADAPTERS
    first, second = own.ends[0], own.ends[min(1, len(own.ends) - 1)]
    # many units at once, so that few steps wait for memory; no more than there are registers for
    wide = next((w for w in (256, 128, 64, 32) if lanes * w <= LANES * threads), UNIT)
    wide = min(wide, MANY_WIDE) if many else wide
    tensors = own.inner, own.b, own.units, own.firsts, own.counts
    return _Arguments(tensors, (len(own.ends), first, second, wide, min(FEW_WIDE, wide)))


class InnerArguments(NamedTuple):
    """Of the kernel of a product whose first programs write inner values."""

    tensors: tuple[Tensor | None, ...] = (None,) * 4
    tiles: int = 0
    sizes: tuple[int, ...] = (0,) * 7  # the first: how many they are; the second: how many programs there are


_NOT_INSIDE = InnerArguments()


def inner_arguments(own: LowRankSum | None, rows: int, programs: int) -> InnerArguments:
    """`programs`: of the product itself."""
    if own is None or not is_inside(rows):
        return _NOT_INSIDE
    first, inputs, block = FIRST_TILES * len(own.ends), own.a.shape[-1], _block(own.a)
    stages = min(STAGES, 1 + triton.cdiv(inputs, CHAINS * block))
    sizes = first, first + programs, own.tile, block, FIRST_SHARES, _lines(own.a, inputs), stages
    tickets = own.tickets.of(own.place, first + programs)
    return InnerArguments((own.a, own.order, own.tiles, tickets), own.tiles.shape[1], sizes)


def is_inside(rows: int) -> bool:
    """Whether a product of so many rows computes its inner values itself."""
    return rows <= FEW_ROWS


def least_warps(own: LowRankSum | None, warps: int) -> int:
    return warps if own is None else max(warps, WARPS)


def multiply_inner(x: Tensor, own: LowRankSum) -> None:
    """The inner values of the rows x [rows, inputs]."""
    inputs, matrices, soon, tiles = x.shape[1], len(own.ends), early(x.device), own.tiles.shape[1]
    _multiply_inner[(tiles, matrices, SHARES)](
        x, own.a, own.inner, own.units, own.order, own.tiles, tiles,
        matrices, inputs, _block(x), own.tile, SHARES, _lines(x, inputs), soon,
        num_warps=2 if own.tile == UNIT else 4, num_stages=3, launch_pdl=soon,
    )  # fmt: skip


def _block(values: Tensor) -> int:
    """Inputs that a chain takes at a time."""
    return BLOCK if values.element_size() == 2 else BLOCK // 2


def _lines(values: Tensor, inputs: int) -> int:
    """Lines of 128 bytes that a row of A has, or more; 0: nothing is fetched early."""
    lines = triton.cdiv(inputs * values.element_size(), 128)
    return triton.next_power_of_2(lines) if early(values.device) else 0
