"""What runs an EAGLE head: it takes in what was committed, and steps through what is drafted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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
