"""The law: every option against its definition, against transformers, and in every node's own context."""

import math

import pytest
import torch
import transformers
from hypothesis import assume, given, settings, strategies as st
from tiny import law_by_hand

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams, adjust, likeliest, warp, warp_batch
from outrider.core.sequence import Sequence, guessed_tokens

VOCAB = 7


def law(scores, context, prompt, params, ends):
    return warp(adjust(scores, context, prompt, params, ends), params)


tokens = st.integers(0, VOCAB - 1)
logits = st.lists(st.floats(-6, 6, width=32), min_size=VOCAB, max_size=VOCAB, unique=True).map(torch.tensor)

# One strategy per option; the default is among the values, so that any combination comes up.
OPTIONS = dict(
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.4, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.06, 0.31, 1.0]),
    typical_p=st.sampled_from([0.15, 0.52, 0.88, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.6, 0.0, 0.8]),
    frequency_penalty=st.sampled_from([-0.4, 0.0, 0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-3.0, 0.4, 2.5, -math.inf]), max_size=3),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=2, unique=True),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 4),
)
everything = st.fixed_dictionaries({}, optional=OPTIONS)


def agree(params, scores, context, prompt, ends=frozenset()):
    expected = law_by_hand(scores, context, prompt, params, ends)
    assert law(scores, context, prompt, params, ends).tolist() == pytest.approx(expected, abs=1e-5)


def clear_cut(params, scores, context, prompt, ends):
    """No cut of the law falls on a tie, where rounding decides."""
    values = [
        x for x in law_by_hand(scores, context, prompt, SamplingParams(**{**params, "temperature": 1.0}), ends) if x
    ]
    return all(abs(a - b) > 1e-4 for i, a in enumerate(values) for b in values[:i])


@settings(max_examples=400, deadline=None)
@given(logits, st.lists(tokens, min_size=1, max_size=8), st.integers(1, 8), everything, st.sets(tokens, max_size=2))
def test_any_combination_of_options_is_its_definition(scores, context, prompt, given_options, ends):
    prompt = min(prompt, len(context))
    params = SamplingParams(**given_options)
    try:
        adjust(scores, context, prompt, params, frozenset(ends))
    except OutriderError:
        return  # nothing is left to write: tested below
    assume(clear_cut({k: v for k, v in given_options.items() if k in ADJUSTING}, scores, context, prompt, ends))
    try:
        agree(params, scores, context, prompt, frozenset(ends))
    except AssertionError:
        assume(not on_the_edge(given_options, scores, context, prompt, ends))
        raise


ADJUSTING = {k for k in OPTIONS if k not in ("temperature", "top_k", "top_p", "min_p", "typical_p")}


def on_the_edge(options, scores, context, prompt, ends):
    """Whether a hair more or less of a cut gives another law: then float32 and float64 may differ."""
    laws = []
    for hair in (-1e-5, 1e-5):
        moved = {k: v * (1 + hair) if k in ("top_p", "min_p", "typical_p") and v < 1 else v for k, v in options.items()}
        shaken = [s * (1 + hair * i) for i, s in enumerate(scores.tolist())]
        laws.append(law_by_hand(shaken, context, prompt, SamplingParams(**moved), ends))
    return laws[0] != pytest.approx(laws[1], abs=1e-3)


def by_transformers(processors, scores, context=(0,)):
    ids, row = torch.tensor([list(context)]), scores.unsqueeze(0).clone()
    for processor in processors:
        row = processor(ids, row)
    return row.softmax(-1)[0].tolist()


