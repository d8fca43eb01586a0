"""The loop and the scheduler, on a model that costs nothing and checks what it is told."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny import Markov, Scripted, drain, new_engine, outputs, plainly, run

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits, Scheduler
from outrider.models.base import Output


def plain_drafter():
    return Drafter(Drafter.Options(), BuildContext(None, None))


def sequences(lengths, count=5):
    return [
        Sequence(i, [(i + k) % 6 for k in range(n)], SamplingParams(max_tokens=count)) for i, n in enumerate(lengths)
    ]


class Watched(Markov):
    """A model that writes down how many tokens and sequences each pass had."""

    def __init__(self, **more):
        super().__init__(**more)
        self.passes = []

    def forward(self, feeds, layers=()):
        self.passes.append([len(feed.tokens) for feed in feeds])
        return super().forward(feeds, layers)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 12),
)
def test_any_limits_give_the_same_tokens(shapes, batch, piece, room):
    """Sequences, how many at once, how much prompt, how large a draft: none of it shows in the output."""
    model = Markov(seed=2)
    seqs = [
        Sequence(i, [(i * k) % 6 for k in range(n)], SamplingParams(max_tokens=count))
        for i, (n, count) in enumerate(shapes)
    ]
    run(model, Scripted(lambda seq, guessed: (seq.id + len(guessed)) % 6, 6), seqs, Limits(batch, piece, room))
    assert outputs(seqs) == [outputs([plainly(model, seq.tokens[: seq.prompt], seq.params)])[0] for seq in seqs]
    assert model.seen == {}


def test_passes_of_long_sequences_are_no_measure_for_short_ones():
    model, policy = Watched(), DraftingPolicy()
    model.context = 512
    engine = Engine(model, Scripted(None, 6, nodes=0), Limits(1, 512), policy)
    known = []
    for id, length in enumerate((5, 300)):
        engine.add(Sequence(id, [1] * length, SamplingParams(max_tokens=8, ignore_eos=True)))
        drain(engine)
        known.append({bits: dict(cost._counts) for bits, cost in policy._costs.items()})
    assert known[0] == {0: {1: 7}}
    assert known[1] == {0: {1: 7}, 1: {1: 2 + 7}}  # of the short ones it takes no more than two


def test_where_nobody_drafts_nothing_is_measured_for_it():
    model, policy = Watched(), DraftingPolicy()
    engine = Engine(model, plain_drafter(), Limits(), policy)
    [seq] = sequences([4], count=6)
    engine.add(seq)
    drain(engine)
    assert len(seq.output) == seq.stats.steps == 6
    assert set(seq.stats.seconds) == {"draft", "target", "verify"}
    assert not policy.cost.known
    engine.drafters["other"] = Scripted(None, 6, nodes=0)
    engine.add(Sequence(9, [1, 2], SamplingParams(max_tokens=4), draft="other"))
    drain(engine)
    assert policy.cost.known


def test_a_step_takes_in_no_more_prompt_than_a_piece():
    model = Watched()
    seqs = sequences([10, 3, 8])
    run(model, plain_drafter(), seqs, Limits(chunk=6))
    prompts_in = [sum(n for n in counts if n > 1) for counts in model.passes]
    assert max(prompts_in) <= 6
    assert sum(map(sum, model.passes)) == 10 + 3 + 8 + 3 * 4  # every token was fed once, and the last of each never


def test_those_who_write_go_on_while_a_long_prompt_comes_in():
    model = Watched()
    seqs = sequences([1, 40], count=8)
    engine = new_engine(model, plain_drafter(), Limits(chunk=5))
    for seq in seqs:
        engine.add(seq)
    for step in range(1, 8):
        engine.step()
        assert len(seqs[0].output) == step
    assert len(seqs[1].output) == 0


def test_no_more_run_at_once_than_the_limit():
    model = Watched()
    run(model, plain_drafter(), sequences([2] * 9), Limits(batch=4))
    assert max(map(len, model.passes)) == 4


def test_drafts_are_made_only_while_few_run():
    seqs = sequences([2] * 3, count=9)
    seqs[0].params = SamplingParams(max_tokens=30)
    model = Markov(seed=2)
    run(model, Scripted(lambda seq, guessed: 0, 6), seqs, Limits(drafting=2))
    assert [seq.stats.drafted for seq in seqs[1:]] == [0, 0]
    assert seqs[0].stats.drafted > 0
    assert outputs(seqs) == [outputs([plainly(model, seq.tokens[: seq.prompt], seq.params)])[0] for seq in seqs]


def test_first_come_first_served():
    engine = new_engine(Markov(), plain_drafter(), Limits(batch=2))
    seqs = sequences([2] * 6)
    for seq in seqs:
        engine.add(seq)
    ended = []
    while engine.busy:
        ended += [seq.id for seq in engine.step()]
    assert ended == [0, 1, 2, 3, 4, 5]


def test_a_large_one_at_the_head_of_the_queue_is_not_overtaken_forever():
    scheduler = Scheduler(Limits(budget=0), context=100, capacity=60)
    large, small = Sequence(9, [1] * 40, SamplingParams(max_tokens=10)), sequences([5, 5, 5, 5], count=10)
    for seq in [small[0], small[1], large, small[2], small[3]]:
        scheduler.add(seq)
    assert scheduler.admit() == small[:2]
    assert [plan.seq for plan in scheduler.plan(lambda id: 0)] == small[:2]
    small[0].finish = small[1].finish = "length"
    scheduler.retire()
    assert scheduler.admit() == [large]
    assert [plan.seq for plan in scheduler.plan(lambda id: 0)] == [large]


def test_a_step_with_nothing_to_do_does_nothing():
    engine = new_engine(Markov(), plain_drafter())
    assert engine.step() == []
    assert not engine.busy


def test_each_sequence_is_served_by_the_drafter_that_it_names():
    asked = []

    class Named(Drafter):
        def __init__(self, name):
            self.name = name

        def propose(self, seqs, budgets):
            asked.append((self.name, [seq.id for seq in seqs]))
            return [Draft.chain([0][:budget]) for budget in budgets]

    engine = new_engine(Markov(), Named("own"))
    engine.drafters["other"] = Named("other")
    seqs = sequences([2] * 4, count=3)
    seqs[1].draft = seqs[2].draft = "other"
    for seq in seqs:
        engine.add(seq)
    engine.step()
    assert sorted(asked) == [("other", [1, 2]), ("own", [0, 3])]
    drain(engine)
    assert seqs[1].stats.by_drafter.keys() == {"other"}
    assert seqs[0].stats.by_drafter.keys() == {"own"}


def test_a_drafter_sees_what_became_of_its_draft():
    model, steps = Markov(), []
    right = outputs([plainly(model, [0, 1], SamplingParams(max_tokens=6))])[0]

    class Observing(Drafter):
        name = "observing"

        def propose(self, seqs, budgets):
            return [
                Draft((right[0], right[1], 0, 1, 2, 3, 4, 5), (-1, 0, 1, 1, 1, 1, 1, 1)).cut(budget)
                for budget in budgets
            ]

        def observe(self, step):
            steps.append(step)

    seq = Sequence(0, [0, 1], SamplingParams(max_tokens=6))
    engine = new_engine(model, Observing(Drafter.Options(), None), Limits(chunk=1))
    engine.add(seq)
    engine.step()
    assert steps[0].verdict is None  # a piece of the prompt: nothing to judge
    assert steps[0].tokens == [0]
    engine.step()
    assert steps[1].verdict.path[:2] == (0, 1)
    assert steps[1].seq.tokens[:4] == [0, 1, right[0], right[1]]
    assert model.seen[0] == seq.tokens[:-1]


@pytest.mark.parametrize("drafts", [["", "deep", "none"], ["", "none", "none"]], ids=["two read", "one reads"])
def test_a_drafter_gets_the_hidden_states_it_asked_for(drafts):
    class Deep(Markov):
        def forward(self, feeds, layers=()):
            outputs = super().forward(feeds, layers)
            hidden = [torch.tensor([[float(layer)] * 4 for layer in layers]) for _ in feeds]
            return [
                Output(o.logits, h.expand(len(f.tokens) + len(f.draft), -1, -1))
                for o, h, f in zip(outputs, hidden, feeds, strict=True)
            ]

    seen = {}

    class Asking(Drafter):
        def __init__(self, *layers):
            self.layers = layers

        def observe(self, step):
            seen[step.seq.id] = step.hidden

    engine = new_engine(Deep(), Asking(2, 0))
    engine.drafters["deep"], engine.drafters["none"] = Asking(1), plain_drafter()
    for seq, draft in zip(sequences([3, 2, 1]), drafts, strict=True):
        seq.draft = draft
        engine.add(seq)
    engine.step()
    assert seen[0].shape == (3, 2, 4)
    assert seen[0][0, :, 0].tolist() == [2.0, 0.0]
    if "deep" in drafts:
        assert seen[1][:, :, 0].tolist() == [[1.0], [1.0]]


def test_an_own_draft_larger_than_its_room_is_cut():
    class Large(Drafter):
        def propose(self, seqs, budgets):
            return [Draft.chain([0] * 50) for _ in budgets]

    seq = Sequence(0, [1, 2], SamplingParams(max_tokens=5))
    run(Markov(), Large(Drafter.Options(), None), [seq], Limits(budget=3))
    assert seq.stats.drafted <= 3 * 5
    assert outputs([seq]) == outputs([plainly(Markov(), [1, 2], SamplingParams(max_tokens=5))])


def test_the_shares_of_time_add_up():
    engine = run(Markov(), plain_drafter(), sequences([2] * 3))
    assert engine.stats.seconds.keys() == {"draft", "target", "verify"}
    assert all(seconds > 0 for seconds in engine.stats.seconds.values())
    assert engine.stats.tokens == 15


def test_tokens_say_who_wrote_them():
    model = Markov()
    right = outputs([plainly(model, [0, 1], SamplingParams(max_tokens=3))])[0]

    class Two(Drafter):
        name = "two"

        def propose(self, seqs, budgets):
            return [Draft.chain(right[:2]).cut(budget) for budget in budgets]

    seq = Sequence(0, [0, 1], SamplingParams(max_tokens=3))
    run(model, Two(Drafter.Options(), None), [seq])
    assert [(token.drafter, token.depth) for token in seq.output] == [("two", 1), ("two", 2), (None, 0)]


def test_log_probabilities_are_those_of_each_tokens_own_place():
    """In a path that is kept, each token's come from the row of the node before it."""
    model, params = Markov(), SamplingParams(max_tokens=7, logprobs=2)
    plain = plainly(Markov(), [0, 1], params)
    right = [token.id for token in plain.output]

    class Right(Drafter):
        name = "right"

        def propose(self, seqs, budgets):
            return [Draft.chain(right[len(seqs[0].output) :][:3]).cut(budget) for budget in budgets]

    seq = Sequence(0, [0, 1], params)
    run(model, Right(Drafter.Options(), None), [seq])
    assert seq.stats.accepted > 2
    assert [(t.id, t.logprob, t.top) for t in seq.output] == [(t.id, t.logprob, t.top) for t in plain.output]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_needs_no_luck(rule):
    seq = plainly(Markov(), [0, 1], SamplingParams(max_tokens=9), rule=rule)
    assert outputs([seq]) == outputs([plainly(Markov(), [0, 1], SamplingParams(max_tokens=9))])


class Dear(Drafter):
    """Sure of what is always wrong; it costs something, so it should be asked for less and less."""

    name, reports_acceptance = "dear", True

    def __init__(self, model):
        self._model, self.asked = model, []

    def propose(self, seqs, budgets):
        self.asked.append(len(seqs[0].output))
        best = [int(self._model.tables[tuple(seq.tokens[-2:])].argmin()) for seq in seqs]
        return [Draft.chain([token], acceptance=[0.9]).cut(budget) for token, budget in zip(best, budgets, strict=True)]


def test_a_drafter_that_does_not_earn_what_it_costs_rests_and_the_text_is_the_same():
    model, params = Markov(seed=3), SamplingParams(max_tokens=60)
    dear = Dear(model)
    engine = Engine(model, dear, Limits(), DraftingPolicy())
    for id in range(4):  # one after the other
        seq = Sequence(id, [id, 1, 2], params)
        engine.add(seq)
        drain(engine)
        assert outputs([seq]) == outputs([plainly(Markov(seed=3), [id, 1, 2], params)])
    assert 0 < len(dear.asked) < 4 * 60 / 2  # how few they are is the simulation's to say (test_policy.py)
