"""How much to draft now: measured cost times measured acceptance.

What a pass of so many rows takes is learned from the passes themselves, for short sequences and for long ones. A node
that is kept with chance P is worth its row while it brings tokens faster than the step does without it: P / (seconds of
the row) > tokens / seconds. The best draft of a batch is found by adding nodes in the order of their chances until the
next one no longer pays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from outrider.core.draft import ROOT, Draft
from outrider.core.verify import Verdict

K = TypeVar("K", bound=Hashable)

GUESS = 0.2  # before anything is measured: one more row costs this share of a pass
FADE = 0.95
PROBE = 16  # a drafter that does not pay is tried again after so many steps
RENEW = 8  # passes after which the curve is drawn anew: each time would cost as much as a draft
FAITH = 2  # passes that the line is worth
SHORT = 256  # tokens of a sequence up to which a row costs the same
LEAST = 2e-4  # of a pass: no row is cheaper
TRIED = 12.0  # drafts by which a head is judged, at first
UNLIKELY = 0.003  # seconds: no draft of one sequence takes longer
REST, AGAIN = 32, 4  # steps for which one that does not earn what it costs rests, and then drafts again


class Cost:
    """Seconds of a pass by its rows: robust averages, and under them the curve along which every further row costs at
    least as much as the one before. Where memory is the limit the first rows are nearly free; a straight line does not
    know that. What was seen seldom and looks cheap is tried, and so seen again."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._curve = self._fit()  # its corners
        self._known: dict[int, float] = {}  # what was asked of it
        self._new = 0  # passes since it was drawn

    def learn(self, rows: int, seconds: float) -> None:
        count = self._counts[rows] = self._counts.get(rows, 0) + 1
        old = self._seconds.setdefault(rows, seconds)
        change = min(max(seconds - old, -0.3 * old), 0.3 * old)  # a pause of the machine is not the cost of a pass
        self._seconds[rows] = old + change / min(count, 10)
        self._new += 1
        if self._new >= RENEW or count < RENEW:
            self._curve, self._known, self._new = self._fit(), {}, 0

    def like(self) -> Cost:
        """One that begins with what this one knows, and soon knows better."""
        other = Cost()
        other._seconds, other._counts = dict(self._seconds), {rows: min(n, FAITH) for rows, n in self._counts.items()}
        other._curve = other._fit()
        return other

    def at(self, rows: int) -> float:
        """Seconds of a pass."""
        if rows not in self._known:
            curve = self._curve
            place = bisect_left(curve, rows, key=lambda corner: corner[0])
            (left, low), (right, high) = curve[min(max(place, 1), len(curve) - 1) - 1 :][:2]
            self._known[rows] = low + (high - low) / (right - left) * (rows - left)
        return self._known[rows]

    def more(self, rows: int) -> float:
        """Seconds that one row more than these takes."""
        return self.at(rows + 1) - self.at(rows)

    def _fit(self) -> list[tuple[int, float]]:
        """At least two corners; what was seen seldom is drawn towards the line through all."""
        a, b = self._line()
        corners: list[tuple[int, float]] = []
        for rows, seconds in sorted(self._seconds.items()):
            seconds = (self._counts[rows] * seconds + FAITH * (a + b * rows)) / (self._counts[rows] + FAITH)
            while len(corners) > 1 and _slope(corners[-1], (rows, seconds)) <= _slope(*corners[-2:]):
                corners.pop()
            if corners:
                last, before = corners[-1]
                seconds = max(seconds, before + LEAST * before * (rows - last))
            corners.append((rows, seconds))
        if len(corners) < 2:
            first = corners[0][0] if corners else 0
            corners = [(first, a + b * first), (first + 1, a + b * (first + 1))]
        return corners

    def _line(self) -> tuple[float, float]:
        """a and b of a + b * rows, drawn towards the guess while little is known."""
        if not self._seconds:
            return 1.0 - GUESS, GUESS
        weights = {rows: min(count, 20) for rows, count in self._counts.items()}
        total = sum(weights.values())
        rows_mean = sum(w * rows for rows, w in weights.items()) / total
        mean = sum(w * self._seconds[rows] for rows, w in weights.items()) / total
        spread = sum(w * (rows - rows_mean) ** 2 for rows, w in weights.items())
        product = sum(w * (rows - rows_mean) * (self._seconds[rows] - mean) for rows, w in weights.items())
        guess = GUESS * min(self._seconds.values())
        slope = max((product + 2.0 * guess) / (spread + 2.0), LEAST * guess)
        return max(mean - slope * rows_mean, 0.0), slope


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


