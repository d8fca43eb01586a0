"""Whether to draft at all: both ways are measured, the faster one is used, and the other is tried now and then."""

import random

import pytest

from outrider.engine.throughput import (
    FIRST_PASSES,
    LARGEST,
    MEASURED,
    REMEMBERED,
    SELDOM,
    SHARE_SINCE,
    TRY_AGAIN,
    TRY_PASSES,
    BatchWork,
    ThroughputTrial,
)


def steps(trial, count, speeds, seqs=32, left=1e9):
    """So many steps of a pass, each as fast as `speeds` says of its way; the ways they went."""
    ways = []
    for _ in range(count):
        ways.append(trial.drafts(seqs, left=left))
        trial.learn(seqs, ways[-1], 100, 100 / speeds[ways[-1]])
    return ways


def test_both_ways_are_measured_plain_first_and_the_faster_one_is_used():
    for speeds in ({True: 300.0, False: 100.0}, {True: 100.0, False: 300.0}):
        ways = steps(ThroughputTrial(), 2 * MEASURED + TRY_AGAIN // 2, speeds)
        assert ways[: 2 * MEASURED] == [False] * MEASURED + [True] * MEASURED
        assert set(ways[2 * MEASURED :]) == {speeds[True] > speeds[False]}


def test_the_slower_way_is_tried_again_and_wins_when_it_became_faster():
    trial = ThroughputTrial()
    speeds = {True: 100.0, False: 300.0}
    steps(trial, 2 * MEASURED, speeds)
    while trial.drafts(32, left=1e9) is False:
        steps(trial, 1, speeds)
    speeds[True] = 3000.0
    steps(trial, 2 * TRY_PASSES, speeds)
    assert set(steps(trial, TRY_AGAIN // 2, speeds)) == {True}


def test_about_as_fast_is_not_worth_it():
    trial, speeds = ThroughputTrial(), {True: 0.99e5, False: 1e5}
    steps(trial, 2 * MEASURED, speeds, seqs=64)
    assert not any(steps(trial, TRY_AGAIN // 2, speeds, seqs=64))


def test_while_little_is_known_drafts_are_believed_to_be_faster():
    """A few rounds of one text that kept little say less than as many of a large batch."""
    slower = {True: 0.85e5, False: 1e5}
    few, many = ThroughputTrial(), ThroughputTrial()
    assert set(steps(few, 2 * MEASURED + 4, slower, seqs=1)[2 * MEASURED :]) == {True}
    assert set(steps(many, 2 * MEASURED + 4, slower, seqs=64)[2 * MEASURED :]) == {False}
    assert sum(steps(few, 100, slower, seqs=1)) < 40


def test_a_way_that_is_used_stays_until_it_is_slower():
    trial = ThroughputTrial()
    steps(trial, 2 * MEASURED, {True: 110.0, False: 100.0})
    assert all(steps(trial, 60, {True: 104.0, False: 100.0}))
    assert not all(steps(trial, 60, {True: 90.0, False: 100.0}))


def test_a_step_that_took_long_once_decides_nothing():
    trial = ThroughputTrial()
    steps(trial, MEASURED, {False: 100.0})
    for _ in range(2):
        trial.learn(32, True, 100, 1000.0)
    ways = steps(trial, MEASURED - 2 + 20, {True: 300.0, False: 100.0})
    assert set(ways) == {True}


def test_the_first_part_of_a_step_is_no_measure():
    """The host begins the step in its time, and what a process does once is in it."""
    trial = ThroughputTrial()
    trial.learn(1, False, 8, 5.0, 8, begins=True)
    assert not trial.drafts(1)
    trial.learn(1, False, 8, 0.0052, 8)
    assert trial.drafts(1)
    trial.learn(1, True, 12, 5.0, 4, begins=True)
    trial.learn(1, True, 36, 0.0101, 12)
    assert trial.prefers_drafts(1)


def test_every_size_of_batch_has_its_own_answer():
    trial = ThroughputTrial()
    steps(trial, 2 * MEASURED, {True: 300.0, False: 100.0}, seqs=8)
    steps(trial, 2 * MEASURED, {True: 100.0, False: 300.0}, seqs=32)
    assert trial.drafts(9)
    assert not trial.drafts(33)


def test_more_than_there_are_graphs_for_never_draft():
    trial = ThroughputTrial()
    assert not any(steps(trial, 100, {False: 100.0}, seqs=LARGEST + 1))
    assert trial.prefers_plain(LARGEST + 1)
    assert not trial.prefers_drafts(LARGEST + 1)
    assert not trial.is_due(LARGEST + 1, left=1e9)


def test_what_does_not_pay_with_fewer_is_not_tried_at_first():
    trial = ThroughputTrial()
    steps(trial, 2 * MEASURED, {True: 100.0, False: 300.0}, seqs=4)
    assert trial.prefers_plain(16)
    assert not any(steps(trial, TRY_AGAIN, {False: 300.0}, seqs=16))
    assert trial.drafts(2) is trial.prefers_plain(2) is False  # of fewer it says nothing: plain steps come first
    steps(trial, 2 * MEASURED, {True: 300.0, False: 100.0}, seqs=2)
    assert trial.prefers_drafts(2)
    other = ThroughputTrial()
    steps(other, 2 * MEASURED, {True: 300.0, False: 100.0}, seqs=4)
    assert not other.prefers_plain(16)


@pytest.mark.parametrize("faster", [False, True])
def test_tries_lose_a_bounded_share_of_the_time(faster):
    trial, speeds = ThroughputTrial(), {faster: 3e5, not faster: 1e5}
    steps(trial, 2 * MEASURED, speeds)
    ways = steps(trial, 40_000, speeds)
    slow = ways.count(not faster)
    assert trial.tries >= 2
    lost = slow * (100 / 1e5 - 100 / 3e5)
    assert lost <= 1.2 * SHARE_SINCE * (len(ways) - slow) * 100 / 3e5


def test_no_try_costs_much_of_what_the_batch_still_writes():
    """Or it waits for long."""
    trial, speeds = ThroughputTrial(), {True: 5e4, False: 1e5}  # 1 ms a plain pass
    steps(trial, 2 * MEASURED, speeds)
    ways = steps(trial, int(1e3 * SELDOM) - 200, speeds, left=100.0)
    assert not any(ways)
    assert not trial.is_due(32, left=100.0)
    assert any(steps(trial, 400, speeds, left=100.0))


def test_a_try_that_loses_much_waits_for_longer_than_usual():
    """Prompts are read for it, for seconds: not every minute."""
    trial, speeds = ThroughputTrial(), {True: 5e4, False: 1e5}
    steps(trial, 2 * MEASURED, speeds)
    while not trial.is_due(32):
        steps(trial, 100, speeds)
    trial.charge(32, None, 0.05 * SELDOM)
    steps(trial, 2 * TRY_PASSES, speeds)  # the try
    assert not any(steps(trial, int(2e3 * SELDOM), speeds))
    assert any(steps(trial, int(2e3 * SELDOM), speeds))


def test_what_was_read_for_a_try_counts_as_lost():
    waits = []
    for charged in (0.0, 0.05):
        trial, speeds = ThroughputTrial(), {True: 5e4, False: 1e5}
        steps(trial, 2 * MEASURED, speeds)
        ends = []
        for place in range(30_000):
            if trial.is_due(32, left=1e9) and (not ends or ends[-1] < place - TRY_PASSES):
                trial.charge(32, None, charged)
                ends.append(place)
            steps(trial, 1, speeds)
        waits.append(len(ends))
    assert waits[0] > 2 * waits[1] > 0


def test_many_tokens_in_few_steps_count():
    """As a long copy brings them: in most steps drafting is slower, and over all of them much faster."""
    trial, generator, written = ThroughputTrial(), random.Random(0), [0, 0]
    for _ in range(2000):
        drafts = trial.drafts(4, left=1e3)
        tokens = sum(12 if drafts and generator.random() < 0.1 else 1 for _ in range(4))
        trial.learn(4, drafts, tokens, 0.0012 if drafts else 0.0009)
        written[drafts] += 1
    assert written[True] > 1800


def test_passes_that_meet_new_shapes_decide_nothing_though_they_are_many():
    trial = ThroughputTrial()
    steps(trial, MEASURED, {False: 4000.0}, seqs=4)
    for new in range(MEASURED):
        trial.learn(4, True, 100, 0.5 if new % 3 else 0.0125)
    assert steps(trial, 40, {True: 8000.0, False: 4000.0}, seqs=4) == [True] * 40


def test_plain_steps_of_many_passes_are_as_fast_as_those_of_one():
    trial = ThroughputTrial()
    for count in range(2 * FIRST_PASSES):
        passes = 16 if count % 4 == 0 else 1
        trial.learn(64, False, 64 * passes, 0.001 * passes, passes)
    for _ in range(MEASURED):
        trial.learn(64, True, 70, 0.001)
    assert trial.drafts(64)


def test_an_adapter_with_which_drafts_do_not_pay():
    """What was found without it, or with another, does not decide for it; the latest are remembered."""
    trial = ThroughputTrial()
    speeds = {"": {True: 200.0, False: 100.0}, "haiku": {True: 70.0, False: 100.0}}
    for adapter in speeds:
        for _ in range(2 * MEASURED):
            way = trial.drafts(1, adapter)
            trial.learn(1, way, 100, 100 / speeds[adapter][way], work=adapter)
    assert trial.drafts(1, "")
    assert trial.prefers_plain(1, "haiku")
    for other in range(REMEMBERED - 1):
        assert not trial.drafts(1, other)
    assert trial.prefers_plain(1, "haiku")
    for other in range(REMEMBERED, 2 * REMEMBERED):
        trial.drafts(1, other)
    assert not trial.prefers_plain(1, "haiku"), "it would have to be tried again"


def test_a_try_that_is_due_is_not_jumped_over_by_a_long_step():
    """A plain step writes 48 tokens in parts of 4, and only then is asked again."""
    trial, ways = ThroughputTrial(), []
    for _ in range(2000):
        ways.append(trial.drafts(1, left=1e9))
        for _ in range(3 if ways[-1] else 12):
            trial.learn(1, ways[-1], 4, 0.1 if ways[-1] else 0.0022, 4)
    assert not ways[0]
    assert 2 <= trial.tries <= 20


@pytest.mark.parametrize(("whole", "pays"), [(100.0, False), (10_000.0, True)])
def test_what_it_takes_to_begin_counts_by_the_length_of_the_batch(whole, pays):
    """Rounds are 1.12 times as fast as plain passes of 1 ms, and to begin them takes 12 ms, which are capped at 8."""
    trial = ThroughputTrial()
    for _ in range(3):
        trial.learn(64, False, 64 * 8, 0.008, 8)
    for _ in range(4):
        trial.drafts(64, whole=whole)
        trial.learn(64, True, 64 * 4 * 1.68, 0.012 + 4 * 0.0015, 4, begins=True)
        trial.learn(64, True, 64 * 12 * 1.68, 12 * 0.0015, 12)
    assert trial.prefers_drafts(64, whole=whole) is pays
    assert trial.prefers_plain(64, whole=whole) is not pays


def test_what_pays_with_more_needs_no_look_with_fewer():
    trial = ThroughputTrial()
    steps(trial, 2 * MEASURED, {True: 150.0, False: 100.0}, seqs=16)
    assert trial.drafts(3)
    assert trial.prefers_drafts(1)
    assert not trial.drafts(40)  # of more it says that a look may be worth it; plain steps come first


def test_who_waits_decides_what_is_expected_from_the_other_case():
    """What pays for the slowest text pays on average, and what does not on average does not for the slowest."""
    drafters = frozenset({("", "")})
    for known, asked, speed, expected in [
        (True, False, 150.0, (True, False)),
        (False, True, 80.0, (False, True)),
        (True, False, 80.0, (False, False)),
        (False, True, 150.0, (False, False)),
    ]:
        trial = ThroughputTrial()
        for drafted in (False, True):
            for _ in range(MEASURED):
                trial.learn(16, drafted, 1e6, 1e6 / (speed if drafted else 100.0), work=BatchWork(drafters, known))
        other = BatchWork(drafters, asked)
        assert (trial.prefers_drafts(16, other), trial.prefers_plain(16, other)) == expected
