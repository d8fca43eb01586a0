"""Pages of keys and values: which sequence holds which, and which pages hold a prefix that others share.

Only bookkeeping, on the host. A page that is full of committed tokens is known by them and all tokens before; a new
sequence that begins alike takes it as its own. Pages that no sequence holds any more keep what they know until they are
needed for something else, the longest unused first and the end of a text before its beginning.

Only sequences of the same scope share, which is a tenant and an adapter: how long a prompt takes, and how much of it
was cached, would tell one tenant what another has sent; and an adapter changes keys and values.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outrider.core.sequence import Scope


@dataclass(eq=False)
class Holder:
    """One sequence's pages, in order."""

    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens and nodes it holds
    known: int = 0  # pages, from the first, that others may share
    name: int = 0  # of the last known page; 0: of none


H = TypeVar("H", bound=Holder)
# The name of the page before (of the first page: the scope), its tokens.
PageKey = tuple[int | Scope, tuple[int, ...]]


class Pages(Generic[H]):
    """What is common to the pages of a GPU (`cuda/pages.py`) and of a CPU (`paged_cache.py`)."""

    def __init__(self, count: int, size: int, first: int = 0, ahead: int = 0) -> None:
        """The pages `first` to `count` - 1, of `size` tokens each. `ahead`: further tokens that a page depends on."""
        self.count, self.size, self._ahead = count, size, ahead
        self._free: list[int] = []
        self._unused = first  # the first page that was never taken
        self._holders: dict[int, H] = {}
        self._users: Counter[int] = Counter()  # page -> sequences that hold it
        # A page is known by the name of the one before it and its own tokens: no two texts ever get mixed up.
        self._keys: dict[int, PageKey] = {}  # by page
        self._known: dict[PageKey, tuple[int, int]] = {}  # the page, and its name
        self._names = itertools.count(1)
        self._idle: OrderedDict[int, None] = OrderedDict()  # known pages without a holder, longest unused first
        self.named = 0  # pages that have become known by being computed

    @property
    def free_count(self) -> int:
        """Pages that can be had."""
        return len(self._free) + max(self.count - self._unused, 0) + len(self._idle)

    def length(self, id: int) -> int:
        holder = self._holders.get(id)
        return holder.length if holder else 0

    def begin(self, id: int, tokens: Sequence[int], scope: Scope = "") -> int:
        """The sequence takes what others have of its beginning, past what it holds itself, but never all: its last
        token must be run. Returns how many tokens it took."""
        holder = self._holder(id)
        before = holder.length
        if before != len(holder.pages) * self.size or holder.known != len(holder.pages):
            return 0  # it is in the middle of a page of its own
        while len(tokens) > holder.length + self.size:
            found = self._known.get(self._key(holder, tokens, scope))
            if found is None:
                break
            page, holder.name = found
            self._take(page)
            self._give(holder, page)
            holder.length += self.size
            holder.known += 1
        return holder.length - before

    def extend(self, id: int, count: int) -> H:
        """The sequence with space for `count` more tokens, which it now counts as held."""
        holder = self._holder(id)
        self.reserve(holder, count)
        holder.length += count
        return holder

    def reserve(self, holder: H, count: int) -> None:
        """Pages for `count` more tokens than it holds."""
        for _ in range(self.missing(holder, count)):
            self._give(holder, self._new())

    def _key(self, holder: H, tokens: Sequence[int], scope: Scope) -> PageKey:
        """What the page after its last known one is known by."""
        begin = holder.known * self.size
        return holder.name if holder.known else scope, tuple(tokens[begin : begin + self.size + self._ahead])

    def missing(self, holder: H, count: int) -> int:
        """How many pages these are."""
        return -(-(holder.length + count) // self.size) - len(holder.pages)

    def name(self, id: int, tokens: Sequence[int], scope: Scope = "") -> None:
        """The pages that are full of committed `tokens` may be shared from now on."""
        holder = self._holders.get(id)
        if holder is None:
            return
        while (holder.known + 1) * self.size <= min(len(tokens) - self._ahead, holder.length):
            page, key = holder.pages[holder.known], self._key(holder, tokens, scope)
            if key not in self._known:
                self._known[key], self._keys[page] = (page, next(self._names)), key
                self.named += 1
            other, holder.name = self._known[key]
            if other != page:
                self._twice(holder, other)
            holder.known += 1

    def known_pages(self) -> dict[int, PageKey]:
        """Pages that others may share and that mean the same in another process, with their keys: the last used first,
        and each after the page before it. Not those of an adapter, whose key is this process's own."""
        held = (page for holder in self._holders.values() for page in holder.pages if page in self._keys)
        names: set[int | Scope] = set()
        found: dict[int, PageKey] = {}
        for page in dict.fromkeys([*held, *reversed(self._idle)]):
            key = self._keys[page]
            if isinstance(key[0], str) or key[0] in names:  # a tenant's first, or what it follows is there
                found[page] = key
                names.add(self._known[key][1])
        return found

    def adopt(self, before: int | Scope, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A page with this content comes from elsewhere: its number and name. None: there is no space for it. It
        counts as used before all that are there. `before`: the name of the page before it, or the scope."""
        key: PageKey = (before, tuple(tokens))
        if key in self._known or not (self._free or self._unused < self.count):
            return None
        page, name = self._new(), next(self._names)
        self._known[key], self._keys[page] = (page, name), key
        self._let_go(page)
        self._idle.move_to_end(page, last=False)
        return page, name

    def forget_prefixes(self) -> None:
        """No page that others may share now is shared any more."""
        self._known.clear()
        self._keys.clear()
        self._free += self._idle
        self._idle.clear()

    def flat(self, id: int, place: int) -> int:
        """Where a token of the sequence lies, counted over all pages."""
        return self._holders[id].pages[place // self.size] * self.size + place % self.size

    def crop(self, id: int, length: int) -> None:
        holder = self._holders.get(id)
        if holder is not None:
            holder.length = min(holder.length, length)

    def free(self, id: int) -> None:
        holder = self._holders.pop(id, None)
        if holder is not None:
            for page in reversed(holder.pages):  # the end of a text is forgotten before its beginning
                self._let_go(page)
            self._close(holder)

    def _open(self) -> H:
        """A holder of nothing."""
        raise NotImplementedError

    def _close(self, holder: H) -> None:
        """The sequence has ended."""

    def _put(self, holder: H, place: int, page: int) -> None:
        """The sequence's page at `place` is this one from now on."""
        raise NotImplementedError

    def _twice(self, holder: H, page: int) -> None:
        """The sequence has computed a page that is known already as `page`: it keeps its own."""

    def _holder(self, id: int) -> H:
        holder = self._holders.get(id)
        if holder is None:
            holder = self._holders[id] = self._open()
        return holder

    def _new(self) -> int:
        if self._free:
            page = self._free.pop()
        elif self._unused < self.count or not self._idle:
            page, self._unused = self._unused, self._unused + 1
        else:
            page, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(page)]
        self._users[page] = 1
        return page

    def _take(self, page: int) -> None:
        self._users[page] += 1
        self._idle.pop(page, None)

    def _let_go(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        del self._users[page]
        if page in self._keys:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _give(self, holder: H, page: int) -> None:
        holder.pages.append(page)
        self._put(holder, len(holder.pages) - 1, page)
