"""Rounds on a GPU without the host: the text of plain decoding whatever ends a sequence, and all memory comes back."""

import functools
import random

import pytest
import torch
from block_forms import block_forms
from cuda_models import cuda_model
from tiny import eagle_head, medusa_head

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sampling import warp
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.branches import Branches
from outrider.drafters.draft_model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPECS = {
    "eagle:head=it": True,
    "eagle:head=it,tree=24": True,
    "ngram": True,
    "medusa:head=three": False,  # where a request samples with a seed, the host looks
    "eagle:head=it,tree=16+ngram": True,
    "auto:head=it": True,
    "block:head=slots": True,
    "block:head=slots,tree=31": True,
    "block:head=seen,tree=16": True,
    "auto:head=slots": True,
    "layer_skip:layers=1": True,
    "draft_model:model=like": True,
    "draft_model:model=same,length=4": True,
    "ngram+draft_model:model=like": True,
    "eagle:head=it,tree=16+layer_skip:layers=1": True,
}
VOCAB, TOKENS = 300, 60


@pytest.fixture(scope="module")
def model():
    return cuda_model(vocab=VOCAB)


@pytest.fixture(scope="module")
def heads(model):
    torch.manual_seed(7)
    three = medusa_head(model).requires_grad_(False)
    three.tree = ((0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0), (1, 0))
    blocks = {name: block_forms(model, form) for name, form in (("slots", "own"), ("seen", "public"))}
    return {"it": eagle_head(model).requires_grad_(False), "three": three, **blocks}


@functools.cache
def draft_model(name, quantize="none"):
    """ "same": the target itself, so that all is kept; "like": nearly it."""
    made = cuda_model(vocab=VOCAB)
    if name == "like":
        noise = torch.Generator("cuda").manual_seed(5)
        weight = made.weights.head.weight
        weight += 0.03 * torch.randn(weight.shape, generator=noise, device="cuda")
    return made


def sequences(count, sampled, **more):
    """Texts that repeat themselves, so that something is kept; every third one under a seed."""
    luck = random.Random(9)
    made = []
    for id in range(count):
        prompt = [luck.randrange(12) for _ in range(2 + luck.randrange(70))] * 2
        params = (
            SamplingParams(TOKENS - id % 7, 0.7, seed=id)
            if sampled and id % 3 == 0
            else SamplingParams(TOKENS - id % 7)
        )
        made.append(Sequence(id, prompt, params, dice=Dice(id), **more))
    return made


def engine(spec, model, heads):
    return Engine(model, built(spec, model, heads), Limits(128, 4096))


def built(spec, model, heads):
    return drafters.build(spec, BuildContext(model, draft_model, heads=heads))


def drain(run, seqs, between=lambda step: None):
    for seq in seqs:
        run.add(seq)
    step = 0
    while run.busy:
        run.step()
        step += 1
        between(step)
    members = [member for made in run.drafters.values() for member in made.members]
    for model in (run.model, *(member._model for member in members if isinstance(member, ModelDrafter))):
        assert model.free_pages == model._pages.count - 1, "pages were lost"


def texts(seqs):
    return [[token.id for token in seq.output] for seq in seqs]


@pytest.fixture(scope="module")
def plain(model):
    kept = {}

    def of(count, sampled):
        if (count, sampled) not in kept:
            seqs = sequences(count, sampled)
            drain(engine("none", model, {}), seqs)
            kept[count, sampled] = texts(seqs)
        return kept[count, sampled]

    return of


@pytest.mark.parametrize("count", [1, 2, 5, 16, 70])
@pytest.mark.parametrize("spec", SPECS)
def test_rounds_write_what_plain_decoding_writes(spec, count, model, heads, plain):
    run = engine(spec, model, heads)
    writer, calls = run.drafters[""].writer, []
    write = writer.write
    writer.write = lambda seqs, *more: (calls.append(len(seqs)), write(seqs, *more))[1]
    for _ in range(2):  # kernel by kernel and captured; prompts fresh and cached
        seqs = sequences(count, SPECS[spec])
        drain(run, seqs)
        assert texts(seqs) == plain(count, SPECS[spec])
    assert count in calls


