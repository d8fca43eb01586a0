"""The engine: a step plans, drafts, runs the target once, verifies, commits and lets the drafter observe.

There is no prefill phase and no decode phase: a sequence has tokens, the cache has seen some of them, and a step feeds
the rest and a draft. Plain decoding is the same loop with empty drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from time import perf_counter, thread_time

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import one_line
from outrider.core.sequence import Sequence
from outrider.core.stats import Stats
from outrider.core.verify import Verdict
from outrider.drafters.base import Drafter, Step
from outrider.engine import bulk, judge
from outrider.engine.drafting import DrafterPool
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import FeedPlan, Limits, Scheduler
from outrider.engine.unattended import Learn, UnattendedSteps, share_time, tokens_of
from outrider.models.base import Feed, Model, Output, Paged, SharesPrefixes, batched

# Chunks of prompts that wait from which on they are read beside the tokens of the sequences that write already, and the
# number of these from which on that is never done: passes with a prompt and many tokens come in many shapes, each of
# which is captured as a graph of its own (LOG, 2026-11-17). Chosen by hand, not tried.
LONG_PROMPTS, MANY = 4, 64


class Engine:
    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        limits: Limits = Limits(),
        policy: DraftingPolicy | None = None,
        rounds: bool = True,
    ) -> None:
        """`drafter` serves the sequences that name no other; more can be put into `drafters`. Without a policy every
        draft is as long as its drafter makes it; without `rounds` in any batch, for in rounds on a device the sequences
        share the rows of a pass."""
        self.model, self.policy, self._rounds = model, policy, rounds
        self._pool = DrafterPool(drafter, model)
        self._paged = model if isinstance(model, Paged) else None
        self._prefixes = model if isinstance(model, SharesPrefixes) else None
        page = 1 if self._prefixes is None else self._prefixes.page
        self.scheduler = Scheduler(limits, model.context, model.capacity, page)
        self.passing = False  # whether a pass runs now, during `meanwhile`
        self._unattended = UnattendedSteps(
            model,
            self._pool,
            policy,
            self._wait,
            lambda: self.interrupted(),
            lambda: bool(self.scheduler.waiting),
            lambda: self._together(),
        )
        self.stats = Stats()  # of every sequence that has ended
        self.meanwhile: Callable[[], None] | None = None  # called while a pass runs, where the host only waits for it
        self.interrupted: Callable[[], bool] = lambda: False  # whether somebody waits for the step to end

    @property
    def drafters(self) -> dict[str, Drafter]:
        """By the name under which sequences ask for them; "": the engine's own."""
        return self._pool.drafters

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
        return [] if self.passing else self.sweep()

    def drop(self, draft: str) -> None:
        """Forget a drafter that no sequence uses."""
        for key in self._pool.remove(draft):
            if self.policy is not None:
                self.policy.forget(key)

    def step(self) -> list[Sequence]:
        """One pass of the target, or several that need no host; the sequences that ended with it."""
        self.scheduler.admit()
        running = self.scheduler.running
        if self._prefixes is not None:
            self._take_prefixes(self._prefixes, running)
        writer = self._pool.writer(running, self.scheduler.widest) if self._rounds else None
        if writer is None and self._paged is None:  # nothing runs without the host
            return self._pass(self._plan(), drafting=True)
        if writer is not None and (unread := bulk.unread(running, self.model.length)):
            return self._read(unread)
        able = writer is not None and self._pool.writes(writer, running)
        if self.policy is None or not self._measures_drafting(running):
            return self._advance(writer if able else None, drafting=True)
        trial, count, work = self.policy.trial, len(running), self._unattended.work(running)
        drafting = self._unattended.drafts(running)
        if drafting and writer is not None and not (able and self._repays(writer, running)):
            drafting = False  # a head that was not shown what was written: drafts from there are few
        settled = not bulk.unread(running, self.model.length)  # a prompt takes longer

        def learn(tokens: float, seconds: float, passes: int, begins: bool) -> None:
            trial.learn(count, drafting, tokens, seconds, passes, work, begins)

        return self._advance(writer, drafting, learn if settled else None)

    def _repays(self, writer: Drafter, running: Seq[Sequence]) -> bool:
        """Whether what the drafter has to read before it can draft is worth it: a draft model's whole prompt."""
        if self.policy is None:
            return True
        return self.policy.reading_repays(self._pool.readers(writer), running, self._unattended.work(running))

    def _advance(self, writer: Drafter | None, drafting: bool, learn: Learn | None = None) -> list[Sequence]:
        """`writer`: who can draft without the host now. `learn`: what is written in which time, in passes or parts."""
        running, paged = self.scheduler.running, self._paged
        if drafting and writer is not None and self._unattended.draft(writer, running, learn):
            return self.sweep()
        if paged is None or not running or not bulk.possible(running, self._pool, drafting):
            begin, seqs, before = perf_counter(), list(running), tokens_of(running)
            ended = self._pass(self._plan(), drafting)
            if learn is not None:
                learn(tokens_of(seqs) - before, perf_counter() - begin, 1, False)
            return ended
        if unread := bulk.unread(running, self.model.length):
            return self._read(unread)
        self._unattended.write(running, paged, self._measures_drafting(running), learn)
        return self.sweep()

    def _read(self, unread: Seq[Sequence]) -> list[Sequence]:
        """Prompts, before all go on without the host. Long ones are read beside the tokens of the others, so that these
        need not wait for them, unless they are many."""
        running = self.scheduler.running
        waiting = sum(len(seq.tokens) - self.model.length(seq.id) for seq in unread)
        beside = waiting > LONG_PROMPTS * self.scheduler.limits.chunk and len(running) < MANY
        return self._pass(self._plan(None if beside else unread), drafting=False)

    def _take_prefixes(self, model: SharesPrefixes, running: Seq[Sequence]) -> None:
        """A sequence whose prompt is not run yet takes what others have run of it by now, as far as its drafter has
        read that too; all of it where heads rest, which then begin with it only if they have read it."""
        new = [seq for seq in running if not seq.output]
        if not new:
            return
        rests = self._rests(running)
        for seq in new:
            # on a device a head that rests is not asked at all; on a CPU it may be, later
            most = 0 if rests and self._paged is not None else self._pool.prefix(seq)
            if not rests and not most:
                continue
            taken = model.begin(seq.id, seq.tokens if rests else seq.tokens[: most + 1], seq.scope)
            seq.stats.cached += taken
            if most and most >= (seen := self.model.length(seq.id)):
                self._pool.begin(seq, seen)
            elif taken:
                self._pool.rest([seq])

    def _rests(self, running: Seq[Sequence]) -> bool:
        """Whether heads have nothing to do for so many, or wait until they are asked."""
        if self._paged is not None:
            return self._measures_drafting(running) and self._unattended.rests(running)
        return self._pool.rests(running, self.policy)

    def _takes_prefix(self, seq: Sequence) -> bool:
        return self._prefixes is not None and self._pool.takes_prefixes(seq)

    def _plan(self, seqs: Seq[Sequence] | None = None) -> list[FeedPlan]:
        return self.scheduler.plan(self.model.length, seqs, self._takes_prefix)

    def _pass(self, plans: Seq[FeedPlan], drafting: bool) -> list[Sequence]:
        if not plans:
            assert not self.scheduler.running, "a running sequence has nothing to feed"
            return []
        begin, rests = perf_counter(), self._paged is not None and self._rests(self.scheduler.running)
        seqs = [plan.seq for plan in plans]
        if self._paged is None and self._pool.plain(seqs):
            return self._plain_pass(plans, seqs, begin)
        if self.policy is not None:
            self.policy.use_length(sum(len(seq.tokens) for seq in seqs) // len(seqs))
        drafts = [EMPTY] * len(plans)
        if drafting:
            drafts = self._pool.propose(plans, self.policy, len(plans) > 1 and self._together())
        drafted, worked, layers = perf_counter(), thread_time(), self._shown_layers(seqs, rests)
        feeds = [Feed(p.seq.id, p.tokens, d, p.seq.adapter) for p, d in zip(plans, drafts, strict=True)]
        outputs = self.model.forward(feeds, layers)
        if batched(outputs):  # the device still works: its time ends when the verdicts are there
            judge.prepare(plans, drafts)
            self._wait()
            verdicts = judge.batch_verdicts(plans, drafts, outputs)
            ran = perf_counter()
            worked = ran - drafted
        else:
            ran, worked = perf_counter(), thread_time() - worked
            verdicts = judge.verdicts(plans, drafts, outputs)
        self._learn_cost(plans, drafts, outputs, worked)
        observing = 0.0
        if self._paged is None and layers:
            rests = self._rests(self.scheduler.running)
        for place, (plan, draft, verdict) in enumerate(zip(plans, drafts, verdicts, strict=True)):
            step = self._judge(plan, draft, verdict, outputs[place], rests)
            judged = perf_counter()
            self._pool.observe(step, layers, drafting)
            observing += perf_counter() - judged
        verifying = perf_counter() - ran - observing
        share_time([("draft", drafted - begin + observing), ("target", ran - drafted), ("verify", verifying)], seqs)
        self._charge(plans, drafts, ran - drafted)
        if self._paged is not None:
            self._charge_try(plans, perf_counter() - begin)
        return self.sweep()

    def _plain_pass(self, plans: Seq[FeedPlan], seqs: Seq[Sequence], begin: float) -> list[Sequence]:
        """A pass on a CPU for which nobody drafts."""
        feeds = [Feed(plan.seq.id, plan.tokens, EMPTY, plan.seq.adapter) for plan in plans]
        fed = perf_counter()
        outputs = self.model.forward(feeds)
        ran = perf_counter()
        verdicts = judge.verdicts(plans, [EMPTY] * len(plans), outputs)
        for plan, verdict, output in zip(plans, verdicts, outputs, strict=True):
            self._judge(plan, EMPTY, verdict, output, rests=False)
        share_time([("draft", fed - begin), ("target", ran - fed), ("verify", perf_counter() - ran)], seqs)
        return self.sweep()

    def _shown_layers(self, seqs: Seq[Sequence], rests: bool) -> list[int]:
        """The layers whose states a pass shows: on a device none where no draft begins from them, which takes time."""
        if self._paged is None or not rests:
            return self._pool.layers(seqs)
        self._pool.rest(seqs)
        return []

    def _charge_try(self, plans: Seq[FeedPlan], seconds: float) -> None:
        """Prompts are read for drafters whose drafts are tried again though they did not pay: a cost of that try."""
        running = self.scheduler.running
        if self.policy is None or not self._measures_drafting(running) or all(len(p.tokens) == 1 for p in plans):
            return
        if self._unattended.prefers_plain(running) and self._unattended.is_due(running):
            self.policy.trial.charge(len(running), self._unattended.work(running), seconds)

    def _together(self) -> bool:
        """Whether somebody waits for all that run, and nobody for one of them to end, so that the last one counts."""
        running = self.scheduler.running
        call = running[0].call
        return not self.scheduler.waiting and call is not None and all(seq.call == call for seq in running)

    def _charge(self, plans: Seq[FeedPlan], drafts: Seq[Draft], seconds: float) -> None:
        """What drafted nodes added to a pass that took so long, to the sequences that they were for."""
        rows = nodes = 0
        for plan, draft in zip(plans, drafts, strict=True):
            rows, nodes = rows + len(plan.tokens), nodes + len(draft.tokens)
        if not nodes:
            return
        share = 0.0 if self.policy is None else self.policy.cost.added(rows, nodes) / nodes
        for plan, draft in zip(plans, drafts, strict=True):
            stats = plan.seq.stats
            if draft and self.policy is None:
                stats.unmeasured += 1
            elif draft and stats.steps > 1:
                stats.drafting_seconds += seconds * share * len(draft)

    def _judge(
        self, plan: FeedPlan, draft: Draft, verdict: Verdict | Exception | None, output: Output, rests: bool
    ) -> Step:
        """Commit and crop."""
        seq = plan.seq
        if isinstance(verdict, Exception):  # of a processor of the caller's: it ends this sequence, not the others
            seq.fail(one_line(verdict, named=True))
            verdict = None
        if verdict is not None:
            seen = len(seq.tokens)
            logits = None if seq.params.logprobs is None else output.logits
            verdict = judge.commit(seq, draft, verdict, logits, self._pool.of(seq).name)
            self.model.crop(seq.id, seen, verdict.path)
            if self.policy is not None:
                self._pool.learn(seq, draft, seen, len(verdict.path), self.policy)
        if self._prefixes is not None:
            self._prefixes.seen(seq.id, seq.tokens, seq.scope)
        return Step(seq, plan.tokens, draft, verdict, output.hidden, rests)

    def _measures_drafting(self, running: Seq[Sequence]) -> bool:
        """Whether this batch may be faster without drafts, so that both ways are tried."""
        if self._paged is None or self.policy is None:
            return False
        return any(self._pool.drafts(seq) for seq in running)

    def _learn_cost(self, plans: Seq[FeedPlan], drafts: Seq[Draft], outputs: Seq[Output], seconds: float) -> None:
        """Passes without a prompt in them show what a row costs; the first of a shape also compiles. On a CPU seconds
        are those that the thread worked: what others take of the machine is no cost of a row."""
        if self.policy is None or (batched(outputs) and outputs.first):
            return
        rows, prompts = 0, False
        for plan, draft in zip(plans, drafts, strict=True):
            rows += len(plan.tokens) + len(draft.tokens)
            prompts = prompts or len(plan.tokens) > 1
        if prompts:
            self.policy.learn_prompt(rows, seconds)
        else:
            self.policy.cost.learn(rows, seconds)

    def _wait(self) -> None:
        """A pass runs: what else there is to do is done now."""
        if self.meanwhile is not None:
            self.passing = True
            try:
                self.meanwhile()
            finally:
                self.passing = False

    def sweep(self) -> list[Sequence]:
        """Take off the sequences that have ended, and give their memory back."""
        ended = self.scheduler.retire()
        for seq in ended:
            self.model.free(seq.id)
            self.stats += seq.stats
            self._pool.end(seq)
            self._unattended.end(seq)
            if self.policy is not None:
                self.policy.end(seq)
        return ended
