"""Whether to draft at all, by measured throughput: drafting and plain steps are measured for each size of batch, each
drafter and adapter, and the faster way is used.

On a GPU rows of a pass are nearly free while the host's work for each sequence is not, and a large batch without drafts
writes many tokens before the host looks. No cost of a row tells that; only tokens and seconds do.

To find out costs time, so it is bounded. Plain steps come first, which lose nothing. Where drafts do not pay with some
sequences, or not by much, they are not tried with more of them. The first look waits until it is a small share of the
batch at hand, or of all such batches. Every try is measured by what it loses, and the next one waits until that is a
small share of the time since, and of what the batch at hand still has to write.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from statistics import median

# Sequences above which nobody drafts: rounds have graphs for as many (drafters/rounds/writer.py), and above them a row
# costs as much as a token (LOG, 2026-11-18, what finding out costs on a GPU).
LARGEST = 64
# Passes of a step while a way is tried, its first part included, which is not measured: the host begins in it.
FIRST_PASSES = 16
# Measured passes of each way after which one is chosen.
MEASURED = 8
# Steps with drafts that count, or parts of steps: drafts bring many tokens in few of them, so fewer say too little.
COUNTED_STEPS = 64
# How many times as long a pass as the lower quartile a step may count: one that captures a graph, or is the first of a
# process, takes far longer, and is no measure of the steps to come.
LONGEST_STEP = 1.5
# The same while there are fewer parts than this: rounds take about as long as each other, and one of few that took
# longer would decide.
FEW_PARTS, LONGEST_OF_FEW = 8, 1.1
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
# Plain passes that a try is assumed to lose where none was made yet, of any batch and for each of its texts: the head
# reads prompts, and rounds begin (LOG, 2026-11-18, what finding out still costs). Not in it: that prompts which the
# target has in its cache are run again for the head, which takes 0.3 of a pass for one of 100 tokens.
ASSUMED_LOSS, ASSUMED_LOSS_EACH = 2.0, 0.14
# Share of the time of a whole batch that the first look at drafts may lose, and that drafts which may well be faster,
# but were not seen to be, may lose until that is known: of 16 texts those of 61 tokens are long enough, of 64 those of
# 157.
SHARE_FIRST = 0.07
# What is left of the speed-up of drafts with each doubling of the sequences, as is expected before it is measured: each
# has fewer rows, and there are more texts of which the slowest counts. Seen: 0.83 to 0.99 (docs/benchmarks/gpu-h200).
HALF_AS_MANY_ROWS = 0.9
# Plain passes that beginning a step with drafts counts at most, and the last ones of which the least counts: the first
# ones may compile and capture.
LONGEST_BEGIN, BEGINS = 8.0, 4
# Rounds of each text with drafts after which their speed is known well; with fewer, and where drafting may be the
# faster way by as many standard deviations, a try may lose as much more.
WELL_KNOWN, MAY_BE = 256, 3.0
# Seconds after which the other way is tried though that loses more, since machines and texts change, unless it would
# lose a larger share of that time.
SELDOM, SHARE_SELDOM = 60.0, 0.02
# Passes of a try after which it is over.
TRY_PASSES = 8
# Times as long as a plain pass that a pass counts at most in what a try has lost: what a device does once it will not
# do again.
LARGEST_LOSS = 8.0
# Kinds of steps whose speeds are remembered, the latest: each takes some 10 kB.
REMEMBERED = 256


@dataclass(frozen=True)
class BatchWork:
    """What decides how well drafts do, beside the size of the batch."""

    drafters: Hashable  # and adapters
    together: bool = False  # they are one call, which ends with the slowest of them; else each is waited for by itself


class ThroughputTrial:
    """What a step is: how many sequences it has, and its `work`, whatever else decides how well drafts do. A head that
    pays for a model may cost time with an adapter that changes its texts. `left`: tokens that the longest of the
    sequences is expected to write still; `whole`: in all."""

    def __init__(self) -> None:
        # by the bits of the number of sequences, and their work
        self._kinds: OrderedDict[tuple[int, Hashable], _KindOfStep] = OrderedDict()
        self.tries = 0  # steps in which it was found out whether the way that is not used has become the faster one

    def drafts(self, seqs: int, work: Hashable = None, left: float = 0.0, whole: float = math.inf) -> bool:
        """Whether such a step should draft."""
        return seqs <= LARGEST and self._kind(seqs, work, whole).drafts(left)

    def prefers_plain(self, seqs: int, work: Hashable = None, whole: float = math.inf) -> bool:
        """Whether plain steps are known to be faster, or such a batch is too short to find out."""
        return seqs > LARGEST or self._kind(seqs, work, whole).prefers_plain

    def prefers_drafts(self, seqs: int, work: Hashable = None, whole: float = math.inf) -> bool:
        """Whether drafting is known to be faster."""
        return seqs <= LARGEST and self._kind(seqs, work, whole).prefers_drafts

    def is_due(self, seqs: int, work: Hashable = None, left: float = 0.0, whole: float = math.inf) -> bool:
        """Whether drafting, though found to be slower, is to be tried again in the next step."""
        return seqs <= LARGEST and self._kind(seqs, work, whole).drafts_are_due(left)

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

    def _kind(self, seqs: int, work: Hashable, whole: float | None = None) -> _KindOfStep:
        key = seqs.bit_length(), work
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = _KindOfStep(seqs, self._expected(*key))
        self._kinds.move_to_end(key)
        if len(self._kinds) > REMEMBERED:
            self._kinds.popitem(last=False)
        if whole is not None:
            found.whole = whole
        return found

    def _expected(self, bits: int, work: Hashable) -> bool | None:
        """Whether drafts are expected to pay, by what is known of other numbers of sequences, and where others wait;
        None: nothing tells. With fewer a row costs less, and each has more of them."""
        for other in range(bits, 0, -1):
            for kind, together in self._tried(other, work):
                if kind.prefers_plain and (other < bits or _together(work) >= together):
                    return False
                if other < bits:
                    return False if kind.gain * HALF_AS_MANY_ROWS ** (bits - other) < MARGIN else None
        for other in range(bits, LARGEST.bit_length() + 1):
            for kind, together in self._tried(other, work):
                if kind.prefers_drafts and (together >= _together(work) or bits == 1):
                    return True
        return None

    def _tried(self, bits: int, work: Hashable) -> Iterator[tuple[_KindOfStep, bool]]:
        """Such steps that were tried both ways, with whether they are of a call: of the same work, and of the same
        drafters for others who wait."""
        alike = [work, replace(work, together=not work.together)] if isinstance(work, BatchWork) else [work]
        for each in alike:
            kind = self._kinds.get((bits, each))
            if kind is not None and kind.is_tried:
                yield kind, _together(each)


def _together(work: Hashable) -> bool:
    return isinstance(work, BatchWork) and work.together


class _KindOfStep:
    def __init__(self, seqs: int, expected: bool | None) -> None:
        """`expected`: whether drafting is expected to be faster; None: it has to be tried."""
        self.ways: dict[bool, _DraftedSteps | _PlainSteps] = {True: _DraftedSteps(), False: _PlainSteps()}
        self.whole = math.inf  # tokens of the longest text of such a batch
        self._seqs, self._expected = seqs, expected
        self._judged = 0  # rounds of each text with drafts that were measured
        self._better = bool(expected)
        self._since, self._passes = 0.0, 0  # seconds and passes of the better way since the other was tried
        self._tries = False  # whether the step at hand is a try of the way that is slower
        self._trying, self._losing = 0, 0.0  # passes of this try, and seconds that it has lost
        self._lost: float | None = None  # in the last try; None: there was none
        self._over, self._time = 0.0, 0.0  # seconds that drafts took over plain steps, in all; of all steps
        self._allowed = 0.0  # seconds that they may, by the first batch that drafted
        self._begins: deque[tuple[float, int]] = deque(maxlen=BEGINS)  # seconds and passes of parts that begin drafts

    def drafts(self, left: float) -> bool:
        if not self._known:  # what is found out late in a batch helps the next one only
            return self.ways[False].measured >= MEASURED and self._affordable and self._is_early(left)
        better = self._faster
        if better != self._better:
            self._better, self._since, self._passes = better, 0.0, 0
            self._trying, self._losing = 0, 0.0
        elif self._trying >= TRY_PASSES:  # it was tried for nothing
            self._lost, self._since, self._passes = max(self._losing, 0.0), 0.0, 0
            self._trying, self._losing = 0, 0.0
        self._tries = self._due(left)
        return better != self._tries

    def drafts_are_due(self, left: float) -> bool:
        known = self._known and not self._faster
        return known and not self._better and self._trying < TRY_PASSES and self._due(left)

    def _due(self, left: float) -> bool:
        """Whether the slower way is to be tried: now, or still."""
        if self._trying:
            return True
        each, lost = self.ways[False].each, self._expected_loss()
        cheap = lost <= SHARE_LEFT * left * each and lost <= SHARE_SINCE * self._since
        return self._passes >= TRY_AGAIN and (cheap or self._since >= max(SELDOM, lost / SHARE_SELDOM))

    def _expected_loss(self) -> float:
        """Seconds of a try."""
        plain = self.ways[False]
        if self._better:
            return FIRST_PASSES * plain.each * (1.0 - 1.0 / max(1.0, self.gain))
        assumed = self._assumed_loss * plain.each
        if self._lost is None:
            return assumed
        close = self.gain * (1.0 + MAY_BE * self._doubt) > MARGIN  # what the first look lost may not be known in full
        return max(self._lost, assumed) * min(1.0, self._judged / WELL_KNOWN) if close else self._lost

    def _is_early(self, left: float) -> bool:
        """Whether most of the batch is still to be written."""
        return math.isinf(self.whole) or 2.0 * left >= self.whole

    @property
    def _assumed_loss(self) -> float:
        """Plain passes of the first look at drafts."""
        return ASSUMED_LOSS + ASSUMED_LOSS_EACH * self._seqs

    @property
    def _affordable(self) -> bool:
        """Whether that is little for the batch at hand, or for all such batches so far; once begun it goes on."""
        lost, each = self._assumed_loss, self.ways[False].each
        little = lost <= SHARE_FIRST * self.whole or 0.0 < lost * each <= SHARE_SINCE * self._since
        return little or self.ways[True].measured > 0

    @property
    def _doubt(self) -> float:
        """As much faster than measured drafting may well be, while it loses little to find out."""
        drafted = self.ways[True]
        allowed = self._allowed + SHARE_SINCE * self._time
        over = self._over + FIRST_PASSES * drafted.each * max(0.0, 1.0 - self.gain)
        return OPTIMISM / math.sqrt(max(1, self._judged)) if over <= allowed else 0.0

    @property
    def prefers_plain(self) -> bool:
        return not self._faster if self._known else not self._affordable

    @property
    def prefers_drafts(self) -> bool:
        return self._known and self._faster

    @property
    def saved(self) -> float | None:
        speeds = self.ways[False].speed, self.ways[True].speed
        return 1.0 / speeds[0] - 1.0 / speeds[1] if self.is_tried and all(speeds) else None

    @property
    def is_tried(self) -> bool:
        return all(way.measured >= MEASURED for way in self.ways.values())

    @property
    def gain(self) -> float:
        """Times as fast as plain steps that drafting was over a whole batch: to begin it takes time."""
        drafted, plain = self.ways[True], self.ways[False]
        if not drafted.speed or not plain.speed:
            return 0.0
        usual = (max(0.0, seconds - passes * drafted.each) for seconds, passes in self._begins)
        begin = min((*usual, LONGEST_BEGIN * plain.each))
        return 1.0 / (plain.speed / drafted.speed + begin / (max(1.0, self.whole) * plain.each))

    @property
    def _known(self) -> bool:
        return self.is_tried or self._expected is not None

    @property
    def _faster(self) -> bool:
        """Whether drafting is, clearly; where it is used, it need not be as clear."""
        if not self.is_tried:
            return bool(self._expected)
        return (1.0 + self._doubt) * self.gain > (STAYS if self._better else MARGIN)

    def learn(self, seqs: int, drafted: bool, tokens: float, seconds: float, passes: int, begins: bool) -> bool:
        """Whether a try begins with it."""
        known, way = self._known, self.ways[drafted]
        self._time += seconds
        if drafted and self.ways[False].speed:
            self._over += self._loss(tokens, seconds, passes, False)
            self._allowed = self._allowed or SHARE_FIRST * self.whole * self.ways[False].each
        if not begins:
            way.learn(tokens, seconds, passes)
            self._judged += passes * seqs * drafted
        elif drafted:
            self._begins.append((seconds, passes))
        if not known:
            if drafted and self.ways[False].speed:
                self._lost = (self._lost or 0.0) + self._loss(tokens, seconds, passes, False)
            elif not drafted:
                self._since += seconds
            if self.is_tried:
                self._better, self._since = self._faster, 0.0
            return False
        if drafted == self._better:
            self._since, self._passes = self._since + seconds, self._passes + passes
        if drafted == self._better or not self._tries:
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
        most = (LONGEST_STEP if len(each) >= FEW_PARTS else LONGEST_OF_FEW) * each[len(each) // 4]
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
