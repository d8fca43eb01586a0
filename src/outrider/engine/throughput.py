"""Whether to draft at all, by measured throughput: drafting and plain steps are measured for each size of batch, each
drafter and adapter, and the faster way is used.

On a GPU rows of a pass are nearly free while the host's work for each sequence is not, and a large batch without drafts
writes many tokens before the host looks. No cost of a row tells that; only tokens and seconds do.

To find out costs time, so it is bounded. Plain steps come first, which lose nothing. What does not pay with some
sequences is not tried with more of them. Every try is measured by what it loses, and the next one waits until that is a
small share of the time since, and of what the batch at hand still has to write.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from statistics import median

# Sequences above which nobody drafts: rounds have graphs for as many (drafters/rounds/writer.py), and above them a row
# costs as much as a token (LOG, 2026-11-18, what finding out costs on a GPU).
LARGEST = 64
# Passes of a step while a way is tried, its first part included, which is not measured: the host begins in it.
FIRST_PASSES = 16
# The same of the first look at drafts, after which it may be clear that they are slower.
FIRST_LOOK = 8
# Measured passes of each way after which one is chosen.
MEASURED = 8
# Steps with drafts that count, or parts of steps: drafts bring many tokens in few of them, so fewer say too little.
COUNTED_STEPS = 64
# How many times as long a pass as the lower quartile a step may count: one that captures a graph, or is the first of a
# process, takes far longer, and is no measure of the steps to come.
LONGEST_STEP = 1.5
# Times as fast as plain steps that drafting has to be, and still be once it was chosen: measurements are noisy, and
# texts that draft end apart, so that steps with fewer of them begin anew (16 at once: 4 times, 1.5 ms each of some 87).
MARGIN, STAYS = 1.07, 1.03
# Standard deviations by which drafting is believed to be faster than it was measured to be, while few rounds of few
# texts are known: a round of one text writes as much more or less than the average as that has, by the square root of
# the rounds and texts. A wrong choice for plain steps would stay for long, a wrong one for drafts corrects itself.
OPTIMISM = 1.0
# Passes of the better way before the other is tried again, at least.
TRY_AGAIN = 64
# Share of the time since the last try, and of the time that the batch still needs, that a try may lose.
SHARE_SINCE, SHARE_LEFT = 0.005, 0.01
# Rounds of each text with drafts after which their speed is known well; with fewer, and where drafting may well be the
# faster way, a try may lose as much more.
WELL_KNOWN = 256
# Seconds after which the other way is tried though that loses more, since machines and texts change, unless it would
# lose a larger share of that time.
SELDOM, SHARE_SELDOM = 60.0, 0.02
# Passes of a try after which it is over.
TRY_PASSES = 8
# Plain passes that a try is assumed to lose where none was made yet; and times as long as a plain pass that a pass
# counts at most in what a try has lost: what a device does once it will not do again.
ASSUMED_LOSS, LARGEST_LOSS = 8.0, 8.0
# Kinds of steps whose speeds are remembered, the latest: each takes some 10 kB.
REMEMBERED = 256


class ThroughputTrial:
    """What a step is: how many sequences it has, and its `work`, whatever else decides how well drafts do: the drafters
    and adapters of the sequences. A head that pays for a model may cost time with an adapter that changes its texts.
    `left`: tokens that the longest of the sequences is expected to write still."""

    def __init__(self) -> None:
        # by the bits of the number of sequences, and their work
        self._kinds: OrderedDict[tuple[int, Hashable], _KindOfStep] = OrderedDict()
        self.tries = 0  # steps in which it was found out whether the way that is not used has become the faster one

    def drafts(self, seqs: int, work: Hashable = None, left: float = 0.0) -> bool:
        """Whether such a step should draft."""
        return seqs <= LARGEST and self._kind(seqs, work).drafts(left)

    def prefers_plain(self, seqs: int, work: Hashable = None) -> bool:
        """Whether plain steps are known to be faster."""
        return seqs > LARGEST or self._kind(seqs, work).prefers_plain

    def prefers_drafts(self, seqs: int, work: Hashable = None) -> bool:
        """Whether drafting is known to be faster."""
        return seqs <= LARGEST and self._kind(seqs, work).prefers_drafts

    def is_due(self, seqs: int, work: Hashable = None, left: float = 0.0) -> bool:
        """Whether drafting, though found to be slower, is to be tried again in the next step."""
        return seqs <= LARGEST and self._kind(seqs, work).drafts_are_due(left)

    def longest_try(self, seqs: int, work: Hashable = None) -> int:
        """Passes of a step that drafts where drafting is not known to be faster."""
        return FIRST_PASSES if self._kind(seqs, work).looked else FIRST_LOOK

    def pass_seconds(self, seqs: int, work: Hashable = None) -> tuple[float, float]:
        """Of a pass that drafts, its draft included, and of a plain one, for measurement; 0: not measured."""
        ways = self._kind(seqs, work).ways
        return ways[True].each, ways[False].each

    def saved(self, seqs: int, work: Hashable = None) -> float | None:
        """Seconds that drafting saves with each token of such a batch; None: one way was not tried yet."""
        return self._kind(seqs, work).saved

    def learn(
        self,
        seqs: int,
        drafted: bool,
        tokens: float,
        seconds: float,
        passes: int = 1,
        work: Hashable = None,
        begins: bool = False,
    ) -> None:
        """What a step wrote, or a part of it, which may be several passes of the target. `begins`: it is the first part
        of a step, in whose time the host also began it: it is no measure of speed, but of what a try costs."""
        if seqs <= LARGEST:
            self.tries += self._kind(seqs, work).learn(seqs, drafted, tokens, seconds, passes, begins)

    def charge(self, seqs: int, work: Hashable, seconds: float) -> None:
        """A try of drafts took as long to be made ready: prompts were read for it."""
        if seqs <= LARGEST:
            self._kind(seqs, work).charge(seconds)

    def _kind(self, seqs: int, work: Hashable) -> _KindOfStep:
        key = seqs.bit_length(), work
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = _KindOfStep(self._fewer(*key))
        self._kinds.move_to_end(key)
        if len(self._kinds) > REMEMBERED:
            self._kinds.popitem(last=False)
        return found

    def _fewer(self, bits: int, work: Hashable) -> bool:
        """Whether drafts do not pay with fewer sequences: then a row costs less, and each has more of them."""
        known = (self._kinds.get((fewer, work)) for fewer in range(bits - 1, 0, -1))
        return next((kind.prefers_plain for kind in known if kind is not None and kind.is_tried), False)


class _KindOfStep:
    def __init__(self, plain: bool = False) -> None:
        """`plain`: drafting is expected to be slower."""
        self.ways: dict[bool, _DraftedSteps | _PlainSteps] = {True: _DraftedSteps(), False: _PlainSteps()}
        self._expected, self._judged = plain, 0  # rounds of each text with drafts that were measured
        self._better = False
        self._since, self._passes = 0.0, 0  # seconds and passes of the better way since the other was tried
        self._trying, self._losing = 0, 0.0  # passes of this try, and seconds that it has lost
        self._lost: float | None = None  # in the last try; None: there was none

    def drafts(self, left: float) -> bool:
        if not self._known:
            return self.ways[False].measured >= MEASURED
        better = self._faster
        if better != self._better:
            self._better, self._since, self._passes = better, 0.0, 0
            self._trying, self._losing = 0, 0.0
        elif self._trying >= TRY_PASSES:  # it was tried for nothing
            self._lost, self._since, self._passes = max(self._losing, 0.0), 0.0, 0
            self._trying, self._losing = 0, 0.0
        return better != self._due(left)

    def drafts_are_due(self, left: float) -> bool:
        return self.prefers_plain and not self._better and self._trying < TRY_PASSES and self._due(left)

    def _due(self, left: float) -> bool:
        """Whether the slower way is to be tried: now, or still."""
        if self._trying:
            return True
        each, lost = self.ways[False].each, self._expected_loss()
        cheap = lost <= SHARE_LEFT * left * each and lost <= SHARE_SINCE * self._since
        return self._passes >= TRY_AGAIN and (cheap or self._since >= max(SELDOM, lost / SHARE_SELDOM))

    def _expected_loss(self) -> float:
        """Seconds of a try."""
        drafted, plain = self.ways[True], self.ways[False]
        if self._better:
            return FIRST_PASSES * plain.each * (1.0 - plain.speed / drafted.speed)
        if self._lost is None:
            return ASSUMED_LOSS * plain.each
        close = drafted.speed * (1.0 + 2.0 * self._doubt) > MARGIN * plain.speed
        return self._lost * (min(1.0, self._judged / WELL_KNOWN) if close else 1.0)

    @property
    def _doubt(self) -> float:
        return OPTIMISM / math.sqrt(max(1, self._judged))

    @property
    def prefers_plain(self) -> bool:
        return self._known and not self._faster

    @property
    def prefers_drafts(self) -> bool:
        return self._known and self._faster

    @property
    def saved(self) -> float | None:
        speeds = self.ways[False].speed, self.ways[True].speed
        return 1.0 / speeds[0] - 1.0 / speeds[1] if self.is_tried and all(speeds) else None

    @property
    def is_tried(self) -> bool:
        enough = all(way.measured >= MEASURED for way in self.ways.values())
        return enough or (self.looked and not self._faster)

    @property
    def looked(self) -> bool:
        """Whether drafts were seen, if only for a few rounds."""
        return self.ways[True].measured >= FIRST_LOOK // 2

    @property
    def _known(self) -> bool:
        return self.is_tried or self._expected

    @property
    def _faster(self) -> bool:
        """Whether drafting is, clearly; where it is used, it need not be as clear."""
        drafted, plain = self.ways[True], self.ways[False]
        if not self.looked:
            return False
        return (1.0 + self._doubt) * drafted.speed > (STAYS if self._better else MARGIN) * plain.speed

    def learn(self, seqs: int, drafted: bool, tokens: float, seconds: float, passes: int, begins: bool) -> bool:
        """Whether a try begins with it."""
        known, way = self._known, self.ways[drafted]
        if not begins:
            way.learn(tokens, seconds, passes)
            self._judged += passes * seqs * drafted
        if not known:
            if drafted and self.ways[False].speed:
                self._lost = (self._lost or 0.0) + self._loss(tokens, seconds, passes, False)
            self._better = self.is_tried and self._faster
            return False
        if drafted == self._better:
            self._since, self._passes = self._since + seconds, self._passes + passes
            return False
        self._losing += self._loss(tokens, seconds, passes, self._better)
        self._trying += passes
        return self._trying == passes

    def charge(self, seconds: float) -> None:
        self._losing += seconds

    def _loss(self, tokens: float, seconds: float, passes: int, better: bool) -> float:
        """Seconds more than the better way would have taken."""
        speed = self.ways[better].speed
        counted = min(seconds, LARGEST_LOSS * passes * (self.ways[False].each or seconds))
        return counted - tokens / speed if speed else 0.0


class _DraftedSteps:
    """Drafts bring many tokens in few steps, so no median of speeds tells. Passes take about as long as each other, but
    for steps that meet a new shape of pass, of which there may be many at first."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=COUNTED_STEPS)  # tokens, seconds, passes
        self.speed = self.each = 0.0  # tokens per second; seconds of a pass
        self.measured = 0  # passes

    def learn(self, tokens: float, seconds: float, passes: int) -> None:
        self.measured += passes
        self._steps.append((tokens, seconds, passes))
        each = sorted(took / count for _, took, count in self._steps)
        most = LONGEST_STEP * each[len(each) // 4]
        seconds = sum(min(took, most * count) for _, took, count in self._steps)
        self.speed = sum(tokens for tokens, _, _ in self._steps) / seconds
        self.each = seconds / sum(count for _, _, count in self._steps)


class _PlainSteps:
    """Every pass brings as many tokens, but a step may be several passes."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, float]] = deque(maxlen=FIRST_PASSES)
        self.speed = self.each = 0.0  # tokens per second; seconds of a pass
        self.measured = 0  # passes

    def learn(self, tokens: float, seconds: float, passes: int) -> None:
        self.measured += passes
        self._last.append((tokens / seconds, seconds / passes))
        self.speed, self.each = (median(values) for values in zip(*self._last, strict=True))
