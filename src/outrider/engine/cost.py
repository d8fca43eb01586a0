"""The cost of a pass of the target: measured when the model is loaded, and then learned from the passes themselves."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping

from outrider.core.draft import Draft
from outrider.models.base import Feed, Model

# Share of a pass that one more row costs, before anything is measured: as measured for a 4-bit model on a CPU, where
# rows are dearest (LOG, 2026-11-15, the trained head on a CPU).
ASSUMED_ROW = 0.2
# Passes between two fits of the curve: a fit takes about as long as a draft by lookup.
REFIT = 8
# Passes: the weight of the straight line through all averages, against the average of one number of rows. A weight of
# the assumed row instead left rare sizes too dear (LOG, 2026-11-15: lookup on the H200 1.41x instead of 1.53x).
LINE_WEIGHT = 2
# Share of a pass: the least that a further row costs, so that the curve rises and no draft is endless.
CHEAPEST_ROW = 2e-4
# Share of an average by which one pass can move it: a pause of the machine is not the cost of a pass. Chosen by hand.
LARGEST_CHANGE = 0.3
# The least share of what was expected that a pass counts as: others make passes longer, never shorter.
QUICKER = 0.2
# The weight of a pass while passes of known numbers of rows all take that much longer, or shorter, than expected: then
# it is the machine, hardly the rows. And the passes after which a number of rows is known.
CHANGING, FIRST_PASSES = 0.2, 3
# Passes over which the average of one number of rows runs. The machine's own speed is followed apart (`PACE`): with 10
# an average took more of a slow spell for itself (LOG, 2026-11-18, where head and lookup differ).
AVERAGED = 20
# Share of a pass's deviation that counts as the speed of the whole machine at the moment: numbers of rows that were not
# run for a while change with it, or they would stay as dear as they were when others used the machine (LOG,
# 2026-11-17, why auto was slower than the head). About four passes follow a change. Chosen on the simulator's traces.
PACE = 0.3
# Share in what the slowness is known from below which a number of rows counts as not run of late.
LATELY = 0.01
# Rows of the passes that are measured when a model is loaded, seconds after which no further round of them begins, and
# rounds, of which the shortest pass of a size counts: a first request then knows what rows cost. A round takes 40 ms
# beside SmolLM2 and 0.5 s beside a model of 1.5 billion weights.
MEASURED_ROWS, MEASURED_SECONDS, MEASURED_ROUNDS = (1, 2, 3, 4, 6, 8), 0.3, 3
# Passes: the largest weight of one number of rows in the line, so that plain passes do not outvote all others.
HEAVIEST = 20
# Share of the difference by which a measured cost of drafting moves its average, up and down: a draft may take longer
# for reasons of the machine, never shorter (LOG, 2026-11-17: a head whose first draft took 22 ms was hardly asked).
SMOOTHING, SMOOTHING_DOWN = 0.1, 0.3
# Squared rows: the weight of the assumed row in the slope of the line, while all passes have the same number of rows.
SLOPE_WEIGHT = 2.0


class PassCost:
    """Seconds of a pass by its rows: the lower convex hull of robust averages.

    Where memory is the limit the first rows are nearly free, which a straight line cannot tell. A number of rows that
    was seen seldom and looks cheap is tried, and so seen again.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        """`seconds`: what passes were measured to take, by rows."""
        self._seconds = dict(seconds or {})  # average by rows, at a speed of 1
        self._counts = dict.fromkeys(self._seconds, MEASURED_ROUNDS)  # passes by rows
        self._curve = self._fit()  # its corners
        self._known: dict[int, float] = {}  # what was asked of the curve
        self._new = 0  # passes since the fit
        self._slowness = 1.0  # of the machine now, against its average
        self._far = 0  # on which side of what was expected the last pass of a known number of rows was far, if at all
        self._recent: dict[int, float] = {}  # by rows: the share of such passes in what the slowness is known from
        self._fitted = dict(self._seconds)  # the averages when the curve was fitted

    def learn(self, rows: int, seconds: float) -> None:
        count = self._counts[rows] = self._counts.get(rows, 0) + 1
        steady = seconds / self._slowness
        expected = self._seconds.get(rows) or (self.at(rows) / self._slowness if self._far else steady)
        ratio = min(max(steady / expected, QUICKER), 1.0 + LARGEST_CHANGE)
        weight = self._others(rows) / min(count, AVERAGED)
        if self._changes(count, steady / expected - 1.0):
            weight *= CHANGING
        self._seconds[rows] = expected * max(ratio, 1.0 - LARGEST_CHANGE) ** weight
        self._slowness *= ratio**PACE
        self._follow(rows)
        self._new += 1
        if self._new >= REFIT or count < REFIT:
            if count > FIRST_PASSES:
                self._settle()
            self._curve, self._known, self._new = self._fit(), {}, 0

    def _settle(self) -> None:
        """What all averages of late have in common is the machine's: numbers of rows that were not run follow it. Else
        what slow spells leave in the averages and the slowness grows apart for ever, one small, one large."""
        changes = [math.log(self._seconds[rows] / self._fitted[rows]) for rows in self._recent if rows in self._fitted]
        common = math.exp(sum(changes) / max(len(changes), 1))
        for rows in self._recent:
            self._seconds[rows] /= common
        self._slowness *= common
        self._fitted = dict(self._seconds)

    def _changes(self, count: int, deviation: float) -> bool:
        """Whether the machine seems to have become slower or faster: passes of known numbers of rows, one after the
        other, are far from what was expected on the same side."""
        before = self._far
        if count > FIRST_PASSES:
            self._far = (deviation > LARGEST_CHANGE) - (deviation < -LARGEST_CHANGE)
        return self._far != 0 and self._far == before

    def _others(self, rows: int) -> float:
        """The share of passes of other numbers of rows in what is known of the machine's speed now: compared with
        itself alone, a number of rows cannot tell whether it became dearer or the machine slower."""
        return 1.0 - self._recent.get(rows, 0.0)

    def _follow(self, rows: int) -> None:
        recent = self._recent
        for other in list(recent):
            recent[other] *= 1.0 - PACE
            if recent[other] <= LATELY:
                del recent[other]
        recent[rows] = recent.get(rows, 0.0) + PACE

    @property
    def known(self) -> bool:
        """Whether any pass was measured; until then a pass takes one unit of time."""
        return bool(self._seconds)

    def beginning(self) -> PassCost:
        """A new curve that begins with these averages, as if each were of few passes."""
        other = PassCost()
        other._seconds = dict(self._seconds)
        other._counts = {rows: min(count, LINE_WEIGHT) for rows, count in self._counts.items()}
        other._curve, other._slowness = other._fit(), self._slowness
        return other

    def at(self, rows: int) -> float:
        """Seconds of a pass."""
        if rows not in self._known:
            curve = self._curve
            place = bisect_left(curve, rows, key=lambda corner: corner[0])
            (left, low), (right, high) = curve[min(max(place, 1), len(curve) - 1) - 1 :][:2]
            least = low * rows / left if 0 < rows < left else 0.0  # rows are not free, however steep the curve begins
            self._known[rows] = max(low + (high - low) / (right - left) * (rows - left), least)
        return self._known[rows] * self._slowness

    def next_row(self, rows: int) -> float:
        """Seconds that one row more than these takes."""
        return self.at(rows + 1) - self.at(rows)

    def added(self, rows: int, more: int) -> float:
        """The share of a pass of rows + more rows that the last ones take."""
        return 1.0 - self.at(rows) / self.at(rows + more)

    def _fit(self) -> list[tuple[int, float]]:
        """At least two corners; averages of few passes are drawn towards the line through all."""
        a, b = self._line()
        corners: list[tuple[int, float]] = []
        for rows, seconds in sorted(self._seconds.items()):
            weight = self._counts[rows]
            seconds = (weight * seconds + LINE_WEIGHT * (a + b * rows)) / (weight + LINE_WEIGHT)
            while len(corners) > 1 and _slope(corners[-1], (rows, seconds)) <= _slope(*corners[-2:]):
                corners.pop()
            if corners:
                last, before = corners[-1]
                seconds = max(seconds, before + CHEAPEST_ROW * before * (rows - last))
            corners.append((rows, seconds))
        if len(corners) < 2:
            first = corners[0][0] if corners else 0
            corners = [(first, a + b * first), (first + 1, a + b * (first + 1))]
        return corners

    def _line(self) -> tuple[float, float]:
        """a and b of a + b * rows, drawn towards the assumed row while little is known."""
        if not self._seconds:
            return 1.0 - ASSUMED_ROW, ASSUMED_ROW
        weights = {rows: min(count, HEAVIEST) for rows, count in self._counts.items()}
        total = sum(weights.values())
        rows_mean = sum(w * rows for rows, w in weights.items()) / total
        mean = sum(w * self._seconds[rows] for rows, w in weights.items()) / total
        spread = sum(w * (rows - rows_mean) ** 2 for rows, w in weights.items())
        product = sum(w * (rows - rows_mean) * (self._seconds[rows] - mean) for rows, w in weights.items())
        assumed = ASSUMED_ROW * min(self._seconds.values())
        slope = max((product + SLOPE_WEIGHT * assumed) / (spread + SLOPE_WEIGHT), CHEAPEST_ROW * assumed)
        return max(mean - slope * rows_mean, 0.0), slope


def measured(model: Model, id: int = -1) -> PassCost:
    """The costs of a model that has just been loaded, by passes of a sequence of its own."""
    best: dict[int, float] = {}
    begin = time.thread_time()
    sizes = [rows for rows in MEASURED_ROWS if rows < min(model.context, model.capacity)]
    for number in range(1 + MEASURED_ROUNDS):
        if number > 1 and time.thread_time() - begin > MEASURED_SECONDS:
            break
        for rows in sizes if number else sizes[-1:]:  # the first pass reads weights from the disk; the shortest counts
            started = time.thread_time()
            model.forward([Feed(id, [0], Draft.chain([0] * (rows - 1)))])
            best[rows] = min(best.get(rows, math.inf), time.thread_time() - started)
            model.free(id)
    return PassCost(best)


def smoothed(average: float, value: float) -> float:
    """The average moved towards a new value: by a share of the difference, and by no more than that share of itself."""
    return average + (
        SMOOTHING * min(value - average, average) if value > average else SMOOTHING_DOWN * (value - average)
    )


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
