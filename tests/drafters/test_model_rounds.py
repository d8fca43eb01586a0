"""Draft models and early exits in rounds on a GPU: drafts are those that the host makes, and their cache follows the
text. The kernels are interpreted on a CPU."""

import pytest
import torch
from looped import (
    SHORT_CONTEXT,
    adapters,
    draft_model,
    draft_weights,
    drain,
    engine,
    heads,
    plain,
    sequences,
    target,
    watch,
)
from tiny import family, outputs, plainly

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.rounds import base, writer
from outrider.engine.policy import DraftingPolicy

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
LIKE = "draft_model:model=like,length=2"
RIGHT = "layer_skip:layers=3,length=3"  # all layers of the target: all is kept


@pytest.fixture
def parts(monkeypatch):
    """Of each part of the device's loop, by sequence: the text before it, and its rounds."""
    found = []

    def seen(seqs, rounds):
        going = [pair for pair in zip(seqs, rounds, strict=True) if pair[0].finish is None]
        found.append({seq.id: (list(seq.tokens), own) for seq, own in going})

    watch(monkeypatch, seen)
    return found


def rounds_of(parts, id):
    """The rounds of one sequence, each with the text before it: the draft, and what was written."""
    for text, rounds in (part[id] for part in parts if id in part):
        for number, tokens in enumerate(rounds.tokens):
            yield text, rounds.round(number), tokens
            text = [*text, *tokens]


def stands_in(draft, tokens):
    """Whether a chain is a path of the draft."""
    at = -1
    for token in tokens:
        pairs = zip(draft.tokens, draft.parents, strict=True)
        at = next((node for node, pair in enumerate(pairs) if pair == (token, at)), len(draft.tokens))
    return at < len(draft.tokens)


def chain(spec, text, seq, length):
    """What the host drafts for such a text, with a cache that has read nothing else."""
    drafter = drafters.build(spec, BuildContext(family("llama")[1], draft_weights))
    (draft,) = drafter.propose([Sequence(0, text, seq.params, dice=Dice(seq.id))], [length])
    drafter.forget(0)
    return list(draft.tokens)


@pytest.mark.parametrize(
    ("spec", "beside", "length"),
    [
        ("layer_skip:layers=1", "", 3),
        ("draft_model:model=like,length=3", "", 3),
        ("draft_model:model=same,length=2", "", 2),
        (LIKE, RIGHT, 2),
    ],
)
def test_chains_are_those_that_the_host_drafts(parts, monkeypatch, spec, beside, length):
    """Whatever was kept before, also of another drafter's guesses; greedy, and under a seed; over several parts, and
    prompts that are read in several passes."""
    monkeypatch.setattr(writer, "PART", 2)
    monkeypatch.setattr("outrider.drafters.draft_model.CHUNK", 6)
    monkeypatch.setattr("outrider.drafters.draft_model.READ_AT_ONCE", 3)
    monkeypatch.setattr(base, "ROW_BUDGETS", ((1 << 30, 128),))  # the second drafter has its whole length, too
    params = [SamplingParams(7), SamplingParams(7, 0.8, seed=3), SamplingParams(6)]
    seqs = sequences(params)
    seqs[0].tokens[:] = seqs[0].tokens[:1]  # a text of one token: nothing stands before the last
    seqs[0].prompt = 1
    drain(engine("+".join(filter(None, [beside, spec]))), seqs)
    kept = set()
    for seq in seqs:
        for text, draft, tokens in rounds_of(parts, seq.id):
            wanted = chain(spec, text, seq, length)
            assert stands_in(draft, wanted)
            assert beside or draft.tokens == wanted
            kept.add(len(tokens) - 1)
    assert len(parts) > 1
    if beside or "same" in spec:
        assert kept == {3 if beside else 2}, "all of every draft is kept"
    else:
        assert len(kept) > 1


def test_a_model_whose_chain_fills_the_draft_reads_what_was_kept_of_lookup(parts, monkeypatch):
    """As many nodes as it would have alone: the last ones give way to a copy, which may be kept where it was wrong."""
    monkeypatch.setattr(base, "ROW_BUDGETS", ((1 << 30, 26),))  # 12 nodes of each text, three of them copied
    spec, params = "draft_model:model=like,length=12", [SamplingParams(16)] * 2
    seqs = sequences(params)
    for seq, other in zip(seqs, plain(params), strict=True):  # what it will write stands in the text already
        seq.tokens[:0] = [*other.tokens, seq.tokens[0]]
        seq.prompt = len(seq.tokens)
    drain(engine(f"{spec}+ngram"), seqs)
    copied = 0
    for seq in seqs:
        for text, draft, _ in rounds_of(parts, seq.id):
            own = draft.sources.count("draft_model")
            assert draft.tokens[:own] == chain(spec, text, seq, 12)[:own]
            copied += any(draft.sources[node] == "ngram" for node in draft.path)
    assert copied


def test_a_batch_of_one_kind_is_counted_the_same_every_time():
    params = [SamplingParams(6, 0.8, seed=1), SamplingParams(4)]
    counted = []
    for _ in range(2):
        seqs = drain(engine(LIKE), sequences(params))
        counted.append([(seq.stats.drafts, seq.stats.drafted, seq.stats.accepted, seq.stats.steps) for seq in seqs])
    assert counted[0] == counted[1]
    assert all(drafted for _, drafted, _, _ in counted[0])


