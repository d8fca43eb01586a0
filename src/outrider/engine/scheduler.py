"""Decides which sequences run next, how many tokens of a prompt a step reads, and when no new sequences are started."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass

from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence

# Of the cache memory: the most that the sequences of one request may reserve beyond the first of them. A quarter is
# left, so that a request with many samples never leaves the next request without memory until one of them ends.
LARGEST_SHARE = 0.75


@dataclass(frozen=True)
class Limits:
    batch: int = 64  # sequences that run at once
    chunk: int = 512  # prompt tokens that one step takes in, over all sequences
    budget: int = 64  # nodes of one draft
    drafting: int = 0  # sequences up to which drafts are made at all; 0: any number


@dataclass(eq=False, slots=True)
class FeedPlan:
    """What one sequence brings to the next pass."""

    seq: Sequence
    tokens: list[int]  # committed tokens to feed
    budget: int  # nodes that its draft may have
    last: bool  # the pass sees all committed tokens, so there is something to judge


class RequestQueue:
    """Sequences that wait, by request. The requests are kept in the order of their turns."""

    def __init__(self) -> None:
        self._requests: dict[int | str, deque[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for seqs in self._requests.values():
            yield from seqs

    def add(self, seq: Sequence) -> None:
        """Behind all others of its request."""
        self._requests.setdefault(seq.request, deque()).append(seq)
        self._count += 1

    def put_back(self, seq: Sequence) -> None:
        """Before all others of its request."""
        self._requests.setdefault(seq.request, deque()).appendleft(seq)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        seqs = self._requests[seq.request]
        seqs.remove(seq)
        self._count -= 1
        if not seqs:
            del self._requests[seq.request]

    def take(self, seq: Sequence) -> None:
        """Remove it; its request's next turn comes after those of all others."""
        self.remove(seq)
        if seq.request in self._requests:
            self._requests[seq.request] = self._requests.pop(seq.request)

    def next(self, running: Counter[int | str], allowed: Callable[[Sequence], bool]) -> Sequence | None:
        """The first sequence of the request that runs least, the first in turn of several, if it is allowed."""
        found: Sequence | None = None
        for request, seqs in self._requests.items():
            if not allowed(seqs[0]):
                continue
            if not running[request]:
                return seqs[0]
            if found is None or running[request] < running[found.request]:
                found = seqs[0]
        return found


