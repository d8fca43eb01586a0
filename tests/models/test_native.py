"""Packed weights in the kernels: the right numbers, and for every row the same bits whatever shares its pass."""

import ctypes
import functools
import os
import platform
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import packs
import pytest
import tiny
import torch
from compilers import program
from hypothesis import given, settings, strategies as st
from packs import VOCAB, blocks

from outrider.core.draft import EMPTY, ROOT, Draft
from outrider.core.errors import OutriderError
from outrider.drafters.eagle import native_head as heads
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.models.adapters.adapter import Adapter, LowRank
from outrider.models.base import Feed
from outrider.models.load import LoadOptions, load
from outrider.models.native import compiler, levels, library as library_file, packed as packing, stack as stacking
from outrider.models.native.compiler import FLAGS, SOURCE, NoCompiler, build
from outrider.models.native.library import MACHINES, library
from outrider.models.native.packed import Packed, packable, use_torch_threads
from outrider.models.native.peak import multiply_adds_per_second
from outrider.models.native.stack import NativeStack
from outrider.models.quant import KINDS, Quantised, from_gguf, quantise
from outrider.models.stack import TorchStack

pytestmark = pytest.mark.native

MADE = ("4 bits", "8 bits")  # rounded here, not taken from a file
ROWS = (*range(1, 10), 33)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def matrix(kind, outputs=48, inputs=256, seed=0):
    if kind in MADE:
        return quantise(random(outputs, inputs, seed=seed), int(kind[0]))
    return from_gguf(blocks(kind, outputs, inputs, seed))


def exactly(matrices, x, bias=None):
    """x W^T + b in float64."""
    y = x.double() @ torch.cat([m.dense() for m in matrices]).double().T
    return y if bias is None else y + bias.double()


def assert_near(y, expected, x, matrices):
    """Activations of 16 bits: an input errs by at most a 65,024th of the largest of its block; errors rarely add."""
    length = torch.cat([m.dense() for m in matrices]).double().norm(dim=1)
    scale = x.double().norm(dim=1, keepdim=True) * length
    assert ((y - expected).abs() <= 3e-5 * scale + 1e-30).all()
    assert float((y - expected).norm() / expected.norm()) < 1e-4


class TestProducts:
    @pytest.mark.parametrize("kind", [*KINDS, *MADE])
    @pytest.mark.parametrize("rows", ROWS)
    def test_of_every_kind(self, kind, rows):
        w, x = matrix(kind), random(rows, 256)
        y = Packed([w])(x)
        assert y.dtype == torch.float32
        assert_near(y, exactly([w], x), x, [w])

    @pytest.mark.parametrize("inputs", [32, 64, 96, 160, 512, 576, 1536])
    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1"])
    def test_of_any_width(self, kind, inputs):
        w, x = matrix(kind, 32, inputs), random(5, inputs)
        assert_near(Packed([w])(x), exactly([w], x), x, [w])

    @pytest.mark.parametrize(
        "kinds", [["Q4_K"] * 3, ["Q4_K", "Q4_K", "Q6_K"], ["Q4_0", "Q8_0"], ["Q6_K", "Q5_K"]], ids=str
    )
    @pytest.mark.parametrize("biased", [False, True])
    def test_of_joint_matrices(self, kinds, biased):
        """Their outputs lie side by side, whether they are of one kind or not."""
        matrices = [matrix(kind, 16 * (i + 1), 512, seed=i) for i, kind in enumerate(kinds)]
        biases = [random(m.q.shape[0], seed=7) * 9 if biased else None for m in matrices]
        joint, x = Packed(matrices, biases), random(6, 512)
        y = joint(x)
        assert y.shape == (6, joint.outputs) == (6, sum(m.q.shape[0] for m in matrices))
        assert_near(y, exactly(matrices, x, torch.cat(biases) if biased else None), x, matrices)
        alone = [Packed([m], [bias])(x) for m, bias in zip(matrices, biases, strict=True)]
        assert torch.equal(y, torch.cat(alone, 1))

    def test_a_bias_may_be_missing_for_one_of_them(self):
        matrices, x = [matrix("Q8_0", seed=1), matrix("Q8_0", seed=2)], random(2, 256)
        bias = random(48)
        assert_near(Packed(matrices, [None, bias])(x), exactly(matrices, x, torch.cat([bias * 0, bias])), x, matrices)

    @pytest.mark.parametrize("count", [1, 2])
    def test_of_no_rows(self, threads, count):
        threads(count)
        assert Packed([matrix("Q4_1")])(random(0, 256)).shape == (0, 48)

    def test_of_rows_that_are_strided_or_of_another_dtype(self):
        product, x = Packed([matrix("Q4_1")]), random(256, 6)
        assert torch.equal(product(x.T), product(x.T.contiguous()))
        assert torch.equal(product(x.T.double()), product(x.T.contiguous()))

    @pytest.mark.parametrize("shape", [(2, 255), (2, 512), (256,), (1, 2, 256)])
    def test_of_another_shape_are_refused(self, shape):
        with pytest.raises(ValueError, match=r"x must be \[rows, 256\]"):
            Packed([matrix("Q4_1")])(random(*shape))

    def test_what_the_kernels_lack_is_refused(self):
        q, scales = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1)
        with pytest.raises(AssertionError, match="no such matrix"):
            Packed([Quantised(q, scales, None, 8)])

    def test_what_can_be_packed(self):
        assert packable(16, 32)
        assert not packable(8, 32)
        assert not packable(16, 48)

    @pytest.mark.parametrize("kind", [*KINDS, *MADE])
    def test_packing_adds_no_bytes(self, kind):
        w = matrix(kind)
        groups = (w.scales, w.minimums, w.super_scales, w.super_minimums)
        scales = sum(values.nbytes for values in groups if values is not None)
        assert Packed([w, w]).nbytes == 2 * (w.q.numel() * w.bits // 8 + scales)  # an even number of tiles

    def test_six_bits_take_the_bytes_of_the_file(self):
        file = blocks("Q6_K", 32, 512)
        assert Packed([from_gguf(file)]).nbytes == file.raw.nbytes

    @pytest.mark.parametrize("activations", [16, 8])
    @pytest.mark.parametrize("rows", [1, 2, 4, 6, 8, 64])
    def test_six_bits_lie_in_their_places(self, rows, activations):
        """Each bit alone, and each input alone."""
        w, x = matrix("Q6_K", 32), torch.eye(256)
        for bit in range(6):
            one = replace(w, q=w.q & 1 << bit)
            y = torch.cat([Packed([one], activations=activations)(some) for some in x.split(rows)])
            torch.testing.assert_close(y, one.dense().T, rtol=1e-4, atol=1e-5)


class TestRowsOfAMatrix:
    @pytest.mark.parametrize("kind", [*KINDS, *MADE])
    def test_are_exact(self, kind):
        w, ids = matrix(kind), torch.tensor([0, 47, 15, 16, 16, 3])
        assert torch.equal(Packed([w]).rows(ids), w.dense()[ids])

    def test_may_be_none_strided_or_small_integers(self):
        embedding = Packed([matrix("Q4_1")])
        assert embedding.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 256)
        ids = torch.arange(40).view(20, 2).T[1]
        assert torch.equal(embedding.rows(ids), embedding.rows(torch.tensor(ids.tolist())))
        assert torch.equal(embedding.rows(ids.int()), embedding.rows(ids))

    @pytest.mark.parametrize("id", [-1, 48, 2**40])
    def test_that_are_not_there(self, id):
        with pytest.raises(IndexError, match=f"row {id} of a matrix of 48"):
            Packed([matrix("Q4_1")]).rows(torch.tensor([3, id]))


