"""Whether to draft at all: both ways are tried, the faster one is used, and the other is looked at now and then."""

import random
from itertools import pairwise

from outrider.engine.throughput import FIRST_PASSES, REMEMBERED, TRY_AGAIN, TRY_PASSES, TRY_SELDOM, ThroughputTrial


def steps(trial, count, speeds, seqs=32):
    """So many steps, each as fast as `speeds` says of its way; the ways they went."""
    ways = []
    for _ in range(count):
        ways.append(trial.drafts(seqs))
        trial.learn(seqs, ways[-1], 100, 100 / speeds[ways[-1]])
    return ways


def test_both_ways_are_tried_and_the_faster_one_is_used():
    for speeds in ({True: 300.0, False: 100.0}, {True: 100.0, False: 300.0}):
        ways = steps(ThroughputTrial(), 2 * FIRST_PASSES + TRY_AGAIN - 1, speeds)
        assert ways[: 2 * FIRST_PASSES] == [True] * FIRST_PASSES + [False] * FIRST_PASSES
        assert set(ways[2 * FIRST_PASSES :]) == {speeds[True] > speeds[False]}


def test_the_slower_way_is_looked_at_again_and_wins_when_it_became_faster():
    trial = ThroughputTrial()
    steps(trial, 2 * FIRST_PASSES + TRY_AGAIN, {True: 100.0, False: 300.0})
    assert steps(trial, TRY_PASSES, {True: 900.0, False: 300.0}) == [True] * TRY_PASSES
    ways = steps(trial, 3 * (TRY_AGAIN + TRY_PASSES), {True: 900.0, False: 300.0})
    assert sum(ways[-TRY_AGAIN:]) >= TRY_AGAIN - TRY_PASSES  # most of what is known of it is fast by now


def test_hardly_faster_is_not_worth_it():
    ways = steps(ThroughputTrial(), 2 * FIRST_PASSES + TRY_AGAIN - 1, {True: 101.0, False: 100.0})
    assert not any(ways[2 * FIRST_PASSES :])


def test_a_step_that_took_long_once_decides_nothing():
    trial = ThroughputTrial()
    for _ in range(2):
        trial.learn(32, True, 100, 1000.0)
    ways = steps(trial, 2 * FIRST_PASSES - 2 + 20, {True: 300.0, False: 100.0})
    assert set(ways[2 * FIRST_PASSES - 2 :]) == {True}


def test_every_size_of_batch_has_its_own_answer():
    trial = ThroughputTrial()
    steps(trial, 2 * FIRST_PASSES, {True: 300.0, False: 100.0}, seqs=8)
    steps(trial, 2 * FIRST_PASSES, {True: 100.0, False: 300.0}, seqs=256)
    assert trial.drafts(9)
    assert not trial.drafts(300)


def test_the_slower_way_is_looked_at_ever_more_seldom():
    ways = steps(ThroughputTrial(), 2 * FIRST_PASSES + 20 * TRY_SELDOM, {True: 100.0, False: 300.0})[2 * FIRST_PASSES :]
    tried = [i for i, drafts in enumerate(ways) if drafts]
    waits = [after - before for before, after in pairwise(tried) if after > before + 1]
    assert tried[:TRY_PASSES] == [TRY_AGAIN, TRY_AGAIN + 1, TRY_AGAIN + 2]
    assert waits[:3] == [2 * TRY_AGAIN + 1, 4 * TRY_AGAIN + 1, 8 * TRY_AGAIN + 1]
    assert set(waits[4:]) == {TRY_SELDOM + 1}


def test_many_tokens_in_few_steps_count():
    """As a long copy brings them: in most steps drafting is slower, and over all of them much faster."""
    trial, generator, written = ThroughputTrial(), random.Random(0), [0, 0]
    for _ in range(2000):
        drafts = trial.drafts(4)
        tokens = sum(12 if drafts and generator.random() < 0.1 else 1 for _ in range(4))
        trial.learn(4, drafts, tokens, 0.0012 if drafts else 0.0009)
        written[drafts] += 1
    assert written[True] > 1900


def test_passes_that_meet_new_shapes_decide_nothing_though_they_are_many():
    trial = ThroughputTrial()
    for new in range(FIRST_PASSES):
        trial.learn(4, True, 100, 0.5 if new % 3 else 0.0125)
    ways = steps(trial, FIRST_PASSES + 40, {True: 8000.0, False: 4000.0}, seqs=4)
    assert ways == [False] * FIRST_PASSES + [True] * 40


