"""Many sequences that the target writes by itself, on a CPU: a model that costs nothing and has pages."""

import collections
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import Markov, Scripted, drain, outputs, plainly

from outrider.core.adapter import ReadyAdapter
from outrider.core.dice import RESIDUAL, Dice
from outrider.core.sampling import SamplingParams, warp
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.engine.throughput import FIRST_PASSES, BatchWork
from outrider.models.base import Outputs, Paged, WrittenTokens

MANY = 64


class PagedMarkov:
    """A `Markov` with pages, which writes by itself as a GPU does. It satisfies `Model` and `Paged`."""

    page = 4

    def __init__(self):
        self.markov = Markov(seed=2)
        self.markov.context = 128
        self.vocab_size, self.num_layers, self.context = 6, 3, 128
        self.capacity = self.markov.capacity
        self.length, self.crop, self.free = self.markov.length, self.markov.crop, self.markov.free
        self.begun, self.committed, self.written = [], {}, []

    def forward(self, feeds, layers=()):
        found = self.markov.forward(feeds, layers)
        starts = [0, *itertools.accumulate(len(output.logits) for output in found)]
        rows = torch.cat([output.logits for output in found])
        hidden = torch.cat([output.hidden for output in found]) if layers else None
        counts = [len(feed.tokens) + len(feed.draft) for feed in feeds]
        ends = [0, *itertools.accumulate(counts)]
        return Outputs(rows, starts, hidden, ends, best=lambda: rows.argmax(-1).tolist())

    def begin(self, id, tokens, tenant=""):
        self.begun.append(id)
        return 0

    def seen(self, id, tokens, tenant=""):
        self.committed[id] = list(tokens)

    def forget_prefixes(self):
        self.committed.clear()

    def prepare(self, layers=()):
        """There are no graphs."""

    def write(self, ids, last, dice, params, plan, wait, layers=(), adapters=(), draws=()):
        parts = collections.deque()
        while True:
            while len(parts) < 2 and (steps := plan(sum(parts))):
                self.written.append(list(ids))
                parts.append(steps)
            if not parts:
                return
            wait()
            steps = parts.popleft()
            rows = [self._write(*each, steps) for each in zip(ids, last, dice, params, draws, strict=True)]
            last = [row[-1] for row in rows]
            states = torch.tensor(rows).T[:, :, None, None] * torch.ones(len(layers), 1) if layers else None
            yield WrittenTokens(torch.tensor(rows).T, states)

    def _write(self, id, last, dice, params, draws, steps):
        tokens = [*self.markov.seen.get(id, []), last]
        for _ in range(steps):
            law = warp(self.markov.logits(tokens), params)
            if dice is None:
                tokens.append(int(law.argmax()))
            elif draws:
                tokens.append(dice.draw(law, len(tokens), RESIDUAL))
            else:
                tokens.append(dice.choose(law, len(tokens)))
        self.markov.seen[id] = tokens[:-1]
        return tokens[-steps:]


def sequences(count=MANY, seeded=True, **more):
    """Greedy and sampled, of different lengths; two of three have a token that ends them."""
    return [
        Sequence(
            id,
            [id % 6, (id * id) % 6],
            SamplingParams(5 + id % 40, temperature=0.8 if id % 2 else 0.0, seed=id if seeded else None),
            ends=frozenset({5}) if id % 3 else frozenset(),
            dice=Dice(id),
            **more,
        )
        for id in range(count)
    ]


def alone(seq):
    return plainly(Markov(seed=2), seq.tokens[: seq.prompt], seq.params, ends=seq.ends, dice=Dice(seq.id))


def run(model, seqs, drafter=None, policy=None):
    engine = Engine(model, drafter or Drafter(Drafter.Options(), None), Limits(2 * MANY), policy)
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    return engine


def test_the_fake_is_what_the_engine_asks_for():
    assert isinstance(PagedMarkov(), Paged)


def test_a_large_batch_writes_what_each_writes_alone():
    model, seqs = PagedMarkov(), sequences(2 * MANY + 20)
    engine = run(model, seqs)
    assert model.written  # it did write by itself
    assert outputs(seqs) == outputs(map(alone, seqs))
    assert [seq.finish for seq in seqs] == [alone(seq).finish for seq in seqs]
    assert all(seq.stats.tokens == len(seq.output) for seq in seqs)
    assert model.committed == {seq.id: seq.tokens for seq in seqs}
    assert sorted(model.begun) == [seq.id for seq in seqs]
    assert (model.markov.seen, engine.scheduler.reserved) == ({}, 0)


def test_without_a_seed_it_writes_what_the_host_would_draw():
    model, seqs = PagedMarkov(), sequences(40, seeded=False)
    run(model, seqs)
    assert {seq.rule for seq in seqs} == {"rejection"}
    assert len(model.written) > 1
    assert outputs(seqs) == outputs(map(alone, seqs))


