"""The verdicts of a whole batch at once, where the logits are: equal to `verify`, one copy to the host in all.

What the target decides after a node does not depend on whether the path gets there. So every row decides for itself,
all rows together on the device; the host then walks down each draft along the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import sampling
from outrider.core.dice import ACCEPT, RESIDUAL, Dice, noise
from outrider.core.draft import ROOT, Draft
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence, guessed_tokens
from outrider.core.verify import Decision, Verdict, decision, followed

Best = Callable[[], list[int]]  # argmax of all logits, on the host
# (logits [n, vocab], parameters, dice and position of each row) -> [n] tokens, as Dice.choose would
Chooser = Callable[[Tensor, Seq[SamplingParams], Seq[Dice], Seq[int]], Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """One sequence's draft, and where the logits after its last token and its nodes begin."""

    seq: Sequence
    draft: Draft
    start: int

    def rows(self) -> range:
        return range(self.start, self.start + 1 + len(self.draft))


def choose(logits: Tensor, params: Seq[SamplingParams], dice: Seq[Dice], positions: Seq[int]) -> Tensor:
    """Dice.choose for every row."""
    laws = sampling.warp_batch(logits, params)
    keys = torch.tensor([one.keys(position) for one, position in zip(dice, positions, strict=True)], device=laws.device)
    tokens = torch.arange(laws.shape[1], device=laws.device)
    scores = noise(tokens, keys[:, :1], keys[:, 1:]) / laws.double()
    return scores.where(laws > 0, torch.inf).argmin(-1)


def verify_batch(
    cases: Seq[Case], logits: Tensor, best: Best | None = None, chooser: Chooser = choose
) -> list[Verdict | Exception]:
    """A verdict for each case; an exception is of one of the caller's own processors. `best`: where the pass has it."""
    failed: dict[int, Exception] = {}
    if any(case.seq.params.adjusts for case in cases):
        logits, best = logits.clone(), None
        for index, case in enumerate(cases):
            try:
                _adjust(case, logits)
            except Exception as error:
                failed[index] = error
    well = [case for index, case in enumerate(cases) if index not in failed]
    verdicts = iter(_decide(well, logits, best, chooser))
    return [failed[index] if index in failed else next(verdicts) for index in range(len(cases))]


def _adjust(case: Case, logits: Tensor) -> None:
    """Bans, penalties and the rest, each in its own node's context."""
    seq = case.seq
    if seq.params.adjusts:
        for node, row in enumerate(case.rows(), ROOT):
            logits[row] = seq.adjusted(logits[row], guessed_tokens(case.draft, node))


def _decide(cases: Seq[Case], logits: Tensor, best: Best | None, chooser: Chooser) -> list[Verdict]:
    by: dict[Decision, list[Case]] = {"greedy": [], "coupled": [], "rejection": []}
    for case in cases:
        by[decision(case.seq)].append(case)
    parts: list[Tensor] = []  # int64, one copy for all of them
    if by["greedy"] and best is None:
        parts.append(logits.argmax(-1))
    if by["coupled"]:
        parts.append(_chosen(by["coupled"], logits, chooser))
    if by["rejection"]:
        parts += _tried(by["rejection"], logits)
    numbers = torch.cat(parts).tolist() if parts else []
    verdicts: dict[int, Verdict] = {}
    place = 0
    if by["greedy"]:
        chosen = best() if best is not None else numbers
        verdicts.update((id(case), followed(case.draft, chosen, case.start)) for case in by["greedy"])
        place = 0 if best is not None else logits.shape[0]
    for case in by["coupled"]:
        verdicts[id(case)] = followed(case.draft, numbers, place)
        place += 1 + len(case.draft)
    verdicts.update(_followed(by["rejection"], numbers[place:]))
    return [verdicts[id(case)] for case in cases]


def _followed(cases: Seq[Case], numbers: list[int]) -> dict[int, Verdict]:
    """`numbers`: of every row the node that is kept, then of every row the token that is drawn if none is."""
    rows = sum(1 + len(case.draft) for case in cases)
    kept, drawn = numbers[:rows], numbers[rows:]
    verdicts, place = {}, 0
    for case in cases:
        verdicts[id(case)] = _follow(kept, drawn, place)
        place += 1 + len(case.draft)
    return verdicts


