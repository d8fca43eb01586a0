"""Whether to draft at all: both ways are tried, the faster one is used, and the other is looked at now and then."""

from outrider.engine.worth import AGAIN, PROBE, TRIES, Worth


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
