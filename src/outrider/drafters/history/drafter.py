"""Suffix matching over what was written before: prompts and answers of earlier requests, of the same tenant alone.

A prompt goes in when its request starts, so that requests that run beside it can copy from it; the answer when it ends.
The text of an answer that is still being written is left to `ngram`.

How often each token followed the longest match, at its latest occurrences, gives the probabilities: the share of the
occurrences that agree on a token, times how often any of what followed was right (calibrated by the length of the match
and by whether the occurrences agree). Where two continuations are frequent the draft is a tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heappop, heappush

from outrider.core.draft import EMPTY, ROOT, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.confidence import AGREED, ALONE, DIFFERED, LONGEST, MatchCalibration, match_kind
from outrider.drafters.history.store import TenantHistory

HOPELESS = 0.02  # probability: a node that is reached less often than this is worth no row, however cheap
FREQUENT = 0.25  # share of the occurrences from which on a continuation beside the most frequent one is drafted
Rows = list[list[int]]  # what followed the match, at each of its occurrences


class History(Drafter):
    name = "history"
    reports_acceptance = is_free = True
    sees_all = False

    @dataclass(frozen=True)
    class Options:
        length: int = 16  # tokens of a path of the draft, at most
        width: int = 2  # continuations of one node, at most; 1: every draft is a chain
        own: bool = True  # copy from the request's own prompt even where no other text is there

    def __init__(self, options: Options, context: BuildContext) -> None:
        for name, value in (("length", options.length), ("width", options.width)):
            if value < 1:
                raise OutriderError(f"history:{name} must be at least 1, not {value}")
        self._options, self._store = options, context.histories
        self._states: dict[int, _HistoryState] = {}

    def serves(self, seq: Sequence) -> bool:
        """Not where its own prompt is the only text there is, and is not to be copied from."""
        state = self._states.get(seq.id)
        return state is None or state.history.index.written != state.only

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        state = self._states.get(seq.id) or self._begin(seq)
        if state.history.index.written == state.only:
            return EMPTY
        state.matched, state.rows = state.history.index.continuations(seq.tokens, self._options.length)
        state.length = len(seq.tokens)
        if not state.rows or budget < 1:
            return EMPTY
        return grown(state.rows, state.matched, state.calibration, budget, self._options.width)

    def _begin(self, seq: Sequence) -> _HistoryState:
        empty = not self._store.of(seq.tenant).index.written
        self._store.add(seq.tenant, seq.tokens[: seq.prompt], seq.prompt)
        history = self._store.of(seq.tenant)
        only = history.index.written if empty and not self._options.own else -1
        state = self._states[seq.id] = _HistoryState(seq, history, MatchCalibration(history.calibration), only)
        return state

    def observe(self, step: Step) -> None:
        """Learn from every token that is written, drafted or not."""
        state = self._states.get(step.seq.id)
        if state is None or step.verdict is None:
            return
        rows, state.rows = state.rows, []  # judged: it may not be asked for the next step
        for depth, token in enumerate(step.seq.tokens[state.length :]):
            groups = _groups(rows, depth)
            if not groups:
                break
            state.calibration.learn(_kind(state.matched + depth, groups), token in groups)
            rows = groups.get(token, [])

    def forget(self, id: int) -> None:
        """What was written joins the history, however it ended: it is text that the target has written."""
        state = self._states.pop(id, None)
        if state is not None and len(state.seq.tokens) > state.seq.prompt:
            self._store.add(state.seq.tenant, state.seq.tokens, state.seq.prompt)


@dataclass(eq=False)
class _HistoryState:
    """What is known of one sequence."""

    seq: Sequence
    history: TenantHistory
    calibration: MatchCalibration
    only: int  # places of the history while its prompt is the only text, and not to be copied from; else -1
    rows: Rows = field(default_factory=list)  # of the last lookup
    matched: int = 0  # tokens that matched then
    length: int = 0  # tokens that were committed then


def grown(rows: Rows, matched: int, calibration: MatchCalibration, budget: int, width: int) -> Draft:
    """The likeliest nodes of the tree that the continuations make."""
    if all(row == rows[0] for row in rows[1:]):
        return _chain(rows[0][:budget], matched, AGREED if len(rows) > 1 else ALONE, calibration)
    tokens: list[int] = []
    parents: list[int] = []
    acceptance: list[float] = []
    known: dict[int, float] = {}  # by kind: how often any of what followed is right
    frontier: list[tuple[float, int, int, int, float, Rows]] = []  # -reach, order, parent, depth, probability, rows
    node, depth, reach, order = ROOT, 0, 1.0, 0
    while len(tokens) < budget:
        for kind, share, members in _followers(rows, depth, matched, width):
            if kind not in known:
                known[kind] = calibration.probability(kind)
            probability = known[kind] * share
            if reach * probability >= HOPELESS:
                order += 1
                heappush(frontier, (-reach * probability, order, node, depth, probability, members))
        if not frontier:
            break
        reach, _, parent, depth, probability, rows = heappop(frontier)
        node, reach = len(tokens), -reach
        tokens.append(rows[0][depth])
        parents.append(parent)
        acceptance.append(probability)
        depth += 1
    return Draft(tuple(tokens), tuple(parents), None, (), tuple(acceptance)) if tokens else EMPTY


def _chain(row: list[int], matched: int, others: int, calibration: MatchCalibration) -> Draft:
    """The same where all continuations are equal, which is the rule."""
    acceptance: list[float] = []
    probability, reach = 0.0, 1.0
    for depth in range(len(row)):
        if not depth or matched + depth <= LONGEST:  # longer matches are all of one kind
            probability = calibration.probability(match_kind(matched + depth, others))
        reach *= probability
        if reach < HOPELESS:
            break
        acceptance.append(probability)
    return Draft.chain(row[: len(acceptance)], acceptance=acceptance) if acceptance else EMPTY


def _followers(rows: Rows, depth: int, matched: int, width: int) -> list[tuple[int, float, Rows]]:
    """The frequent tokens at this depth: the kind of guess, the share of the continuations, and these continuations."""
    if len(rows) == 1:
        return [(match_kind(matched + depth, ALONE), 1.0, rows)] if len(rows[0]) > depth else []
    groups = _groups(rows, depth)
    kind = _kind(matched + depth, groups)
    if len(groups) < 2:
        return [(kind, 1.0, members) for members in groups.values()]
    total = sum(map(len, groups.values()))
    likeliest = sorted(groups.values(), key=len, reverse=True)[:width]
    return [(kind, len(members) / total, members) for members in likeliest if _frequent(members, likeliest[0], total)]


def _groups(rows: Rows, depth: int) -> dict[int, Rows]:
    """The continuations by their token at this depth, the latest first."""
    groups: dict[int, Rows] = {}
    for row in rows:
        if len(row) > depth:
            groups.setdefault(row[depth], []).append(row)
    return groups


def _frequent(members: Rows, likeliest: Rows, total: int) -> bool:
    return members is likeliest or len(members) >= FREQUENT * total


def _kind(matched: int, groups: dict[int, Rows]) -> int:
    """What guesses are counted by: how many tokens matched, and whether the occurrences agree."""
    if len(groups) > 1:
        return match_kind(matched, DIFFERED)
    return match_kind(matched, AGREED if any(len(members) > 1 for members in groups.values()) else ALONE)