@pytest.mark.parametrize("spec", SPECS)
def test_ends_inside_drafts_and_stops_are_those_of_plain_decoding(spec, model, heads, plain):
    """The end comes at another place in each sequence: a token, a watcher's word, or the length."""
    wanted = plain(16, SPECS[spec])
    for place in (0, 3, 9, 20, 41):
        seqs = sequences(16, SPECS[spec])
        cut = []
        for seq, tokens in zip(seqs, wanted, strict=True):
            end = tokens[min(place + seq.id % 4, len(tokens) - 1)]
            cut.append(tokens[: tokens.index(end) + 1])
            if seq.id % 2:
                seq.ends = frozenset({end})
            else:
                seq.watch = lambda token, end=end: token == end
        drain(engine(spec, model, heads), seqs)
        assert texts(seqs) == cut
        assert all(seq.finish == "stop" for seq in seqs)


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_a_cancel_at_any_part_leaves_the_others_alone(spec, at, model, heads, plain):
    """Also while the device works, and with new sequences that come in between and end the step."""
    wanted, run, seqs = plain(16, SPECS[spec]), engine(spec, model, heads), sequences(16, SPECS[spec])
    early, late, waits = seqs[:12], seqs[12:], []

    def come(_):
        if late and len(waits) >= at:
            run.cancel(3)
            while late:
                run.add(late.pop())

    def meanwhile():
        waits.append(1)
        if seqs[5].finish is None and len(seqs[5].output) >= at:
            run.cancel(5)

    run.meanwhile, run.interrupted = meanwhile, lambda: bool(late) and len(waits) >= at
    drain(run, early, come)
    drain(run, late)  # where all had ended before as many parts
    for seq, tokens in zip(seqs, wanted, strict=True):
        own = [token.id for token in seq.output]
        assert own == tokens[: len(own)]
        assert (own == tokens) == (seq.finish != "cancelled")
    assert {seq.id for seq in seqs if seq.finish == "cancelled"} <= {3, 5}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "draft_model" in spec or "layer_skip" in spec])
def test_drafts_are_counted_the_same_every_time(spec, model, heads):
    counted = []
    for _ in range(2):
        seqs = sequences(5, SPECS[spec])
        drain(engine(spec, model, heads), seqs)
        counted.append([(seq.stats.drafts, seq.stats.drafted, seq.stats.accepted, seq.stats.steps) for seq in seqs])
    assert counted[0] == counted[1]


@pytest.mark.parametrize("spec", ["layer_skip:layers=2", "draft_model:model=same,length=4"])
def test_of_a_draft_model_that_is_the_target_all_is_kept(spec, model, heads):
    """Over several parts, alone and in company; a cache that did not follow the text would guess others."""
    for count in (1, 5):
        seqs = sequences(count, sampled=True)
        drain(engine(spec, model, heads), seqs)
        for seq in seqs:
            # the prompt's own step writes one token, and the last step may be cut
            assert len(seq.output) >= 4 * (seq.stats.steps - 2)


@pytest.mark.parametrize(("nodes", "length"), [(31, 12), (15, 3), (1, 12), (64, 40)])
def test_lookup_makes_the_tree_that_the_host_makes(nodes, length):
    from lookups import looked_up, lookups  # needs Triton

    made, table, written = lookups("cuda")
    trees = looked_up(table, written, (1, 4), nodes, length)[: len(made)]
    for text, tree in zip(made, trees, strict=True):
        store = Branches(1, 4)
        store.learn(text)
        assert tree == [(token, parent) for token, parent, _ in store.guess(text, nodes, length)]
    assert max(map(len, trees)) == nodes


def test_sequences_of_different_drafters_go_together(model, heads, plain):
    run, seqs = engine("draft_model:model=like", model, heads), sequences(16, True)
    others = ("", "layer_skip:layers=1", "ngram", "eagle:head=it,tree=16")
    for spec in others[1:]:
        run.drafters[spec] = built(spec, model, heads)
    for seq in seqs:
        seq.draft = others[seq.id % 4]
    drain(run, seqs)
    assert texts(seqs) == plain(16, True)


