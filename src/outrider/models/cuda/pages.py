"""Pages of keys and values: who holds which, and which ones hold the beginning of a text that others share.

Only bookkeeping, on the host. A page that is full of committed tokens is known by them and all tokens before; a new
sequence that begins alike takes it as its own. Pages that nobody holds any more keep what they know until they are
needed for something else, the longest unused first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.errors import OutriderError

TRASH = 0  # the page that rows of padding write to


@dataclass(eq=False)
class Holder:
    """One sequence's pages, in order."""

    slot: int  # its row of the table
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens and nodes it holds
    known: int = 0  # pages, from the first, that others may share
    name: int = 0  # of the last known page; 0: of none


class Pages:
    def __init__(self, count: int, size: int, slots: int, longest: int) -> None:
        """`count` pages of `size` tokens; at most `slots` sequences of at most `longest` tokens."""
        self.count, self.size = count, size
        self.table = np.zeros((slots + 1, -(-longest // size) + 1), dtype=np.int32)  # the last row is all trash
        self.changed: set[int] = set()  # rows of the table
        self._free = list(range(count - 1, TRASH, -1))
        self._slots = list(range(slots - 1, -1, -1))
        self._holders: dict[int, Holder] = {}
        self._users = [0] * count
        # A page is known by the name of the one before it and its own tokens: no two texts ever get mixed up.
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # page -> (name before, tokens)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # the same -> (page, its name)
        self._names = itertools.count(1)
        self._idle: OrderedDict[int, None] = OrderedDict()  # named pages that nobody holds

    @property
    def padding(self) -> int:
        """The slot of rows that belong to nobody."""
        return len(self.table) - 1

    @property
    def free_count(self) -> int:
        """Pages that can be had."""
        return len(self._free) + len(self._idle)

    def length(self, id: int) -> int:
        holder = self._holders.get(id)
        return holder.length if holder else 0

    def begin(self, id: int, tokens: Sequence[int]) -> None:
        """A new sequence: it takes what others have of its beginning, but never all, for its last token must be run."""
        holder = self._holder(id)
        if holder.pages:
            return
        while len(tokens) > holder.length + self.size:
            found = self._known.get((holder.name, tuple(tokens[holder.length : holder.length + self.size])))
            if found is None:
                break
            page, holder.name = found
            self._take(page)
            self._give(holder, page)
            holder.length += self.size
            holder.known += 1

    def extend(self, id: int, count: int) -> Holder:
        """The sequence with room for `count` more tokens, which it now counts as held."""
        holder = self._holder(id)
        self.reserve(holder, count)
        holder.length += count
        return holder

    def reserve(self, holder: Holder, count: int) -> None:
        """Pages for `count` more tokens than it holds."""
        need = -(-(holder.length + count) // self.size) - len(holder.pages)
        if need > self.free_count:
            raise OutriderError(
                f"the cache is full: {need} pages of {self.size} tokens are needed, {self.free_count} free"
            )
        for _ in range(need):
            self._give(holder, self._new())

    def name(self, id: int, tokens: Sequence[int]) -> None:
        """The pages that are full of committed `tokens` may be shared from now on."""
        holder = self._holders.get(id)
        if holder is None:
            return
        while (holder.known + 1) * self.size <= min(len(tokens), holder.length):
            begin = holder.known * self.size
            key = holder.name, tuple(tokens[begin : begin + self.size])
            if key not in self._known:
                page = holder.pages[holder.known]
                self._known[key], self._keys[page] = (page, next(self._names)), key
            holder.name = self._known[key][1]
            holder.known += 1

    def flat(self, id: int, place: int) -> int:
        """Where a token of the sequence lies, counted over all pages."""
        return self._holders[id].pages[place // self.size] * self.size + place % self.size

    def crop(self, id: int, length: int) -> None:
        holder = self._holders.get(id)
        if holder is not None:
            holder.length = min(holder.length, length)

    def free(self, id: int) -> None:
        holder = self._holders.pop(id, None)
        if holder is None:
            return
        for page in reversed(holder.pages):  # the end of a text is forgotten before its beginning, which others share
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)
        self._slots.append(holder.slot)

    def _holder(self, id: int) -> Holder:
        holder = self._holders.get(id)
        if holder is None:
            if not self._slots:
                raise OutriderError(f"more than {self.padding} sequences at once; lower max_batch")
            holder = self._holders[id] = Holder(self._slots.pop())
        return holder

    def _new(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(page)]
        self._users[page] = 1
        return page

    def _take(self, page: int) -> None:
        self._users[page] += 1
        self._idle.pop(page, None)

    def _give(self, holder: Holder, page: int) -> None:
        self.table[holder.slot, len(holder.pages)] = page
        self.changed.add(holder.slot)
        holder.pages.append(page)
