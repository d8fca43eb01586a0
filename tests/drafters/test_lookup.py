"""Lookup beside a head: when the head is not asked, and how both make one draft."""

from dataclasses import replace

import pytest
import tiny

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.base import Step
from outrider.drafters.eagle.with_lookup import Lookup

TEXT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


def lookup(kept: int, drafts: int = 60) -> Lookup:
    """After as many drafts of the head, of which `kept` of 5 tokens were kept each time."""
    made = Lookup(3, tiny.parts("llama"))
    for _ in range(drafts):
        made.observe(Step(sequence(), [8], Draft.chain([1] * 5), Verdict(tuple(range(kept)), 0), None))
    return made


def sequence() -> Sequence:
    return Sequence(0, list(TEXT), SamplingParams(max_tokens=50))


def copy(*tokens: int, acceptance: list[float]) -> Draft:
    return replace(Draft.chain(tokens, acceptance=acceptance), sources=("ngram",) * len(tokens))


def test_as_many_tokens_have_to_match_as_can_be_counted():
    tokens = list(range(16)) * 2
    assert Lookup(16, tiny.parts("llama")).propose(Sequence(0, tokens, SamplingParams(max_tokens=50)), 3)
    with pytest.raises(OutriderError, match="eagle:lookup must be at most 16, not 17"):
        Lookup(17, tiny.parts("llama"))


def test_what_followed_the_match_is_copied():
    draft = lookup(kept=1).propose(sequence(), 6)
    assert draft.tokens[:3] == (9, 10, 11)
    assert set(draft.sources) == {"ngram"}
    assert draft.borrowed


def test_nothing_is_copied_without_room_or_match():
    assert not lookup(kept=0).propose(sequence(), 0)
    assert not lookup(kept=0).propose(Sequence(1, [1, 2, 3, 4], SamplingParams(max_tokens=9)), 6)


@pytest.mark.parametrize(
    ("kept", "chance", "enough"), [(1, 0.8, False), (1, 0.95, True), (5, 0.95, False), (5, 0.99, True), (0, 0.1, True)]
)
def test_the_head_is_asked_where_it_would_help_more_than_it_takes(kept, chance, enough):
    assert lookup(kept).enough(sequence(), copy(9, acceptance=[chance])) == enough


def test_without_a_copy_the_head_is_always_asked():
    assert not lookup(kept=0).enough(sequence(), EMPTY)


def test_in_a_text_that_goes_fast_the_head_is_asked_less():
    made, seq, likely = lookup(kept=1), sequence(), copy(9, acceptance=[0.8])
    for _ in range(3):
        made.spend(0.001)
    seq.stats.tokens, seq.stats.seconds = 101, {"target": 1.0}  # 0.1 tokens meanwhile
    assert not made.enough(seq, likely)
    seq.stats.seconds = {"target": 0.2}  # 0.5 tokens
    assert made.enough(seq, likely)
    for _ in range(50):
        made.spend(0.0001)
    assert not made.enough(seq, likely)


def test_what_was_copied_is_not_the_merit_of_the_head():
    made = Lookup(3, tiny.parts("llama"))
    draft = Draft((1, 2, 3), (-1, 0, 1), sources=("", "ngram", "ngram"), acceptance=(0.5,) * 3)
    for _ in range(200):
        made.observe(Step(sequence(), [8], draft, Verdict((0, 1, 2), 0), None))
    assert made._kept / made._tries == pytest.approx(1.0, abs=0.01)


def merged(draft: Draft, other: Draft) -> Draft:
    return Lookup(3, tiny.parts("llama")).merge(sequence(), draft, other)


class TestMerged:
    def test_where_they_part_the_copy_is_a_branch(self):
        tree = merged(Draft.chain([1, 2, 3], acceptance=[0.8, 0.5, 0.5]), copy(1, 7, 8, acceptance=[0.9, 0.9, 0.7]))
        assert tree.tokens == (1, 2, 3, 7, 8)
        assert tree.parents == (-1, 0, 1, 0, 3)
        assert tree.acceptance == pytest.approx((0.9, 0.5, 0.5, 0.9 * 0.5, 0.7))
        assert tree.sources == ("", "", "", "ngram", "ngram")
        assert not tree.borrowed
        assert tree.named("eagle") == ("eagle",) * 3 + ("ngram",) * 2

    def test_a_copy_that_goes_on_after_the_head_hangs_below_it(self):
        tree = merged(Draft.chain([1], acceptance=[0.8]), copy(1, 2, acceptance=[0.5, 0.6]))
        assert tree.is_chain
        assert tree.tokens == (1, 2)
        assert tree.acceptance == pytest.approx((0.8, 0.6))

    def test_a_copy_that_says_the_same_adds_no_node(self):
        tree = merged(Draft.chain([1, 2], acceptance=[0.8, 0.1]), copy(1, 2, acceptance=[0.5, 0.6]))
        assert tree.tokens == (1, 2)
        assert tree.acceptance == pytest.approx((0.8, 0.6))
        assert not tree.sources

    def test_where_the_head_is_right_as_a_rule_the_copy_is_trusted_less(self):
        made, head = Lookup(3, tiny.parts("llama")), Draft.chain([1], acceptance=[0.2])
        before = made.merge(sequence(), head, copy(7, acceptance=[0.9])).acceptance[1]
        for _ in range(100):
            seq = sequence()
            draft = made.merge(seq, head, copy(7, acceptance=[0.9]))
            seq.tokens += [1, 5]
            made.observe(Step(seq, [8], draft, Verdict((0,), 5), None))
        tree = made.merge(sequence(), head, copy(7, acceptance=[0.9]))
        assert before == pytest.approx(0.72)
        assert len(tree) == 1 or tree.acceptance[1] < 0.2

    def test_what_was_never_reached_teaches_nothing(self):
        made, head = Lookup(3, tiny.parts("llama")), Draft.chain([1, 2], acceptance=[0.9, 0.2])
        for _ in range(100):
            seq = sequence()
            draft = made.merge(seq, head, copy(1, 7, acceptance=[0.9, 0.9]))
            seq.tokens += [3]  # neither the head's nor the copy's
            made.observe(Step(seq, [8], draft, Verdict((), 3), None))
        assert made.merge(sequence(), head, copy(1, 7, acceptance=[0.9, 0.9])).acceptance[2] == pytest.approx(0.72)
        assert made._parted != {}
        made.forget(0)
        assert made._parted == {}
