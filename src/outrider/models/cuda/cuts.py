"""The cuts of core/cuts.py on a GPU, in Triton: tokens that top-k, top-p, min-p or typical-p leave out of a law get
logits of minus infinity, where they stand.

Nothing is sorted. How far a token is below the highest logit, as the bits of a float32, is its place in the order; the
place at which a cut falls is searched by halves: what the tokens before it amount to is a sum of whole numbers. One
program a part of a row sums up to LEVELS places at once, and gathers the tokens of the level in which the cut falls, of
which there are mostly few. One program a row searches through these; where they are too many, it looks through the row
until few are left: for 1 to 2 % of the laws of two models at temperature 1 and top_p 0.95, for none to 1 % at lower
ones and with top_k of 50, for most at temperature 1.5 (LOG, 2026-11-18).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.cuts import EXPONENT, FAR, POWERS, UNITS, CutNumbers
from outrider.core.params import SamplingParams

PART = 2048  # logits that a program of a part of a row takes
BLOCK = 8192  # logits that the one program of a row takes at once where it looks through the row
CAPACITY = 2048  # tokens among which a cut is searched without a look at the row: 8 KB a row, and 4 numbers a thread
LEVELS = 16  # logits below the highest: 1, 2 and so on up to 12, then 14, 18, 24 and 32
HALVES = 12  # steps of a search that halve the distance itself: its bits are dense where it is short
STATS = 64  # sums over a row: up to each level how many tokens and what they weigh; then those named below

_LEVELS = tl.constexpr(LEVELS)
_STATS = tl.constexpr(STATS)
_LIVE, _LIVE_UNITS, _NEAR, _LEFT, _LEFT_UNITS, _SURPRISE = map(tl.constexpr, range(2 * LEVELS, 2 * LEVELS + 6))
_NUMBERS = tl.constexpr(len(CutNumbers._fields))
_FACTOR, _TOP_K, _TOP_P, _FARTHEST, _TYPICAL_P = map(tl.constexpr, range(5))  # as CutNumbers has them
_UNITS = tl.constexpr(UNITS)
_FAR = tl.constexpr(FAR)
_EXPONENT = tl.constexpr(EXPONENT)
_P5, _P4, _P3, _P2, _P1, _P0 = map(tl.constexpr, POWERS)
_HALVES = tl.constexpr(HALVES)
_NOWHERE = tl.constexpr(0x7F800000)  # the place of tokens without a logit: the bits of infinity
_MANY = tl.constexpr(2147483647)


@triton.jit
def _below(logits, added, column, size, best, ADDED: tl.constexpr):
    """How far tokens are below the highest logit; infinity: they have none, or one that overflowed."""
    inside = column < size
    x = tl.load(logits + column, mask=inside, other=float("-inf"))
    if ADDED:
        x += tl.load(added + column, mask=inside, other=0.0)
    return tl.where(tl.abs(x) < 1e30, tl.abs(best - x), float("inf"))  # of -0 and 0 too it is 0


@triton.jit
def _weights(below, factor):
    """core.cuts.weights; the kernels are compiled without fused products and sums, so that they round as it does."""
    bits = tl.minimum(below * factor, _FAR)
    up = tl.ceil(bits)
    rest = up - bits
    weight = ((((rest * _P5 + _P4) * rest + _P3) * rest + _P2) * rest + _P1) * rest + _P0
    return bits, weight * (up.to(tl.int32) * -_EXPONENT + 127 * _EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def _places(below, factor, mean, TYPICAL: tl.constexpr):
    """Where tokens stand in the order of a cut, the first ones lowest, and their units."""
    bits, weight = _weights(below, factor)
    live = below < float("inf")
    distance = below
    if TYPICAL:
        distance = tl.abs(bits - mean)
    place = tl.where(live, distance.to(tl.int32, bitcast=True), _NOWHERE)
    return place, tl.where(live, (weight * _UNITS).to(tl.int64), 0)


@triton.jit
def _up_to(logits, added, size, best, factor, mean, last, ADDED: tl.constexpr, TYPICAL: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """How many tokens of a row stand up to the place `last`, and what they weigh."""
    column = tl.arange(0, BLOCK)
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for begin in range(0, size, BLOCK):
        place, units = _places(_below(logits, added, begin + column, size, best, ADDED), factor, mean, TYPICAL)
        count += tl.where(place <= last, 1, 0)
        mass += tl.where(place <= last, units, 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _gather(logits, added, size, best, factor, mean, low, high, out, ADDED: tl.constexpr, TYPICAL: tl.constexpr,
            BLOCK: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """The tokens of a row between two places, the second one included, as what they are below the highest."""
    column = tl.arange(0, BLOCK)
    found = low * 0
    for begin in range(0, size, BLOCK):
        below = _below(logits, added, begin + column, size, best, ADDED)
        place, _ = _places(below, factor, mean, TYPICAL)
        inside = (place > low) & (place <= high)
        count = tl.sum(inside.to(tl.int32), 0)
        if count > 0:
            to = found + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(out + to, below, mask=inside & (to < CAPACITY))
        found += count
    tl.debug_barrier()


@triton.jit
def _middle(low, high, step):
    """A place between two others."""
    between = (tl.maximum(low, 0).to(tl.float32, bitcast=True) + high.to(tl.float32, bitcast=True)) * 0.5
    middle = tl.where(step < _HALVES, between.to(tl.int32, bitcast=True), low + (high - low) // 2)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _search(logits, added, size, best, factor, mean, near, stored, need, low, high, first, mass, count,
            BY_MASS: tl.constexpr, ADDED: tl.constexpr, TYPICAL: tl.constexpr, BLOCK: tl.constexpr,
            CAPACITY: tl.constexpr):  # fmt: skip
    """The first place up to which the tokens of a row amount to `need`; how many stand before it, what these weigh, and
    how many stand there. Known: up to `low` there are `first` tokens that weigh `mass`, which is less; up to `high`
    there are `count`, which is enough. `stored`: as many tokens are in `near`, all those between the two; 0: what is
    there may be written over."""
    step = count * 0
    while (stored == 0) & (count - first > CAPACITY) & (high - low > 1):
        middle = _middle(low, high, step)
        tokens, weighs = _up_to(logits, added, size, best, factor, mean, middle, ADDED, TYPICAL, BLOCK)
        enough = tokens >= need
        if BY_MASS:
            enough = weighs >= need
        high, count = tl.where(enough, middle, high), tl.where(enough, tokens, count)
        low, first = tl.where(enough, low, middle), tl.where(enough, first, tokens)
        mass = tl.where(enough, mass, weighs)
        step += 1
    if (high - low > 1) & (count - first > 0):
        if stored == 0:
            _gather(logits, added, size, best, factor, mean, low, high, near, ADDED, TYPICAL, BLOCK, CAPACITY)
        number, held = tl.arange(0, CAPACITY), tl.where(stored == 0, count - first, stored)
        below = tl.load(near + number, mask=number < held, other=float("inf"))
        place, units = _places(below, factor, mean, TYPICAL)
        both = units * (2 * CAPACITY) + 1  # one sum says what they weigh and how many they are
        passed, weighed = first, mass
        while (high - low > 1) & (count - first > 1):
            middle = _middle(low, high, step)
            total = tl.sum(tl.where(place <= middle, both, 0), 0)
            tokens, weighs = passed + (total % (2 * CAPACITY)).to(tl.int32), weighed + total // (2 * CAPACITY)
            enough = tokens >= need
            if BY_MASS:
                enough = weighs >= need
            high, count = tl.where(enough, middle, high), tl.where(enough, tokens, count)
            low, first = tl.where(enough, low, middle), tl.where(enough, first, tokens)
            mass = tl.where(enough, mass, weighs)
            step += 1
        high = tl.max(tl.where(place <= high, place, -1), 0)  # where tokens stand
    return high, first, mass, count - first


@triton.jit
def _last_tie(logits, added, size, best, factor, mean, where, amount, need, BY_MASS: tl.constexpr,
              ADDED: tl.constexpr, TYPICAL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of the tokens that stand at `where`, in the order of their ids: the one with which `need` is reached, if those
    before amount to `amount`."""
    column = tl.arange(0, BLOCK)
    last, begin = where * 0 + _MANY, where * 0
    while (begin < size) & (last == _MANY):
        place, own = _places(_below(logits, added, begin + column, size, best, ADDED), factor, mean, TYPICAL)
        if not BY_MASS:
            own = tl.full([BLOCK], 1, tl.int64)
        own = tl.where(place == where, own, 0)
        enough = (place == where) & (amount + tl.cumsum(own, 0) >= need)
        last = tl.min(tl.where(enough, begin + column, _MANY), 0)
        amount += tl.sum(own, 0)
        begin += BLOCK
    return last


