"""What the torch modules of heads share: norm, MLP, and the part of the target's vocabulary that they can write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.rope import rope


class HeadNorm(nn.Module):
    """Root mean square, as a module in float32 whatever the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)

    def in_dtype(self, x: Tensor) -> Tensor:
        """One operator, in the dtype of x."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, False)
        self.up_proj = nn.Linear(hidden, inner, False)
        self.down_proj = nn.Linear(inner, hidden, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadModule(nn.Module):
    """A head, which can write `draft_ids` of the target's tokens."""

    config: Any  # frozen, with the sizes of both vocabularies
    draft_ids: Tensor

    def set_tokens(self, draft_ids: Tensor | None) -> None:
        """None: it can write all tokens."""
        ids = torch.arange(self.config.draft_vocab_size) if draft_ids is None else draft_ids.clone()
        self.register_buffer("draft_ids", ids, persistent=False)

    @property
    def writes_all(self) -> bool:
        """Whether it can write every token of the target."""
        return bool(self.config.draft_vocab_size == self.config.vocab_size)

    def narrow(self, vocab: int) -> None:
        """From now on it writes only the first `vocab` of its tokens."""
        self.draft_ids = self.draft_ids[:vocab]
        self.config = replace(self.config, draft_vocab_size=len(self.draft_ids))
        for matrix in self.by_token():
            matrix.weight = nn.Parameter(matrix.weight[:vocab])

    def by_token(self) -> list[nn.Linear]:
        """Its own matrices with a row for each token that it can write."""
        raise NotImplementedError


class DecoderHead(HeadModule):
    """A head with decoder layers, which read the residuals of some of the target's blocks."""

    frequencies: Tensor

    def set_rope(self) -> None:
        config = self.config
        scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
        self.rope = rope(config.head_dim, config.rope_theta, config.context, scaling)
        self.register_buffer("frequencies", self.rope.frequencies.float(), persistent=False)

    @property
    def reads(self) -> tuple[int, ...]:
        """The target's blocks whose residuals it needs, in that order."""
        return tuple(self.config.layers)
