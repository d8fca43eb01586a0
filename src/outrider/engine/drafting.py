"""The engine's drafters: each is asked for drafts, shown what became of them, and left out where it fails."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence as Seq

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError, one_line
from outrider.core.grammar import permitted
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, JudgedSteps, Step
from outrider.engine.policy import DraftingPolicy, PassSize
from outrider.engine.scheduler import FeedPlan
from outrider.models.base import Model

log = logging.getLogger("outrider")


class DrafterPool:
    """A drafter that raises, or whose draft the target cannot run, costs the sequences of that call their drafts; they
    go on plainly, and no other sequence feels it."""

    def __init__(self, drafter: Drafter, model: Model) -> None:
        """`drafter` serves the sequences that name no other."""
        self.drafters = {"": drafter}
        self._vocab = model.vocab_size
        self._plain = Drafter(Drafter.Options(), BuildContext(model, _no_model))
        self._undrafted: set[int] = set()  # ids of running sequences whose drafter has failed
        self._failed: set[int] = set()  # ids of drafters whose first failure was logged with its trace

    def of(self, seq: Sequence) -> Drafter:
        return self._plain if seq.id in self._undrafted else self.drafters[seq.draft]

    def layers(self, plans: Seq[FeedPlan]) -> list[int]:
        """The hidden layers that any drafter of this step wants."""
        return sorted({layer for plan in plans for layer in self.of(plan.seq).layers})

    def remove(self, name: str) -> int | None:
        """Forget a drafter; the key of its records, unless it is still there under another name."""
        drafter = self.drafters.pop(name)
        if any(other is drafter for other in list(self.drafters.values())):
            return None
        self._failed.discard(id(drafter))
        return id(drafter)

    def propose(self, plans: Seq[FeedPlan], policy: DraftingPolicy | None) -> list[Draft]:
        """A draft for each plan; every drafter is asked once, for all its sequences that have something to judge."""
        asked: dict[int, list[int]] = {}  # the drafter's key -> places of its sequences
        for place, plan in enumerate(plans):
            drafter = self.of(plan.seq)
            if plan.last and drafter.drafts:
                asked.setdefault(id(drafter), []).append(place)
        drafts = [EMPTY] * len(plans)
        if not asked:
            return drafts
        size = PassSize(sum(len(plan.tokens) for plan in plans), sum(plan.last for plan in plans))
        found = {key: self._ask([plans[place] for place in places], size, policy) for key, places in asked.items()}
        if policy is not None:
            found = policy.trim(found, size)
        for key, places in asked.items():
            for place, draft in zip(places, found[key], strict=True):
                drafts[place] = draft
        return drafts

    def _ask(self, plans: Seq[FeedPlan], size: PassSize, policy: DraftingPolicy | None) -> list[Draft]:
        """One drafter's drafts, none if it fails."""
        seqs, budgets = [plan.seq for plan in plans], [plan.budget for plan in plans]
        drafter = self.of(seqs[0])
        try:
            if policy is None:
                return self._checked(drafter.propose(seqs, budgets), seqs, budgets)
            return self._paying(drafter, seqs, budgets, size, policy)
        except Exception as error:
            self._leave_out(drafter, seqs, error)
            return [EMPTY] * len(seqs)

    def _paying(
        self, drafter: Drafter, seqs: Seq[Sequence], budgets: Seq[int], size: PassSize, policy: DraftingPolicy
    ) -> list[Draft]:
        """What the drafter guesses, asked for no more than pays."""
        key = id(drafter)
        if not drafter.reports_acceptance:
            budgets = policy.budgets(key, budgets, size)
        rests = drafter.reports_acceptance and not drafter.is_free and policy.rests(key)
        begin = time.perf_counter()
        drafts = drafter.propose_cheap(seqs, budgets) if rests else drafter.propose(seqs, budgets)
        drafts = self._checked(drafts, seqs, budgets)
        policy.learn_cost(key, time.perf_counter() - begin, drafts, size)
        return drafts

    def _checked(self, drafts: Seq[Draft], seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """What the target can run and the grammar of the sequence does not forbid."""
        whole = [_checked(draft, self._vocab).cut(budget) for draft, budget in zip(drafts, budgets, strict=True)]
        return [_fitting(draft, seq) for draft, seq in zip(whole, seqs, strict=True)]

    def writing(self, seqs: Seq[Sequence], budget: int) -> Drafter | None:
        """The drafter that can write all these sequences together with the target."""
        drafter = self.of(seqs[0]) if seqs else None
        if drafter is None or not all(self.of(seq) is drafter for seq in seqs):
            return None
        try:
            return drafter if drafter.writes(seqs, budget) else None
        except Exception as error:
            self._leave_out(drafter, seqs, error)
            return None

    def write(self, drafter: Drafter, seqs: Seq[Sequence], wait: Callable[[], None]) -> list[JudgedSteps] | None:
        """What it writes; None if it cannot, or fails."""
        try:
            return drafter.write(seqs, wait)
        except Exception as error:
            self._leave_out(drafter, seqs, error)
            return None

    def prefix(self, seq: Sequence) -> int:
        """How many tokens of its prompt the target may take from its cache."""
        drafter = self.of(seq)
        try:
            return drafter.prefix(seq) if drafter.takes_prefixes else 0
        except Exception as error:
            self._leave_out(drafter, [seq], error)
            return 0

    def begin(self, seq: Sequence, seen: int) -> None:
        """The target has taken them, or some of them."""
        drafter = self.of(seq)
        try:
            drafter.begin(seq, seen)
        except Exception as error:
            self._leave_out(drafter, [seq], error)

    def observe(self, step: Step) -> None:
        """Let the drafter learn from the step."""
        drafter = self.of(step.seq)
        try:
            drafter.observe(step)
        except Exception as error:
            self._leave_out(drafter, [step.seq], error)

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._forget(seq)
        self._undrafted.discard(seq.id)

    def _leave_out(self, drafter: Drafter, seqs: Seq[Sequence], error: Exception) -> None:
        """These sequences go on without drafts. The first failure of a drafter is logged with its trace."""
        trace = error if id(drafter) not in self._failed else None
        self._failed.add(id(drafter))
        message = "drafter %s failed (%s); %d of its sequences go on without drafts"
        log.error(message, drafter.name, one_line(error, named=True), len(seqs), exc_info=trace)
        for seq in seqs:
            self._forget(seq)
            self._undrafted.add(seq.id)

    def _forget(self, seq: Sequence) -> None:
        try:
            self.of(seq).forget(seq.id)
        except Exception as error:
            log.error("drafter %s could not forget a sequence", seq.draft or self.drafters[""].name, exc_info=error)


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
