"""The policy on recorded texts: answers of SmolLM2 to one of our own prompts of each kind, with what the shipped EAGLE
head guessed at every token and how sure it was. Engine, policy and lookup are the real ones; the target and the head
replay the record on a clock of their own, with the costs of a quiet machine (docs/benchmarks/cpu-profile).

recorded_head.jsonl: 40 tokens of each answer, tokens renumbered (LOG, 2026-11-17, why auto was slower than the head).
"""

import json
import random
from pathlib import Path

import pytest
import torch
from simulated import Clock

from outrider.core.draft import EMPTY, Draft, judged_tree
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.combined import Combined
from outrider.drafters.confidence import StatedCalibration
from outrider.drafters.eagle.drafter import thresholds
from outrider.drafters.ngram import Ngram
from outrider.engine.cost import PassCost
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.base import Output

RECORDS = [json.loads(line) for line in Path(__file__).with_name("recorded_head.jsonl").read_text().splitlines()]
VOCAB = 1 + max(max(max(r["prompt"]), max(r["output"]), *(max(c[0]) for c in r["chains"].values())) for r in RECORDS)
MS = {1: 4.17, 2: 4.43, 3: 4.90, 4: 5.74, 6: 7.60, 8: 9.94, 16: 18.10, 64: 70.0, 4096: 4480.0}  # of a pass by its rows
LOOKUP, MERGE, REST = 0.00008, 0.00008, 0.00035  # seconds of a lookup, of merging two drafts, of all else in a step
CHAIN, NODE = 0.00035, 0.00013  # seconds of a chain of the head, and of each of its tokens


def seconds_of(rows):
    right = min(size for size in MS if size >= rows)
    left = max(size for size in MS if size <= rows)
    share = (rows - left) / (right - left) if right > left else 0.0
    return (MS[left] + share * (MS[right] - MS[left])) / 1000


# Other machines, seconds: rows as dear as passes, memory-bound passes of a faster processor, nearly free rows.
OTHERS = {
    "dear": lambda rows: 0.0022 * (0.4 + 0.6 * rows),
    "cheap": lambda rows: 0.0022 + 0.00013 * (rows - 1) + 0.00024 * max(0, rows - 3),
    "free": lambda rows: 0.0022 * (0.99 + 0.01 * rows),
}


class Recorded:
    """The target: it writes the recorded answers."""

    num_layers, context, capacity, vocab_size = 1, 1 << 30, 1 << 40, VOCAB

    def __init__(self, clock, noise, cost):
        self._clock, self._lengths, self._noise, self._random = clock, {}, noise, random.Random(5)
        self._cost = cost  # seconds of a pass by its rows
        self.disturbed = 0.0  # seconds that others took of the machine

    def length(self, id):
        return self._lengths.get(id, 0)

    def forward(self, feeds, layers=()):
        rows = sum(len(feed.tokens) + len(feed.draft) for feed in feeds)
        took = self._cost(rows)
        late = took * (abs(self._random.gauss(0, self._noise)) + 2 * (self._random.random() < self._noise / 10))
        self._clock.now += took + late + REST
        self.disturbed += late
        return [self._one(feed) for feed in feeds]

    def _one(self, feed):
        end = self._lengths[feed.id] = self.length(feed.id) + len(feed.tokens)
        text = [*RECORDS[feed.id]["prompt"], *RECORDS[feed.id]["output"], 0]
        places = [min(end + depth, len(text) - 1) for depth in (0, *feed.draft.depths())]
        return Output(torch.nn.functional.one_hot(torch.tensor([text[place] for place in places]), VOCAB).float())

    def crop(self, id, length, path=()):
        self._lengths[id] = length + len(path)

    def free(self, id):
        self._lengths.pop(id, None)


