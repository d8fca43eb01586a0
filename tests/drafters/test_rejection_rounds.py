"""Rejection in rounds without the host: drafts are drawn and judged as the host draws and judges them.

The kernels are interpreted on a CPU."""

from dataclasses import replace

import pytest
import torch
from looped import draft_weights, drain, engine, sequences, target, watch
from tiny import family, outputs, plainly

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import verify
from outrider.drafters.base import BuildContext
from outrider.drafters.rounds import writer
from outrider.models.base import Feed

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
SAMPLED = SamplingParams(6, 0.7)
MIXED = [SAMPLED, SamplingParams(3), SamplingParams(4, 0.9, seed=3), SamplingParams(6, 1.1, top_k=20, top_p=0.9)]
CHAIN, SLOTS = "eagle:head=it,length=3", "block:head=slots,length=3"


@pytest.fixture
def rounds(monkeypatch):
    """Of each sequence: the text before each round, its draft, and what was written."""
    found = {}

    def seen(seqs, parts):
        for seq, own in zip(seqs, parts, strict=True):
            text = list(seq.tokens)
            for number, tokens in enumerate(own.tokens):
                if seq.finish is None:
                    found.setdefault(seq.id, []).append((text, own.round(number), tokens))
                text = [*text, *tokens]

    watch(monkeypatch, seen)
    return found


def at(seq, text):
    """The sequence as it stood."""
    return Sequence(0, list(text), seq.params, dice=Dice(seq.id))


def judged(seq, draft):
    """What the host makes of a draft: the tokens that it writes."""
    model = family("llama")[1]
    (output,) = model.forward([Feed(77, seq.tokens, draft)])
    model.free(77)
    verdict = verify(seq, draft, output.logits[-1 - len(draft) :])
    return [*(draft.tokens[node] for node in verdict.path), verdict.token]


@pytest.mark.parametrize(
    "spec",
    [
        "ngram:length=3,tree=5",
        "medusa:head=three",
        "eagle:head=it,tree=6,width=3,length=3,greedy=true",
        "ngram:length=3,tree=4+eagle:head=it,tree=5,width=3,length=3,greedy=true",
        "draft_model:model=like,length=3,greedy=true",
    ],
)
def test_guesses_are_judged_as_the_host_judges_them(rounds, spec):
    """Beside sequences of the other rules, which are written as ever."""
    params = [SamplingParams(6, 0.05), SamplingParams(6, 0.7, top_p=0.8, min_p=0.02), SamplingParams(3)]
    params += [] if "medusa" in spec else [SamplingParams(4, 0.9, seed=3)]
    seqs, kept, drafted = sequences(params), 0, 0
    drain(engine(spec), seqs)
    for seq in seqs:
        for text, one, tokens in rounds[seq.id]:
            assert tokens == judged(at(seq, text), Draft(tuple(one.tokens), tuple(one.parents)))
            if seq.id < 2:
                kept, drafted = kept + len(tokens) - 1, drafted + len(one.tokens)
    assert drafted
    assert kept or "draft_model" not in spec, "nothing was kept"
    plain = [plainly(family("llama")[1], seq.tokens[: seq.prompt], seq.params, dice=Dice(seq.id)) for seq in seqs[2:]]
    assert outputs(seqs[2:]) == outputs(plain)


@pytest.mark.parametrize("beside", ["", "ngram:length=2,tree=4+"])
@pytest.mark.parametrize(("spec", "length"), [("draft_model:model=like,length=3", 3), ("layer_skip:layers=2", 3)])
def test_a_model_draws_as_the_host_draws(rounds, monkeypatch, spec, length, beside):
    """The same tokens from the same laws, so that the same of them are kept; a copy does not stand beside a draw."""
    monkeypatch.setattr(writer, "PART", 2)
    seqs, kept = sequences(MIXED), set()
    drain(engine(beside + spec), seqs)
    host = drafters.build(spec, BuildContext(family("llama")[1], draft_weights))
    for seq in (seqs[0], seqs[3]):
        for text, one, tokens in rounds[seq.id]:
            (draft,) = host.propose([at(seq, text)], [length])
            host.forget(0)
            assert draft.probs is not None
            assert (tuple(one.tokens), tuple(one.parents)) == (draft.tokens, draft.parents)
            assert tokens == judged(at(seq, text), draft)
            kept.add(len(tokens) - 1)
    assert len(kept) > 1
    assert not seqs[0].stats.drafted_by_drafter.get("ngram")