def test_plain_steps_of_many_passes_are_as_fast_as_those_of_one():
    trial = ThroughputTrial()
    for count in range(2 * FIRST_PASSES):
        passes = 16 if count % 4 == 0 else 1
        trial.learn(64, False, 64 * passes, 0.001 * passes)
    for _ in range(FIRST_PASSES):
        trial.learn(64, True, 70, 0.001)
    assert trial.drafts(64)


def test_after_a_change_it_looks_soon_again():
    trial = ThroughputTrial()
    steps(trial, 2 * FIRST_PASSES + 8 * TRY_SELDOM, {True: 100.0, False: 300.0})
    changed = steps(trial, 8 * TRY_SELDOM, {True: 900.0, False: 300.0})
    begin = changed.index(True)
    while not all(changed[begin : begin + TRY_AGAIN - 1]):
        begin += 1
    assert changed[begin:][: 2 * TRY_AGAIN].count(False) == TRY_PASSES


def test_steps_of_many_passes_are_tried_as_many_times_fewer():
    """Where the device drafts by itself, or writes in bulk, a step is several passes."""
    trial, ways = ThroughputTrial(), []
    for _ in range(100):
        ways.append(trial.drafts(16))
        trial.learn(16, ways[-1], 128 if ways[-1] else 16, 0.08 if ways[-1] else 0.001, 8 if ways[-1] else 1)
    assert ways[:3] == [True, True, False]
    assert trial.prefers_plain(16)
    assert [place for place, drafts in enumerate(ways) if drafts] == [0, 1, 2 + FIRST_PASSES + TRY_AGAIN]


def test_an_adapter_with_which_drafts_do_not_pay():
    """What was found without it, or with another, does not decide for it; the latest are remembered."""
    trial = ThroughputTrial()
    speeds = {"": {True: 200.0, False: 100.0}, "haiku": {True: 70.0, False: 100.0}}
    for adapter in speeds:
        for _ in range(2 * FIRST_PASSES):
            way = trial.drafts(1, adapter)
            trial.learn(1, way, 100, 100 / speeds[adapter][way], work=adapter)
    assert trial.drafts(1, "")
    assert trial.prefers_plain(1, "haiku")
    for other in range(REMEMBERED - 1):
        assert trial.drafts(1, other)
    assert trial.prefers_plain(1, "haiku")
    for other in range(REMEMBERED, 2 * REMEMBERED):
        trial.drafts(1, other)
    assert not trial.prefers_plain(1, "haiku"), "it would have to be tried again"


def test_a_slow_first_part_does_not_decide_against_drafts():
    """What a process does once (kernels that are launched for the first time) is in the first part of its rounds."""
    trial = ThroughputTrial()
    for seconds in (0.2, 0.007):
        trial.learn(1, True, 20, seconds, 8)
    for _ in range(FIRST_PASSES // 4):
        trial.learn(1, False, 4, 0.0022, 4)
    assert trial.drafts(1)
    assert not trial.is_due(1)


def test_drafts_that_were_slower_are_due_again():
    trial = ThroughputTrial()
    steps(trial, 2 * FIRST_PASSES + TRY_AGAIN - 1, {True: 100.0, False: 300.0})
    assert not trial.is_due(32)
    steps(trial, 1, {True: 100.0, False: 300.0})
    assert trial.is_due(32)
    steps(trial, TRY_PASSES + 1, {True: 100.0, False: 300.0})
    assert not trial.is_due(32)


def test_a_try_that_is_due_is_not_jumped_over_by_a_long_step():
    """A plain step writes 48 tokens in parts of 4, and only then is asked again."""
    trial = ThroughputTrial()
    trial.learn(1, True, 16, 1.0, FIRST_PASSES)
    trial.learn(1, False, 16, 0.01, FIRST_PASSES)
    ways = []
    for _ in range(40):
        ways.append(trial.drafts(1))
        for _ in range(3 if ways[-1] else 12):
            trial.learn(1, ways[-1], 4, 0.1 if ways[-1] else 0.0022, 4)
    assert not ways[0]
    assert 3 <= sum(ways) <= 6