class RecordedHead(Drafter):
    name, reports_acceptance, stop = "eagle", True, 0.4  # until it is told what nodes cost

    def __init__(self, clock):
        self._clock, self._calibration, self._last = clock, StatedCalibration(), {}

    def propose(self, seqs, budgets):
        return [self._chain(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _chain(self, seq, budget):
        tokens, stated = RECORDS[seq.id]["chains"].get(str(len(seq.tokens)), ([], []))
        reach, count = 1.0, 0
        while count < min(budget, len(tokens)) and reach >= self.stop:
            reach, count = reach * stated[count], count + 1
        if not count:
            return EMPTY
        self._clock.now += CHAIN + NODE * count
        self._last[seq.id] = len(seq.tokens), tokens[:count], stated[:count]
        return Draft.chain(tokens[:count], acceptance=[self._calibration.probability(each) for each in stated[:count]])

    def observe(self, step):
        length, tokens, stated = self._last.pop(step.seq.id, (0, [], []))
        for node, kept in judged_tree(tokens, range(-1, len(tokens) - 1), step.seq.tokens[length:] if tokens else []):
            self._calibration.learn(stated[node], kept)

    def weigh(self, row, guess):
        self.stop, _ = thresholds(row, guess, tree=False)


class FixedHead(RecordedHead):
    def weigh(self, row, guess):
        pass


class TimedLookup(Ngram):
    def __init__(self, clock):
        super().__init__(Ngram.Options(), BuildContext(None, None))
        self._clock = clock

    def propose(self, seqs, budgets):
        self._clock.now += LOOKUP * len(seqs)
        return super().propose(seqs, budgets)


class TimedTogether(Combined):
    def __init__(self, clock):
        super().__init__("all", [RecordedHead(clock), TimedLookup(clock)])
        self._clock = clock

    def merge(self, seq, found):
        self._clock.now += MERGE if len(found) > 1 else 0.0
        return super().merge(seq, found)


MADE = {
    "none": lambda clock: Drafter(Drafter.Options(), None), "ngram": TimedLookup, "eagle": RecordedHead,
    "eagle+ngram": TimedTogether,
}  # fmt: skip


def taken(monkeypatch, name, noise=0.0, at_once=1, together=False, machine=seconds_of):
    """Seconds of all answers, prompts in them, without what others took; the policy knows a cost as after loading.
    `together`: as many as run at once are handed in by one call, and the next ones when all of these are done."""
    clock = Clock(monkeypatch)
    target, cost = Recorded(clock, noise, machine), PassCost()
    for rows in (1, 2, 3, 4, 6, 8) * 3:
        cost.learn(rows, machine(rows))
    engine = Engine(target, MADE[name](clock), Limits(batch=at_once, chunk=512), DraftingPolicy(cost))
    seqs = [
        Sequence(id, list(record["prompt"]), SamplingParams(max_tokens=len(record["output"])), call=id // at_once)
        for id, record in enumerate(RECORDS)
    ]
    size = at_once if together else len(seqs)
    for begin in range(0, len(seqs), size):
        for seq in seqs[begin : begin + size]:
            engine.add(seq)
        while engine.busy:
            engine.step()
    assert [seq.tokens[seq.prompt :] for seq in seqs] == [record["output"] for record in RECORDS]
    return clock.now - target.disturbed


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_together_they_are_faster_than_each_alone(noise, monkeypatch):
    times = {name: taken(monkeypatch, name, noise) for name in MADE}
    assert times["eagle+ngram"] < min(times.values()) * 1.0001  # nothing is faster
    assert times["none"] / times["eagle+ngram"] > 1.17  # 40 tokens of an answer, and their prompts


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("at_once", [4, 8])
def test_where_rows_are_dear_nothing_is_slower_than_plain(at_once, together, monkeypatch):
    plain = taken(monkeypatch, "none", at_once=at_once, together=together)
    for name in MADE:
        assert plain / taken(monkeypatch, name, at_once=at_once, together=together) > 0.985


@pytest.mark.parametrize("machine", [seconds_of, *OTHERS.values()])
def test_drafts_end_about_where_the_best_fixed_threshold_would_end_them(machine, monkeypatch):
    fixed = []
    for stop in (0.1, 0.2, 0.4, 0.6):
        monkeypatch.setitem(MADE, "fixed", type("Fixed", (FixedHead,), {"stop": stop}))
        fixed.append(taken(monkeypatch, "fixed", noise=0.05, machine=machine))
    assert taken(monkeypatch, "eagle", noise=0.05, machine=machine) < 1.005 * min(fixed)
