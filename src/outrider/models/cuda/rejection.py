"""The rule of rejection (core/verify.py) on a GPU, in Triton: what drafters draw, and what becomes of it.

Every row of a pass decides for itself, with the random numbers that core.dice has for its position: it keeps one of its
children, or draws from what they leave of the target's law. What it draws is none of them, so that a row's token says
both. A law is taken in PARTS of BLOCK tokens: a random number falls into one of them, and that one is looked through.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.core.dice import ACCEPT, DRAFT, RESIDUAL
from outrider.models.cuda.batch import NODES
from outrider.models.cuda.kernels import mix32, mix64

BLOCK = 4096  # tokens of a vocabulary that a program takes at once

_ACCEPT = tl.constexpr(ACCEPT)
_DRAFT = tl.constexpr(DRAFT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _uniform(key, position, STREAM: tl.constexpr, index):
    """core.dice.Dice.uniform"""
    mixed = mix64(key ^ mix64(position * 8 + STREAM))
    first, second = (mixed >> 32).to(tl.uint32), mixed.to(tl.uint32)
    return (mix32(mix32(index.to(tl.uint32) ^ first) ^ second).to(tl.float64) + 0.5) / 4294967296.0


@triton.jit
def _weights(x, best, heat):
    """What a softmax sums: the likeliest token has 1. Numbers that overflowed have nothing."""
    return tl.exp(tl.where(tl.abs(x) < 1e30, (x - best) / heat, float("-inf")))


@triton.jit
def _part_of(masses, number, PARTS: tl.constexpr):
    """The part into which a random number falls, and the mass that the number leaves for it."""
    part = tl.arange(0, PARTS)
    masses = tl.maximum(masses, 0.0)
    total = tl.sum(masses, 0)
    until = tl.cumsum(masses, 0)
    point = number * total
    last = tl.max(tl.where(masses > 0, part, 0), 0)
    found = tl.minimum(tl.min(tl.where((until > point) & (masses > 0), part, PARTS), 0), last)
    return found, point - tl.sum(tl.where(part < found, masses, 0.0), 0)


@triton.jit
def _inside(weights, column, point):
    """The token of a part at which the sum of the weights passes `point`."""
    until = tl.cumsum(weights.to(tl.float64), 0)
    last = tl.max(tl.where(weights > 0, column, 0), 0)
    return tl.minimum(tl.min(tl.where((until > point) & (weights > 0), column, 2147483647), 0), last)


@triton.jit(
    do_not_specialize=["size", "each", "most", "header", "depth"],
    do_not_specialize_on_alignment=["position_ptr", "out_ptr"],
)
def _verify(
    logits_ptr, key_ptr, position_ptr, heat_ptr, draft_ptr, law_ptr, whose_ptr, out_ptr,
    size, each, most, header, depth, DRAFTED: tl.constexpr, DRAWN: tl.constexpr,
    NP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seq, at = row // each, row % each - 1
    heat = tl.load(heat_ptr + seq)
    count = 0
    draft = draft_ptr
    if DRAFTED:
        draft = draft_ptr + seq * (header + 3 * most)
        count = tl.minimum(tl.load(draft), most)
    if (heat > 0) & (at < count):
        logits, column, part = logits_ptr + row.to(tl.int64) * size, tl.arange(0, _BLOCK), tl.arange(0, PARTS)
        best = float("-inf")
        for begin in range(0, size, _BLOCK):
            x = tl.load(logits + begin + column, mask=begin + column < size, other=float("-inf"))
            best = tl.maximum(best, tl.max(tl.where(tl.abs(x) < 1e30, x, float("-inf")), 0))
        masses = tl.zeros([PARTS], tl.float64)
        for begin in range(0, size, _BLOCK):
            x = tl.load(logits + begin + column, mask=begin + column < size, other=float("-inf"))
            mass = tl.sum(_weights(x, best, heat).to(tl.float64), 0)
            masses = tl.where(part == begin // _BLOCK, mass, masses)
        whole = tl.sum(masses, 0)
        key, position = tl.load(key_ptr + seq).to(tl.uint64), tl.load(position_ptr + row).to(tl.uint64)
        kept, token, drawn, law, children = NP, 0, False, law_ptr, 0
        tokens, turn = tl.zeros([NP], tl.int32), tl.zeros([NP], tl.int32)
        if DRAFTED:
            node = tl.arange(0, NP)
            is_child = tl.load(draft + header + most + node, mask=node < count, other=-2) == at
            tokens = tl.load(draft + header + node, mask=is_child, other=-1)
            weight = _weights(tl.load(logits + tokens, mask=is_child, other=float("-inf")), best, heat).to(tl.float64)
            turn = tl.cumsum(is_child.to(tl.int32), 0) - 1
            children = tl.sum(is_child.to(tl.int32), 0)
            number = _uniform(key, position, _ACCEPT, turn)
            # guessed children: each is tried against what those before it leave
            accepted = number * (whole - (tl.cumsum(weight, 0) - weight)) < weight
            if DRAWN:  # a chain, node by node
                drawn = (tl.load(whose_ptr + seq) > 0) & (children > 0)
                law = law_ptr + (seq.to(tl.int64) * depth + tl.minimum(at + 1, depth - 1)) * size
                stated, has = tl.load(law + tokens, mask=is_child, other=0.0), (weight / whole).to(tl.float32)
                judged = (stated > 0) & (number * stated.to(tl.float64) < has.to(tl.float64))
                accepted = tl.where(drawn, judged, accepted)
            kept = tl.min(tl.where(accepted & is_child, node, NP), 0)
            token = tl.sum(tl.where(node == kept, tokens, 0), 0)
        if kept == NP:
            if DRAWN:  # noqa: SIM102 (known when the kernel is compiled; the other when it runs)
                if drawn:
                    rest = tl.zeros([PARTS], tl.float64)
                    for begin in range(0, size, _BLOCK):
                        x = tl.load(logits + begin + column, mask=begin + column < size, other=float("-inf"))
                        p = (_weights(x, best, heat).to(tl.float64) / whole).to(tl.float32)
                        q = tl.load(law + begin + column, mask=begin + column < size, other=0.0)
                        mass = tl.sum(tl.maximum(p - q, 0.0).to(tl.float64), 0)
                        rest = tl.where(part == begin // _BLOCK, mass, rest)
                    # p == q up to rounding: the refusal itself was a rounding accident, and p is still the right law
                    drawn = tl.sum(rest, 0) > 0
                    masses = tl.where(drawn, rest, masses)
                    children = 0
            if DRAFTED:
                for child in range(children):
                    here = (turn == child) & is_child
                    away = tl.sum(tl.where(here, tokens, 0), 0) // _BLOCK
                    masses -= tl.where(part == away, tl.sum(tl.where(here, weight, 0.0), 0), 0.0)
            found, point = _part_of(masses, _uniform(key, position, _RESIDUAL, row * 0), PARTS)
            places = found * _BLOCK + column
            x = tl.load(logits + places, mask=places < size, other=float("-inf"))
            weights = _weights(x, best, heat)
            if DRAWN:  # noqa: SIM102 (known when the kernel is compiled; the other when it runs)
                if drawn:
                    q = tl.load(law + places, mask=places < size, other=0.0)
                    weights = tl.maximum((weights.to(tl.float64) / whole).to(tl.float32) - q, 0.0)
            if DRAFTED:
                for child in range(children):
                    away = tl.sum(tl.where((turn == child) & is_child, tokens, 0), 0)
                    weights = tl.where(places == away, 0.0, weights)
            token = _inside(weights, places, point)
        tl.store(out_ptr + row, tl.minimum(token, size - 1).to(tl.int64))


@triton.jit
def _drawn_logits(logits, added, place_ptr, token, size, MAPPED: tl.constexpr, ADDED: tl.constexpr):
    """The logits of tokens, of which the head or model may have a part, in another order."""
    place, inside = token, token < size
    if MAPPED:
        place = tl.load(place_ptr + token, mask=inside, other=-1)
        inside = inside & (place >= 0)
    x = tl.load(logits + place, mask=inside, other=float("-inf"))
    if ADDED:
        x += tl.load(added + place, mask=inside, other=0.0)
    return tl.where(inside, x, float("-inf"))


@triton.jit(
    do_not_specialize=["row_stride", "added_stride", "own", "ahead", "size", "step", "depth", "out_stride"],
    do_not_specialize_on_alignment=["length_ptr"],
)
def _draw(
    logits_ptr, row_stride, added_ptr, added_stride, place_ptr, key_ptr, length_ptr, heat_ptr, whose_ptr, own, ahead,
    law_ptr, out_ptr, out_stride, stated_ptr, size, step, depth, MAPPED: tl.constexpr, ADDED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The law of the next token of a chain, and a draw from it (core.sequence.Sequence.draw)."""
    seq = tl.program_id(0)
    if tl.load(whose_ptr + seq) == own:
        logits, added = logits_ptr + seq.to(tl.int64) * row_stride, added_ptr
        if ADDED:
            added = added_ptr + seq.to(tl.int64) * added_stride
        column, part, heat = tl.arange(0, _BLOCK), tl.arange(0, PARTS), tl.load(heat_ptr + seq)
        law = law_ptr + (seq.to(tl.int64) * depth + step) * size
        best = float("-inf")
        for begin in range(0, size, _BLOCK):
            x = _drawn_logits(logits, added, place_ptr, begin + column, size, MAPPED, ADDED)
            best = tl.maximum(best, tl.max(tl.where(tl.abs(x) < 1e30, x, float("-inf")), 0))
        whole = tl.zeros([1], tl.float64)
        for begin in range(0, size, _BLOCK):
            x = _drawn_logits(logits, added, place_ptr, begin + column, size, MAPPED, ADDED)
            whole += tl.sum(_weights(x, best, heat).to(tl.float64), 0)
        stated = tl.where(whole > 0, 1.0 / whole, 0.0)  # the likeliest token has weight 1; 0: all overflowed
        masses = tl.zeros([PARTS], tl.float64)
        for begin in range(0, size, _BLOCK):
            x = _drawn_logits(logits, added, place_ptr, begin + column, size, MAPPED, ADDED)
            q = (_weights(x, best, heat).to(tl.float64) * stated).to(tl.float32)
            tl.store(law + begin + column, q, mask=begin + column < size)
            masses = tl.where(part == begin // _BLOCK, tl.sum(q.to(tl.float64), 0), masses)
        position = (tl.load(length_ptr + seq) + ahead).to(tl.uint64)
        number = _uniform(tl.load(key_ptr + seq).to(tl.uint64), position, _DRAFT, seq * 0)
        found, point = _part_of(masses, number, PARTS)
        places = found * _BLOCK + column
        x = _drawn_logits(logits, added, place_ptr, places, size, MAPPED, ADDED)
        q = (_weights(x, best, heat).to(tl.float64) * stated).to(tl.float32)
        tl.store(out_ptr + seq * out_stride, tl.minimum(_inside(q, places, point), size - 1).to(tl.int32))
        # not that of the token that is drawn: nodes are dropped by what is stated (core/draft.py)
        tl.store(stated_ptr + seq, tl.sum(stated.to(tl.float32), 0))


def _parts(vocab: int) -> int:
    return triton.next_power_of_2(triton.cdiv(vocab, BLOCK))


def verify(
    logits: Tensor, keys: Tensor, positions: Tensor, heat: Tensor, out: Tensor, draft: Tensor | None = None,
    header: int = 0, laws: Tensor | None = None, whose: Tensor | None = None,
) -> None:  # fmt: skip
    """The token after each row, out [rows] int64, of sequences whose `heat` [sequences] is above 0; the others' rows
    stay as they are. Each sequence has the same number of rows: its last token, and the nodes of its draft [sequences,
    header + 3 nodes] (how many; after the header tokens, parents, ...). `laws` [sequences, depth, vocab]: what each
    node of a chain was drawn from, where `whose` [sequences] is above 0; nodes of other drafts are guessed, and of all
    drafts where there are none.
    `keys` [sequences] of the dice; `positions` [rows] of the tokens."""
    rows, size = logits.shape
    most = 0 if draft is None else (draft.shape[1] - header) // 3
    _verify[(rows,)](
        logits, keys, positions, heat, draft, laws, whose, out, size, rows // len(heat), most, header,
        1 if laws is None else laws.shape[1], draft is not None, laws is not None, NODES, _parts(size), num_warps=8,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ChainDraws:
    """Chains that a drafter draws, token by token, for the sequences that are its own."""

    keys: Tensor  # [sequences] int64: of the dice
    lengths: Tensor  # [sequences] int32: the place of each text's last token
    heat: Tensor  # [sequences] temperatures
    whose: Tensor  # [sequences] int32: the number of the drafter that draws
    own: int  # the drafter's number
    laws: Tensor  # [sequences, depth, vocab] float32: what the tokens are drawn from

    def draw(
        self, step: int, logits: Tensor, out: Tensor, stated: Tensor, places: Tensor | None = None,
        added: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Token `step` of each chain, out [sequences] int32, and its law; those of other sequences stay as they are.
        logits [sequences, any]: after the token before it; `added`: to be added to them; `places` [vocab] int32: where
        each token's logit stands, -1: nowhere; None: at its own place. `stated` [sequences]: the probability of the
        likeliest token."""
        count, depth, size = self.laws.shape
        _draw[(count,)](
            logits, logits.stride(0), added, 0 if added is None else added.stride(0), places, self.keys, self.lengths,
            self.heat, self.whose, self.own, 1 + step, self.laws, out, out.stride(0), stated, size, step, depth,
            places is not None, added is not None, _parts(size), num_warps=8,
        )  # fmt: skip
