"""Requests take turns: one with many samples leaves the others their share of places, memory and prompt tokens."""

from random import Random

from hypothesis import given, settings, strategies as st
from tiny import Markov, drain, new_engine, outputs, plainly

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.engine.scheduler import LARGEST_SHARE, Limits, Scheduler


def samples(request, count, first, tokens=4, prompt=2):
    """The sequences of one request; their ids begin at `first`."""
    return [Sequence(first + i, [1] * prompt, SamplingParams(max_tokens=tokens), request=request) for i in range(count)]


def scheduler(batch=8, capacity=10**6, **more):
    return Scheduler(Limits(batch, budget=0, **more), 10**5, capacity)


def add(made, *groups):
    for seqs in groups:
        for seq in seqs:
            made.add(seq)


def ids(seqs):
    return [seq.id for seq in seqs]


def end(made, *seqs):
    for seq in seqs:
        seq.finish = "length"
    assert sorted(ids(made.retire())) == sorted(ids(seqs))


def test_a_sequence_of_its_own_is_a_request_of_its_own():
    assert [seq.request for seq in (Sequence(7, [1]), Sequence(8, [1]), Sequence(9, [1], request=7))] == [7, 8, 7]


def test_single_sequences_start_in_the_order_in_which_they_came():
    made, seqs = scheduler(batch=3), [Sequence(id, [1]) for id in range(9)]
    add(made, seqs)
    for begin in (0, 3, 6):
        assert made.admit() == seqs[begin : begin + 3]
        end(made, *seqs[begin : begin + 3])


def test_a_request_alone_runs_as_many_as_fit():
    made = scheduler(batch=8)
    add(made, samples(0, 64, 0))
    assert ids(made.admit()) == list(range(8))


def test_requests_that_wait_together_take_turns():
    made = scheduler(batch=6)
    add(made, samples(0, 64, 0), samples(100, 2, 100), samples(200, 1, 200))
    assert ids(made.admit()) == [0, 100, 200, 1, 101, 2]


def test_a_request_that_comes_later_pauses_one_of_many():
    """The case of the bug: 64 samples run for long, and a small request comes."""
    made, many, small = scheduler(batch=64), samples(0, 80, 0), samples(100, 1, 100)
    add(made, many)
    assert len(made.admit()) == 64
    add(made, small)
    assert made.admit() == small
    assert ids(made.running) == [*range(63), 100]
    assert ids(made.waiting) == [63, *range(64, 80)]
    end(made, *small)
    assert made.admit() == []  # the paused one goes on: it does not start again
    assert ids(made.running) == list(range(64))


def test_no_request_that_waits_runs_fewer_than_another_but_for_one():
    made = scheduler(batch=10)
    add(made, samples(0, 30, 0))
    made.admit()
    for request in (100, 200, 300):
        add(made, samples(request, 30, request))
        made.admit()
    counts = [sum(seq.request == request for seq in made.running) for request in (0, 100, 200, 300)]
    assert (sum(counts), min(counts), max(counts)) == (10, 2, 3)
    assert made.admit() == []  # and so it stays
    assert counts == [sum(seq.request == request for seq in made.running) for request in (0, 100, 200, 300)]


def test_no_more_sequences_pause_than_can_run():
    """Each keeps its cache, and a model has places for a bounded number. Requests come and sequences end at random."""
    made, random, request = scheduler(batch=8), Random(4), 0
    for _ in range(3000):
        if random.random() < 0.3 and len(made.waiting) < 60:
            request += 100
            add(made, samples(request, random.choice([1, 2, 4, 8]), request))
        elif made.running and random.random() < 0.5:
            end(made, random.choice(made.running))
        made.admit()
        assert len(made._paused) <= 8
    assert request > 1000


def test_with_one_place_a_request_waits_for_one_sample_not_for_all():
    made, many, small = scheduler(batch=1), samples(0, 5, 0), samples(100, 1, 100)
    add(made, many)
    order = [made.admit()[0]]
    add(made, small)
    while made.waiting:
        end(made, order[-1])
        order += made.admit()
    assert ids(order) == [0, 1, 100, 2, 3, 4]


def test_a_stream_of_new_requests_does_not_starve_the_samples_of_an_old_one():
    made, order = scheduler(batch=1), []
    add(made, samples(0, 3, 0))
    for turn in range(12):
        add(made, samples(100 + turn, 1, 100 + turn))
        order += made.admit()
        end(made, order[-1])
    assert {0, 1, 2} <= set(ids(order[:6]))


def test_many_samples_leave_memory_to_others():
    made = scheduler(batch=64, capacity=1000)
    add(made, samples(0, 64, 0, tokens=98))  # each may need 100
    assert len(made.admit()) == int(LARGEST_SHARE * 10)
    small = samples(100, 1, 100)
    add(made, small)
    assert made.admit() == small
    assert made.reserved <= 1000