class TestOddActivations:
    """Whatever comes in, nothing crashes, and what is not a number shows."""

    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0", "Q6_K", "8 bits"])
    def test_zeros(self, kind):
        assert not Packed([matrix(kind)])(torch.zeros(3, 256)).any()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("place", [0, 7, 16, 31, 200])
    def test_infinities_and_nans_spoil_their_own_row_only(self, bad, place):
        product, x = Packed([matrix("Q4_K")]), random(5, 256)
        clean = product(x)
        x[2, place] = bad
        y = product(x)
        assert not y[2].isfinite().any()
        assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])

    @pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-38, 1e-33, 1e-28, 1e28])
    def test_the_smallest_and_the_largest(self, scale):
        w = matrix("Q8_0")
        x = random(3, 256) * scale
        y = Packed([w])(x)
        assert y.isfinite().all()
        torch.testing.assert_close(y.double(), exactly([w], x), rtol=1e-2, atol=max(1e-29, 1e-4 * scale))

    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1"])
    @pytest.mark.parametrize("signs", [1, -1])
    @pytest.mark.parametrize("rows", [4, 8])
    def test_the_largest_sums_fit(self, kind, signs, rows):
        """Every product at its largest: 255 * 32512 * 32 is an eighth of what 32 bits hold."""
        outputs, inputs = 16, 1536
        w = matrix(kind, outputs, inputs)
        full = Quantised(torch.full_like(w.q, 2**w.bits - 1), w.scales, w.minimums, w.bits, w.zero, w.group)
        x = torch.full((rows, inputs), 3.7 * signs)
        assert_near(Packed([full])(x), exactly([full], x), x, [full])

    def test_an_outlier_costs_its_own_block_only(self):
        w, x = matrix("Q8_0"), random(2, 256) * 1e-3
        x[:, 40] = 1e3
        kept = torch.cat([x[:, :32], x[:, 64:]], 1)
        rest = Quantised(torch.cat([w.q[:, :32], w.q[:, 64:]], 1), w.scales[:, [0, *range(2, 8)]], None, 8, 128)
        assert_near(Packed([rest])(kept), exactly([rest], kept), kept, [rest])
        assert_near(Packed([w])(x), exactly([w], x), x, [w])


@pytest.fixture
def threads():
    """Set the number of threads; back to one at the end."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


class TestActivationsOfEightBits:
    @pytest.mark.parametrize("kind", [*KINDS, *MADE])
    @pytest.mark.parametrize("rows", ROWS)
    def test_are_rounded_to_a_120th_of_the_largest_of_their_block(self, kind, rows):
        """The product of exactly these numbers, of which a row alone has the same bits."""
        w, x = matrix(kind), random(rows, 256)
        blocks = x.view(rows, -1, 32)
        scale = blocks.abs().amax(2, keepdim=True) / 120
        rounded = ((blocks / scale).round() * scale).view(rows, 256)
        product = Packed([w], activations=8)
        assert_near(product(x), exactly([w], rounded), x, [w])
        assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))

    def test_of_nothing_and_of_no_number(self):
        x = torch.zeros(3, 256)
        x[1, 7] = float("nan")
        y = Packed([matrix("Q4_1")], activations=8)(x)
        assert not y[[0, 2]].any()
        assert y[1].isnan().all()


class TestARowAlone:
    @pytest.mark.parametrize("kinds", [[kind] for kind in (*KINDS, *MADE)] + [["Q4_K", "Q4_K", "Q6_K"]], ids=str)
    def test_gives_the_bits_that_it_gives_among_others(self, kinds):
        product, x = (
            Packed([matrix(kind, seed=i) for i, kind in enumerate(kinds)], [None] * len(kinds)),
            random(33, 256),
        )
        alone = torch.cat([product(row) for row in x.split(1)])
        for size in ROWS:
            assert torch.equal(torch.cat([product(rows) for rows in x.split(size)]), alone)
        order = torch.randperm(33)
        assert torch.equal(product(x[order]), alone[order])

    def test_gives_the_same_bits_with_more_threads(self, threads):
        product, x = Packed([matrix("Q4_1", 128), matrix("Q6_K", 48)], [None, None]), random(9, 256)
        alone = product(x)
        threads(2)
        assert torch.equal(product(x), alone)
        assert torch.equal(product(x[4:5]), alone[4:5])


def test_a_new_thread_takes_the_number_of_threads_from_torch(threads):
    """OpenMP counts per thread, and would start with every core."""
    counts = []

    def work():
        use_torch_threads()
        counts.append(ctypes.CDLL(None).omp_get_max_threads())

    for count in (1, 3):
        threads(count)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert counts == [1, 3]


def test_the_arithmetic_peak_is_measured_where_the_kernels_choose_the_instructions():
    peak = multiply_adds_per_second(1)
    wide = platform.machine() == "x86_64" and "avx2" in Path("/proc/cpuinfo").read_text()
    assert (peak is not None and peak > 0) == wide


# ---- whole models ----

MODELS = {
    "llama, 4 bits": ("llama", 4, {}),
    "llama, 8 bits": ("llama", 8, {}),
    "llama, tied": ("llama", 4, dict(tie_word_embeddings=True)),
    "llama, no groups": ("llama", 4, dict(num_key_value_heads=4)),
    **{f"llama, heads of {size}": ("llama", 8, dict(head_dim=size)) for size in (8, 16, 24, 32, 64, 80, 128)},
    "mistral, 4 bits": ("mistral", 4, {}),
    "mistral, heads of 64": ("mistral", 8, dict(head_dim=64)),
    "qwen2": ("qwen2", 4, {}),
    "qwen3": ("qwen3", 8, dict(head_dim=32)),
    **{
        f"llama, kv int8, heads of {size}": ("llama", 8, dict(head_dim=size, kv_bits=8))
        for size in (8, 24, 64, 80, 128)
    },
    "llama, kv int8, no groups": ("llama", 8, dict(num_key_value_heads=4, head_dim=64, kv_bits=8)),
    "mistral, kv int8": ("mistral", 8, dict(head_dim=64, kv_bits=8)),
    "qwen3, kv int8": ("qwen3", 8, dict(head_dim=32, kv_bits=8)),
    "llama, activations int8": ("llama", 8, dict(activations=8)),
    "qwen2, activations int8, kv int8": ("qwen2", 4, dict(activations=8, kv_bits=8)),
}
TREES = {
    "chain": Draft.chain((5, 1, 7, 7, 2)),
    "branches": Draft((1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 1, -1, 4, 2)),
    "twins": Draft((5, 5, 6, 6, 6), (-1, -1, 0, 1, 0)),
    "wide": Draft(tuple(range(20)), (*[-1] * 8, *range(8), *range(4))),
}


ROUNDED = {"kv_bits", "activations"}  # what the kernels round to 8 bits, and torch does not


def in_kernels(name):
    kind, bits, changes = MODELS[name]
    sizes = {key: changes[key] for key in changes.keys() - ROUNDED}
    return packs.packed(
        packs.reference(kind, seed=4, **sizes), bits, **{key: changes[key] for key in changes.keys() & ROUNDED}
    )


@functools.cache
def pair(name):
    """The model in the kernels, and the same weights in torch's float32."""
    kind, bits, changes = MODELS[name]
    sizes = {key: changes[key] for key in changes.keys() - ROUNDED}
    dense = packs.rounded(packs.reference(kind, seed=4, **sizes), bits)
    assert isinstance(dense.weights.stack, TorchStack)
    return in_kernels(name), dense


