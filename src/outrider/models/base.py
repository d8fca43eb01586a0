"""What the engine and the drafters know of a model: run new tokens, forget refused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.core.draft import EMPTY, Draft


@dataclass(frozen=True, eq=False)
class Feed:
    """What one sequence brings to a pass."""

    id: int
    tokens: Sequence[int]  # committed, not yet seen by the cache; at least one
    draft: Draft = EMPTY


@dataclass(frozen=True, eq=False)
class Output:
    logits: Tensor  # [1 + len(draft), vocab] after the last committed token, then after each node
    hidden: Tensor | None = None  # [len(tokens) + len(draft), layers, hidden] residuals after the layers asked for


class Model(Protocol):
    vocab_size: int
    num_layers: int
    context: int  # the longest sequence it was made for
    capacity: int  # how many tokens its cache may hold, over all sequences

    def length(self, id: int) -> int:
        """How many tokens of the sequence the cache has seen."""
        ...

    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[Output]:
        """One pass. Afterwards the cache has seen the feeds' tokens and nodes."""
        ...

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        """Keep the first `length` tokens and, of the nodes fed after them, those of `path`; forget the rest."""
        ...

    def free(self, id: int) -> None:
        """Forget the sequence; unknown ids are fine."""
        ...

    def first(self, layers: int) -> Model:
        """The model's own first layers with its output matrix: the same weights, a cache of its own."""
        ...
