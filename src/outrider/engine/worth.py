"""Whether to draft at all, by the clock alone: both ways are tried for each size of batch, and the faster one is used.

On a GPU rows of a pass are nearly free while the host's work for each sequence is not, and a large batch without drafts
writes many tokens before the host looks. No cost of a row tells that; only tokens and seconds do.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from statistics import median

TRIES = 16  # steps of each way before one is chosen
LAST = 64  # steps with drafts that count
PAUSE = 1.5  # how much longer than usual a step may take; what captures a graph takes far longer and is no measure
MARGIN = 1.03  # by which drafting has to be faster: what is measured is noisy, and not to draft is never wrong by much
AGAIN, SELDOM = 64, 1024  # steps after which the other way is tried: at first, and where it has never been better
PROBE = 3  # for so many


class Worth:
    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the bits of the number of sequences

    def drafts(self, seqs: int) -> bool:
        """Whether a step of so many sequences should draft."""
        return self._size(seqs).drafts()

    def learn(self, seqs: int, drafted: bool, tokens: int, seconds: float) -> None:
        """What a step wrote."""
        self._size(seqs).ways[drafted].learn(tokens, seconds)

    def _size(self, seqs: int) -> _Size:
        return self._sizes.setdefault(seqs.bit_length(), _Size())


class _Size:
    def __init__(self) -> None:
        self.ways: dict[bool, _Drafting | _Plain] = {True: _Drafting(), False: _Plain()}
        self._better, self._again = True, AGAIN
        self._steps = 0  # since the other way was tried

    def drafts(self) -> bool:
        for drafting, way in self.ways.items():
            if len(way) < TRIES:
                return drafting
        better = self.ways[True].speed > MARGIN * self.ways[False].speed
        self._steps += 1
        if better != self._better:
            self._better, self._again, self._steps = better, AGAIN, 1
        elif self._steps == self._again + PROBE:  # it was tried for nothing
            self._again, self._steps = min(2 * self._again, SELDOM), 0
        return better if self._steps < self._again else not better


class _Drafting:
    """Drafts bring many tokens in few steps, so no median of speeds tells. Steps take about as long as each other, but
    for those that meet a new shape of pass, of which there may be many at first."""

    def __init__(self) -> None:
        self._tokens: deque[int] = deque(maxlen=LAST)
        self._seconds: deque[float] = deque(maxlen=LAST)
        self.speed = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    def learn(self, tokens: int, seconds: float) -> None:
        self._tokens.append(tokens)
        self._seconds.append(seconds)
        steps = sorted(self._seconds)
        most = PAUSE * steps[len(steps) // 4]
        usual = bisect(steps, most)
        self.speed = sum(self._tokens) / (sum(steps[:usual]) + most * (len(steps) - usual))


class _Plain:
    """Every pass brings as many tokens, but a step may be several passes."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=TRIES)
        self.speed = 0.0

    def __len__(self) -> int:
        return len(self._last)

    def learn(self, tokens: int, seconds: float) -> None:
        self._last.append(tokens / seconds)
        self.speed = median(self._last)