def tokens(count, seed=0):
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(ours, theirs, name="llama, 4 bits"):
    """Relative to the largest: a single logit may be near zero."""
    assert ours.shape == theirs.shape
    changes = MODELS[name][2]
    within = 0.3 if "activations" in changes else 0.1 if "kv_bits" in changes else 2e-3
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < within


def run(model, feeds, layers=()):
    """The outputs of one pass, and nothing left in the cache."""
    outputs = model.forward(feeds, layers)
    for feed in feeds:
        model.free(feed.id)
    return outputs


def one_by_one(model, text):
    """Logits [tokens, vocab] of plain decoding."""
    model.free("plain")
    rows = [model.forward([Feed("plain", [token])])[0].logits for token in text]
    model.free("plain")
    return torch.cat(rows)


def test_buffers_of_a_long_sequence_are_given_back():
    """After many passes of short ones, and not where long and short ones take turns."""
    model, text = in_kernels("llama, 4 bits"), tokens(40)
    stack, plain = model.weights.stack, one_by_one(model, text)
    stack.workspace(300, 20_000)
    large = stack.workspace(1, 0)
    assert (large.rows, large.struct.longest) == (300, 40_016)
    for _ in range(3):
        for _ in range(stacking.SHORT_PASSES - 1):
            assert stack.workspace(1, 40) is large
        assert stack.workspace(1, 20_000) is large
    for _ in range(stacking.SHORT_PASSES - len(text)):
        stack.workspace(2, 1)
    assert torch.equal(one_by_one(model, text), plain)
    small = stack.workspace(1, 0)
    assert (small.rows, small.struct.longest) == (32, stacking.SHORTEST)


def test_the_multiply_adds_of_a_row_are_the_weights_of_the_layers():
    model = in_kernels("qwen2")
    parts = ((layer.qkv, layer.output, layer.gate_up, layer.down) for layer in model.weights.stack.layers)
    assert model.weights.stack.multiply_adds == sum(each.weight.numel() for layer in parts for each in layer)


@pytest.mark.parametrize("name", MODELS)
class TestModels:
    @pytest.mark.parametrize("count", [1, 2, 5, 17, 60])
    def test_a_text(self, name, count):
        model, dense = pair(name)
        feeds = [Feed(0, tokens(count))]
        assert_close(run(model, feeds)[0].logits, run(dense, feeds)[0].logits, name)

    def test_pieces(self, name):
        model, dense = pair(name)
        text, seen = tokens(70), 0
        for size in (7, 1, 40, 22):
            feeds = [Feed(0, text[seen : seen + size])]
            assert_close(model.forward(feeds)[0].logits, dense.forward(feeds)[0].logits, name)
            seen += size
            assert model.length(0) == dense.length(0) == seen
        model.free(0)
        dense.free(0)

    @pytest.mark.parametrize("tree", TREES)
    def test_trees(self, name, tree):
        model, dense = pair(name)
        for before in (1, 30):
            feeds = [Feed(0, tokens(before), TREES[tree])]
            assert_close(run(model, feeds)[0].logits, run(dense, feeds)[0].logits, name)

    def test_a_ragged_batch(self, name):
        model, dense = pair(name)
        drafts = [EMPTY, *TREES.values()]
        feeds = [Feed(i, tokens(1 + 9 * (i % 4), seed=i), drafts[i % len(drafts)]) for i in range(8)]
        for ours, theirs in zip(run(model, feeds), run(dense, feeds), strict=True):
            assert_close(ours.logits, theirs.logits, name)

    def test_hidden_states_of_chosen_layers(self, name):
        model, dense = pair(name)
        feeds = [Feed(0, tokens(4)), Feed(1, tokens(9), TREES["branches"])]
        for layers in ([0], [2, 0], [0, 1, 2]):
            for ours, theirs in zip(run(model, feeds, layers), run(dense, feeds, layers), strict=True):
                assert_close(ours.hidden, theirs.hidden, name)
        assert run(model, feeds)[1].hidden is None

    def test_the_first_layers(self, name):
        model, dense = pair(name)
        first, feeds = model.first(2), [Feed(0, tokens(20), TREES["twins"])]
        assert isinstance(first.weights.stack, NativeStack)
        assert_close(first.forward(feeds)[0].logits, dense.first(2).forward(feeds)[0].logits, name)
        assert (first.num_layers, first.length(0), model.length(0)) == (2, 25, 0)

    def test_bits_do_not_depend_on_the_schedule(self, name):
        """One token at a time, all at once, in pieces, beside others, and in every branch of a tree."""
        model, text = pair(name)[0], tokens(40)
        plain = one_by_one(model, text)
        assert torch.equal(run(model, [Feed(0, text)])[0].logits, plain[-1:])
        assert torch.equal(run(model, [Feed(0, text[:1], Draft.chain(text[1:]))])[0].logits, plain)
        model.forward([Feed(0, text[:11]), Feed(1, tokens(30, seed=3))])
        outputs = model.forward([Feed(1, tokens(5), TREES["wide"]), Feed(0, text[11:])])
        assert torch.equal(outputs[1].logits, plain[-1:])
        model.free(0)
        model.free(1)
        for draft in TREES.values():
            (output,) = run(model, [Feed(2, text, draft)])
            for node in range(ROOT, len(draft)):
                path = [draft.tokens[i] for i in draft.path(node)]
                assert torch.equal(output.logits[node + 1], one_by_one(model, [*text, *path])[-1])

    def test_bits_do_not_depend_on_a_prefix_from_the_cache(self, name):
        """Computed in any chunks, by a sequence that runs or has ended."""
        model, text = pair(name)[0], tokens(100, seed=11)
        plain, seen = one_by_one(model, text), 0
        for size in (7, 1, 40, 52):
            model.forward([Feed("first", text[seen : seen + size])])
            seen += size
            model.seen("first", text[:seen])
        assert model.begin("second", text) == 96
        (output,) = model.forward([Feed("second", text[96:98], Draft.chain(text[98:]))])
        assert torch.equal(output.logits, plain[97:])
        for id in ("first", "second"):
            model.free(id)
        other = [*text[:70], 3]
        assert model.begin("third", other) == 64
        (output,) = run(model, [Feed("third", other[64:], TREES["branches"])])
        for node in range(ROOT, 7):
            path = [TREES["branches"].tokens[i] for i in TREES["branches"].path(node)]
            assert torch.equal(output.logits[node + 1], one_by_one(model, [*other, *path])[-1])


