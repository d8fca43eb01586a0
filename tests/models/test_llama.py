"""Our forward gives the logits of transformers, however the tokens are brought to it."""

import functools
import tempfile

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny import CONFIGS, CPU, VOCAB, ours, prompts, reference

from outrider.core.draft import ROOT, Draft
from outrider.core.errors import OutriderError
from outrider.models.base import Feed
from outrider.models.llama import Llama
from outrider.models.load import LoadOptions, load
from outrider.models.native.stack import NativeStack
from outrider.models.stack import FEW
from outrider.models.transformers import TransformersModel

KINDS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "llama, biased": ("llama", dict(attention_bias=True)),
    "llama, no groups": ("llama", dict(num_key_value_heads=4)),
    "llama, wide heads": ("llama", dict(head_dim=24)),
    "llama 3 rope": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
    ),
    "linear rope": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=3.0))),
    "yarn rope": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=16.0
            )
        ),
    ),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", dict(sliding_window=None)),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", {}),
}
LONG = 3 * FEW


@functools.cache
def pair(kind):
    """The model as transformers runs it and as we do."""
    name, changes = KINDS[kind]
    theirs = reference(name, seed=4, **changes)
    model = ours(theirs)
    assert isinstance(model, Llama)
    return theirs, model


def tokens(count, seed=0):
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def plain(kind, text, layers=()):
    """Logits [tokens, vocab] of transformers over the whole text, and residuals after the layers asked for."""
    output = pair(kind)[0](torch.tensor([text]), output_hidden_states=True)
    hidden = torch.stack([output.hidden_states[layer + 1][0] for layer in layers], 1) if layers else None
    return output.logits[0], hidden


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def assert_tree(kind, output, text, draft):
    """Each node's logits are those after a plain run over its root path."""
    assert output.logits.shape == (1 + len(draft), VOCAB)
    for node in range(ROOT, len(draft)):
        path = [draft.tokens[i] for i in draft.path(node)]
        assert_close(output.logits[node + 1], plain(kind, [*text, *path])[0][-1])


TREES = {
    "chain": Draft.chain(tokens(5, seed=9)),
    "long chain": Draft.chain(tokens(FEW + 4, seed=9)),
    "branches": Draft((1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 1, -1, 4, 2)),
    "twins": Draft((5, 5, 6, 6, 6), (-1, -1, 0, 1, 0)),
    "wide": Draft(tuple(tokens(FEW + 6, seed=8)), (*[-1] * 8, *range(8), *range(6))),
}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    for kind in KINDS:
        pair(kind)[1]._cache._slots.clear()


