"""Lookup beside a head: when a copy is taken instead of asking the head."""

import pytest
import tiny

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.base import Step
from outrider.drafters.lookup import Lookup, _promise

TEXT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


def lookup(kept: int, drafts: int = 60) -> Lookup:
    """After as many drafts of the head, of which `kept` of 5 tokens were kept each time."""
    made = Lookup(3, tiny.parts("llama"))
    for _ in range(drafts):
        made.observe(Step(sequence(), [8], Draft.chain([1] * 5), Verdict(tuple(range(kept)), 0), None))
    return made


def sequence() -> Sequence:
    return Sequence(0, list(TEXT), SamplingParams(max_tokens=50))


def test_a_match_is_copied_where_the_head_keeps_little():
    draft = lookup(kept=1).propose(sequence(), 6)
    assert draft.tokens[:3] == (9, 10, 11)
    assert set(draft.sources) == {"ngram"}


def test_it_is_not_where_the_head_keeps_all():
    assert not lookup(kept=5).propose(sequence(), 6)


def test_nothing_is_copied_without_room_or_match():
    assert not lookup(kept=0).propose(sequence(), 0)
    assert not lookup(kept=0).propose(Sequence(1, [1, 2, 3, 4], SamplingParams(max_tokens=9)), 6)


def test_a_copy_promises_what_it_gains_beyond_its_rows():
    assert _promise([0.5, 0.5, 0.5]) == pytest.approx(0.25)  # the second and third cost more than they bring
    assert _promise([1.0, 1.0]) == pytest.approx(1.5)
    assert _promise([]) == 0.0
