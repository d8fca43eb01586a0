"""The kernels between the head's graphs and the target's pass where the host does not look: tables are made of drafts,
and drafts are judged, on the device.

A program has one sequence. Of each sequence the pass has 1 + NODES rows: its last token, then the nodes of its draft.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from outrider.drafters.eagle.device_kernels import SequenceField
from outrider.models.cuda.batch import Field


class LoopField(IntEnum):
    """The rows of the table of texts, int32: where the target stands in each sequence."""

    SLOT = 0  # its row of the target's page table
    LENGTH = 1  # tokens that the target's cache has seen
    LAST = 2  # the token after them
    ROUND = 3  # rounds that are done


_TOKEN = tl.constexpr(int(Field.TOKEN))
_POSITION = tl.constexpr(int(Field.POSITION))
_PLACE = tl.constexpr(int(Field.PLACE))
_ROW_SLOT = tl.constexpr(int(Field.SLOT))
_BASE = tl.constexpr(int(Field.BASE))
_END = tl.constexpr(int(Field.END))
_LOW = tl.constexpr(int(Field.LOW))
_HIGH = tl.constexpr(int(Field.HIGH))
_BLOCK_ROW = tl.constexpr(int(Field.BLOCK_ROW))
_BLOCK_COUNT = tl.constexpr(int(Field.BLOCK_COUNT))
_BLOCK_TREE = tl.constexpr(int(Field.BLOCK_TREE))
_SOURCE = tl.constexpr(len(Field))
_HEAD_SLOT = tl.constexpr(int(SequenceField.SLOT))
_HEAD_LENGTH = tl.constexpr(int(SequenceField.LENGTH))
_HEAD_LAST = tl.constexpr(int(SequenceField.LAST))
_TOKENS = tl.constexpr(int(SequenceField.TOKENS))
_SLOT = tl.constexpr(int(LoopField.SLOT))
_LENGTH = tl.constexpr(int(LoopField.LENGTH))
_LAST = tl.constexpr(int(LoopField.LAST))
_ROUND = tl.constexpr(int(LoopField.ROUND))


@triton.jit
def _enter_kept(
    kept_ptr, sequences_ptr, table_ptr, count, padding,
    WIDE: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """The head's table, WIDE rows of each sequence: the tokens that were kept, each with the row of the target's pass
    whose state it follows."""
    seq, place = tl.program_id(0), tl.arange(0, WP)
    stride = count * WIDE
    record = kept_ptr + seq * (1 + 2 * WIDE)
    taken = tl.load(record)
    held = tl.load(sequences_ptr + _HEAD_LENGTH * count + seq)
    slot = tl.load(sequences_ptr + _HEAD_SLOT * count + seq)
    inside, live = place < WIDE, place < taken
    to = table_ptr + seq * WIDE + place
    tl.store(to + _TOKEN * stride, tl.load(record + 1 + place, mask=live, other=0), mask=inside)
    tl.store(to + _POSITION * stride, tl.where(live, held + place, 0), mask=inside)
    tl.store(to + _PLACE * stride, tl.where(live, held + place, 0), mask=inside)
    tl.store(to + _ROW_SLOT * stride, tl.where(live, slot, padding), mask=inside)
    tl.store(to + _BASE * stride, tl.where(live, held + taken, 0), mask=inside)
    tl.store(to + _END * stride, tl.where(live, held + taken, 0), mask=inside)
    tl.store(to + _LOW * stride, tl.zeros([WP], tl.int32), mask=inside)
    tl.store(to + _HIGH * stride, tl.zeros([WP], tl.int32), mask=inside)
    leads = live & (place % BLOCK == 0)
    tl.store(to + _BLOCK_ROW * stride, tl.where(leads, seq * WIDE + place, 0), mask=inside)
    tl.store(to + _BLOCK_COUNT * stride, tl.where(leads, tl.minimum(taken - place, BLOCK), 0), mask=inside)
    tl.store(to + _BLOCK_TREE * stride, tl.zeros([WP], tl.int32), mask=inside)
    source = seq * (1 + NODES) + tl.load(record + 1 + WIDE + place, mask=live, other=0)
    tl.store(to + _SOURCE * stride, tl.where(live, source, 0), mask=inside)
    tl.store(sequences_ptr + _HEAD_LENGTH * count + seq, held + taken)
    tl.store(sequences_ptr + _HEAD_LAST * count + seq, seq * WIDE + tl.maximum(taken - 1, 0))


@triton.jit
def _enter_draft(
    found_ptr, texts_ptr, table_ptr, positions_ptr, count, padding,
    NODES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """The target's table: the last token of each sequence and the nodes of its draft, as Batch.write has it."""
    seq = tl.program_id(0)
    row, other = tl.arange(0, RP), tl.arange(0, RP)
    stride = count * (1 + NODES)
    slot = tl.load(texts_ptr + _SLOT * count + seq)
    length = tl.load(texts_ptr + _LENGTH * count + seq)
    draft = found_ptr + seq * (1 + 3 * NODES)
    nodes = tl.where(slot == padding, 0, tl.load(draft))
    is_node = (row > 0) & (row <= nodes)
    node = row - 1
    parent = tl.load(draft + 1 + NODES + node, mask=is_node, other=-1) + 1  # as a row; 0: the last token
    above = (parent[:, None] == other[None, :]) & is_node[:, None]
    bit = 1 << (tl.maximum(node, 0) % 32)
    low, high = tl.where(is_node & (node < 32), bit, 0), tl.where(is_node & (node >= 32), bit, 0)
    depth = tl.where(is_node, 1, 0)
    own_low, own_high = low, high
    for _ in tl.static_range(DEPTH):  # each time what is known reaches one level further down
        low = own_low | tl.sum(tl.where(above, low[None, :], 0), 1)
        high = own_high | tl.sum(tl.where(above, high[None, :], 0), 1)
        depth = tl.where(is_node, 1 + tl.sum(tl.where(above, depth[None, :], 0), 1), 0)
    inside, live = row <= NODES, (row <= nodes) & (slot != padding)
    token = tl.load(draft + 1 + node, mask=is_node, other=0)
    token = tl.where(row == 0, tl.load(texts_ptr + _LAST * count + seq), token)
    to = table_ptr + seq * (1 + NODES) + row
    tl.store(to + _TOKEN * stride, tl.where(live, token, 0), mask=inside)
    tl.store(to + _POSITION * stride, tl.where(live, length + depth, 0), mask=inside)
    tl.store(to + _PLACE * stride, tl.where(live, length + row, 0), mask=inside)
    tl.store(to + _ROW_SLOT * stride, tl.where(live, slot, padding), mask=inside)
    tl.store(to + _BASE * stride, tl.where(live, length + 1, 0), mask=inside)
    tl.store(to + _END * stride, tl.where(live, length + 1 + nodes, 0), mask=inside)
    tl.store(to + _LOW * stride, low, mask=inside)
    tl.store(to + _HIGH * stride, high, mask=inside)
    leads = live & (row % BLOCK == 0)
    tl.store(to + _BLOCK_ROW * stride, tl.where(live, seq * (1 + NODES) + row, 0), mask=inside)
    tl.store(to + _BLOCK_COUNT * stride, tl.where(leads, tl.minimum(1 + nodes - row, BLOCK), 0), mask=inside)
    tl.store(to + _BLOCK_TREE * stride, tl.where(live & (nodes > 0), 1, 0), mask=inside)
    tl.store(positions_ptr + seq * (1 + NODES) + row, (length + depth + 1).to(tl.int64), mask=inside)


