"""Whether to draft at all, by measured throughput: drafting and plain steps are tried for each size of batch, drafter
and adapter, and the faster way is used.

On a GPU rows of a pass are nearly free while the host's work for each sequence is not, and a large batch without drafts
writes many tokens before the host looks. No cost of a row tells that; only tokens and seconds do.

The constants were chosen with a simulation (LOG, 2026-11-15, midnight); they are not yet measured on a GPU.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from statistics import median

# Passes of each way before one is chosen: the rounds that a device takes before the host looks (drafters/rounds).
FIRST_PASSES = 16
# Steps with drafts that count, or parts of steps: drafts bring many tokens in few of them, so fewer say too little.
COUNTED_STEPS = 64
# How many times as long a pass as the lower quartile a step may count: one that captures a graph, or is the first of a
# process, takes far longer, and is no measure of the steps to come.
LONGEST_STEP = 1.5
# Times as fast as plain steps that drafting has to be: measurements are noisy, and sequences that draft end apart,
# which no step shows: at 16 sequences steps that were 3 % faster made whole requests slower (LOG, 2026-11-17).
MARGIN = 1.07
# Passes after which the slower way is tried again: at first, and at most, where it has never been the faster one.
TRY_AGAIN, TRY_SELDOM = 64, 1024
# Kinds of steps whose speeds are remembered, the latest: each takes some 10 kB.
REMEMBERED = 256
# Passes of one try of the slower way: few, since each loses time where it still is slower.
TRY_PASSES = 3


class ThroughputTrial:
    """What a step is: how many sequences it has, and its `work`, whatever else decides how well drafts do: the drafters
    and adapters of the sequences. A head that pays for a model may cost time with an adapter that changes its texts."""

    def __init__(self) -> None:
        # by the bits of the number of sequences, and their work
        self._kinds: OrderedDict[tuple[int, Hashable], _KindOfStep] = OrderedDict()

    def drafts(self, seqs: int, work: Hashable = None) -> bool:
        """Whether such a step should draft."""
        return self._kind(seqs, work).drafts()

    def prefers_plain(self, seqs: int, work: Hashable = None) -> bool:
        """Whether both ways were tried, and plain steps were faster."""
        return self._kind(seqs, work).prefers_plain

    def prefers_drafts(self, seqs: int, work: Hashable = None) -> bool:
        """Whether both ways were tried, and drafting was faster."""
        return self._kind(seqs, work).prefers_drafts

    def is_due(self, seqs: int, work: Hashable = None) -> bool:
        """Whether drafting, though found to be slower, is to be tried again in the next step."""
        return self._kind(seqs, work).is_due

    def saved(self, seqs: int, work: Hashable = None) -> float | None:
        """Seconds that drafting saves with each token of such a batch; None: one way was not tried yet."""
        return self._kind(seqs, work).saved

    def learn(
        self, seqs: int, drafted: bool, tokens: int, seconds: float, passes: int = 1, work: Hashable = None
    ) -> None:
        """What a step wrote, or a part of it, which may be several passes of the target."""
        self._kind(seqs, work).learn(drafted, tokens, seconds, passes)

    def _kind(self, seqs: int, work: Hashable) -> _KindOfStep:
        key = seqs.bit_length(), work
        found = self._kinds.setdefault(key, _KindOfStep())
        self._kinds.move_to_end(key)
        if len(self._kinds) > REMEMBERED:
            self._kinds.popitem(last=False)
        return found


class _KindOfStep:
    def __init__(self) -> None:
        self.ways: dict[bool, _DraftedSteps | _PlainSteps] = {True: _DraftedSteps(), False: _PlainSteps()}
        self._better, self._again = True, TRY_AGAIN
        self._since = self._trying = 0  # passes of the better way since the other was tried, and of the try

    def drafts(self) -> bool:
        for drafting, way in self.ways.items():
            if way.passes < FIRST_PASSES:
                return drafting
        better = self._faster
        if better != self._better:
            self._better, self._again, self._since, self._trying = better, TRY_AGAIN, 0, 0
        elif self._trying >= TRY_PASSES:  # it was tried for nothing
            self._again, self._since, self._trying = min(2 * self._again, TRY_SELDOM), 0, 0
        return better if self._since < self._again else not better

    @property
    def prefers_plain(self) -> bool:
        return self._tried and not self._faster

    @property
    def prefers_drafts(self) -> bool:
        return self._tried and self._faster

    @property
    def is_due(self) -> bool:
        return self.prefers_plain and self._since >= self._again and self._trying < TRY_PASSES

    @property
    def saved(self) -> float | None:
        return 1.0 / self.ways[False].speed - 1.0 / self.ways[True].speed if self._tried else None

    @property
    def _tried(self) -> bool:
        return all(way.passes >= FIRST_PASSES for way in self.ways.values())

    @property
    def _faster(self) -> bool:
        """Whether drafting is, clearly."""
        return self.ways[True].speed > MARGIN * self.ways[False].speed

    def learn(self, drafted: bool, tokens: int, seconds: float, passes: int) -> None:
        way, known = self.ways[drafted], self._tried
        way.learn(tokens, seconds, passes)
        way.passes += passes
        if not known:
            self._better = not self._tried or self._faster
        elif drafted == self._better:
            self._since += passes
        else:
            self._trying += passes


class _DraftedSteps:
    """Drafts bring many tokens in few steps, so no median of speeds tells. Passes take about as long as each other, but
    for steps that meet a new shape of pass, of which there may be many at first."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=COUNTED_STEPS)  # tokens, seconds, passes
        self.speed = 0.0  # tokens per second
        self.passes = 0

    def learn(self, tokens: int, seconds: float, passes: int) -> None:
        self._steps.append((tokens, seconds, passes))
        each = sorted(took / count for _, took, count in self._steps)
        most = LONGEST_STEP * each[len(each) // 4]
        seconds = sum(min(took, most * count) for _, took, count in self._steps)
        self.speed = sum(tokens for tokens, _, _ in self._steps) / seconds


class _PlainSteps:
    """Every pass brings as many tokens, but a step may be several passes."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=FIRST_PASSES)
        self.speed = 0.0  # tokens per second
        self.passes = 0

    def learn(self, tokens: int, seconds: float, passes: int) -> None:
        self._last.append(tokens / seconds)
        self.speed = median(self._last)