@pytest.mark.parametrize("spec", ["eagle:head=it,length=4", "block:head=slots", "draft_model:model=like"])
def test_a_drafter_that_fails_in_the_midst_costs_nobody_a_text(spec, model, heads, plain):
    """A fault is raised in every place of a round in turn."""
    from outrider.drafters.rounds import kernels, loop

    for name in ("join", "enter_draft", "judge"):
        whole = getattr(kernels, name)
        run, seqs = engine(spec, model, heads), sequences(5, True)
        made = run.drafters[""].writer._loop

        def broken(*values, **more):
            raise RuntimeError("a fault")

        made._made.clear()  # so that the kernels are launched one by one again
        setattr(loop.kernels, name, broken)
        try:
            drain(run, seqs)
        finally:
            setattr(loop.kernels, name, whole)
        assert texts(seqs) == plain(5, True)


def unseeded(count, tokens=TOKENS, **cuts):
    """Every third one greedy, every third one under a seed, and the others by rejection."""
    made = sequences(count, sampled=True)
    for seq in made:
        if seq.id % 3 == 1:
            seq.params = SamplingParams(tokens - seq.id % 7, 0.8, **cuts)
    return [Sequence(seq.id, seq.tokens, seq.params, dice=Dice(seq.id)) for seq in made]


@pytest.mark.parametrize("cuts", [{}, dict(top_p=0.9), dict(top_k=30, typical_p=0.9)])
@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize(
    "spec", ["eagle:head=it,length=2", "eagle:head=it,tree=7,width=4,length=2", "block:head=slots,length=2"]
)
def test_rejection_writes_what_it_writes_with_the_host(spec, count, cuts, model, heads, monkeypatch):
    """The same draws, laws and verdicts; the end of a text may differ, where the host's last draft is cut."""
    from outrider.drafters.rounds import base

    monkeypatch.setattr(base, "ROW_BUDGETS", ((1 << 30, 128),))
    run, seqs = engine(spec, model, heads), unseeded(count, **cuts)
    drain(run, seqs)
    other = Engine(model, built(spec, model, heads), Limits(128, 4096), rounds=False)
    longer = unseeded(count, TOKENS + 8, **cuts)
    drain(other, longer)
    for seq, own in zip(texts(seqs), texts(longer), strict=True):
        assert seq == own[: len(seq)]
    drawn = [seq.stats for seq in seqs if seq.id % 3 == 1]
    assert all(stats.drafted for stats in drawn)
    assert count == 2 or any(stats.accepted for stats in drawn)  # of one text of 59 tokens, cut, it may be none


@pytest.mark.parametrize("spec", [*SPECS, "none"])
def test_rejection_follows_the_law_without_the_host(spec, model, heads):
    """Of many texts after one prompt: how often each token stands at each place, against the target's own law there."""
    run, count, length, calls = Engine(model, built(spec, model, heads), Limits(16, 4096)), 512, 6, []
    if spec != "none":
        writer = run.drafters[""].writer
        write = writer.write
        writer.write = lambda seqs, *more: (calls.append(len(seqs)), write(seqs, *more))[1]
    seqs = [Sequence(id, [3, 1, 4, 1, 5, 3, 1], SamplingParams(length, 0.8), dice=Dice(id)) for id in range(count)]
    drain(run, seqs)
    assert spec == "none" or (sum(calls) >= count and any(seq.stats.drafted for seq in seqs))
    expected, spread = laws_of(model, seqs, SamplingParams(length, 0.8))
    places = [torch.tensor([seq.tokens[seq.prompt + n] for seq in seqs]) for n in range(length)]
    seen = torch.stack([torch.bincount(each, minlength=VOCAB) for each in places])
    far = ((seen - expected) / spread.clamp(min=1).sqrt())[expected > 10]
    assert len(far) > 8
    assert float(far.abs().max()) < 6
    assert float(far.square().mean()) < 1 + 5 * (2 / len(far)) ** 0.5


