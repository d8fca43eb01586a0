"""The engine's drafters: each is asked for drafts, is shown what became of them, and is left out if it fails."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeVar

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError, one_line
from outrider.core.grammar import permitted
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, JudgedSteps, Step
from outrider.engine.judge import of_layers
from outrider.engine.policy import DraftingPolicy, DraftOutcome, PassPlan, PassSize
from outrider.engine.scheduler import FeedPlan
from outrider.models.base import Model, Paged

log = logging.getLogger("outrider")
T = TypeVar("T")
# Sequences from which on heads on a CPU read what the target shows only when they are asked, so that what it takes to
# read is weighed against what a draft brings: with two a head pays, with four it seldom does, and reading four prompts
# took 3 % of the time of short answers (LOG, 2026-11-18, several at once on a CPU, once more).
READS_LATE = 3


@dataclass(eq=False)
class _Asking:
    """One sequence of a pass, and what was guessed for it."""

    place: int
    seq: Sequence
    budget: int
    members: Seq[Drafter]
    found: list[tuple[Drafter, Draft]] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # that each of these was needed
    drawn: bool = False  # one of them was drawn, and goes alone
    worth: float = 1.0  # of a token of it, against the average

    @property
    def drafts(self) -> list[Draft]:
        return [draft for _, draft in self.found]


@dataclass(frozen=True)
class _FreeAsked:
    """The drafters that run no model were asked: the pass as expected with what they found, and what it took."""

    plan: PassPlan
    seconds: float


class DrafterPool:
    """A drafter that raises, or whose draft the target cannot run, costs the sequences of that call its drafts; they
    go on with the others that draft for them, or plainly, and no other sequence feels it."""

    def __init__(self, drafter: Drafter, model: Model) -> None:
        """`drafter` serves the sequences that name no other."""
        self.drafters = {"": drafter}
        self._vocab = model.vocab_size
        self._on_device = isinstance(model, Paged)
        self._plain = Drafter(Drafter.Options(), BuildContext(model, _no_model))
        self._left_out: dict[int, set[int]] = {}  # by running sequence: the drafters that have failed
        self._failed: set[int] = set()  # ids of drafters whose first failure was logged with its trace
        self._asked: dict[int, _Asking] = {}  # by sequence, in this pass
        self._asked_members: set[int] = set()  # ids of the drafters that were asked in this pass

    def of(self, seq: Sequence) -> Drafter:
        """The drafter that the sequence names; one that never drafts where all its members have failed."""
        return self.drafters[seq.draft] if seq.id not in self._left_out or self.members(seq) else self._plain

    def members(self, seq: Sequence) -> Seq[Drafter]:
        """The drafters that are asked for it."""
        members = self.drafters[seq.draft].members
        failed = self._left_out.get(seq.id)
        return members if not failed else [member for member in members if id(member) not in failed]

    def drafts(self, seq: Sequence) -> bool:
        return any(member.drafts for member in self.members(seq))

    def plain(self, seqs: Seq[Sequence]) -> bool:
        """Whether none of them has a drafter: then there is nobody to ask or to tell, and no cost to be known."""
        return all(type(self.drafters[seq.draft]) is Drafter for seq in seqs)

    def layers(self, seqs: Seq[Sequence]) -> list[int]:
        """The hidden layers that any of their drafters wants."""
        wanted: set[int] = set()
        for members, _ in self._by_drafters(seqs):
            for member in members:
                wanted.update(member.layers)
        return sorted(wanted)

    def remove(self, name: str) -> list[int]:
        """Forget a drafter; the keys of its records, of those that are still there under no other name."""
        drafter = self.drafters.pop(name)
        left = {id(member) for other in list(self.drafters.values()) for member in other.members}
        gone = [id(member) for member in drafter.members if id(member) not in left]
        self._failed.difference_update(gone)
        return gone

    def propose(self, plans: Seq[FeedPlan], policy: DraftingPolicy | None, together: bool = False) -> list[Draft]:
        """A draft for each plan; every drafter is asked at most once, for all its sequences that have something to
        judge. `together`: whoever handed them in waits for all of them."""
        self._asked, self._asked_members, drafts = {}, set(), [EMPTY] * len(plans)
        chosen = self._chosen([plan.seq for plan in plans if plan.last], policy)
        asking = self._asking(plans, chosen) if chosen else []
        if not asking:
            return drafts
        self._asked = {each.seq.id: each for each in asking}
        begin = self._now()
        size = PassSize(sum([len(plan.tokens) for plan in plans]), sum([plan.last for plan in plans]))
        if policy is not None and len(plans) > 1:
            for plan, worth in zip(plans, policy.worth([plan.seq for plan in plans], together), strict=True):
                if plan.seq.id in self._asked:
                    self._asked[plan.seq.id].worth = worth
        free = self._ask_all(asking, size, policy)
        drafted = 0.0 if free is None else self._now()
        merged = [self._merged(each) for each in asking]
        if policy is not None:
            merged = policy.trim(merged, size, self._now() - begin, [each.worth for each in asking])
            if free is not None:
                policy.learn_free(size.writing, free.plan, size, free.seconds + self._now() - drafted)
        for each, draft in zip(asking, merged, strict=True):
            drafts[each.place] = draft
        return drafts

    def _chosen(self, seqs: Seq[Sequence], policy: DraftingPolicy | None) -> set[int]:
        """The ids of the drafters that are asked in this pass if they pay: those that run no model where that pays for
        batches of this size, or the caller told what comes; the others where it is worked out whether they pay."""
        counts: dict[Drafter, int] = {}
        for members, count in self._by_drafters(seqs):
            for member in members:
                if member.drafts:
                    counts[member] = counts.get(member, 0) + count
        if policy is None:
            return set(map(id, counts))
        chosen, free = set(), None
        for member, count in counts.items():
            if member.is_free:
                if free is None:
                    told = any(seq.prediction or seq.matcher is not None for seq in seqs)
                    free = policy.asks_free(len(seqs)) or told
                asked = free
            else:
                asked = policy.considers(member, count)
            if asked:
                chosen.add(id(member))
        return chosen

    def _asking(self, plans: Seq[FeedPlan], chosen: set[int]) -> list[_Asking]:
        """The sequences that have something to judge, each with those of the chosen drafters that serve it."""
        found = []
        for place, plan in enumerate(plans):
            members = self.members(plan.seq) if plan.last else ()
            members = [member for member in members if id(member) in chosen and member.serves(plan.seq)]
            if members:
                found.append(_Asking(place, plan.seq, plan.budget, members))
        return found

    def _now(self) -> float:
        """Seconds that this thread has worked, which others on the machine do not lengthen; where it waits for a
        device, seconds that have passed."""
        return time.perf_counter() if self._on_device else time.thread_time()

    def _ask_all(self, asking: Seq[_Asking], size: PassSize, policy: DraftingPolicy | None) -> _FreeAsked | None:
        """The drafters that run no model first: what they found tells whether others pay. What became of asking these,
        where they were."""
        members, costly, spent = _by_member(asking, free=True), _by_member(asking, free=False), 0.0
        if members:
            begin = self._now()
            for member, own in members:
                self._ask(member, own, [each.budget for each in own], policy)
            spent = self._now() - begin
        if policy is None:
            for member, own in costly:
                self._ask(member, own, [0 if each.drawn else each.budget for each in own], None)
            return None
        expected = policy.expected([each.drafts for each in asking], size, [each.worth for each in asking])
        self._ask_costly(costly, expected, policy)
        return _FreeAsked(expected, spent) if members else None

    def _ask_costly(self, costly: Seq[tuple[Drafter, list[_Asking]]], plan: PassPlan, policy: DraftingPolicy) -> None:
        """The drafters whose drafts cost something, each for the sequences for which that pays."""
        if len(costly) > 1:
            costly = sorted(costly, key=lambda item: -policy.record(item[0]).tokens)
        for member, own in costly:
            chances = [0.0 if each.drawn else policy.chance(member, each.seq, each.drafts) for each in own]
            worth = [each.worth for each in own]
            budgets = policy.wanted(member, [e.seq for e in own], [e.budget for e in own], chances, plan, worth)
            self._ask(member, own, budgets, policy, chances, policy.prices(member, len(own), plan))

    def _ask(
        self,
        member: Drafter,
        own: Seq[_Asking],
        budgets: Seq[int],
        policy: DraftingPolicy | None,
        chances: Seq[float] = (),
        prices: tuple[float, float] | None = None,
    ) -> None:
        """One drafter's drafts, none if it fails. `prices`: for `weigh`."""
        asked = [(each, budget) for each, budget in zip(own, budgets, strict=True) if budget > 0 or member.is_free]
        if not asked:
            return
        seqs, budgets = [each.seq for each, _ in asked], [budget for _, budget in asked]
        self._asked_members.add(id(member))
        needed = {id(each): chance for each, chance in zip(own, chances, strict=False)}
        try:
            unread = 0 if policy is None or member.is_free else sum(map(member.unread, seqs))
            if prices is not None:
                member.weigh(*prices)
            begin = self._now()
            drafts = self._checked(member.propose(seqs, budgets), seqs, budgets)
            seconds = self._now() - begin
            if policy is not None and not member.is_free:
                policy.learn_cost(member, seconds, drafts, unread)
        except Exception as error:
            self._leave_out(member, seqs, error)
            return
        for (each, _), draft in zip(asked, drafts, strict=True):
            each.seq.stats.ask(member.name, seconds / len(asked))
            if draft:
                if not draft.acceptance and policy is not None:
                    draft = replace(draft, acceptance=policy.stated(member, draft))
                each.found.append((member, draft))
                each.chances.append(needed.get(id(each), 1.0))
                each.drawn = each.drawn or draft.probs is not None

    def _merged(self, each: _Asking) -> Draft:
        """The drafts of one sequence as one, within its budget."""
        if not each.found:
            return EMPTY
        drafter = self.drafters[each.seq.draft]
        try:
            draft = drafter.merge(each.seq, each.found)
        except Exception as error:
            self._fail(drafter, [each.seq], error)
            return EMPTY
        for member in each.members if len(each.members) > 1 and draft.acceptance else ():
            draft = self._extended(member, each.seq, draft)
        return draft.cut(each.budget)

    def _extended(self, member: Drafter, seq: Sequence, draft: Draft) -> Draft:
        """With what a member guesses after the others' nodes; nothing if it fails."""
        try:
            more = member.extended(seq, draft)
            return draft if more is draft else _checked(more, self._vocab)
        except Exception as error:
            self._leave_out(member, [seq], error)
            return draft

    def _checked(self, drafts: Seq[Draft], seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """What the target can run and the grammar of the sequence does not forbid."""
        return [
            _fitting(_checked(draft, self._vocab).cut(budget), seq)
            for draft, seq, budget in zip(drafts, seqs, budgets, strict=True)
        ]

    def writer(self, seqs: Seq[Sequence], budget: int) -> Drafter | None:
        """The drafter of all these sequences, if it can write them together with the target and without the host. Not
        where the caller has told what to expect, or where one of its members has failed."""
        if not seqs or (drafter := self.drafters[seqs[0].draft]).writer is None:
            return None
        if any(seq.prediction or seq.id in self._left_out or self.drafters[seq.draft] is not drafter for seq in seqs):
            return None
        return drafter if self._guarded(drafter, seqs, lambda: drafter.may_write(seqs, budget)) else None

    def readers(self, drafter: Drafter) -> list[Drafter]:
        """Of a drafter that can write without the host: the members that take part and read texts by a model of their
        own, not from the states that the target shows."""
        own = [member for member in drafter.members if not member.layers]
        return [member for member in own if any(guesser in drafter.guessers for guesser in member.guessers)]

    def writes(self, drafter: Drafter, seqs: Seq[Sequence]) -> bool:
        """Whether it can write now, all prompts being read."""
        return bool(self._guarded(drafter, seqs, lambda: drafter.writes(seqs)))

    def write(
        self, drafter: Drafter, seqs: Seq[Sequence], wait: Callable[[], None], going: Callable[[int], bool]
    ) -> Iterator[list[JudgedSteps]]:
        """What it writes, part after part, until it cannot or fails."""
        parts = self._guarded(drafter, seqs, lambda: drafter.write(seqs, wait, going)) or iter(())
        while (part := self._guarded(drafter, seqs, lambda: next(parts, None))) is not None:
            yield part

    def _guarded(self, drafter: Drafter, seqs: Seq[Sequence], asked: Callable[[], T]) -> T | None:
        """None if it fails."""
        try:
            return asked()
        except Exception as error:
            self._fail(drafter, seqs, error)
            return None

    def _fail(self, drafter: Drafter, seqs: Seq[Sequence], error: Exception) -> None:
        for member in drafter.members:
            self._leave_out(member, seqs, error)

    def takes_prefixes(self, seq: Sequence) -> bool:
        return all(member.takes_prefixes for member in self.members(seq))

    def prefix(self, seq: Sequence) -> int:
        """How many tokens of its prompt the target may take from its cache."""
        most = len(seq.tokens)
        for member in self.members(seq):
            try:
                most = min(most, member.prefix(seq) if member.takes_prefixes else 0)
            except Exception as error:
                self._leave_out(member, [seq], error)
                return 0
        return most

    def begin(self, seq: Sequence, seen: int) -> None:
        """The target has taken them, or some of them."""
        for member in self.members(seq):
            try:
                member.begin(seq, seen)
            except Exception as error:
                self._leave_out(member, [seq], error)

    def rests(self, seqs: Seq[Sequence], policy: DraftingPolicy | None) -> bool:
        """Whether the drafters that read the target's states wait with it until they are asked: none of them is
        expected to be for as many sequences."""
        if policy is None or len(seqs) < 2:
            return False
        counts: dict[Drafter, int] = {}
        for members, count in self._by_drafters(seqs):
            for head in (member for member in members if member.layers):
                counts[head] = counts.get(head, 0) + count
        late = len(seqs) >= READS_LATE
        return bool(counts) and (late or all(policy.rests(head, count) for head, count in counts.items()))

    def _by_drafters(self, seqs: Seq[Sequence]) -> list[tuple[Seq[Drafter], int]]:
        """The drafters of these sequences, and the number of sequences that have them."""
        found: list[tuple[Seq[Drafter], int]] = []
        counts: dict[str, int] = {}
        for seq in seqs:
            if seq.id in self._left_out:
                found.append((self.members(seq), 1))
            else:
                counts[seq.draft] = counts.get(seq.draft, 0) + 1
        for draft, count in counts.items():
            found.append((self.drafters[draft].members, count))
        return found

    def observe(self, step: Step, layers: Seq[int], drafting: bool) -> None:
        """Let the drafters learn from the step, which has the states of all `layers`. Where nobody is drafting, only
        those that read them do."""
        drafter, bare = self.drafters[step.seq.draft], None if step.hidden is not None else step
        for member in self.members(step.seq):
            if not (member.layers or (drafting and (member.sees_all or id(member) in self._asked_members))):
                continue
            try:
                hidden = of_layers(step.hidden, layers, member.layers) if member.layers else None
                if hidden is None:
                    shown = bare = bare or replace(step, hidden=None)
                else:
                    shown = step if hidden is step.hidden else replace(step, hidden=hidden)
                member.observe(shown)
            except Exception as error:
                self._leave_out(member, [step.seq], error)
        if drafting:
            drafter.merged(step)

    def learn(self, seq: Sequence, draft: Draft, committed: int, kept: int, policy: DraftingPolicy) -> None:
        """What became of the draft of this pass. `committed`: tokens before it; `kept`: of the draft."""
        asked = self._asked.pop(seq.id, None)
        if asked is None or all(member.is_free and member.reports_acceptance for member, _ in asked.found):
            return
        found = [
            DraftOutcome(member, own, chance, draft.count(member.name))
            for (member, own), chance in zip(asked.found, asked.chances, strict=True)
        ]
        policy.learn(found, seq.tokens[committed:], kept)

    def rest(self, seqs: Seq[Sequence]) -> None:
        """The target goes on by itself, and shows no states meanwhile: who reads them begins anew afterwards."""
        for seq in seqs:
            for member in self.members(seq):
                if member.layers:
                    self._forget(member, seq)

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._asked.pop(seq.id, None)
        drafter = self.drafters.get(seq.draft)
        if drafter is None:
            log.error("drafter %s could not forget a sequence: it is gone", seq.draft)
            return
        for member in self.members(seq):
            self._forget(member, seq)
        drafter.merged(Step(seq, (), EMPTY, None, None))  # it may have been in a pass that failed
        self._left_out.pop(seq.id, None)

    def _leave_out(self, member: Drafter, seqs: Seq[Sequence], error: Exception) -> None:
        """These sequences go on without its drafts. The first failure of a drafter is logged with its trace."""
        trace = error if id(member) not in self._failed else None
        self._failed.add(id(member))
        message = "drafter %s failed (%s); %d of its sequences go on without drafts of it"
        log.error(message, member.name, one_line(error, named=True), len(seqs), exc_info=trace)
        for seq in seqs:
            self._forget(member, seq)
            self._left_out.setdefault(seq.id, set()).add(id(member))

    def _forget(self, member: Drafter, seq: Sequence) -> None:
        try:
            member.forget(seq.id)
        except Exception as error:
            log.error("drafter %s could not forget a sequence", member.name, exc_info=error)


def _by_member(asking: Seq[_Asking], free: bool) -> list[tuple[Drafter, list[_Asking]]]:
    """Each drafter with the sequences that it drafts for: of the free ones, or of the others."""
    found: dict[int, tuple[Drafter, list[_Asking]]] = {}
    for each in asking:
        for member in each.members:
            if member.is_free == free:
                found.setdefault(id(member), (member, []))[1].append(each)
    return list(found.values())


def _no_model(*_: object) -> Model:
    raise AssertionError("the drafter that never drafts loads no model")


def _fitting(draft: Draft, seq: Sequence) -> Draft:
    """What the grammar of the sequence does not forbid."""
    try:
        return draft if seq.matcher is None or not draft else permitted(draft, seq.matcher)
    except OutriderError:  # the grammar cannot go on there: the verdict meets it again, and the drafter is not at fault
        return EMPTY


def _checked(draft: Draft, vocab: int) -> Draft:
    """A draft that the target can run; an exception where it would fail a pass that others share."""
    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab:
        raise ValueError(f"a draft has a token outside the vocabulary of {vocab}")
    if draft.probs is not None and draft.probs.shape[1] != vocab:
        raise ValueError(f"a law of {draft.probs.shape[1]} tokens, but the vocabulary has {vocab}")
    if math.isnan(sum(draft.acceptance)):
        raise ValueError("a draft has an acceptance that is not a number")
    return draft
