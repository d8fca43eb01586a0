"""Attention over pages of keys and values.

A row's keys are taken in chunks whose size the model alone decides. Within a chunk the softmax is the plain one; chunks
are merged from front to back by one rule. So a row's bits depend on its own query and keys alone: not on the rows that
share its program, on how many chunks there are, or on whether one program takes all of them or each chunk has its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.batch import SMALL_TILE, Field
from outrider.models.cuda.launch import begin_after, early, nearly_done, nothing_to_do
from outrider.models.cuda.product import PROCESSORS

PARTS_BYTES = 128 << 20  # memory for the sums of chunks that have programs of their own
# Warps of a program, and of one where each processor has to run more than two of them: two such fit on it at a time
# (LOG, 2026-11-18, passes of 64 to 256 rows on a GPU).
LARGE_WARPS, CROWDED_WARPS = 8, 4

_POSITION = tl.constexpr(int(Field.POSITION))
_SLOT = tl.constexpr(int(Field.SLOT))
_BASE = tl.constexpr(int(Field.BASE))
_END = tl.constexpr(int(Field.END))
_LOW = tl.constexpr(int(Field.LOW))
_HIGH = tl.constexpr(int(Field.HIGH))
_HELD = tl.constexpr(int(Field.HELD))
_BLOCK_ROW = tl.constexpr(int(Field.BLOCK_ROW))
_BLOCK_COUNT = tl.constexpr(int(Field.BLOCK_COUNT))
_BLOCK_TREE = tl.constexpr(int(Field.BLOCK_TREE))
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _level(highest):
    """What scores are taken relative to; a chunk of which nothing is seen has no highest."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _merged(most, total, mixed, chunk_most, chunk_total, chunk_mixed):
    """The sums over all chunks so far with those of the next one. Each product is rounded as written here."""
    higher = tl.maximum(most, chunk_most)
    level = _level(higher)
    old, new = tl.exp2((most - level) * _LOG2_E), tl.exp2((chunk_most - level) * _LOG2_E)
    total = tl.fma(total, old, chunk_total * new)
    mixed = tl.fma(mixed, tl.broadcast_to(old[:, None], mixed.shape), chunk_mixed * new[:, None])
    return higher, total, mixed


@triton.jit
def _path_places(key, base, low, high, nodes):
    """Where the keys of positions `key` lie for a node whose path's nodes are the bits of low and high: the n-th
    position after `base` is the n-th bit that is set, for parents stand before their children."""
    place, found = key, 0
    for node in range(nodes):
        bit = tl.where(node < 32, low >> tl.minimum(node, 31), high >> tl.maximum(node - 32, 0)) & 1
        place = tl.where((bit == 1) & (key == base + found), base + node, place)
        found += bit
    return place