def laws_of(model, seqs, params):
    """How often each token is expected at each place after these texts, and how far that may vary."""
    length = params.max_tokens
    expected, spread = torch.zeros(2, length, VOCAB)
    for begin in range(0, len(seqs), 64):
        some = seqs[begin : begin + 64]
        outputs = model.forward([Feed(9000 + seq.id, seq.tokens[: seq.prompt]) for seq in some])
        for place in range(length):
            laws = torch.stack([warp(output.logits[-1].cpu(), params) for output in outputs])
            expected[place] += laws.sum(0)
            spread[place] += (laws * (1 - laws)).sum(0)
            if place + 1 < length:
                outputs = model.forward([Feed(9000 + seq.id, [seq.tokens[seq.prompt + place]]) for seq in some])
        for seq in some:
            model.free(9000 + seq.id)
    return expected, spread


WAYS = [
    dict(top_p=0.9),
    dict(top_k=12),
    dict(min_p=0.02),
    dict(typical_p=0.8),
    dict(top_k=40, top_p=0.8, min_p=0.01),
    {},
]


def cut_sequences(count, **more):
    """All kinds of cuts, and some without, under a seed; beside greedy ones."""
    made = []
    for seq in sequences(count, sampled=True):
        heat = 0.0 if seq.id % 5 == 4 else 0.9
        params = SamplingParams(seq.params.max_tokens, heat, seed=seq.id, **WAYS[seq.id % 6], **more)
        made.append(Sequence(seq.id, seq.tokens, params, dice=Dice(seq.id)))
    return made


@pytest.fixture(scope="module")
def with_the_host(model):
    """Plain decoding that asks for log-probabilities, so that the host looks at every token."""
    seqs = cut_sequences(18, logprobs=0)
    drain(engine("none", model, {}), seqs)
    return texts(seqs)


@pytest.mark.parametrize("count", [1, 5, 18])
@pytest.mark.parametrize("spec", ["none", *(spec for spec in SPECS if SPECS[spec])])
def test_texts_under_a_seed_are_those_of_the_host(spec, count, model, heads, with_the_host):
    run, calls = engine(spec, model, heads), []
    if spec != "none":
        writer = run.drafters[""].writer
        write = writer.write
        writer.write = lambda seqs, *more: (calls.append(len(seqs)), write(seqs, *more))[1]
    for _ in range(2):  # kernel by kernel and captured
        seqs = cut_sequences(count)
        drain(run, seqs)
        assert texts(seqs) == with_the_host[:count]
    assert spec == "none" or count in calls


@pytest.mark.parametrize("options", [dict(top_k=40, top_p=0.9), dict(min_p=0.05), dict(typical_p=0.9)])
@pytest.mark.parametrize(
    "spec", ["none", "ngram", "eagle:head=it", "block:head=slots,tree=31", "draft_model:model=like"]
)
def test_rejection_follows_the_cut_law(spec, options, model, heads):
    """Of many texts after one prompt: how often each token stands at each place, against the target's own law there."""
    params, count = SamplingParams(6, 0.8, **options), 512
    seqs = [Sequence(id, [3, 1, 4, 1, 5, 3, 1], params, dice=Dice(id)) for id in range(count)]
    drain(engine(spec, model, heads), seqs)
    expected, spread = laws_of(model, seqs, params)
    places = [torch.tensor([seq.tokens[seq.prompt + n] for seq in seqs]) for n in range(params.max_tokens)]
    seen = torch.stack([torch.bincount(each, minlength=VOCAB) for each in places])
    assert bool((seen[expected == 0] == 0).all()), "a token that was cut"
    far = ((seen - expected) / spread.clamp(min=1).sqrt())[expected > 10]
    assert len(far) > 8
    assert float(far.abs().max()) < 6
    assert float(far.square().mean()) < 1 + 5 * (2 / len(far)) ** 0.5