@dataclass(frozen=True)
class PassSize:
    """A pass before any draft is added to it, over all drafters."""

    rows: int  # tokens that it runs, those of prompts too
    writing: int  # sequences that write a token


class Depths:
    """For a drafter that cannot say how sure it is: how often its nodes were kept, by depth, and what they cost."""

    def __init__(self) -> None:
        self._tries: dict[int, float] = {}
        self._hits: dict[int, float] = {}
        self.seconds = 0.0  # of drafting one node
        self.idle = 0  # steps since it was last asked

    def chance(self, depth: int) -> float:
        return (self._hits.get(depth, 0.0) + 2.8) / (self._tries.get(depth, 0.0) + 4.0)

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """A node was tried if its parent was kept."""
        kept, depths = {ROOT, *verdict.path}, draft.depths()
        for depth in range(1, len(verdict.path) + 2):
            tried = [n for n, d in enumerate(depths) if d == depth and draft.parents[n] in kept]
            if tried:
                self._tries[depth] = FADE * self._tries.get(depth, 0.0) + 1.0
                self._hits[depth] = FADE * self._hits.get(depth, 0.0) + float(any(n in kept for n in tried))

    def spend(self, seconds: float, nodes: int) -> None:
        if nodes:
            each = seconds / nodes
            self.seconds = each if not self.seconds else self.seconds + 0.1 * min(each - self.seconds, self.seconds)


class Profit:
    """Of a drafter that costs something: the seconds that its kept tokens saved, less those that its drafts and their
    rows took."""

    def __init__(self) -> None:
        self._gain = self._drafts = 0.0
        self._steps = 0  # since it has not paid
        self.seconds = 0.0  # of a drafting, for each sequence
        self.size = PassSize(1, 1)  # of the last pass

    def spend(self, seconds: float, seqs: int, size: PassSize) -> None:
        """A whole prompt that a head has to take in first is not the cost of a draft."""
        each, self.size = seconds / seqs, size
        self.seconds += 0.1 * min(each - self.seconds, self.seconds) if self.seconds else min(each, UNLIKELY)

    def learn(self, seconds: float) -> None:
        self._gain, self._drafts = FADE * self._gain + seconds, FADE * self._drafts + 1.0

    def rest(self) -> bool:
        """Whether not to draft in this step."""
        pays = self._drafts < TRIED or self._gain > 0.0
        self._steps = 0 if pays else self._steps % (REST + AGAIN) + 1
        return 0 < self._steps <= REST


