"""The engine: a step plans, drafts, runs the target once, verifies, commits and lets the drafter observe.

There is no prefill phase and no decode phase: a sequence has tokens, the cache has seen some of them, a step feeds what
it has not seen plus a draft. Plain decoding is the same loop with empty drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Sequence, Token, guessed_tokens, logprobs
from outrider.core.stats import Stats
from outrider.core.verify import Verdict, coupled, rejection
from outrider.drafters.base import Drafter, Step
from outrider.engine.pace import Pace
from outrider.engine.scheduler import Limits, Plan, Scheduler
from outrider.models.base import Feed, Model, Output


class Engine:
    def __init__(self, model: Model, drafter: Drafter, limits: Limits = Limits(), pace: Pace | None = None) -> None:
        """`drafter` serves the sequences that name no other; more can be put into `drafters`. Without a pace every
        draft is as long as its drafter makes it."""
        self.model, self.pace = model, pace
        self.drafters = {"": drafter}
        self.scheduler = Scheduler(limits, model.context, model.capacity)
        self.stats = Stats()  # of every sequence that has ended

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; an OutriderError says why it can never run."""
        self.scheduler.add(seq)

    def cancel(self, id: int) -> list[Sequence]:
        """End a sequence now; its memory is free when this returns."""
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            if seq.id == id and seq.finish is None:
                seq.finish = "cancelled"
                if seq in self.scheduler.waiting:
                    self.scheduler.waiting.remove(seq)
                    return [seq]
        return self.sweep()

    def step(self) -> list[Sequence]:
        """One pass of the target; the sequences that ended with it."""
        plans = self.scheduler.plan(self.model.length)
        if not plans:
            assert not self.scheduler.running, "a running sequence has nothing to feed"
            return []
        clock = [time.perf_counter()]
        drafts = self._draft(plans)
        clock.append(time.perf_counter())
        feeds = [Feed(p.seq.id, p.tokens, d) for p, d in zip(plans, drafts, strict=True)]
        layers = self._layers(plans)
        outputs = self.model.forward(feeds, layers)
        clock.append(time.perf_counter())
        self._measure(plans, feeds, clock[2] - clock[1])
        for plan, draft, output in zip(plans, drafts, outputs, strict=True):
            self._drafter(plan.seq).observe(self._judge(plan, draft, output, layers))
        clock.append(time.perf_counter())
        _share(plans, clock)
        return self.sweep()

    def sweep(self) -> list[Sequence]:
        """Take off the sequences that have ended, and give their memory back."""
        return [self._release(seq) for seq in self.scheduler.retire()]

    def _drafter(self, seq: Sequence) -> Drafter:
        return self.drafters[seq.draft]

    def _layers(self, plans: Seq[Plan]) -> list[int]:
        """The hidden layers that any drafter of this step wants."""
        return sorted({layer for plan in plans for layer in self._drafter(plan.seq).layers})

    def _draft(self, plans: Seq[Plan]) -> list[Draft]:
        """Each drafter is asked once, for all of its sequences that have something to judge."""
        drafts = [EMPTY] * len(plans)
        for name in {plan.seq.draft for plan in plans}:
            asked = [i for i, plan in enumerate(plans) if plan.seq.draft == name and plan.last]
            for i, draft in zip(asked, self._ask(name, [plans[i] for i in asked]), strict=True):
                drafts[i] = draft
        return drafts

    def _ask(self, name: str, plans: Seq[Plan]) -> list[Draft]:
        """One drafter's drafts, no longer than pays."""
        drafter, rooms = self.drafters[name], [plan.room for plan in plans]
        if self.pace is not None and not drafter.free:
            rooms = self.pace.rooms(name, rooms)
        begin = time.perf_counter()
        drafts = drafter.propose([plan.seq for plan in plans], rooms)
        drafts = [draft.cut(room) for draft, room in zip(drafts, rooms, strict=True)]
        if self.pace is None:
            return drafts
        self.pace.spend(name, time.perf_counter() - begin, drafts)
        return self.pace.trim(name, drafts, len(plans))

    def _measure(self, plans: Seq[Plan], feeds: Seq[Feed], seconds: float) -> None:
        """Passes without a prompt in them show what a row costs."""
        if self.pace is not None and all(len(plan.tokens) == 1 for plan in plans):
            self.pace.cost.learn(sum(1 + len(feed.draft) for feed in feeds), seconds)

    def _judge(self, plan: Plan, draft: Draft, output: Output, layers: Seq[int]) -> Step:
        """Verify, commit and crop."""
        seq = plan.seq
        wanted = self._drafter(seq).layers
        hidden = (
            output.hidden[:, [layers.index(layer) for layer in wanted]]
            if wanted and output.hidden is not None
            else None
        )
        if not plan.last:
            return Step(seq, plan.tokens, draft, None, hidden)
        seen = len(seq.tokens)
        try:
            verdict = verify(seq, draft, output.logits)
        except Exception as error:  # a processor of the caller's: it ends this sequence, not the others
            seq.fail(f"{type(error).__name__}: {error}")
            verdict = None
        if verdict is not None:
            if self.pace is not None:
                self.pace.learn(seq.draft, draft, verdict)
            verdict = self._commit(seq, draft, verdict, output.logits)
            self.model.crop(seq.id, seen, verdict.path)
        return Step(seq, plan.tokens, draft, verdict, hidden)

    def _commit(self, seq: Sequence, draft: Draft, verdict: Verdict, logits: Tensor) -> Verdict:
        """Append the kept tokens and the target's own; what comes after the end of the sequence is not kept."""
        name = self._drafter(seq).name
        sources = draft.sources or (name,) * len(draft)
        parent, written, kept = -1, 0, 0
        for depth, node in enumerate([*verdict.path, None], 1):
            token = verdict.token if node is None else draft.tokens[node]
            source, level = (None, 0) if node is None else (sources[node], depth)
            written += 1
            kept += node is not None
            if not seq.append(_token(seq, token, source, level, logits[parent + 1])):
                break
            parent = -1 if node is None else node
        seq.stats.record(draft, verdict.path[:kept], written, name)
        return Verdict(verdict.path[:kept], verdict.token)

    def _release(self, seq: Sequence) -> Sequence:
        self.model.free(seq.id)
        self.stats += seq.stats
        try:
            self._drafter(seq).forget(seq.id)
        except Exception:  # somebody's drafter: the sequence has ended all the same
            logging.getLogger("outrider").exception("drafter %s could not forget a sequence", seq.draft)
        return seq


