"""Products with the weights: out = x w^T, with the norm before and the gate or the residual after in the same kernel.

The order of a row's sum over its inputs is fixed by the matrix alone: it is cut into `Tiling.split` parts of whole
blocks, a part is summed from front to back by the matrix units, 16 inputs at a time, and the parts are added in order.
How many rows and outputs a program takes changes nothing about that, so few rows and many have kernels of their own and
a row's bits are the same in both (docs/decisions/0004).

Few rows are bound by the bytes of the weights: a program reads a strip of the matrix once, for all rows. Many rows are
bound by arithmetic: a program takes a tile of rows and outputs, through the tensor copy engine where there is one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.models.cuda.batch import FEW_ROWS
from outrider.models.cuda.launch import begin_after, early, fetch, nearly_done
from outrider.models.cuda.low_rank import (
    LowRankSum,
    added,
    added_both,
    fetch_factors,
    first_factors,
    inner_arguments,
    is_inside,
    least_warps,
    low_rank_arguments,
    matrix_of,
    multiply_inner,
    write_inner,
)
from outrider.models.cuda.rotary import HeadPlaces, first_output, head_places, paired_outputs, store_pairs
from outrider.models.cuda.tickets import take_ticket, wait_for_first

STRIP_ROWS = 256  # up to which a strip of a matrix whose sums have several parts is read once for all rows
# Bytes of a matrix up to which it lies in the cache that all processors share, so that it may be read once for every 32
# or 64 rows: more programs then have less to read each (LOG, 2026-11-18, passes of 64 to 256 rows on a GPU).
SMALL_BYTES = 4 << 20
SHARED = 220_000  # bytes of fast memory that one program may take: 227 KiB on Hopper, less what the compiler adds
PROCESSORS = 132  # of an H200; a tile is chosen so that most of them have one
LINE = 128  # bytes of a line of the cache that all processors share
# Bytes of weights of a program of few rows up to which all of them are fetched before x is there, and the next kernel
# may do the same while this one computes; of larger ones the first lines of each row (LOG, 2026-11-18, passes of few
# rows).
EAGER_BYTES, FIRST_LINES = 60_000, 4
# Rows up to which there are registers for what comes after the sums to be read before them, with adapters too.
ALONE_ROWS = 16


@triton.jit
def pair_sum(x, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """[WIDTH, ROWS] -> [ROWS], as a tree of sums of two: its order is that of the tree, however x lies in registers."""
    x = tl.reshape(x, [WIDTH, ROWS])
    LEVELS: tl.constexpr = _log2(WIDTH)
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [WIDTH >> (level + 1), 2, ROWS]), 1)
    return tl.reshape(x, [ROWS])


@triton.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@triton.jit
def _gated(a, b):
    return a / (1.0 + tl.exp(-a)) * b


@triton.jit
def _scaled(a, scale, bias):
    """a * scale + bias, rounded once: left to the compiler, one kernel might round twice and the other once."""
    return tl.fma(a, tl.broadcast_to(scale, a.shape), tl.broadcast_to(bias, a.shape))


@triton.jit
def _scale_of(total, eps, K: tl.constexpr):
    """What a row of K numbers is multiplied with by its norm, from the sum of their squares."""
    return tl.rsqrt(total.to(tl.float32) / K + eps)


@triton.jit
def _fetch_strip(w_ptr, outputs, begin, K: tl.constexpr, PART: tl.constexpr, LINES: tl.constexpr):
    """The first LINES lines of 128 bytes of some rows of the matrix, from `begin` on, on their way to the cache."""
    EACH: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    inner = begin + tl.minimum(tl.arange(0, LINES) * EACH, PART - 1)
    fetch(w_ptr + outputs[:, None].to(tl.int64) * K + tl.minimum(inner, K - 1)[None, :])


@triton.jit
def _squares(squares_ptr, stride, rows, count, STRIPS: tl.constexpr, MOST: tl.constexpr, PAST: tl.constexpr):
    """[MOST, rows] each strip's sum of squares; MOST: STRIPS or more, a power of two. `pair_sum` adds them up."""
    strip = tl.arange(0, MOST)
    wanted = (strip < STRIPS)[:, None] & (rows < count)[None, :]
    return tl.load(squares_ptr + strip[:, None] * stride + rows[None, :], mask=wanted, other=0.0, cache_modifier=PAST)


