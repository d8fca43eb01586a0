"""Greedy output in float32 is that of transformers' own `generate`, token for token, with every drafter."""

import functools

import pytest
from tiny import (
    ALL_SPECS,
    CASES,
    CONFIGS,
    IDLE,
    OWN,
    SPECS,
    VOCAB,
    Scripted,
    family,
    greedy_by_transformers,
    outputs,
    parts,
    prompts,
    run,
)

from outrider import drafters
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.scheduler import Limits
from outrider.models.llama import Llama

COUNT = 24
LONG = 45  # tokens of the longest prompt: more than any sliding window, and many pieces


@functools.cache
def wanted(kind):
    """Eight ragged prompts, and what transformers writes after each."""
    asked = prompts(8)
    asked[3] = (asked[3] * LONG)[:LONG]
    asked[5] = asked[5][:1]
    return asked, [greedy_by_transformers(family(kind)[0], tokens, COUNT) for tokens in asked]


def partly_wrong(output):
    """A prediction of the output with a token changed, one missing and one too many."""
    return (*output[:5], (output[5] + 1) % VOCAB, *output[6:11], *output[12:18], 0, *output[18:])


def greedy(kind, drafter, chosen=slice(None), limits=Limits()):
    asked, answers = wanted(kind)
    seqs = [
        Sequence(i, list(tokens), SamplingParams(max_tokens=COUNT), prediction=partly_wrong(answer))
        for i, (tokens, answer) in enumerate(zip(asked[chosen], answers[chosen], strict=True))
    ]
    engine = run(family(kind)[1], drafter, seqs, limits)
    assert outputs(seqs) == answers[chosen]
    assert engine.stats.tokens == COUNT * len(seqs)
    return engine.stats


def test_every_drafter_of_the_table_has_a_spec_to_be_tested_with():
    assert SPECS.keys() == drafters.TABLE.keys()
    named = {member.name for spec in ALL_SPECS for member in drafters.parse(spec).members}
    assert named == drafters.TABLE.keys()


def test_our_own_forward_runs_the_llama_family():
    assert all(isinstance(family(kind)[1], Llama) == (kind in OWN) for kind in CONFIGS)
    # the others take trees and batches in one pass; a model that gets them wrong is run alone, branch by branch
    assert all(family(kind)[1]._together for kind in CONFIGS if kind not in OWN)


@pytest.mark.parametrize(("kind", "spec"), CASES)
class TestGreedy:
    def test_alone(self, kind, spec):
        greedy(kind, drafters.build(spec, parts(kind)), slice(3, 4))

    def test_a_ragged_batch(self, kind, spec):
        stats = greedy(kind, drafters.build(spec, parts(kind)))
        if spec in IDLE:
            assert stats.drafted == 0
        elif "itself" in spec:
            assert stats.accepted == stats.drafted > 0
        else:
            assert 0 < stats.accepted < stats.drafted  # otherwise the test would prove nothing

    def test_prompts_in_pieces(self, kind, spec):
        greedy(kind, drafters.build(spec, parts(kind)), limits=Limits(batch=5, chunk=3))


@pytest.mark.parametrize("kind", CONFIGS)
def test_trees_of_right_and_wrong_branches(kind):
    """Branches, siblings and twins; kept paths that must be moved together in the cache."""
    _, answers = wanted(kind)

    def oracle(seq, guessed):
        return answers[seq.id][len(seq.output) + len(guessed)]

    stats = greedy(kind, Scripted(oracle, VOCAB))
    assert 0 < stats.accepted < stats.drafted
    assert len(stats.accepted_by_depth) >= 4