@pytest.mark.parametrize("seeded", [True, False])
def test_cuts_are_written_in_bulk(seeded):
    cuts = [dict(top_k=3), dict(top_p=0.7), dict(min_p=0.2), dict(typical_p=0.6), dict(top_k=4, top_p=0.8, min_p=0.1)]
    model, seqs = PagedMarkov(), sequences(40, seeded)
    for seq in seqs:
        seq.params = replace(seq.params, **cuts[seq.id % 5])
    run(model, seqs)
    assert {id for ids in model.written for id in ids} == {seq.id for seq in seqs if len(seq.output) > 1}
    assert outputs(seqs) == outputs(map(alone, seqs))
    assert outputs(seqs) != outputs(map(alone, sequences(40, seeded))), "the cuts change nothing"


def test_parts_follow_each_other_until_somebody_ends_or_comes():
    """Whoever ends with a part has its time before the next one, in which it is told its result."""
    model, seqs, told = PagedMarkov(), [Sequence(id, [id, 1], SamplingParams(9 + 50 * id)) for id in range(2)], []
    engine = Engine(model, Drafter(Drafter.Options(), None), Limits(4))
    for seq in seqs:
        engine.add(seq)
    engine.step()
    engine.meanwhile = lambda: told.extend(seq.stats.seconds["target"] for seq in seqs if seq.finish)
    before = seqs[0].stats.seconds["target"]
    assert engine.step() == [seqs[0]]  # two parts of 4 tokens, which end the first while the next 4 are under way
    assert len(model.written) == 3
    assert told
    assert told[0] > before
    engine.interrupted = lambda: True
    engine.step()
    assert len(model.written) == 4
    engine.interrupted = lambda: False
    assert engine.step() == [seqs[1]]
    assert len(model.written) > 8
    assert outputs(seqs) == outputs(map(alone, seqs))
    assert engine.step() == []  # nobody is left


def test_both_ways_are_tried_in_parts_and_for_no_longer_than_that_takes():
    """Plain writing that is only tried goes on from part to part, as it will later, up to the passes of a trial."""
    model, policy = PagedMarkov(), DraftingPolicy()
    engine = Engine(model, Scripted(lambda seq, guessed: 0, 6), Limits(4), policy)
    engine.add(Sequence(0, [1, 2], SamplingParams(60)))
    engine.step()
    policy.trial.drafts = lambda *batch: False
    engine.step()
    assert len(model.written) == FIRST_PASSES // 4
    policy.trial.prefers_plain = lambda *batch: True
    model.written.clear()
    engine.step()
    assert len(model.written) > FIRST_PASSES // 4


