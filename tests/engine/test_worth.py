"""Whether to draft at all: both ways are tried, the faster one is used, and the other is looked at now and then."""

import random
from itertools import pairwise

from outrider.engine.worth import AGAIN, PROBE, SELDOM, TRIES, Worth


def steps(worth, count, speeds, seqs=32):
    """So many steps, each as fast as `speeds` says of its way; the ways they went."""
    ways = []
    for _ in range(count):
        ways.append(worth.drafts(seqs))
        worth.learn(seqs, ways[-1], 100, 100 / speeds[ways[-1]])
    return ways


def test_both_ways_are_tried_and_the_faster_one_is_used():
    for speeds in ({True: 300.0, False: 100.0}, {True: 100.0, False: 300.0}):
        ways = steps(Worth(), 2 * TRIES + AGAIN - 1, speeds)
        assert ways[: 2 * TRIES] == [True] * TRIES + [False] * TRIES
        assert set(ways[2 * TRIES :]) == {speeds[True] > speeds[False]}


def test_the_slower_way_is_looked_at_again_and_wins_when_it_became_faster():
    worth = Worth()
    steps(worth, 2 * TRIES + AGAIN - 1, {True: 100.0, False: 300.0})
    assert steps(worth, PROBE, {True: 900.0, False: 300.0}) == [True] * PROBE
    ways = steps(worth, 3 * (AGAIN + PROBE), {True: 900.0, False: 300.0})
    assert sum(ways[-AGAIN:]) >= AGAIN - PROBE  # most of what is known of it is fast by now


def test_hardly_faster_is_not_worth_it():
    ways = steps(Worth(), 2 * TRIES + AGAIN - 1, {True: 101.0, False: 100.0})
    assert not any(ways[2 * TRIES :])


def test_a_step_that_took_long_once_decides_nothing():
    worth = Worth()
    for _ in range(2):
        worth.learn(32, True, 100, 1000.0)
    ways = steps(worth, 2 * TRIES - 2 + 20, {True: 300.0, False: 100.0})
    assert set(ways[2 * TRIES - 2 :]) == {True}


def test_every_size_of_batch_has_its_own_answer():
    worth = Worth()
    steps(worth, 2 * TRIES, {True: 300.0, False: 100.0}, seqs=8)
    steps(worth, 2 * TRIES, {True: 100.0, False: 300.0}, seqs=256)
    assert worth.drafts(9)
    assert not worth.drafts(300)


def test_the_slower_way_is_looked_at_ever_more_seldom():
    ways = steps(Worth(), 2 * TRIES + 20 * SELDOM, {True: 100.0, False: 300.0})[2 * TRIES :]
    tried = [i for i, drafts in enumerate(ways) if drafts]
    waits = [after - before for before, after in pairwise(tried) if after > before + 1]
    assert tried[:PROBE] == [AGAIN - 1, AGAIN, AGAIN + 1]
    assert waits[:3] == [2 * AGAIN + 1, 4 * AGAIN + 1, 8 * AGAIN + 1]
    assert set(waits[4:]) == {SELDOM + 1}


def test_many_tokens_in_few_steps_count():
    """As a long copy brings them: in most steps drafting is slower, and over all of them much faster."""
    worth, luck, written = Worth(), random.Random(0), [0, 0]
    for _ in range(2000):
        drafts = worth.drafts(4)
        tokens = sum(12 if drafts and luck.random() < 0.1 else 1 for _ in range(4))
        worth.learn(4, drafts, tokens, 0.0012 if drafts else 0.0009)
        written[drafts] += 1
    assert written[True] > 1900


def test_passes_that_meet_new_shapes_decide_nothing_though_they_are_many():
    worth = Worth()
    for new in range(TRIES):
        worth.learn(4, True, 100, 0.5 if new % 3 else 0.0125)
    ways = steps(worth, TRIES + 40, {True: 8000.0, False: 4000.0}, seqs=4)
    assert ways == [False] * TRIES + [True] * 40


def test_plain_steps_of_many_passes_are_as_fast_as_those_of_one():
    worth = Worth()
    for count in range(2 * TRIES):
        passes = 16 if count % 4 == 0 else 1
        worth.learn(64, False, 64 * passes, 0.001 * passes)
    for _ in range(TRIES):
        worth.learn(64, True, 70, 0.001)
    assert worth.drafts(64)


def test_after_a_change_it_looks_soon_again():
    worth = Worth()
    steps(worth, 2 * TRIES + 8 * SELDOM, {True: 100.0, False: 300.0})
    changed = steps(worth, 8 * SELDOM, {True: 900.0, False: 300.0})
    begin = changed.index(True)
    while not all(changed[begin : begin + AGAIN - 1]):
        begin += 1
    assert changed[begin:][: 2 * AGAIN].count(False) == PROBE
