"""Whether to draft at all, by the clock alone: both ways are tried for each size of batch, and the faster one is used.

On a GPU rows of a pass are nearly free while the host's work for each sequence is not, and a large batch without drafts
writes many tokens before the host looks. No cost of a row tells that; only tokens and seconds do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

TRIES = 9  # the median of so many steps counts: a step that captures a graph is no measure
MARGIN = 1.03  # by which drafting has to be faster: what is measured is noisy, and not to draft is never wrong by much
AGAIN = 64  # after so many steps the other way is tried
PROBE = 3  # for so many


class Worth:
    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the bits of the number of sequences

    def drafts(self, seqs: int) -> bool:
        """Whether a step of so many sequences should draft."""
        return self._size(seqs).drafts()

    def learn(self, seqs: int, drafted: bool, tokens: int, seconds: float) -> None:
        """What a step wrote."""
        self._size(seqs).speeds[drafted].append(tokens / seconds)

    def _size(self, seqs: int) -> _Size:
        return self._sizes.setdefault(seqs.bit_length(), _Size())


@dataclass(eq=False)
class _Size:
    speeds: dict[bool, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=TRIES) for way in (True, False)}
    )
    steps: int = 0  # since both ways are known

    def drafts(self) -> bool:
        for way, known in self.speeds.items():
            if len(known) < TRIES:
                return way
        better = median(self.speeds[True]) > MARGIN * median(self.speeds[False])
        self.steps += 1
        return better if self.steps % (AGAIN + PROBE) < AGAIN else not better
