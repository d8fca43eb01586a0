"""Prompt lookup in rounds: texts are searched on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core.sequence import Sequence
from outrider.drafters.rounds import kernels
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables
from outrider.models.cuda.model import CudaLlama


class LookupGuesser:
    layers: tuple[int, ...] = ()
    reads_texts = is_chain = True

    def __init__(self, name: str, target: CudaLlama, sizes: tuple[int, int], length: int) -> None:
        """`sizes`: of the shortest and the longest match. `length`: tokens that are copied, at most."""
        self.name, self._target, self._sizes, self._length = name, target, sizes, length

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

    def guesses(self, sequences: int, budget: int) -> LookupGuesses:
        return LookupGuesses(self._target, sequences, min(self._length, budget), self._sizes)

    def end(self, seqs: Seq[Sequence], rounds: Seq[LoopedRounds]) -> None:
        """Nothing is kept between the rounds but the texts."""


class LookupGuesses:
    def __init__(self, target: CudaLlama, sequences: int, length: int, sizes: tuple[int, int]) -> None:
        self.size, self._sizes, self._padding = DraftSize(length, length), sizes, target.padding
        self.found = torch.zeros(sequences, 1 + 3 * length, dtype=torch.int32, device=target.device)

    def send(self, seqs: Seq[Sequence], tables: RoundTables) -> None:
        """The texts are there."""

    def guess(self, tables: RoundTables, number: int) -> None:
        kernels.look_up(tables.written, tables.texts, self.found, self._sizes, self._padding)
