"""Drafts the text that the caller expects (an edited document, a template) as it is, and realigns it where the answer
differs from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.confidence import MatchCalibration, judged_chain, match_kind

TRUST = 8  # tokens: a prediction is believed from its first token on as if this many had matched before it


@dataclass(frozen=True)
class _PredictionPlace:
    read: int = 0  # output tokens that were looked at
    at: int = 0  # the place in the prediction that comes next
    matched: int = TRUST  # tokens that agree before it; 0: the output has departed, and this is where it would stand


class Prediction(Drafter):
    name = "prediction"
    reports_acceptance = is_free = True
    sees_all = False
    reads_prediction = True

    @dataclass(frozen=True)
    class Options:
        length: int = 16
        overlap: int = 8  # after a departure, align by at most this many of the last output tokens
        least: int = 2  # and by at least this many

    def __init__(self, options: Options, context: BuildContext) -> None:
        if options.length < 1:
            raise OutriderError(f"prediction:length must be at least 1, not {options.length}")
        if not 1 <= options.least <= options.overlap:
            raise OutriderError(
                f"prediction needs 1 <= least <= overlap, not least={options.least}, overlap={options.overlap}"
            )
        self._options = options
        self._calibration = MatchCalibration()
        self._places: dict[int, _PredictionPlace] = {}
        self._found: dict[int, tuple[dict[int, int], list[int]]] = {}  # by sequence, once it has departed: see _ends

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [
            self._propose(seq, min(budget, self._options.length)) for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _propose(self, seq: Sequence, length: int) -> Draft:
        if not seq.prediction:
            return EMPTY
        place = self._places[seq.id] = self._follow(seq, self._places.get(seq.id, _PredictionPlace()))
        if not place.matched:
            return EMPTY
        tokens = seq.prediction[place.at : place.at + length]
        acceptance = [self._calibration.probability(match_kind(place.matched + i)) for i in range(len(tokens))]
        return Draft.chain(tokens, acceptance=acceptance)

    def observe(self, step: Step) -> None:
        """Learn how far the prediction can be trusted from what was written, drafted or not."""
        place = self._places.get(step.seq.id)
        if place is None or not place.matched or step.verdict is None:
            return
        written = step.seq.tokens[step.seq.prompt + place.read :]
        expected = step.seq.prediction[place.at : place.at + len(written)]
        for i, kept in judged_chain(expected, written):
            self._calibration.learn(match_kind(place.matched + i), kept)

    def _follow(self, seq: Sequence, last: _PredictionPlace) -> _PredictionPlace:
        """Where in the prediction the output stands now."""
        fresh = tuple(seq.tokens[seq.prompt + last.read :])
        read, at = last.read + len(fresh), last.at + len(fresh)
        if last.matched and seq.prediction[last.at : at] == fresh:
            return _PredictionPlace(read, at, last.matched + len(fresh))
        tail = seq.tokens[max(seq.prompt, len(seq.tokens) - self._options.overlap) :]
        found = [(_shared(tail, seq.prediction, end), -abs(end - at), -end) for end in self._ends(seq, tail)]
        size, _, end = max(found, default=(0, 0, 0))
        return (
            _PredictionPlace(read, at, matched=0) if size < self._options.least else _PredictionPlace(read, -end, size)
        )

    def _ends(self, seq: Sequence, tail: list[int]) -> Iterator[int]:
        """Where the last tokens of the output, as few as will do, may end in the prediction. It is searched once;
        numbers are kept, not tuples and lists: thousands of those would call for a garbage collection."""
        least = self._options.least
        if len(tail) < least:
            return
        if seq.id not in self._found:
            last: dict[int, int] = {}  # by hash, the last end
            before = [0] * (len(seq.prediction) + 1)  # by end, the one before it
            for end in range(least, len(seq.prediction) + 1):
                key = hash(seq.prediction[end - least : end])
                before[end], last[key] = last.get(key, 0), end
            self._found[seq.id] = last, before
        last, before = self._found[seq.id]
        end = last.get(hash(tuple(tail[-least:])), 0)
        while end:
            yield end
            end = before[end]

    def forget(self, id: int) -> None:
        self._places.pop(id, None)
        self._found.pop(id, None)


def _shared(tail: list[int], prediction: tuple[int, ...], end: int) -> int:
    """How many of the last tokens stand before this place."""
    most = min(len(tail), end)
    return next((i for i in range(most) if tail[-1 - i] != prediction[end - 1 - i]), most)