def verify(seq: Sequence, draft: Draft, logits: Tensor) -> Verdict:
    """What the sequence's own rules make of the draft, given the target's logits [1 + nodes, vocab]."""
    if seq.params.greedy:
        if not seq.params.adjusts:
            best = logits.argmax(-1).tolist()
            return coupled(draft, lambda node, depth: best[node + 1])
        return coupled(draft, lambda node, depth: seq.best(logits[node + 1], guessed_tokens(draft, node)))

    def law(node: int) -> Tensor:
        return seq.law(logits[node + 1], guessed_tokens(draft, node))

    position = len(seq.tokens)
    if seq.rule == "coupled":
        return coupled(draft, lambda node, depth: seq.dice.choose(law(node), position + depth))
    return rejection(draft, law, seq.dice, position)


def _token(seq: Sequence, id: int, drafter: str | None, depth: int, logits: Tensor) -> Token:
    """The committed token; `logits` [vocab] are those that it was chosen from."""
    if seq.params.logprobs is None:
        return Token(id, drafter, depth)
    logprob, top = logprobs(logits, id, seq.params.logprobs)
    return Token(id, drafter, depth, logprob, top)


def _share(plans: Seq[Plan], clock: list[float]) -> None:
    """Each sequence of the step gets its share of the time."""
    for phase, begin, end in zip(("draft", "target", "verify"), clock[:-1], clock[1:], strict=True):
        for plan in plans:
            plan.seq.stats.spend(phase, (end - begin) / len(plans))
