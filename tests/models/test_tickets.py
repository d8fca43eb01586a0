"""Numbers that programs take when they run, and words with the tag of a launch, interpreted on a CPU. That programs
wait for others: tests/gpu."""

import pytest
import torch
import triton
import triton.language as tl

from outrider.models.cuda import tickets as module
from outrider.models.cuda.tickets import Tickets, look, tagged, take_ticket, untagged, wait_for_tag, word_type

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu")

CPU = torch.device("cpu")


@triton.jit
def _numbers(tickets_ptr, place, taken_ptr, tag_ptr, PROGRAMS: tl.constexpr):
    number, tag = take_ticket(tickets_ptr, place, PROGRAMS)
    tl.store(taken_ptr + number, tl.load(taken_ptr + number) + 1)
    tl.store(tag_ptr + number, tag)


def test_every_launch_has_each_number_once_and_one_tag():
    """Also of two places by turns, and of counters past what 32 bits hold."""
    tickets = Tickets(2, CPU)
    tickets.of(1, 5)[0] = 5 << 40
    taken, tags = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, 7, dtype=torch.int32)
    seen = set()
    for launch in range(3):
        for place, programs in ((0, 7), (1, 5)):
            _numbers[(programs,)](tickets.of(place, programs), place, taken[place], tags[place], programs)
            assert taken[place].tolist() == [launch + 1] * programs + [0] * (7 - programs)
            (tag,) = set(tags[place, :programs].tolist())
            assert 0 < tag <= module.TAGS
            assert tag not in seen
            seen.add(tag)
    assert tickets.of(0, 7)[0] == 21


def test_tags_of_a_pass_and_the_next_are_all_different():
    """Of as many products as a pass may have, also where the numbers begin anew."""
    for launch in (0, module.TAGS - 1, 7 * module.TAGS - 3):
        tags = [(launch + turn + place * module.STEP) % module.TAGS for turn in (0, 1) for place in range(1000)]
        assert len(set(tags)) == len(tags) == 2 * module.MOST_PLACES


def test_launches_of_another_size_do_not_share_counters():
    """Their tickets would tell the wrong numbers."""
    tickets = Tickets(2, CPU)
    tickets.of(0, 7)
    tickets.of(1, 8)
    with pytest.raises(AssertionError, match="launches of 7 and of 8 programs"):
        tickets.of(0, 8)


@triton.jit
def _to_words(values_ptr, words_ptr, tag, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(words_ptr + at, tagged(tl.load(values_ptr + at), tag))


@triton.jit
def _from_words(words_ptr, count, tag, values_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    wanted = at < count
    words = wait_for_tag(words_ptr + at, wanted, tag, look(words_ptr + at, wanted))
    tl.store(values_ptr + at, untagged(words, values_ptr.dtype.element_ty))


@pytest.mark.parametrize("tag", [1, 40_000, module.TAGS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_is_the_same_with_any_tag(dtype, tag):
    """And what is not wanted is neither waited for nor read."""
    values = torch.randn(16).to(dtype)
    values[:4] = torch.tensor([0.0, -0.0, float("inf"), -1e-8]).to(dtype)
    words, found = torch.zeros(16, dtype=word_type(dtype)), torch.full((16,), 7.0, dtype=dtype)
    _to_words[(1,)](values, words, tag, 16)
    words[12:] = 0
    _from_words[(1,)](words, 12, tag, found, 16)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(found[:12].view(bits), values[:12].view(bits))
    assert (found[12:] == 0).all()
