"""Keys and values: a buffer that grows, forgets, and moves a kept branch together."""

import torch
from hypothesis import given, settings, strategies as st

from outrider.models.cache import EXTRA, SPARE, Cache

LAYERS, HEADS, DIM = 2, 3, 4


def cache():
    return Cache(LAYERS, HEADS, DIM, torch.float32, torch.device("cpu"))


def write(cache, id, marks):
    """Feed one token per mark; a token's keys are its mark, its values the negative of it."""
    slot = cache.extend(id, len(marks))
    place = slice(slot.length - len(marks), slot.length)
    slot.keys[:, :, place] = torch.tensor(marks, dtype=torch.float32).view(1, 1, -1, 1)
    slot.values[:, :, place] = -slot.keys[:, :, place]


def read(cache, id):
    slot = cache.extend(id, 0)
    keys = slot.keys[:, :, : slot.length]
    assert torch.equal(slot.values[:, :, : slot.length], -keys)
    assert (keys == keys[:1, :1, :, :1]).all()
    return keys[0, 0, :, 0].int().tolist()


@st.composite
def lives(draw):
    """Feeds, each followed by what is kept of it: some of its first tokens, then places among the rest."""
    steps, mark = [], 0
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, 90))
        marks = list(range(mark, mark + count))
        mark += count
        whole = draw(st.integers(1, count))
        path = sorted(draw(st.sets(st.integers(0, count - whole - 1), max_size=6))) if count > whole else []
        steps.append((marks, whole, path))
    return steps


@settings(max_examples=60, deadline=None)
@given(lives(), lives())
def test_it_holds_what_was_kept_and_nothing_of_others(ours, theirs):
    kept, held = {0: [], 1: []}, cache()
    for id, (marks, whole, path) in [*((0, step) for step in ours), *((1, step) for step in theirs)]:
        write(held, id, marks)
        length = len(kept[id]) + whole
        held.crop(id, length, path)
        kept[id] += [*marks[:whole], *(marks[whole + node] for node in path)]
        assert held.length(id) == len(kept[id])
    assert [read(held, 0), read(held, 1)] == [kept[0], kept[1]]


def test_it_grows_by_doubling_and_forgets_nothing():
    held = cache()
    for mark in range(5 * EXTRA):
        write(held, 0, [mark])
    assert read(held, 0) == list(range(5 * EXTRA))
    assert held.extend(0, 0).size == 8 * (1 + EXTRA)


def large_cache():
    return Cache(4, 4, 256, torch.float32, torch.device("cpu"))  # so that a buffer takes some pages


def test_the_buffer_of_a_sequence_that_ended_is_taken_over():
    held = large_cache()
    first = held.extend(0, 1000).keys
    held.free(0)
    second = held.extend(1, 700)
    assert second.keys is first
    assert second.length == 700
    assert held.extend(2, 700).keys is not first  # one sequence each
    held.free(1)
    assert held.extend(3, 9).keys is not first  # far too large for it


def test_a_buffer_that_was_outgrown_is_taken_over_too():
    held = large_cache()
    small = held.extend(0, 300).keys
    held.extend(0, 300)
    assert held.extend(1, 300).keys is small


def test_nothing_of_the_sequence_before_is_left_where_it_could_be_seen():
    held = large_cache()
    held.extend(0, 300).keys.fill_(float("nan"))
    held.free(0)
    slot = held.extend(1, 200)
    assert not slot.keys.any()
    assert not slot.values.any()


def test_not_more_than_a_few_are_kept():
    held = large_cache()
    for id in range(6):
        held.extend(id, 300)
    for id in range(6):
        held.free(id)
    assert len(held._spare) == SPARE


def test_a_crop_to_more_than_there_is_keeps_all():
    held = cache()
    write(held, 0, [1, 2])
    held.crop(0, 9)
    assert held.length(0) == 2


def test_what_is_freed_is_gone():
    held = cache()
    write(held, 0, [1, 2])
    held.free(0)
    held.free(0)
    held.crop(0, 1)
    assert held.length(0) == 0


def test_a_branch_can_be_moved_outside_of_a_pass():
    """Passes run in inference mode, and what is made there may be written only there."""
    held = cache()
    with torch.inference_mode():
        write(held, 0, [1, 2, 3])
    held.crop(0, 1, [1])
    assert read(held, 0) == [1, 3]


def test_its_price_per_token():
    assert cache().bytes_per_token == 2 * LAYERS * HEADS * DIM * 4
