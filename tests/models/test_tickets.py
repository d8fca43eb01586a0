"""Numbers that programs take when they run, interpreted on a CPU. That programs wait for others: tests/gpu."""

import pytest
import torch
import triton
import triton.language as tl

from outrider.models.cuda.tickets import Tickets, take_ticket, tell_done, wait_for_first

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu")

CPU = torch.device("cpu")


@triton.jit
def _numbers(tickets_ptr, taken_ptr, launch_ptr, PROGRAMS: tl.constexpr, FIRST: tl.constexpr):
    number, launch = take_ticket(tickets_ptr, PROGRAMS)
    tl.store(taken_ptr + number, tl.load(taken_ptr + number) + 1)
    tl.store(launch_ptr + number, launch)
    if number < FIRST:
        tell_done(tickets_ptr)
        return
    wait_for_first(tickets_ptr, launch, FIRST)


def test_every_launch_has_each_number_once():
    """Also of two places by turns, and of counters past what 32 bits hold."""
    tickets = Tickets(2, CPU)
    tickets.of(1, 5)[0, 0], tickets.of(1, 5)[1, 0] = 5 << 40, 2 << 40
    taken, launches = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, 7, dtype=torch.int64)
    for launch in range(3):
        for place, programs in ((0, 7), (1, 5)):
            _numbers[(programs,)](tickets.of(place, programs), taken[place], launches[place], programs, 2)
            assert taken[place].tolist() == [launch + 1] * programs + [0] * (7 - programs)
            assert set(launches[place, :programs].tolist()) == {launch + (place << 40)}
    assert tickets.of(0, 7)[:, 0].tolist() == [21, 6]


def test_launches_of_another_size_do_not_share_counters():
    """Their tickets would tell the wrong numbers."""
    tickets = Tickets(2, CPU)
    tickets.of(0, 7)
    tickets.of(1, 8)
    with pytest.raises(AssertionError, match="launches of 7 and of 8 programs"):
        tickets.of(0, 8)
