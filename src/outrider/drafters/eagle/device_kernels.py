"""The kernels of an EAGLE head on a GPU beside those of the target, in Triton: what a row reads, and how drafts grow.

A draft grows without the host. A stage runs `width` nodes of each sequence; of all their likeliest children the best
are the nodes of the next stage, and in the end the best of all that were seen are the draft (in torch: `tree.py`).
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.drafters.heads.chooser import BLUR
from outrider.models.cuda.batch import Field
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.kernels import mix32, mix64
from outrider.models.cuda.launch import begin_after, early, nearly_done
from outrider.models.cuda.rejection import ChainDraws

COMPARED = 32  # nodes that every node is compared with at once, where the best are chosen: more do not fit registers
PART = 2048  # logits that one program looks through for the likeliest
DRAWN_BLOCK = 1024  # choices of a drawn draft that are written at once
NEVER = -1e9  # the logarithm of probability 0, finite so that sums of it are no NaN
LEAST = 1e-6  # probability to be reached below which a node is never part of a draft


class StageField(IntEnum):
    """The rows of a stage's table: those of a pass (Field), and these."""

    SOURCE = len(Field)  # the row of the stage before whose state it reads
    SEEN = len(Field) + 1  # its place among all nodes that were seen


class SequenceField(IntEnum):
    """The rows of the table of sequences, int32."""

    SLOT = 0  # its row of the page table
    LENGTH = 1  # committed rows
    LAST = 2  # its last row of the pass that took them in
    SIZE = 3  # nodes that its draft may have
    TOKENS = 4  # of its text
    TEMPERATURE = 5  # the bits of a float; 0: the likeliest tokens
    KEY_LOW = 6  # of its dice
    KEY_HIGH = 7


STAGE_FIELDS = len(Field) + len(StageField)

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
_SOURCE = tl.constexpr(int(StageField.SOURCE))
_SEEN = tl.constexpr(int(StageField.SEEN))
_SLOT = tl.constexpr(int(SequenceField.SLOT))
_LENGTH = tl.constexpr(int(SequenceField.LENGTH))
_LAST = tl.constexpr(int(SequenceField.LAST))
_SIZE = tl.constexpr(int(SequenceField.SIZE))
_TOKENS = tl.constexpr(int(SequenceField.TOKENS))
_TEMPERATURE = tl.constexpr(int(SequenceField.TEMPERATURE))
_KEY_LOW = tl.constexpr(int(SequenceField.KEY_LOW))
_KEY_HIGH = tl.constexpr(int(SequenceField.KEY_HIGH))
_NEVER = tl.constexpr(NEVER)
_COMPARED = tl.constexpr(COMPARED)
_BLUR = tl.constexpr(BLUR)


@triton.jit
def _normed(x, gain, eps, size):
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gain


@triton.jit
def _states(shown_ptr, source_ptr, gain_ptr, out_ptr, size, eps, LAYERS: tl.constexpr, NORM: tl.constexpr,
            BLOCK: tl.constexpr, SOON: tl.constexpr):  # fmt: skip
    """out [R, LAYERS, size]: the target's states that a row reads. NORM: each block's with a gain of its own."""
    begin_after(SOON)
    nearly_done(SOON)
    row, layer, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = column < size
    source = tl.load(source_ptr + row).to(tl.int64)
    x = tl.load(shown_ptr + (source * LAYERS + layer) * size + column, mask=inside, other=0.0)
    if NORM:
        gain = tl.load(gain_ptr + layer * size + column, mask=inside, other=0.0).to(tl.float32)
        x = _normed(x.to(tl.float32), gain, eps, size).to(x.dtype)
    tl.store(out_ptr + (row * LAYERS + layer) * size + column, x, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "source_ptr"])