def test_memory_is_reserved_for_the_nodes_of_a_draft_too():
    made = Scheduler(Limits(4, budget=7), 100, 1000, page=10)
    add(made, samples(0, 1, 0, tokens=4, prompt=3))
    made.admit()
    assert made.reserved == 20  # 3 + 4 + 7, in pages of 10


def test_no_draft_is_longer_than_what_may_still_be_written():
    """The target's own token comes after it."""
    made, seqs = scheduler(), samples(0, 2, 0, tokens=4)
    made.limits = Limits(8, budget=2)
    add(made, seqs)
    made.admit()
    seqs[1].extend([1, 1])
    assert [plan.budget for plan in made.plan(lambda id: 0)] == [2, 1]
    assert [plan.budget for plan in Scheduler(Limits(8), 100, 1000).plan(lambda id: 0, seqs)] == [3, 1]


def test_one_sequence_may_have_all_memory():
    made = scheduler(capacity=100)
    add(made, samples(0, 2, 0, tokens=98))
    assert ids(made.admit()) == [0]
    end(made, made.running[0])
    assert ids(made.admit()) == [1]


def test_memory_is_counted_to_the_end():
    made = scheduler(batch=2, capacity=1000)
    many, small = samples(0, 4, 0), samples(100, 1, 100)
    add(made, many)
    made.admit()
    add(made, small)
    made.admit()
    assert made.reserved == 3 * 6
    assert not made.withdraw(many[1])  # it has run: it holds memory until it is retired
    assert made.withdraw(many[3])
    end(made, many[1], many[0], small[0])
    assert made.reserved == 0
    assert made.admit() == [many[2]]
    end(made, many[2])
    assert (made.reserved, len(made.waiting), dict(made._held)) == (0, 0, {})


def test_a_paused_sequence_goes_on_while_another_waits_for_its_memory():
    made = scheduler(batch=2, capacity=100)
    many, small, large = samples(0, 2, 0, tokens=28), samples(100, 1, 100), samples(200, 1, 200, tokens=48)
    add(made, many)
    made.admit()  # 60 of 100
    add(made, small)
    assert made.admit() == small
    end(made, *small)
    add(made, large)
    assert made.admit() == []
    assert made.running == many
    end(made, *many)
    assert made.admit() == large


def test_one_that_waits_for_memory_is_not_overtaken():
    made = scheduler(capacity=100)
    first, large, small = samples(0, 1, 0, tokens=58), samples(100, 1, 100, tokens=78), samples(200, 1, 200)
    add(made, first)
    made.admit()  # 60 of 100
    add(made, large, small)
    assert made.admit() == []
    end(made, *first)
    assert made.admit() == [*large, *small]


def test_prompts_are_taken_in_by_turns():
    """Eight samples with a long prompt each, and one request with a short one: it does not wait for all of them."""
    made, many, small = scheduler(batch=9, chunk=10), samples(0, 8, 0, prompt=6), samples(100, 1, 100, prompt=3)
    add(made, many)
    made.admit()
    add(made, small)
    made.admit()
    plans = made.plan(lambda id: 0)
    assert [(plan.seq.id, len(plan.tokens), plan.last) for plan in plans] == [
        (0, 6, True),
        (1, 1, False),
        (100, 3, True),
    ]


def test_a_paused_sequence_can_be_cancelled():
    model = Markov()
    engine = new_engine(model, Drafter(Drafter.Options(), None), Limits(batch=2))
    many, small = samples(0, 2, 0, tokens=20), samples(100, 1, 100, tokens=9)
    add(engine, many)
    engine.step()
    add(engine, small)
    engine.step()
    assert ids(engine.scheduler.running) == [0, 100]
    assert model.length(1) > 0
    assert engine.cancel(1) == [many[1]]
    assert model.length(1) == 0
    assert many[1].finish == "cancelled"
    drain(engine)
    assert (model.seen, engine.scheduler.reserved) == ({}, 0)
    assert engine.stats.tokens == sum(len(seq.output) for seq in [*many, *small])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(20, 70),
)
def test_any_requests_at_any_time_write_the_same(requests, batch, chunk, capacity):
    """(step at which it comes, samples, tokens of each)"""
    model = Markov(seed=2)
    model.capacity = capacity
    engine = new_engine(model, Drafter(Drafter.Options(), None), Limits(batch, chunk, budget=2))
    groups = [(at, samples(100 * i, n, 100 * i, tokens, prompt=1 + i)) for i, (at, n, tokens) in enumerate(requests)]
    for step in range(13):
        add(engine, *(seqs for at, seqs in groups if at == step))
        engine.step()
        assert len(engine.scheduler.running) <= batch
        assert engine.scheduler.reserved <= capacity
    drain(engine)
    every = [seq for _, seqs in groups for seq in seqs]
    assert outputs(every) == outputs(plainly(Markov(seed=2), seq.tokens[: seq.prompt], seq.params) for seq in every)
    assert [seq.finish for seq in every] == ["length"] * len(every)
    assert (model.seen, engine.scheduler.reserved, len(engine.scheduler.waiting)) == ({}, 0, 0)
