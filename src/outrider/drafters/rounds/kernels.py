"""The kernels between drafts and the target's passes where the host does not look: drafts are joined, become the tables
of passes, and are judged, on the device.

A program has one sequence. Of each sequence the pass has 1 + `most` rows: its last token, then the nodes of its draft.
A draft of the pass is a row [2 + 3 most]: how many nodes; how many of them the first guesser had; tokens, parents and
probabilities (as bits).
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.batch import Field
from outrider.models.cuda.launch import begin_after, early, nearly_done


class RoundField(IntEnum):
    """The rows of the table of texts, int32: where the target stands in each sequence."""

    SLOT = 0  # its row of the target's page table
    LENGTH = 1  # tokens that the target's cache has seen
    LAST = 2  # the token after them
    ROUND = 3  # rounds that are done


DRAFT_HEADER = 2  # numbers before the tokens of a draft
# Nodes and rows that a program looks at: those of the largest draft (cuda/batch.py, NODES) and its last token. One
# compiled kernel then serves drafts of every size.
POWER = 64

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
_SLOT = tl.constexpr(int(RoundField.SLOT))
_LENGTH = tl.constexpr(int(RoundField.LENGTH))
_LAST = tl.constexpr(int(RoundField.LAST))
_ROUND = tl.constexpr(int(RoundField.ROUND))
_HEADER = tl.constexpr(DRAFT_HEADER)


@triton.jit(do_not_specialize=["first", "second", "nodes"])
def _join(first_ptr, second_ptr, whose_ptr, out_ptr, first, second, nodes, DRAWN: tl.constexpr, NP: tl.constexpr,
          SOON: tl.constexpr):  # fmt: skip
    """A draft of up to `first` nodes and one of up to `second` as one draft of up to `nodes`: nodes of the second that
    the first has on the same path stand there once, the others come after its nodes. Where both do not fit, the last
    nodes of the first are left out, which are its least. DRAWN: `whose` says which one goes alone."""
    begin_after(SOON)
    nearly_done(SOON)
    seq, node = tl.program_id(0), tl.arange(0, NP)
    draft = first_ptr + seq * (1 + 3 * first)
    whose = seq * 0
    if DRAWN:
        whose = tl.load(whose_ptr + seq)
    other = second_ptr + seq * (1 + 3 * second)
    size = tl.minimum(tl.load(other, mask=second > 0, other=0), second)
    size = tl.where(whose == 1, 0, size)
    own = tl.where(whose == 2, 0, tl.minimum(tl.minimum(tl.load(draft), first), nodes - size))
    inside = node < own
    tokens = tl.load(draft + 1 + node, mask=inside, other=-1)
    parents = tl.load(draft + 1 + first + node, mask=inside, other=-2)
    bits = tl.load(draft + 1 + 2 * first + node, mask=inside, other=0)
    count, stands = own, tl.zeros([NP], tl.int32)  # nodes so far; where each of the second stands among them
    for place in range(size):
        token, parent = tl.load(other + 1 + place), tl.load(other + 1 + second + place)
        at = tl.where(parent < 0, -1, tl.sum(tl.where(node == parent, stands, 0), 0))
        child = tl.min(tl.where((parents == at) & (tokens == token) & (node < count), node, NP), 0)
        here = (node == count) & (child == NP)
        tokens = tl.where(here, token, tokens)
        parents = tl.where(here, at, parents)
        bits = tl.where(here, tl.load(other + 1 + 2 * second + place), bits)
        stands = tl.where(node == place, tl.where(child < NP, child, count), stands)
        count += tl.where(child < NP, 0, 1)
    out = out_ptr + seq * (_HEADER + 3 * nodes)
    tl.store(out, count)
    tl.store(out + 1, own)
    inside, live = node < nodes, node < count
    tl.store(out + _HEADER + node, tl.where(live, tokens, 0), mask=inside)
    tl.store(out + _HEADER + nodes + node, tl.where(live, parents, 0), mask=inside)
    tl.store(out + _HEADER + 2 * nodes + node, tl.where(live, bits, 0), mask=inside)


@triton.jit(do_not_specialize=["count", "padding", "most", "deepest"])
def _enter_draft(
    found_ptr, texts_ptr, table_ptr, positions_ptr, count, padding, most, deepest,
    BLOCK: tl.constexpr, RP: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The target's table: the last token of each sequence and the nodes of its draft, as Batch.write has it."""
    begin_after(SOON)
    nearly_done(SOON)
    seq = tl.program_id(0)
    row, other = tl.arange(0, RP), tl.arange(0, RP)
    stride = count * (1 + most)
    slot = tl.load(texts_ptr + _SLOT * count + seq)
    length = tl.load(texts_ptr + _LENGTH * count + seq)
    draft = found_ptr + seq * (_HEADER + 3 * most)
    nodes = tl.where(slot == padding, 0, tl.load(draft))
    is_node = (row > 0) & (row <= nodes)
    node = row - 1
    parent = tl.load(draft + _HEADER + most + node, mask=is_node, other=-1) + 1  # as a row; 0: the last token
    above = (parent[:, None] == other[None, :]) & is_node[:, None]
    bit = 1 << (tl.maximum(node, 0) % 32)
    low, high = tl.where(is_node & (node < 32), bit, 0), tl.where(is_node & (node >= 32), bit, 0)
    depth = tl.where(is_node, 1, 0)
    own_low, own_high = low, high
    for _ in range(deepest):  # each time what is known reaches one level further down
        low = own_low | tl.sum(tl.where(above, low[None, :], 0), 1)
        high = own_high | tl.sum(tl.where(above, high[None, :], 0), 1)
        depth = tl.where(is_node, 1 + tl.sum(tl.where(above, depth[None, :], 0), 1), 0)
    # a chain is as committed tokens: each row sees those before, and rows share what they read
    tree = tl.max((is_node & (parent != node)).to(tl.int32), 0)
    low, high = low * tree, high * tree
    inside, live = row <= most, (row <= nodes) & (slot != padding)
    token = tl.load(draft + _HEADER + node, mask=is_node, other=0)
    token = tl.where(row == 0, tl.load(texts_ptr + _LAST * count + seq), token)
    to = table_ptr + seq * (1 + most) + row
    tl.store(to + _TOKEN * stride, tl.where(live, token, 0), mask=inside)
    tl.store(to + _POSITION * stride, tl.where(live, length + depth, 0), mask=inside)
    tl.store(to + _PLACE * stride, tl.where(live, length + row, 0), mask=inside)
    tl.store(to + _ROW_SLOT * stride, tl.where(live, slot, padding), mask=inside)
    tl.store(to + _BASE * stride, tl.where(live, length + 1, 0), mask=inside)
    tl.store(to + _END * stride, tl.where(live, length + 1 + nodes, 0), mask=inside)
    tl.store(to + _HELD * stride, tl.where(live, length, 0), mask=inside)
    tl.store(to + _LOW * stride, low, mask=inside)
    tl.store(to + _HIGH * stride, high, mask=inside)
    leads = live & (row % BLOCK == 0)
    tl.store(to + _BLOCK_ROW * stride, tl.where(live, seq * (1 + most) + row, 0), mask=inside)
    tl.store(to + _BLOCK_COUNT * stride, tl.where(leads, tl.minimum(1 + nodes - row, BLOCK), 0), mask=inside)
    tl.store(to + _BLOCK_TREE * stride, tl.where(live, tree, 0), mask=inside)
    tl.store(positions_ptr + seq * (1 + most) + row, (length + depth + 1).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["places", "pages_stride", "count", "padding", "most", "wide", "rounds"])
