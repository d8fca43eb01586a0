"""The cuts of core/cuts.py on a GPU, in Triton: tokens that top-k, top-p, min-p or typical-p leave out of a law get
logits of minus infinity, where they stand.

Nothing is sorted. How far a token is below the highest logit, as the bits of a float32, is its place in the order; the
place at which a cut falls is searched by halves: what the tokens before it amount to is a sum of whole numbers. One
program a part of a row finds the tokens that are near the highest, of which there are mostly few. One program a row
searches through these; where they are not enough, it looks through the row until few are left to search.
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

PART = 4096  # logits that one program takes at once
# Tokens among which a cut is searched without a look at the row: 8 KB a row, and 16 numbers a thread. A law of usual
# texts has some hundreds within HEAD bits of the likeliest.
CAPACITY = 2048
HALVES = 12  # steps of a search through a row that halve the distance itself: its bits are dense where it is short

STATS = 8  # sums over a row: tokens near the highest and their units, all tokens, those before typical-p and their bits
_STATS = tl.constexpr(STATS)
_NEAR, _NEAR_UNITS, _LIVE, _LIVE_UNITS, _LEFT, _LEFT_UNITS, _SURPRISE = map(tl.constexpr, range(7))
_NUMBERS = tl.constexpr(len(CutNumbers._fields))
_FACTOR, _TOP_K, _TOP_P, _FARTHEST, _TYPICAL_P, _REACH = map(tl.constexpr, range(6))  # as CutNumbers has them
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
           PART: tl.constexpr):  # fmt: skip
    """How many tokens of a row stand up to the place `last`, and what they weigh."""
    column = tl.arange(0, PART)
    count, mass = tl.zeros([PART], tl.int32), tl.zeros([PART], tl.int64)
    for begin in range(0, size, PART):
        place, units = _places(_below(logits, added, begin + column, size, best, ADDED), factor, mean, TYPICAL)
        count += tl.where(place <= last, 1, 0)
        mass += tl.where(place <= last, units, 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _gather(logits, added, size, best, factor, mean, low, high, out, ADDED: tl.constexpr, TYPICAL: tl.constexpr,
            PART: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """The tokens of a row between two places, the second one included, as what they are below the highest."""
    column = tl.arange(0, PART)
    found = low * 0
    for begin in range(0, size, PART):
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
def _search(logits, added, size, best, factor, mean, near, stored, need, high, count, BY_MASS: tl.constexpr,
            ADDED: tl.constexpr, TYPICAL: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr):  # fmt: skip
    """The first place up to which the tokens of a row amount to `need`; how many stand before it, what these weigh, and
    how many stand there. They amount to it up to `high`, and these are `count`. `stored`: as many tokens are in `near`,
    all those up to `high` among them; 0: what is there may be written over."""
    low, first, mass, step = high * 0 - 1, count * 0, need * 0, count * 0
    while (stored == 0) & (count - first > CAPACITY) & (high - low > 1):
        middle = _middle(low, high, step)
        tokens, weighs = _up_to(logits, added, size, best, factor, mean, middle, ADDED, TYPICAL, PART)
        enough = tokens >= need
        if BY_MASS:
            enough = weighs >= need
        high, count = tl.where(enough, middle, high), tl.where(enough, tokens, count)
        low, first = tl.where(enough, low, middle), tl.where(enough, first, tokens)
        mass = tl.where(enough, mass, weighs)
        step += 1
    if (high - low > 1) & (count - first > 0):
        if stored == 0:
            _gather(logits, added, size, best, factor, mean, low, high, near, ADDED, TYPICAL, PART, CAPACITY)
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
              ADDED: tl.constexpr, TYPICAL: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Of the tokens that stand at `where`, in the order of their ids: the one with which `need` is reached, if those
    before amount to `amount`."""
    column = tl.arange(0, PART)
    last, begin = size * 0 + _MANY, size * 0
    while (begin < size) & (last == _MANY):
        place, own = _places(_below(logits, added, begin + column, size, best, ADDED), factor, mean, TYPICAL)
        if not BY_MASS:
            own = tl.full([PART], 1, tl.int64)
        own = tl.where(place == where, own, 0)
        enough = (place == where) & (amount + tl.cumsum(own, 0) >= need)
        last = tl.min(tl.where(enough, begin + column, _MANY), 0)
        amount += tl.sum(own, 0)
        begin += PART
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