PEERS = {
    "temperature": (dict(temperature=0.6), [transformers.TemperatureLogitsWarper(0.6)]),
    "top_k": (dict(temperature=1.0, top_k=3), [transformers.TopKLogitsWarper(3)]),
    "top_p": (dict(temperature=1.0, top_p=0.8), [transformers.TopPLogitsWarper(0.8)]),
    "min_p": (dict(temperature=1.0, min_p=0.2), [transformers.MinPLogitsWarper(0.2)]),
    "typical_p": (dict(temperature=1.0, typical_p=0.6), [transformers.TypicalLogitsWarper(0.6)]),
    "repetition_penalty": (
        dict(temperature=1.0, repetition_penalty=1.5),
        [transformers.RepetitionPenaltyLogitsProcessor(1.5)],
    ),
    "bad_words": (
        dict(temperature=1.0, bad_words=[[4], [1, 2], [5, 1, 3]]),
        [transformers.NoBadWordsLogitsProcessor([[4], [1, 2], [5, 1, 3]], eos_token_id=None)],
    ),
    "logit_bias": (
        dict(temperature=1.0, logit_bias={1: 2.0, 3: -1.0}),
        [transformers.SequenceBiasLogitsProcessor([[[1], 2.0], [[3], -1.0]])],
    ),
    "in a row": (
        dict(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.9),
        [
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopKLogitsWarper(5),
            transformers.TopPLogitsWarper(0.9),
            transformers.MinPLogitsWarper(0.1),
            transformers.TypicalLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("seed", range(8))
def test_the_law_is_that_of_transformers(name, seed):
    options, processors = PEERS[name]
    scores = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    context = [3, 5, 1]
    ours = law(scores, context, 1, SamplingParams(**options), frozenset())
    assert ours.tolist() == pytest.approx(by_transformers(processors, scores, context), abs=1e-6)


def test_min_tokens_is_that_of_transformers():
    processor = transformers.MinNewTokensLengthLogitsProcessor(1, 3, [2, 4])
    scores = torch.randn(VOCAB)
    for context in ([0], [0, 1, 1], [0, 1, 1, 1]):
        ours = law(scores, context, 1, SamplingParams(temperature=1.0, min_tokens=3), frozenset({2, 4}))
        assert ours.tolist() == pytest.approx(by_transformers([processor], scores, context), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.7),
        dict(presence_penalty=1.1),
        dict(frequency_penalty=0.9),
        dict(bad_words=[[1, 0], [2, 0, 3]]),
        dict(min_tokens=2),
        dict(
            processors=[lambda tokens, logits: logits - torch.nn.functional.one_hot(torch.tensor(sum(tokens) % 5), 5)]
        ),
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_node_has_its_own_context(options, temperature):
    """At a node the law is what it would be if the path to it had been committed."""
    scores = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6])
    draft = Draft((1, 2, 2, 0, 3, 1), (-1, 0, -1, 2, 3, 1))
    params = SamplingParams(temperature=temperature, **options)
    seq = Sequence(0, [4, 1], params, ends=frozenset({0}))
    seen = set()
    for node in range(-1, len(draft)):
        committed = Sequence(0, [4, 1, *guessed_tokens(draft, node)], params, ends=frozenset({0}))
        committed.prompt = 2
        expected = committed.law(scores)
        assert torch.equal(seq.law(scores, guessed_tokens(draft, node)), expected)
        assert seq.best(scores, guessed_tokens(draft, node)) == int(committed.best(scores))
        seen.add(tuple(expected.tolist()))
    assert len(seen) > 1  # the option does depend on the context


def test_greedy_is_a_one_hot_law():
    assert warp(torch.tensor([0.1, 3.0, 2.0]), SamplingParams()).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-37])
def test_a_very_low_temperature_is_greedy(temperature):
    params = SamplingParams(temperature=temperature)
    assert warp(torch.tensor([0.1, 30.0, 2.0]), params).tolist() == [0.0, 1.0, 0.0]


def test_the_logits_that_are_given_stay_as_they_are():
    scores = torch.randn(VOCAB)
    before = scores.clone()
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, logit_bias={1: 1.0}, allowed_token_ids=[1, 2])
    law(scores, [1, 2], 1, params, frozenset({2}))
    assert torch.equal(scores, before)


