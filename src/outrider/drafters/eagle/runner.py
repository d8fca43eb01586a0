"""What runs an EAGLE head: it takes in what was committed, and steps through what is drafted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.core.sequence import Scope


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """What a head makes of some rows."""

    states: Tensor  # [rows, hidden] what the next step reads
    logits: Tensor  # [rows, draft vocabulary]

    def pick(self, rows: Seq[int]) -> HeadOutput:
        if len(rows) == len(self.logits):
            return self
        chosen = torch.tensor(rows, device=self.logits.device)
        return HeadOutput(self.states[chosen], self.logits[chosen])


@dataclass(frozen=True, eq=False)
class Grown:
    """The nodes of one sequence's draft, parents first."""

    tokens: list[int]
    parents: list[int]
    acceptance: list[float]  # probability that each is kept if its parent is


@dataclass(frozen=True)
class DraftRequest:
    """A draft that the host does not look at while it grows."""

    size: int  # nodes, at most
    tokens: int = 0  # of the text
    temperature: float = 0.0  # 0: the likeliest tokens; else those that are likeliest under the noise of its dice
    key: int = 0  # of the dice


@dataclass(frozen=True)
class DraftShape:
    """How drafts grow where the host does not look on."""

    depth: int  # of the deepest node
    width: int  # nodes that are followed at each depth; 1: a chain
    nodes: int  # of a draft, at most
    sharpness: float  # the head's logits are multiplied by it
    stop: float  # probability to be reached below which no node is drafted


ShownStates = tuple[Tensor, Seq[int]]  # [n, layers, hidden] states of the target, and which rows of them


def gathered(shown: Seq[ShownStates]) -> Tensor:
    """[rows, layers, hidden] in one copy, however many there are."""
    if len(shown) == 1 and len(shown[0][1]) == len(shown[0][0]):
        return shown[0][0]
    rows, start = [], 0
    for hidden, chosen in shown:
        rows += [start + row for row in chosen]
        start += len(hidden)
    joined = torch.cat([hidden for hidden, _ in shown])
    return joined if len(rows) == start else joined[torch.tensor(rows, device=joined.device)]


class Runner(Protocol):
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        """Take in what was committed: tokens, each with the target's states at the place before it (`hidden` [rows,
        layers, hidden]). What follows the last of each sequence; whatever it had drafted is forgotten."""
        ...

    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        """Drafted tokens, the same number for each sequence and all of one depth: `tokens` [rows], the states that they
        follow [rows, hidden], and their ancestors among the sequence's drafted rows [rows, depth], in order."""
        ...

    def free(self, id: int) -> None: ...


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A runner whose keys of a text can be taken by sequences that begin alike."""

    def begin(self, id: int, tokens: Seq[int], scope: Scope) -> int:
        """Take what is kept of the rows of this text; how many there are now."""
        ...

    def resume(self, id: int, tokens: Seq[int]) -> None:
        """Go on from its first rows, one less than these tokens of its text."""
        ...

    def keep(self, id: int, tokens: Seq[int], scope: Scope) -> None:
        """The rows of these tokens may be taken by others."""
        ...


@runtime_checkable
class WritesDrafts(Protocol):
    """A runner that writes whole drafts without the host."""

    def write(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], asked: Seq[DraftRequest]
    ) -> list[Grown]:
        """Take in what was committed, as `extend`, and draft for each sequence."""
        ...