@pytest.mark.parametrize("kind", KINDS)
class TestLogits:
    @pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, LONG])
    def test_of_one_text(self, kind, count):
        text = tokens(count)
        (output,) = pair(kind)[1].forward([Feed(0, text)])
        assert output.logits.dtype == torch.float32
        assert_close(output.logits, plain(kind, text)[0][-1:])

    def test_of_a_ragged_batch(self, kind):
        texts = [*prompts(8), tokens(LONG)]
        outputs = pair(kind)[1].forward([Feed(i, text) for i, text in enumerate(texts)])
        for text, output in zip(texts, outputs, strict=True):
            assert_close(output.logits, plain(kind, text)[0][-1:])

    @pytest.mark.parametrize("sizes", [[1] * 20, [7, 1, 12], [30, 3], [5, 40, 1, 1]])
    def test_of_pieces(self, kind, sizes):
        text, seen, model = tokens(sum(sizes)), 0, pair(kind)[1]
        expected = plain(kind, text)[0]
        for size in sizes:
            (output,) = model.forward([Feed(0, text[seen : seen + size])])
            seen += size
            assert model.length(0) == seen
            assert_close(output.logits, expected[seen - 1 : seen])

    @pytest.mark.parametrize("tree", TREES)
    @pytest.mark.parametrize("before", [0, 3, 29])
    def test_of_a_tree(self, kind, tree, before):
        """With one or many tokens before it, in the same pass or an earlier one."""
        model, text, draft = pair(kind)[1], tokens(before + 1), TREES[tree]
        (output,) = model.forward([Feed(0, text, draft)])
        assert_tree(kind, output, text, draft)
        if before:
            model.forward([Feed(1, text[:-1])])
            (output,) = model.forward([Feed(1, text[-1:], draft)])
            assert_tree(kind, output, text, draft)

    def test_of_trees_beside_each_other(self, kind):
        texts = dict(zip(TREES, prompts(8), strict=False))
        outputs = pair(kind)[1].forward([Feed(i, texts[name], TREES[name]) for i, name in enumerate(TREES)])
        for name, output in zip(TREES, outputs, strict=True):
            assert_tree(kind, output, texts[name], TREES[name])

    def test_hidden_states_of_chosen_layers(self, kind):
        text, draft = tokens(9), Draft.chain(tokens(3, seed=5))
        feeds = [Feed(0, tokens(4, seed=1)), Feed(1, text, draft)]
        for layers in ([0], [1, 0]):  # not the last: transformers norms what comes after it
            outputs = pair(kind)[1].forward(feeds, layers)
            hidden = plain(kind, [*text, *draft.tokens], layers)[1]
            assert_close(outputs[1].hidden, hidden)
            assert_close(outputs[0].hidden, plain(kind, feeds[0].tokens, layers)[1])
            pair(kind)[1]._cache._slots.clear()
        assert outputs[1].hidden.shape == (12, 2, 32)

    def test_of_the_first_layers(self, kind):
        """They are the model with the other layers taken out, and have a cache of their own."""
        theirs, model = pair(kind)
        short = reference(KINDS[kind][0], seed=4, **KINDS[kind][1] | dict(num_hidden_layers=2))
        short.load_state_dict(theirs.state_dict(), strict=False)
        text = tokens(20)
        first = model.first(2)
        (output,) = first.forward([Feed(0, text)])
        with torch.inference_mode():
            assert_close(output.logits, short(torch.tensor([text])).logits[0, -1:])
        assert (first.num_layers, first.length(0), model.length(0)) == (2, 20, 0)


@st.composite
def schedules(draw):
    """Steps of a few sequences: tokens to commit, a tree, and a path of the tree to keep."""
    steps = []
    for _ in range(draw(st.integers(1, 7))):
        count = draw(st.integers(0, 7))
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
        draft = Draft(tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(count)), parents)
        path = draft.path(draw(st.integers(-1, count - 1)))
        steps.append(
            (draw(st.integers(0, 2)), draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)), draft, path)
        )
    return steps


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@settings(max_examples=25, deadline=None)
@given(schedule=schedules())
def test_any_schedule_of_feeds_crops_and_branch_moves_is_a_fresh_run(kind, schedule):
    """What the cache holds after refusals is what it would hold if only the kept tokens had ever come."""
    model, texts = pair(kind)[1], {}
    for id in range(3):
        model.free(id)
    for id, new, draft, path in schedule:
        text = [*texts.get(id, ()), *new]
        model.forward([Feed(id, new, draft)])
        model.crop(id, len(text), path)
        texts[id] = [*text, *(draft.tokens[node] for node in path)]
        assert model.length(id) == len(texts[id])
    outputs = model.forward([Feed(id, [1], TREES["branches"]) for id in texts])
    for text, output in zip(texts.values(), outputs, strict=True):
        for node in (ROOT, 3, 6):
            path = [TREES["branches"].tokens[i] for i in TREES["branches"].path(node)]
            assert_close(output.logits[node + 1], plain(kind, [*text, 1, *path])[0][-1])


def test_all_families_are_here():
    assert {name for name, _ in KINDS.values()} == {"llama", "mistral", "qwen2", "qwen3"} <= CONFIGS.keys()


