"""The same seed gives the same tokens with any drafter, any draft length, any batch, any order, or none."""

import functools
import re

import pytest
import torch
from tiny import CASES, VOCAB, Scripted, family, outputs, parts, plainly, prompts, run

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.scheduler import Limits

COUNT = 12
KINDS = ("llama", "gpt2")  # one for each class of model


def params(seed):
    """Some of everything, and different for each sequence."""
    options = [
        dict(temperature=0.7),
        dict(temperature=1.0, top_k=8, repetition_penalty=1.2),
        dict(temperature=1.3, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.2),
        dict(temperature=0.9, min_p=0.05, logit_bias={3: 2.0}),
        dict(temperature=0.0, repetition_penalty=1.3),
    ][seed % 5]
    return SamplingParams(seed=seed, max_tokens=COUNT, logprobs=2, **options)


def sequence(i, tokens, prediction=()):
    return Sequence(i, list(tokens), params(i), prediction=tuple(prediction), dice=Dice(i))


@functools.cache
def plain(kind):
    """Eight sequences, each decoded plainly and alone."""
    return [plainly(family(kind)[1], tokens, params(i), dice=Dice(i)) for i, tokens in enumerate(prompts(8, seed=1))]


def check(kind, drafter, order=range(8), limits=Limits()):
    expected = plain(kind)
    seqs = []
    for i in order:
        answer = [token.id for token in expected[i].output]
        seqs.append(sequence(i, expected[i].tokens[: expected[i].prompt], [*answer[:4], 0, *answer[5:]]))
    engine = run(family(kind)[1], drafter, seqs, limits)
    assert outputs(seqs) == outputs(expected[i] for i in order)
    for seq in seqs:
        for ours, theirs in zip(seq.output, expected[seq.id].output, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-4)
    return engine.stats


@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize(("kind", "spec"), [case for case in CASES if case[0] in KINDS and "length=" in case[1]])
def test_any_draft_length(kind, spec, length):
    stats = check(kind, drafters.build(re.sub("length=[0-9]+", f"length={length}", spec), parts(kind)))
    assert stats.accepted > 0 or "stranger" in spec or "grammar" in spec


@pytest.mark.parametrize(("kind", "spec"), [case for case in CASES if case[0] in KINDS])
class TestSameSeed:
    def test_a_batch(self, kind, spec):
        check(kind, drafters.build(spec, parts(kind)))

    def test_alone(self, kind, spec):
        check(kind, drafters.build(spec, parts(kind)), limits=Limits(batch=1))

    def test_any_order_of_arrival(self, kind, spec):
        check(kind, drafters.build(spec, parts(kind)), order=[5, 2, 7, 0, 3, 6, 1, 4], limits=Limits(batch=3, chunk=4))


@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind):
    def oracle(seq, guessed):
        return plain(kind)[seq.id].output[len(seq.output) + len(guessed)].id

    stats = check(kind, Scripted(oracle, VOCAB))
    assert 0 < stats.accepted < stats.drafted
    assert len(stats.accepted_by_depth) >= 3


def test_another_seed_gives_other_tokens():
    answers = {tuple(plainly(family("llama")[1], [1, 2, 3], params(5), dice=Dice(seed)).tokens) for seed in range(8)}
    assert len(answers) > 1


def test_logprobs_are_those_of_the_unchanged_logits():
    """The sampling options do not show in them."""
    reference = family("llama")[0]
    for seq in plain("llama"):
        with torch.inference_mode():
            scores = reference(torch.tensor([seq.tokens])).logits[0].log_softmax(-1)
        for place, token in enumerate(seq.output, seq.prompt - 1):
            assert token.logprob == pytest.approx(float(scores[place, token.id]), abs=1e-4)
            assert [id for id, _ in token.top] == scores[place].topk(2).indices.tolist()
