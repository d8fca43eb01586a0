"""Prompt lookup in rounds: texts are searched on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core.sequence import Sequence
from outrider.drafters import branches
from outrider.drafters.rounds import kernels, lookup_kernels
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables
from outrider.models.cuda.model import CudaLlama


class LookupGuesser:
    layers: tuple[int, ...] = ()
    reads_texts = joins = True

    def __init__(self, name: str, target: CudaLlama, sizes: tuple[int, int], length: int, tree: int) -> None:
        """`sizes`: of the shortest and the longest match. `length`: tokens that are copied, at most. `tree`: nodes; 0:
        a chain."""
        self.name, self._target, self._sizes, self._length, self._tree = name, target, sizes, length, tree

    def takes(self, seq: Sequence) -> bool:
        return True

    def draws(self, seq: Sequence) -> bool:
        return False

    def follows(self, seq: Sequence) -> bool:
        return True

    def begin(self, seqs: Seq[Sequence], ahead: int, wide: int) -> bool:
        return True

    def go_on(self, seqs: Seq[Sequence], ahead: int) -> bool:
        return True

    def guesses(self, sequences: int, budget: int, alone: bool) -> LookupGuesses:
        """Beside another draft there are no common tokens: it has them itself, where they are likely (LOG, 2026-11-18,
        lookup as a tree)."""
        nodes, is_tree = min(self._tree or self._length, budget), self._tree > 0
        size = DraftSize(nodes, min(self._length, nodes))
        return LookupGuesses(self._target, sequences, size, self._sizes, is_tree, is_tree and alone)

    def end(self, seqs: Seq[Sequence], rounds: Seq[LoopedRounds]) -> None:
        """Nothing is kept between the rounds but the texts."""


class LookupGuesses:
    def __init__(
        self, target: CudaLlama, sequences: int, size: DraftSize, sizes: tuple[int, int], is_tree: bool, common: bool
    ) -> None:
        """`common`: whether branches may begin with common tokens."""
        self.size, self._sizes, self._padding = size, sizes, target.padding
        self._matches, device = branches.MATCHES if is_tree else 1, target.device
        self._costs = torch.tensor(branches.cost_table(kernels.POWER), dtype=torch.int32, device=device)
        self._kinds = torch.zeros(sequences, branches.NEAR, dtype=torch.int32, device=device) if common else None
        self.found = torch.zeros(sequences, 1 + 3 * size.nodes, dtype=torch.int32, device=device)

    def send(self, seqs: Seq[Sequence], tables: RoundTables) -> None:
        """The texts are there."""

    def guess(self, tables: RoundTables, number: int) -> None:
        if self._kinds is not None:
            lookup_kernels.count_kinds(tables.written, tables.texts, self._kinds)
        lookup_kernels.look_up(
            tables.written, tables.texts, self._kinds, self._costs, self.found, self._sizes, self._matches,
            self.size.depth, self._padding,
        )  # fmt: skip
