"""A simulated device: passes and rounds take the milliseconds that an H200 takes for SmolLM2 (docs/benchmarks/gpu-h200,
with bounded tries), on a clock of its own. The engine, the pool of drafters, the policy and the planning of rounds are
the real ones."""

import collections
import itertools
import random
from bisect import bisect_left

import torch
from simulated import VOCAB

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.drafters.rounds.base import LoopedRounds, RoundDraft, node_budget
from outrider.drafters.rounds.writer import RoundWriter
from outrider.engine import drafting, engine as loop, unattended
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.base import Outputs, WrittenTokens

PASS = ((1, 0.52), (16, 0.53), (32, 0.59), (64, 0.81), (128, 1.15), (512, 3.5), (8192, 20.0))  # rows, ms
DEPTHS = {31: 5, 15: 5, 7: 4, 3: 2, 1: 1}  # of a draft, by its nodes
EACH = 0.005  # ms of a pass for each sequence
ROUND, LEVEL = 0.04, 0.05  # ms of a round beside its pass, and of each level of its drafts
BEGIN, HOST = 0.7, 0.01  # ms of the host: to begin a step; for each sequence of a part
SENT = 0.1  # ms to begin rounds, for each sequence
SHOWING = 1.025  # times as long as a pass that shows no states
READING = 0.0005  # ms of the head for a token of a prompt
PROMPT = 100  # tokens


def pass_ms(rows):
    place = min(max(bisect_left([each for each, _ in PASS], rows), 1), len(PASS) - 1)
    (left, low), (right, high) = PASS[place - 1 : place + 1]
    return low + (high - low) * (rows - left) / (right - left)


def plain_ms(seqs):
    """Of a pass that writes: 0.53, 0.54, 0.61 and 1.13 for 1, 4, 16 and 64."""
    return pass_ms(seqs) + EACH * seqs


def round_ms(places):
    """0.88, 0.85, 0.76 and 1.56 for 1, 4, 16 and 64."""
    nodes = node_budget(places)
    return pass_ms(places * (1 + nodes)) + ROUND + LEVEL * DEPTHS[nodes] + EACH * places


def truth(id, place):
    """The token that the target writes there."""
    return (7919 * id + 104729 * place + place * place) % VOCAB


class DeviceClock:
    def __init__(self):
        self.now = self.busy = 0.0  # ms; until when the device works

    def rule(self, monkeypatch):
        """The engine looks at this clock from now on."""
        for module in (loop, unattended):
            monkeypatch.setattr(module, "perf_counter", self.perf_counter)
        monkeypatch.setattr(loop, "thread_time", self.perf_counter)
        monkeypatch.setattr(drafting, "time", self)

    def perf_counter(self):
        return self.now / 1e3

    thread_time = perf_counter

    def launch(self, ms):
        """When the device is done with it."""
        self.busy = max(self.busy, self.now) + ms
        return self.busy

    def reach(self, moment):
        self.now = max(self.now, moment)