class Scheduler:
    """Requests take turns; a request's sequences are served in their order.

    A sequence starts when all the memory that it can ever need is there, so it never has to be thrown out. While one
    request runs more sequences than another that waits, one of the former pauses for one of the latter; it keeps its
    cache and goes on where it was.
    """

    def __init__(self, limits: Limits, context: int, capacity: int, page: int = 1) -> None:
        """Memory for `capacity` tokens is given out in pages of `page`."""
        self.limits, self._context, self._capacity, self._page = limits, context, capacity, page
        self.waiting = RequestQueue()
        self.running: list[Sequence] = []
        self._paused: set[int] = set()  # ids of waiting sequences that have run and keep their cache
        self._held: Counter[int | str] = Counter()  # tokens of cache that each request has reserved
        self._reserved = 0

    @property
    def reserved(self) -> int:
        """Tokens of cache that the sequences that have started may need."""
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
        self.waiting.add(seq)

    def withdraw(self, seq: Sequence) -> bool:
        """Take a sequence out of the queue. False: it runs, or has run and holds memory, which `retire` gives back."""
        if seq not in self.running:
            self.waiting.remove(seq)
            if seq.id not in self._paused:
                return True
            self._paused.remove(seq.id)
            self.running = [*self.running, seq]
        return False

    @property
    def widest(self) -> int:
        """Nodes that a draft may have while as many sequences run as do now."""
        limits = self.limits
        return limits.budget if not limits.drafting or len(self.running) <= limits.drafting else 0

    def plan(
        self,
        length: Callable[[int], int],
        seqs: Iterable[Sequence] | None = None,
        shares: Callable[[Sequence], bool] = lambda seq: False,
    ) -> list[FeedPlan]:
        """What each running sequence (or those of `seqs`) feeds next. `length` tells what the cache has seen.

        `shares`: of a sequence, whether it waits while another feeds the same prefix, to take that over afterwards."""
        widest = self.widest
        unseen = [(seq, seq.tokens[length(seq.id) :]) for seq in (self.running if seqs is None else seqs)]
        prompts = [(seq, len(tokens)) for seq, tokens in unseen if len(tokens) > 1]
        counts = self._chunks(prompts, shares) if prompts else {}
        plans = []
        for seq, tokens in unseen:
            count = counts.get(seq.id, len(tokens))
            if count < len(tokens):
                plans += [FeedPlan(seq, tokens[:count], 0, False)] if count else []
            elif count:
                plans.append(FeedPlan(seq, tokens, min(widest, seq.left - 1), True))
        return plans

    def _chunks(self, prompts: Seq[tuple[Sequence, int]], shares: Callable[[Sequence], bool]) -> dict[int, int]:
        """How much of each prompt this step takes in, by the sequence's id: requests take turns, in their order."""
        turns: Counter[int | str] = Counter()
        order = []
        for place, (seq, _) in enumerate(prompts):
            order.append((turns[seq.request], place))
            turns[seq.request] += 1
        counts, budget = {}, self.limits.chunk
        fed: list[tuple[Sequence, int]] = []  # of this step: the sequence, and how many of its tokens are run then
        for _, place in sorted(order):
            seq, count = prompts[place]
            seen = len(seq.tokens) - count
            waits = budget > 0 and bool(fed) and shares(seq) and self._runs_elsewhere(seq, seen, fed)
            counts[seq.id] = 0 if waits else min(count, budget)
            budget -= counts[seq.id]
            if counts[seq.id]:
                fed.append((seq, seen + counts[seq.id]))
        return counts

    def _runs_elsewhere(self, seq: Sequence, seen: int, fed: Seq[tuple[Sequence, int]]) -> bool:
        """Whether the next page of its prompt is run in this step for another sequence that begins alike."""
        end = seen + self._page
        if seen % self._page or end >= seq.prompt:  # it could not take that page over
            return False
        return any(
            run >= end
            and other.scope == seq.scope
            and other.tokens[seen:end] == seq.tokens[seen:end]
            and other.tokens[:seen] == seq.tokens[:seen]
            for other, run in fed
        )

    def retire(self) -> list[Sequence]:
        """The running sequences that have ended, taken off."""
        ended = [seq for seq in self.running if seq.finish is not None]
        if ended:
            self.running = [seq for seq in self.running if seq.finish is None]
            for seq in ended:
                self._reserve(seq, -1)
        return ended

    def admit(self) -> list[Sequence]:
        """Start waiting sequences, or let paused ones go on, as far as they fit. Returns the sequences that start."""
        if not self.waiting:
            return []
        begun: list[Sequence] = []
        counts = Counter(seq.request for seq in self.running)
        while (seq := self._next(counts)) is not None:
            if len(self.running) >= self.limits.batch and not self._make_way(seq, counts):
                break
            self.waiting.take(seq)
            self.running.append(seq)
            counts[seq.request] += 1
            if seq.id in self._paused:
                self._paused.remove(seq.id)
            else:
                self._reserve(seq, 1)
                begun.append(seq)
        return begun

    def _next(self, counts: Counter[int | str]) -> Sequence | None:
        """The next to start or to go on. One that waits for memory is not overtaken, but for paused sequences: they
        hold theirs already, and may hold what it waits for."""
        seq = self.waiting.next(counts, self._within_share)
        if seq is None or self._fits(seq):
            return seq
        return self.waiting.next(counts, lambda other: other.id in self._paused)

    def _make_way(self, seq: Sequence, counts: Counter[int | str]) -> bool:
        """Pause the newest sequence of the request that runs most, if that still leaves it no fewer than the other."""
        most = max(counts, key=lambda request: counts[request])
        if counts[most] <= counts[seq.request] + 1 or len(self._paused) >= self.limits.batch:
            return False
        newest = max(place for place, other in enumerate(self.running) if other.request == most)
        paused = self.running.pop(newest)
        self._paused.add(paused.id)
        self.waiting.put_back(paused)
        counts[most] -= 1
        return True

    def _fits(self, seq: Sequence) -> bool:
        return seq.id in self._paused or self._reserved + self._need(seq) <= self._capacity

    def _within_share(self, seq: Sequence) -> bool:
        """Whether its request leaves some of the memory to others."""
        held = self._held[seq.request]
        return seq.id in self._paused or not held or held + self._need(seq) <= LARGEST_SHARE * self._capacity

    def _reserve(self, seq: Sequence, sign: int) -> None:
        self._held[seq.request] += sign * self._need(seq)
        self._reserved += sign * self._need(seq)
        if not self._held[seq.request]:
            del self._held[seq.request]

    def _need(self, seq: Sequence) -> int:
        return -(-(seq.limit + self.limits.budget) // self._page) * self._page