@triton.jit(do_not_specialize=["pages_stride", "meta_stride", "count", "tiles"])
def _few(
    x_ptr, w_ptr, bias_ptr, squares_ptr, scale_ptr, out_ptr, gain_ptr, next_ptr, part_ptr, done_ptr,
    inner_ptr, b_ptr, units_ptr, firsts_ptr, counts_ptr, a_ptr, order_ptr, tiles_ptr, tickets_ptr,
    q_ptr, keys_ptr, values_ptr, pages_ptr, pages_stride, meta_ptr, meta_stride, cos_ptr, sin_ptr,
    count, size, eps, squares_stride, tiles,
    STRIPS: tl.constexpr, MOST: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, SPLIT: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, LINES: tl.constexpr, EAGER: tl.constexpr, AHEAD: tl.constexpr, AGAIN: tl.constexpr,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr,
    MATRICES: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    INNER: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, INNER_BK: tl.constexpr, SHARES: tl.constexpr,
    INNER_LINES: tl.constexpr, STAGES: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """out [R, size] = x w^T + bias for a strip of BN outputs and ROWS rows. GATE: silu(first half) * second half.

    A norm costs no kernel of its own: the product that writes the residual (ADD) also writes it times the next norm's
    gain, and each strip's sum of its squares; the product that reads these (STRIPS > 0) multiplies with the norm's
    scale at the end.
    D > 0: the outputs are queries, keys and values, heads of D numbers. A strip has pairs that are rotated together,
    and goes where the attention reads it (`rotary.py`) instead of to `out`.
    SPLIT programs share a strip, each a part of K; the last to be done adds the parts up, always in the same order.
    LINES > 0: weights are on their way before x is there. EAGER: the next kernel may begin as soon as x is, to fetch
    its own. AHEAD: what is needed after the sums is read before them.
    MATRICES > 0: with what the rows' adapters add. INNER > 0: the first INNER programs compute their inner values, and
    the others wait for these where all else is done. INNER == 0: the kernel before computes them, lets this one begin
    when x is there (`multiply_inner`), and is waited for there. So nothing waits before x is read, and what kernels
    before wrote is read past the first cache, which knows nothing of other kernels' writes until then.
    """
    lane = tl.arange(0, ROWS)
    rows = tl.program_id(2) * ROWS + lane
    if INNER > 0:
        number, launch = take_ticket(tickets_ptr, PROGRAMS)
        if number < INNER:
            write_inner(number, x_ptr, a_ptr, inner_ptr, units_ptr, order_ptr, tiles_ptr, tiles, tickets_ptr,
                        MATRICES, K, INNER_BK, TILE, INNER, SHARES, INNER_LINES, STAGES, SOON)  # fmt: skip
            return
        strip, share = (number - INNER) // SPLIT, (number - INNER) % SPLIT
    else:
        strip, share = tl.program_id(0), tl.program_id(1)
    column, last_column = strip * BN, tl.minimum(strip * BN + BN, size) - 1
    first = column + tl.arange(0, BN)
    if D > 0:
        column = first_output(strip, BN, D)
        last_column = column  # all outputs are of one head
        first = column + paired_outputs(BN, D)
    inner = tl.arange(0, BK)
    begin = share * PART
    w_first = w_ptr + first[:, None].to(tl.int64) * K + inner[None, :]
    x_rows = x_ptr + rows[None, :].to(tl.int64) * K + inner[:, None]
    in_strip, in_rows = (first < size)[:, None], (rows < count)[None, :]
    inside = in_strip & in_rows
    place = rows[None, :].to(tl.int64) * size + first[:, None]
    a = tl.zeros([BN, ROWS], tl.float32)
    b = tl.zeros([BN, ROWS], tl.float32)
    PAST: tl.constexpr = "" if MATRICES == 0 or INNER > 0 else ".cg"
    EVICTED: tl.constexpr = "" if AGAIN else "evict_first"
    if LINES > 0:
        _fetch_strip(w_ptr, tl.minimum(first, size - 1), begin, K, PART, LINES)
        if GATE:
            _fetch_strip(w_ptr, tl.minimum(first, size - 1) + size, begin, K, PART, LINES)
    if MATRICES > 0:  # all that no kernel writes is read before there is something to wait for
        firsts = tl.load(firsts_ptr + rows, mask=rows < count, other=0)
        counts = tl.load(counts_ptr + rows, mask=rows < count, other=0)
        units = tl.load(units_ptr)
        whole = size * 2 if GATE else size
        own = first < size
        if MATRICES == 3:
            own &= matrix_of(first, FIRST_END, SECOND_END) == matrix_of(column, FIRST_END, SECOND_END)
        if SOON:
            if D > 0:
                fetch_factors(b_ptr, units_ptr, units, column, whole, BN // 2, WIDE)
                fetch_factors(b_ptr, units_ptr, units, column + D // 2, whole, BN // 2, WIDE)
            else:
                fetch_factors(b_ptr, units_ptr, units, column, whole, BN, WIDE)
                if GATE:
                    fetch_factors(b_ptr, units_ptr, units, column + size, whole, BN, WIDE)
    if D > 0:
        cos, sin, to = head_places(
            strip, rows, count, q_ptr, keys_ptr, values_ptr, pages_ptr, pages_stride, meta_ptr, meta_stride, cos_ptr,
            sin_ptr, BN, HEADS, KV, D, PAGED,
        )  # fmt: skip
    if MATRICES == 0 or INNER > 0:
        begin_after(SOON)
    if EAGER:
        nearly_done(SOON)
    if AHEAD:
        if STRIPS > 0:
            squares = _squares(squares_ptr, squares_stride, rows, count, STRIPS, MOST, PAST)
        if ADD:
            before = tl.load(out_ptr + place, mask=inside, other=0.0, cache_modifier=PAST).to(tl.float32)
    for k in range(begin, tl.minimum(begin + PART, K), BK):
        fits = k + inner < K
        x = tl.load(x_rows + k, mask=in_rows & fits[:, None], other=0.0, cache_modifier=PAST)  # [BK, ROWS]
        w = tl.load(w_first + k, mask=in_strip & fits[None, :], other=0.0, eviction_policy=EVICTED)
        a = tl.dot(w, x, a, input_precision="ieee")
        if GATE:
            w = tl.load(w_first + size.to(tl.int64) * K + k, mask=in_strip & fits[None, :], other=0.0,
                        eviction_policy=EVICTED)  # fmt: skip
            b = tl.dot(w, x, b, input_precision="ieee")
    if not EAGER:
        nearly_done(SOON)
    if SPLIT > 1:
        tile = tl.program_id(2) * tl.cdiv(size, BN) + strip
        mine = part_ptr + (tile * SPLIT).to(tl.int64) * (BN * ROWS)
        mine += tl.arange(0, BN)[:, None] * ROWS + lane[None, :]
        tl.store(mine + share * (BN * ROWS), a)
        tl.debug_barrier()
        if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.store(done_ptr + tile, 0)
        a = tl.zeros([BN, ROWS], tl.float32)
        for part in tl.static_range(SPLIT):
            a += tl.load(mine + part * (BN * ROWS), cache_modifier=".cg")
    if MATRICES > 0:
        a_outer, a_few = first_factors(b_ptr, units_ptr, units, first, own, whole, WIDE, FEW)
        if GATE:
            b_outer, b_few = first_factors(b_ptr, units_ptr, units, first + size, first < size, whole, WIDE, FEW)
    if not AHEAD:
        if STRIPS > 0:
            squares = _squares(squares_ptr, squares_stride, rows, count, STRIPS, MOST, PAST)
        if ADD:
            before = tl.load(out_ptr + place, mask=inside, other=0.0, cache_modifier=PAST).to(tl.float32)
    if STRIPS > 0:
        scale = _scale_of(pair_sum(squares, MOST, ROWS), eps, K)[None, :]
    if SCALED:
        scale = tl.load(scale_ptr + rows, mask=rows < count, other=0.0, cache_modifier=PAST)[None, :]
    bias = tl.zeros([BN], tl.float32)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + first, mask=first < size, other=0.0).to(tl.float32)[:, None]
    if MATRICES > 0:
        if INNER > 0:
            wait_for_first(tickets_ptr, launch, INNER, SOON)
        else:
            begin_after(SOON)
        if GATE:
            a, b = added_both(
                a, b, a_outer, a_few, b_outer, b_few, inner_ptr, b_ptr, units_ptr, rows, firsts, counts, first,
                first < size, size, whole, units, WIDE, FEW,
            )  # fmt: skip
        else:
            a = added(
                a, a_outer, a_few, inner_ptr, b_ptr, units_ptr, rows, firsts, counts, first, first < size, column,
                last_column, whole, 0, 0, units, MATRICES, FIRST_END, SECOND_END, WIDE, FEW, True, False,
            )  # fmt: skip
    if STRIPS > 0 or SCALED:
        a, b = _scaled(a, scale, bias), b * scale
    elif BIAS:
        a += bias
    if GATE:
        a = _gated(a, b)
    if ADD:
        a += before
    if D > 0:
        store_pairs(a, cos, sin, to, strip, in_rows, BN, ROWS, HEADS, KV, D)
    else:
        y = a.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, y, mask=inside)
    if ADD:
        gain = tl.load(gain_ptr + first, mask=first < size, other=0.0).to(tl.float32)
        y = tl.where(inside, y.to(tl.float32), 0.0)
        tl.store(next_ptr + place, (y * gain[:, None]).to(next_ptr.dtype.element_ty), mask=inside)
        y = y.to(squares_ptr.dtype.element_ty)
        tl.store(squares_ptr + strip * squares_stride + rows, pair_sum(y * y, BN, ROWS), mask=rows < count)


@triton.jit(do_not_specialize=["count"])
def _many(
    x_ptr, w_ptr, bias_ptr, squares_ptr, scale_ptr, out_ptr, gain_ptr, next_ptr,
    inner_ptr, b_ptr, units_ptr, firsts_ptr, counts_ptr, count, size, squares_stride,
    SCALED: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    K: tl.constexpr, PART: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, COPIED: tl.constexpr,
    MATRICES: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr,
    SOON: tl.constexpr,
):  # fmt: skip
    """The same for a tile of BM rows and BN outputs. WIDTH: of a strip of `_few`, whose sums of squares these are.

    COPIED: x and w are tensor descriptors. Programs that run at the same time lie close together (GROUP tiles of rows),
    so that they share what they read.
    """
    program = tl.program_id(0)
    tiles, across = tl.cdiv(count, BM), tl.cdiv(size, BN)
    group = program // (GROUP * across)
    in_group = tl.minimum(tiles - group * GROUP, GROUP)
    inside_group = program % (GROUP * across)
    row0 = (group * GROUP + inside_group % in_group) * BM
    column0 = inside_group // in_group * BN
    rows, first, inner = row0 + tl.arange(0, BM), column0 + tl.arange(0, BN), tl.arange(0, BK)
    in_rows, in_strip = (rows < count)[:, None], (first < size)[None, :]
    a_sum = tl.zeros([BM, BN], tl.float32)
    b_sum = tl.zeros([BM, BN], tl.float32)
    begin_after(SOON)
    for part in tl.static_range(SPLIT):
        a = tl.zeros([BM, BN], tl.float32)
        b = tl.zeros([BM, BN], tl.float32)
        for k in range(part * PART, min((part + 1) * PART, K), BK):
            if COPIED:
                x = x_ptr.load([row0, k])
                w = w_ptr.load([column0, k])
            else:
                fits = (k + inner < K)[None, :]
                x = tl.load(x_ptr + rows[:, None].to(tl.int64) * K + k + inner[None, :], mask=in_rows & fits, other=0.0)
                w_at = w_ptr + first[:, None].to(tl.int64) * K + k + inner[None, :]
                w = tl.load(w_at, mask=(first < size)[:, None] & fits, other=0.0)
            a = tl.dot(x, w.T, a, input_precision="ieee")
            if GATE:
                if COPIED:
                    w = w_ptr.load([column0 + size, k])
                else:
                    w = tl.load(w_at + size.to(tl.int64) * K, mask=(first < size)[:, None] & fits, other=0.0)
                b = tl.dot(x, w.T, b, input_precision="ieee")
        if SPLIT > 1:
            a_sum += a
        else:
            a_sum, b_sum = a, b
    nearly_done(SOON)
    a, b = a_sum, b_sum
    if MATRICES > 0:
        firsts = tl.load(firsts_ptr + rows, mask=rows < count, other=0)
        counts = tl.load(counts_ptr + rows, mask=rows < count, other=0)
        low, high = tl.min(tl.where(counts > 0, firsts, 1 << 30), 0), tl.max(firsts + counts, 0)
        whole, last = size * 2 if GATE else size, tl.minimum(column0 + BN, size) - 1
        a = added(
            a, a, a, inner_ptr, b_ptr, units_ptr, rows, firsts, counts, first, first < size, column0, last, whole, 0,
            low, high, MATRICES, FIRST_END, SECOND_END, WIDE, FEW, False, True,
        )  # fmt: skip
        if GATE:
            b = added(
                b, b, b, inner_ptr, b_ptr, units_ptr, rows, firsts, counts, first + size, first < size, column0, last,
                whole, 1, low, high, MATRICES, FIRST_END, SECOND_END, WIDE, FEW, False, True,
            )  # fmt: skip
    bias = tl.zeros([BN], tl.float32)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + first, mask=first < size, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        scale = tl.load(scale_ptr + rows, mask=rows < count, other=0.0)[:, None]
        a, b = _scaled(a, scale, bias), b * scale
    elif BIAS:
        a += bias
    if GATE:
        a = _gated(a, b)
    inside = in_rows & in_strip
    place = rows[:, None].to(tl.int64) * size + first[None, :]
    if ADD:
        a += tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = a.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, y, mask=inside)
    if ADD:
        gain = tl.load(gain_ptr + first, mask=first < size, other=0.0).to(tl.float32)
        y = tl.where(inside, y.to(tl.float32), 0.0)
        tl.store(next_ptr + place, (y * gain[None, :]).to(next_ptr.dtype.element_ty), mask=inside)
        y = y.to(squares_ptr.dtype.element_ty)
        sums = _strip_sums(y * y, BM, BN, WIDTH)  # [BM, BN // WIDTH]
        strip = column0 // WIDTH + tl.arange(0, BN // WIDTH)
        at = squares_ptr + strip[None, :] * squares_stride + rows[:, None]
        tl.store(at, sums, mask=in_rows & (strip * WIDTH < size)[None, :])