class SimulatedDevice:
    """It satisfies `Model` and `Paged`. `cold`: ms that the first part of plain writing takes beside its passes."""

    page, num_layers, context, capacity, vocab_size = 32, 1, 1 << 20, 1 << 30, VOCAB

    def __init__(self, clock, cold=0.0):
        self.clock, self._cold, self._lengths, self._known, self.prompts = clock, cold, {}, set(), 0

    def length(self, id):
        return self._lengths.get(id, 0)

    def forward(self, feeds, layers=()):
        rows = sum(len(feed.tokens) for feed in feeds)
        self.prompts += rows
        self.clock.reach(self.clock.launch(pass_ms(rows) * (SHOWING if layers else 1.0)))
        self.clock.now += HOST * len(feeds)
        ends = []
        for feed in feeds:
            self._lengths[feed.id] = self.length(feed.id) + len(feed.tokens)
            ends.append(self._lengths[feed.id])
        best = [truth(feed.id, end) for feed, end in zip(feeds, ends, strict=True)]
        rows = torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()
        counts = [0, *itertools.accumulate(len(feed.tokens) for feed in feeds)]
        hidden = torch.zeros(counts[-1], len(layers), 1) if layers else None
        return Outputs(rows, list(range(len(feeds) + 1)), hidden, counts, best=lambda: best)

    def crop(self, id, length, path=()):
        self._lengths[id] = length + len(path)

    def free(self, id):
        self._lengths.pop(id, None)

    def begin(self, id, tokens, scope=""):
        before = self.length(id)
        if tuple(tokens[: PROMPT - 1]) in self._known and before < PROMPT - 1:
            self._lengths[id] = min(PROMPT - 1, len(tokens) - 1)
        return self.length(id) - before

    def seen(self, id, tokens, scope=""):
        self._known.add(tuple(tokens[: PROMPT - 1]))

    def forget_prefixes(self):
        self._known.clear()

    def prepare(self, layers=(), rows=0, adapted=False): ...

    def write(self, ids, last, dice, params, plan, wait, layers=(), adapters=(), draws=()):
        parts = collections.deque()
        self.clock.now += BEGIN
        while True:
            while len(parts) < 2 and (steps := plan(sum(count for count, _ in parts))):
                each = plain_ms(len(ids)) * (SHOWING if layers else 1.0)
                parts.append((steps, self.clock.launch(steps * each + self._cold)))
                self._cold = 0.0
            if not parts:
                return
            wait()
            steps, done = parts.popleft()
            self.clock.reach(done)
            self.clock.now += HOST * len(ids)
            rows = []
            for id in ids:
                begin = self._lengths[id] + 1
                self._lengths[id] += steps
                rows.append([truth(id, begin + step) for step in range(steps)])
            states = torch.zeros(steps, len(ids), len(layers), 1) if layers else None
            yield WrittenTokens(torch.tensor(rows).T, states)


class SimulatedLoop:
    """Rounds of a head: `rate(id)` of the nodes of a chain are kept. `cold`: ms of the first round beside it.
    `disturbed`: ms that one part takes beside its rounds, by its number."""

    nodes, layers = 31, (0,)

    def __init__(self, device, head, rate, cold=0.0):
        self.device, self.head, self.rate, self._cold = device, head, rate, cold
        self.guessers, self.rounds_run, self._chance = [head], 0, random.Random(1)
        self.disturbed, self._parts = {}, itertools.count()

    def prepare(self, counts): ...

    def rounds(self, seqs, wanted, unread=0):
        return wanted

    def shrinks(self, seqs):
        going = sum(seq.finish is None for seq in seqs)
        return _places(max(1, going)) < _places(len(seqs))

    def run(self, seqs, plan, wait):
        parts, clock, places = collections.deque(), self.device.clock, _places(len(seqs))
        clock.now += BEGIN + SENT * len(seqs)
        clock.reach(clock.launch(READING * sum(map(self.head.read, seqs))))
        depth = DEPTHS[node_budget(places)]
        while True:
            while len(parts) < 2 and (rounds := plan(sum(count for count, _ in parts))):
                self.rounds_run += rounds
                beside = self._cold + self.disturbed.get(next(self._parts), 0.0)
                parts.append((rounds, clock.launch(rounds * round_ms(places) + beside)))
                self._cold = 0.0
            if not parts:
                return
            wait()
            rounds, done = parts.popleft()
            clock.reach(done)
            clock.now += HOST * len(seqs)
            yield [self._one(seq, rounds, depth) for seq in seqs]

    def _one(self, seq, rounds, depth):
        at, tokens = len(seq.tokens), []
        for _ in range(rounds):
            kept = 0
            while kept < depth and self._chance.random() < self.rate(seq.id):
                kept += 1
            tokens.append([truth(seq.id, at + step) for step in range(kept + 1)])
            at += kept + 1
        if seq.finish is None:
            self.device._lengths[seq.id] += sum(map(len, tokens))
        sources = [["head"] * (len(each) - 1) for each in tokens]

        def one(number):
            path = tokens[number][:-1]
            return RoundDraft(path, list(range(-1, len(path) - 1)), [0.5] * len(path), ["head"] * len(path),
                              tuple(range(len(path))))  # fmt: skip

        drafted = [sum(len(each) > level + 1 for each in tokens) for level in range(depth)]
        return LoopedRounds(tokens, sources, rounds, drafted, {"head": sum(drafted)}, None, [], one)


