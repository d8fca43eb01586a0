"""Chunks that wait for a slow reader become one of each sample."""

from outrider.core.request import Chunk, joined
from outrider.core.sequence import Token


def chunk(text, *ids, index=0, finish=None):
    return Chunk(text, tuple(map(Token, ids)), index, finish)


def test_chunks_of_one_sample_become_one():
    waiting = [chunk("a", 1), chunk("", 2, 3), chunk("b", 4, finish="stop")]
    assert joined(waiting) == [chunk("ab", 1, 2, 3, 4, finish="stop")]


def test_samples_that_take_turns_become_one_chunk_each():
    """As a step puts them in. Each keeps the order of its own chunks, so that its end comes last."""
    waiting = [chunk("x", 1, index=1), chunk("a", 2), chunk("y", 3, index=1, finish="stop"), chunk("b", 4)]
    assert joined(waiting) == [chunk("xy", 1, 3, index=1, finish="stop"), chunk("ab", 2, 4)]


def test_nothing_to_join():
    assert joined([]) == []
    assert joined([chunk("a", 1)]) == [chunk("a", 1)]
