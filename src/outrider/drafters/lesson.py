"""What a head learns from: a text, the target's states along it, and the law that the target would have drawn from.

Token i + 1 is drawn from the target's law after position i: softmax(last[:, i] @ output.T).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

FADE = 0.8  # what a draft step weighs beside the one before it
NEARNESS = 0.7  # what the total-variation term weighs beside the cross-entropy

Figures = dict[str, Tensor]  # 0-dim, on the device: reading one waits for the device, so do it rarely


@dataclass(frozen=True, eq=False)
class Lesson:
    """A batch of texts, padded on the right; what is padding is not in `mask`."""

    tokens: Tensor  # [b, t] int64
    hidden: Tensor  # [b, t, layers, hidden] the target's residuals after the blocks `head.layers`
    last: Tensor  # [b, t, hidden] the target's final normalised state
    mask: Tensor  # [b, t] bool: tokens of an answer, whose prediction counts
    output: Tensor  # [vocab, hidden] the target's output matrix, frozen
    embedding: Tensor  # [vocab, hidden] the target's embedding, frozen

    def laws(self) -> Tensor:
        """[b, t, vocab] float32: what the target would draw the next token from."""
        with torch.no_grad():
            return torch.softmax((self.last @ self.output.to(self.last.dtype).T).float(), -1)


def ahead(x: Tensor, places: int) -> Tensor:
    """[b, t, ...] -> the same with x[:, i + places] at i; zeros where there is nothing."""
    return F.pad(x[:, places:], (0, 0) * (x.dim() - 2) + (0, places))


def distance(logits: Tensor, law: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the head's law q against the target's p, plus NEARNESS * (1 - sum min(p, q)), averaged where
    `counts` [b, t]; and sum min(p, q), the share that rejection keeps. `law` [b, t, draft vocabulary] need not add up
    to 1: what the head has no token for is lost to it."""
    return (_fused() if logits.is_cuda else _distance)(logits, law, counts)


def _distance(logits: Tensor, law: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    log_q = torch.log_softmax(logits.float(), -1)
    entropy = -(law * log_q).sum(-1)
    kept = torch.minimum(law, log_q.exp()).sum(-1)
    weight = counts / counts.sum().clamp(min=1)
    return ((entropy + NEARNESS * (1.0 - kept)) * weight).sum(), (kept * weight).sum().detach()


@cache
def _fused() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """On a GPU a dozen kernels over all logits would take longer than everything else. What cannot be compiled runs as
    it is."""
    from torch._dynamo import config

    config.suppress_errors = True
    return torch.compile(_distance)


def hits(logits: Tensor, law: Tensor, best: Tensor, counts: Tensor) -> Tensor:
    """How often the head's likeliest token is the target's. `best` [b, t]: the chance of the target's likeliest."""
    chosen = law.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
    return ((chosen >= best) & counts).sum() / counts.sum().clamp(min=1)
