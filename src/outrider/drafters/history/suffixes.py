"""Suffix matching over the texts that were written before: where the last tokens stood, and what followed them.

The last `capacity` tokens lie in a ring. Suffixes of 2, 4, 8 and 16 tokens are hashed. A bucket holds the position at
which its latest suffix ended, and each position holds the distance back to the previous suffix of the same bucket: a
chain. So a lookup reads a few positions of one chain, however long the ring is, and compares the tokens at each of
them. Overwritten tokens need no clean-up: they were the oldest, so they are at the ends of chains, and a position that
is too far back ends its chain.

Bytes per token: 4 for the token, 4 orders of 4 for the chains, and 4 orders of 4 for each bucket, of which there are
one to two per token: 36 to 52.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from operator import mul

import numpy as np
from numpy.typing import NDArray

ORDERS = (2, 4, 8, 16)  # tokens of the suffixes that are hashed: doubling, so that few of them find any length
CONTEXT = ORDERS[-1]  # tokens: no match is longer
MOST = 8  # occurrences that are read: the latest ones, enough to tell one continuation from two that are frequent
# Positions of a chain that are read. With one bucket per token about every second one belongs to another suffix that
# shares the bucket, so twice MOST.
TRIES = 16
GAP = -1  # between two texts: no token, so no match goes across it
SEGMENTS = 64  # stored texts that together may cover the beginning of a new one: bounds the work for a long prompt
# Bits of a hash. Its upper bits choose the bucket, at most 30 of them; a factor of 44 bits times a token id of 18 stays
# below 2^63, which Python multiplies fast.
BITS = 44
MASK = (1 << BITS) - 1
WRAP = (1 << 32) - 1  # positions in buckets are kept modulo 2^32
# One odd factor for each token of a suffix, the last one first: a hash is the sum of the products, modulo 2^BITS, and
# its upper bits choose the bucket (multilinear hashing). Any fixed random numbers will do.
FACTORS = [int(each) | 1 for each in np.random.Generator(np.random.PCG64(7)).integers(0, MASK, CONTEXT)]
# By order: the tokens of a suffix that the order before lacks, their factors, and the sum of these.
PARTS = [(begin, end, FACTORS[begin:end], sum(FACTORS[begin:end])) for begin, end in pairwise((0, *ORDERS))]
Tokens = NDArray[np.int32]


class SuffixIndex:
    """The last `capacity` tokens of all texts together, found again by their suffixes."""

    def __init__(self, capacity: int, tries: int = TRIES) -> None:
        """Places hold a token or the gap after a text."""
        bits = max(1, (capacity - 1).bit_length())
        self.capacity, self._tries, self._shift = capacity, tries, BITS - bits
        self._tokens = np.full(capacity, GAP, np.int32)
        self._back = [np.zeros(capacity, np.uint32) for _ in ORDERS]  # to the suffix before in the same bucket; 0: none
        self._heads = [np.zeros(1 << bits, np.uint32) for _ in ORDERS]  # where the last suffix ended, as a position + 1
        self.written = 0  # places in all, since the beginning; the position of the next one
        # the same memory, of which single values are read several times as fast
        self._text = self._tokens.data
        self._chains = [(k, h.data, b.data) for k, h, b in zip(ORDERS, self._heads, self._back, strict=True)]

    def __len__(self) -> int:
        """Places that hold something."""
        return min(self.written, self.capacity)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self._tokens, *self._back, *self._heads))

    def add(self, text: Seq[int], kept: int | None = None) -> None:
        """Take in a text. What of its first `kept` tokens (None: of all) stands here already is not stored again."""
        known = self._covered(text[:kept])
        if known < len(text):
            fresh = text[max(0, known - CONTEXT) :][-(self.capacity - 1) :]
            self.write(np.array([*fresh, GAP], np.int32))

    def write(self, tokens: Tokens) -> None:
        """Take in texts, each with a gap after it: at most `capacity` places."""
        start = self.written % self.capacity
        if start + len(tokens) > self.capacity:  # texts lie in one piece, so the end of the ring stays empty
            self._tokens[start:] = GAP
            self.written += self.capacity - start
            start = 0
        self._tokens[start : start + len(tokens)] = tokens
        self._link(tokens, start)
        self.written += len(tokens)

    def tokens(self) -> Tokens:
        """All texts, the oldest first, each with a gap after it."""
        start = self.written % self.capacity if self.written > self.capacity else 0
        return np.concatenate([self._tokens[start:], self._tokens[:start]])[: len(self)]

    def continuations(self, tokens: Seq[int], length: int) -> tuple[int, list[list[int]]]:
        """How many of the last tokens are found in a text, and what came after them there, the latest first.

        They are the occurrences of the longest suffix that is found. 0, []: none is.
        """
        order, places = self._find(tokens)
        if not places:
            return 0, []
        matched = [order] * len(places) if order == CONTEXT else [self._matched(tokens, at, order) for at in places]
        longest = max(matched)
        found = (self._after(at, length) for at, size in zip(places, matched, strict=True) if size == longest)
        return longest, [each for each in found if each]

    def _find(self, tokens: Seq[int]) -> tuple[int, list[int]]:
        """The longest hashed suffix that is found, and where it ended, the latest first."""
        last = tokens[: -CONTEXT - 1 : -1]
        total, buckets = 0, []
        for begin, end, factors, more in PARTS:
            if end > len(last):
                break
            total += more + sum(map(mul, last[begin:end], factors))  # of the tokens + 1: there is a token 0
            buckets.append((total & MASK) >> self._shift)
        for level in range(len(buckets) - 1, -1, -1):
            places = self._places(level, buckets[level], tokens[-ORDERS[level] :])
            if places:
                return ORDERS[level], places
        return 0, []

    def _places(self, level: int, bucket: int, wanted: Seq[int]) -> list[int]:
        """Where a suffix ended, the latest first."""
        order, heads, back = self._chains[level]
        held, newest, capacity, text = len(self), self.written - 1, self.capacity, self._text
        age = (newest + 1 - heads[bucket]) & WRAP  # places that were written after it
        found: list[int] = []
        last = wanted[-1]  # compared first: most other suffixes of the same bucket differ here
        for _ in range(self._tries):
            if age >= held:
                break
            at = (newest - age) % capacity
            if text[at] == last and text[at + 1 - order : at + 1].tolist() == wanted:
                found.append(at)
                if len(found) == MOST:
                    break
            distance = back[at]
            if not distance:
                break
            age += distance
        return found

    def _matched(self, tokens: Seq[int], at: int, least: int) -> int:
        """How many of the last tokens end at this place; the least is known."""
        size, most, text = least, min(CONTEXT, len(tokens), at + 1), self._text
        while size < most and text[at - size] == tokens[-1 - size]:
            size += 1
        return size

    def _after(self, at: int, length: int) -> list[int]:
        """What follows a place in its text."""
        found: list[int] = self._text[at + 1 : at + 1 + length].tolist()
        return found[: found.index(GAP)] if GAP in found else found

    def _covered(self, text: Seq[int]) -> int:
        """How many of the first tokens stand here already, in pieces that overlap by a whole context."""
        done = 0
        for _ in range(SEGMENTS):
            begin = max(done, CONTEXT)
            order, places = self._find(text[begin - CONTEXT : begin])
            if order < CONTEXT:
                break
            reached = max(begin + self._shared(at + 1, text[begin:]) for at in places)
            if reached == done:
                break
            done = reached
        return done

    def _shared(self, place: int, text: Seq[int]) -> int:
        """How many of the tokens stand from this place on."""
        stored = self._tokens[place : place + len(text)]
        differ = np.flatnonzero(stored != np.array(text[: len(stored)], np.int32))
        return int(differ[0]) if len(differ) else len(stored)

    def _link(self, tokens: Tokens, start: int) -> None:
        """Enter the suffixes that end at each of the new places, but for the last one of a text: nothing follows it."""
        places = np.arange(len(tokens))
        since = places - np.maximum.accumulate(np.where(tokens == GAP, places, -1))  # tokens since the last gap
        followed = np.append(tokens[1:] != GAP, False)
        values, total = (tokens + 1).astype(np.uint64), np.zeros(len(tokens), np.uint64)
        begin = 0
        for level, order in enumerate(ORDERS):
            for back in range(begin, min(order, len(tokens))):
                total[back:] += values[: len(tokens) - back] * np.uint64(FACTORS[back])
            begin = order
            ends = np.flatnonzero((since >= order) & followed)
            if len(ends):
                buckets = (total[ends] & np.uint64(MASK)) >> np.uint64(self._shift)
                self._chain(level, ends, buckets.astype(np.int64), start)

    def _chain(self, level: int, ends: NDArray[np.int64], buckets: NDArray[np.int64], start: int) -> None:
        """Put suffixes that end at `start + ends` to the heads of the chains of their buckets."""
        heads, back, written = self._heads[level], self._back[level], self.written
        order = np.argsort(buckets, kind="stable")  # suffixes of one bucket side by side, the oldest of them first
        buckets, ends = buckets[order], ends[order]
        first = np.concatenate([[True], buckets[1:] != buckets[:-1]])
        distance = np.diff(ends, prepend=ends[0])
        before = (written + ends[first] + 1 - heads[buckets[first]].astype(np.int64)) & WRAP
        held = np.minimum(written + ends[first] + 1, self.capacity)  # a head that is older was overwritten, or is none
        distance[first] = np.where(before < held, before, 0)
        back[start + ends] = distance
        last = np.concatenate([first[1:], [True]])
        heads[buckets[last]] = (written + ends[last] + 1) & WRAP
