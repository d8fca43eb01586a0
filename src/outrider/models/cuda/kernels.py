"""The kernels of a pass on a GPU, in Triton. Shapes are in the comments; R is rows (tokens and nodes) of the pass.

Few rows are bound by the bytes of the weights, so one program reads a strip of a matrix once and everything around the
product (norm before, rotation, cache write, gate or residual after) happens in registers. A row's sums are taken in one
order whatever shares the pass: up to MOST_ROWS rows, a token's logits do not depend on the batch or on the draft.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 64  # up to which the products below beat cuBLAS
PAGE = 32  # tokens of one page of keys and values
NODES = 64  # of one draft: bits of a row's mask
SHARED = 220_000  # bytes of fast memory that one program may take
BEST = 4096  # logits that one program looks through

# The fields of a pass, int32, one row of numbers each.
TOKEN, POSITION, PLACE, LIMIT, SLOT, BASE, END, LOW, HIGH = range(9)  # by row
BLOCK_ROW, BLOCK_COUNT = 9, 10  # by block of rows of one sequence
FIELDS = 11


@triton.jit
def _begin(SOON: tl.constexpr):
    """Wait until the kernel before has written all that it writes."""
    if SOON:
        gdc_wait()


@triton.jit
def _nearly_done(SOON: tl.constexpr):
    """Let the next kernel be set up."""
    if SOON:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["count"])
def _linear(
    x_ptr, w_ptr, bias_ptr, squares_ptr, out_ptr, gain_ptr, next_ptr, next_squares_ptr, part_ptr, done_ptr,
    count, size, eps,
    STRIPS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """out [R, size] = x w^T + bias for a strip of BN outputs. GATE: silu(first half) * second half.

    A norm costs no kernel of its own: whoever writes the residual (ADD) also writes it times the next norm's gain, and
    each strip's sum of its squares; whoever reads that (STRIPS > 0) divides by the root of their mean at the end.
    SPLIT programs share a strip, each a part of K; the last to be done adds the parts up, always in the same order.
    """
    rows = tl.arange(0, ROWS)
    strip, share = tl.program_id(0), tl.program_id(1)
    first = strip * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    PART: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    begin = share * PART
    w_first = w_ptr + first[:, None].to(tl.int64) * K + inner[None, :]
    x_rows = x_ptr + rows[None, :].to(tl.int64) * K + inner[:, None]
    in_strip, in_rows = (first < size)[:, None], (rows < count)[None, :]
    a = tl.zeros([BN, ROWS], tl.float32)
    b = tl.zeros([BN, ROWS], tl.float32)
    _begin(SOON)
    for k in range(begin, tl.minimum(begin + PART, K), BK):
        fits = k + inner < K
        x = tl.load(x_rows + k, mask=in_rows & fits[:, None], other=0.0)  # [BK, ROWS]
        w = tl.load(w_first + k, mask=in_strip & fits[None, :], other=0.0, eviction_policy="evict_first")
        a = tl.dot(w, x, a, input_precision="ieee")
        if GATE:
            w = tl.load(w_first + size.to(tl.int64) * K + k, mask=in_strip & fits[None, :], other=0.0,
                        eviction_policy="evict_first")  # fmt: skip
            b = tl.dot(w, x, b, input_precision="ieee")
    _nearly_done(SOON)
    if SPLIT > 1:
        lane = tl.arange(0, BN)[:, None] * ROWS + rows[None, :]
        mine = part_ptr + (strip * SPLIT).to(tl.int64) * (BN * ROWS) + lane
        tl.store(mine + share * (BN * ROWS), a)
        tl.debug_barrier()
        if tl.atomic_add(done_ptr + strip, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.store(done_ptr + strip, 0)
        a = tl.zeros([BN, ROWS], tl.float32)
        for part in tl.static_range(SPLIT):
            a += tl.load(mine + part * (BN * ROWS), cache_modifier=".cg")
    if STRIPS > 0:
        total = tl.zeros([ROWS], tl.float64)
        for other in range(STRIPS):
            total += tl.load(squares_ptr + other * MOST + rows)
        scale = tl.rsqrt(total.to(tl.float32) / K + eps)[None, :]
        a, b = a * scale, b * scale
    if BIAS:
        a += tl.load(bias_ptr + first, mask=first < size, other=0.0).to(tl.float32)[:, None]
    if GATE:
        a = a / (1.0 + tl.exp(-a)) * b
    inside = in_strip & in_rows
    place = rows[None, :].to(tl.int64) * size + first[:, None]
    if ADD:
        a += tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = a.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, y, mask=inside)
    if ADD:
        gain = tl.load(gain_ptr + first, mask=first < size, other=0.0).to(tl.float32)
        y = tl.where(inside, y.to(tl.float32), 0.0)
        tl.store(next_ptr + place, (y * gain[:, None]).to(next_ptr.dtype.element_ty), mask=inside)
        y = y.to(tl.float64)  # so exact that the order of the sum, which depends on ROWS, leaves no trace
        tl.store(next_squares_ptr + strip * MOST + rows, tl.sum(y * y, 0))


@triton.jit
def _embed(token_ptr, table_ptr, gain_ptr, x_ptr, next_ptr, squares_ptr, size, BLOCK: tl.constexpr):
    """Rows of the embedding into x, and what the first norm needs of them."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    token = tl.load(token_ptr + row).to(tl.int64)
    x = tl.load(table_ptr + token * size + column, mask=inside, other=0.0)
    place = row.to(tl.int64) * size + column
    tl.store(x_ptr + place, x, mask=inside)
    x = x.to(tl.float32)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(next_ptr + place, (x * gain).to(next_ptr.dtype.element_ty), mask=inside)
    x = x.to(tl.float64)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


