"""Text the caller expects (an edited document, a template): drafted as it stands, realigned where they part."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Parts, Step
from outrider.drafters.odds import Odds, kind

TRUST = 8  # a prediction is believed from its first token on as if so many had matched


@dataclass(frozen=True)
class _Place:
    read: int = 0  # output tokens that were looked at
    at: int = 0  # the place in the prediction that comes next
    matched: int = TRUST  # tokens that agree before it; 0: the output has departed, and this is where it would stand


class Prediction(Drafter):
    name = "prediction"
    sure = free = True
    expects = True

    @dataclass(frozen=True)
    class Options:
        length: int = 16
        overlap: int = 8  # after a departure, align by at most this many of the last output tokens
        least: int = 2  # and by at least this many

    def __init__(self, options: Options, parts: Parts) -> None:
        if options.length < 1:
            raise OutriderError(f"prediction:length must be at least 1, not {options.length}")
        if not 1 <= options.least <= options.overlap:
            raise OutriderError(
                f"prediction needs 1 <= least <= overlap, not least={options.least}, overlap={options.overlap}"
            )
        self._options = options
        self._odds = Odds()
        self._places: dict[int, _Place] = {}

    def propose(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(room, self._options.length)) for seq, room in zip(seqs, rooms, strict=True)]

    def _propose(self, seq: Sequence, length: int) -> Draft:
        if not seq.prediction:
            return EMPTY
        output = seq.tokens[seq.prompt :]
        place = self._places[seq.id] = self._follow(seq.prediction, output, self._places.get(seq.id, _Place()))
        if not place.matched:
            return EMPTY
        tokens = seq.prediction[place.at : place.at + length]
        return Draft.chain(tokens, chances=[self._odds.chance(kind(place.matched + i)) for i in range(len(tokens))])

    def observe(self, step: Step) -> None:
        """Learn how far the prediction can be trusted from what was written, drafted or not."""
        place = self._places.get(step.seq.id)
        if place is None or not place.matched or step.verdict is None:
            return
        written = step.seq.tokens[step.seq.prompt + place.read :]
        for i, (expected, token) in enumerate(zip(step.seq.prediction[place.at :], written, strict=False)):
            self._odds.learn(kind(place.matched + i), expected == token)
            if expected != token:
                break

    def _follow(self, prediction: tuple[int, ...], output: list[int], last: _Place) -> _Place:
        """Where in the prediction the output stands now."""
        fresh = tuple(output[last.read :])
        at = last.at + len(fresh)
        if last.matched and prediction[last.at : at] == fresh:
            return _Place(len(output), at, last.matched + len(fresh))
        longest = min(self._options.overlap, len(output))
        for size in range(longest, self._options.least - 1, -1):
            tail = tuple(output[-size:])
            ends = [i + size for i in range(len(prediction) - size + 1) if prediction[i : i + size] == tail]
            if ends:
                return _Place(len(output), min(ends, key=lambda end: abs(end - at)), size)
        return _Place(len(output), at, matched=0)

    def forget(self, id: int) -> None:
        self._places.pop(id, None)
