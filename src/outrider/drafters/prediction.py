"""Text the caller expects: an edited document, a template. Drafted as it stands, realigned where the output departs from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Parts


class Prediction(Drafter):
    name = "prediction"

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
        self._places: dict[int, tuple[int, int]] = {}  # id -> (output tokens read, place in the prediction; -1: lost)

    def propose(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(room, self._options.length)) for seq, room in zip(seqs, rooms, strict=True)]

    def _propose(self, seq: Sequence, length: int) -> Draft:
        if not seq.prediction:
            return EMPTY
        read, place = self._places.get(seq.id, (0, 0))
        output = seq.tokens[seq.prompt :]
        place = self._follow(seq.prediction, output, read, place)
        self._places[seq.id] = (len(output), place)
        return Draft.chain(seq.prediction[place : place + length]) if place >= 0 else EMPTY

    def _follow(self, prediction: tuple[int, ...], output: list[int], read: int, place: int) -> int:
        """Where in the prediction the output stands now."""
        fresh = tuple(output[read:])
        if place >= 0 and prediction[place : place + len(fresh)] == fresh:
            return place + len(fresh)
        longest = min(self._options.overlap, len(output))
        for size in range(longest, self._options.least - 1, -1):
            tail = tuple(output[-size:])
            ends = [i + size for i in range(len(prediction) - size + 1) if prediction[i : i + size] == tail]
            if ends:
                return min(ends, key=lambda end: abs(end - place))
        return -1

    def forget(self, id: int) -> None:
        self._places.pop(id, None)