@triton.jit
def _key_places(start, end, slot, kv, base, low, high, nodes, table_ptr, table_stride,
                KV: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The positions of a chunk from `start` on, and where their keys and values begin."""
    key = start + tl.arange(0, CHUNK)
    place = key
    if ((low | high) != 0) & (start + CHUNK > base):
        place = _path_places(key, base, low, high, nodes)
    page = tl.load(table_ptr + slot * table_stride + place // PAGED, mask=key < end, other=0).to(tl.int64)
    return key, ((page * KV + kv) * PAGED + place % PAGED) * D


@triton.jit
def _keys(keys_ptr, at, dim, wanted, inside):
    """[DP, CHUNK]"""
    return tl.load(keys_ptr + at[None, :] + dim[:, None], mask=wanted[None, :] & inside[:, None], other=0.0)


@triton.jit
def _values(values_ptr, at, dim, wanted, inside):
    """[CHUNK, DP]"""
    return tl.load(values_ptr + at[:, None] + dim[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)


@triton.jit(do_not_specialize=["table_stride", "stride", "chunks"])
def _attend(
    q_ptr, keys_ptr, values_ptr, table_ptr, table_stride, meta_ptr, stride, out_ptr, part_ptr, most_ptr, sum_ptr,
    chunks, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr,
    CHUNK: tl.constexpr, EACH: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
    SOON: tl.constexpr,
):  # fmt: skip
    """A block of rows of one sequence, for the heads that share a key head. EACH: chunks of one program, whose sums go
    to `part`; 0: all of them, and their outcome goes to `out`.

    AHEAD: what earlier passes wrote of its first chunk is read before this pass's own queries and keys are there.
    """
    block, kv, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    count = tl.load(meta_ptr + _BLOCK_COUNT * stride + block)
    tree = tl.load(meta_ptr + _BLOCK_TREE * stride + block)
    if count + tree == 0:
        nothing_to_do(SOON)
        return
    first = tl.load(meta_ptr + _BLOCK_ROW * stride + block)
    slot = tl.load(meta_ptr + _SLOT * stride + first).to(tl.int64)
    base = tl.load(meta_ptr + _BASE * stride + first)
    end = tl.load(meta_ptr + _END * stride + first)
    held = tl.load(meta_ptr + _HELD * stride + first)
    begin = share * EACH * CHUNK
    if begin >= end:
        nothing_to_do(SOON)
        return
    nodes = end - base
    # from the chunk with the draft's beginning on, a row of a tree goes its own way
    alone = (tree == 1) & ((EACH == 0) | (begin + EACH * CHUNK > base))
    count = tl.where(alone, 1, count)
    if count == 0:
        nothing_to_do(SOON)
        return
    end = tl.where(alone, tl.load(meta_ptr + _POSITION * stride + first) + 1, end)
    low = tl.load(meta_ptr + _LOW * stride + first)
    high = tl.load(meta_ptr + _HIGH * stride + first)
    lane = tl.arange(0, TILE)
    row, head = first + lane // GROUP, kv * GROUP + lane % GROUP
    live = lane < count * GROUP
    dim = tl.arange(0, DP)
    inside = dim < D
    where = row.to(tl.int64) * (HEADS * D) + head * D
    position = tl.load(meta_ptr + _POSITION * stride + row, mask=live, other=0)[:, None]
    if AHEAD:
        key, at = _key_places(
            begin, end, slot, kv, base, low, high, nodes, table_ptr, table_stride, KV, D, PAGED, CHUNK
        )
        k = _keys(keys_ptr, at, dim, (key < held) & (key < end), inside)
        v = _values(values_ptr, at, dim, (key < held) & (key < end), inside)
    begin_after(SOON)  # what was read so far the kernel before does not write
    nearly_done(SOON)
    q = tl.load(q_ptr + where[:, None] + dim[None, :], mask=live[:, None] & inside[None, :], other=0.0)  # [TILE, DP]
    if AHEAD and begin + CHUNK > held:
        new = (key >= held) & (key < end)
        k = tl.where(new[None, :], _keys(keys_ptr, at, dim, new, inside), k)
        v = tl.where(new[:, None], _values(values_ptr, at, dim, new, inside), v)
    UNITS: tl.constexpr = 1 << (40 if q_ptr.dtype.element_ty == tl.float32 else 22)  # of a weight, which is at most 1
    WHOLE: tl.constexpr = tl.int64 if q_ptr.dtype.element_ty == tl.float32 else tl.int32  # holds a chunk of them
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, DP], tl.float32)
    last = end
    if EACH > 0:
        last = tl.minimum(begin + EACH * CHUNK, end)
    for start in range(begin, last, CHUNK):
        if (not AHEAD) or start > begin:
            key, at = _key_places(
                start, end, slot, kv, base, low, high, nodes, table_ptr, table_stride, KV, D, PAGED, CHUNK
            )
            k = _keys(keys_ptr, at, dim, key < end, inside)
            v = _values(values_ptr, at, dim, key < end, inside)
        score = tl.dot(q, k, input_precision="ieee") * scale  # [TILE, CHUNK]
        seen = (key[None, :] <= position) & (key < end)[None, :]
        if WINDOW > 0:
            seen = seen & (position - key[None, :] < WINDOW)
        score = tl.where(seen, score, float("-inf"))
        chunk_most = tl.max(score, 1)
        weight = tl.exp2((score - _level(chunk_most)[:, None]) * _LOG2_E)
        # as whole numbers: their sum is the same in any order, and the order is the tile's
        chunk_total = tl.sum((weight * UNITS).to(WHOLE), 1).to(tl.float32) / UNITS
        chunk_mixed = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        if EACH == 0:
            most, total, mixed = _merged(most, total, mixed, chunk_most, chunk_total, chunk_mixed)
        else:
            part = (row.to(tl.int64) * HEADS + head) * chunks + start // CHUNK
            tl.store(part_ptr + part[:, None] * D + dim[None, :], chunk_mixed, mask=live[:, None] & inside[None, :])
            tl.store(most_ptr + part, chunk_most, mask=live)
            tl.store(sum_ptr + part, chunk_total, mask=live)
    if EACH == 0:
        out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + where[:, None] + dim[None, :], out, mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["stride", "chunks"])
def _combine(
    out_ptr, part_ptr, most_ptr, sum_ptr, meta_ptr, stride, chunks,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, BH: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The chunks of a row and BH of its heads together."""
    row = tl.program_id(0)
    head, dim = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, DP)
    live = head < HEADS
    inside = live[:, None] & (dim < D)[None, :]
    count = tl.load(meta_ptr + _POSITION * stride + row) // CHUNK + 1
    begin_after(SOON)
    nearly_done(SOON)
    most = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    mixed = tl.zeros([BH, DP], tl.float32)
    for chunk in range(count):
        at = (row.to(tl.int64) * HEADS + head) * chunks + chunk
        chunk_most = tl.load(most_ptr + at, mask=live, other=0.0)
        chunk_total = tl.load(sum_ptr + at, mask=live, other=0.0)
        chunk_mixed = tl.load(part_ptr + at[:, None] * D + dim[None, :], mask=inside, other=0.0)
        most, total, mixed = _merged(most, total, mixed, chunk_most, chunk_total, chunk_mixed)
    place = out_ptr + (row.to(tl.int64) * HEADS + head)[:, None] * D + dim[None, :]
    tl.store(place, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def chunk_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys in one chunk: enough to fill a program's registers; a function of the model alone."""
    padded = max(16, triton.next_power_of_2(head_dim))
    return 32 if dtype == torch.float32 else max(32, min(256, 256 * 64 // padded))


class PartSums:
    """Where programs that each take some chunks leave their sums."""

    def __init__(self, heads: int, head_dim: int, device: torch.device, memory: int = PARTS_BYTES) -> None:
        self.count = memory // (4 * heads * (head_dim + 2))  # chunks of rows
        self.mixed = torch.empty(self.count * heads * head_dim, dtype=torch.float32, device=device)
        self.most, self.total = (torch.empty(self.count * heads, device=device) for _ in range(2))


class Attention:
    """Attention of the passes of one shape: whether chunks have programs of their own."""

    def __init__(self, rows: int, blocks: int, tile: int, longest: int, chunk: int, shared: tuple[int, int],
                 parts: PartSums) -> None:  # fmt: skip
        """`blocks`: of rows, at most; see Batch. `shared`: key heads, and query heads that share each of them."""
        self.rows, self.blocks, self.tile, self.chunk, self._parts = rows, blocks, tile, chunk, parts
        self.chunks = -(-longest // chunk)
        kv, group = shared
        full = blocks if tile <= SMALL_TILE else -(-rows * group // tile)
        together = self.chunks == 1 or (tile > SMALL_TILE and (longest <= 256 or full * kv >= PROCESSORS))
        self.each = 0 if together or rows * self.chunks > parts.count else max(1, 256 // chunk)
        # reading ahead takes the registers of a whole processor, so programs must not wait for each other
        programs = blocks * kv * (-(-self.chunks // self.each) if self.each else 1)
        self.ahead = tile <= SMALL_TILE and programs <= PROCESSORS
        self.warps = LARGE_WARPS if tile > SMALL_TILE or programs <= 2 * PROCESSORS else CROWDED_WARPS

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, meta: Tensor, out: Tensor, window: int
    ) -> None:
        """out [rows, heads, D] from q of the same shape and this layer's pages."""
        heads, kv, d = q.shape[1], keys.shape[1], keys.shape[3]
        padded, soon, parts = max(16, triton.next_power_of_2(d)), early(q.device), self._parts
        wide = q.dtype == torch.float32
        _attend[(self.blocks, kv, -(-self.chunks // self.each) if self.each else 1)](
            q, keys, values, table, table.stride(0), meta, meta.stride(0), out, parts.mixed, parts.most, parts.total,
            self.chunks, d**-0.5, heads, kv, d, padded, self.tile, keys.shape[2], self.chunk, self.each, window,
            self.ahead, soon,
            num_warps=4 if wide else self.warps,
            num_stages=1 if wide or self.tile <= SMALL_TILE else 2, launch_pdl=soon,
        )  # fmt: skip
        if self.each:
            together = min(4, triton.next_power_of_2(heads))
            _combine[(self.rows, triton.cdiv(heads, together))](
                out, parts.mixed, parts.most, parts.total, meta, meta.stride(0), self.chunks,
                heads, d, padded, self.chunk, together, soon, num_warps=2, launch_pdl=soon,
            )  # fmt: skip