@triton.jit
def _strip_sums(x, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr):
    """[BM, BN] -> [BM, BN // WIDTH]: `pair_sum` of every WIDTH columns."""
    LEVELS: tl.constexpr = _log2(WIDTH)
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [BM, BN >> (level + 1), 2]), 2)
    return x


@triton.jit(do_not_specialize=["count"])
def _scales(squares_ptr, scale_ptr, count, squares_stride, eps, STRIPS: tl.constexpr, MOST: tl.constexpr,
            K: tl.constexpr, ROWS: tl.constexpr, SOON: tl.constexpr):  # fmt: skip
    """scale [R] of the norm that reads the residual next."""
    begin_after(SOON)
    nearly_done(SOON)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares = _squares(squares_ptr, squares_stride, rows, count, STRIPS, MOST, "")
    tl.store(scale_ptr + rows, _scale_of(pair_sum(squares, MOST, ROWS), eps, K), mask=rows < count)


@dataclass(frozen=True)
class Tiling:
    """How a matrix is cut; by its own sizes alone, never by the pass. Only `split` and `inner` (whose multiple a part
    is) and `width` (of the strips whose squares are summed) touch the order of a sum."""

    width: int  # of a strip
    inner: int  # elements of a row at a time
    split: int  # parts of a row's sum
    warps: int
    stages: int

    def part(self, inner: int) -> int:
        """Elements of one part of a sum over `inner`."""
        return triton.cdiv(triton.cdiv(inner, self.inner), self.split) * self.inner