@triton.jit(do_not_specialize=["count", "stride"])
def _place_qkv(
    qkv_ptr, norm_q_ptr, norm_k_ptr, q_ptr, keys_ptr, values_ptr, table_ptr, table_stride,
    meta_ptr, stride, cos_ptr, sin_ptr, count, eps,
    NORMS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr,
    BP: tl.constexpr, ROWS: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """A head of some rows of qkv [R, (heads + 2 kv) * D] to where attention reads it: norm and rotation for queries and
    keys, the queries to q [R, heads, D], keys and values to their pages."""
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    part = tl.arange(0, BP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    inside = (part < HALF)[:, None] & live[None, :]
    angle = tl.load(meta_ptr + 1 * stride + rows, mask=live, other=0)[None, :] * HALF + part[:, None]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    slot = tl.load(meta_ptr + 4 * stride + rows, mask=live, other=0)
    key = tl.load(meta_ptr + 2 * stride + rows, mask=live, other=0)
    page = tl.load(table_ptr + slot.to(tl.int64) * table_stride + key // PAGED, mask=live, other=0).to(tl.int64)
    _begin(SOON)  # what was read so far no kernel writes
    place = qkv_ptr + rows[None, :].to(tl.int64) * ((HEADS + 2 * KV) * D) + head * D + part[:, None]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [BP, ROWS], the first half of the head
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    _nearly_done(SOON)
    if head < HEADS + KV:
        if NORMS:
            gain_ptr = norm_k_ptr
            if head < HEADS:
                gain_ptr = norm_q_ptr
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)[None, :]
            a *= scale * tl.load(gain_ptr + part, mask=part < HALF, other=0.0).to(tl.float32)[:, None]
            b *= scale * tl.load(gain_ptr + HALF + part, mask=part < HALF, other=0.0).to(tl.float32)[:, None]
        a, b = a * cos - b * sin, b * cos + a * sin
    if head < HEADS:
        to = q_ptr + rows[None, :].to(tl.int64) * (HEADS * D) + head * D + part[:, None]
    elif head < HEADS + KV:
        to = keys_ptr + (((page * KV + head - HEADS) * PAGED + key % PAGED) * D)[None, :] + part[:, None]
    else:
        to = values_ptr + (((page * KV + head - HEADS - KV) * PAGED + key % PAGED) * D)[None, :] + part[:, None]
    tl.store(to, a.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, b.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _attend(
    q_ptr, keys_ptr, values_ptr, table_ptr, table_stride, meta_ptr, stride, out_ptr, part_ptr, most_ptr, sum_ptr, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """A block of rows of one sequence over one chunk of its keys, for the heads that share a key head."""
    block, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    count = tl.load(meta_ptr + 10 * stride + block)
    if count == 0:
        return
    first = tl.load(meta_ptr + 9 * stride + block)
    end = tl.load(meta_ptr + 6 * stride + first)
    begin = split * CHUNK
    if begin >= end:
        return
    slot = tl.load(meta_ptr + 4 * stride + first).to(tl.int64)
    lane = tl.arange(0, TILE)
    row, head = first + lane // GROUP, kv * GROUP + lane % GROUP
    live = lane < count * GROUP
    dim = tl.arange(0, DP)
    inside = dim < D
    where = row.to(tl.int64) * (HEADS * D) + head * D
    limit = tl.load(meta_ptr + 3 * stride + row, mask=live, other=0)[:, None]
    base = tl.load(meta_ptr + 5 * stride + row, mask=live, other=0)[:, None]
    low = tl.load(meta_ptr + 7 * stride + row, mask=live, other=0)[:, None]
    high = tl.load(meta_ptr + 8 * stride + row, mask=live, other=0)[:, None]
    position = tl.load(meta_ptr + 1 * stride + row, mask=live, other=0)[:, None]
    _begin(SOON)  # what was read so far no kernel writes
    q = tl.load(q_ptr + where[:, None] + dim[None, :], mask=live[:, None] & inside[None, :], other=0.0)  # [TILE, DP]
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DP], tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, end), KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < end
        page = tl.load(table_ptr + slot * table_stride + key // PAGED, mask=exists, other=0).to(tl.int64)
        at = ((page * KV + kv) * PAGED + key % PAGED) * D
        k = tl.load(keys_ptr + at[None, :] + dim[:, None], mask=exists[None, :] & inside[:, None], other=0.0)
        v = tl.load(values_ptr + at[:, None] + dim[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale  # [TILE, KEYS]
        node = key[None, :] - base  # which node of the draft the key is, if any
        bit = tl.where(
            node < 32, low >> tl.minimum(tl.maximum(node, 0), 31), high >> tl.minimum(tl.maximum(node - 32, 0), 31)
        )
        seen = (key[None, :] < limit) | ((node >= 0) & (node < 64) & ((bit & 1) == 1))
        if WINDOW > 0:
            seen = seen & ((node >= 0) | (position - key[None, :] < WINDOW))
        score = tl.where(seen & exists[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2((score - level[:, None]) * 1.4426950408889634)
        fade = tl.exp2((most - level) * 1.4426950408889634)
        total = total * fade + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        most = higher
    _nearly_done(SOON)
    mask = live[:, None] & inside[None, :]
    if SPLITS == 1:
        tl.store(
            out_ptr + where[:, None] + dim[None, :], (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask
        )
    else:
        at = (row.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(part_ptr + at[:, None] * D + dim[None, :], mixed, mask=mask)
        tl.store(most_ptr + at, most, mask=live)
        tl.store(sum_ptr + at, total, mask=live)


@triton.jit(do_not_specialize=["stride"])
def _combine(
    out_ptr, part_ptr, most_ptr, sum_ptr, meta_ptr, stride,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    ALL: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The chunks of one row and head together. ALL: SPLITS, up to a power of two."""
    _begin(SOON)
    row, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(meta_ptr + 6 * stride + row)
    chunk, dim = tl.arange(0, ALL), tl.arange(0, DP)
    exists = (chunk < SPLITS) & (chunk * CHUNK < end)
    at = (row.to(tl.int64) * HEADS + head) * SPLITS + chunk
    most = tl.load(most_ptr + at, mask=exists, other=float("-inf"))
    total = tl.load(sum_ptr + at, mask=exists, other=0.0)
    highest = tl.max(most, 0)
    fade = tl.exp2((most - tl.where(highest == float("-inf"), 0.0, highest)) * 1.4426950408889634)
    part = tl.load(part_ptr + at[:, None] * D + dim[None, :], mask=exists[:, None] & (dim < D)[None, :], other=0.0)
    # float64: the order of the sum, which depends on SPLITS, leaves no trace
    mixed = tl.sum((part * fade[:, None]).to(tl.float64), 0) / tl.sum((total * fade).to(tl.float64), 0)
    place = out_ptr + (row.to(tl.int64) * HEADS + head) * D + dim
    tl.store(place, mixed.to(out_ptr.dtype.element_ty), mask=dim < D)


@triton.jit
def _norm(x_ptr, delta_ptr, gain_ptr, out_ptr, eps, size, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """out [R, size] = norm(x); ADD: x += delta first, and stays so."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * size + column, x.to(x_ptr.dtype.element_ty), mask=inside)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gain
    tl.store(out_ptr + row * size + column, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out [R, size] = silu(x[:, :size]) * x[:, size:]"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * size + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _turn(x_ptr, cos_ptr, sin_ptr, width, places, HEADS: tl.constexpr, D: tl.constexpr, BP: tl.constexpr,
          BH: tl.constexpr):  # fmt: skip
    """The first HEADS heads of a row of x [R, width], rotated where they are; row r is place r % places of its text."""
    row = tl.program_id(0)
    head, part = tl.arange(0, BH)[:, None], tl.arange(0, BP)[None, :]
    inside = (head < HEADS) & (part < D // 2)
    angle = (row % places) * (D // 2) + part
    cos = tl.load(cos_ptr + angle, mask=part < D // 2, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=part < D // 2, other=0.0)
    place = x_ptr + row.to(tl.int64) * width + head * D + part
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + D // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(place + D // 2, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _best_parts(logits_ptr, most_ptr, where_ptr, size, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The highest of each part of a row, and the first place that has it."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * size + column, mask=column < size, other=float("-inf"))
    most = tl.max(x, 0)
    tl.store(most_ptr + row * PARTS + part, most)
    tl.store(where_ptr + row * PARTS + part, tl.min(tl.where(x == most, column, size), 0))


@triton.jit
def _best_of(most_ptr, where_ptr, out_ptr, size, PARTS: tl.constexpr, ALL: tl.constexpr):
    row, part = tl.program_id(0), tl.arange(0, ALL)
    most = tl.load(most_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    where = tl.load(where_ptr + row * PARTS + part, mask=part < PARTS, other=size)
    token = tl.min(tl.where(most == tl.max(most, 0), where, size), 0)
    tl.store(out_ptr + row, tl.minimum(token, size - 1).to(tl.int64))  # a row of nan has no best


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _choose(logits_ptr, key_ptr, position_ptr, temperature_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """core.dice.Dice.choose for every row at once: argmin(noise / p), or argmax where the temperature is 0."""
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * size
    temperature = tl.load(temperature_ptr + row)
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
        where = tl.where(x > highest, start + column, where)
        highest = tl.maximum(highest, x)
    best = tl.max(highest, 0)
    token = tl.min(tl.where(highest == best, where, size), 0)
    if temperature > 0:
        position = tl.load(position_ptr + row).to(tl.uint64)
        key = _mix64(tl.load(key_ptr + row).to(tl.uint64) ^ _mix64(position * 8))  # the stream of NOISE is 0
        first, second = (key >> 32).to(tl.uint32), key.to(tl.uint32)
        least = tl.full([BLOCK], float("inf"), tl.float64)
        for start in range(0, size, BLOCK):
            x = tl.load(logits + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
            p = tl.exp((x - best) / temperature).to(tl.float64)
            bits = _mix32(_mix32((start + column).to(tl.uint32) ^ first) ^ second)
            noise = -tl.log((bits.to(tl.float64) + 0.5) / 4294967296.0)
            score = tl.where(p > 0, noise / p, float("inf"))
            where = tl.where(score < least, start + column, where)
            least = tl.minimum(least, score)
        token = tl.min(tl.where(least == tl.min(least, 0), where, size), 0)
    tl.store(out_ptr + row, token.to(tl.int64))


@dataclass(frozen=True)
class Tiling:
    """How a matrix is cut; by its own sizes alone, never by the pass, so that a row's sums are always taken alike."""

    width: int  # of a strip
    inner: int  # elements of a row at a time
    split: int  # programs that share a strip
    warps: int
    stages: int


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
        width, block, split, warps, stages = 32, 128, 4, 4, 4
    else:
        width, block, split, warps, stages = 16, 64, 1, 2, 6
    block = next((b for b in (256, 128, 64, 32) if b <= block and inner % b == 0), block)
    return Tiling(width, block, split, warps, stages)


class Workspace:
    """What kernels of few rows hand to each other."""

    def __init__(self, hidden: int, widest: int, dtype: torch.dtype, device: torch.device) -> None:
        """`widest`: outputs of the largest matrix whose strips are shared."""
        self.part = torch.empty(4 * (widest + 128) * MOST_ROWS, dtype=torch.float32, device=device)
        self.done = torch.zeros(widest // 16 + 1, dtype=torch.int32, device=device)
        self.next = torch.empty(MOST_ROWS, hidden, dtype=dtype, device=device)  # the residual times a norm's gain
        self.squares = torch.zeros(hidden // 16 + 1, MOST_ROWS, dtype=torch.float64, device=device)
        self.strips = 1  # of `squares` that were written last


@functools.cache
def early(device: torch.device) -> bool:
    """Whether a kernel may be set up while the one before ends: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def embed(tokens: Tensor, table: Tensor, gain: Tensor, x: Tensor, work: Workspace) -> None:
    rows, size = x.shape
    _embed[(rows,)](tokens, table, gain, x, work.next, work.squares, size, triton.next_power_of_2(size), num_warps=4)
    work.strips = 1


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, rows: int, work: Workspace,
    eps: float | None = None, gate: bool = False, gain: Tensor | None = None,
) -> None:  # fmt: skip
    """out [rows, n] from x [rows, k]. `eps`: x is work.next, to be normed. `gain`: of the norm that reads out next."""
    size, inner, soon = weight.shape[0] // 2 if gate else weight.shape[0], weight.shape[1], early(x.device)
    cut = tiling(size, inner, gate)
    strips, padded = triton.cdiv(size, cut.width), max(16, triton.next_power_of_2(rows))
    stage = cut.inner * (cut.width * (2 if gate else 1) + padded) * x.element_size()
    _linear[(strips, cut.split)](
        x, weight, bias, work.squares, out, gain, work.next, work.squares, work.part, work.done, rows, size, eps or 0.0,
        0 if eps is None else work.strips, gate, gain is not None, bias is not None, cut.split,
        inner, cut.inner, cut.width, padded, MOST_ROWS, soon,
        num_warps=cut.warps, num_stages=max(1, min(cut.stages, SHARED // stage)), launch_pdl=soon,
    )  # fmt: skip
    if gain is not None:
        work.strips = strips


def best(logits: Tensor, parts: tuple[Tensor, Tensor], out: Tensor) -> None:
    """argmax of each row, the first of equals; `parts` have room for best_parts(vocab) numbers a row."""
    rows, size = logits.shape
    count = best_parts(size)
    _best_parts[(rows, count)](logits, *parts, size, BEST, count, num_warps=4)
    _best_of[(rows,)](*parts, out, size, count, triton.next_power_of_2(count), num_warps=1)


def best_parts(size: int) -> int:
    return triton.cdiv(size, BEST)


def place_qkv(
    joined: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float,
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, meta: Tensor, turns: tuple[Tensor, Tensor], rows: int,
) -> None:  # fmt: skip
    heads, kv, d = q.shape[1], keys.shape[1], keys.shape[3]
    norm_q, norm_k = norms or (None, None)
    width, soon, block = triton.next_power_of_2(d // 2), early(q.device), 4 if rows <= MOST_ROWS else 16
    _place_qkv[(triton.cdiv(rows, block), heads + 2 * kv)](
        joined, norm_q, norm_k, q, keys, values, table, table.stride(0), meta, meta.stride(0), *turns, rows, eps,
        norms is not None, heads, kv, d, keys.shape[2], width, block, soon, num_warps=2, launch_pdl=soon,
    )  # fmt: skip


CHUNK = 256  # keys of one program, while that gives at most CHUNKS of them
CHUNKS = 32
MANY_CHUNKS = 4  # where there are many rows, they fill the device by themselves


def most_parts(rows: int) -> int:
    """How many chunks of rows a pass can have."""
    return max(rows * MANY_CHUNKS, min(rows, MOST_ROWS) * CHUNKS)


class Attention:
    """Attention of a pass: how its keys are cut into chunks, and where the chunks' sums lie."""

    def __init__(self, rows: int, tile: int, longest: int, parts: Tensor, sums: Tensor) -> None:
        self.rows, self.tile, self._part = rows, tile, parts
        self._most, self._sum = sums
        # passes of few rows cut alike, so that a row's sums are always taken in the same order
        self.chunk = max(CHUNK, longest // (CHUNKS if rows <= MOST_ROWS else MANY_CHUNKS))
        self.splits = -(-longest // self.chunk)

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, meta: Tensor, out: Tensor, window: int
    ) -> None:
        """out [rows, heads, D] from q of the same shape and this layer's pages."""
        heads, kv, d = q.shape[1], keys.shape[1], keys.shape[3]
        padded, soon = max(16, triton.next_power_of_2(d)), early(q.device)
        wide = q.dtype == torch.float32
        keys_at_once = 32 if wide else min(CHUNK, CHUNK * 64 // padded) if self.tile <= 16 else 64
        _attend[(self.rows, kv, self.splits)](
            q, keys, values, table, table.stride(0), meta, meta.stride(0), out, self._part, self._most, self._sum,
            d**-0.5, heads, kv, d, padded, self.tile, keys.shape[2], self.chunk, self.splits,
            keys_at_once, window, soon, num_warps=8 if self.tile <= 16 and not wide else 4,
            num_stages=1 if wide or self.tile <= 16 else 2, launch_pdl=soon,
        )  # fmt: skip
        if self.splits > 1:
            _combine[(self.rows, heads)](
                out, self._part, self._most, self._sum, meta, meta.stride(0), heads, d, padded, self.chunk, self.splits,
                triton.next_power_of_2(self.splits), soon, num_warps=4, launch_pdl=soon,
            )  # fmt: skip


def norm(x: Tensor, gain: Tensor, out: Tensor, eps: float, rows: int, delta: Tensor | None = None) -> None:
    size = x.shape[1]
    _norm[(rows,)](x, delta, gain, out, eps, size, delta is not None, triton.next_power_of_2(size), num_warps=4)


def gate(joined: Tensor, out: Tensor, rows: int) -> None:
    size = out.shape[1]
    _gate[(rows, triton.cdiv(size, 1024))](joined, out, size, 1024, num_warps=4)


def turn(x: Tensor, turns: tuple[Tensor, Tensor], places: int, heads: int) -> None:
    """Rotate the first `heads` heads of x [rows, all heads * D] in place; the rows are texts of `places` tokens."""
    rows, width = x.shape
    d = 2 * turns[0].shape[1]
    _turn[(rows,)](
        x, *turns, width, places, heads, d, triton.next_power_of_2(d // 2), triton.next_power_of_2(heads), num_warps=4
    )


def choose(logits: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, out: Tensor) -> None:
    """out [rows] int64: the token that each row's dice choose; keys are Dice's, positions those to be written."""
    _choose[(logits.shape[0],)](
        logits, keys, positions, temperatures, out, logits.shape[1], 2048, num_warps=8
    )  # fmt: skip
