"""Programs of a launch that wait for the first of it, where far more are launched than a GPU runs at once.

PYTHONPATH=src python -m pytest tests/gpu/test_tickets.py -m gpu -q -p no:cacheprovider
"""

import pytest
import torch
import triton
import triton.language as tl

from outrider.models.cuda.tickets import Tickets, take_ticket, tell_done, wait_for_first

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FIRST, EACH = 64, 64


@triton.jit
def _sums(
    tickets_ptr, seed_ptr, values_ptr, out_ptr,
    PROGRAMS: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """The first programs write values, the others sum all of them."""
    number, launch = take_ticket(tickets_ptr, PROGRAMS)
    if number < FIRST:
        lane = number * EACH + tl.arange(0, EACH)
        value = tl.load(seed_ptr) + lane
        for _ in range(200 * (number % 2)):  # some are late
            value = tl.load(seed_ptr, volatile=True) + lane
        tl.store(values_ptr + lane, value)
        tell_done(tickets_ptr)
        return
    wait_for_first(tickets_ptr, launch, FIRST, LOADS)
    values = tl.load(values_ptr + tl.arange(0, FIRST * EACH), cache_modifier=".cg")
    tl.store(out_ptr + number, tl.sum(values, 0))


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("programs", [FIRST + 1, 200, 20_000])
def test_all_read_what_the_first_programs_of_their_own_launch_wrote(programs, loads):
    """Kernel by kernel and replayed: what is written changes with each launch."""
    tickets = Tickets(1, torch.device("cuda")).of(0, programs)
    seed, values = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(FIRST * EACH, device="cuda").long()
    out = torch.zeros(programs, dtype=torch.int64, device="cuda")

    def run():
        seed.add_(1)
        _sums[(programs,)](tickets, seed, values, out, programs, FIRST, EACH, loads)

    def check(launch):
        every = FIRST * EACH
        assert (out[FIRST:] == every * launch + every * (every - 1) // 2).all()

    for launch in range(1, 4):
        run()
        check(launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    for replay in range(1, 21):
        graph.replay()
        check(3 + 3 * replay)
    assert tickets[:, 0].tolist() == [63 * programs, 63 * FIRST]
