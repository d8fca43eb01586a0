"""What to draft in a pass: measured cost against measured acceptance.

What a pass costs is learned from the passes themselves, for short sequences and for long ones. A node that is kept with
probability P pays for its row while it brings tokens faster than the step does without it: P / (seconds of the row) >
tokens / seconds. The best drafts of a pass are found by adding nodes, likeliest first, until the next one does not pay.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from outrider.core.draft import ROOT, Draft
from outrider.core.verify import Verdict
from outrider.engine.cost import PassCost

# Factor by which a record fades with every draft: it is an average over about the last 20. Chosen by hand.
FADE = 0.95
# Share of the difference by which a measured cost of drafting moves an average; a cost moves it by no more than itself.
SMOOTHING = 0.1
# Nodes kept and nodes tried that are assumed before any is seen: an acceptance of 0.7, outvoted after a few drafts.
ASSUMED_KEPT, ASSUMED_TRIED = 2.8, 4.0
# Steps after which a drafter that does not pay is asked for one node, to see whether it does now. Chosen by hand.
ASK_AGAIN = 16
# Tokens of a sequence up to which a row costs the same: each doubling of the length has a cost curve of its own.
SHORT = 256
# Drafts, faded, after which it is judged whether a drafter earns its cost: fewer say too little. Chosen by hand.
JUDGED_BY = 12.0
# Seconds: the most that counts of a drafter's first draft of one sequence, in which a head also reads the prompt.
# Counted in full it made heads rest nearly always (LOG, 2026-11-15, the trained head on a CPU).
FIRST_DRAFT = 0.003
# Steps for which a drafter that does not earn its cost rests, and then drafts again, to be judged anew.
REST, TRIAL = 32, 4

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class PassSize:
    """A pass before any draft is added to it, over all drafters."""

    rows: int  # tokens that it runs, those of prompts too
    writing: int  # sequences that write a token


class DepthRecord:
    """For a drafter that reports no acceptance: how often its nodes were kept, by depth, and what they cost."""

    def __init__(self) -> None:
        self._tried: dict[int, float] = {}
        self._kept: dict[int, float] = {}
        self.seconds = 0.0  # of drafting one node
        self.idle = 0  # steps since it was last asked

    def acceptance(self, depth: int) -> float:
        """The probability that a node at this depth is kept if its parent is."""
        return (self._kept.get(depth, 0.0) + ASSUMED_KEPT) / (self._tried.get(depth, 0.0) + ASSUMED_TRIED)

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """A node was tried if its parent was kept."""
        kept, depths = {ROOT, *verdict.path}, draft.depths()
        for depth in range(1, len(verdict.path) + 2):
            tried = [n for n, d in enumerate(depths) if d == depth and draft.parents[n] in kept]
            if tried:
                self._tried[depth] = FADE * self._tried.get(depth, 0.0) + 1.0
                self._kept[depth] = FADE * self._kept.get(depth, 0.0) + float(any(n in kept for n in tried))

    def learn_cost(self, seconds: float, nodes: int) -> None:
        if nodes:
            each = seconds / nodes
            self.seconds = _smoothed(self.seconds, each) if self.seconds else each


class EarningsRecord:
    """Of a drafter whose drafts cost something: the seconds that its kept tokens saved, less the seconds that its
    drafts and their rows took."""

    def __init__(self) -> None:
        self._earned = self._drafts = 0.0
        self._steps = 0  # since it has not paid
        self.seconds = 0.0  # of drafting for one sequence
        self.size = PassSize(1, 1)  # of the last pass

    def learn_cost(self, seconds: float, seqs: int, size: PassSize) -> None:
        each, self.size = seconds / seqs, size
        self.seconds = _smoothed(self.seconds, each) if self.seconds else min(each, FIRST_DRAFT)

    def learn(self, seconds: float) -> None:
        """What one draft earned; less than 0: what it lost."""
        self._earned, self._drafts = FADE * self._earned + seconds, FADE * self._drafts + 1.0

    def rests(self) -> bool:
        """Whether not to draft in this step. Each step asks once."""
        pays = self._drafts < JUDGED_BY or self._earned > 0.0
        self._steps = 0 if pays else self._steps % (REST + TRIAL) + 1
        return 0 < self._steps <= REST


class DraftingPolicy:
    """Drafters are told apart by any key that stays the same."""

    def __init__(self, cost: PassCost | None = None) -> None:
        """`cost`: of short sequences, where it is known."""
        self.cost = cost or PassCost()  # at the length of the sequences that run
        self._costs = {0: self.cost}  # by the bits of that length
        self._depths: dict[Hashable, DepthRecord] = {}
        self._earnings: dict[Hashable, EarningsRecord] = {}

    def use_length(self, tokens: int) -> None:
        """Sequences of this mean length run now: each row of a pass looks at all tokens before it."""
        bits = (tokens // SHORT).bit_length()
        if bits not in self._costs:
            nearest = min(self._costs, key=lambda known: abs(known - bits))
            self._costs[bits] = self._costs[nearest].beginning()
        self.cost = self._costs[bits]

    def rests(self, drafter: Hashable) -> bool:
        """Whether a drafter whose drafts cost something should not draft now."""
        return self._earnings.setdefault(drafter, EarningsRecord()).rests()

    def budgets(self, drafter: Hashable, budgets: Seq[int], size: PassSize) -> list[int]:
        """How many nodes to ask a drafter for, no more than pay; `budgets` are the most."""
        record = self._record(drafter)
        best = self._length(record, len(budgets), max(budgets, default=0), size)
        if best == 0 and record.idle < ASK_AGAIN:
            record.idle += 1
            return [0] * len(budgets)
        record.idle = 0
        return [min(budget, max(best, 1)) for budget in budgets]

    def _length(self, record: DepthRecord, seqs: int, most: int, size: PassSize) -> int:
        tokens, seconds, rows, acceptance = float(size.writing), self.cost.at(size.writing), size.rows, 1.0
        for depth in range(1, most + 1):
            acceptance *= record.acceptance(depth)
            more = self.cost.at(rows + seqs) - self.cost.at(rows) + record.seconds * seqs
            if acceptance * seqs * seconds <= more * tokens:
                return depth - 1
            tokens, seconds, rows = tokens + acceptance * seqs, seconds + more, rows + seqs
        return most

    def trim(self, drafts: Mapping[K, Seq[Draft]], size: PassSize) -> dict[K, list[Draft]]:
        """The nodes that pay, of all drafters' drafts for one pass.

        What a row costs depends on all rows of the pass. What a token is worth does not depend on the prompts in it:
        they are read in any case.
        """
        flat = [(drafter, draft) for drafter, own in drafts.items() for draft in own]
        kept = self._paying(flat, size)
        for (drafter, draft), nodes in zip(flat, kept, strict=True):
            earnings = self._earnings.get(drafter)
            if earnings is not None and draft and not nodes and not draft.borrowed:  # drafted for nothing
                earnings.learn(-earnings.seconds)
        cut = iter([_keep(draft, nodes) for (_, draft), nodes in zip(flat, kept, strict=True)])
        return {drafter: [next(cut) for _ in own] for drafter, own in drafts.items()}

    def _paying(self, flat: Seq[tuple[Hashable, Draft]], size: PassSize) -> list[list[int]]:
        """The nodes of each draft that pay, likeliest first."""
        reach = [_reach(draft, self._record(drafter)) for drafter, draft in flat]
        order = sorted(((-p, i, n) for i, row in enumerate(reach) for n, p in enumerate(row)))
        tokens, seconds, rows = float(size.writing), self.cost.at(size.writing), size.rows
        for drafter, _ in flat:
            if drafter in self._earnings:  # the step takes as long as the drafts took, whatever is kept of them
                seconds += self._earnings[drafter].seconds
        kept: list[list[int]] = [[] for _ in flat]
        before = self.cost.at(rows)
        for negative, index, node in order:
            rows += 1
            after = self.cost.at(rows)
            if -negative * seconds <= (after - before) * tokens:
                break
            kept[index].append(node)
            tokens, seconds, before = tokens - negative, seconds + after - before, after
        return kept

    def forget(self, drafter: Hashable) -> None:
        self._depths.pop(drafter, None)
        self._earnings.pop(drafter, None)

    def learn(self, drafter: Hashable, draft: Draft, verdict: Verdict) -> None:
        """What became of a draft."""
        if draft and not draft.acceptance:
            self._record(drafter).learn(draft, verdict)
        earnings = self._earnings.get(drafter)
        if earnings is not None and draft and not draft.borrowed:  # drafts of others cost nothing
            size = earnings.size
            token = self.cost.at(size.writing) / size.writing
            rows = self.cost.at(size.rows + len(draft)) - self.cost.at(size.rows)
            earnings.learn(len(verdict.path) * token - earnings.seconds - rows)

    def learn_cost(self, drafter: Hashable, seconds: float, drafts: Seq[Draft], size: PassSize) -> None:
        """What drafting cost; nodes of a drafter that reports their acceptance are counted as free."""
        self._record(drafter).learn_cost(seconds, sum(len(draft) for draft in drafts if not draft.acceptance))
        if drafter in self._earnings and drafts:
            self._earnings[drafter].learn_cost(seconds, len(drafts), size)

    def _record(self, drafter: Hashable) -> DepthRecord:
        return self._depths.setdefault(drafter, DepthRecord())


def _smoothed(average: float, value: float) -> float:
    """The average moved towards a new value, by at most a share of itself."""
    return average + SMOOTHING * min(value - average, average)


def _keep(draft: Draft, nodes: list[int]) -> Draft:
    first = max(nodes, default=ROOT) == len(nodes) - 1  # nothing in between is missing
    return draft.cut(len(nodes)) if first else draft.keep(sorted(nodes))


def _reach(draft: Draft, record: DepthRecord) -> list[float]:
    """The probability that each node is kept; never more than its parent's."""
    acceptance = draft.acceptance or tuple(map(record.acceptance, draft.depths()))
    reach: list[float] = []
    for parent, probability in zip(draft.parents, acceptance, strict=True):
        reach.append(probability * (1.0 if parent == ROOT else reach[parent]))
    return reach