@pytest.mark.parametrize(
    "spec",
    [
        CHAIN,
        "eagle:head=it,tree=6,width=3,length=3",
        SLOTS,
        "block:head=seen,tree=6,width=3,length=3",
        "medusa:head=three",
    ],
)
def test_a_head_drafts_and_writes_what_it_does_with_the_host(rounds, spec):
    """Chains are drawn by kernels, also where others of the batch have trees; the last tokens of the host's text may
    differ, for its last draft is cut."""
    params = [SAMPLED, SamplingParams(4)]
    params += [SamplingParams(5, 1.1, top_p=0.7)] if spec in (CHAIN, SLOTS) else []
    seqs = drain(engine(spec), sequences(params))
    longer = [replace(each, max_tokens=each.max_tokens + 4) for each in params]
    wanted = drain(engine(spec, rounds=False), sequences(longer))
    for seq, other in zip(seqs, wanted, strict=True):
        assert rounds[seq.id]
        assert seq.tokens == other.tokens[: len(seq.tokens)]
        assert seq.stats.drafted
    depths = [one.parents == list(range(-1, len(one.parents) - 1)) for _, one, _ in rounds[0]]
    assert all(depths) or "medusa" in spec, "a draw is a chain"


def test_a_draw_goes_alone():
    """With a copy beside it, the head writes what it writes by itself; where it guesses, the two are joined."""
    alone = drain(engine(CHAIN), sequences([SAMPLED]))
    both = drain(engine("ngram:length=3,tree=4+" + CHAIN), sequences([SAMPLED]))
    assert outputs(both) == outputs(alone)
    assert not both[0].stats.drafted_by_drafter.get("ngram")


def test_the_first_of_two_that_draw_goes_alone(rounds):
    """Both have laws, in one memory: those of the other one must not stand there."""
    spec = "layer_skip:layers=2,length=2+draft_model:model=like,length=2"
    (seq,) = drain(engine(spec), sequences([SAMPLED]))
    first, other = "layer_skip", "draft_model"
    host = drafters.build("layer_skip:layers=2", BuildContext(family("llama")[1], draft_weights))
    for text, one, tokens in rounds[0]:
        assert set(one.sources) == {first}
        (draft,) = host.propose([at(seq, text)], [len(one.tokens)])
        host.forget(0)
        assert tuple(one.tokens) == draft.tokens
        assert tokens == judged(at(seq, text), draft)
    assert not seq.stats.drafted_by_drafter.get(other)


@pytest.mark.parametrize("options", [dict(logprobs=1), dict(presence_penalty=0.5)])
def test_what_needs_the_host_goes_with_it(rounds, options):
    seqs = drain(engine(CHAIN), sequences([SamplingParams(4, 0.8, **options)]))
    assert not rounds
    assert len(seqs[0].output) == 4


def test_without_drafts_it_is_written_in_bulk_as_the_host_draws():
    made, passes = engine("none"), []
    made.model.on_pass = lambda: passes.append(1)
    try:
        seqs = drain(made, sequences(MIXED))
    finally:
        made.model.on_pass = None
    plain = [plainly(family("llama")[1], seq.tokens[: seq.prompt], seq.params, dice=Dice(seq.id)) for seq in seqs]
    assert outputs(seqs) == outputs(plain)
    assert len(passes) <= 2 * 3, "the host looked at every token"
    assert target().free_pages == target()._pages.count - 1
