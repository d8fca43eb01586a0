"""Medusa heads (Cai et al. 2024): blocks on the target's last state, each of which guesses one place further ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.heads.module import HeadModule

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


class MedusaHead(HeadModule):
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None) -> None:
        """`draft_ids`: the tokens it can write, in ascending order; None: all."""
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config.num_heads))
        if config.own_output:
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.draft_vocab_size, False) for _ in range(config.num_heads)
            )
        self.set_tokens(draft_ids)
        self.tree: Paths = ()  # that was measured for it

    @property
    def outputs(self) -> list[nn.Linear]:
        """Its own matrices."""
        return cast("list[nn.Linear]", list(self.lm_heads))

    @property
    def reads(self) -> tuple[int, ...]:
        """It needs the final state alone."""
        return ()

    def by_token(self) -> list[nn.Linear]:
        return self.outputs if self.config.own_output else []

    def states(self, last: Tensor) -> list[Tensor]:
        """The target's final state [..., hidden] -> each head's, from which its logits come."""
        return [block(last) for block in self.blocks]