def test_processors_run_last_and_see_prompt_and_output():
    seen = []

    def processor(context, scores):
        seen.append((list(context), scores.tolist()))
        return scores + torch.tensor([0.0, 5.0, 0.0])

    params = SamplingParams(processors=[processor], logit_bias={0: 1.0})
    assert law(torch.zeros(3), [2, 2, 1], 1, params, frozenset()).tolist() == [0.0, 1.0, 0.0]
    assert seen == [([2, 2, 1], [1.0, 0.0, 0.0])]


def test_an_option_that_does_nothing_costs_nothing():
    scores = torch.randn(VOCAB)
    assert adjust(scores, [1], 1, SamplingParams(temperature=0.5, top_k=2), frozenset({1})) is scores
    for name in ADJUSTING:
        value = dict(logit_bias={1: 1.0}, allowed_token_ids=[1], bad_words=[[1]], min_tokens=1).get(name, 0.5)
        assert SamplingParams(**{name: value}).adjusts, name


def test_bans_that_leave_nothing_say_so():
    with pytest.raises(OutriderError, match="loosen"):
        law(torch.zeros(3), [0], 1, SamplingParams(allowed_token_ids=[1], bad_words=[[1]]), frozenset())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(max_tokens=0), "max_tokens must be at least 1, not 0"),
        (dict(max_tokens=2.5), "max_tokens must be a whole number, not 2.5"),
        (dict(max_tokens="9"), "max_tokens"),
        (dict(max_tokens=True), "max_tokens"),
        (dict(temperature=-0.1), "temperature must be 0 .greedy. or more, not -0.1"),
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature=math.inf), "temperature"),
        (dict(temperature=1e39), "temperature must be 0 .greedy. or between 1e-37 and 100, not 1e.39"),
        (dict(temperature=5e-324), "temperature must be 0 .greedy. or between"),
        (dict(temperature=10**400), "temperature"),
        (dict(top_k=-1), "top_k"),
        (dict(top_k=1.5), "top_k must be a whole number"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.1), "top_p must be above 0 and at most 1, not 1.1"),
        (dict(top_p=None), "top_p"),
        (dict(min_p=-0.1), "min_p"),
        (dict(min_p=1.1), "min_p"),
        (dict(typical_p=0), "typical_p"),
        (dict(typical_p=2), "typical_p"),
        (dict(repetition_penalty=0), "repetition_penalty"),
        (dict(repetition_penalty=1e-38), "repetition_penalty must be between 0.01 and 100, not 1e-38"),
        (dict(repetition_penalty=101), "repetition_penalty"),
        (dict(repetition_penalty=math.inf), "repetition_penalty"),
        (dict(presence_penalty=-1e39), "presence_penalty must be between -100 and 100, not -1e.39"),
        (dict(frequency_penalty=-1e38), "frequency_penalty must be between -100 and 100"),
        (dict(presence_penalty=math.inf), "presence_penalty"),
        (dict(frequency_penalty=math.nan), "frequency_penalty"),
        (dict(seed=1.5), "seed must be a whole number"),
        (dict(seed="a"), "seed"),
        (dict(n=0), "n must be at least 1"),
        (dict(logprobs=-1), "logprobs"),
        (dict(logprobs=1.0), "logprobs"),
        (dict(min_tokens=-1), "min_tokens"),
        (dict(min_tokens=5, max_tokens=4), "min_tokens .5. is more than max_tokens .4."),
        (dict(logit_bias={"a": 1.0}), "logit_bias maps token ids"),
        (dict(logit_bias={1: math.nan}), "logit_bias"),
        (dict(logit_bias={1: math.inf}), "logit_bias"),
        (dict(logit_bias={1: 1e39}), "logit_bias"),
        (dict(logit_bias=[(1, 2.0)]), "logit_bias"),
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty"),
        (dict(allowed_token_ids=["a"]), "allowed_token_ids must be a list of token ids"),
        (dict(allowed_token_ids=1.5), "allowed_token_ids"),
        (dict(stop=[1]), "stop must be a list of text"),
        (dict(stop=[""]), "a stop string is empty"),
        (dict(stop_token_ids=["x"]), "stop_token_ids must be a list of token ids"),
        (dict(stop_token_ids=[True]), "stop_token_ids"),
        (dict(bad_words=[""]), "a bad word is empty"),
        (dict(bad_words=[[]]), "a bad word is empty"),
        (dict(bad_words=[[1.5]]), "bad_words"),
        (dict(bad_words=1.5), "bad_words"),
        (dict(processors=[3]), "processors must be functions"),
        (dict(processors=3), "processors must be functions"),
    ],
)
def test_bad_values_are_refused_with_a_reason(options, reason):
    with pytest.raises(OutriderError, match=reason):
        SamplingParams(**options)


