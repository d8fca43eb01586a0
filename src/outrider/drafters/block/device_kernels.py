"""The kernels of a block head on a GPU beside those of the target, in Triton: the keys of what was committed, how the
slots begin, and a step of the sequential part along the paths of a draft."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.drafters.eagle.device_kernels import SequenceField
from outrider.models.cuda.batch import Field
from outrider.models.cuda.kernels import pair_sum
from outrider.models.cuda.launch import begin_after, early, nearly_done
from outrider.models.cuda.product import Workspace

KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}  # of the sequential part
MOST_SLOTS = 64  # of a block: one compiled kernel serves all
STEP_ROWS, STEP_OUTPUTS, STEP_INNER = 16, 16, 64  # that a program of the sequential part takes

_TOKEN = tl.constexpr(int(Field.TOKEN))
_POSITION = tl.constexpr(int(Field.POSITION))
_PLACE = tl.constexpr(int(Field.PLACE))
_ROW_SLOT = tl.constexpr(int(Field.SLOT))
_BASE = tl.constexpr(int(Field.BASE))
_END = tl.constexpr(int(Field.END))
_LOW = tl.constexpr(int(Field.LOW))
_HIGH = tl.constexpr(int(Field.HIGH))
_HELD = tl.constexpr(int(Field.HELD))
_BLOCK_ROW = tl.constexpr(int(Field.BLOCK_ROW))
_BLOCK_COUNT = tl.constexpr(int(Field.BLOCK_COUNT))
_BLOCK_TREE = tl.constexpr(int(Field.BLOCK_TREE))
_SLOT = tl.constexpr(int(SequenceField.SLOT))
_LENGTH = tl.constexpr(int(SequenceField.LENGTH))
_LAST = tl.constexpr(int(SequenceField.LAST))
_GATED = tl.constexpr(KINDS["gated"])
_RNN = tl.constexpr(KINDS["rnn"])
_EPS = tl.constexpr(torch.finfo(torch.float32).eps)  # of a norm that states none


@triton.jit(do_not_specialize=["count", "stride"])
def _place_kv(
    kv_ptr, gain_ptr, cache_ptr, part_size, table_ptr, table_stride, meta_ptr, stride, cos_ptr, sin_ptr, count, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr, BP: tl.constexpr,
    ROWS: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """A key or value head of some rows of kv [R, HEADS * D], of all layers, to its pages: norm and rotation for keys.
    Each layer has KV key heads and KV value heads."""
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    kind, own = head // KV, head % KV  # the keys of a layer, its values, the keys of the next one
    part = tl.arange(0, BP)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    inside = (part < HALF)[:, None] & live[None, :]
    angle = tl.load(meta_ptr + _POSITION * stride + rows, mask=live, other=0)[None, :] * HALF + part[:, None]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    slot = tl.load(meta_ptr + _ROW_SLOT * stride + rows, mask=live, other=0)
    key = tl.load(meta_ptr + _PLACE * stride + rows, mask=live, other=0)
    page = tl.load(table_ptr + slot.to(tl.int64) * table_stride + key // PAGED, mask=live, other=0).to(tl.int64)
    begin_after(SOON)  # what was read so far the kernel before does not write
    place = kv_ptr + rows[None, :].to(tl.int64) * (HEADS * D) + head * D + part[:, None]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [BP, ROWS], the first half of the head
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    nearly_done(SOON)
    if kind % 2 == 0:
        if NORM:
            gain = gain_ptr + kind // 2 * D + part
            total = pair_sum(a * a, BP, ROWS) + pair_sum(b * b, BP, ROWS)
            scale = tl.rsqrt(total / D + eps)[None, :]
            a *= scale * tl.load(gain, mask=part < HALF, other=0.0).to(tl.float32)[:, None]
            b *= scale * tl.load(gain + HALF, mask=part < HALF, other=0.0).to(tl.float32)[:, None]
        a, b = a * cos - b * sin, b * cos + a * sin
    at = kind.to(tl.int64) * part_size + ((page * KV + own) * PAGED + key % PAGED) * D
    to = cache_ptr + at[None, :] + part[:, None]
    tl.store(to, a.to(cache_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, b.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slot_rows(to, stride, token, position, place, slot, held, end, leads, row, count, inside):
    """Write rows of a table in the form that a pass reads, all marked as committed tokens."""
    zero = tl.zeros_like(row)
    tl.store(to + _TOKEN * stride, token, mask=inside)
    tl.store(to + _POSITION * stride, position, mask=inside)
    tl.store(to + _PLACE * stride, place, mask=inside)
    tl.store(to + _ROW_SLOT * stride, zero + slot, mask=inside)
    tl.store(to + _BASE * stride, zero + end, mask=inside)
    tl.store(to + _END * stride, zero + end, mask=inside)
    tl.store(to + _LOW * stride, zero, mask=inside)
    tl.store(to + _HELD * stride, zero + held, mask=inside)
    tl.store(to + _HIGH * stride, zero, mask=inside)
    tl.store(to + _BLOCK_ROW * stride, tl.where(leads, row, 0), mask=inside)
    tl.store(to + _BLOCK_COUNT * stride, tl.where(leads, count, 0), mask=inside)
    tl.store(to + _BLOCK_TREE * stride, zero, mask=inside)


@triton.jit(do_not_specialize=["count", "slots", "padding", "unknown"])
def _enter_block(
    sequences_ptr, tokens_ptr, embedding_ptr, table_ptr, seen_ptr, out_ptr, count, slots, padding, unknown, size,
    CAUSAL: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr, SP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The table of the slots of each sequence, after what was committed: slot 0 has the last token, the others the mask
    token. Not CAUSAL: in `seen` the same, with the last position of the block for all, which is what each sees. STARTS:
    the embedding of the last token, normed, goes to out [sequences, size]."""
    seq, place = tl.program_id(0), tl.arange(0, SP)
    slot = tl.load(sequences_ptr + _SLOT * count + seq)
    base = tl.load(sequences_ptr + _LENGTH * count + seq)
    token = tl.load(tokens_ptr + tl.load(sequences_ptr + _LAST * count + seq))
    row, inside, end, stride = seq * slots + place, place < slots, base + slots, count * slots
    leads, rows = (place % BLOCK == 0) & (slot != padding), tl.minimum(slots - place, BLOCK)
    tokens = tl.where(place == 0, token, unknown)
    _slot_rows(table_ptr + row, stride, tokens, base + place, base + place, slot, base, end, leads, row, rows, inside)
    if not CAUSAL:
        last = tl.zeros_like(place) + end - 1
        _slot_rows(seen_ptr + row, stride, tokens, last, base + place, slot, base, end, leads, row, rows, inside)
    if STARTS:
        column = tl.arange(0, WIDE)
        x = tl.load(embedding_ptr + token.to(tl.int64) * size + column, mask=column < size, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / size + _EPS)
        tl.store(out_ptr + seq.to(tl.int64) * size + column, x.to(out_ptr.dtype.element_ty), mask=column < size)


