"""Chunks that wait for a slow reader become one."""

from outrider.core.request import Chunk, joined
from outrider.core.sequence import Token


def chunk(text, *ids, index=0, finish=None):
    return Chunk(text, tuple(map(Token, ids)), index, finish)


def test_neighbours_of_one_sample_become_one():
    waiting = [chunk("a", 1), chunk("", 2, 3), chunk("b", 4, finish="stop")]
    assert joined(waiting) == [chunk("ab", 1, 2, 3, 4, finish="stop")]


def test_samples_keep_their_order():
    waiting = [chunk("a", 1), chunk("x", 2, index=1), chunk("y", 3, index=1), chunk("b", 4)]
    assert joined(waiting) == [chunk("a", 1), chunk("xy", 2, 3, index=1), chunk("b", 4)]


def test_nothing_to_join():
    assert joined([]) == []
    assert joined([chunk("a", 1)]) == [chunk("a", 1)]
