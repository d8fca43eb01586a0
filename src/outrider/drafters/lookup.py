"""Prompt lookup beside a head: copy from the text where a long match promises more than the head usually keeps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from operator import mul

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Sequence
from outrider.drafters.base import Parts, Step
from outrider.drafters.ngram import Ngram

_FADE = 0.97  # what an old draft of the head weighs after each new one
# in tokens that would be written meanwhile:
_DRAFT = 0.15  # what a draft of the head takes
_ROW = 0.25  # and a row of the target's pass
_BETTER = 1.5  # where the text repeats itself the head, too, keeps more than it usually does


class Lookup:
    def __init__(self, least: int, parts: Parts) -> None:
        """`least`: how many tokens have to match."""
        self._ngram = Ngram(Ngram.Options(max_n=least + 2, min_n=least), parts)
        self._tries, self._gain = 1.0, 0.7  # drafts of the head, and what they gained

    def propose(self, seq: Sequence, room: int) -> Draft:
        """A copy, if it promises more than the head earns; the choice looks at nothing but the past."""
        draft = self._ngram.propose([seq], [room])[0] if room > 0 else EMPTY
        if not draft or _promise(draft.chances) < _BETTER * self._gain / self._tries - _DRAFT:
            return EMPTY
        return replace(draft, sources=(Ngram.name,) * len(draft))

    def observe(self, step: Step) -> None:
        self._ngram.observe(step)
        if step.verdict is not None and step.draft and not step.draft.sources:
            gain = len(step.verdict.path) - _ROW * len(step.draft)
            self._tries, self._gain = _FADE * self._tries + 1.0, _FADE * self._gain + gain

    def forget(self, id: int) -> None:
        self._ngram.forget(id)


def _promise(chances: Seq[float]) -> float:
    """What a chain will gain, as far as its chances can be believed; nodes that cost more than that are not run."""
    return sum(max(reach - _ROW, 0.0) for reach in accumulate(chances, mul))
