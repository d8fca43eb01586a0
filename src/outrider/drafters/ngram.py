"""Prompt lookup: what followed the last tokens when they stood here before (Saxena 2023; Ou et al. 2024).

`store=recent` copies what came after the most recent earlier occurrence of the longest matching n-gram.
`store=adaptive` counts what followed every n-gram of prompt and output so far and writes the likeliest continuation
token by token (adaptive n-gram parallel decoding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Parts


class Ngram(Drafter):
    name = "ngram"

    @dataclass(frozen=True)
    class Options:
        max_n: int = 4  # the longest n-gram that is looked up; shorter ones follow
        min_n: int = 2
        length: int = 8
        store: Literal["recent", "adaptive"] = "recent"

    def __init__(self, options: Options, parts: Parts) -> None:
        if not 1 <= options.min_n <= options.max_n:
            raise OutriderError(f"ngram needs 1 <= min_n <= max_n, not min_n={options.min_n}, max_n={options.max_n}")
        if options.length < 1:
            raise OutriderError(f"ngram:length must be at least 1, not {options.length}")
        self._options = options
        self._stores: dict[int, Recent | Adaptive] = {}

    def propose(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(room, self._options.length)) for seq, room in zip(seqs, rooms, strict=True)]

    def _propose(self, seq: Sequence, length: int) -> Draft:
        store = self._stores.get(seq.id)
        if store is None:
            kind = Recent if self._options.store == "recent" else Adaptive
            store = self._stores[seq.id] = kind(self._options.min_n, self._options.max_n)
        store.learn(seq.tokens)
        return Draft.chain(store.guess(seq.tokens, length))

    def forget(self, id: int) -> None:
        self._stores.pop(id, None)


class Recent:
    """For every n-gram, where its most recent occurrence ended."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._seen = 0  # n-grams that end before this place are known

    def learn(self, tokens: list[int]) -> None:
        """Take in the n-grams that end before the last token: the last one has no continuation yet."""
        for end in range(self._seen + 1, len(tokens)):
            for n in self._sizes:
                if n <= end:
                    self._ends[tuple(tokens[end - n : end])] = end
        self._seen = max(self._seen, len(tokens) - 1)

    def guess(self, tokens: list[int], length: int) -> list[int]:
        for n in self._sizes:
            end = self._ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if end is not None:
                return self._copy(tokens, end, length)
        return []

    @staticmethod
    def _copy(tokens: list[int], start: int, length: int) -> list[int]:
        """What follows `start`; past the end it goes on with what it has copied (a text that repeats itself)."""
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(length)]


class Adaptive:
    """For every n-gram, how often each token followed it."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._next: dict[tuple[int, ...], Counter[int]] = {}
        self._seen = 0  # continuations before this place are counted

    def learn(self, tokens: list[int]) -> None:
        for place in range(self._seen, len(tokens)):
            for n in self._sizes:
                if n <= place:
                    self._next.setdefault(tuple(tokens[place - n : place]), Counter())[tokens[place]] += 1
        self._seen = max(self._seen, len(tokens))

    def guess(self, tokens: list[int], length: int) -> list[int]:
        tail = list(tokens[-self._sizes.start :])
        guessed: list[int] = []
        while len(guessed) < length:
            follow = self._follow(tail)
            if follow is None:
                break
            guessed.append(follow)
            tail.append(follow)
        return guessed

    def _follow(self, tail: list[int]) -> int | None:
        for n in self._sizes:
            counts = self._next.get(tuple(tail[-n:])) if n <= len(tail) else None
            if counts:
                return counts.most_common(1)[0][0]
        return None