class Pace:
    def __init__(self, cost: Cost | None = None) -> None:
        """`cost`: of short sequences, where it is known."""
        self.cost = cost or Cost()  # at the length of the sequences that run
        self._costs = {0: self.cost}  # by the bits of that length
        self._depths: dict[Hashable, Depths] = {}
        self._profits: dict[Hashable, Profit] = {}

    def turn(self, length: int) -> None:
        """Sequences of so many tokens run now: each row of a pass looks at all of them."""
        bits = (length // SHORT).bit_length()
        if bits not in self._costs:
            nearest = min(self._costs, key=lambda known: abs(known - bits))
            self._costs[bits] = self._costs[nearest].like()
        self.cost = self._costs[bits]

    def rests(self, drafter: Hashable) -> bool:
        """Whether a drafter that costs something should not draft now."""
        return self._profits.setdefault(drafter, Profit()).rest()

    def rooms(self, drafter: Hashable, rooms: Seq[int], size: PassSize) -> list[int]:
        """How many nodes to ask a drafter for; one whose nodes cost something is asked for no more than pay."""
        depths = self._depths.setdefault(drafter, Depths())
        best = self._length(depths, len(rooms), max(rooms, default=0), size)
        if best == 0 and depths.idle < PROBE:
            depths.idle += 1
            return [0] * len(rooms)
        depths.idle = 0
        return [min(room, max(best, 1)) for room in rooms]

    def _length(self, depths: Depths, seqs: int, most: int, size: PassSize) -> int:
        tokens, seconds, chance, rows = float(size.writing), self.cost.at(size.writing), 1.0, size.rows
        for depth in range(1, most + 1):
            chance *= depths.chance(depth)
            more = self.cost.at(rows + seqs) - self.cost.at(rows) + depths.seconds * seqs
            if chance * seqs * seconds <= more * tokens:
                return depth - 1
            tokens, seconds, rows = tokens + chance * seqs, seconds + more, rows + seqs
        return most

    def trim(self, drafts: Mapping[K, Seq[Draft]], size: PassSize) -> dict[K, list[Draft]]:
        """The nodes that pay, of all drafters' drafts for one pass.

        What a row costs depends on all rows of the pass. What a token is worth does not depend on the prompts in it:
        they are read in any case.
        """
        flat = [(drafter, draft) for drafter, own in drafts.items() for draft in own]
        kept = self._paying(flat, size)
        for (drafter, draft), nodes in zip(flat, kept, strict=True):
            profit = self._profits.get(drafter)
            if profit is not None and draft and not nodes and not draft.borrowed:  # drafted for nothing
                profit.learn(-profit.seconds)
        cut = iter([_kept(draft, nodes) for (_, draft), nodes in zip(flat, kept, strict=True)])
        return {drafter: [next(cut) for _ in own] for drafter, own in drafts.items()}

    def _paying(self, flat: Seq[tuple[Hashable, Draft]], size: PassSize) -> list[list[int]]:
        """The nodes of each draft that pay, likeliest first."""
        reach = [_reach(draft, self._depths.setdefault(drafter, Depths())) for drafter, draft in flat]
        order = sorted(((-p, i, n) for i, row in enumerate(reach) for n, p in enumerate(row)))
        tokens, seconds, rows = float(size.writing), self.cost.at(size.writing), size.rows
        for drafter, _ in flat:
            if drafter in self._profits:  # what the draft has cost counts as well: the step takes so long in any case
                seconds += self._profits[drafter].seconds
        kept: list[list[int]] = [[] for _ in flat]
        before = self.cost.at(rows)
        for negative, index, node in order:
            rows += 1
            after = self.cost.at(rows)
            if -negative * seconds <= (after - before) * tokens:
                break
            kept[index].append(node)
            tokens, seconds, before = tokens - negative, seconds + after - before, after
        return kept

    def forget(self, drafter: Hashable) -> None:
        self._depths.pop(drafter, None)
        self._profits.pop(drafter, None)

    def learn(self, drafter: Hashable, draft: Draft, verdict: Verdict) -> None:
        if draft and not draft.acceptance:
            self._depths.setdefault(drafter, Depths()).learn(draft, verdict)
        profit = self._profits.get(drafter)
        if profit is not None and draft and not draft.borrowed:  # those of others cost nothing
            size = profit.size
            token = self.cost.at(size.writing) / size.writing
            rows = self.cost.at(size.rows + len(draft)) - self.cost.at(size.rows)
            profit.learn(len(verdict.path) * token - profit.seconds - rows)

    def spend(self, drafter: Hashable, seconds: float, drafts: Seq[Draft], size: PassSize) -> None:
        """What drafting cost; a drafter that knows its chances is looked at for free."""
        nodes = sum(len(draft) for draft in drafts if not draft.acceptance)
        self._depths.setdefault(drafter, Depths()).spend(seconds, nodes)
        if drafter in self._profits and drafts:
            self._profits[drafter].spend(seconds, len(drafts), size)


def _kept(draft: Draft, nodes: list[int]) -> Draft:
    first = max(nodes, default=ROOT) == len(nodes) - 1  # nothing in between is missing
    return draft.cut(len(nodes)) if first else draft.keep(sorted(nodes))


def _reach(draft: Draft, depths: Depths) -> list[float]:
    """The chance that each node is kept; never more than its parent's."""
    chances = draft.acceptance or tuple(map(depths.chance, draft.depths()))
    reach: list[float] = []
    for parent, chance in zip(draft.parents, chances, strict=True):
        reach.append(chance * (1.0 if parent == ROOT else reach[parent]))
    return reach