@triton.jit
def _judge(
    chosen_ptr, found_ptr, texts_ptr, sequences_ptr, kept_ptr, pages_ptr, pages_stride, pairs_ptr, out_ptr,
    count, padding,
    NODES: tl.constexpr, WIDE: tl.constexpr, PAGED: tl.constexpr, NP: tl.constexpr, FP: tl.constexpr,
):  # fmt: skip
    """Walk down each draft along the tokens that the target chose. What is kept goes into `kept`, which the head reads,
    and with the draft into `out` [rounds, sequences, 2 + 2 WIDE + 3 NODES], which the host reads; `pairs` says what has
    to move in the target's cache."""
    seq, node = tl.program_id(0), tl.arange(0, NP)
    slot = tl.load(texts_ptr + _SLOT * count + seq)
    length = tl.load(texts_ptr + _LENGTH * count + seq)
    turn = tl.load(texts_ptr + _ROUND * count + seq)
    draft = found_ptr + seq * (1 + 3 * NODES)
    real = slot != padding
    nodes = tl.where(real, tl.load(draft), 0)
    inside = node < nodes
    tokens = tl.load(draft + 1 + node, mask=inside, other=-1)
    parents = tl.load(draft + 1 + NODES + node, mask=inside, other=-2)
    record = kept_ptr + seq * (1 + 2 * WIDE)
    size: tl.constexpr = 2 + 2 * WIDE + 3 * NODES
    out = out_ptr + (turn * count + seq) * size
    pages = pages_ptr + slot.to(tl.int64) * pages_stride
    at, taken, own = -1, 0, 0
    going = real
    for place in tl.static_range(WIDE):
        chosen = tl.load(chosen_ptr + seq * (1 + NODES) + 1 + at).to(tl.int32)
        child = tl.min(tl.where((parents == at) & (tokens == chosen) & inside, node, NP), 0)
        tl.store(record + 1 + place, chosen, mask=going)
        tl.store(record + 1 + WIDE + place, at + 1, mask=going)
        tl.store(out + 1 + place, chosen, mask=going)
        tl.store(out + 1 + WIDE + place, at + 1, mask=going)
        taken += tl.where(going, 1, 0)
        own = tl.where(going, chosen, own)
        going = going & (child < NP)
        at = tl.where(going, child, at)
        if place + 1 < WIDE:  # a node that is kept goes to the place after those kept before it
            origin, goal = length + 1 + tl.maximum(at, 0), length + 1 + place
            from_page = tl.load(pages + origin // PAGED, mask=going, other=0)
            to_page = tl.load(pages + goal // PAGED, mask=going, other=0)
            pair = pairs_ptr + (seq * (WIDE - 1) + place) * 2
            tl.store(pair, tl.where(going, from_page * PAGED + origin % PAGED, 0))
            tl.store(pair + 1, tl.where(going, to_page * PAGED + goal % PAGED, 0))
    tl.store(record, taken)
    tl.store(out, taken)
    field = tl.arange(0, FP)
    copied = field < 1 + 3 * NODES
    tl.store(out + 1 + 2 * WIDE + field, tl.load(draft + field, mask=copied, other=0), mask=copied)
    tl.store(texts_ptr + _LENGTH * count + seq, length + taken)
    tl.store(texts_ptr + _LAST * count + seq, own)
    tl.store(texts_ptr + _ROUND * count + seq, turn + 1)
    tl.store(sequences_ptr + _TOKENS * count + seq, length + taken + 1)


def enter_kept(kept: Tensor, sequences: Tensor, table: Tensor, nodes: int, block: int, padding: int) -> None:
    """`kept` [sequences, 1 + 2 wide]: how many tokens, the tokens, and of each the row of its sequence whose state it
    follows. `table` [len(Field) + 1, sequences * wide]. Afterwards the head holds them."""
    count, wide = len(kept), (kept.shape[1] - 1) // 2
    _enter_kept[(count,)](
        kept, sequences, table, count, padding, wide, nodes, block, triton.next_power_of_2(wide), num_warps=1
    )


def enter_draft(
    found: Tensor, texts: Tensor, table: Tensor, positions: Tensor, depth: int, block: int, padding: int
) -> None:
    """`found` [sequences, 1 + 3 nodes]: as Growth has it. `table` [len(Field), sequences * (1 + nodes)]; `positions`:
    in its text, of the token that each row chooses."""
    count, nodes = len(found), (found.shape[1] - 1) // 3
    _enter_draft[(count,)](
        found, texts, table, positions, count, padding, nodes, depth, block, triton.next_power_of_2(1 + nodes),
        num_warps=4,
    )  # fmt: skip


def judge(
    chosen: Tensor, found: Tensor, texts: Tensor, sequences: Tensor, kept: Tensor, pages: Tensor, pairs: Tensor,
    out: Tensor, page: int, padding: int,
) -> None:  # fmt: skip
    """`chosen`: the target's token after each row. `pages`: the target's page table."""
    count, nodes, wide = len(found), (found.shape[1] - 1) // 3, (kept.shape[1] - 1) // 2
    power = triton.next_power_of_2
    _judge[(count,)](
        chosen, found, texts, sequences, kept, pages, pages.stride(0), pairs, out, count, padding, nodes, wide, page,
        power(nodes), power(1 + 3 * nodes), num_warps=1,
    )  # fmt: skip