@triton.jit
def _part_of(part, whole):
    """Units that the first tokens must reach to have that part of all."""
    exact = part * whole.to(tl.float64)
    need = exact.to(tl.int64)
    return tl.maximum(need + (need.to(tl.float64) < exact).to(tl.int64), 1)


@triton.jit
def _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED: tl.constexpr):
    """The logits of a program's row, what is added to them, and the numbers of its cut."""
    row = tl.program_id(0).to(tl.int64)
    added = logits_ptr
    if ADDED:
        added = added_ptr + row // each * added_stride
    return row, logits_ptr + row * size, added, numbers_ptr + row // each * _NUMBERS


@triton.jit
def _highest(most_ptr, row, PARTS: tl.constexpr, ALL: tl.constexpr):
    part = tl.arange(0, ALL)
    return tl.max(tl.load(most_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf")), 0)


@triton.jit
def _mean(stats):
    """The mean surprise of the tokens that are left of a row, in bits."""
    whole = tl.maximum(tl.load(stats + _LEFT_UNITS), 1)
    return (tl.load(stats + _SURPRISE).to(tl.float64) / whole.to(tl.float64)).to(tl.float32)


@triton.jit(do_not_specialize=["each"])
def _find_highest(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The highest logit of each part of a row."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    part = tl.program_id(1)
    if tl.load(numbers + _FACTOR) > 0:
        column = part * PART + tl.arange(0, PART)
        inside = column < size
        x = tl.load(logits + column, mask=inside, other=float("-inf"))
        if ADDED:
            x += tl.load(added + column, mask=inside, other=0.0)
        tl.store(most_ptr + row * PARTS + part, tl.max(tl.where(tl.abs(x) < 1e30, x, float("-inf")), 0))
        if part == 0:
            tl.store(stats_ptr + row * _STATS + tl.arange(0, _STATS), tl.zeros([_STATS], tl.int64))


@triton.jit
def _level(number):
    """How many logits below the highest it lies, as a place."""
    far = tl.maximum(number - 11, 0)
    return (number + 1 + far * far).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _passed(stats, need, BY_MASS: tl.constexpr):
    """At how many levels the tokens up to there amount to less than `need`."""
    sums = stats + tl.arange(0, _LEVELS)
    if BY_MASS:
        sums += _LEVELS
    return tl.sum((tl.load(sums) < need).to(tl.int32), 0)


@triton.jit
def _between(stats, number):
    """The place of level `number` - 1, how many tokens there are up to there and what they weigh; the place of level
    `number`, and how many there are up to there. Before the first level is none, after the last are all."""
    low = tl.where(number > 0, _level(number - 1), -1)
    first = tl.load(stats + number - 1, mask=number > 0, other=0)
    mass = tl.load(stats + _LEVELS + number - 1, mask=number > 0, other=0)
    high = tl.where(number < _LEVELS, _level(number), _NOWHERE - 1)
    count = tl.load(stats + tl.where(number < _LEVELS, number, _LIVE))
    return low, first.to(tl.int32), mass, high, count.to(tl.int32)


@triton.jit
def _first_cut(stats, top_k, need, CAPACITY: tl.constexpr):
    """`_between`, for the first cut of a row. `top_k` 0: the first cut is top-p, which needs `need` units. For top-p on
    what top-k leaves these tokens have to be there from the first one on, if they fit."""
    number = _passed(stats, need, True)
    if top_k > 0:
        number = _passed(stats, top_k, False)
    low, first, mass, high, count = _between(stats, number)
    begins = (top_k > 0) & (count <= CAPACITY)
    return tl.where(begins, -1, low), tl.where(begins, 0, first), tl.where(begins, 0, mass), high, count


@triton.jit(do_not_specialize=["each"])
def _sum_levels(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sums over each part of a row."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor = tl.load(numbers + _FACTOR).to(tl.float32)
    if (factor > 0) & ((tl.load(numbers + _TOP_K) > 0) | (tl.load(numbers + _TOP_P) < 1)):
        best, stats = _highest(most_ptr, row, PARTS, ALL), stats_ptr + row * _STATS
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        place, units = _places(_below(logits, added, column, size, best, ADDED), factor, 0.0, False)
        both = units * (2 * PART) + 1  # one sum says what they weigh and how many they are
        for number in range(_LEVELS):
            total = tl.sum(tl.where(place <= _level(number), both, 0), 0)
            if total > 0:
                tl.atomic_add(stats + number, total % (2 * PART), sem="relaxed")
                tl.atomic_add(stats + _LEVELS + number, total // (2 * PART), sem="relaxed")
        total = tl.sum(tl.where(place < _NOWHERE, both, 0), 0)
        tl.atomic_add(stats + _LIVE, total % (2 * PART), sem="relaxed")
        tl.atomic_add(stats + _LIVE_UNITS, total // (2 * PART), sem="relaxed")


@triton.jit
def _counted(stats, numbers):
    """What the first cut needs: a number of tokens where top-k cuts any, else a number of units."""
    top_k = tl.load(numbers + _TOP_K).to(tl.int64)
    need = _part_of(tl.load(numbers + _TOP_P), tl.load(stats + _LIVE_UNITS))
    return tl.where(top_k < tl.load(stats + _LIVE), top_k, 0), need


@triton.jit(do_not_specialize=["each"])
def _gather_near(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, near_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The tokens of each part of a row among which its first cut falls, in no order, if they fit into the memory."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor = tl.load(numbers + _FACTOR).to(tl.float32)
    if (factor > 0) & ((tl.load(numbers + _TOP_K) > 0) | (tl.load(numbers + _TOP_P) < 1)):
        best, stats = _highest(most_ptr, row, PARTS, ALL), stats_ptr + row * _STATS
        top_k, need = _counted(stats, numbers)
        low, first, _, high, count = _first_cut(stats, top_k, need, CAPACITY)
        if count - first <= CAPACITY:
            column = tl.program_id(1) * PART + tl.arange(0, PART)
            below = _below(logits, added, column, size, best, ADDED)
            place = below.to(tl.int32, bitcast=True)
            inside = (place > low) & (place <= high)
            tokens = tl.sum(inside.to(tl.int32), 0)
            if tokens > 0:
                begin = tl.atomic_add(stats + _NEAR, tokens.to(tl.int64), sem="relaxed")
                to = begin + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(near_ptr + row * CAPACITY + to, below, mask=inside)


@triton.jit(do_not_specialize=["each"])
def _find_cut(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, near_ptr, cut_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Where top-k, top-p and min-p cut a row: tokens stay that stand before a place, and at that place up to an id."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor, top_p = tl.load(numbers + _FACTOR).to(tl.float32), tl.load(numbers + _TOP_P)
    if factor > 0:
        best, stats, near = _highest(most_ptr, row, PARTS, ALL), stats_ptr + row * _STATS, near_ptr + row * CAPACITY
        top_k, need = _counted(stats, numbers)
        low, first, mass, high, count = _first_cut(stats, top_k, need, CAPACITY)
        stored = tl.where(count - first <= CAPACITY, count - first, 0)
        where, last = high * 0 + _NOWHERE, high * 0 + _MANY
        if top_k > 0:
            where, before, weighs, ties = _search(
                logits, added, size, best, factor, 0.0, near, stored, top_k, low, high, first, mass, count, False,
                ADDED, False, BLOCK, CAPACITY,
            )  # fmt: skip
            if ties > 1:
                last = _last_tie(
                    logits, added, size, best, factor, 0.0, where, before + top_k * 0, top_k, False, ADDED, False, BLOCK
                )  # fmt: skip
            _, weight = _weights(where.to(tl.float32, bitcast=True), factor)
            need = _part_of(top_p, weighs + (top_k - before) * (weight * _UNITS).to(tl.int64))
            stored = tl.where(low == -1, stored, 0)
            if stored == 0:
                low, first, mass, high, count = _between(stats, _passed(stats, need, True))
            count = tl.where(high < where, count, before + ties)
            high = tl.minimum(high, where)
        if (top_p < 1) & (tl.load(stats + _LIVE) > 0):
            where, before, weighs, ties = _search(
                logits, added, size, best, factor, 0.0, near, stored, need, low, high, first, mass, count, True,
                ADDED, False, BLOCK, CAPACITY,
            )  # fmt: skip
            last = high * 0 + _MANY
            if ties > 1:
                last = _last_tie(
                    logits, added, size, best, factor, 0.0, where, weighs, need, True, ADDED, False, BLOCK
                )  # fmt: skip
        farthest = tl.load(numbers + _FARTHEST).to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(cut_ptr + row * 2, tl.minimum(where, farthest))
        tl.store(cut_ptr + row * 2 + 1, tl.where(farthest < where, _MANY, last))


@triton.jit(do_not_specialize=["each"])
def _sum_surprise(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """For typical-p: sums over the tokens that are left of each part of a row."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor = tl.load(numbers + _FACTOR).to(tl.float32)
    if (factor > 0) & (tl.load(numbers + _TYPICAL_P) < 1):
        best, stats = _highest(most_ptr, row, PARTS, ALL), stats_ptr + row * _STATS
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        below = _below(logits, added, column, size, best, ADDED)
        live = below < float("inf")
        bits, weight = _weights(below, factor)
        surprise = tl.where(live, (weight * bits * _UNITS).to(tl.int64), 0)
        tl.atomic_add(stats + _LEFT, tl.sum(live.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(stats + _LEFT_UNITS, tl.sum(tl.where(live, (weight * _UNITS).to(tl.int64), 0), 0), sem="relaxed")
        tl.atomic_add(stats + _SURPRISE, tl.sum(surprise, 0), sem="relaxed")


@triton.jit(do_not_specialize=["each"])
def _find_typical(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, near_ptr, cut_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Where typical-p cuts what is left of a row."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor, typical_p = tl.load(numbers + _FACTOR).to(tl.float32), tl.load(numbers + _TYPICAL_P)
    stats = stats_ptr + row * _STATS
    left = tl.load(stats + _LEFT).to(tl.int32)
    if (factor > 0) & (typical_p < 1) & (left > 0):
        best, mean, near = _highest(most_ptr, row, PARTS, ALL), _mean(stats), near_ptr + row * CAPACITY
        need = _part_of(typical_p, tl.load(stats + _LEFT_UNITS))
        none, high = left * 0, left * 0 + (_NOWHERE - 1)
        where, _, mass, ties = _search(
            logits, added, size, best, factor, mean, near, none, need, none - 1, high, none, need * 0, left, True,
            ADDED, True, BLOCK, CAPACITY,
        )  # fmt: skip
        last = left * 0 + _MANY
        if ties > 1:
            last = _last_tie(logits, added, size, best, factor, mean, where, mass, need, True, ADDED, True, BLOCK)
        tl.store(cut_ptr + row * 2, where)
        tl.store(cut_ptr + row * 2 + 1, last)


@triton.jit(do_not_specialize=["each"])
def _cut_off(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, cut_ptr, size, each,
    ADDED: tl.constexpr, TYPICAL: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Tokens of a part of a row that do not stay lose their logits."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor, cuts = tl.load(numbers + _FACTOR).to(tl.float32), True
    mean = factor
    if TYPICAL:
        stats = stats_ptr + row * _STATS
        mean, cuts = _mean(stats), (tl.load(numbers + _TYPICAL_P) < 1) & (tl.load(stats + _LEFT) > 0)
    if (factor > 0) & cuts:
        best = _highest(most_ptr, row, PARTS, ALL)
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        place, _ = _places(_below(logits, added, column, size, best, ADDED), factor, mean, TYPICAL)
        where, last = tl.load(cut_ptr + row * 2), tl.load(cut_ptr + row * 2 + 1)
        stays = (place < where) | ((place == where) & (column <= last))
        tl.store(logits + column, float("-inf"), mask=(column < size) & ~stays)


@dataclass(frozen=True, eq=False)
class Cuts:
    """The cuts of some sequences."""

    numbers: Tensor  # [sequences, len(CutNumbers)] float64; zeros: none
    typical: bool  # whether any may have typical_p

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device) -> Cuts | None:
        """None: nobody has any."""
        if not any(each.cuts and not each.greedy for each in params):
            return None
        made = Cuts.none(len(params), any(each.typical_p < 1.0 for each in params), device)
        made.send(params)
        return made

    @staticmethod
    def none(sequences: int, typical: bool, device: torch.device) -> Cuts:
        """Space for the cuts of this many sequences, to be sent."""
        return Cuts(torch.zeros(sequences, len(CutNumbers._fields), dtype=torch.float64, device=device), typical)

    def send(self, params: Sequence[SamplingParams | None]) -> None:
        """Of the first sequences; None: no cuts. The others have none."""
        rows = [CutNumbers() if each is None else CutNumbers.of(each) for each in params]
        rows += [CutNumbers()] * (len(self.numbers) - len(rows))
        self.numbers.copy_(torch.tensor(rows, dtype=torch.float64))

    def __call__(self, logits: Tensor, added: Tensor | None = None) -> None:
        """Take what is cut out of logits [rows, any] float32, of which each sequence has the same number of rows.
        `added` [sequences, any]: to be added to them. The memory for the search is some 9 KB a row."""
        rows, size = logits.shape
        part, block = (min(each, triton.next_power_of_2(size)) for each in (PART, BLOCK))
        parts, device = triton.cdiv(size, part), logits.device
        most, stats = logits.new_empty(rows, parts), torch.empty(rows, STATS, dtype=torch.int64, device=device)
        near, cut = logits.new_empty(rows, CAPACITY), torch.empty(rows, 2, dtype=torch.int32, device=device)
        own = logits, added, 0 if added is None else added.stride(0), self.numbers, most, stats
        sizes, adds, all_parts = (size, rows // len(self.numbers)), added is not None, triton.next_power_of_2(parts)
        by_part, by_row = (parts, all_parts, part), (parts, all_parts, block, CAPACITY)
        few, many = (dict(num_warps=warps, enable_fp_fusion=False) for warps in (4, 16))
        _find_highest[rows, parts](*own, *sizes, adds, parts, part, **few)
        _sum_levels[rows, parts](*own, *sizes, adds, *by_part, **few)
        _gather_near[rows, parts](*own, near, *sizes, adds, *by_part, CAPACITY, **few)
        _find_cut[(rows,)](*own, near, cut, *sizes, adds, *by_row, **many)
        _cut_off[rows, parts](*own, cut, *sizes, adds, False, *by_part, **few)
        if self.typical:
            _sum_surprise[rows, parts](*own, *sizes, adds, *by_part, **few)
            _find_typical[(rows,)](*own, near, cut, *sizes, adds, *by_row, **many)
            _cut_off[rows, parts](*own, cut, *sizes, adds, True, *by_part, **few)
