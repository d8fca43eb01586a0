"""Requests with cuts (top-k, top-p, min-p, typical-p) go in rounds and in bulk, and write what they write with the
host. The kernels are interpreted on a CPU; rejection with cuts is in test_rejection_rounds."""

import pytest
import torch
from looped import drain, engine, plain, sequences, target, watch
from tiny import outputs

from outrider.core.params import SamplingParams

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
CUT = [
    SamplingParams(7, 0.9, seed=3, top_p=0.8),
    SamplingParams(6, 1.1, seed=4, top_k=4, min_p=0.05),
    SamplingParams(5),
    SamplingParams(6, 0.9, seed=6),
]
TYPICAL = [SamplingParams(6, 0.9, seed=5, typical_p=0.8, top_k=30), SamplingParams(5, 1.2, seed=3, typical_p=0.5)]


@pytest.fixture
def rounds(monkeypatch):
    """Of each sequence: the drafts of its rounds."""
    found = {}

    def seen(seqs, parts):
        for seq, own in zip(seqs, parts, strict=True):
            if seq.finish is None:
                found.setdefault(seq.id, []).extend(own.round(n).tokens for n in range(len(own.tokens)))

    watch(monkeypatch, seen)
    return found


@pytest.mark.parametrize(
    ("spec", "params"),
    [
        ("ngram:length=3", CUT),
        ("eagle:head=it,tree=6,width=3,length=3", CUT),
        ("eagle:head=it,length=2", TYPICAL),
        ("block:head=slots,tree=5,width=2,length=2", CUT),
        ("draft_model:model=like,length=2", CUT),
        ("ngram:length=3+draft_model:model=like,length=2", TYPICAL),
    ],
)
def test_rounds_write_what_plain_decoding_writes(rounds, spec, params):
    """Beside sequences without cuts."""
    seqs = drain(engine(spec), sequences(params))
    assert set(rounds) == set(range(len(params)))
    assert outputs(seqs) == outputs(plain(params))
    assert target().free_pages == target()._pages.count - 1


@pytest.mark.parametrize("params", [CUT, TYPICAL])
def test_without_drafts_the_target_writes_them_in_bulk(params):
    made, passes = engine("none"), []
    made.model.on_pass = lambda: passes.append(1)
    try:
        seqs = drain(made, sequences(params))
    finally:
        made.model.on_pass = None
    assert outputs(seqs) == outputs(plain(params))
    assert len(passes) <= 2 * len(params), "the host looked at every token"


@pytest.mark.parametrize(
    "spec", ["eagle:head=it,length=2", "block:head=slots,length=2", "draft_model:model=like,length=2"]
)
def test_the_law_of_a_drafter_is_cut_too(rounds, spec):
    """With one token left of every law, seeds and dice do not matter: drafts are those of a greedy request."""
    drain(engine(spec), sequences([SamplingParams(4)]))
    greedy = rounds.pop(0)
    drain(engine(spec), sequences([SamplingParams(4, 1.5, seed=3, top_k=1)]))
    assert rounds.pop(0) == greedy
    drain(engine(spec), sequences([SamplingParams(4, 1.5, top_k=1)]))
    assert rounds.pop(0) == greedy
    assert any(greedy)


def test_a_drafter_that_guesses_likely_tokens_cuts_nothing(rounds):
    """The request's cuts are the target's alone there: a tree has the branches that it has for a greedy request."""
    spec = "eagle:head=it,tree=6,width=3,length=2,greedy=true"
    drain(engine(spec), sequences([SamplingParams(4)]))
    greedy = rounds.pop(0)
    seqs = drain(engine(spec), sequences([SamplingParams(4, 1.5, seed=3, top_k=1)]))
    assert rounds.pop(0) == greedy
    assert outputs(seqs) == outputs(plain([SamplingParams(4)]))
    assert max(map(len, greedy)) > 2, "no branches"


@pytest.mark.parametrize("options", [dict(logprobs=0), dict(presence_penalty=0.5), dict(bad_words=[(3,)])])
def test_what_needs_the_host_goes_with_it(rounds, options):
    params = [SamplingParams(4, 0.8, seed=1, top_p=0.9, **options)]
    seqs = drain(engine("ngram:length=3"), sequences(params))
    assert not rounds
    assert outputs(seqs) == outputs(plain(params))
