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
_COST = 0.3  # what a draft of the head costs, in tokens that plain decoding would have written meanwhile


class Lookup:
    def __init__(self, least: int, parts: Parts) -> None:
        """`least`: how many tokens have to match."""
        self._ngram = Ngram(Ngram.Options(max_n=least + 2, min_n=least), parts)
        self._tries, self._kept = 1.0, 1.5  # drafts of the head, and what was kept of them

    def propose(self, seq: Sequence, room: int) -> Draft:
        """A copy, if it promises at least what the head earns; the choice looks at nothing but the past."""
        draft = self._ngram.propose([seq], [room])[0] if room > 0 else EMPTY
        if not draft or _promise(draft.chances) < self._kept / self._tries - _COST:
            return EMPTY
        return replace(draft, sources=(Ngram.name,) * len(draft))

    def observe(self, step: Step) -> None:
        self._ngram.observe(step)
        if step.verdict is not None and step.draft and not step.draft.sources:
            self._tries, self._kept = _FADE * self._tries + 1.0, _FADE * self._kept + len(step.verdict.path)

    def forget(self, id: int) -> None:
        self._ngram.forget(id)


def _promise(chances: Seq[float]) -> float:
    """How many tokens of a chain will be kept, as far as its chances can be believed."""
    return sum(accumulate(chances, mul))