@functools.cache
def packed(bits, kind):
    """Quantised weights, run by the compiled layers."""
    model = reference(kind, seed=4, vocab_size=48, intermediate_size=64)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load(folder, LoadOptions(CPU.device, None, CPU.memory, bits)).model
    assert isinstance(loaded.weights.stack, NativeStack)
    return loaded


@pytest.mark.native
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("bits", [4, 8])
class TestPacked:
    """A row never depends on what else is in the pass: any schedule gives the logits of a plain run, to the bit."""

    def plain(self, model, text):
        outputs = [model.forward([Feed(99, [token])])[0].logits[0] for token in text]
        model.free(99)
        return outputs

    @pytest.mark.parametrize("tree", TREES)
    def test_trees(self, bits, kind, tree):
        model, text, draft = packed(bits, kind), tokens(11), TREES[tree]
        outputs = model.forward([Feed(0, text, draft), Feed(1, text[:4]), Feed(2, text[:7], TREES["branches"])])
        for id in range(3):
            model.free(id)
        for node in range(ROOT, len(draft)):
            path = [draft.tokens[i] for i in draft.path(node)]
            assert torch.equal(outputs[0].logits[node + 1], self.plain(model, [*text, *path])[-1])
        assert torch.equal(outputs[1].logits[0], self.plain(model, text[:4])[-1])

    @settings(max_examples=10, deadline=None)
    @given(schedule=schedules())
    def test_any_schedule(self, bits, kind, schedule):
        model, texts = packed(bits, kind), {}
        for id, new, draft, path in schedule:
            text = [*texts.get(id, ()), *new]
            model.forward([Feed(id, new, draft)])
            model.crop(id, len(text), path)
            texts[id] = [*text, *(draft.tokens[node] for node in path)]
        outputs = model.forward([Feed(id, [1]) for id in texts])
        for id, output in zip(texts, outputs, strict=True):
            model.free(id)
            assert torch.equal(output.logits[0], self.plain(model, [*texts[id], 1])[-1])


@pytest.mark.parametrize("kind", ["llama", "llama 3 rope", "yarn rope"])
def test_rotary_tables_grow_without_changing_a_bit(kind, monkeypatch):
    name, changes = KINDS[kind]
    theirs, text = reference(name, seed=4, **changes), tokens(40)
    whole = ours(theirs).forward([Feed(0, text)])[0].logits
    monkeypatch.setattr("outrider.models.llama._POSITIONS", 3)
    assert torch.equal(ours(theirs).forward([Feed(0, text)])[0].logits, whole)
    model = ours(theirs)
    for place, token in enumerate(text):
        logits = model.forward([Feed(0, [token])])[0].logits
        assert place < len(model._turned[0]) <= 2 * place + 3
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dense", pytest.param("packed", marks=pytest.mark.native), "transformers"])
def test_no_sequence_grows_past_the_context(kind):
    if kind == "transformers":
        model = TransformersModel(reference("opt"))
    else:
        model = ours(reference("llama", seed=4)) if kind == "dense" else packed(4, "llama")
    text, more = tokens(model.context), Draft((1, 2, 3), (ROOT, ROOT, 0))  # two levels
    model.forward([Feed(7, text[:-3])])
    for feed in (Feed(8, [*text, 1]), Feed(7, text[:4]), Feed(7, text[:2], more)):
        with pytest.raises(OutriderError, match=rf"sequence {feed.id} would have \d+ tokens.*context is 256"):
            model.forward([Feed(9, text[:2]), feed])
        assert (model.length(7), model.length(8), model.length(9)) == (253, 0, 0)
    model.forward([Feed(7, text[:1], more)])
    for id in (7, 8, 9):
        model.free(id)


def test_rotary_factors_count_with_a_scaling_too():
    from outrider.models.rope import rope

    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    scaling = {"rope_type": "linear", "factor": 2.0}
    plain, divided = rope(8, 1e4, 64, scaling), rope(8, 1e4, 64, scaling, factors)
    torch.testing.assert_close(divided.frequencies, plain.frequencies / factors)