def test_memory_comes_back_whatever_ends_a_text(parts, monkeypatch):
    """A token that ends it inside a draft, a cancel while rounds are under way, and the length."""
    monkeypatch.setattr(writer, "PART", 2)
    params = [SamplingParams(12)] * 3
    one, two, three = plain(params)
    seqs = sequences(params)
    seqs[0].ends = frozenset({one.tokens[one.prompt + 4]})
    made = engine("draft_model:model=same,length=3")
    made.meanwhile = lambda: made.cancel(1) if len(seqs[1].output) > 3 else None
    drain(made, seqs)
    cut = one.tokens.index(one.tokens[one.prompt + 4], one.prompt) + 1
    assert [seq.finish for seq in seqs] == ["stop", "cancelled", "length"]
    assert seqs[0].tokens == one.tokens[:cut]
    assert seqs[1].tokens == two.tokens[: len(seqs[1].tokens)]
    assert seqs[2].tokens == three.tokens
    assert seqs[2].stats.accepted > 6
    assert len(parts) > 1
    for model in (target(), draft_model("same")):
        assert model.free_pages == model._pages.count - 1


@pytest.mark.parametrize("beside", ["", RIGHT])
def test_between_rounds_the_host_drafts_from_the_same_cache(parts, monkeypatch, beside):
    """Wherever the rounds stop, also after another drafter's guesses were kept, the cache claims no more than it has
    read: what the host drafts there is what it drafts from the beginning."""
    monkeypatch.setattr(writer, "PART", 1)
    (seq,) = sequences([SamplingParams(18)])
    made = engine("+".join(filter(None, [beside, LIKE])))
    drafter, compared = made.drafters[""].members[-1], 0
    made.interrupted = lambda: True
    made.add(seq)
    while seq.finish is None:
        made.step()
        length = drafter._model.length(seq.id)
        if seq.finish is None and length:
            (draft,) = drafter.propose([seq], [2])
            assert list(draft.tokens) == chain(LIKE, list(seq.tokens), seq, 2)
            drafter._model.crop(seq.id, length)
            compared += 1
    assert compared > 1


def test_a_text_goes_on_outside_of_rounds(parts):
    """Half of it in rounds, then another request asks for log-probabilities, which the host must see."""
    params = [SamplingParams(6), SamplingParams(2, logprobs=1)]
    first, other = sequences(params)
    made = engine(LIKE)
    made.interrupted = lambda: True
    made.add(first)
    while not parts:
        made.step()
    made.add(other)
    while made.busy:
        made.step()
    assert outputs([first, other]) == outputs(plain(params))


def test_an_early_exit_runs_the_adapter_of_each_sequence(parts):
    """Two adapters and none in one batch; all layers are run, so that all is kept if the adapter is the right one."""
    params = [SamplingParams(8), SamplingParams(6), SamplingParams(7)]
    wanted = []
    for seq, own in zip(sequences(params), adapters()[1], strict=True):
        wanted.append(plainly(family("llama")[1], seq.tokens, seq.params, adapter=own, dice=Dice(seq.id)))
    seqs = sequences(params)
    for seq, own in zip(seqs, adapters()[0], strict=True):
        seq.adapter = own
    drain(engine(f"layer_skip:layers={target().num_layers},length=2"), seqs)
    assert outputs(seqs) == outputs(wanted)
    for seq in seqs:
        assert all(len(tokens) == 3 for _, _, tokens in rounds_of(parts, seq.id))


def test_past_its_own_context_a_draft_model_guesses_nothing(parts, monkeypatch):
    """Before, the rounds end where the next ones may pass it, and the host drafts what still fits."""
    monkeypatch.setattr(writer, "PART", 2)
    (seq,) = sequences([SamplingParams(16)])
    seq.tokens[:] = (seq.tokens * SHORT_CONTEXT)[: SHORT_CONTEXT - 12]
    seq.prompt = len(seq.tokens)
    wanted = plainly(family("llama")[1], list(seq.tokens), seq.params)
    drain(engine("draft_model:model=short,length=2"), [seq])
    assert outputs([seq]) == outputs([wanted])
    assert parts
    assert seq.stats.drafts > sum(len(own.tokens) for part in parts for _, own in part.values())


def test_without_memory_for_the_draft_the_text_is_the_same(parts, monkeypatch):
    (seq,) = sequences([SamplingParams(6)])
    monkeypatch.setattr(draft_model("like"), "reserve", lambda ids, count: None)
    drain(engine(LIKE), [seq])
    assert not parts
    assert outputs([seq]) == outputs(plain([SamplingParams(6)]))
    assert seq.stats.drafted, "the host drafts"


@pytest.mark.parametrize("repays", [True, False])
def test_a_prompt_that_does_not_repay_is_not_read(parts, monkeypatch, repays):
    asked, policy = [], DraftingPolicy()

    def answer(readers, seqs, work):
        asked.append([reader.name for reader in readers])
        return repays

    monkeypatch.setattr(policy, "reading_repays", answer)
    monkeypatch.setattr(policy.trial, "drafts", lambda *batch: True)
    (seq,) = sequences([SamplingParams(6)])
    made = engine("ngram:length=3,tree=4+" + LIKE, policy)
    drain(made, [seq])
    assert outputs([seq]) == outputs(plain([SamplingParams(6)]))
    assert bool(parts) == bool(seq.stats.drafted) == repays
    assert asked[0] == ["ngram", "draft_model"]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("draft_model:model=longer", []),  # of another vocabulary
        ("ngram+draft_model:model=like", ["draft_model", "ngram"]),
        ("auto:model=like", ["draft_model", "ngram"]),
        ("auto:model=like,head=it", ["eagle", "ngram"]),
        ("eagle:head=it+layer_skip", ["eagle", "layer_skip"]),
        ("eagle:head=it+ngram+draft_model:model=like", []),  # two at most, and all three were asked for
        ("history+draft_model:model=like", []),
    ],
)
def test_who_drafts_in_rounds(spec, names):
    made = drafters.build(spec, BuildContext(target(), draft_model, heads=heads()))
    assert [guesser.name for guesser in made.guessers] == names