@triton.jit(do_not_specialize=["size", "each"])
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


@triton.jit(do_not_specialize=["size", "each"])
def _find_near(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, near_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The tokens of each part of a row that are near the highest, in no order, and sums over all tokens."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor = tl.load(numbers + _FACTOR).to(tl.float32)
    if (factor > 0) & ((tl.load(numbers + _TOP_K) > 0) | (tl.load(numbers + _TOP_P) < 1)):
        best, stats = _highest(most_ptr, row, PARTS, ALL), stats_ptr + row * _STATS
        column = tl.program_id(1) * PART + tl.arange(0, PART)
        below = _below(logits, added, column, size, best, ADDED)
        place, units = _places(below, factor, 0.0, False)
        inside = below <= tl.load(numbers + _REACH).to(tl.float32)
        count = tl.sum(inside.to(tl.int32), 0)
        if count > 0:
            begin = tl.atomic_add(stats + _NEAR, count.to(tl.int64), sem="relaxed")
            to = begin + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(near_ptr + row * CAPACITY + to, below, mask=inside & (to < CAPACITY))
            tl.atomic_add(stats + _NEAR_UNITS, tl.sum(tl.where(inside, units, 0), 0), sem="relaxed")
        tl.atomic_add(stats + _LIVE, tl.sum((place < _NOWHERE).to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(stats + _LIVE_UNITS, tl.sum(units, 0), sem="relaxed")


@triton.jit(do_not_specialize=["size", "each"])
def _find_cut(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, near_ptr, cut_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Where top-k, top-p and min-p cut a row: tokens stay that stand before a place, and at that place up to an id."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor = tl.load(numbers + _FACTOR).to(tl.float32)
    if factor > 0:
        best, stats, near = _highest(most_ptr, row, PARTS, ALL), stats_ptr + row * _STATS, near_ptr + row * CAPACITY
        top_k, top_p = tl.load(numbers + _TOP_K).to(tl.int64), tl.load(numbers + _TOP_P)
        reach = tl.load(numbers + _REACH).to(tl.float32).to(tl.int32, bitcast=True)
        found, live, whole = tl.load(stats + _NEAR), tl.load(stats + _LIVE), tl.load(stats + _LIVE_UNITS)
        held = tl.where(found <= CAPACITY, found, 0).to(tl.int32)  # of these, in memory
        where, last, tokens = size * 0 + _NOWHERE, size * 0 + _MANY, live.to(tl.int32)
        if (top_k > 0) & (top_k < live):
            enough = found >= top_k
            high, count = tl.where(enough, reach, _NOWHERE - 1), tl.where(enough, found, live).to(tl.int32)
            stored = tl.where(enough, held, 0)
            where, first, mass, ties = _search(
                logits, added, size, best, factor, 0.0, near, stored, top_k, high, count, False, ADDED, False,
                PART, CAPACITY,
            )  # fmt: skip
            if ties > 1:
                last = _last_tie(
                    logits, added, size, best, factor, 0.0, where, first.to(tl.int64), top_k, False, ADDED, False, PART
                )  # fmt: skip
            _, weight = _weights(where.to(tl.float32, bitcast=True), factor)
            whole = mass + (top_k - first) * (weight * _UNITS).to(tl.int64)
            held, tokens = stored, first + ties
        if (top_p < 1) & (live > 0):
            need = _part_of(top_p, whole)
            enough = (where > reach) & (tl.load(stats + _NEAR_UNITS) >= need)
            high = tl.where(enough, reach, tl.minimum(where, _NOWHERE - 1))
            count, stored = tl.where(enough, found.to(tl.int32), tokens), tl.where(high <= reach, held, 0)
            where, first, mass, ties = _search(
                logits, added, size, best, factor, 0.0, near, stored, need, high, count, True, ADDED, False, PART,
                CAPACITY,
            )  # fmt: skip
            last = size * 0 + _MANY
            if ties > 1:
                last = _last_tie(
                    logits, added, size, best, factor, 0.0, where, mass, need, True, ADDED, False, PART
                )  # fmt: skip
        farthest = tl.load(numbers + _FARTHEST).to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(cut_ptr + row * 2, tl.minimum(where, farthest))
        tl.store(cut_ptr + row * 2 + 1, tl.where(farthest < where, _MANY, last))


@triton.jit(do_not_specialize=["size", "each"])
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


@triton.jit(do_not_specialize=["size", "each"])
def _find_typical(
    logits_ptr, added_ptr, added_stride, numbers_ptr, most_ptr, stats_ptr, near_ptr, cut_ptr, size, each,
    ADDED: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Where typical-p cuts what is left of a row."""
    row, logits, added, numbers = _begin(logits_ptr, added_ptr, added_stride, numbers_ptr, size, each, ADDED)
    factor, typical_p = tl.load(numbers + _FACTOR).to(tl.float32), tl.load(numbers + _TYPICAL_P)
    stats = stats_ptr + row * _STATS
    left = tl.load(stats + _LEFT).to(tl.int32)
    if (factor > 0) & (typical_p < 1) & (left > 0):
        best, mean, near = _highest(most_ptr, row, PARTS, ALL), _mean(stats), near_ptr + row * CAPACITY
        need = _part_of(typical_p, tl.load(stats + _LEFT_UNITS))
        where, _, mass, ties = _search(
            logits, added, size, best, factor, mean, near, left * 0, need, left * 0 + (_NOWHERE - 1), left, True,
            ADDED, True, PART, CAPACITY,
        )  # fmt: skip
        last = size * 0 + _MANY
        if ties > 1:
            last = _last_tie(logits, added, size, best, factor, mean, where, mass, need, True, ADDED, True, PART)
        tl.store(cut_ptr + row * 2, where)
        tl.store(cut_ptr + row * 2 + 1, last)


@triton.jit(do_not_specialize=["size", "each"])
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
        """Of as many sequences, to be sent."""
        return Cuts(torch.zeros(sequences, len(CutNumbers._fields), dtype=torch.float64, device=device), typical)

    def send(self, params: Sequence[SamplingParams | None]) -> None:
        """Of the first sequences; None: no cuts. The others have none."""
        rows = [CutNumbers() if each is None else CutNumbers.of(each) for each in params]
        rows += [CutNumbers()] * (len(self.numbers) - len(rows))
        self.numbers.copy_(torch.tensor(rows, dtype=torch.float64))

    def __call__(self, logits: Tensor, added: Tensor | None = None) -> None:
        """Take what is cut out of logits [rows, any] float32, of which each sequence has as many rows. `added`
        [sequences, any]: to be added to them. The memory for the search is some 9 KB a row."""
        rows, size = logits.shape
        part, device = min(PART, triton.next_power_of_2(size)), logits.device
        parts = triton.cdiv(size, part)
        most, stats = logits.new_empty(rows, parts), torch.empty(rows, STATS, dtype=torch.int64, device=device)
        near, cut = logits.new_empty(rows, CAPACITY), torch.empty(rows, 2, dtype=torch.int32, device=device)
        own = logits, added, 0 if added is None else added.stride(0), self.numbers, most, stats
        sizes, adds = (size, rows // len(self.numbers)), added is not None
        cutting, options = (parts, triton.next_power_of_2(parts), part), dict(num_warps=8, enable_fp_fusion=False)
        _find_highest[rows, parts](*own, *sizes, adds, parts, part, **options)
        _find_near[rows, parts](*own, near, *sizes, adds, *cutting, CAPACITY, **options)
        _find_cut[(rows,)](*own, near, cut, *sizes, adds, *cutting, CAPACITY, **options)
        _cut_off[rows, parts](*own, cut, *sizes, adds, False, *cutting, **options)
        if self.typical:
            _sum_surprise[rows, parts](*own, *sizes, adds, *cutting, **options)
            _find_typical[(rows,)](*own, near, cut, *sizes, adds, *cutting, CAPACITY, **options)
            _cut_off[rows, parts](*own, cut, *sizes, adds, True, *cutting, **options)
