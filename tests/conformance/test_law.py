"""Sampled output follows the target's own law, with every drafter, under both rules.

And drafts are kept as often as the rule promises.
"""

import functools
import math

import pytest
import torch
from tiny import (
    ALL_SPECS,
    COMBINED,
    IDLE,
    SPECS,
    Markov,
    Scripted,
    assert_follows,
    assert_rate,
    continuations,
    law_by_hand,
    new_engine,
    noisy,
    ours,
    outputs,
    random_heads,
    reference,
    resized,
    run,
)

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed

VOCAB = 6
PROMPT = [0, 1, 2, 0, 1, 2, 0, 1]
PREDICTION = (2, 0, 1, 2)
LENGTH = 3
MANY = Limits(batch=10_000, chunk=1_000_000)

LAWS = {
    "temperature": dict(temperature=0.7),
    "top_k": dict(temperature=1.0, top_k=3),
    "top_p": dict(temperature=1.3, top_p=0.8),
    "min_p": dict(temperature=1.2, min_p=0.15),
    "typical_p": dict(temperature=1.0, typical_p=0.7),
    "penalties": dict(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": dict(temperature=1.0, logit_bias={2: 1.0, 4: -2.0, 5: 0.5}),
    "all": dict(
        temperature=1.1,
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        logit_bias={1: 0.7},
        bad_words=[[2, 3]],
    ),
}
RULES = ("rejection", "coupled")


@pytest.fixture(autouse=True)
def a_law_is_computed_once(monkeypatch):
    """Hundreds of sequences come to the same place: what the engine computes there is remembered for one test."""
    compute, known = Sequence.law, {}

    def remembered(seq, logits, guessed=()):
        key = logits.numpy().tobytes(), (*seq.tokens, *guessed), seq.prompt, id(seq.params), seq.ends
        if key not in known:
            known[key] = seq.params, compute(seq, logits, guessed)  # with them, so that the id stays theirs
        return known[key][1].clone()

    monkeypatch.setattr(Sequence, "law", remembered)


CHOSEN = {}  # of every test: under the coupled rule the target's choices are the same, whoever drafts


@pytest.fixture(autouse=True)
def a_choice_is_made_once(monkeypatch):
    """The same dice choose the same token from the same law at the same position: each is drawn once for the file."""
    compute = Dice.choose

    def remembered(dice, law, position):
        key = dice.key, position, law.numpy().tobytes()
        if key not in CHOSEN:
            CHOSEN[key] = compute(dice, law, position)
        return CHOSEN[key]

    monkeypatch.setattr(Dice, "choose", remembered)


@functools.cache
def target():
    return Markov(VOCAB, seed=1)


@functools.cache
def draft_models():
    """Draft models of the Markov target, by the names that the specs use."""
    tables = target().tables

    def alike(scale, seed):
        return tables + scale * torch.randn(tables.shape, generator=torch.Generator().manual_seed(seed))

    def padded(tables, size):
        out = torch.randn(size + 1, size, size, generator=torch.Generator().manual_seed(9))
        n = min(size, tables.shape[2])
        out[:n, :n, :n], out[-1, :n, :n] = tables[:n, :n, :n], tables[-1, :n, :n]
        return out

    return {
        "itself": Markov(VOCAB, tables=tables),
        "noisy": Markov(VOCAB, tables=alike(0.8, 2)),
        "stranger": Markov(VOCAB, seed=7),
        "longer": Markov(VOCAB + 2, tables=padded(alike(0.5, 3), VOCAB + 2)),
        "shorter": Markov(VOCAB - 1, tables=padded(alike(0.5, 4), VOCAB - 1)),
    }


def build(spec):
    if spec.startswith("scripted"):
        best = target().tables.argmax(-1)

        def oracle(seq, guessed):
            before, last = [*seq.tokens, *guessed][-2:]
            return int(best[before, last])

        return Scripted(oracle, VOCAB, drawn=spec == "scripted:drawn", nodes=5)
    return drafters.build(
        spec, BuildContext(target(), lambda name, quantize: draft_models()[name], heads=random_heads(target()))
    )


def sample(drafter, rule, params, count, length=LENGTH, model=None):
    """Many sequences with different luck."""
    params = SamplingParams(**params, max_tokens=length)
    seqs = [
        Sequence(i, list(PROMPT), params, prediction=PREDICTION, dice=Dice(1000 + i), rule=rule) for i in range(count)
    ]
    engine = run(model or target(), drafter, seqs, MANY)
    return list(map(tuple, outputs(seqs))), engine.stats


@functools.cache
def exact(name):
    return continuations(target().logits, PROMPT, SamplingParams(**LAWS[name]), LENGTH)


FIRST_SPECS = [specs[0] for specs in SPECS.values()]  # one for each drafter


def cases():
    """Every drafter under every law; its other specs, which share the code that knows of laws, under one."""
    for spec in [*FIRST_SPECS, "scripted:guessed", "scripted:drawn"]:
        yield from ((law, spec) for law in LAWS)
    yield from (("all", spec) for spec in ALL_SPECS if spec not in FIRST_SPECS)


@pytest.mark.parametrize(("law", "spec"), list(cases()))
@pytest.mark.parametrize("rule", RULES)
def test_every_short_continuation_has_its_exact_probability(law, rule, spec):
    samples, stats = sample(build(spec), rule, LAWS[law], 800)
    assert_follows(samples, exact(law))
    assert stats.accepted > 0 or spec in IDLE


@pytest.mark.parametrize("spec", ["eagle:head=eagle,length=3", "block:head=block,length=3"])
def test_the_law_where_a_head_draws_several_tokens_in_a_row(spec):
    """A head drafts from the second step on, so three tokens hold one draw and four hold two: each must have its own
    random numbers. 800 samples are too few to see it."""
    samples, stats = sample(build(spec), "rejection", LAWS["temperature"], 3000, length=4)
    assert_follows(samples, continuations(target().logits, PROMPT, SamplingParams(**LAWS["temperature"]), 4))
    assert stats.drafted_by_depth[2] > 1000


def test_the_law_where_one_draws_and_another_guesses():
    """Which of the drafts is taken must not depend on what was drawn: 800 samples are too few to see it."""
    spec = "ngram:min_n=1,length=2+draft_model:model=noisy,length=2"
    samples, stats = sample(build(spec), "rejection", LAWS["temperature"], 5000, length=2)
    assert_follows(samples, continuations(target().logits, PROMPT, SamplingParams(**LAWS["temperature"]), 2))
    assert stats.accepted_by_drafter["draft_model"] > 1000


@pytest.mark.parametrize("spec", [*FIRST_SPECS, *COMBINED])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_of_a_real_forward(rule, spec):
    """The same with a transformer, whose cache must be right after refusals."""
    params = dict(temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    model, others = _tiny_llamas()

    def logits(tokens):
        (output,) = model.forward([Feed(-1, tokens)])
        model.free(-1)
        return output.logits[0]

    drafter = drafters.build(spec, BuildContext(model, lambda name, quantize: others[name], heads=random_heads(model)))
    samples, _ = sample(drafter, rule, params, 600, model=model)
    assert_follows(samples, continuations(logits, PROMPT, SamplingParams(**params), LENGTH))


@functools.cache
def _tiny_llamas():
    sizes = dict(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3
    )
    model = reference("llama", seed=8, vocab_size=VOCAB, **sizes)
    return ours(model), {"noisy": ours(noisy(model, 0.1)), "shorter": ours(resized(noisy(model, 0.1), VOCAB - 1))}


def expected_acceptance(kept, draft_model, params, depth):
    """The chance that the first `depth` tokens of a draft are all kept. `kept(p, q)` gives each token's chance to be
    both drafted and kept."""

    def law(model, path):
        tokens = [*PROMPT, *path]
        return law_by_hand(_fit(model.logits(tokens)), tokens, len(PROMPT), params)

    def chance(path):
        if len(path) == depth:
            return 1.0
        both = kept(law(target(), path), law(draft_model, path))
        return sum(p * chance((*path, token)) for token, p in enumerate(both) if p)

    return chance(())


def _fit(logits):
    return [*logits.tolist(), *[-math.inf] * VOCAB][:VOCAB]


def minimum(p, q):
    """Rejection: Σ min(p, q)."""
    return [min(a, b) for a, b in zip(p, q, strict=True)]


def shared_noise(p, q):
    """Coupled: both take x with probability 1 / Σ_y max(p(y) / p(x), q(y) / q(x)), two races with common clocks."""
    return [
        1 / sum(max(py / px, qy / qx) for py, qy in zip(p, q, strict=True)) if px and qx else 0.0
        for px, qx in zip(p, q, strict=True)
    ]


def guessed(p, q):
    """A guessed token is kept as often as the target writes it."""
    return [px * (token == q.index(max(q))) for token, px in enumerate(p)]


# Drafters that draw from a law of their own, and the model that this law is of.
DRAWN = {
    "draft_model:model=noisy,length=2": lambda: draft_models()["noisy"],
    "draft_model:model=shorter,length=2": lambda: draft_models()["shorter"],
    "layer_skip:layers=1,length=2": lambda: target().first(1),
}


@pytest.mark.parametrize("law", ["temperature", "all"])
@pytest.mark.parametrize("spec", DRAWN)
class TestAcceptance:
    """A law test misses a drawn draft that is treated as guessed: it stays exact and only keeps less."""

    def test_of_drawn_tokens_under_rejection_is_the_sum_of_min_p_q(self, spec, law):
        self.check(spec, law, "rejection", minimum)

    def test_of_drawn_tokens_under_the_coupled_rule_is_that_of_shared_noise(self, spec, law):
        self.check(spec, law, "coupled", shared_noise)

    @pytest.mark.parametrize("rule", RULES)
    def test_of_guessed_tokens_is_their_own_probability(self, spec, law, rule):
        self.check(f"{spec},greedy=true", law, rule, guessed)

    def check(self, spec, law, rule, kept):
        params = SamplingParams(**LAWS[law], max_tokens=LENGTH)
        seqs = [Sequence(i, list(PROMPT), params, dice=Dice(1000 + i), rule=rule) for i in range(1500)]
        engine = new_engine(target(), build(spec), MANY)
        for seq in seqs:
            engine.add(seq)
        engine.step()
        for depth in (1, 2):
            hits = sum(seq.stats.accepted >= depth for seq in seqs)
            draft_model = DRAWN[spec.removesuffix(",greedy=true")]()
            assert_rate(hits, len(seqs), expected_acceptance(kept, draft_model, params, depth))
        for seq in seqs:
            engine.cancel(seq.id)