@pytest.mark.parametrize("temperature", [1e-37, 1.0, 100.0])
@pytest.mark.parametrize("repetition_penalty", [0.01, 100.0])
@pytest.mark.parametrize("penalty", [-100.0, 100.0])
def test_the_law_is_finite_at_the_bounds_of_what_is_taken(temperature, repetition_penalty, penalty):
    penalties = dict(repetition_penalty=repetition_penalty, presence_penalty=penalty, frequency_penalty=penalty)
    params = SamplingParams(temperature=temperature, logit_bias={2: 1e9, 3: -1e39}, **penalties)
    scores, context = torch.tensor([-1000.0, 1000.0, 0.0, 3.0, 5.0]), [0, 1, 1, 4] * 1000
    for found in (law(scores, context, 1, params, frozenset()), warp_batch(scores[None], [params])[0]):
        assert bool(found.isfinite().all())
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)


def test_one_value_stands_for_a_list_of_one():
    params = SamplingParams(stop="END", stop_token_ids=3, bad_words="no", processors=abs)
    assert (params.stop, params.stop_token_ids, params.bad_words, params.processors) == (
        ("END",),
        (3,),
        ("no",),
        (abs,),
    )


def test_every_token_id_that_is_named_can_be_checked():
    params = SamplingParams(logit_bias={1: 1.0}, allowed_token_ids=[2], bad_words=[[3, 4], "text"], stop_token_ids=[5])
    assert params.token_ids() == {1, 2, 3, 4, 5}


def test_the_greedy_choice_is_the_first_of_the_highest():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [-5.0, -7.0, -5.0, -6.0], [float("-inf"), -2.0, 1.0, 1.0]])
    for some in (logits, logits.bfloat16(), logits.double()):
        assert likeliest(some) == [1, 0, 2]


def both_ways(given_law, **options):
    """The law that the options make of it, by `warp` and by `warp_batch`, which agree."""
    scores, params = torch.tensor(given_law).log(), SamplingParams(temperature=1.0, **options)
    alone, batched = warp(scores, params), warp_batch(scores.unsqueeze(0), [params])[0]
    assert batched.tolist() == pytest.approx(alone.tolist(), abs=1e-6)
    return alone.tolist()


def test_min_p_looks_at_what_top_p_left():
    """top_p keeps .5 and .3, as .625 and .375. With min_p first, .625 would be the mass that top_p asks for."""
    assert both_ways([0.5, 0.3, 0.1, 0.1], top_p=0.6, min_p=0.3) == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=1e-6)


def test_top_p_reaches_into_a_long_flat_tail():
    """One token of probability 0.3, and 0.7 over 5,000 others, each far below a thousandth of the first."""
    found = both_ways([0.3, *[0.7 / 5000] * 5000], top_p=0.6)
    kept = sum(p > 0 for p in found)
    assert 1 + 0.3 / (0.7 / 5000) - 2 <= kept <= 1 + 0.3 / (0.7 / 5000) + 2
    assert found[0] == pytest.approx(0.5, abs=1e-3)


def test_top_p_keeps_no_token_more_when_the_mass_is_met_exactly():
    assert both_ways([0.5, 0.25, 0.125, 0.125], top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
    assert both_ways([0.5, 0.25, 0.125, 0.125], top_p=0.75) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])