def _judge(
    chosen_ptr, found_ptr, texts_ptr, kept_ptr, written_ptr, places, pages_ptr, pages_stride, pairs_ptr, out_ptr,
    count, padding, most, wide, rounds,
    PAGED: tl.constexpr, NP: tl.constexpr, FP: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """Walk down each draft along the tokens that the target chose. What is kept goes into `kept` and to the end of its
    text, which the guessers read, and with the draft into `out` [rounds, sequences, 1 + 2 wide + HEADER + 3 most],
    a ring that the host reads; `pairs` says what has to move in the target's cache."""
    begin_after(SOON)
    nearly_done(SOON)
    seq, node = tl.program_id(0), tl.arange(0, NP)
    slot = tl.load(texts_ptr + _SLOT * count + seq)
    length = tl.load(texts_ptr + _LENGTH * count + seq)
    turn = tl.load(texts_ptr + _ROUND * count + seq)
    draft = found_ptr + seq * (_HEADER + 3 * most)
    real = slot != padding
    nodes = tl.where(real, tl.load(draft), 0)
    inside = node < nodes
    tokens = tl.load(draft + _HEADER + node, mask=inside, other=-1)
    parents = tl.load(draft + _HEADER + most + node, mask=inside, other=-2)
    record = kept_ptr + seq * (1 + 2 * wide)
    size = 1 + 2 * wide + _HEADER + 3 * most
    out = out_ptr + ((turn % rounds) * count + seq) * size
    text = written_ptr + seq.to(tl.int64) * places + length + 1
    pages = pages_ptr + slot.to(tl.int64) * pages_stride
    at, taken, own = -1, 0, 0
    going = real
    for place in range(wide):
        chosen = tl.load(chosen_ptr + seq * (1 + most) + 1 + at).to(tl.int32)
        child = tl.min(tl.where((parents == at) & (tokens == chosen) & inside, node, NP), 0)
        tl.store(record + 1 + place, chosen, mask=going)
        tl.store(record + 1 + wide + place, at + 1, mask=going)
        tl.store(text + place, chosen, mask=going)
        tl.store(out + 1 + place, chosen, mask=going)
        tl.store(out + 1 + wide + place, at + 1, mask=going)
        taken += tl.where(going, 1, 0)
        own = tl.where(going, chosen, own)
        going = going & (child < NP)
        at = tl.where(going, child, at)
        if place + 1 < wide:  # a node that is kept goes to the place after those kept before it
            origin, goal = length + 1 + tl.maximum(at, 0), length + 1 + place
            from_page = tl.load(pages + origin // PAGED, mask=going, other=0)
            to_page = tl.load(pages + goal // PAGED, mask=going, other=0)
            pair = pairs_ptr + (seq * (wide - 1) + place) * 2
            tl.store(pair, tl.where(going, from_page * PAGED + origin % PAGED, 0))
            tl.store(pair + 1, tl.where(going, to_page * PAGED + goal % PAGED, 0))
    tl.store(record, taken)
    tl.store(out, taken)
    field = tl.arange(0, FP)
    copied = field < _HEADER + 3 * most
    tl.store(out + 1 + 2 * wide + field, tl.load(draft + field, mask=copied, other=0), mask=copied)
    tl.store(texts_ptr + _LENGTH * count + seq, length + taken)
    tl.store(texts_ptr + _LAST * count + seq, own)
    tl.store(texts_ptr + _ROUND * count + seq, turn + 1)


@triton.jit(do_not_specialize=["places", "size", "count", "padding", "rows", "step"])
def _enter_chain(
    found_ptr, texts_ptr, written_ptr, places, slots_ptr, table_ptr, positions_ptr, size, count, padding, rows, step,
    BLOCK: tl.constexpr, RP: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The table of a draft model's pass: of each sequence the last `rows` tokens of its text and the `step` tokens of
    its chain that are there, as Batch.write has committed tokens."""
    begin_after(SOON)
    nearly_done(SOON)
    seq, row = tl.program_id(0), tl.arange(0, RP)
    stride = count * rows
    slot = tl.load(slots_ptr + seq)
    length = tl.load(texts_ptr + _LENGTH * count + seq)  # the place of the last token
    end = length + step + 1
    place = end - rows + row
    skipped = tl.maximum(rows - end, 0)  # rows before the beginning of a short text
    inside = row < rows
    live = inside & (place >= tl.where(slot == padding, end, 0))
    text = tl.load(written_ptr + seq.to(tl.int64) * places + place, mask=live & (place <= length), other=0)
    guess = tl.load(found_ptr + seq * size + place - length, mask=live & (place > length), other=0)
    to = table_ptr + seq * rows + row
    tl.store(to + _TOKEN * stride, tl.where(place <= length, text, guess), mask=inside)
    tl.store(to + _POSITION * stride, tl.where(live, place, 0), mask=inside)
    tl.store(to + _PLACE * stride, tl.where(live, place, 0), mask=inside)
    tl.store(to + _ROW_SLOT * stride, tl.where(live, slot, padding), mask=inside)
    tl.store(to + _BASE * stride, tl.where(live, end, 0), mask=inside)
    tl.store(to + _END * stride, tl.where(live, end, 0), mask=inside)
    tl.store(to + _HELD * stride, tl.where(live, tl.maximum(end - rows, 0), 0), mask=inside)
    tl.store(to + _LOW * stride, tl.zeros([RP], tl.int32), mask=inside)
    tl.store(to + _HIGH * stride, tl.zeros([RP], tl.int32), mask=inside)
    leads = live & ((row - skipped) % BLOCK == 0)
    tl.store(to + _BLOCK_ROW * stride, tl.where(leads, seq * rows + row, 0), mask=inside)
    tl.store(to + _BLOCK_COUNT * stride, tl.where(leads, tl.minimum(rows - row, BLOCK), 0), mask=inside)
    tl.store(to + _BLOCK_TREE * stride, tl.zeros([RP], tl.int32), mask=inside)
    tl.store(positions_ptr + seq * rows + row, tl.where(live, place + 1, 0).to(tl.int64), mask=inside)


def join(first: Tensor, second: Tensor | None, out: Tensor, whose: Tensor | None = None) -> None:
    """`first` and `second` [sequences, 1 + 3 nodes]; `out` [sequences, HEADER + 3 nodes]. `whose` [sequences]: 1 or 2
    where one of them goes alone; None: nowhere."""
    sizes = [0 if each is None else (each.shape[1] - 1) // 3 for each in (first, second)]
    nodes, soon = (out.shape[1] - DRAFT_HEADER) // 3, early(out.device)
    _join[(len(out),)](
        first, out if second is None else second, whose, out, *sizes, nodes, whose is not None, POWER, soon,
        num_warps=1, launch_pdl=soon,
    )  # fmt: skip


def enter_draft(
    found: Tensor, texts: Tensor, table: Tensor, positions: Tensor, depth: int, block: int, padding: int
) -> None:
    """`found`: drafts as `join` has them. `table` [len(Field), sequences * (1 + nodes)]; `positions`: in its text, of
    the token that each row chooses."""
    count, nodes, soon = len(found), (found.shape[1] - DRAFT_HEADER) // 3, early(found.device)
    _enter_draft[(count,)](
        found, texts, table, positions, count, padding, nodes, depth, block, 32 if nodes < 32 else POWER, soon,
        num_warps=4, launch_pdl=soon,
    )  # fmt: skip


def judge(
    chosen: Tensor, found: Tensor, texts: Tensor, kept: Tensor, written: Tensor, pages: Tensor, pairs: Tensor,
    out: Tensor, page: int, padding: int,
) -> None:  # fmt: skip
    """`chosen`: the target's token after each row. `written` [sequences, places]: the texts. `pages`: the target's
    page table."""
    count, nodes, wide = len(found), (found.shape[1] - DRAFT_HEADER) // 3, (kept.shape[1] - 1) // 2
    soon = early(found.device)
    _judge[(count,)](
        chosen, found, texts, kept, written, written.stride(0), pages, pages.stride(0), pairs, out, count, padding,
        nodes, wide, len(out), page, POWER, 4 * POWER, soon, num_warps=1, launch_pdl=soon,
    )  # fmt: skip


def enter_chain(
    found: Tensor, texts: Tensor, written: Tensor, slots: Tensor, table: Tensor, positions: Tensor, step: int,
    block: int, padding: int,
) -> None:  # fmt: skip
    """`found` [sequences, 1 + 3 length]: chains of which the first `step` tokens are there. `written` [sequences,
    places]: the texts. `slots`: of each sequence, its row of the draft model's page table. `table` [len(Field), rows],
    the same number of rows for each sequence; `positions`: in its text, of the token that each row chooses."""
    count, soon = len(found), early(found.device)
    _enter_chain[(count,)](
        found, texts, written, written.stride(0), slots, table, positions, found.shape[1], count, padding,
        table.shape[1] // count, step, block, POWER, soon, num_warps=1, launch_pdl=soon,
    )  # fmt: skip