@functools.cache
def tiling(size: int, inner: int, gate: bool = False) -> Tiling:
    """For `size` outputs of `inner` inputs; measured on an H200 (docs/LOG.md)."""
    if gate:
        width = next((w for w in (64, 32) if size >= 80 * w), 16)
        block, split, warps, stages = (128, 1, 4, 3) if width == 64 else (64, 1, 4, 4)
    elif size >= 100 * 128:
        width, block, split, warps, stages = 128, 128, 1, 8, 3
    elif size >= 2048:
        width, block, split, warps, stages = 64, 256, 1 if size >= 90 * 64 else 2, 4, 4
    elif inner >= 1024:
        width, block, split, warps, stages = 32, 128, 4, 4, 3
    else:
        width, block, split, warps, stages = 16, 64, 1, 2, 10
    block = next((b for b in (256, 128, 64, 32) if b <= block and inner % b == 0), block)
    return Tiling(width, block, split, warps, stages)


def widest_in_parts(weights: Iterable[Tensor]) -> int:
    """Outputs of the largest of these matrices whose sums are taken in parts, which share a workspace; 0: of none."""
    return max((weight.shape[0] for weight in weights if tiling(*weight.shape).split > 1), default=0)


@dataclass(frozen=True)
class Tile:
    """What a program of many rows takes."""

    rows: int
    outputs: int
    inner: int
    warps: int
    stages: int