def _enter(token_ptr, table_ptr, state_ptr, source_ptr, embed_gain_ptr, state_gain_ptr, x_ptr, out_ptr, size, eps,
           REPLACES: tl.constexpr, BLOCK: tl.constexpr, SOON: tl.constexpr):  # fmt: skip
    """What the first layer reads of a row, out [R, 2 size]: its token's embedding and the state before it, both normed.
    The state goes on as the residual x; REPLACES: the normed one."""
    begin_after(SOON)
    nearly_done(SOON)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < size
    token, source = tl.load(token_ptr + row).to(tl.int64), tl.load(source_ptr + row).to(tl.int64)
    embedded = tl.load(table_ptr + token * size + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(embed_gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * 2 * size + column, _normed(embedded, gain, eps, size).to(x_ptr.dtype.element_ty), inside)
    state = tl.load(state_ptr + source * size + column, mask=inside, other=0.0)
    gain = tl.load(state_gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(state.to(tl.float32), gain, eps, size).to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * 2 + 1) * size + column, normed, mask=inside)
    tl.store(x_ptr + row * size + column, normed if REPLACES else state, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _finish(x_ptr, sequences_ptr, stride, gain_ptr, state_ptr, normed_ptr, size, eps, LAST: tl.constexpr,
            OUTPUT: tl.constexpr, BLOCK: tl.constexpr, SOON: tl.constexpr):  # fmt: skip
    """The last norm of some rows of x, and the state that the next stage reads of them. LAST: of each sequence's last
    row; else of every row. OUTPUT: that state is the normed one."""
    begin_after(SOON)
    nearly_done(SOON)
    place, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < size
    row = place
    if LAST:
        row = tl.load(sequences_ptr + _LAST * stride + place).to(tl.int64)
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0)
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = _normed(x.to(tl.float32), gain, eps, size).to(x.dtype)
    tl.store(normed_ptr + place * size + column, normed, mask=inside)
    tl.store(state_ptr + place * size + column, normed if OUTPUT else x, mask=inside)


