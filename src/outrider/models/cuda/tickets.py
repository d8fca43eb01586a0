"""Programs of a launch that wait for others of the same launch, and can never wait for one that does not run.

A GPU starts the programs of a launch in an order that nothing promises, and one that waits keeps its place until it
ends: programs that wait for one which has not started could keep it from starting. So a program takes its number from
a counter when it runs, and the ones that are waited for are those with the first numbers.

- Between two launches of one place comes another kernel, which lets the next begin when it has waited for the one
  before. So a launch is over before the next one of its place takes a ticket. All of them have as many programs, and
  each takes one ticket. Hence launch n, from 0 on, has the tickets n * programs to (n + 1) * programs - 1: a ticket
  tells the launch, and how many programs of it ran before this one.
- Who waits has a larger number than those it waits for. They have taken theirs: they run, wait for nothing but the
  kernel before, and end. That kernel ends by the same argument: all its programs ran before this one's were started,
  which happens when each of them has ended or said so (`launch.nearly_done`).
- Counters only grow. The first programs of launch n are done when the count of done ones is (n + 1) times as many as
  there are of them in a launch; later launches have not begun by then.

A graph that is replayed is launches as any other. A launch that fails to start takes no ticket; a program that fails
ends the whole context with its memory. 64 bits at a billion tickets a second last 292 years.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 16  # numbers in a line of the cache: who asks whether others are done does not slow down who takes a ticket

_LINE = tl.constexpr(LINE)


class Tickets:
    """The counters of the products of a model's passes, which run one after the other."""

    def __init__(self, places: int, device: torch.device) -> None:
        self._counters = torch.zeros(places, 2, LINE, dtype=torch.int64, device=device)
        self._programs: dict[int, int] = {}

    def of(self, place: int, programs: int) -> Tensor:
        """Tickets taken and programs done, of a product whose launches have so many programs."""
        held = self._programs.setdefault(place, programs)
        assert held == programs, f"launches of {held} and of {programs} programs share counters"
        return self._counters[place]


@triton.jit
def take_ticket(tickets_ptr, PROGRAMS: tl.constexpr):
    """This program's number in its launch, in the order in which they run; the number of the launch."""
    ticket = tl.atomic_add(tickets_ptr, 1, sem="relaxed")
    return (ticket % PROGRAMS).to(tl.int32), ticket // PROGRAMS


@triton.jit
def tell_done(tickets_ptr):
    """One of the first programs has written what others wait for."""
    tl.debug_barrier()
    tl.atomic_add(tickets_ptr + _LINE, 1, sem="release")


@triton.jit
def wait_for_first(tickets_ptr, launch, FIRST: tl.constexpr, LOADS: tl.constexpr = False):
    """Until the first programs of the launch are done. LOADS: every thread asks for itself, which takes no barrier; the
    interpreter knows atomic operations alone."""
    if LOADS:
        while _loaded(tickets_ptr + _LINE) < (launch + 1) * FIRST:
            pass
    else:
        while tl.atomic_add(tickets_ptr + _LINE, 0, sem="acquire") < (launch + 1) * FIRST:
            pass


@triton.jit
def _loaded(count_ptr):
    return tl.inline_asm_elementwise("ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [count_ptr], tl.int64, False, 1)