# From the fastest to the one that gives work to most processors; measured on an H200 at 2,048 rows of an 8B shape and
# at 256 rows of SmolLM2 (docs/LOG.md).
TILES = (
    Tile(128, 256, 64, 8, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 3),
    Tile(64, 32, 64, 4, 4),
)
WIDE_TILES = (
    Tile(64, 64, 32, 4, 2),
    Tile(32, 32, 32, 4, 2),
    Tile(16, 128, 32, 4, 2),
)  # for float32, which the matrix units do not take


@functools.cache
def tile_for(rows: int, size: int, gate: bool, split: int, width: int, wide: bool) -> Tile:
    """The first tile that most processors get one of. Two sums at once (a gate, parts) have no registers for the
    largest; a tile has whole strips."""
    fitting = [
        tile
        for tile in (WIDE_TILES if wide else TILES)
        if tile.outputs % width == 0 and not (tile.outputs > 128 and (gate or split > 1))
    ]
    for tile in fitting:
        if triton.cdiv(rows, tile.rows) * triton.cdiv(size, tile.outputs) >= PROCESSORS * 3 // 4:
            return tile
    return fitting[-1]


def rows_of_largest_tile(size: int) -> int:
    """From which on products with `size` outputs or more have the largest tile, however many rows there are."""
    tile = TILES[0]
    return tile.rows * triton.cdiv(PROCESSORS * 3 // 4, triton.cdiv(size, tile.outputs))


class Workspace:
    """What the kernels of a pass hand to each other, for up to `rows` rows."""

    def __init__(self, rows: int, hidden: int, widest: int, dtype: torch.dtype, device: torch.device) -> None:
        """`widest`: outputs of the largest matrix whose sums are taken in parts."""
        # squares of bfloat16 and float16 are exact in float32, those of float32 in float64: sums of either are the same
        # whether a product is rounded before it is added or not, which compilers decide as they like
        exact = torch.float64 if dtype == torch.float32 else torch.float32
        self.part = torch.empty(4 * (widest + 128) * STRIP_ROWS, dtype=torch.float32, device=device)
        self.done = torch.zeros((widest // 16 + 1) * (STRIP_ROWS // 32), dtype=torch.int32, device=device)
        self.next = torch.empty(rows, hidden, dtype=dtype, device=device)  # the residual times a norm's gain
        self.squares = torch.zeros(hidden // 16 + 1, rows, dtype=exact, device=device)
        self.scale = torch.empty(rows, dtype=torch.float32, device=device)
        self.strips = 1  # of `squares` that were written last


@dataclass(frozen=True, eq=False)
class Around:
    """What a product does beside multiplying."""

    gate: bool = False  # silu(first half of the outputs) * second half
    gain: Tensor | None = None  # add to `out`, and write what the norm with this gain reads next
    eps: float | None = None  # x is the workspace's `next`, to be normed
    scale: Tensor | None = None  # [rows] float32: the same with the scales of the norm given
    adapters: LowRankSum | None = None  # of the rows: what they add
    again: bool = False  # the matrix is read again soon, by the next stage of a draft: it should stay in the cache
    places: HeadPlaces | None = None  # the outputs are queries, keys and values, and go there: see `can_place`


PLAIN = Around()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, work: Workspace, around: Around = PLAIN
) -> None:
    """out [rows, n] from x [rows, k]. No `out`: it goes to `around.places`."""
    rows, inner = x.shape
    size = weight.shape[0] // 2 if around.gate else weight.shape[0]
    cut, at_once = tiling(size, inner, around.gate), rows_at_once(rows, weight, around)
    if around.eps is not None and (not at_once or at_once > FEW_ROWS):
        around = replace(around, eps=None, scale=norm_scales(work, rows, inner, around.eps))
    if around.adapters is not None and not is_inside(rows):
        multiply_inner(x, around.adapters)
    if at_once:
        _linear_few(x, weight, bias, out, work, around, size, at_once)
    else:
        assert out is not None, "many rows are placed by a kernel of their own"
        _linear_many(x, weight, bias, out, work, around, size)
    if around.gain is not None:
        work.strips = triton.cdiv(size, cut.width)


def rows_at_once(rows: int, weight: Tensor, around: Around) -> int:
    """Rows that a program of few rows takes, a power of two; 0: programs of many rows take them."""
    whole = max(16, triton.next_power_of_2(rows))
    parts = tiling(weight.shape[0] // 2 if around.gate else weight.shape[0], weight.shape[1], around.gate).split > 1
    if around.adapters is not None or weight.numel() * weight.element_size() > SMALL_BYTES:
        return whole if rows <= (STRIP_ROWS if parts else FEW_ROWS) else 0
    if rows > (STRIP_ROWS if parts or around.places is not None else FEW_ROWS):
        return 0
    if parts and rows > 128:
        return 64
    return min(whole, 32 if parts or around.gate else 64)


def can_place(rows: int, weight: Tensor, head_dim: int, adapted: bool) -> bool:
    """Whether the product with this matrix places queries, keys and values of this many rows itself: few rows, more of
    a small matrix and fewer with adapters, and whole strips in every head."""
    small = weight.numel() * weight.element_size() <= SMALL_BYTES
    most = ALONE_ROWS if adapted else STRIP_ROWS if small else FEW_ROWS
    return rows <= most and head_dim % tiling(*weight.shape).width == 0


def _linear_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    work: Workspace,
    around: Around,
    size: int,
    padded: int,
) -> None:
    """`padded`: rows of a program."""
    rows, inner, soon = x.shape[0], weight.shape[1], early(x.device)
    cut = tiling(size, inner, around.gate)
    part = cut.part(inner)
    block, warps, stages = cut.inner, cut.warps, cut.stages
    if padded > FEW_ROWS:  # as wide blocks would leave no memory for several stages, nor registers for the sums
        block, warps = next(b for b in (128, 64, 32, 16) if part % b == 0), 8
    elif around.gate and cut.width == 16 and padded <= 32:
        warps, stages = 2, 10
    if crowded := around.adapters is not None and padded > ALONE_ROWS:  # no registers are left for more stages
        stages = min(stages, 6)
    warps = least_warps(around.adapters, warps)
    read = cut.width * (2 if around.gate else 1)  # rows of the matrix that a program reads
    stage = block * (read + padded) * x.element_size()
    low = low_rank_arguments(around.adapters, padded + read, 32 * warps)
    strips = triton.cdiv(size, cut.width)
    within = inner_arguments(around.adapters, rows, strips * cut.split)
    bytes_read = part * x.element_size()  # of one row of the matrix
    eager = padded <= FEW_ROWS and read * bytes_read <= EAGER_BYTES and not crowded
    alone = padded <= ALONE_ROWS
    lines = triton.next_power_of_2(triton.cdiv(bytes_read, LINE)) if eager else FIRST_LINES if alone else 0
    places, strips_before = around.places, 0 if around.eps is None else work.strips
    placed: tuple[Tensor | int | None, ...] = (None, None, None, None, 0, None, 0, None, None)
    if places is not None:
        placed = (places.q, places.keys, places.values, places.pages, places.pages.stride(0), places.meta,
                  places.meta.stride(0), *places.angles)  # fmt: skip
    _few[(within.sizes[1],) if within.tiles else (strips, cut.split, triton.cdiv(rows, padded))](
        x, weight, bias, work.squares, around.scale, out, around.gain, work.next, work.part, work.done,
        *low.tensors, *within.tensors, *placed, rows, size, around.eps or 0.0, work.squares.stride(0), within.tiles,
        strips_before, triton.next_power_of_2(strips_before), around.scale is not None, around.gate,
        around.gain is not None, bias is not None, cut.split, inner, part, block, cut.width, padded,
        lines if soon else 0, eager, alone, around.again, *((0,) * 4 if places is None else places.sizes), *low.sizes,
        *within.sizes, soon,
        num_warps=warps, num_stages=max(1, min(stages, SHARED // stage)), launch_pdl=soon,
    )  # fmt: skip


def _linear_many(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, work: Workspace, around: Around, size: int
) -> None:
    rows, inner, soon = x.shape[0], weight.shape[1], early(x.device)
    cut = tiling(size, inner, around.gate)
    tile = tile_for(rows, size, around.gate, cut.split, cut.width if around.gain is not None else 1,
                    x.dtype == torch.float32)  # fmt: skip
    part = cut.part(inner)
    block = next(b for b in (tile.inner, 64, 32, 16) if part % b == 0)
    copied = _copies(x, weight, inner, block)
    low = low_rank_arguments(around.adapters, tile.rows + tile.outputs, 32 * tile.warps, True)
    _many[(triton.cdiv(rows, tile.rows) * triton.cdiv(size, tile.outputs),)](
        TensorDescriptor.from_tensor(x, [tile.rows, block]) if copied else x,
        TensorDescriptor.from_tensor(weight, [tile.outputs, block]) if copied else weight,
        bias, work.squares, around.scale, out, around.gain, work.next, *low.tensors, rows, size,
        work.squares.stride(0), around.scale is not None, around.gate, around.gain is not None, bias is not None,
        cut.split, inner, part, block, tile.rows, tile.outputs, cut.width, 8, copied, *low.sizes, soon,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=soon,
    )  # fmt: skip


def _copies(x: Tensor, weight: Tensor, inner: int, block: int) -> bool:
    """Whether the tensor copy engine can bring tiles: it wants rows of whole blocks that begin at 16 bytes."""
    aligned = all(part.data_ptr() % 16 == 0 and part.stride(0) * part.element_size() % 16 == 0 for part in (x, weight))
    return early(x.device) and x.dtype != torch.float32 and aligned and inner % block == 0


def norm_scales(work: Workspace, rows: int, inner: int, eps: float) -> Tensor:
    """[rows] float32: the scales of the norm of the residual that was written last."""
    scale, soon = work.scale[:rows], early(work.scale.device)
    _scales[(triton.cdiv(rows, 16),)](
        work.squares, scale, rows, work.squares.stride(0), eps, work.strips, triton.next_power_of_2(work.strips),
        inner, 16, soon, num_warps=4, launch_pdl=soon,
    )  # fmt: skip
    return scale
