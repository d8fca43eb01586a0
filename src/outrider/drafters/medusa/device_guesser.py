"""Medusa heads in rounds on a GPU: a tree of ranks that was measured once, filled with what the heads guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.sequence import Sequence
from outrider.drafters.medusa.head import Paths
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables

# States [n, hidden] -> the likeliest tokens of each head and their probabilities [n, heads, ranks].
Offers = Callable[[Tensor], tuple[Tensor, Tensor]]


class LastStates(Protocol):
    """The target's state before each sequence's last token (the drafter's own books)."""

    name: str
    layers: tuple[int, ...]

    def follows(self, seq: Sequence) -> bool:
        """Whether the state is known."""
        ...

    def state(self, seq: Sequence) -> Tensor:
        """[hidden]"""
        ...

    def took(self, seq: Sequence, state: Tensor) -> None:
        """It is this one now."""
        ...


class MedusaGuesser:
    reads_texts = joins = False

    def __init__(self, states: LastStates, offers: Offers, tree: Paths, device: torch.device) -> None:
        """`tree`: the most useful nodes first."""
        self.name, self.layers, self._states = states.name, states.layers, states
        self._offers, self._tree, self._device = offers, tree, device

    def takes(self, seq: Sequence) -> bool:
        """What the target chooses under its noise is not known to kernels of torch; rejection needs no noise."""
        return seq.params.greedy or seq.rule == "rejection"

    def draws(self, seq: Sequence) -> bool:
        return False

    def follows(self, seq: Sequence) -> bool:
        return self._states.follows(seq)

    def begin(self, seqs: Seq[Sequence], ahead: int, wide: int) -> bool:
        return True

    def go_on(self, seqs: Seq[Sequence], ahead: int) -> bool:
        return True

    def guesses(self, sequences: int, budget: int, alone: bool) -> MedusaGuesses:
        return MedusaGuesses(self._states, self._offers, self._tree[:budget], sequences, self._device)

    def end(self, seqs: Seq[Sequence], rounds: Seq[LoopedRounds]) -> None:
        for seq, own in zip(seqs, rounds, strict=True):
            assert own.states is not None
            self._states.took(seq, own.states[own.rows[-1], 0])


class MedusaGuesses:
    def __init__(self, states: LastStates, offers: Offers, tree: Paths, sequences: int, device: torch.device) -> None:
        self._states, self._offers = states, offers
        nodes, place = len(tree), {(): -1, **{path: node for node, path in enumerate(tree)}}
        self.size = DraftSize(nodes, max(map(len, tree)))
        self._level = torch.tensor([len(path) - 1 for path in tree], device=device)
        self._rank = torch.tensor([path[-1] for path in tree], device=device)
        self._sequence = torch.arange(sequences, device=device)
        self.found = torch.zeros(sequences, 1 + 3 * nodes, dtype=torch.int32, device=device)
        self.found[:, 0] = nodes
        self.found[:, 1 + nodes : 1 + 2 * nodes] = torch.tensor([place[path[:-1]] for path in tree], device=device)

    def send(self, seqs: Seq[Sequence], tables: RoundTables) -> None:
        """Each sequence's first row has its state."""
        tables.kept[:, 0] = 1
        if seqs:
            first = self._sequence[: len(seqs)] * (1 + tables.nodes)
            tables.target.hidden[first, 0] = torch.stack([self._states.state(seq) for seq in seqs])

    def guess(self, tables: RoundTables, number: int) -> None:
        """From the state of the last token that each sequence kept."""
        nodes, wide = self.size.nodes, tables.wide
        last = 1 + wide + (tables.kept[:, 0].long() - 1).clamp(min=0)
        rows = self._sequence * (1 + tables.nodes) + tables.kept.gather(1, last[:, None])[:, 0]
        tokens, stated = self._offers(tables.target.hidden[rows, 0])
        self.found[:, 1 : 1 + nodes] = tokens[:, self._level, self._rank]
        self.found[:, 1 + 2 * nodes :] = stated[:, self._level, self._rank].float().view(torch.int32)