def unpacked_row(page, place, size):
    """The key and the value at one place of a page of 8 bits, [layers, heads, size] each, as kept.h has them."""
    layers, heads, _, _ = page.shape
    width = -(-size // 32) * 32
    numbers, scales = page[..., : 32 * width], page[..., 32 * width :].view(torch.float32)
    tiles = numbers[:, :, 0].reshape(layers, heads, 2, width // 4, 16, 4)[:, :, place // 16, :, place % 16]
    key = tiles.reshape(layers, heads, width).int() - 128
    key_scales = scales[:, :, 0].reshape(layers, heads, 2, width // 16, 16)[:, :, place // 16, :, place % 16]
    value = numbers[:, :, 1].reshape(layers, heads, 32, width)[:, :, place].view(torch.int8).int()
    value_scales = scales[:, :, 1].reshape(layers, heads, 32, width // 16)[:, :, place]
    both = ((key, key_scales), (value, value_scales))
    return [(q * scale.repeat_interleave(16, 2))[..., :size] for q, scale in both]


@pytest.mark.parametrize("size", [8, 24, 64, 128])
def test_pages_of_8_bits_hold_the_rounded_keys_and_values(size):
    """Of the first layer, where both caches get the same ones; also after a branch of a tree was kept."""
    whole, model = (in_kernels(f"llama, {kind}heads of {size}") for kind in ("", "kv int8, "))
    text, draft = tokens(37), TREES["branches"]
    for each in (whole, model):
        each.forward([Feed(0, text, draft)])
        each.crop(0, len(text), [0, 2, 6])
    pages = [each.pages for each in (whole, model)]
    slots = [each.extend(0, 0) for each in pages]
    for place in range(len(text) + 3):
        page = pages[0].page(slots[0], place // 32).view(torch.float32)
        exact = page.view(*page.shape[:3], 32, size)[0, :, :, place % 32]  # [heads, 2, size]
        found = unpacked_row(pages[1].page(slots[1], place // 32), place % 32, size)
        for kind, numbers in enumerate(found):
            ours, theirs = numbers[0], exact[:, kind]
            steps = [part.abs().amax(1, keepdim=True).expand(part.shape) / 127 for part in theirs.split(16, 1)]
            assert ((ours - theirs).abs() <= 0.501 * torch.cat(steps, 1)).all()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_numbers_of_a_key_with_a_large_bias_or_norm_are_kept_with_16_bits(kind):
    """As of Qwen2: such a number, rounded to a 127th of itself, would drown what the others say."""
    reference = packs.reference(kind, seed=4, head_dim=64)
    attention = reference.model.layers[0].self_attn
    with torch.no_grad():
        if kind == "qwen2":
            attention.k_proj.bias[5], attention.k_proj.bias[64 + 33] = 300.0, -200.0  # of two heads
        else:
            attention.k_norm.weight[40] = 200.0
    whole, model = (packs.packed(reference, 8, kv_bits=bits) for bits in (32, 8))
    feeds = [Feed(0, tokens(40), TREES["branches"])]
    exact, ours = run(whole, feeds)[0].logits, run(model, feeds)[0].logits
    assert float((ours - exact).abs().max() / exact.abs().max()) < 0.02
    assert torch.equal(run(model, [Feed(0, tokens(40))])[0].logits[0], ours[0])


@st.composite
def schedules(draw):
    """Passes over up to three sequences: for each, tokens to commit, a tree, and the path of the tree to keep."""
    passes = []
    for _ in range(draw(st.integers(1, 5))):
        feeds = []
        for id in draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)):
            count = draw(st.integers(0, 7))
            parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
            draft = Draft(tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(count)), parents)
            new = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
            feeds.append((Feed(id, new, draft), draft.path(draw(st.integers(-1, count - 1)))))
        passes.append(feeds)
    return passes


@pytest.mark.parametrize(
    "name",
    [
        *("llama, 4 bits", "llama, heads of 64", "llama, heads of 80", "mistral, 4 bits", "qwen3"),
        *("llama, kv int8, heads of 64", "mistral, kv int8", "qwen2, activations int8, kv int8"),
    ],
)
@settings(max_examples=15, deadline=None)
@given(schedule=schedules())
def test_any_schedule_gives_the_bits_of_plain_decoding(name, schedule):
    """Feeds, trees, refused nodes and kept branches: every row, and so all that ever comes after it."""
    model, texts = pair(name)[0], {}
    for feeds in schedule:
        outputs = model.forward([feed for feed, _ in feeds])
        for (feed, path), output in zip(feeds, outputs, strict=True):
            text = [*texts.get(feed.id, ()), *feed.tokens]
            for node in range(ROOT, len(feed.draft)):
                branch = [feed.draft.tokens[i] for i in feed.draft.path(node)]
                assert torch.equal(output.logits[node + 1], one_by_one(model, [*text, *branch])[-1])
            model.crop(feed.id, len(text), path)
            texts[feed.id] = [*text, *(feed.draft.tokens[node] for node in path)]
    for id in texts:
        model.free(id)


class TestAFile:
    """A GGUF file runs with its own bits, of as many kinds as it has."""

    HIDDEN, LAYERS = 256, 2

    def write(self, path, **kinds):
        writer = gguf.GGUFWriter(path, "qwen2")  # no rotary halves to interleave
        writer.add_block_count(self.LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(self.HIDDEN)
        writer.add_feed_forward_length(512)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)

        def vector(name, size, scale, seed):
            writer.add_tensor(name, 1 + random(size, seed=seed).numpy() * scale)

        def weight(name, outputs, inputs, kind, seed):
            tensor = blocks(kind, outputs, inputs, seed, [0.001, -0.001, 0.0007])
            writer.add_tensor(name, tensor.raw, raw_dtype=gguf.GGMLQuantizationType[kind])

        weight("token_embd.weight", VOCAB, self.HIDDEN, "Q8_0", 1)
        vector("output_norm.weight", self.HIDDEN, 0.2, 2)
        for layer in range(self.LAYERS):
            prefix, seed = f"blk.{layer}.", 10 * layer
            vector(f"{prefix}attn_norm.weight", self.HIDDEN, 0.2, seed + 3)
            vector(f"{prefix}ffn_norm.weight", self.HIDDEN, 0.2, seed + 4)
            for name, outputs, inputs in (
                ("attn_q", 256, 256),
                ("attn_k", 128, 256),
                ("attn_v", 128, 256),
                ("attn_output", 256, 256),
                ("ffn_gate", 512, 256),
                ("ffn_up", 512, 256),
                ("ffn_down", 256, 512),
            ):
                seed += 1
                weight(f"{prefix}{name}.weight", outputs, inputs, kinds.get(name, "Q4_K"), seed + 5)
                if name in ("attn_q", "attn_k", "attn_v"):
                    vector(f"{prefix}{name}.bias", outputs, 0.1, seed + 6)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(path)

    @pytest.mark.parametrize(
        "kinds",
        [dict(attn_v="Q6_K", ffn_down="Q6_K"), dict(attn_k="Q8_0", ffn_up="Q5_K"), dict(attn_output="Q5_0")],
        ids=str,
    )
    def test_of_mixed_kinds(self, tmp_path, kinds):
        path = self.write(tmp_path / "model.gguf", **kinds)
        loaded = load(path, LoadOptions(tiny.CPU.device, None, tiny.MEMORY))
        assert isinstance(loaded.model.weights.stack, NativeStack)
        assert loaded.notes == ()
        dense = load(path, tiny.CPU).model
        assert isinstance(dense.weights.stack, TorchStack)
        feeds = [Feed(0, tokens(30), TREES["branches"]), Feed(1, tokens(2))]
        ours = loaded.model.forward(feeds)
        for mine, theirs in zip(ours, dense.forward(feeds), strict=True):
            assert_close(mine.logits, theirs.logits)
        assert torch.equal(ours[1].logits, one_by_one(loaded.model, tokens(2))[-1:])


class TestLongAndManyAtOnce:
    @pytest.mark.parametrize(("head_dim", "length", "pieces"), [(16, 8192, (512, 384)), (64, 4400, (500, 10))])
    def test_a_long_prompt_in_pieces(self, head_dim, length, pieces):
        """Buffers grow while the sequence does; before and after, the bits are those of other pieces. Keys of the
        larger heads are turned round for many queries, up to some length; the second layer tells what all got."""
        sizes = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=head_dim)
        model = packs.packed(packs.reference("llama", max_position_embeddings=8400, **sizes), 4)
        text = tokens(length)
        last = []
        for id, size in enumerate(pieces):
            for start in range(0, len(text), size):
                (output,) = model.forward([Feed(id, text[start : start + size])])
            last.append(output.logits)
            assert model.length(id) == length
        assert torch.equal(*last)
        assert last[0].isfinite().all()
        (output,) = model.forward([Feed(0, [1], TREES["wide"])])
        assert torch.equal(output.logits[2], model.forward([Feed(1, [1, 1])])[0].logits[0])

    def test_many_rows_after_a_long_sequence_and_a_long_sequence_after_many_rows(self):
        model = pair("llama, 4 bits")[0]
        long, short = tokens(200), tokens(3)
        expected = one_by_one(model, long)[-1], one_by_one(model, short)[-1]
        for _ in range(2):
            outputs = run(model, [Feed(i, short) for i in range(90)])
            assert all(torch.equal(output.logits[0], expected[1]) for output in outputs)
            assert torch.equal(run(model, [Feed(0, long)])[0].logits[0], expected[0])
            for i in range(0, 200, 50):
                (output,) = model.forward([Feed(1, long[i : i + 50])])
            assert torch.equal(output.logits[0], expected[0])
            model.free(1)

    def test_layers_that_are_not_there(self):
        model = in_kernels("llama, 4 bits")
        for layer in (3, -1):
            with pytest.raises(AssertionError):
                model.forward([Feed(0, [1])], [layer])

    def test_a_token_that_is_not_there(self):
        model = in_kernels("llama, 4 bits")
        for token in (VOCAB, -1):
            with pytest.raises(IndexError):
                model.forward([Feed(0, [token])])

    def test_weights_that_are_not_numbers_do_not_crash(self):
        theirs = packs.reference("llama")
        with torch.no_grad():
            theirs.model.layers[0].input_layernorm.weight[3] = float("nan")
            theirs.model.layers[1].mlp.up_proj.weight[5] = float("inf")
        (output,) = packs.packed(theirs, 4).forward([Feed(0, tokens(9), TREES["branches"])])
        assert output.logits.isnan().all()

    def test_two_models_in_two_threads(self):
        """Neither the main one. The kernels run beside each other: Python's lock is not held there."""
        names, results = ("llama, heads of 64", "mistral, 4 bits"), {}
        text = tokens(150)
        expected = {name: one_by_one(pair(name)[0], text)[-1] for name in names}

        def work(name):
            model = pair(name)[0]
            results[name] = [run(model, [Feed(0, text)])[0].logits[0] for _ in range(20)]

        workers = [threading.Thread(target=work, args=[name]) for name in names]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for name in names:
            assert all(torch.equal(row, expected[name]) for row in results[name])

    def test_a_model_with_more_threads_gives_the_same_bits(self, threads):
        model = pair("llama, heads of 64")[0]
        feeds = [Feed(0, tokens(20), TREES["branches"]), Feed(1, tokens(3))]
        one = run(model, feeds)
        threads(2)
        for a, b in zip(run(model, feeds), one, strict=True):
            assert torch.equal(a.logits, b.logits)

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize(
        "name",
        [
            "llama, heads of 64",
            "llama, heads of 128",
            "llama, heads of 80",
            "mistral, heads of 64",
            "qwen2",
            "llama, kv int8, heads of 64",
        ],
    )
    def test_rows_that_stay_with_a_thread_have_the_bits_of_pieces(self, threads, name, count):
        """A long prompt beside a short one, whose rows share a chunk, and their states; then few rows after them."""
        model, texts = pair(name)[0], (tokens(203), tokens(30, seed=3))
        threads(1)
        logits, hidden = {}, {0: [], 1: []}
        for begin in range(0, 203, 10):  # too few rows for a thread's own
            feeds = [Feed(id, text[begin:][:10]) for id, text in enumerate(texts) if text[begin:]]
            for feed, output in zip(feeds, model.forward(feeds, (0, 2)), strict=True):
                logits[feed.id] = output.logits
                hidden[feed.id].append(output.hidden)
        few = [model.forward([Feed(0, [5], TREES["branches"])])[0].logits for _ in range(2)]
        model.free(0)
        model.free(1)
        threads(count)
        whole = model.forward([Feed(id, text) for id, text in enumerate(texts)], (0, 2))
        again = [model.forward([Feed(0, [5], TREES["branches"])])[0].logits for _ in range(2)]
        model.free(0)
        model.free(1)
        for id, output in enumerate(whole):
            assert torch.equal(output.logits, logits[id])
            assert torch.equal(output.hidden, torch.cat(hidden[id]))
        assert all(torch.equal(a, b) for a, b in zip(again, few, strict=True))

    @pytest.mark.parametrize("count", [2, 3])
    def test_so_it_does_where_heads_do_not_divide_among_the_threads(self, threads, count):
        """What is left of the heads is split between them, down to single queries."""
        sizes = dict(hidden_size=288, num_attention_heads=9, num_key_value_heads=3, head_dim=32)
        model = packs.packed(packs.reference("llama", **sizes), 4)
        for size in (1, 2, 5):
            feeds = [Feed(0, tokens(40)[:size], TREES["branches"])]
            threads(1)
            (one,) = run(model, feeds)
            threads(count)
            (more,) = run(model, feeds)
            assert torch.equal(one.logits, more.logits)

    def test_another_dtype_is_refused(self):
        """Packed weights are computed in float32: a cache of another dtype would be read as if it were that."""
        layer = pair("llama, 4 bits")[0].weights.stack.layers[0]
        half = replace(layer, attention_norm=layer.attention_norm.bfloat16())
        with pytest.raises(OutriderError, match="packed weights are computed in float32"):
            NativeStack(pair("llama, 4 bits")[0].config, [half])


# ---- the library ----


@pytest.fixture(scope="module")
def exponential(tmp_path_factory):
    """The kernels' own e^x, 16 at a time: it is no part of the library's face, so a file around it is compiled here."""
    folder = tmp_path_factory.mktemp("exp")
    (folder / "exp.cpp").write_text(f"""
        #include "{SOURCE}"
        extern "C" void exponential(float* x, int64_t size) {{
            for (int64_t i = 0; i < size; i += 16) store(x + i, exp16(load(x + i)));
        }}
    """)
    build(folder / "exp.cpp", folder / "exp.so", ("-march=native", "-fopenmp"))
    function = ctypes.CDLL(str(folder / "exp.so")).exponential

    def run(x):
        y = x.clone()
        function(ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(y.numel()))
        return y

    return run


class TestExponential:
    def test_is_right_to_the_last_bits(self, exponential):
        x = torch.linspace(-87, 87, 1 << 20)
        expected = x.double().exp()
        assert float(((exponential(x) - expected) / expected).abs().max()) < 2e-7

    def test_at_zero_and_far_below(self, exponential):
        x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, -87.5, -200.0, -1e30, -float("inf")] * 2)
        y = exponential(x)
        assert torch.equal(y[:4], torch.ones(4))
        assert (y[4:8] < 2e-38).all()

    def test_of_no_number_is_none(self, exponential):
        assert exponential(torch.full((16,), float("nan"))).isnan().all()


GENERIC = {"any x86-64": ["-march=x86-64"], "AVX2": ["-march=x86-64", "-mavx2", "-mfma", "-mf16c"]}


@pytest.fixture(scope="module", params=GENERIC)
def generic(request, tmp_path_factory):
    """The kernels as a processor without 512-bit dot products runs them."""
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("these are flags for an x86-64 with AVX2")
    path = tmp_path_factory.mktemp("generic") / "kernels.so"
    build(SOURCE, path, [*GENERIC[request.param], "-fopenmp"])
    return ctypes.CDLL(str(path))


def use(kernels, monkeypatch):
    """For products, and for models and heads that are made from here on."""
    for module in (packing, stacking, heads):
        monkeypatch.setattr(module, "library", lambda: kernels)


class TestOtherProcessors:
    @pytest.mark.parametrize("kind", [*KINDS, *MADE])
    @pytest.mark.parametrize("activations", [16, 8])
    def test_products_are_the_same_bits(self, kind, activations, generic, monkeypatch):
        product, x = Packed([matrix(kind)], [random(48)], activations), random(5, 256)
        x[1] *= 1e-34
        x[2, 5] = float("nan")
        here, rows = product(x), product.rows(torch.arange(48))
        use(generic, monkeypatch)
        torch.testing.assert_close(product(x), here, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(product.rows(torch.arange(48)), rows)

    @pytest.mark.parametrize(
        "name",
        [
            *("llama, 4 bits", "llama, heads of 64", "mistral, heads of 64", "qwen2", "qwen3"),
            *("llama, kv int8, heads of 64", "qwen2, activations int8, kv int8"),
        ],
    )
    def test_models_agree(self, name, generic, monkeypatch):
        here, dense = pair(name)
        use(generic, monkeypatch)
        model = in_kernels(name)
        drafts = [EMPTY, *TREES.values()]
        feeds = [Feed(i, tokens(1 + 9 * (i % 4), seed=i), drafts[i % len(drafts)]) for i in range(8)]
        for ours, same, theirs in zip(run(model, feeds), run(here, feeds), run(dense, feeds), strict=True):
            assert_close(ours.logits, theirs.logits, name)
            assert torch.equal(ours.logits, same.logits)

    def test_adapters_agree(self, generic, monkeypatch):
        here, _ = pair("llama, 4 bits")
        pairs = {
            name: LowRank(random(5, inputs, seed=i) * 0.1, random(outputs, 5, seed=i + 1))
            for i, (name, (outputs, inputs)) in enumerate(here.adapter_base.shapes.items())
        }
        adapter = here.adapt(Adapter(pairs), "a")
        text = tokens(25)
        feeds = [Feed(0, text, TREES["branches"], adapter), Feed(1, tokens(9)), Feed(2, tokens(3), adapter=adapter)]
        expected = [output.logits.clone() for output in run(here, feeds)]
        (plain,) = run(here, [Feed(0, text, TREES["branches"])])
        assert not torch.allclose(expected[0], plain.logits, atol=0.1)
        use(generic, monkeypatch)
        model = in_kernels("llama, 4 bits")
        for ours, theirs in zip(run(model, feeds), expected, strict=True):
            assert_close(ours.logits, theirs)
        together = run(model, feeds)[2].logits.clone()
        assert torch.equal(run(model, feeds[2:])[0].logits, together)

    @pytest.mark.parametrize("name", ["llama, 4 bits", "llama, heads of 64"])
    def test_heads_write_the_same_chains(self, name, generic, monkeypatch):
        target = pair(name)[0]
        torch.manual_seed(7)
        head = tiny.eagle_head(target, torch.arange(1, VOCAB, 2), depth=2).requires_grad_(False)
        here = PackedRunner(head, target, 4)
        use(generic, monkeypatch)
        there, said = PackedRunner(head, target, 4), set()
        for rows in (5, 1, 90, 2):
            shown = [(random(rows, 3, 32, seed=rows), range(rows))]
            ours, theirs = (runner.chain(0, tokens(rows, seed=rows), shown, 4, 0.0) for runner in (there, here))
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            assert [chance for _, chance in ours] == [chance for _, chance in theirs]
            said.update(token for token, _ in ours)
        assert len(said) > 1

    @pytest.mark.parametrize("name", ["mistral, heads of 64", "mistral, kv int8"])
    def test_bits_do_not_depend_on_the_schedule(self, name, generic, monkeypatch):
        use(generic, monkeypatch)
        model, text = in_kernels(name), tokens(25)
        plain = one_by_one(model, text)
        assert torch.equal(run(model, [Feed(0, text[:1], Draft.chain(text[1:])), Feed(1, tokens(9))])[0].logits, plain)
        draft = TREES["branches"]
        (output,) = run(model, [Feed(0, text, draft)])
        for node in range(ROOT, len(draft)):
            path = [draft.tokens[i] for i in draft.path(node)]
            assert torch.equal(output.logits[node + 1], one_by_one(model, [*text, *path])[-1])


@pytest.fixture
def fresh(tmp_path, monkeypatch, quick_compiler):
    """An empty cache and no library yet; the folder where it will be kept. It is asked which library is run, and not
    how fast."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache" / "kernels"
    library.cache_clear()


def works():
    product, x = Packed([matrix("Q4_1")]), random(2, 256)
    assert_near(product(x), exactly([matrix("Q4_1")], x), x, [matrix("Q4_1")])


class TestBuilding:
    @pytest.mark.parametrize("machine", MACHINES, ids=str)
    def test_without_a_warning(self, tmp_path, machine):
        assert {"-Wall", "-Wextra"} < set(FLAGS)
        assert "-w" not in FLAGS
        build(SOURCE, tmp_path / "kernels.so", [*machine, "-Werror"])

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instruction sets of x86-64")
    @pytest.mark.parametrize("machine", ["x86-64", "x86-64-v3"])
    def test_for_any_instruction_set_with_the_same_bits(self, machine, tmp_path, monkeypatch):
        if machine != "x86-64" and not {"avx2", "fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()):
            pytest.skip("this processor has no AVX2")
        build(SOURCE, tmp_path / "kernels.so", [f"-march={machine}", "-O1"])
        kinds = [
            (kind, bias, bits) for kind in [*KINDS, *MADE] for bias in (None, random(48, seed=2)) for bits in (16, 8)
        ]
        products = [Packed([matrix(kind)], [bias], bits) for kind, bias, bits in kinds]
        texts = [random(rows, 256) for rows in (1, 2, 3, 9, 23)]
        ours = [product(x) for product in products for x in texts]
        other = ctypes.CDLL(str(tmp_path / "kernels.so"))
        monkeypatch.setattr(packing, "library", lambda: other)
        theirs = [product(x) for product in products for x in texts]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    @pytest.mark.parametrize("paired", [0, 1])
    def test_in_pairs_or_not_with_the_same_bits(self, paired, tmp_path, monkeypatch):
        """Which of the two is faster depends on the processor."""
        if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
            pytest.skip("this processor never multiplies in pairs")
        build(SOURCE, tmp_path / "kernels.so", ["-march=native", "-O1", f"-DPAIRED={paired}"])
        products = [Packed([matrix(kind)]) for kind in [*KINDS, *MADE]]
        texts = [random(rows, 256) * scale for rows in (1, 4, 5, 8, 30) for scale in (1, 1e-35, 1e30)]
        texts += [torch.full((8, 256), 2.0), -torch.full((7, 256), 3.0), random(6, 256).sign()]  # the largest integers
        ours = [product(x) for product in products for x in texts]
        other = ctypes.CDLL(str(tmp_path / "kernels.so"))
        monkeypatch.setattr(packing, "library", lambda: other)
        theirs = [product(x) for product in products for x in texts]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    def test_once_then_never_again_unless_it_breaks(self, fresh, monkeypatch):
        library()
        (kept,) = fresh.iterdir()
        name, data, built = kept.name, kept.read_bytes(), kept.stat().st_mtime_ns
        library.cache_clear()
        with monkeypatch.context() as without:
            without.setenv("PATH", "")  # what is kept needs no compiler
            works()
        assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [built]
        for broken in (b"", b"not a library", data[: len(data) // 2]):
            kept.unlink()  # not written over: this process still runs it
            (fresh / name).write_bytes(broken)
            library.cache_clear()
            works()
            (kept,) = fresh.iterdir()
            assert len(kept.read_bytes()) == len(data)

    @pytest.mark.parametrize("place", ["file", "file/below"])
    def test_for_this_process_alone_where_the_cache_cannot_be_written(self, fresh, tmp_path, monkeypatch, place):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / place))
        works()
        assert (tmp_path / "file").read_text() == ""

    def test_in_two_processes_at_once(self, fresh, monkeypatch):
        monkeypatch.setenv("CXX", "g++ -DAT_ONCE")  # so that both compile: nothing is kept of this one
        code = "from outrider.models.native.library import library; library().outrider_linear"
        both = [subprocess.Popen([sys.executable, "-c", code], env=os.environ) for _ in range(2)]
        assert [process.wait(120) for process in both] == [0, 0]
        assert {path.suffix for path in fresh.iterdir()} == {".so"}
        works()

    def test_with_the_compiler_and_options_that_cxx_names(self, fresh, tmp_path, monkeypatch):
        log = tmp_path / "log"
        monkeypatch.setenv("CXX", program(tmp_path / "mine", f'echo "$@" >> {log}; exec g++ "$@"') + " -DMINE")
        works()
        assert all(line.startswith("-DMINE ") for line in log.read_text().splitlines())

    def test_without_openmp_where_the_compiler_has_none(self, fresh, tmp_path, monkeypatch):
        refuse = 'case "$*" in *-fopenmp*) echo no OpenMP >&2; exit 1;; esac; exec g++ "$@"'
        monkeypatch.setenv("CXX", program(tmp_path / "plain", refuse))
        works()

    def test_without_openmp_where_the_compilers_is_not_torchs(self, fresh, tmp_path, monkeypatch):
        """Such a library links and cannot be loaded."""
        header = tmp_path / "foreign.h"
        header.write_text('extern "C" void __kmpc_missing(); void (*foreign)() = __kmpc_missing;')
        foreign = f'case "$*" in *-fopenmp*) exec g++ "$@" -include {header};; esac; exec g++ "$@"'
        monkeypatch.setenv("CXX", program(tmp_path / "foreign", foreign))
        build(SOURCE, tmp_path / "foreign.so", ["-fopenmp"])
        with pytest.raises(OSError, match="__kmpc_missing"):
            ctypes.CDLL(str(tmp_path / "foreign.so"))
        works()


class TestPrebuilt:
    """A library of the wheel is taken before a compiler is asked; whatever does not fit is passed over."""

    @pytest.fixture
    def wheel(self, fresh, tmp_path, monkeypatch):
        """A folder of prebuilt libraries, with one for any processor of this kind."""
        level = levels.fitting()[-1]
        (tmp_path / "prebuilt").mkdir()
        path = tmp_path / "prebuilt" / f"{level.name}-{compiler.source_key()}.so"
        build(SOURCE, path, level.flags)
        monkeypatch.setattr(library_file, "PREBUILT", path.parent)
        return path

    def test_needs_no_compiler(self, wheel, fresh, monkeypatch):
        monkeypatch.setenv("PATH", "")
        works()
        assert library().origin == f"prebuilt for {levels.fitting()[-1].name}"
        assert not fresh.exists()

    def test_the_best_that_fits_is_taken(self, wheel, monkeypatch):
        best = levels.fitting()[0]
        better = wheel.with_name(f"{best.name}-{compiler.source_key()}.so")
        build(SOURCE, better, best.flags)
        works()
        assert library().origin == f"prebuilt for {best.name}"

    def test_one_of_another_source_is_passed_over(self, wheel, fresh):
        wheel.rename(wheel.with_name(f"{levels.fitting()[-1].name}-0123456789abcdef.so"))
        works()
        assert library().origin.startswith("built here")

    def test_one_that_does_not_load_is_passed_over(self, wheel, fresh):
        wheel.unlink()  # not written over: an earlier test may still run it
        wheel.write_bytes(b"of another system")
        works()
        assert library().origin.startswith("built here")

    def test_a_level_can_be_named(self, fresh, monkeypatch):
        monkeypatch.setenv("OUTRIDER_KERNELS", levels.fitting()[-1].name)
        works()
        assert library().origin == f"built here, {levels.fitting()[-1].name}"
        library.cache_clear()
        monkeypatch.setenv("OUTRIDER_KERNELS", "pentium")
        with pytest.raises(OutriderError, match="OUTRIDER_KERNELS=pentium: no such level; known: x86-64-v4-vnni-amd"):
            library()
        other = next(level.name for level in levels.LEVELS if level.machine != platform.machine())
        monkeypatch.setenv("OUTRIDER_KERNELS", other)
        with pytest.raises(OutriderError, match=f"={other}: this processor does not have these instructions; it runs"):
            library()

    def test_windows_is_refused_in_one_line(self, fresh, monkeypatch):
        monkeypatch.setattr(platform, "system", lambda: "Windows")
        with pytest.raises(NoCompiler, match="the kernels do not run on Windows; run outrider in WSL"):
            library()

    @pytest.mark.parametrize(
        ("machine", "vendor", "words", "best"),
        [
            ("x86_64", "AuthenticAMD", "avx2 fma f16c bmi1 bmi2", "x86-64-v3"),
            ("x86_64", "GenuineIntel", "avx2 fma f16c bmi1 bmi2 avx_vnni", "x86-64-v3-vnni"),
            ("x86_64", "GenuineIntel", "AVX512", "x86-64-v4"),
            ("x86_64", "GenuineIntel", "AVX512 avx512_vnni", "x86-64-v4-vnni"),
            ("x86_64", "GenuineIntel", "AVX512 avx512_vnni amx_tile amx_bf16 amx_int8", "x86-64-v4-amx"),
            ("x86_64", "AuthenticAMD", "AVX512 avx512_vnni", "x86-64-v4-vnni-amd"),
            ("x86_64", "GenuineIntel", "sse4_2", "x86-64"),
            ("aarch64", "", "fp asimd", "armv8"),
            ("aarch64", "", "fp asimd asimddp", "armv8.2-dotprod"),
            ("aarch64", "", "fp asimd asimddp i8mm", "armv8.2-i8mm"),
            ("aarch64", "", "", None),
            ("riscv64", "", "rv64", None),
        ],
    )
    def test_which_level_a_processor_gets(self, machine, vendor, words, best, monkeypatch):
        words = words.replace("AVX512", "avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512dq avx512vl avx512cd")
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(levels, "processor", lambda: (vendor, frozenset(words.split())))
        assert next((level.name for level in levels.fitting()), None) == best

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the level named here is one of x86-64")
    def test_the_wheel_holds_them(self, tmp_path, quick_compiler):
        pytest.importorskip("hatchling", reason="hatchling builds the wheel (a part of the extra test)")
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
        env = os.environ | {"OUTRIDER_PREBUILT": "x86-64"}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (wheel,) = tmp_path.glob("*.whl")
        name = f"outrider/models/native/prebuilt/x86-64-{compiler.source_key()}.so"
        with zipfile.ZipFile(wheel) as archive:
            assert [path for path in archive.namelist() if path.endswith(".so")] == [name]
            archive.extract(name, tmp_path)
        assert ctypes.CDLL(str(tmp_path / name)).outrider_linear


class TestNoLibrary:
    """Then the weights are expanded, the model works, and one line says why."""

    def notes(self):
        theirs = packs.reference("llama", seed=4)
        loaded = packs.saved(theirs, LoadOptions(tiny.CPU.device, None, tiny.MEMORY, 4))
        assert isinstance(loaded.model.weights.stack, TorchStack)
        (output,) = loaded.model.forward([Feed(0, tokens(9))])
        with torch.inference_mode():
            torch.testing.assert_close(
                output.logits[0], theirs(torch.tensor([tokens(9)])).logits[0, -1], atol=2e-4, rtol=1e-4
            )
        (note,) = loaded.notes
        assert "\n" not in note
        assert "the weights are expanded to torch.float32" in note
        with pytest.raises(NoCompiler) as caught:
            library()
        assert "\n" not in str(caught.value)
        return note

    def test_for_want_of_a_compiler(self, fresh, monkeypatch):
        monkeypatch.setenv("PATH", "")
        assert "no C++ compiler was found" in self.notes()

    def test_for_want_of_the_compiler_that_cxx_names(self, fresh, monkeypatch):
        monkeypatch.setenv("CXX", "/no/such/compiler -O2")
        assert "/no/such/compiler, named by CXX, was not found" in self.notes()

    @pytest.mark.parametrize(
        ("does", "said"),
        [
            (
                "echo 'In file x:' >&2; echo 'x.cpp:1: error: bad luck' >&2; echo 'and more' >&2; exit 1",
                "error: bad luck",
            ),
            ("exit 3", "it gave no reason"),
            ("exit 0", "cannot be loaded"),
            ("for last; do :; done; echo nonsense > $last", "cannot be loaded"),
            ("kill -9 $$", "could not build"),
        ],
    )
    def test_for_a_compiler_that_fails(self, fresh, tmp_path, monkeypatch, does, said):
        monkeypatch.setenv("CXX", program(tmp_path / "broken", does))
        assert said in self.notes()
        assert not any(fresh.iterdir())

    def test_for_a_compiler_that_cannot_run(self, fresh, tmp_path, monkeypatch):
        (tmp_path / "odd").write_bytes(b"\x7fELF nothing")
        (tmp_path / "odd").chmod(0o755)
        monkeypatch.setenv("CXX", str(tmp_path / "odd"))
        assert "cannot be run" in self.notes()

    def test_for_a_compiler_that_never_ends(self, fresh, tmp_path, monkeypatch):
        monkeypatch.setattr("outrider.models.native.compiler.PATIENCE", 0.1)
        monkeypatch.setenv("CXX", program(tmp_path / "slow", "exec sleep 60"))
        assert "did not end" in self.notes()
