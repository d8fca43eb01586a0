"""Who runs next, how much of a prompt, and when to stop taking more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    batch: int = 64  # sequences that run at once
    piece: int = 512  # prompt tokens that one step takes in, over all sequences
    room: int = 64  # nodes of one draft
    drafting: int = 0  # sequences up to which drafts are made at all; 0: any number


@dataclass(frozen=True, eq=False)
class Plan:
    seq: Sequence
    tokens: list[int]  # committed tokens to feed
    room: int
    last: bool  # the pass sees all committed tokens, so there is something to judge


class Scheduler:
    """First come, first served. A sequence starts when all it can ever need fits, so it never has to be thrown out."""

    def __init__(self, limits: Limits, context: int, capacity: int, page: int = 1) -> None:
        """Memory for `capacity` tokens is given out in pages of `page`."""
        self.limits, self._context, self._capacity, self._page = limits, context, capacity, page
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._reserved = 0

    @property
    def reserved(self) -> int:
        """Tokens of cache that the running sequences may need."""
        return self._reserved

    def check(self, seq: Sequence) -> None:
        """An OutriderError when the sequence can never run."""
        if not seq.tokens:
            raise OutriderError("the prompt is empty; give at least one token")
        if seq.prompt >= self._context:
            raise OutriderError(
                f"the prompt has {seq.prompt} tokens but the model's context is {self._context}; shorten the prompt"
            )
        if seq.limit > self._context:
            raise OutriderError(
                f"the prompt has {seq.prompt} tokens and max_tokens is {seq.params.max_tokens}, but the model's "
                f"context is {self._context}; set max_tokens to at most {self._context - seq.prompt} or shorten it"
            )
        if self._need(seq) > self._capacity:
            raise OutriderError(
                f"the sequence may need {self._need(seq)} tokens of cache but there is memory for {self._capacity}; "
                "lower max_tokens, shorten the prompt or raise the cache memory (--cache-memory)"
            )

    def add(self, seq: Sequence) -> None:
        self.check(seq)
        self.waiting.append(seq)

    def plan(self, length: Callable[[int], int], seqs: Iterable[Sequence] | None = None) -> list[Plan]:
        """What each running sequence (or those of `seqs`) feeds next. `length` tells what the cache has seen."""
        plans, budget = [], self.limits.piece
        widest = self.limits.room if len(self.running) <= (self.limits.drafting or len(self.running)) else 0
        for seq in self.running if seqs is None else seqs:
            unseen = seq.tokens[length(seq.id) :]
            count = len(unseen)
            if count > 1:  # a prompt, or what is left of it
                count = min(count, budget)
                budget -= count
            if count:
                last = count == len(unseen)
                room = min(widest, seq.left - 1) if last else 0
                plans.append(Plan(seq, unseen[:count], room, last))
        return plans

    def retire(self) -> list[Sequence]:
        """The running sequences that have ended, taken off."""
        ended = [seq for seq in self.running if seq.finish is not None]
        if ended:
            self.running = [seq for seq in self.running if seq.finish is None]
            self._reserved -= sum(self._need(seq) for seq in ended)
        return ended

    def admit(self) -> list[Sequence]:
        """Start as many of the waiting sequences as fit."""
        begun = len(self.running)
        while self.waiting and len(self.running) < self.limits.batch:
            need = self._need(self.waiting[0])
            if self._reserved + need > self._capacity:
                break
            self._reserved += need
            self.running.append(self.waiting.popleft())
        return self.running[begun:]

    def _need(self, seq: Sequence) -> int:
        return -(-(seq.limit + self.limits.room) // self._page) * self._page