class SimulatedHead(Drafter):
    """It reads states, and drafts in rounds alone."""

    name, layers, takes_prefixes = "head", (0,), True

    def __init__(self, device, rate, cold=0.0):
        self.joins = self.reads_texts = False
        self._shown, self._known, self._unread = {}, set(), {}
        self.loop = SimulatedLoop(device, self, rate, cold)
        self.writer = RoundWriter(self.loop)

    def propose(self, seqs, budgets):
        raise AssertionError("it drafts in rounds alone")

    def takes(self, seq):
        return True

    def follows(self, seq):
        return self._shown.get(seq.id) == len(seq.tokens) - 1

    def read(self, seq):
        self._known.add(tuple(seq.tokens[: PROMPT - 1]))
        return self._unread.pop(seq.id, 0)

    def prefix(self, seq):
        return PROMPT - 1 if tuple(seq.tokens[: PROMPT - 1]) in self._known else 0

    def begin(self, seq, seen):
        self._shown[seq.id] = seen

    def observe(self, step):
        if step.hidden is not None:
            self._shown[step.seq.id] = len(step.seq.tokens) - 1
            self._unread[step.seq.id] = self._unread.get(step.seq.id, 0) + len(step.tokens)

    def write(self, seqs, wait, going):
        for part in super().write(seqs, wait, going):
            yield part
            for seq in seqs:
                self._shown[seq.id] = len(seq.tokens) - 1

    def forget(self, id):
        self._shown.pop(id, None)
        self._unread.pop(id, None)


def _places(count):
    return 1 << (count - 1).bit_length()


class Calls:
    """Batches one after the other on one device, with a head or plainly."""

    def __init__(self, monkeypatch, rate=None, cold=0.0):
        """`rate`: of nodes that are kept, by sequence; None: plain decoding."""
        self._monkeypatch, self.clock = monkeypatch, DeviceClock()
        self.device = SimulatedDevice(self.clock, cold)
        self.head = None if rate is None else SimulatedHead(self.device, rate, cold)
        self.policy = DraftingPolicy()
        drafter = self.head or Drafter(Drafter.Options(), None)
        self.engine = Engine(self.device, drafter, Limits(batch=512, chunk=2048), self.policy)
        self._ids, self._number = itertools.count(), 0

    def call(self, count, tokens=128, together=True):
        """Milliseconds of one call; its prompts are those of earlier calls of as many. Not `together`: as many requests
        that came by themselves at the same moment; the milliseconds of one on average."""
        self.clock.rule(self._monkeypatch)
        before, asked, params = self.clock.now, [], SamplingParams(max_tokens=tokens)
        self._number += 1
        for place in range(count):
            prompt, call = (
                [truth(place, at) for at in range(PROMPT)],
                self._number if together else (self._number, place),
            )
            asked.append(Sequence(next(self._ids), prompt, params, call=call))
            self.engine.add(asked[-1])
        ended = {}

        def look():
            for seq in asked:
                if seq.finish is not None:
                    ended.setdefault(seq.id, self.clock.now)

        self.engine.meanwhile = look
        while self.engine.busy:
            self.engine.step()
            look()
        for seq in asked:
            assert [token.id for token in seq.output] == [truth(seq.id, PROMPT + at) for at in range(tokens)]
        self.clock.reach(self.clock.busy)
        return self.clock.now - before if together else sum(ended.values()) / count - before
