"""The engine: a step plans, drafts, runs the target once, verifies, commits and lets the drafter observe.

There is no prefill phase and no decode phase: a sequence has tokens, the cache has seen some of them, a step feeds what
it has not seen plus a draft. Plain decoding is the same loop with empty drafts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence as Seq

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import one_line
from outrider.core.sequence import Sequence, Token, logprobs, plain_token
from outrider.core.stats import Stats
from outrider.core.verify import Verdict, verify_each
from outrider.core.verify_batch import Case, choose, verify_batch
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.engine.pace import Pace, PassSize
from outrider.engine.scheduler import Limits, Plan, Scheduler
from outrider.engine.worth import Worth
from outrider.models.base import Feed, Model, Output, Outputs, Paged

CROWD = 2  # sequences on a GPU: from so many on, whether drafts pay at all is measured
BULK = 64  # sequences that run: from so many on, several tokens of each at once are still a short wait
AHEAD = 16  # tokens that each of them then writes before the host looks
MASS = 1024  # sequences: nobody waits for one of so many, so they write twice as far

log = logging.getLogger("outrider")


class Engine:
    def __init__(self, model: Model, drafter: Drafter, limits: Limits = Limits(), pace: Pace | None = None) -> None:
        """`drafter` serves the sequences that name no other; more can be put into `drafters`. Without a pace every
        draft is as long as its drafter makes it."""
        self.model, self.pace = model, pace
        self.drafters = {"": drafter}
        self._paged = model if isinstance(model, Paged) else None
        page = 1 if self._paged is None else self._paged.page
        self.scheduler = Scheduler(limits, model.context, model.capacity, page)
        self._worth = Worth()
        self._passing = False
        self._plain = Drafter(Drafter.Options(), BuildContext(model, _no_model))
        self._undrafted: set[int] = set()  # ids of running sequences whose drafter has failed
        self._failed: set[int] = set()  # ids of drafters whose first failure was logged with its trace
        self.stats = Stats()  # of every sequence that has ended
        self.meanwhile: Callable[[], None] | None = None  # called while a pass runs, where the host only waits for it

    @property
    def overlaps(self) -> bool:
        """Whether passes run on a device of their own, so that there is a `meanwhile`."""
        return self._paged is not None

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; an OutriderError says why it can never run."""
        self.scheduler.add(seq)

    def cancel(self, id: int) -> list[Sequence]:
        """End a sequence now; its memory is free when this returns (while a pass runs: when that is over)."""
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            if seq.id == id and seq.finish is None:
                seq.finish = "cancelled"
                if self.scheduler.withdraw(seq):
                    return [seq]
        return [] if self._passing else self.sweep()

    def drop(self, draft: str) -> None:
        """Forget a drafter that no sequence uses."""
        drafter = self.drafters.pop(draft)
        if any(other is drafter for other in list(self.drafters.values())):
            return
        self._failed.discard(id(drafter))
        if self.pace is not None:
            self.pace.forget(id(drafter))

    def step(self) -> list[Sequence]:
        """One pass of the target, or several of a large plain batch; the sequences that ended with it."""
        for seq in self.scheduler.admit():
            if self._paged is not None and not self._drafter(seq).layers:  # a drafter that reads states needs them all
                self._paged.begin(seq.id, seq.tokens)
        if self._paged is None or not self._crowded:
            return self._step_once(True)
        running = self.scheduler.running
        settled = all(seq.output for seq in running)  # no prompt is left, which would take longer
        begin, before, drafting = time.perf_counter(), _outputs(running), self._worth.drafts(len(running))
        ended = self._step_once(drafting)
        if settled:
            self._worth.learn(len(running), drafting, _outputs(running) - before, time.perf_counter() - begin)
        return ended

    @property
    def _crowded(self) -> bool:
        """Whether it is an open question if drafts pay."""
        running = self.scheduler.running
        return self.pace is not None and len(running) >= CROWD and any(self._drafter(seq).drafts for seq in running)

    def _step_once(self, drafting: bool) -> list[Sequence]:
        running = self.scheduler.running
        if self._paged is not None and len(running) >= BULK and all(self._alone(seq, drafting) for seq in running):
            return self._step_bulk(self._paged)
        return self._step(self.scheduler.plan(self.model.length), drafting)

    def _alone(self, seq: Sequence, drafting: bool) -> bool:
        """Whether the target can write it by itself: nobody drafts, and nobody reads its states."""
        drafter = self._drafter(seq)
        return seq.plain and (not drafter.drafts or not (drafting or drafter.layers))

    def _step(self, plans: Seq[Plan], drafting: bool = True) -> list[Sequence]:
        if not plans:
            assert not self.scheduler.running, "a running sequence has nothing to feed"
            return []
        clock = [time.perf_counter()]
        if self.pace is not None:
            self.pace.turn(sum(len(plan.seq.tokens) for plan in plans) // len(plans))
        drafts = self._draft(plans) if drafting else [EMPTY] * len(plans)
        clock.append(time.perf_counter())
        feeds = [Feed(p.seq.id, p.tokens, d) for p, d in zip(plans, drafts, strict=True)]
        layers = self._layers(plans)
        outputs = self.model.forward(feeds, layers)
        if isinstance(outputs, Outputs):
            self._wait()
        verdicts = _verdicts(plans, drafts, outputs) if isinstance(outputs, Outputs) else None
        clock.append(time.perf_counter())
        if not (isinstance(outputs, Outputs) and outputs.first):
            self._measure(plans, feeds, clock[2] - clock[1])
        if verdicts is None:
            verdicts = _verdicts(plans, drafts, outputs)
        for index, (plan, draft, verdict) in enumerate(zip(plans, drafts, verdicts, strict=True)):
            step = self._judge(plan, draft, verdict, outputs, index, layers)
            if drafting or self._drafter(plan.seq).layers:
                self._show(step)
        clock.append(time.perf_counter())
        _share(plans, clock)
        return self.sweep()

    def _step_bulk(self, model: Paged) -> list[Sequence]:
        """Many sequences that the target writes by itself: prompts first, then several tokens without the host."""
        running = self.scheduler.running
        fresh = [seq for seq in running if self.model.length(seq.id) != len(seq.tokens) - 1]
        if fresh:
            return self._step(self.scheduler.plan(self.model.length, fresh), drafting=False)
        begin = time.perf_counter()
        written = model.write(
            [seq.id for seq in running],
            [seq.tokens[-1] for seq in running],
            [None if seq.params.greedy else seq.dice for seq in running],
            [seq.params.temperature for seq in running],
            AHEAD * (2 if len(running) >= MASS else 1),
        )
        self._wait()
        for seq, tokens in zip(running, written.T.tolist(), strict=True):
            count = _extend(seq, tokens)
            seq.stats.steps += count
            seq.stats.tokens += count
            self.model.crop(seq.id, len(seq.tokens) - 1)
            model.seen(seq.id, seq.tokens)
        share = (time.perf_counter() - begin) / len(running)
        for seq in running:
            seq.stats.spend("target", share)
        return self.sweep()

    def _wait(self) -> None:
        """A pass runs: whoever has something to do does it now."""
        if self.meanwhile is not None:
            self._passing = True
            try:
                self.meanwhile()
            finally:
                self._passing = False

    def sweep(self) -> list[Sequence]:
        """Take off the sequences that have ended, and give their memory back."""
        return [self._release(seq) for seq in self.scheduler.retire()]

    def _drafter(self, seq: Sequence) -> Drafter:
        return self._plain if seq.id in self._undrafted else self.drafters[seq.draft]

    def _layers(self, plans: Seq[Plan]) -> list[int]:
        """The hidden layers that any drafter of this step wants."""
        return sorted({layer for plan in plans for layer in self._drafter(plan.seq).layers})

    def _draft(self, plans: Seq[Plan]) -> list[Draft]:
        """Each drafter is asked once, for all of its sequences that have something to judge."""
        asked: dict[int, list[int]] = {}  # the drafter's id -> places of its sequences
        for place, plan in enumerate(plans):
            drafter = self._drafter(plan.seq)
            if plan.last and drafter.drafts:
                asked.setdefault(id(drafter), []).append(place)
        size = PassSize(sum(len(plan.tokens) for plan in plans), sum(plan.last for plan in plans))
        found = {key: self._ask([plans[place] for place in places], size) for key, places in asked.items()}
        if self.pace is not None:
            found = self.pace.trim(found, size)
        drafts = [EMPTY] * len(plans)
        for key, places in asked.items():
            for place, draft in zip(places, found[key], strict=True):
                drafts[place] = draft
        return drafts

    def _ask(self, plans: Seq[Plan], size: PassSize) -> list[Draft]:
        """One drafter's drafts, none if it fails."""
        seqs = [plan.seq for plan in plans]
        drafter = self._drafter(seqs[0])
        try:
            return self._proposed(drafter, seqs, [plan.room for plan in plans], size)
        except Exception as error:
            self._leave_out(drafter, seqs, error)
            return [EMPTY] * len(seqs)

    def _proposed(self, drafter: Drafter, seqs: Seq[Sequence], budgets: Seq[int], size: PassSize) -> list[Draft]:
        """What the drafter guesses, asked for no more than pays."""
        key = id(drafter)
        if self.pace is not None and not drafter.reports_acceptance:
            budgets = self.pace.rooms(key, budgets, size)
        rests = self.pace is not None and drafter.reports_acceptance and not drafter.is_free and self.pace.rests(key)
        begin = time.perf_counter()
        drafts = drafter.propose_cheap(seqs, budgets) if rests else drafter.propose(seqs, budgets)
        drafts = [
            _checked(draft, self.model.vocab_size).cut(budget) for draft, budget in zip(drafts, budgets, strict=True)
        ]
        if self.pace is not None:
            self.pace.spend(key, time.perf_counter() - begin, drafts, size)
        return drafts

    def _show(self, step: Step) -> None:
        """Let the drafter learn from the step."""
        drafter = self._drafter(step.seq)
        try:
            drafter.observe(step)
        except Exception as error:
            self._leave_out(drafter, [step.seq], error)

    def _leave_out(self, drafter: Drafter, seqs: Seq[Sequence], error: Exception) -> None:
        """The drafter has failed: these sequences go on without drafts, and no other sequence feels it."""
        trace = error if id(drafter) not in self._failed else None
        self._failed.add(id(drafter))
        log.error(
            "drafter %s failed (%s); %d of its sequences go on without drafts",
            drafter.name,
            one_line(error, named=True),
            len(seqs),
            exc_info=trace,
        )
        for seq in seqs:
            self._forget(seq)
            self._undrafted.add(seq.id)

    def _forget(self, seq: Sequence) -> None:
        try:
            self._drafter(seq).forget(seq.id)
        except Exception as error:
            log.error("drafter %s could not forget a sequence", seq.draft, exc_info=error)

    def _measure(self, plans: Seq[Plan], feeds: Seq[Feed], seconds: float) -> None:
        """Passes without a prompt in them show what a row costs."""
        if self.pace is not None and all(len(plan.tokens) == 1 for plan in plans):
            self.pace.cost.learn(sum(1 + len(feed.draft) for feed in feeds), seconds)

    def _judge(
        self,
        plan: Plan,
        draft: Draft,
        verdict: Verdict | Exception | None,
        outputs: Seq[Output],
        index: int,
        layers: Seq[int],
    ) -> Step:
        """Commit and crop."""
        seq = plan.seq
        wanted = self._drafter(seq).layers
        hidden = _of_layers(outputs[index].hidden, layers, wanted) if wanted else None
        if isinstance(verdict, Exception):  # of a processor of the caller's: it ends this sequence, not the others
            seq.fail(one_line(verdict, named=True))
            verdict = None
        if verdict is not None:
            if self.pace is not None:
                self.pace.learn(id(self._drafter(seq)), draft, verdict)
            seen = len(seq.tokens)
            logits = None if seq.params.logprobs is None else outputs[index].logits
            verdict = self._commit(seq, draft, verdict, logits)
            self.model.crop(seq.id, seen, verdict.path)
            if self._paged is not None:
                self._paged.seen(seq.id, seq.tokens)
        return Step(seq, plan.tokens, draft, verdict, hidden)

    def _commit(self, seq: Sequence, draft: Draft, verdict: Verdict, logits: Tensor | None) -> Verdict:
        """Append the kept tokens and the target's own; what comes after the end of the sequence is not kept."""
        name, parent, written = self._drafter(seq).name, -1, 0
        sources = draft.named(name)
        try:
            for depth, node in enumerate([*verdict.path, None], 1):
                token = verdict.token if node is None else draft.tokens[node]
                source, level = (None, 0) if node is None else (sources[node], depth)
                written += 1
                if not seq.append(_token(seq, token, source, level, None if logits is None else logits[parent + 1])):
                    break
                parent = -1 if node is None else node
        except Exception as error:  # of the text that a stop string is looked for in: it ends this sequence only
            seq.fail(one_line(error, named=True))
        kept = verdict.path[:written]
        seq.stats.record(draft, kept, written, name)
        return Verdict(kept, verdict.token)

    def _release(self, seq: Sequence) -> Sequence:
        self.model.free(seq.id)
        self.stats += seq.stats
        self._forget(seq)
        self._undrafted.discard(seq.id)
        return seq


def _no_model(*_: object) -> Model:
    raise AssertionError("the drafter that never drafts loads no model")


def _checked(draft: Draft, vocab: int) -> Draft:
    """A draft that the target can run; an exception where it would fail a pass that others share."""
    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab:
        raise ValueError(f"a draft has a token outside the vocabulary of {vocab}")
    if draft.probs is not None and draft.probs.shape[1] != vocab:
        raise ValueError(f"a law of {draft.probs.shape[1]} tokens, but the vocabulary has {vocab}")
    if math.isnan(sum(draft.acceptance)):
        raise ValueError("a draft has a probability that is not a number")
    return draft


def _extend(seq: Sequence, tokens: list[int]) -> int:
    """Commit what the target wrote by itself; how many tokens that were."""
    before = len(seq.output)
    try:
        seq.extend(tokens)
    except Exception as error:  # of the text that a stop string is looked for in: it ends this sequence only
        seq.fail(one_line(error, named=True))
    return len(seq.output) - before


def _of_layers(hidden: Tensor | None, layers: Seq[int], wanted: Seq[int]) -> Tensor | None:
    """[rows, layers, hidden] -> [rows, wanted, hidden]: what one drafter asked for of what all of them did."""
    if hidden is None:
        return None
    if list(wanted) == list(layers):
        return hidden
    return torch.stack([hidden[:, layers.index(layer)] for layer in wanted], 1)


def _outputs(seqs: Seq[Sequence]) -> int:
    """Tokens that they have written."""
    return sum(len(seq.output) for seq in seqs)


def _verdicts(plans: Seq[Plan], drafts: Seq[Draft], outputs: Seq[Output]) -> list[Verdict | Exception | None]:
    """What becomes of each draft; None where there is nothing to judge yet."""
    last = [place for place, plan in enumerate(plans) if plan.last]
    if not isinstance(outputs, Outputs):
        verdicts = verify_each((plans[place].seq, drafts[place], outputs[place].logits) for place in last)
    else:
        cases = [Case(plans[place].seq, drafts[place], outputs.starts[place]) for place in last]
        verdicts = verify_batch(cases, outputs.logits, outputs.best, outputs.choose or choose) if cases else []
    found: list[Verdict | Exception | None] = [None] * len(plans)
    for place, verdict in zip(last, verdicts, strict=True):
        found[place] = verdict
    return found


def _token(seq: Sequence, id: int, drafter: str | None, depth: int, logits: Tensor | None) -> Token:
    """The committed token; `logits` [vocab] are those that it was chosen from."""
    if seq.params.logprobs is None or logits is None:
        return plain_token(id, drafter, depth)
    logprob, top = logprobs(logits, id, seq.params.logprobs)
    return Token(id, drafter, depth, logprob, top)


def _share(plans: Seq[Plan], clock: list[float]) -> None:
    """Each sequence of the step gets its share of the time."""
    for phase, begin, end in zip(("draft", "target", "verify"), clock[:-1], clock[1:], strict=True):
        share = (end - begin) / len(plans)
        for plan in plans:
            plan.seq.stats.spend(phase, share)