def test_each_part_of_a_step_is_measured_by_itself():
    """The first one of a process takes far longer than the others: as a part it counts as what it is."""
    model, policy, learned = PagedMarkov(), DraftingPolicy(), []
    engine = Engine(model, Scripted(lambda seq, guessed: 0, 6), Limits(4), policy)
    engine.add(Sequence(0, [1, 2], SamplingParams(60)))
    engine.step()
    policy.trial.drafts = lambda *batch: False
    policy.trial.learn = lambda seqs, drafted, tokens, seconds, passes, work, begins: learned.append(
        (seqs, tokens, passes, begins)
    )
    engine.step()
    assert learned == [(1, 4, 4, place == 0) for place in range(FIRST_PASSES // 4)]


@pytest.mark.parametrize("due", [False, True])
def test_where_plain_writing_is_faster_a_prompt_is_taken_as_far_as_the_target_has_it(due):
    """Unless drafts are to be tried again: then as far as the drafter has it, too, which could not draft otherwise."""
    model, policy = PagedMarkov(), DraftingPolicy()
    policy.trial.prefers_plain, policy.trial.is_due = lambda *batch: True, lambda *batch: due
    drafter = Scripted(lambda seq, guessed: 0, 6)
    drafter.prefix = lambda seq: 0
    engine = Engine(model, drafter, Limits(4), policy)
    engine.add(Sequence(0, [1, 2], SamplingParams(4)))
    engine.step()
    assert model.begun == ([] if due else [0])


def test_whether_drafts_pay_is_found_out_for_each_drafter_and_adapter():
    """A head that pays for a model may cost time with an adapter; what one has shown does not decide for the other."""
    policy, asked = DraftingPolicy(), collections.defaultdict(set)

    def noted(name, own, *batch, **named):
        asked[name].add(next(each for each in batch if isinstance(each, BatchWork)))
        return own(*batch, **named)

    for name in ("drafts", "learn", "prefers_plain"):
        setattr(policy.trial, name, partial(noted, name, getattr(policy.trial, name)))
    engine = Engine(PagedMarkov(), Scripted(lambda seq, guessed: 0, 6), Limits(4), policy)
    engine.drafters["other"] = Scripted(lambda seq, guessed: 0, 6)
    for id, more in enumerate([{}, {"adapter": ReadyAdapter("haiku", None, 0)}, {"draft": "other"}]):
        engine.add(Sequence(id, [1, 2], SamplingParams(60), **more))
        drain(engine)
    kinds = {BatchWork(frozenset({drafter})) for drafter in (("", ""), ("", "haiku"), ("other", ""))}
    assert asked == {"drafts": kinds, "learn": kinds, "prefers_plain": kinds}


@pytest.mark.parametrize("options", [dict(logprobs=1), dict(logit_bias={1: -9.0})], ids=str)
def test_one_that_the_target_cannot_write_alone_keeps_all_of_them_with_the_host(options):
    model, seqs = PagedMarkov(), sequences(2 * MANY)
    seqs[7].params = SamplingParams(25, temperature=0.8, seed=7, **options)
    seqs[7].ends = frozenset()
    run(model, seqs)
    assert outputs(seqs) == outputs(map(alone, seqs))
    assert not any(7 in ids for ids in model.written)


def test_a_drafter_is_tried_and_the_text_stays_the_same():
    model, seqs = PagedMarkov(), sequences(2 * MANY)
    run(model, seqs, Scripted(lambda seq, guessed: 0, 6), DraftingPolicy())
    assert outputs(seqs) == outputs(map(alone, seqs))


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_watcher_that_raises_ends_its_own_sequence_only(number):
    model, seqs, told = PagedMarkov(), sequences(2 * MANY), []

    def watch(token):
        told.append(token)
        if len(told) == number:
            raise ZeroDivisionError("the caller's own mistake")
        return False

    seqs[1].params = SamplingParams(40, seed=1)
    seqs[1].ends, seqs[1].watch = frozenset(), watch
    run(model, seqs)
    assert (seqs[1].finish, seqs[1].error) == ("error", "ZeroDivisionError: the caller's own mistake")
    assert seqs[1].stats.tokens == len(seqs[1].output) == number
    others = [seq for seq in seqs if seq.id != 1]
    assert outputs(others) == outputs(map(alone, others))
    assert "error" not in {seq.finish for seq in others}
    assert model.written
    assert model.markov.seen == {}


def test_prompts_that_take_several_steps_come_first():
    model = PagedMarkov()
    engine = Engine(model, Drafter(Drafter.Options(), None), Limits(2 * MANY, chunk=50))
    seqs = [Sequence(id, [id % 6, 1, 2, id % 5, 3], SamplingParams(20)) for id in range(MANY)]
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert model.written
    assert outputs(seqs) == outputs(map(alone, seqs))


class Reading(Drafter):
    """It drafts nothing and reads states: here those of tokens that were written in bulk are the tokens after them."""

    layers = (1,)

    def __init__(self):
        self.seen = {}

    def observe(self, step):
        assert step.hidden is not None
        assert len(step.hidden) == len(step.tokens) + len(step.draft)
        if step.verdict is not None:  # the tokens whose states these are: all but the newest
            assert list(step.tokens) == step.seq.tokens[-1 - len(step.tokens) : -1]
        self.seen[step.seq.id] = self.seen.get(step.seq.id, 0) + len(step.tokens)
        if len(step.tokens) > 1 and step.seq.output[1:]:
            assert step.hidden[:, 0, 0].tolist() == step.seq.tokens[-len(step.tokens) :]


def test_a_drafter_that_reads_states_is_shown_those_of_every_token():
    """A prefix shared with another sequence has no states. Of a sequence that ends nobody needs more."""
    model, seqs, reading = PagedMarkov(), sequences(MANY + 8), Reading()
    seen = []
    model.free = lambda id: (seen.append((id, model.markov.length(id))), model.markov.free(id))
    run(model, seqs, reading)
    assert model.begun == []
    assert model.written
    assert all(reading.seen[seq.id] <= len(seq.tokens) - 1 < reading.seen[seq.id] + 17 for seq in seqs)
    assert outputs(seqs) == outputs(map(alone, seqs))


def test_a_sequence_that_is_cancelled_while_a_pass_runs_is_freed_after_it():
    model = PagedMarkov()
    engine = Engine(model, Drafter(Drafter.Options(), None), Limits(4))
    seqs = [Sequence(id, [id, 1], SamplingParams(20)) for id in range(2)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    lengths = []

    def cancel():
        if seqs[0].finish is None:
            assert engine.cancel(0) == []
            lengths.append(model.length(0))

    engine.meanwhile = cancel
    assert engine.step() == [seqs[0]]
    assert lengths[0] > 0
    assert model.length(0) == 0
    drain(engine)
    assert (seqs[0].finish, seqs[1].finish) == ("cancelled", "length")
    assert outputs(seqs[1:]) == outputs([alone(seqs[1])])


def test_the_first_pass_of_a_shape_is_no_measure_of_the_next():
    class Compiling(PagedMarkov):
        """Its first pass also compiles."""

        passes = 0

        def forward(self, feeds, layers=()):
            found = super().forward(feeds, layers)
            self.passes += 1
            found.first = self.passes <= 3
            return found

    model, policy = Compiling(), DraftingPolicy()
    run(model, [Sequence(0, [1], SamplingParams(9, logprobs=1))], policy=policy)  # the host looks at every token
    assert model.passes == 9
    assert policy.cost._counts == {1: 9 - 3}
