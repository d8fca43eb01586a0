"""What a head learns from (texts, the target's states and laws along them), and its distance from those laws.

Token i + 1 is drawn from the target's law after place i: softmax(last[:, i] @ output.T). Laws are large, so they are
computed for tokens of answers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STEP_DECAY = 0.8  # weight of a draft step's loss against the step before it: later steps are reached less often
VARIATION_WEIGHT = 0.7  # weight of the total variation against the cross-entropy

Figures = dict[str, Tensor]  # 0-dim, on the device: reading one waits for the device, so do it rarely


@dataclass(frozen=True)
class Comparison:
    """How a student is compared with the target."""

    steps: int  # draft steps
    temperature: float = 1.0  # of both laws; of EAGLE heads alone
    focus: bool = False  # of EAGLE heads: places where rounds begin, and nodes that are reached, count more


@dataclass(frozen=True, eq=False)
class TeacherBatch:
    """A batch of texts that the target has read, padded on the right; the padding is not in `mask`."""

    tokens: Tensor  # [b, t] int64
    hidden: Tensor  # [b, t, layers, hidden] the target's residuals after the blocks `head.layers`
    last: Tensor  # [b, t, hidden] the target's final normalised state
    mask: Tensor  # [b, t] bool: tokens of an answer, whose prediction counts
    output: Tensor  # [vocab, hidden] the target's output matrix, frozen
    embedding: Tensor  # [vocab, hidden] the target's embedding, frozen
    # [n] where the mask is true in the flattened batch, padded with 0; given by the host, no step waits for the device
    known: Tensor | None = None

    def answers(self) -> AnswerTokens:
        known = self.mask.flatten().nonzero().squeeze(1) if self.known is None else self.known
        return AnswerTokens(known, known % self.tokens.shape[1])

    def logits(self, places: Tensor, temperature: float = 1.0) -> Tensor:
        """[n, vocab] the target's after each place of the flattened batch."""
        with torch.no_grad():
            last = self.last.flatten(0, 1)[places] / temperature
            return last @ self.output.to(last.dtype).T


@dataclass(frozen=True, eq=False)
class AnswerTokens:
    """Tokens of answers: their places in the flattened batch, and in their own texts."""

    places: Tensor  # [n]
    within: Tensor  # [n]

    def one_before(self, values: Tensor, other: float) -> Tensor:
        """[n] of each token the value [n] of the token before it; `other` where that is no answer's."""
        same = self.places[1:] == self.places[:-1] + 1
        return torch.cat([torch.full_like(values[:1], other), torch.where(same, values[:-1], other)])

    def before(self, count: int) -> tuple[Tensor, Tensor]:
        """[n] the places `count` tokens before, and [n] whether they are in the same text."""
        return (self.places - count).clamp(min=0), self.within >= count

    def blocks_before(self, count: int) -> tuple[Tensor, Tensor]:
        """[n] which of these tokens is the one `count` before, and [n] whether there is one that is no text's first."""
        rows = (torch.arange(len(self.places), device=self.places.device) - count).clamp(min=0)
        same = self.places.index_select(0, rows) == self.places - count
        return rows, same & (self.within > count)


@dataclass(frozen=True, eq=False)
class Laws:
    """The target's laws of the tokens of answers, as far as a head can write them."""

    law: Tensor  # [n, draft vocabulary]; need not sum to 1: tokens that the head cannot write are left out
    best: Tensor  # [n] the probability of the likeliest token of the whole vocabulary

    @classmethod
    def of(
        cls, batch: TeacherBatch, answers: AnswerTokens, ids: Tensor | None = None, temperature: float = 1.0
    ) -> Laws:
        """`ids`: the tokens that the head can write; None: all."""
        logits = batch.logits(answers.before(1)[0], temperature)
        if logits.is_cuda:
            from outrider.train.kernels import law

            return cls(*law(logits, ids))
        laws = torch.softmax(logits.float(), -1)
        return cls(laws if ids is None else laws[:, ids], laws.amax(-1))


def distance(states: Tensor, output: Tensor, laws: Laws, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the share of draws that rejection keeps, and how often the head's likeliest token is the target's,
    averaged over the rows where `counts` [n] is true; see `distances`."""
    loss, kept, hit = distances(states, output, laws, counts)
    return loss, mean(kept, counts), mean(hit, counts)


def mean(values: Tensor, counts: Tensor) -> Tensor:
    """Of the rows where `counts` [n] is true."""
    return (values * counts).sum() / counts.sum().clamp(min=1)


def distances(
    states: Tensor, output: Tensor, laws: Laws, counts: Tensor, variation: float = VARIATION_WEIGHT
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss of the rows, weighted by `counts` [n]; what rejection keeps, and what is hit, in each row [n].

    The loss is the cross-entropy of the head's law q (of states [n, hidden] through its output matrix) against the
    target's p, plus variation * (1 - sum min(p, q)); rejection keeps sum min(p, q).
    """
    weight = counts / counts.sum().clamp(min=1)
    if states.is_cuda:
        from outrider.train.kernels import distance as fused

        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype
        return fused(states.to(dtype), output.to(dtype), laws.law, laws.best, weight, variation)
    rows, kept, hit = measures(F.linear(states, output.to(states.dtype)), laws, variation)
    return (rows * weight).sum(), kept, hit


def measures(logits: Tensor, laws: Laws, variation: float = VARIATION_WEIGHT) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, what is kept, and whether it is hit, in each row [n]."""
    log_q = torch.log_softmax(logits.float(), -1)
    entropy = -(laws.law * log_q).sum(-1)
    kept = torch.minimum(laws.law, log_q.exp()).sum(-1)
    chosen = laws.law.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
    return entropy + variation * (1.0 - kept), kept.detach(), (chosen >= laws.best).float()
