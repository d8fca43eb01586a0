"""Calibration: how often guesses are kept, by how many tokens matched before them or by what a head states."""

import random

import pytest

from outrider.core.draft import judged_tree
from outrider.drafters.confidence import (
    AGREED,
    DIFFERED,
    LEAST,
    LONGEST,
    JointCalibration,
    MatchCalibration,
    StatedCalibration,
    judged_chain,
    match_kind,
)


def test_longer_matches_are_believed_more_from_the_start():
    believed = [MatchCalibration().probability(n) for n in range(1, LONGEST + 1)]
    assert believed == sorted(believed)
    assert 0 < believed[0] < 0.5 < believed[-1] < 1


def test_what_is_seen_wins_over_what_was_believed():
    calibration = MatchCalibration()
    for _ in range(200):
        calibration.learn(3, kept=False)
        calibration.learn(1, kept=True)
    assert calibration.probability(3) < 0.15
    assert calibration.probability(1) > 0.85


def test_one_sequence_starts_from_what_all_have_shown_and_adds_to_it():
    shared = MatchCalibration()
    first = MatchCalibration(shared)
    for _ in range(200):
        first.learn(4, kept=False)
    assert MatchCalibration(shared).probability(4) < MatchCalibration().probability(4)


def test_old_news_fade():
    calibration = MatchCalibration()
    for held in [False] * 200 + [True] * 200:
        calibration.learn(2, held)
    assert calibration.probability(2) > 0.8


def test_matches_longer_than_the_most_count_as_the_most():
    assert MatchCalibration().probability(match_kind(LONGEST + 50)) == MatchCalibration().probability(
        match_kind(LONGEST)
    )


def test_matches_of_one_length_are_counted_by_what_else_followed():
    calibration = MatchCalibration()
    for _ in range(200):
        calibration.learn(match_kind(3, AGREED), kept=True)
        calibration.learn(match_kind(3, DIFFERED), kept=False)
    assert (
        calibration.probability(match_kind(3, DIFFERED)) < 0.15 < 0.85 < calibration.probability(match_kind(3, AGREED))
    )
    assert calibration.probability(match_kind(3)) == MatchCalibration().probability(match_kind(3))


class TestStated:
    def test_without_experience_the_head_is_believed(self):
        assert StatedCalibration().probability(0.73) == pytest.approx(0.73)

    def test_one_that_is_too_sure_is_believed_less(self):
        calibration = StatedCalibration()
        for i in range(400):
            calibration.learn(0.75, i % 4 == 0)
        assert calibration.probability(0.75) == pytest.approx(0.25, abs=0.1)
        assert calibration.probability(0.15) == pytest.approx(0.15)  # of which nothing was learned

    def test_one_that_is_too_shy_is_believed_more(self):
        calibration = StatedCalibration()
        for _ in range(400):
            calibration.learn(0.5, True)
        assert 0.9 < calibration.probability(0.5) < 1.0