@triton.jit
def _scores(x, token, temperature, position, key_low, key_high):
    """How likely the target is to take each token under its own noise (core.dice), relative to each other."""
    key = key_low.to(tl.uint32, bitcast=True).to(tl.uint64) | (key_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    key = mix64(key ^ mix64(position.to(tl.uint64) * 8))  # the stream of NOISE is 0
    first, second = (key >> 32).to(tl.uint32), key.to(tl.uint32)
    bits = mix32(mix32(token.to(tl.uint32) ^ first) ^ second)
    noise = -tl.log((bits.to(tl.float32) + 0.5) / 4294967296.0)
    return (x / temperature - tl.log(tl.maximum(noise, 1e-30))) / _BLUR


@triton.jit(do_not_specialize=["slots", "stride", "stage"])
def _likeliest(
    logits_ptr, slots_ptr, slots_stride, slots, ids_ptr, sequences_ptr, stride, most_ptr, sum_ptr, value_ptr, index_ptr,
    size, sharpness, stage,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    SOON: tl.constexpr,
):  # fmt: skip
    """Of each part of a row of logits: the WIDTH highest with their places, and what its softmax sums to. ROWS of them
    belong to a sequence. SLOTS: what all rows of a stage have in common is added, a row of `slots` for each stage."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    begin_after(SOON)
    nearly_done(SOON)
    x = tl.load(logits_ptr + row * size + column, mask=column < size, other=float("-inf"))
    if SLOTS:
        slot = row // ROWS * slots + stage
        x += tl.load(slots_ptr + slot * slots_stride + column, mask=column < size, other=0.0)
    sequence = sequences_ptr + row // ROWS
    temperature = tl.load(sequence + _TEMPERATURE * stride).to(tl.float32, bitcast=True)
    if temperature > 0:
        token = tl.load(ids_ptr + column, mask=column < size, other=0)
        position = tl.load(sequence + _TOKENS * stride) + stage
        low, high_half = tl.load(sequence + _KEY_LOW * stride), tl.load(sequence + _KEY_HIGH * stride)
        x = _scores(x, token, temperature, position, low, high_half)
    else:
        x = x * sharpness
    x = tl.where(tl.abs(x) < 1e30, x, float("-inf"))  # what overflowed is never likely
    most = tl.max(x, 0)
    level = tl.where(most == float("-inf"), 0.0, most)
    at = row * PARTS + part
    tl.store(most_ptr + at, most)
    tl.store(sum_ptr + at, tl.sum(tl.exp(x - level), 0))
    for place in tl.static_range(WIDTH):
        high = tl.max(x, 0)
        where = tl.min(tl.where(x == high, column, size), 0)
        tl.store(value_ptr + at * WIDTH + place, high)
        tl.store(index_ptr + at * WIDTH + place, tl.minimum(where, size - 1))
        x = tl.where(column == where, float("-inf"), x)


@triton.jit(do_not_specialize=["own", "sums", "choices"])
def _only_drawn(
    drawn_ptr, stated_ptr, place_ptr, whose_ptr, own, most_ptr, sum_ptr, value_ptr, index_ptr, sums, choices,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each sequence whose draft is drawn: the token that was drawn after its first row is the only likely one, with
    the probability that is stated for it. So the draft grows as a chain, always in the first row. A sequence has `sums`
    parts of rows, and `choices` in them."""
    seq = tl.program_id(0)
    if tl.load(whose_ptr + seq) == own:
        stated = tl.log(tl.load(stated_ptr + seq))
        for begin in range(0, choices, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            values, inside = tl.where(place == 0, stated, float("-inf")), place < sums
            tl.store(value_ptr + seq * choices + place, values, mask=place < choices)
            tl.store(most_ptr + seq * sums + place, tl.where(place == 0, 0.0, float("-inf")), mask=inside)
            tl.store(sum_ptr + seq * sums + place, tl.where(place == 0, 1.0, 0.0), mask=inside)
        index = tl.load(place_ptr + tl.load(drawn_ptr + seq))
        tl.store(index_ptr + seq * choices, tl.maximum(index, 0))


@triton.jit
def _before(score, place, others, places):
    """[scores] how many of the others come before each: those with a higher score, equal ones with a lower place."""
    higher = others[None, :] > score[:, None]
    equal = (others[None, :] == score[:, None]) & (places[None, :] < place[:, None])
    return tl.sum((higher | equal).to(tl.int32), 1)


@triton.jit
def _of(values, wanted, count):
    """[wanted] the values at these places, of a vector with `count`, the numbers of its places."""
    return tl.sum(tl.where(wanted[:, None] == count[None, :], values[None, :], 0), 1)


@triton.jit(
    do_not_specialize=["stride", "table_stride", "stage", "offset"],
    do_not_specialize_on_alignment=["old_ptr", "old_score_ptr", "new_ptr", "new_score_ptr"],
)
def _grow(
    most_ptr, sum_ptr, value_ptr, index_ptr, ids_ptr, sequences_ptr, stride,
    old_ptr, old_score_ptr, new_ptr, new_score_ptr, table_stride, seen_ptr, seen_score_ptr, stage, offset,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SEEN: tl.constexpr,
    RP: tl.constexpr, PP: tl.constexpr, CP: tl.constexpr, WP: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The children of the ROWS nodes that a sequence ran, among all that were seen, and the table of the next stage:
    the best WIDTH of them. `seen` [sequences, 2, SEEN]: their tokens and parents. One program waits for the memory, so
    that few waits are what matters: what no kernel writes just before is read first, and nothing is read back."""
    seq = tl.program_id(0).to(tl.int64)
    ran = tl.arange(0, RP)
    live = ran < tl.where(stage > 0, ROWS, 0)  # the root was reached, and has no parent
    old = old_ptr + seq * WIDTH + ran
    reached = tl.load(old_score_ptr + seq * WIDTH + ran, mask=live, other=0.0)
    parent = tl.load(old + _SEEN * table_stride, mask=live, other=-1)
    old_low = tl.load(old + _LOW * table_stride, mask=live, other=0)
    old_high = tl.load(old + _HIGH * table_stride, mask=live, other=0)
    slot = tl.load(sequences_ptr + _SLOT * stride + seq)
    base = tl.load(sequences_ptr + _LENGTH * stride + seq)
    row, part, choice = ran[:, None], tl.arange(0, PP)[None, :], tl.arange(0, CP)[None, :]
    begin_after(SOON)
    nearly_done(SOON)
    at = (seq * ROWS + row) * PARTS + part
    real = (row < ROWS) & (part < PARTS)
    most = tl.load(most_ptr + at, mask=real, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=real, other=0.0)
    at = (seq * ROWS + row) * PARTS * WIDTH + choice
    real = (row < ROWS) & (choice < PARTS * WIDTH)
    value = tl.load(value_ptr + at, mask=real, other=float("-inf"))
    index = tl.load(index_ptr + at, mask=real, other=0)
    level = tl.max(most, 1)
    level = tl.where(level == float("-inf"), 0.0, level)
    whole = level + tl.log(tl.sum(sums * tl.exp(most - level[:, None]), 1))  # of a softmax over the row
    place = tl.arange(0, WP)[None, :]
    picked = tl.zeros([RP, WP], tl.int32)
    reach = tl.zeros([RP, WP], tl.float32)
    for turn in tl.static_range(WIDTH):
        high = tl.max(value, 1)
        where = tl.min(tl.where(value == high[:, None], choice, CP), 1)
        taken = choice == where[:, None]
        token = tl.sum(tl.where(taken, index, 0), 1)
        value = tl.where(taken, float("-inf"), value)
        score = tl.where(high > float("-inf"), reached + tl.minimum(high - whole, 0.0), _NEVER)
        picked = tl.where(place == turn, token[:, None], picked)
        reach = tl.where(place == turn, score[:, None], reach)
    child, real = offset + row * WIDTH + place, (row < ROWS) & (place < WIDTH)
    tokens = tl.load(ids_ptr + picked, mask=real, other=0).to(tl.int32)
    tl.store(seen_ptr + seq * 2 * SEEN + child, tokens, mask=real)
    tl.store(seen_ptr + (seq * 2 + 1) * SEEN + child, tl.broadcast_to(parent[:, None], [RP, WP]), mask=real)
    tl.store(seen_score_ptr + seq * SEEN + child, reach, mask=real)
    # the best of all children are the rows of the next stage
    score = tl.reshape(tl.where(real, reach, float("-inf")), [RP * WP])
    every, place = tl.arange(0, RP * WP), tl.arange(0, WP)
    rank = _before(score, every, score, every)
    best = _of(every, place, rank)
    source, inside, node = best // WP, place < WIDTH, stage * WIDTH + place
    low, high_half = _of(old_low, source, ran), _of(old_high, source, ran)
    bit = 1 << (node % 32)
    low |= tl.where(node < 32, bit, 0)
    high_half |= tl.where(node < 32, 0, bit)
    to, zero = new_ptr + seq * WIDTH + place, tl.zeros([WP], tl.int32)
    tl.store(to + _TOKEN * table_stride, _of(tl.reshape(tokens, [RP * WP]), place, rank), mask=inside)
    tl.store(to + _POSITION * table_stride, zero + base + stage, mask=inside)
    tl.store(to + _PLACE * table_stride, base + node, mask=inside)
    tl.store(to + _ROW_SLOT * table_stride, zero + slot, mask=inside)
    tl.store(to + _BASE * table_stride, zero + base, mask=inside)
    tl.store(to + _END * table_stride, zero + base + (stage + 1) * WIDTH, mask=inside)
    tl.store(to + _HELD * table_stride, zero + base + stage, mask=inside)
    tl.store(to + _LOW * table_stride, low, mask=inside)
    tl.store(to + _HIGH * table_stride, high_half, mask=inside)
    tl.store(to + _BLOCK_ROW * table_stride, (seq * WIDTH + place).to(tl.int32), mask=inside)
    tl.store(to + _BLOCK_COUNT * table_stride, zero + 1, mask=inside)
    tl.store(to + _BLOCK_TREE * table_stride, zero + 1, mask=inside)
    tl.store(to + _SOURCE * table_stride, (seq * ROWS + source).to(tl.int32), mask=inside)
    tl.store(to + _SEEN * table_stride, offset + source * WIDTH + best % WP, mask=inside)
    tl.store(new_score_ptr + seq * WIDTH + place, _of(score, place, rank), mask=inside)


@triton.jit(do_not_specialize=["stride", "most"])
def _collect(seen_ptr, seen_score_ptr, sequences_ptr, stride, rank_ptr, out_ptr, least, most,
             SEEN: tl.constexpr, SP: tl.constexpr, SOON: tl.constexpr):  # fmt: skip
    """The draft of each sequence, out [sequences, 1 + 3 most]: how many nodes, then their tokens, parents and
    probabilities (as bits): the best of all that were seen, the best first; a parent comes before its children, which
    are never better."""
    seq, node = tl.program_id(0).to(tl.int64), tl.arange(0, SP)
    inside = node < SEEN
    size = tl.minimum(tl.load(sequences_ptr + _SIZE * stride + seq), most)
    begin_after(SOON)
    nearly_done(SOON)
    reached = tl.load(seen_score_ptr + seq * SEEN + node, mask=inside, other=float("-inf"))
    parent = tl.load(seen_ptr + (seq * 2 + 1) * SEEN + node, mask=inside, other=-1)
    token = tl.load(seen_ptr + seq * 2 * SEEN + node, mask=inside, other=0)
    score = tl.where(reached >= least, reached, float("-inf"))
    order = tl.zeros([SP], tl.int32)
    for start in range(0, SEEN, _COMPARED):
        others = start + tl.arange(0, _COMPARED)
        order += _before(
            score, node, tl.load(seen_score_ptr + seq * SEEN + others, mask=others < SEEN, other=float("-inf")), others
        )
    kept = (order < size) & (score > float("-inf"))
    tl.store(rank_ptr + seq * SEEN + node, order, mask=inside)
    tl.debug_barrier()
    above = kept & (parent >= 0)
    place = tl.load(rank_ptr + seq * SEEN + parent, mask=above, other=-1)
    before = tl.load(seen_score_ptr + seq * SEEN + parent, mask=above, other=0.0)
    probability = tl.exp(tl.minimum(reached - before, 0.0))
    out = out_ptr + seq * (1 + 3 * most)
    tl.store(out, tl.sum(kept.to(tl.int32), 0))
    tl.store(out + 1 + order, token, mask=kept)
    tl.store(out + 1 + most + order, place, mask=kept)
    tl.store(out + 1 + 2 * most + order, probability.to(tl.int32, bitcast=True), mask=kept)


def states(shown: Tensor, source: Tensor, gains: Tensor | None, out: Tensor, eps: float) -> None:
    """out [rows, layers * hidden] of shown [any, layers, hidden]."""
    layers, size = shown.shape[1:]
    soon = early(out.device)
    _states[(len(out), layers)](
        shown, source, gains, out, size, eps, layers, gains is not None, triton.next_power_of_2(size), soon,
        num_warps=4, launch_pdl=soon,
    )  # fmt: skip


def enter(
    tokens: Tensor, embedding: Tensor, state: Tensor, source: Tensor, gains: tuple[Tensor, Tensor],
    x: Tensor, out: Tensor, eps: float, replaces: bool,
) -> None:  # fmt: skip
    """`gains`: of the embedding's norm and of the state's."""
    (rows, size), soon = x.shape, early(x.device)
    _enter[(rows,)](
        tokens, embedding, state, source, *gains, x, out, size, eps, replaces, triton.next_power_of_2(size), soon,
        num_warps=4, launch_pdl=soon,
    )  # fmt: skip


def finish(x: Tensor, gain: Tensor, state: Tensor, normed: Tensor, eps: float, output: bool,
           sequences: Tensor | None = None) -> None:  # fmt: skip
    """`sequences`: take each one's last row of x; None: every row."""
    (rows, size), soon = state.shape, early(x.device)
    stride = 0 if sequences is None else sequences.stride(0)
    _finish[(rows,)](
        x, sequences, stride, gain, state, normed, size, eps, sequences is not None, output,
        triton.next_power_of_2(size), soon, num_warps=4, launch_pdl=soon,
    )  # fmt: skip


class Growth:
    """The memory in which the drafts of `sequences` sequences grow, and the kernels over it."""

    def __init__(self, sequences: int, width: int, stages: int, most: int, ids: Tensor) -> None:
        """`width` nodes of a sequence are run at each of `stages` stages; a draft has at most `most` nodes. `ids`: the
        tokens that the head writes."""
        self.sequences, self.width, self.stages, self._most, self._ids = sequences, width, stages, most, ids
        device, rows = ids.device, sequences * width
        self._parts = triton.cdiv(len(ids), PART)
        self._count = width + stages * width * width  # nodes that are seen
        # of every stage, and of one that is chosen last and not run
        self.tables = torch.zeros(stages + 1, STAGE_FIELDS, rows, dtype=torch.int32, device=device)
        self._scores = torch.zeros(stages + 1, rows, device=device)
        self._most_of, self._sum_of = torch.empty(2, rows * self._parts, device=device)
        self._values = torch.empty(rows * self._parts * width, device=device)
        self._indices = torch.empty(rows * self._parts * width, dtype=torch.int32, device=device)
        self._seen = torch.zeros(sequences * 2 * self._count, dtype=torch.int32, device=device)
        self._seen_scores = torch.zeros(sequences * self._count, device=device)
        self._ranks = torch.zeros(sequences * self._count, dtype=torch.int32, device=device)
        self.found = torch.zeros(sequences, 1 + 3 * most, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._stated = torch.zeros(sequences, device=device)
        self._places: Tensor | None = None  # [vocab] int32: of each token among those that the head writes

    def choose(
        self, stage: int, logits: Tensor, sequences: Tensor, sharpness: float, slots: Tensor | None = None,
        chains: ChainDraws | None = None, cuts: Cuts | None = None,
    ) -> None:  # fmt: skip
        """The nodes of this stage, of what the head says after the nodes of the one before (after the committed text:
        stage 0). `slots` [sequences, stages, draft vocabulary]: what is added to the logits of a stage. `chains`: the
        sequences whose drafts are drawn. `cuts`: what is taken out of the logits first."""
        if cuts is not None:
            cuts(logits, None if slots is None else slots[:, stage])
        size, width, parts, soon = logits.shape[1], self.width, self._parts, early(logits.device)
        rows, power = len(logits) // self.sequences, triton.next_power_of_2
        _likeliest[(len(logits), parts)](
            logits, slots, 0 if slots is None else slots.stride(1), 0 if slots is None else slots.shape[1],
            self._ids, sequences, sequences.stride(0), self._most_of, self._sum_of, self._values, self._indices,
            size, sharpness, stage, slots is not None, rows, width, parts, PART, soon, num_warps=4,
            launch_pdl=soon,
        )  # fmt: skip
        if chains is not None:
            self._draw(stage, logits, slots, chains)
        before = max(stage - 1, 0)
        offset = 0 if stage == 0 else width + (stage - 1) * width * width
        _grow[(self.sequences,)](
            self._most_of, self._sum_of, self._values, self._indices, self._ids, sequences, sequences.stride(0),
            self.tables[before], self._scores[before], self.tables[stage], self._scores[stage], self.tables.stride(1),
            self._seen, self._seen_scores, stage, offset, rows, width, parts, self._count,
            power(rows), power(parts), power(parts * width), power(width), soon, num_warps=4, launch_pdl=soon,
        )  # fmt: skip

    def _draw(self, stage: int, logits: Tensor, slots: Tensor | None, chains: ChainDraws) -> None:
        if self._places is None:
            every = torch.arange(len(self._ids), dtype=torch.int32, device=self._ids.device)
            self._places = every.new_full((chains.laws.shape[2],), -1).index_copy_(0, self._ids.long(), every)
        rows = len(logits) // self.sequences
        first, added = logits.view(self.sequences, rows, -1)[:, 0], None if slots is None else slots[:, stage]
        chains.draw(stage, first, self._drawn, self._stated, self._places, added)
        sums = rows * self._parts
        _only_drawn[(self.sequences,)](
            self._drawn, self._stated, self._places, chains.whose, chains.own, self._most_of, self._sum_of,
            self._values, self._indices, sums, sums * self.width, DRAWN_BLOCK, num_warps=4,
        )  # fmt: skip

    def collect(self, sequences: Tensor, stop: float) -> None:
        soon = early(sequences.device)
        _collect[(self.sequences,)](
            self._seen, self._seen_scores, sequences, sequences.stride(0), self._ranks, self.found,
            math.log(max(stop, LEAST)), self._most, self._count, triton.next_power_of_2(self._count), soon,
            num_warps=8, launch_pdl=soon,
        )  # fmt: skip
