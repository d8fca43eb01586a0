"""Where a weight lives: dense here, packed in `native`. One `linear(x)` for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x W^T + b for x [rows, in]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Embedding(Protocol):
    def rows(self, ids: Tensor) -> Tensor:
        """[n, hidden]"""
        ...


class Dense:
    """A matrix [out, in] in the dtype that the model computes in."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def join(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Dense:
    """Several matrices that read the same input as one: one product instead of many."""
    bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
    return Dense(torch.cat(list(weights)) if len(weights) > 1 else weights[0], bias)
