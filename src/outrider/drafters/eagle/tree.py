"""Trees that grow where a head is confident (EAGLE-2, Li et al. 2024).

At each depth the best `width` nodes by their probability to be reached are followed; of all nodes that were seen the
best are kept. A node is never likelier reached than its parent, so what is kept is a tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.eagle.runner import Grown, HeadOutput, Runner

LESS = 1e-4  # log-probability that a depth costs: a child that is certain still comes after its parent
LEAST = 1e-6  # probability to be reached of a node that is kept, whatever was asked for
NEVER = -1e9  # the logarithm of probability 0, finite so that sums of it are no NaN

# (logits [b * rows, draft vocabulary], the tokens of each row's path [b * rows, depth], depth) -> the likeliest tokens
# that follow each row and the logarithms of their probabilities, [b * rows, width] each
Offers = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TreeGrowth:
    """How trees grow where all of it is one call (models/native/grow.h); the nodes are those of `grow`."""

    depth: int  # of the deepest node
    width: int  # nodes that are followed at each depth
    heat: float  # the head's logits are divided by it
    stop: float  # probability to be reached below which no node is followed
    least: float  # the same, below which none is kept
    less: float = LESS

    def rows(self, size: int) -> int:
        """The most nodes that are followed for a tree of this size: a followed node ranks before the last kept node,
        and after all nodes above it."""
        return sum(min(self.width, size - depth) for depth in range(1, min(self.depth, size)))


def grow(
    runner: Runner,
    ids: Seq[int],
    ahead: HeadOutput,
    offers: Offers,
    depth: int,
    sizes: Seq[int],
    stop: float,
    least: float | None = None,
) -> list[Grown]:
    """A tree for each sequence: `ahead` is what follows its last committed token, `sizes` how many nodes it may have,
    `stop` the probability to be reached below which no node is followed, `least` the one below which none is kept
    (None: the same)."""
    b, device = len(ids), ahead.logits.device
    tokens, scores = offers(ahead.logits, torch.empty(b, 0, dtype=torch.long, device=device), 0)
    width = tokens.shape[1]
    seen = [(tokens, torch.full_like(tokens, -1), scores - LESS)]  # per depth [b, nodes]: tokens, parents, log reach
    places = torch.arange(width, device=device).expand(b, -1)  # of the followed nodes among all that were seen
    followed = _Followed(tokens, scores - LESS, ahead.states.repeat_interleave(width, 0), device)
    count = width
    for level in range(1, depth):
        if not _worth(followed.scores, seen, sizes, stop):
            break
        ahead = runner.step(ids, followed.tokens.flatten(), followed.states, followed.trails.flatten(0, 1))
        tokens, logarithms = offers(ahead.logits, followed.paths.flatten(0, 1), level)
        tokens = tokens.view(b, -1)  # [b, width * width]
        logarithms = logarithms.view(b, width, -1).where(followed.above(stop).unsqueeze(2), NEVER)
        scores = (followed.scores.unsqueeze(2) + logarithms).flatten(1) - LESS
        seen.append((tokens, places.repeat_interleave(width, 1), scores))
        best = scores.topk(width, 1)
        places = count + best.indices
        count += tokens.shape[1]
        followed = followed.next(tokens, best.values, best.indices, ahead.states, level)
    return _collect(seen, sizes, stop if least is None else least)


def _worth(scores: Tensor, seen: Seq[tuple[Tensor, Tensor, Tensor]], sizes: Seq[int], stop: float) -> bool:
    """Whether what comes below the followed nodes, with `scores` [b, width], may be among the best of any sequence."""
    all_scores = torch.cat([level[2] for level in seen], 1)
    best = all_scores.topk(min(max(sizes), all_scores.shape[1]), 1).values
    last = torch.tensor(sizes, device=best.device).clamp(max=best.shape[1]).unsqueeze(1) - 1
    full = torch.tensor([size <= best.shape[1] for size in sizes], device=best.device)
    least = best.gather(1, last).squeeze(1).where(full, float("-inf")).clamp(min=math.log(max(stop, LEAST)))
    return bool((scores.amax(1) > least).any())


class _Followed:
    """The nodes of one depth that are followed, `width` for each sequence."""

    def __init__(self, tokens: Tensor, scores: Tensor, states: Tensor, device: torch.device) -> None:
        self.tokens, self.scores, self.states = tokens, scores, states  # [b, width] twice; [b * width, hidden]
        self.paths = tokens.unsqueeze(2)  # [b, width, depth] tokens from the root down, its own last
        self.trails = torch.empty(*tokens.shape, 0, dtype=torch.long, device=device)  # ancestors among the rows run

    def above(self, stop: float) -> Tensor:
        """Which of them are reached with more than this probability, [b, width]."""
        return self.scores > math.log(max(stop, LEAST))

    def next(self, tokens: Tensor, scores: Tensor, chosen: Tensor, states: Tensor, level: int) -> _Followed:
        """The nodes that follow: `chosen` [b, width] of the nodes under these, `width` under each."""
        b, width = chosen.shape
        parents = chosen // width
        rows = torch.arange(b, device=chosen.device).unsqueeze(1)
        followed = states.view(b, width, -1)[rows, parents].flatten(0, 1)
        new = _Followed(tokens.gather(1, chosen), scores, followed, chosen.device)
        new.paths = torch.cat([self.paths[rows, parents], new.tokens.unsqueeze(2)], 2)
        new.trails = torch.cat([self.trails[rows, parents], ((level - 1) * width + parents).unsqueeze(2)], 2)
        return new


def _collect(seen: Seq[tuple[Tensor, Tensor, Tensor]], sizes: Seq[int], least: float) -> list[Grown]:
    """The best nodes of each sequence; they come in the order of their depth, so parents come first."""
    tokens, parents, scores = (torch.cat([level[part] for level in seen], 1) for part in range(3))
    most, nodes = max(sizes), tokens.shape[1]
    best, chosen = scores.topk(min(most, nodes), 1)
    rank = torch.arange(chosen.shape[1], device=chosen.device)
    budget = torch.tensor(sizes, device=chosen.device).unsqueeze(1)
    wanted = (rank < budget) & (best.exp() >= max(least, LEAST))
    chosen, _ = chosen.where(wanted, nodes).sort(1)  # what is not wanted comes last
    counts, kept = wanted.sum(1), chosen.clamp(max=nodes - 1)
    above = parents.gather(1, kept)
    places = torch.searchsorted(chosen, above).where(above >= 0, -1)
    before = scores.gather(1, above.clamp(min=0)).where(above >= 0, 0.0)
    acceptance = (scores.gather(1, kept) - before).exp().clamp(max=1.0)
    columns = zip(counts.tolist(), tokens.gather(1, kept).tolist(), places.tolist(), acceptance.tolist(), strict=True)
    return [Grown(t[:count], p[:count], c[:count]) for count, t, p, c in columns]
