"""The exact rules, and the choice between them: which guessed tokens the target keeps, and its own next token.

The reference, written to be read; `verify_batch` gives the same verdicts for many drafts at once. Both rules walk down
the draft from the last committed token. At a node they ask `law(node)`, the target's distribution p of the token after
that node in the node's own context, and only there: laws off the path are never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from outrider.core import sampling
from outrider.core.dice import ACCEPT, RESIDUAL, Dice
from outrider.core.draft import ROOT, Draft
from outrider.core.sequence import Sequence, guessed_tokens

Decision = Literal["greedy", "coupled", "rejection"]
Law = Callable[[int], Tensor]  # node -> [vocab] probabilities of the token after it


@dataclass(frozen=True)
class Verdict:
    path: tuple[int, ...]  # kept nodes, root down
    token: int  # the target's own token after them


def decision(seq: Sequence) -> Decision:
    """How the sequence's tokens are decided. Greedy decoding needs no random numbers, so its rule does not matter."""
    return "greedy" if seq.params.greedy else seq.rule


def verify(seq: Sequence, draft: Draft, logits: Tensor) -> Verdict:
    """What the sequence's own rules make of the draft, given the target's logits [1 + nodes, vocab]."""
    if decision(seq) == "greedy":
        if seq.takes_best:
            return followed(draft, sampling.likeliest(logits))
        return coupled(draft, lambda node, depth: seq.best(logits[node + 1], guessed_tokens(draft, node)))

    def law(node: int) -> Tensor:
        return seq.law(logits[node + 1], guessed_tokens(draft, node))

    position = len(seq.tokens)
    if decision(seq) == "coupled":
        return coupled(draft, lambda node, depth: seq.dice.choose(law(node), position + depth))
    return rejection(draft, law, seq.dice, position)


def coupled(draft: Draft, choose: Callable[[int, int], int]) -> Verdict:
    """Sample and match: walk along the tokens that the target itself chooses.

    `choose(node, depth)` is the target's token after `node`, `depth` positions past the first undecided one. It does
    not depend on the draft, so neither does the output. Greedy decoding is this rule with argmax as the choice.
    """
    node = ROOT
    path: list[int] = []
    while True:
        token = choose(node, len(path))
        child = draft.child(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def followed(draft: Draft, chosen: Seq[int], start: int = 0) -> Verdict:
    """The same where the target's tokens are known: `chosen` has those of the root and of each node from `start` on."""
    if not draft.tokens:
        return Verdict((), chosen[start])
    return coupled(draft, lambda node, depth: chosen[start + 1 + node])


def rejection(draft: Draft, law: Law, dice: Dice, position: int) -> Verdict:
    """Leviathan et al. 2023, Chen et al. 2023; siblings in turn as in SpecInfer (Miao et al. 2024).

    Keep a child x with probability min(1, p(x) / q(x)); on refusal go on with norm(max(0, p - q)). A guessed child has
    a one-hot q. `position` is that of the first undecided token.
    """
    node = ROOT
    path: list[int] = []
    while True:
        p = law(node)
        kept = None
        for turn, child in enumerate(draft.children(node)):
            number = dice.uniform(position + len(path), ACCEPT, turn)
            token = draft.tokens[child]
            q = None if draft.probs is None else draft.probs[child]
            if number * (1.0 if q is None else float(q[token])) < float(p[token]):
                kept = child
                break
            p = _residual(p, q, token)
        if kept is None:
            return Verdict(tuple(path), dice.draw(p, position + len(path), RESIDUAL))
        path.append(kept)
        node = kept


def _residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """norm(max(0, p - q)): what is left of p once q had its try."""
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q).clamp(min=0.0)
    total = rest.sum()
    # p == q up to rounding: the refusal itself was a rounding accident, and p is still the right law.
    return rest / total if float(total) > 0.0 else p
