"""The kernels of a pass on a GPU around its products and its attention, in Triton. R is rows (tokens and nodes).

What a kernel computes for a row never depends on the other rows of the pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.batch import FEW_ROWS, Field
from outrider.models.cuda.launch import begin_after, early, nearly_done
from outrider.models.cuda.product import Around, Workspace, can_place, linear, pair_sum
from outrider.models.cuda.rotary import HeadPlaces, destination, rotated

BEST = 4096  # logits that one program looks through

_TOKEN = tl.constexpr(int(Field.TOKEN))
_POSITION = tl.constexpr(int(Field.POSITION))
_BASE = tl.constexpr(int(Field.BASE))
_END = tl.constexpr(int(Field.END))
_HELD = tl.constexpr(int(Field.HELD))
_PLACE = tl.constexpr(int(Field.PLACE))
_SLOT = tl.constexpr(int(Field.SLOT))


@triton.jit
def _embed(token_ptr, table_ptr, gain_ptr, x_ptr, next_ptr, squares_ptr, size, BLOCK: tl.constexpr, SOON: tl.constexpr):
    """Rows of the embedding into x, and what the first norm needs of them."""
    begin_after(SOON)
    nearly_done(SOON)
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
    x = x.to(squares_ptr.dtype.element_ty)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


@triton.jit(do_not_specialize=["table_stride", "stride", "count"])
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
    angle = tl.load(meta_ptr + _POSITION * stride + rows, mask=live, other=0)[None, :] * HALF + part[:, None]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    slot = tl.load(meta_ptr + _SLOT * stride + rows, mask=live, other=0)
    key = tl.load(meta_ptr + _PLACE * stride + rows, mask=live, other=0)
    to = destination(head, part, rows, slot, key, live, q_ptr, keys_ptr, values_ptr, table_ptr, table_stride,
                     HEADS, KV, D, PAGED)  # fmt: skip
    begin_after(SOON)  # what was read so far the kernel before does not write
    nearly_done(SOON)
    place = qkv_ptr + rows[None, :].to(tl.int64) * ((HEADS + 2 * KV) * D) + head * D + part[:, None]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [BP, ROWS], the first half of the head
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV:
        if NORMS:
            gain_ptr = norm_k_ptr
            if head < HEADS:
                gain_ptr = norm_q_ptr
            # squares are exact in float64, and so is the order of their sum
            wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
            total = pair_sum(wide_a * wide_a, BP, ROWS) + pair_sum(wide_b * wide_b, BP, ROWS)
            scale = tl.rsqrt(total.to(tl.float32) / D + eps)[None, :]
            a *= scale * tl.load(gain_ptr + part, mask=part < HALF, other=0.0).to(tl.float32)[:, None]
            b *= scale * tl.load(gain_ptr + HALF + part, mask=part < HALF, other=0.0).to(tl.float32)[:, None]
        a, b = rotated(a, b, cos, sin)
    tl.store(to, a.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, b.to(q_ptr.dtype.element_ty), mask=inside)


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
def _keep(x_ptr, out_ptr, size, out_stride, BLOCK: tl.constexpr, SOON: tl.constexpr):
    """out [R, size], whose rows lie `out_stride` apart, = x."""
    begin_after(SOON)
    nearly_done(SOON)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < size
    tl.store(out_ptr + row * out_stride + column, tl.load(x_ptr + row * size + column, mask=inside), mask=inside)


@triton.jit
def _best_parts(logits_ptr, most_ptr, where_ptr, size, BLOCK: tl.constexpr, PARTS: tl.constexpr, SOON: tl.constexpr):
    """The highest of each part of a row, and the first place that has it."""
    begin_after(SOON)
    nearly_done(SOON)
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row.to(tl.int64) * size + column, mask=column < size, other=float("-inf"))
    most = tl.max(x, 0)
    tl.store(most_ptr + row * PARTS + part, most)
    tl.store(where_ptr + row * PARTS + part, tl.min(tl.where(x == most, column, size), 0))


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def _best_of(most_ptr, where_ptr, out_ptr, size, PARTS: tl.constexpr, ALL: tl.constexpr, SOON: tl.constexpr):
    begin_after(SOON)
    nearly_done(SOON)
    row, part = tl.program_id(0), tl.arange(0, ALL)
    most = tl.load(most_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    where = tl.load(where_ptr + row * PARTS + part, mask=part < PARTS, other=size)
    token = tl.min(tl.where(most == tl.max(most, 0), where, size), 0)
    tl.store(out_ptr + row, tl.minimum(token, size - 1).to(tl.int64))  # a row of nan has no best


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize_on_alignment=["position_ptr", "out_ptr"])
def _choose(
    logits_ptr, key_ptr, position_ptr, temperature_ptr, out_ptr, size, CUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """core.dice.Dice.choose for every row at once: argmin(noise / p), or argmax where the temperature is 0. CUT: many
    logits may be minus infinity, and where all of a block are, no noise is computed."""
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
        key = mix64(tl.load(key_ptr + row).to(tl.uint64) ^ mix64(position * 8))  # the stream of NOISE is 0
        first, second = (key >> 32).to(tl.uint32), key.to(tl.uint32)
        least = tl.full([BLOCK], float("inf"), tl.float64)
        for start in range(0, size, BLOCK):
            x = tl.load(logits + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
            some = True
            if CUT:
                some = tl.max(x, 0) > float("-inf")
            if some:
                p = tl.exp((x - best) / temperature).to(tl.float64)
                bits = mix32(mix32((start + column).to(tl.uint32) ^ first) ^ second)
                noise = -tl.log((bits.to(tl.float64) + 0.5) / 4294967296.0)
                score = tl.where(p > 0, noise / p, float("inf"))
                where = tl.where(score < least, start + column, where)
                least = tl.minimum(least, score)
        token = tl.min(tl.where(least == tl.min(least, 0), where, size), 0)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["stride", "count"], do_not_specialize_on_alignment=["token_ptr"])
def _advance(meta_ptr, stride, token_ptr, position_ptr, count, BLOCK: tl.constexpr):
    """The table of a pass with one row of each sequence, whose next tokens are these."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    tl.store(meta_ptr + _TOKEN * stride + row, tl.load(token_ptr + row, mask=inside).to(tl.int32), mask=inside)
    _add_one(meta_ptr + _POSITION * stride + row, inside)
    _add_one(meta_ptr + _PLACE * stride + row, inside)
    _add_one(meta_ptr + _BASE * stride + row, inside)
    _add_one(meta_ptr + _END * stride + row, inside)
    _add_one(meta_ptr + _HELD * stride + row, inside)
    _add_one(position_ptr + row, inside)


