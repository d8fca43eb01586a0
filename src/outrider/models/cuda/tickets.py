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

What is waited for says itself that it is there: a value is written together with the tag of its launch, in one word
that is written as a whole. Who waits reads the words until all have the tag: no counter, no fence, and the read that
finds them there is the read of the values.

- Launches of all places share the words, one launch after the other. A tag is one of TAGS numbers: launches of one
  place have tags that follow each other, and those of two places in the same pass are at least STEP apart.
- A word that is waited for is written by every launch of its place, so what it held before is not older than a pass:
  another place's tag of that pass, or its own of the pass before, and none is equal to the new one. That holds from the
  moment when all words are cleared (0 is no tag), which has to happen whenever it is decided anew which words are
  waited for (`PassAdapters.send`).

A graph that is replayed is launches as any other. A launch that fails to start takes no ticket; a program that fails
ends the whole context with its memory. 64 bits at a billion tickets a second last 292 years.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 16  # numbers in a line of the cache: programs of overlapping kernels take tickets from lines of their own
TAGS = 65535  # tags that there are, from 1 on: 16 bits, beside values of 16 bits
STEP = 64  # passes that the tags of two places are apart, at least
MOST_PLACES = 1000  # tags of all places in one pass are different: (places + 1) * STEP is below TAGS

_LINE, _TAGS, _STEP = tl.constexpr(LINE), tl.constexpr(TAGS), tl.constexpr(STEP)


class Tickets:
    """The counters of the products of a model's passes, which run one after the other."""

    def __init__(self, places: int, device: torch.device) -> None:
        assert places <= MOST_PLACES, f"{places} products in a pass share tags of {MOST_PLACES}"
        self._counters = torch.zeros(places, LINE, dtype=torch.int64, device=device)
        self._programs: dict[int, int] = {}

    def of(self, place: int, programs: int) -> Tensor:
        """Tickets taken of a product whose launches have so many programs."""
        held = self._programs.setdefault(place, programs)
        assert held == programs, f"launches of {held} and of {programs} programs share counters"
        return self._counters[place]


def word_type(values: torch.dtype) -> torch.dtype:
    """Of a value and its tag."""
    return torch.int32 if values.itemsize == 2 else torch.int64


@triton.jit
def take_ticket(tickets_ptr, place, PROGRAMS: tl.constexpr):
    """This program's number in its launch, in the order in which they run; the tag of the launch."""
    ticket = tl.atomic_add(tickets_ptr, 1, sem="relaxed")
    tag = (ticket // PROGRAMS + place * _STEP) % _TAGS + 1
    return (ticket % PROGRAMS).to(tl.int32), tag.to(tl.int32)


@triton.jit
def tagged(values, tag):
    """Words of 32 bits of values of 16 bits, and of 64 of others."""
    if values.dtype.primitive_bitwidth == 16:
        words = (values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (tag << 16)
    else:
        words = (values.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (tag.to(tl.int64) << 32)
    return words


@triton.jit
def wait_for_tag(words_ptr, wanted, tag, words):
    """The wanted words once all of them have the tag, 0 in place of others; `words`: a first look at them."""
    while tl.max(_is_late(words, wanted, tag)) > 0:
        words = look(words_ptr, wanted)
    return words


@triton.jit
def look(words_ptr, wanted):
    """The wanted words as they are now, 0 in place of others."""
    return tl.load(words_ptr, mask=wanted, other=0, volatile=True)


@triton.jit
def _is_late(words, wanted, tag):
    if words.dtype.primitive_bitwidth == 32:
        found = (words >> 16) & 0xFFFF
    else:
        found = (words >> 32).to(tl.int32)
    return (wanted & (found != tag)).to(tl.int32)


@triton.jit
def untagged(words, VALUES: tl.constexpr):
    """Values of that type."""
    if words.dtype.primitive_bitwidth == 32:
        values = words.to(tl.int16).to(VALUES, bitcast=True)
    else:
        values = words.to(tl.int32).to(VALUES, bitcast=True)
    return values
