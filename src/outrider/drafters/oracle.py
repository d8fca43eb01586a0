"""For measurement only: this drafter knows the target's answer and makes errors at a chosen rate, so the engine can be
measured at any acceptance rate, even with weights for which there is no drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.dice import DRAFT
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter


class Oracle(Drafter):
    """The answer, as token ids, is the request's prediction."""

    name = "oracle"
    reads_prediction = for_measurement = True

    @dataclass(frozen=True)
    class Options:
        rate: float = 0.8  # of guesses that are right
        length: int = 5

    def __init__(self, options: Options, context: BuildContext) -> None:
        if not 0.0 <= options.rate <= 1.0:
            raise OutriderError(f"oracle:rate must be between 0 and 1, not {options.rate}")
        if options.length < 1:
            raise OutriderError(f"oracle:length must be at least 1, not {options.length}")
        self._options, self._vocab = options, context.target.vocab_size
        self._answers: dict[
            int, list[int]
        ] = {}  # by sequence: the answer with its errors, so that asking costs nothing

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [
            self._propose(seq, min(budget, self._options.length)) for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _propose(self, seq: Sequence, length: int) -> Draft:
        at = len(seq.tokens) - seq.prompt
        if seq.id not in self._answers:
            self._answers[seq.id] = [self._guess(seq, place, token) for place, token in enumerate(seq.prediction)]
        guessed = self._answers[seq.id][at : at + length]
        return Draft.chain(guessed) if guessed else EMPTY

    def forget(self, id: int) -> None:
        self._answers.pop(id, None)

    def _guess(self, seq: Sequence, place: int, token: int) -> int:
        """A place has a random number of its own, however often and from wherever it is guessed."""
        right = seq.dice.uniform(seq.prompt + place, DRAFT) < self._options.rate
        return token if right else (token + 1) % self._vocab