@triton.jit
def _add_one(at, inside):
    tl.store(at, tl.load(at, mask=inside) + 1, mask=inside)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["pairs_ptr"])
def _move(cache_ptr, begins_ptr, pairs_ptr, size, D: tl.constexpr, DP: tl.constexpr, PAGED: tl.constexpr,
          KV: tl.constexpr, SOON: tl.constexpr):  # fmt: skip
    """Keys or values of one layer, key head and sequence go from the first place of each of its pairs to the second, in
    that order: what is kept only moves towards the beginning, so nothing is overwritten before it has moved."""
    begin_after(SOON)
    nearly_done(SOON)
    part, head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dim = tl.arange(0, DP)
    inside = dim < D
    for pair in range(tl.load(begins_ptr + sequence), tl.load(begins_ptr + sequence + 1)):
        source, to = tl.load(pairs_ptr + 2 * pair).to(tl.int64), tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
        first = part * size + ((source // PAGED * KV + head) * PAGED + source % PAGED) * D + dim
        second = part * size + ((to // PAGED * KV + head) * PAGED + to % PAGED) * D + dim
        tl.store(cache_ptr + second, tl.load(cache_ptr + first, mask=inside, other=0.0), mask=inside)


def move(cache: Tensor, begins: Tensor, pairs: Tensor) -> None:
    """In cache [layers, 2, pages, key heads, PAGED, D]: pairs [n, 2] of places, counted over all pages; `begins`
    [sequences + 1]: where those of each sequence begin."""
    layers, two, pages, kv, paged, d = cache.shape
    soon = early(cache.device)
    _move[(layers * two, kv, len(begins) - 1)](
        cache, begins, pairs, pages * kv * paged * d, d, triton.next_power_of_2(d), paged, kv, soon, num_warps=1,
        launch_pdl=soon,
    )  # fmt: skip


def advance(meta: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """`tokens` [sequences] are written and will be fed next; `positions` [sequences]: of the token to be written."""
    count = len(tokens)
    _advance[(triton.cdiv(count, 128),)](meta, meta.stride(0), tokens, positions, count, 128, num_warps=1)


def embed(tokens: Tensor, table: Tensor, gain: Tensor, x: Tensor, work: Workspace) -> None:
    (rows, size), soon = x.shape, early(x.device)
    _embed[(rows,)](
        tokens, table, gain, x, work.next, work.squares, size, triton.next_power_of_2(size), soon, num_warps=4,
        launch_pdl=soon,
    )  # fmt: skip
    work.strips = 1


def keep(x: Tensor, out: Tensor) -> None:
    """out = x, both [rows, size]."""
    (rows, size), soon = x.shape, early(x.device)
    _keep[(rows,)](x, out, size, out.stride(0), triton.next_power_of_2(size), soon, num_warps=4, launch_pdl=soon)


def best(logits: Tensor, parts: tuple[Tensor, Tensor], out: Tensor) -> None:
    """argmax of each row, the first of equals; `parts` hold best_parts(vocab) numbers a row."""
    rows, size = logits.shape
    count, soon = best_parts(size), early(logits.device)
    _best_parts[(rows, count)](logits, *parts, size, BEST, count, soon, num_warps=4, launch_pdl=soon)
    _best_of[(rows,)](*parts, out, size, count, triton.next_power_of_2(count), soon, num_warps=1, launch_pdl=soon)


def best_parts(size: int) -> int:
    return triton.cdiv(size, BEST)


def best_workspace(logits: Tensor) -> tuple[Tensor, Tensor]:
    parts = len(logits), best_parts(logits.shape[1])
    return logits.new_empty(parts), torch.empty(parts, dtype=torch.int32, device=logits.device)


def qkv(x: Tensor, weight: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor] | None, eps: float,
        places: HeadPlaces, work: Workspace, around: Around) -> None:  # fmt: skip
    """Queries, keys and values of rows x, where the attention reads them. `norms`: of queries and keys."""
    if norms is None and can_place(len(x), weight, places.sizes[2], around.adapters is not None):
        linear(x, weight, bias, None, work, replace(around, places=places))
        return
    joined = x.new_empty(len(x), len(weight))
    linear(x, weight, bias, joined, work, around)
    place_qkv(joined, norms, eps, places)


def place_qkv(joined: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, places: HeadPlaces) -> None:
    """`joined` [rows, (heads + 2 key heads) * D]: queries, keys and values of each row."""
    rows, (heads, kv, d, paged), meta = len(joined), places.sizes, places.meta
    norm_q, norm_k = norms or (None, None)
    width, soon, block = triton.next_power_of_2(d // 2), early(joined.device), 4 if rows <= FEW_ROWS else 16
    _place_qkv[(triton.cdiv(rows, block), heads + 2 * kv)](
        joined, norm_q, norm_k, places.q, places.keys, places.values, places.pages, places.pages.stride(0), meta,
        meta.stride(0), *places.angles, rows, eps,
        norms is not None, heads, kv, d, paged, width, block, soon, num_warps=2, launch_pdl=soon,
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


def choose(
    logits: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, out: Tensor, cut: bool = False
) -> None:
    """out [rows] int64: the token that each row's dice choose; keys are Dice's, positions those to be written. `cut`:
    whether tokens were taken out of some rows."""
    _choose[(logits.shape[0],)](
        logits, keys, positions, temperatures, out, logits.shape[1], cut, 2048, num_warps=8
    )  # fmt: skip
