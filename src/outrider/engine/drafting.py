"""The engine's drafters: each is asked for drafts, shown what became of them, and left out where it fails."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
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

    @property
    def drafts(self) -> list[Draft]:
        return [draft for _, draft in self.found]


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

    def of(self, seq: Sequence) -> Drafter:
        """The drafter that the sequence names; one that never drafts where all its members have failed."""
        return self.drafters[seq.draft] if self.members(seq) else self._plain

    def members(self, seq: Sequence) -> Seq[Drafter]:
        """The drafters that are asked for it."""
        members = self.drafters[seq.draft].members
        failed = self._left_out.get(seq.id)
        return members if not failed else [member for member in members if id(member) not in failed]

    def drafts(self, seq: Sequence) -> bool:
        return any(member.drafts for member in self.members(seq))

    def layers(self, seqs: Seq[Sequence]) -> list[int]:
        """The hidden layers that any of their drafters wants."""
        return sorted({layer for seq in seqs for member in self.members(seq) for layer in member.layers})

    def remove(self, name: str) -> list[int]:
        """Forget a drafter; the keys of its records, of those that are still there under no other name."""
        drafter = self.drafters.pop(name)
        left = {id(member) for other in list(self.drafters.values()) for member in other.members}
        gone = [id(member) for member in drafter.members if id(member) not in left]
        self._failed.difference_update(gone)
        return gone

    def propose(self, plans: Seq[FeedPlan], policy: DraftingPolicy | None) -> list[Draft]:
        """A draft for each plan; every drafter is asked at most once, for all its sequences that have something to
        judge."""
        asking = []
        for place, plan in enumerate(plans):
            members = [member for member in self.members(plan.seq) if member.serves(plan.seq)] if plan.last else ()
            if members:
                asking.append(_Asking(place, plan.seq, plan.budget, members))
        self._asked = {each.seq.id: each for each in asking}
        drafts = [EMPTY] * len(plans)
        if not asking:
            return drafts
        begin = self._now()
        size = PassSize(sum(len(plan.tokens) for plan in plans), sum(plan.last for plan in plans))
        if not self._ask_all(asking, size, policy):
            return drafts
        merged = [self._merged(each) for each in asking]
        if policy is not None:
            merged = policy.trim(merged, size, self._now() - begin)
        for each, draft in zip(asking, merged, strict=True):
            drafts[each.place] = draft
        return drafts

    def _now(self) -> float:
        """Seconds that this thread has worked, which others on the machine do not lengthen; where it waits for a
        device, seconds that have passed."""
        return time.perf_counter() if self._on_device else time.thread_time()

    def _ask_all(self, asking: Seq[_Asking], size: PassSize, policy: DraftingPolicy | None) -> bool:
        """The drafters that run no model first: what they found tells whether others pay. Whether any was asked, or
        might have been."""
        asked, spent = self._ask_free(asking, policy)
        costly = _by_member(asking, free=False)
        if policy is None:
            for member, own in costly:
                self._ask(member, own, [0 if each.drawn else each.budget for each in own], None)
            return True
        costly = [(member, own) for member, own in costly if policy.considers(member, len(own))]
        if asked or costly:
            expected = policy.expected([each.drafts for each in asking], size)
            if asked:
                policy.learn_free(len(asking), expected, size, spent)
            self._ask_costly(costly, expected, policy)
        return asked or bool(costly)

    def _ask_free(self, asking: Seq[_Asking], policy: DraftingPolicy | None) -> tuple[bool, float]:
        """The drafters that run no model, where that pays for batches of this size, or the caller told what comes.
        Whether they were asked, and the seconds that it took."""
        members = _by_member(asking, free=True)
        told = any(each.seq.prediction or each.seq.matcher is not None for each in asking)
        if not members or (policy is not None and not policy.asks_free(len(asking)) and not told):
            return False, 0.0
        begin = self._now()
        for member, own in members:
            self._ask(member, own, [each.budget for each in own], policy)
        return True, self._now() - begin

    def _ask_costly(self, costly: Seq[tuple[Drafter, list[_Asking]]], plan: PassPlan, policy: DraftingPolicy) -> None:
        """The drafters whose drafts cost something, each for the sequences for which that pays."""
        for member, own in sorted(costly, key=lambda item: -policy.record(item[0]).tokens):
            chances = [0.0 if each.drawn else policy.chance(member, each.seq, each.drafts) for each in own]
            budgets = policy.wanted(member, [e.seq for e in own], [e.budget for e in own], chances, plan)
            self._ask(member, own, budgets, policy, chances)

    def _ask(
        self,
        member: Drafter,
        own: Seq[_Asking],
        budgets: Seq[int],
        policy: DraftingPolicy | None,
        chances: Seq[float] = (),
    ) -> None:
        """One drafter's drafts, none if it fails."""
        asked = [(each, budget) for each, budget in zip(own, budgets, strict=True) if budget > 0 or member.is_free]
        if not asked:
            return
        seqs, budgets = [each.seq for each, _ in asked], [budget for _, budget in asked]
        needed = {id(each): chance for each, chance in zip(own, chances, strict=False)}
        try:
            unread = 0 if policy is None or member.is_free else sum(map(member.unread, seqs))
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
        whole = [_checked(draft, self._vocab).cut(budget) for draft, budget in zip(drafts, budgets, strict=True)]
        return [_fitting(draft, seq) for draft, seq in zip(whole, seqs, strict=True)]

    def writer(self, seqs: Seq[Sequence], budget: int) -> Drafter | None:
        """The drafter of all these sequences, if it can write them together with the target and without the host. Not
        where the caller has told what to expect, or where one of its members has failed."""
        if not seqs or any(seq.prediction or seq.id in self._left_out for seq in seqs):
            return None
        drafter = self.drafters[seqs[0].draft]
        if drafter.writer is None or any(self.drafters[seq.draft] is not drafter for seq in seqs):
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
        """Whether no drafter that reads the target's states is expected to be asked for as many sequences."""
        if policy is None or len(seqs) < 2:
            return False
        heads = [member for seq in seqs for member in self.members(seq) if member.layers]
        counts = Counter(map(id, heads))
        return bool(heads) and all(policy.rests(member, counts[id(member)]) for member in set(heads))

    def observe(self, step: Step, layers: Seq[int], drafting: bool) -> None:
        """Let the drafters learn from the step, which has the states of all `layers`. Where nobody is drafting, only
        those that read them do."""
        drafter, bare = self.drafters[step.seq.draft], None if step.hidden is not None else step
        for member in self.members(step.seq):
            if not (drafting or member.layers):
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
            DraftOutcome(member, own, chance, draft.named(member.name).count(member.name))
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
