"""Programs of a launch that wait for the first of it, where far more are launched than a GPU runs at once.

PYTHONPATH=src python -m pytest tests/gpu/test_tickets.py -m gpu -q -p no:cacheprovider
"""

import pytest
import torch
import triton
import triton.language as tl

from outrider.models.cuda.tickets import Tickets, look, tagged, take_ticket, untagged, wait_for_tag, word_type

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FIRST, EACH = 64, 64


@triton.jit
def _sums(
    tickets_ptr, place, seed_ptr, words_ptr, out_ptr, PROGRAMS: tl.constexpr, FIRST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The first programs write values, the others sum all of them."""
    number, tag = take_ticket(tickets_ptr, place, PROGRAMS)
    if number < FIRST:
        lane = number * EACH + tl.arange(0, EACH)
        value = tl.load(seed_ptr) + lane % 64
        for _ in range(200 * (number % 2)):  # some are late
            value = tl.load(seed_ptr, volatile=True) + lane % 64
        tl.store(words_ptr + lane, tagged(value.to(out_ptr.dtype.element_ty), tag))
        return
    at = words_ptr + tl.arange(0, FIRST * EACH)
    every = tl.arange(0, FIRST * EACH) >= 0
    words = wait_for_tag(at, every, tag, look(at, every))
    values = untagged(words, out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + number, (tl.sum(values, 0) / (FIRST * EACH)).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("programs", [FIRST + 1, 200, 20_000])
def test_all_read_what_the_first_programs_of_their_own_launch_wrote(programs, dtype):
    """Kernel by kernel and replayed, two places by turns over the same words: what is written changes with each
    launch."""
    tickets = Tickets(2, torch.device("cuda"))
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    words = torch.zeros(FIRST * EACH, dtype=word_type(dtype), device="cuda")
    out = torch.zeros(2, programs, dtype=dtype, device="cuda")

    def run():
        for place in range(2):
            seed.add_(1)
            _sums[(programs,)](tickets.of(place, programs), place, seed, words, out[place], programs, FIRST, EACH)

    def check(turn):
        for place in range(2):
            assert (out[place, FIRST:] == 2 * turn + place - 1 + 31.5).all(), (turn, place)

    for turn in range(1, 4):
        run()
        check(turn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    for replay in range(1, 21):
        graph.replay()
        check(3 + 3 * replay)
    assert tickets.of(1, programs)[0] == 63 * programs