def _follow(kept: list[int], drawn: list[int], start: int) -> Verdict:
    """Along the children that were kept, given as numbers of nodes, or -1."""
    path: list[int] = []
    node = ROOT
    while kept[start + 1 + node] != ROOT:
        node = kept[start + 1 + node]
        path.append(node)
    return Verdict(tuple(path), drawn[start + 1 + node])


def _rows(cases: Seq[Case], logits: Tensor) -> tuple[Tensor, list[SamplingParams]]:
    """The logits of all rows of the cases, and the parameters of each."""
    rows = torch.tensor([row for case in cases for row in case.rows()], device=logits.device)
    return logits[rows], [case.seq.params for case in cases for _ in case.rows()]


def _positions(case: Case) -> list[int]:
    """Of the token that each row decides."""
    at = len(case.seq.tokens)
    return [at, *(at + depth for depth in case.draft.depths())]


def _chosen(cases: Seq[Case], logits: Tensor, chooser: Chooser) -> Tensor:
    dice = [case.seq.dice for case in cases for _ in case.rows()]
    positions = [position for case in cases for position in _positions(case)]
    return chooser(*_rows(cases, logits), dice, positions)


def _tried(cases: Seq[Case], logits: Tensor) -> list[Tensor]:
    """The rule of rejection at every row: [rows] the node that is kept, or -1; [rows] the token that is drawn if none.

    A row tries its children in turn, each against the residual of those before.
    """
    p, device = sampling.warp_batch(*_rows(cases, logits)), logits.device
    kept = torch.full((p.shape[0],), ROOT, device=device)
    for turn in _turns(cases):
        rows = torch.tensor(turn.rows, device=device)
        tokens = torch.tensor(turn.tokens, device=device)
        nodes = torch.tensor(turn.nodes, device=device)
        numbers = torch.tensor(turn.numbers, device=device, dtype=torch.float64)
        laws, own = p[rows], torch.arange(len(turn.rows), device=device)
        q = torch.zeros_like(laws)
        q[own, tokens] = 1.0  # guessed
        for place, law in turn.drawn:
            q[place] = law
        accept = (numbers * q[own, tokens].double() < laws[own, tokens].double()) & (kept[rows] == ROOT)
        rest = (laws - q).clamp(min=0.0)
        total = rest.sum(-1, keepdim=True)
        p[rows] = torch.where(total > 0.0, rest / total.clamp(min=torch.finfo(total.dtype).tiny), laws)
        kept[rows] = torch.where(accept, nodes, kept[rows])
    return [kept, _draw(p, cases)]


def _draw(laws: Tensor, cases: Seq[Case]) -> Tensor:
    """Dice.draw of the residual for every row."""
    pairs = [(case.seq.dice, position) for case in cases for position in _positions(case)]
    numbers = torch.tensor(
        [dice.uniform(position, RESIDUAL) for dice, position in pairs], device=laws.device, dtype=torch.float64
    )
    cumulative = laws.double().cumsum(-1)
    whole = cumulative[:, -1:].contiguous()
    place = torch.searchsorted(cumulative, numbers.unsqueeze(1) * whole, right=True).squeeze(1)
    return torch.minimum(place, torch.searchsorted(cumulative, whole).squeeze(1))  # the last that can be drawn


@dataclass(eq=False)
class _Turn:
    """The n-th child of every row that has at least n children."""

    rows: list[int]
    nodes: list[int]
    tokens: list[int]
    numbers: list[float]  # uniform random numbers
    drawn: list[tuple[int, Tensor]]  # place in this turn, and the law that the child was drawn from


def _turns(cases: Seq[Case]) -> list[_Turn]:
    turns: list[_Turn] = []
    first = 0
    for case in cases:
        draft, positions, dice = case.draft, _positions(case), case.seq.dice
        seen = [0] * (1 + len(draft))
        for node, parent in enumerate(draft.parents):
            number = seen[parent + 1]
            seen[parent + 1] += 1
            if number == len(turns):
                turns.append(_Turn([], [], [], [], []))
            turn = turns[number]
            if draft.probs is not None:
                turn.drawn.append((len(turn.rows), draft.probs[node]))
            turn.rows.append(first + 1 + parent)
            turn.nodes.append(node)
            turn.tokens.append(draft.tokens[node])
            turn.numbers.append(dice.uniform(positions[parent + 1], ACCEPT, number))
        first += 1 + len(draft)
    return turns
