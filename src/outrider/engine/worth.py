"""What a token of each sequence is worth where somebody waits for all of them: the time that it takes off the end.

Sequences that were handed in together are done when the slowest of them is. One that gets ahead leaves the batch a pass
earlier, which saves the others a row; only of the one that ends last does a token save a whole pass. So rows are spent
on the sequences that are behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

# Steps by which the ends of two sequences must lie apart until it is likely which of them is last, as a multiple of the
# square root of the steps that are left: the other may still catch up (LOG, 2026-11-18, several at once on a CPU, once
# more: 0.5 to 2 do equally well on recorded texts).
SPREAD = 1.0


def of_tokens(steps: Seq[float], known: bool, one: float, all: float) -> list[float]:
    """The worth of a token of each sequence, against the average over them. `steps`: that each is expected to go on;
    `known`: whether all go on to a given length. `one`, `all`: seconds of a pass of one of them and of all."""
    count = len(steps)
    row = (all - one) / (count - 1)
    return [count * (row + (all - count * row) * last) / all for last in _last(steps, known)]


def _last(steps: Seq[float], known: bool) -> list[float]:
    """The probability that each ends last. Where a text may end at any token the steps tell little."""
    most = max(steps)
    scale = max(1.0, SPREAD * math.sqrt(most) if known else most)
    weights = [math.exp((each - most) / scale) for each in steps]
    total = sum(weights)
    return [weight / total for weight in weights]
