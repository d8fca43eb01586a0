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
from outrider.engine.throughput import FIRST_PASSES
from outrider.models.base import Model, Paged, SharesPrefixes

# Passes of a step without the host after which the engine looks around again where nobody has come or ended meanwhile:
# whether drafting still pays can wait for some 70 ms of a small model. Between two steps the device has nothing to do
# for some 0.7 ms of plain writing (LOG, 2026-11-18, where a request's time goes on a GPU).
LONGEST_STEP = 128

Learn = Callable[[int, float, int], None]  # tokens, seconds, passes


class UnattendedSteps:
    def __init__(
        self,
        model: Model,
        pool: DrafterPool,
        policy: DraftingPolicy | None,
        wait: Callable[[], None],
        interrupted: Callable[[], bool],
    ) -> None:
        """`wait` is called while the device works; `interrupted`: whether somebody waits for the step to end."""
        self._model, self._pool, self._policy = model, pool, policy
        self._wait, self._interrupted = wait, interrupted
        self._prefixes = model if isinstance(model, SharesPrefixes) else None

    def work(self, seqs: Seq[Sequence]) -> Hashable:
        """What decides how well drafts do, beside the size of the batch."""
        return frozenset((seq.draft, "" if seq.adapter is None else seq.adapter.key) for seq in seqs)

    def prefers_plain(self, seqs: Seq[Sequence]) -> bool:
        """Whether such a batch was found to be faster without drafts."""
        return self._policy is not None and self._policy.trial.prefers_plain(len(seqs), self.work(seqs))

    def is_due(self, seqs: Seq[Sequence]) -> bool:
        """Whether drafts of such a batch are tried again now, though they were found to be slower."""
        return self._policy is not None and self._policy.trial.is_due(len(seqs), self.work(seqs))

    def draft(self, drafter: Drafter, running: Seq[Sequence], learn: Learn | None = None) -> bool:
        """Steps that the drafter and the target take together; False: they could not. `learn`: what each part wrote."""
        wrote, seqs, share = False, list(running), _PartShare(running, learn)
        settled = self._policy is None or self._policy.trial.prefers_drafts(len(seqs), self.work(seqs))
        for part in self._pool.write(drafter, seqs, self._wait, self._going(seqs, settled)):
            wrote = True
            for seq, steps in zip(seqs, part, strict=True):
                if seq.finish is None:
                    self._commit(seq, steps, drafter.name)
            share(max(len(steps.tokens) for steps in part))
        return wrote

    def write(self, running: Seq[Sequence], paged: Paged, tried: bool, learn: Learn | None = None) -> None:
        """Tokens that the target writes by itself. `tried`: drafts may be faster. `learn`: what each part wrote. Who
        reads its states is shown them, unless plain writing was found to be faster anyway: states of a large batch take
        much memory."""
        begin, layers = perf_counter(), self._pool.layers(running)
        plain = self.prefers_plain(running)
        if layers and plain:
            self._pool.rest(running)
            layers = []
        seqs, steps, first, share = list(running), 0, False, _PartShare(running, learn)
        going = self._going(seqs, settled=plain or not tried)
        for written in bulk.write(seqs, self._model, paged, layers, self._wait, going):
            steps, first = steps + len(written.tokens), first or written.first
            if written.hidden is not None:
                self._show(seqs, written.hidden, layers)
            share(len(written.tokens))
        if self._policy is not None and not first:
            self._policy.cost.learn(len(seqs), (perf_counter() - begin) / steps)

    def _going(self, seqs: Seq[Sequence], settled: bool) -> Callable[[int], bool]:
        """Whether a step may go on after as many passes: nobody has ended, and nobody waits for its end. `settled`:
        else it is to be found out whether the other way is faster, in no more passes than that takes, and in parts as
        later, so that the two are compared as they will run."""
        most = LONGEST_STEP if settled else FIRST_PASSES
        return lambda begun: begun < most and not self._interrupted() and all(seq.finish is None for seq in seqs)

    def _commit(self, seq: Sequence, steps: JudgedSteps, drafter: str) -> None:
        """Steps that the device has judged; what comes after the end of the sequence is not kept."""
        judge.commit_steps(seq, steps, drafter)
        seq.stats.unmeasured += steps.drafts
        self._model.crop(seq.id, len(seq.tokens) - 1)
        if self._prefixes is not None:
            self._prefixes.seen(seq.id, seq.tokens, seq.scope)

    def _show(self, seqs: Seq[Sequence], hidden: Tensor, layers: Seq[int]) -> None:
        """The states [steps, sequences, layers, hidden] of tokens that the target wrote by itself."""
        steps = len(hidden)
        for seq, own in zip(seqs, hidden.unbind(1), strict=True):
            if seq.finish is None:
                fed, verdict = seq.tokens[-1 - steps : -1], Verdict((), seq.tokens[-1])
                self._pool.observe(Step(seq, fed, EMPTY, verdict, own), layers, drafting=False)


def share_time(phases: Seq[tuple[str, float]], seqs: Seq[Sequence]) -> None:
    """Each sequence of the step gets its share of the time."""
    for phase, seconds in phases:
        for seq in seqs:
            seq.stats.spend(phase, seconds / len(seqs))


class _PartShare:
    """The time of a step that comes in parts: a sequence that ends with one of them is told its result before the step
    is over."""

    def __init__(self, seqs: Seq[Sequence], learn: Learn | None) -> None:
        self._seqs, self._going, self._learn = list(seqs), list(seqs), learn
        self._written, self._since = tokens_of(seqs), perf_counter()

    def __call__(self, passes: int) -> None:
        """A part of so many passes is over."""
        now, written = perf_counter(), tokens_of(self._seqs)
        share_time([("target", now - self._since)], self._going)
        if self._learn is not None:
            self._learn(written - self._written, now - self._since, passes)
        self._going, self._since = [seq for seq in self._going if seq.finish is None], now
        self._written = written


def tokens_of(seqs: Seq[Sequence]) -> int:
    """Of all of them together."""
    return sum(len(seq.tokens) for seq in seqs)
