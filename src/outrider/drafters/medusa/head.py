"""Medusa heads (Cai et al. 2024): blocks on the target's last state, each of which guesses one place further ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Paths = tuple[tuple[int, ...], ...]  # nodes by the ranks from the root down, parents first, the most useful first


@dataclass(frozen=True)
class MedusaConfig:
    hidden_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int  # how many of those tokens the heads can write
    num_heads: int = 4
    depth: int = 1  # residual blocks of each head
    bias: bool = False
    own_output: bool = False  # a matrix of each head's own; else the target's, rows `draft_ids` of it


class MedusaBlock(nn.Module):
    """x + silu(W x + b), `depth` times."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size, config.bias) for _ in range(config.depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(nn.Module):
    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None) -> None:
        """`draft_ids`: the tokens it can write, in ascending order; None: all."""
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config.num_heads))
        if config.own_output:
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.draft_vocab_size, False) for _ in range(config.num_heads)
            )
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids.clone()
        self.register_buffer("draft_ids", ids, persistent=False)
        self.draft_ids: Tensor
        self.tree: Paths = ()  # that was measured for it

    @property
    def outputs(self) -> list[nn.Linear]:
        """Its own matrices."""
        return cast("list[nn.Linear]", list(self.lm_heads))

    @property
    def reads(self) -> tuple[int, ...]:
        """It needs the final state alone."""
        return ()

    def narrow(self, vocab: int) -> None:
        """From now on it writes only the first `vocab` of its tokens."""
        self.draft_ids = self.draft_ids[:vocab]
        self.config = replace(self.config, draft_vocab_size=len(self.draft_ids))
        if self.config.own_output:
            for output in self.outputs:
                output.weight = nn.Parameter(output.weight[:vocab])

    def states(self, last: Tensor) -> list[Tensor]:
        """The target's final state [..., hidden] -> each head's, from which its logits come."""
        return [block(last) for block in self.blocks]

    @property
    def writes_all(self) -> bool:
        """Whether it can write every token of the target."""
        return self.config.draft_vocab_size == self.config.vocab_size
