"""A simulated machine: passes and drafts take the seconds that a test says, on a clock of its own. The engine, the pool
of drafters and the policy are the real ones."""

import random

import torch

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.drafters.combined import Combined
from outrider.engine import drafting, engine as loop
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.base import Output

VOCAB = 64


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(loop, "perf_counter", self.perf_counter)
        monkeypatch.setattr(loop, "thread_time", self.perf_counter)
        monkeypatch.setattr(drafting, "time", self)

    def perf_counter(self):
        self.now += 1e-7
        return self.now

    thread_time = perf_counter


def truth(id, place):
    """The token that the target writes there."""
    return random.Random(f"{id} {place}").randrange(VOCAB)


class Target:
    """Writes `truth`; a pass takes `cost(rows, step)` seconds."""

    num_layers, context, capacity, vocab_size = 1, 1 << 30, 1 << 40, VOCAB

    def __init__(self, clock, cost):
        self._clock, self._cost, self._lengths, self.passes = clock, cost, {}, 0

    def length(self, id):
        return self._lengths.get(id, 0)

    def forward(self, feeds, layers=()):
        self.passes += 1
        self._clock.now += self._cost(sum(len(feed.tokens) + len(feed.draft) for feed in feeds), self.passes)
        return [self._one(feed) for feed in feeds]

    def _one(self, feed):
        end = self._lengths[feed.id] = self.length(feed.id) + len(feed.tokens)
        places = [end, *(end + depth for depth in feed.draft.depths())]
        return Output(torch.nn.functional.one_hot(torch.tensor([truth(feed.id, p) for p in places]), VOCAB).float())

    def crop(self, id, length, path=()):
        self._lengths[id] = length + len(path)

    def free(self, id):
        self._lengths.pop(id, None)


class Guesser(Drafter):
    """Right at a place with probability `rate(place)`. `seconds(calls)`: of a draft for a sequence, or of each node
    where it is asked for a length; `read`: of each token that it has to read first."""

    def __init__(self, clock, name, rate, seconds, length=5, read=0.0, reports=True, free=False):
        self.name, self._clock, self._rate, self._seconds = name, clock, rate, seconds
        self._length, self._read, self.reports_acceptance, self.is_free = length, read, reports, free
        self._seen, self.calls, self.spent = {}, 0, 0.0

    def unread(self, seq):
        return len(seq.tokens) - 1 - self._seen.get(seq.id, 0) if self._read else 0

    def propose(self, seqs, budgets):
        return [self._propose(seq, min(budget, self._length)) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq, budget):
        if budget < 1:
            return EMPTY
        self.calls += 1
        nodes = 1 if self.reports_acceptance else budget
        took = self._seconds(self.calls) * nodes + self._read * self.unread(seq)
        self._seen[seq.id] = len(seq.tokens) - 1
        self._clock.now += took
        self.spent += took
        places = range(len(seq.tokens), len(seq.tokens) + budget)
        tokens = [self._guess(seq.id, place) for place in places]
        return Draft.chain(tokens, acceptance=[self._rate(p) for p in places] if self.reports_acceptance else ())

    def _guess(self, id, place):
        right = random.Random(f"{self.name} {id} {place}").random() < self._rate(place)
        return truth(id, place) if right else (truth(id, place) + 1) % VOCAB

    def forget(self, id):
        self._seen.pop(id, None)


def seconds(monkeypatch, cost, drafters, requests, policy=None, at_once=1):
    """The simulated time of all requests, each (tokens of the prompt, tokens to write); the drafters as they are after.
    `drafters(clock)` makes them; without a policy each drafts as much as it can."""
    _, now, made = ran(monkeypatch, cost, drafters, requests, policy, at_once)
    return now, made


def ran(monkeypatch, cost, drafters, requests, policy=None, at_once=1):
    """The same, and the engine."""
    clock = Clock(monkeypatch)
    made = drafters(clock)
    target = Target(clock, cost)
    own = made[0] if len(made) == 1 else Combined("all", made) if made else Drafter(Drafter.Options(), None)
    engine = Engine(target, own, Limits(batch=at_once, chunk=512), policy)
    for id, (prompt, output) in enumerate(requests):
        engine.add(Sequence(id, [truth(id, place) for place in range(prompt)], SamplingParams(max_tokens=output)))
    while engine.busy:
        engine.step()
    assert engine.stats.tokens == sum(output for _, output in requests)
    return engine, clock.now, made


def measured():
    return DraftingPolicy()
