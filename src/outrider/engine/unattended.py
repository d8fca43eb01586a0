"""Steps that need no host: the device writes several tokens of each sequence, with drafts or by itself, in parts; the
host commits one part while the device is at the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence as Seq
from time import perf_counter

from torch import Tensor

from outrider.core.draft import EMPTY
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.base import Drafter, JudgedSteps, Step
from outrider.engine import bulk, judge
from outrider.engine.drafting import DrafterPool
from outrider.engine.policy import DraftingPolicy
from outrider.engine.progress import BatchProgress
from outrider.engine.throughput import FIRST_PASSES, BatchWork
from outrider.models.base import Model, Paged, SharesPrefixes

# Passes of a step without the host after which the engine looks around again where nobody has come or ended meanwhile:
# whether drafting still pays can wait for some 70 ms of a small model. Between two steps the device has nothing to do
# for some 0.7 ms of plain writing (LOG, 2026-11-18, where a request's time goes on a GPU).
LONGEST_STEP = 128

Learn = Callable[[float, float, int, bool], None]  # tokens, seconds, passes; whether it is the first part of a step


class UnattendedSteps:
    def __init__(
        self,
        model: Model,
        pool: DrafterPool,
        policy: DraftingPolicy | None,
        wait: Callable[[], None],
        interrupted: Callable[[], bool],
        queued: Callable[[], bool],
        together: Callable[[], bool],
    ) -> None:
        """`wait` is called while the device works; `interrupted`: whether somebody waits for the step to end; `queued`:
        whether somebody waits for the place of a sequence that ends; `together`: whether the sequences that run are one
        call, which ends with the last of them."""
        self._model, self._pool, self._policy = model, pool, policy
        self._wait, self._interrupted, self._queued, self._together = wait, interrupted, queued, together
        self._prefixes = model if isinstance(model, SharesPrefixes) else None
        self._progress = BatchProgress()

    def work(self, seqs: Seq[Sequence]) -> Hashable:
        drafters = frozenset((seq.draft, "" if seq.adapter is None else seq.adapter.key) for seq in seqs)
        return BatchWork(drafters, len(seqs) > 1 and self._together())

    def drafts(self, seqs: Seq[Sequence]) -> bool:
        """Whether the next step of such a batch should draft."""
        policy = self._policy
        if policy is None:
            return True
        return policy.trial.drafts(len(seqs), self.work(seqs), policy.most_left(seqs), policy.longest(seqs))

    def prefers_plain(self, seqs: Seq[Sequence]) -> bool:
        """Whether such a batch is known to be faster without drafts, or is too short to find out."""
        policy = self._policy
        return policy is not None and policy.trial.prefers_plain(len(seqs), self.work(seqs), policy.longest(seqs))

    def is_due(self, seqs: Seq[Sequence]) -> bool:
        """Whether drafts of such a batch are tried again now, though they were found to be slower."""
        policy = self._policy
        if policy is None:
            return False
        return policy.trial.is_due(len(seqs), self.work(seqs), policy.most_left(seqs), policy.longest(seqs))

    def rests(self, seqs: Seq[Sequence]) -> bool:
        """Whether heads have nothing to do for such a batch: it is written plainly, and no try is due."""
        return self.prefers_plain(seqs) and not self.is_due(seqs)

    def draft(self, drafter: Drafter, running: Seq[Sequence], learn: Learn | None = None) -> bool:
        """Steps that the drafter and the target take together; False: they could not. `learn`: what each part wrote."""
        wrote, seqs, share, together = False, list(running), _PartShare(running, learn), self._together()
        for part in self._pool.write(drafter, seqs, self._wait, self._going(seqs, self._longest_drafting(seqs))):
            wrote, tokens = True, self._progress(seqs, part, together)
            for seq, steps in zip(seqs, part, strict=True):
                if seq.finish is None:
                    self._commit(seq, steps, drafter.name)
            share(max(len(steps.tokens) for steps in part), tokens)
        return wrote

    def write(self, running: Seq[Sequence], paged: Paged, tried: bool, learn: Learn | None = None) -> None:
        """Tokens that the target writes by itself. `tried`: drafts may be faster. `learn`: what each part wrote. Who
        reads its states is shown them, unless plain writing is known to be faster: that takes time, and memory."""
        begin, plain = perf_counter(), self.prefers_plain(running)
        shown = self._followed(running) if plain else list(running)
        layers = self._pool.layers(shown)
        if len(shown) < len(running):
            self._pool.rest([seq for seq in running if seq not in shown])
        seqs, steps, first, share = list(running), 0, False, _PartShare(running, learn)
        going = self._going(seqs, lambda: LONGEST_STEP if plain or not tried else FIRST_PASSES)
        for written in bulk.write(seqs, self._model, paged, layers, self._wait, going):
            steps, first = steps + len(written.tokens), first or written.first
            if written.hidden is not None:
                self._show(seqs, shown, written.hidden, layers)
            share(len(written.tokens), float(len(seqs) * len(written.tokens)), counts=not written.first)
        if self._policy is not None and not first:
            self._policy.cost.learn(len(seqs), (perf_counter() - begin) / steps)

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._progress.end(seq)

    def _followed(self, running: Seq[Sequence]) -> list[Sequence]:
        """Of a batch that is written plainly: the sequences that drafts are tried for as soon as they can be for all,
        and whose states the drafter has."""
        drafter = self._pool.drafters[running[0].draft]
        if not self.is_due(running) or any(self._pool.drafters[seq.draft] is not drafter for seq in running):
            return []
        return [seq for seq in running if self._pool.writes(drafter, [seq])]

    def _longest_drafting(self, seqs: Seq[Sequence]) -> Callable[[], int]:
        """Passes of a step that drafts, by what is known of such steps while it goes on."""
        policy, work = self._policy, self.work(seqs)
        if policy is None:
            return lambda: LONGEST_STEP
        whole = policy.longest(seqs)
        return lambda: LONGEST_STEP if policy.trial.prefers_drafts(len(seqs), work, whole) else FIRST_PASSES

    def _going(self, seqs: Seq[Sequence], most: Callable[[], int]) -> Callable[[int], bool]:
        """Whether a step may go on after as many passes, of `most`: nobody waits for its end, and nobody has ended, or
        not all have, and nobody waits for their places. Where it is to be found out which way is faster, there are
        parts as later, so that the two are compared as they will run."""

        def going(begun: int) -> bool:
            if begun >= most() or self._interrupted():
                return False
            left = sum(seq.finish is None for seq in seqs)
            return left == len(seqs) or (left > 0 and not self._queued())

        return going

    def _commit(self, seq: Sequence, steps: JudgedSteps, drafter: str) -> None:
        """Steps that the device has judged; what comes after the end of the sequence is not kept."""
        judge.commit_steps(seq, steps, drafter)
        seq.stats.unmeasured += steps.drafts
        self._model.crop(seq.id, len(seq.tokens) - 1)
        if self._prefixes is not None:
            self._prefixes.seen(seq.id, seq.tokens, seq.scope)

    def _show(self, seqs: Seq[Sequence], shown: Seq[Sequence], hidden: Tensor, layers: Seq[int]) -> None:
        """The states [steps, sequences, layers, hidden] of tokens that the target wrote by itself, those of `shown`."""
        steps, ids = len(hidden), {seq.id for seq in shown}
        for seq, own in zip(seqs, hidden.unbind(1), strict=True):
            if seq.finish is None and seq.id in ids:
                fed, verdict = seq.tokens[-1 - steps : -1], Verdict((), seq.tokens[-1])
                self._pool.observe(Step(seq, fed, EMPTY, verdict, own), layers, drafting=False)


def share_time(phases: Seq[tuple[str, float]], seqs: Seq[Sequence]) -> None:
    """Each sequence of the step gets its share of the time."""
    count = len(seqs)
    for phase, seconds in phases:
        for seq in seqs:
            seq.stats.spend(phase, seconds / count)


class _PartShare:
    """The time of a step that comes in parts: a sequence that ends with one of them is told its result before the step
    is over."""

    def __init__(self, seqs: Seq[Sequence], learn: Learn | None) -> None:
        self._going, self._learn = list(seqs), learn
        self._since, self._begins = perf_counter(), True

    def __call__(self, passes: int, tokens: float, counts: bool = True) -> None:
        """A part of so many passes is over, which was worth so many tokens. `counts`: else it took longer than others
        will."""
        now = perf_counter()
        share_time([("target", now - self._since)], self._going)
        if self._learn is not None and self._going:
            self._learn(tokens, now - self._since, passes, self._begins or not counts)
        self._going, self._since = [seq for seq in self._going if seq.finish is None], now
        self._begins = False


def tokens_of(seqs: Seq[Sequence]) -> int:
    """Of all of them together."""
    return sum(len(seq.tokens) for seq in seqs)