class TestJoint:
    """Two drafters guess at the same place."""

    def test_before_any_was_seen_the_weights_tell(self):
        assert JointCalibration((0.0, 1.0, 0.0)).probability(0.73, 0.2) == pytest.approx(0.73)
        assert JointCalibration((0.0, 1.0, -1.0)).probability(0.5, 0.8) == pytest.approx(0.2)
        assert 0.9 < JointCalibration((9.0, 9.0, 9.0)).probability(1.0, 1.0) < 1.0  # never certain

    def test_it_learns_how_much_each_of_the_two_says(self):
        """A guess holds as often as the other says it does not, whatever its own drafter says."""
        calibration, random_ = JointCalibration((0.0, 1.0, 0.0)), random.Random(2)
        for _ in range(4000):
            own, other = random_.uniform(0.1, 0.9), random_.uniform(0.1, 0.9)
            calibration.learn(own, other, random_.random() < 1.0 - other)
        for own in (0.2, 0.8):
            for other in (0.2, 0.5, 0.8):
                assert calibration.probability(own, other) == pytest.approx(1.0 - other, abs=0.1)

    def test_twenty_guesses_are_enough_to_see_that_one_is_never_right(self):
        calibration = JointCalibration((0.0, 1.0, 0.0))
        for _ in range(20):
            calibration.learn(0.7, 0.5, False)
        assert calibration.probability(0.7, 0.5) < 0.5

    def test_weights_do_not_grow_where_nothing_is_left_to_learn(self):
        calibration = JointCalibration((-1.7, 0.6, -0.35))
        for _ in range(20_000):
            calibration.learn(0.99, 0.99, False)
        never = calibration.probability(0.99, 0.99)
        calibration.learn(0.99, 0.99, False)
        assert calibration.probability(0.99, 0.99) == never == LEAST
        for _ in range(200):
            calibration.learn(0.99, 0.99, True)
        assert calibration.probability(0.99, 0.99) > 0.5, "what was never right is soon believed when it is"
        assert JointCalibration((-1e4, 0.0, 0.0)).probability(0.5, 0.5) == LEAST


class TestNumbers:
    """The formulas, written out: what drafters state must not change when the calibration is rebuilt."""

    def test_of_matches_in_one_sequence_and_in_all(self):
        shared, random_ = MatchCalibration(), random.Random(0)
        own, kind = MatchCalibration(shared), match_kind(5, AGREED)
        tries = hits = own_tries = own_hits = 0.0
        for _ in range(300):
            before = (hits + 8.0 * (1.0 - 0.8**6)) / (tries + 8.0)
            assert shared.probability(kind) == before
            assert own.probability(kind) == (own_hits + 24.0 * before) / (own_tries + 24.0)
            kept = random_.random() < 0.4
            own.learn(kind, kept)
            tries, hits = 0.99 * tries + 1.0, 0.99 * hits + kept
            own_tries, own_hits = 0.98 * own_tries + 1.0, 0.98 * own_hits + kept

    def test_of_stated_probabilities(self):
        calibration, random_ = StatedCalibration(), random.Random(1)
        tries, hits, said = [0.0] * 10, [0.0] * 10, [0.0] * 10
        for _ in range(500):
            stated = random_.choice([random_.random(), 0.0, 1.0, 0.999])
            kind = min(int(stated * 10), 9)
            corrected = stated + (hits[kind] - said[kind]) / (tries[kind] + 8.0)
            assert calibration.probability(stated) == min(max(corrected, 0.001), 0.999)
            kept = random_.random() < 0.5
            calibration.learn(stated, kept)
            tries[kind] = 0.99 * tries[kind] + 1.0
            hits[kind] = 0.99 * hits[kind] + kept
            said[kind] = 0.99 * said[kind] + stated


@pytest.mark.parametrize(
    ("guessed", "written", "judged"),
    [
        ([1, 2, 3], [1, 2, 4, 5], [(0, True), (1, True), (2, False)]),
        ([1, 2, 3], [9, 2, 3], [(0, False)]),
        ([1, 2, 3], [1], [(0, True)]),
        ([], [1], []),
        ([1], [], []),
    ],
)
def test_a_chain_is_judged_up_to_the_first_wrong_guess(guessed, written, judged):
    assert list(judged_chain(guessed, written)) == judged


@pytest.mark.parametrize(
    ("written", "judged"),
    [
        ([7, 9, 1], [(0, False), (1, True), (3, False), (4, True)]),
        ([5, 8, 3, 4], [(0, True), (1, False), (2, True), (5, True)]),
        ([4, 5], [(0, False), (1, False)]),
        ([], []),
    ],
)
def test_a_tree_is_judged_along_the_path_that_was_written(written, judged):
    """5 with 8 with 3 below it, and 7 with 6 and 9 below it."""
    assert list(judged_tree([5, 7, 8, 6, 9, 3], [-1, -1, 0, 1, 1, 2], written)) == judged