@triton.jit(do_not_specialize=["count", "slots"])
def _begin(
    sequences_ptr, joined_ptr, embedded_ptr, starts_ptr, tokens_ptr, embedding_ptr, gain_ptr, x_ptr, next_ptr,
    squares_ptr, count, slots, size, STARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The slots as they begin, x [sequences * slots, size], and what the first norm needs of them. STARTS: from the
    newest state and the last token; else from the embeddings of their tokens."""
    row, column = tl.program_id(0), tl.arange(0, WIDE)
    seq, place, inside = row // slots, row % slots, column < size
    dtype = x_ptr.dtype.element_ty
    if STARTS:
        last = tl.load(sequences_ptr + _LAST * count + seq).to(tl.int64)
        x = tl.load(joined_ptr + last * size + column, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(embedded_ptr + seq.to(tl.int64) * size + column, mask=inside, other=0.0).to(tl.float32)
        own = starts_ptr + tl.maximum(place - 1, 0) * size + column
        others = column < tl.where(place > 0, size, 0)
        x = x.to(dtype).to(tl.float32) + tl.load(own, mask=others, other=0.0).to(tl.float32)
    else:
        token = tl.load(tokens_ptr + row).to(tl.int64)
        x = tl.load(embedding_ptr + token * size + column, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype)
    to = row.to(tl.int64) * size + column
    tl.store(x_ptr + to, x, mask=inside)
    x = x.to(tl.float32)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(next_ptr + to, (x * gain).to(dtype), mask=inside)
    x = x.to(squares_ptr.dtype.element_ty)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["count", "stage", "slots", "token_stride"])
def _step(
    token_ptr, token_stride, source_ptr, state_ptr, before_ptr, weight_ptr, slots_ptr, slots_stride, next_ptr, g_ptr,
    count, stage, slots,
    KIND: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, RANK: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """BN numbers of g and of the next state, [R, RANK] both, of rows that each have a token, the state of their source
    (FIRST: there is none yet) and a slot, which EACH rows share: `slots` has what it brings to the sums. `weight`: what
    token and state bring to them, [RANK, RANK] of a gated part, [3 RANK, 2 RANK] of a recurrent one, state first."""
    column, inner = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live, inside = row < count, column < RANK
    real = live[:, None] & inside[None, :]
    begin_after(SOON)
    token = tl.load(token_ptr + row * token_stride, mask=live, other=0).to(tl.int64)
    own = before_ptr + token[:, None] * RANK
    to = row.to(tl.int64)[:, None] * RANK + column[None, :]
    g = tl.load(own + column[None, :], mask=real, other=0.0).to(tl.float32)
    slot = slots_ptr + ((row // EACH).to(tl.int64) * slots + stage)[:, None] * slots_stride + column[None, :]
    if KIND == _GATED:
        gate = tl.load(slot, mask=real, other=0.0)
        for k in range(0, RANK, BK):
            fits = k + inner < RANK
            x = tl.load(own + k + inner[None, :], mask=live[:, None] & fits[None, :], other=0.0)
            at = weight_ptr + column[:, None] * RANK + k + inner[None, :]
            w = tl.load(at, mask=inside[:, None] & fits[None, :], other=0.0)
            gate = tl.dot(x, w.T, gate, input_precision="ieee")
        g *= _sigmoid(gate)
    if KIND == _RNN:
        gate = tl.load(slot, mask=real, other=0.0)
        new = tl.load(slot + RANK, mask=real, other=0.0)
        out = tl.load(slot + 2 * RANK, mask=real, other=0.0)
        held = tl.zeros([ROWS, BN], tl.float32)
        state = own
        if not FIRST:
            source = tl.load(source_ptr + row, mask=live, other=0).to(tl.int64)
            state = state_ptr + source[:, None] * RANK
            held = tl.load(state + column[None, :], mask=real, other=0.0).to(tl.float32)
        NEXT: tl.constexpr = RANK * 2 * RANK  # from a row of the matrix to that of the next number
        for k in range(0, RANK, BK):
            fits = k + inner < RANK
            some, taken = live[:, None] & fits[None, :], inside[:, None] & fits[None, :]
            at = weight_ptr + column[:, None] * (2 * RANK) + k + inner[None, :]
            if not FIRST:
                x = tl.load(state + k + inner[None, :], mask=some, other=0.0)
                gate = tl.dot(x, tl.load(at, mask=taken, other=0.0).T, gate, input_precision="ieee")
                new = tl.dot(x, tl.load(at + NEXT, mask=taken, other=0.0).T, new, input_precision="ieee")
                out = tl.dot(x, tl.load(at + 2 * NEXT, mask=taken, other=0.0).T, out, input_precision="ieee")
            x = tl.load(own + k + inner[None, :], mask=some, other=0.0)
            at += RANK
            gate = tl.dot(x, tl.load(at, mask=taken, other=0.0).T, gate, input_precision="ieee")
            new = tl.dot(x, tl.load(at + NEXT, mask=taken, other=0.0).T, new, input_precision="ieee")
            out = tl.dot(x, tl.load(at + 2 * NEXT, mask=taken, other=0.0).T, out, input_precision="ieee")
        g, gate = _tanh(out), _sigmoid(gate)
        tl.store(next_ptr + to, (gate * held + (1.0 - gate) * _tanh(new)).to(next_ptr.dtype.element_ty), mask=real)
    nearly_done(SOON)
    tl.store(g_ptr + to, g.to(g_ptr.dtype.element_ty), mask=real)


def place_kv(
    kv: Tensor, gains: Tensor | None, cache: Tensor, page_table: Tensor, table: Tensor, angles: tuple[Tensor, Tensor],
    eps: float,
) -> None:  # fmt: skip
    """kv [rows, layers * 2 * key heads * D] into cache [layers, 2, pages, key heads, PAGE, D]; `gains` [layers, D] of
    the keys' norms."""
    layers, two, pages, heads, paged, d = cache.shape
    rows, soon, block = len(kv), early(kv.device), 4
    _place_kv[(triton.cdiv(rows, block), layers * two * heads)](
        kv, gains, cache, pages * heads * paged * d, page_table, page_table.stride(0), table, table.stride(0), *angles,
        rows, eps, gains is not None, layers * two * heads, heads, d, paged, triton.next_power_of_2(d // 2), block,
        soon, num_warps=2, launch_pdl=soon,
    )  # fmt: skip


def enter_block(
    sequences: Tensor, tokens: Tensor, embedding: Tensor, tables: tuple[Tensor, Tensor], out: Tensor, block: int,
    padding: int, unknown: int, starts: bool,
) -> None:  # fmt: skip
    """`tokens`: of the rows that were committed. `tables` [len(Field), sequences * slots]: of the slots, and as their
    attention reads it, which may be the same. `block`: rows that it takes at once."""
    count, size = sequences.shape[1], out.shape[1]
    table, seen = tables
    _enter_block[(count,)](
        sequences, tokens, embedding, table, seen, out, count, table.shape[1] // count, padding, unknown, size,
        seen is table, starts, block, MOST_SLOTS, triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


def begin(
    sequences: Tensor, joined: Tensor, embedded: Tensor, starts: Tensor | None, tokens: Tensor, embedding: Tensor,
    gain: Tensor, x: Tensor, work: Workspace,
) -> None:  # fmt: skip
    """`joined`: the states of all committed rows; `embedded` [sequences, hidden]: the last token of each, projected;
    `starts` [slots - 1, hidden]: what is added for each slot, None: slots begin from their `tokens`."""
    count, (rows, size) = sequences.shape[1], x.shape
    _begin[(rows,)](
        sequences, joined, embedded, starts, tokens, embedding, gain, x, work.next, work.squares, count, rows // count,
        size, starts is not None, triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    work.strips = 1


def step(
    kind: str, tokens: Tensor, source: Tensor | None, state: Tensor, before: Tensor, weight: Tensor | None,
    slots: Tensor, stage: int, following: Tensor, g: Tensor,
) -> None:  # fmt: skip
    """One stage of the sequential part, of rows with these tokens. `source`: the row of `state` that each reads; None:
    they are the first. `slots` [sequences, stages, sums] float32; every sequence has the same number of rows."""
    rows, rank = g.shape
    count, stages, _ = slots.shape
    power, soon = triton.next_power_of_2, early(g.device)
    _step[(triton.cdiv(rank, STEP_OUTPUTS), triton.cdiv(rows, STEP_ROWS))](
        tokens, tokens.stride(0), source, state, before, weight, slots, slots.stride(1), following, g, rows, stage,
        stages, KINDS[kind], source is None, rows // count, rank, min(STEP_INNER, max(16, power(rank))), STEP_OUTPUTS,
        STEP_ROWS, soon, num_warps=2, launch_pdl=soon,
    )  # fmt: skip
