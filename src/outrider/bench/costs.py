"""From the measured cost of passes and drafts to the draft length that pays at an acceptance.

A pass of r rows verifies a chain of r - 1 guesses: one committed token and its draft, with logits for every row. If
each guess is kept with probability p when the one before it was, a chain of k brings (1 - p^(k+1)) / (1 - p) tokens
for the cost of a pass of 1 + k rows and of drafting k tokens; plain decoding brings one token for a pass of one row.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Point:
    """How long something of this size takes: the median, and between what one finds 8 of 10."""

    size: int  # rows of a pass, or tokens of a draft
    ms: float
    low: float
    high: float


@dataclass(frozen=True)
class CostLine:
    """ms = base + slope * rows"""

    base: float
    slope: float


@dataclass(frozen=True)
class BestLength:
    acceptance: float
    length: int  # 0: plain decoding is the fastest
    speed_up: float


@dataclass(frozen=True)
class Costs:
    passes: tuple[Point, ...]  # by rows, from one on
    draft_ms: float = 0.0  # per drafted token

    @property
    def longest(self) -> int:
        """The longest draft whose pass was measured."""
        return self.passes[-1].size - 1

    def pass_ms(self, rows: int) -> float:
        """Measured, or on the straight line between its neighbours."""
        return float(np.interp(rows, [point.size for point in self.passes], [point.ms for point in self.passes]))

    def speed_up(self, acceptance: float, length: int) -> float:
        """Expected, over plain decoding, of a chain each of whose tokens is kept with this probability."""
        tokens = sum(acceptance**depth for depth in range(length + 1))
        return tokens * self.pass_ms(1) / (self.pass_ms(1 + length) + length * self.draft_ms)

    def best(self, acceptance: float) -> BestLength:
        length = max(range(1, self.longest + 1), key=lambda length: self.speed_up(acceptance, length))
        speed_up = self.speed_up(acceptance, length)
        return BestLength(acceptance, length, speed_up) if speed_up > 1 else BestLength(acceptance, 0, 1.0)

    @property
    def break_even(self) -> float | None:
        """The acceptance from which on a draft of one token pays; None: it never does."""
        needed = (self.pass_ms(2) + self.draft_ms) / self.pass_ms(1) - 1
        return max(needed, 0.0) if needed < 1 else None

    @property
    def spread(self) -> float:
        """How far apart 8 of 10 passes of one size lie, as a share of the median; of the typical size."""
        return statistics.median((point.high - point.low) / point.ms for point in self.passes)

    @property
    def line(self) -> CostLine:
        """Least squares through the medians."""
        slope, base = np.polyfit([point.size for point in self.passes], [point.ms for point in self.passes], 1)
        return CostLine(float(base), float(slope))
