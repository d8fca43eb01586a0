"""The kernels of a GPU, interpreted on a CPU, against plain torch. What is equal bit by bit is tested on a device."""

import random
from dataclasses import replace

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.models.base import Feed
from outrider.models.cuda import attention, product
from outrider.models.cuda.attention import Attention, PartSums
from outrider.models.cuda.batch import Batch, Field
from outrider.models.cuda.model import SLOTS, CudaLlama
from outrider.models.cuda.pages import PageTable
from outrider.models.cuda.product import Around, Workspace, linear, norm_scales
from outrider.models.linear import Dense
from outrider.models.llama import Llama, LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack
from outrider.settings import MOST_BATCH

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

CPU = torch.device("cpu")


def whole(*sizes, seed=0):
    """Small whole numbers: their sums are exact, in whatever order."""
    return torch.randint(-3, 4, sizes, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize(
    ("rows", "size", "inner"), [(1, 80, 72), (70, 80, 72), (5, 40, 1040), (70, 40, 1040), (5, 2100, 96)]
)
def test_a_product_and_what_is_around_it(rows, size, inner):
    """Odd sizes; sums in one part, in two and in four."""
    x, weight, bias, gain = whole(rows, inner), whole(size, inner, seed=1), whole(size, seed=2), whole(size, seed=3)
    work = Workspace(rows, size, size, torch.float32, CPU)
    out = torch.full((rows, size), torch.nan)
    linear(x, weight, bias, out, work)
    assert torch.equal(out, x @ weight.T + bias)
    residual = whole(rows, size, seed=4)
    out = residual.clone()
    linear(x, weight, None, out, work, Around(gain=gain))
    assert torch.equal(out, residual + x @ weight.T)
    assert torch.equal(work.next, out * gain)
    scale = norm_scales(work, rows, size, 1e-5)
    assert torch.allclose(scale, (out.square().mean(1) + 1e-5).rsqrt(), rtol=1e-6)


@pytest.mark.parametrize("rows", [3, 66])
def test_a_norm_and_a_gate_are_part_of_the_product(rows):
    size, inner = 48, 72
    work = Workspace(rows, inner, inner, torch.float32, CPU)
    x, first = torch.zeros(rows, inner), whole(rows, 8)
    linear(first, whole(inner, 8, seed=1), None, x, work, Around(gain=whole(inner, seed=2)))
    weight = whole(2 * size, inner, seed=3) / 64
    out = torch.empty(rows, size)
    linear(work.next, weight, None, out, work, Around(gate=True, eps=1e-5))
    normed = x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * whole(inner, seed=2)
    gate, up = (normed @ weight.T).chunk(2, 1)
    assert torch.allclose(out, torch.nn.functional.silu(gate) * up, atol=1e-5)


def test_a_tile_has_whole_strips_and_there_is_one_for_every_matrix():
    for rows in (65, 500, 5000):
        for size in (16, 576, 2048, 4096, 5120, 13_000):
            for wide in (False, True):
                cut = product.tiling(size, 4096)
                assert product.tile_for(rows, size, False, cut.split, cut.width, wide).outputs % cut.width == 0


HEADS, KV, D = 6, 2, 24


class Cache:
    """Keys and values of some sequences in pages, and attention over them in plain torch."""

    def __init__(self, chunk, window=0):
        self.chunk, self.window, self.pages = chunk, window, PageTable(80, 4, 6, 400)
        made = torch.Generator().manual_seed(5)
        self.keys, self.values = (torch.randn(80, KV, 4, D, generator=made) for _ in range(2))
        self.made = made

    def attend(self, feeds, each=None, ahead=None):
        batch = Batch(feeds, self.pages, HEADS // KV)
        meta = torch.zeros(len(Field), batch.rows, dtype=torch.int32)
        batch.write(meta.numpy(), self.pages.padding)
        q = torch.randn(batch.rows, HEADS, D, generator=self.made)
        out = torch.full_like(q, torch.nan)
        parts = PartSums(HEADS, D, CPU)
        run = Attention(batch.rows, len(batch.spans), batch.tile, batch.longest, self.chunk, (KV, HEADS // KV), parts)
        run.each = run.each if each is None else each
        run.ahead = run.ahead if ahead is None else ahead
        table = torch.from_numpy(self.pages.table)
        run(q, self.keys, self.values, table, meta, out, self.window)
        return out, torch.stack([self.plain(q[row], meta[:, row].tolist(), table) for row in range(batch.rows)])

    def plain(self, q, row, table):
        position, base, nodes = (
            row[Field.POSITION],
            row[Field.BASE],
            row[Field.LOW] & 0xFFFFFFFF | row[Field.HIGH] << 32,
        )
        path = [node for node in range(64) if nodes >> node & 1]
        places = [*range(base), *(base + node for node in path)] if path else list(range(position + 1))
        assert len(places) == position + 1
        places = places[max(0, position + 1 - self.window) if self.window else 0 :]
        page = table[row[Field.SLOT]][[place // 4 for place in places]].long()
        inside = torch.tensor([place % 4 for place in places])
        keys, values = (part[page, :, inside].repeat_interleave(HEADS // KV, 1) for part in (self.keys, self.values))
        weight = torch.softmax(torch.einsum("hd,khd->hk", q, keys) * D**-0.5, -1)
        return torch.einsum("hk,khd->hd", weight, values)


TREE = Draft((1,) * 9, (-1, -1, 0, 0, 3, 4, 1, 6, 5))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("held", "each", "window"), [(0, 1, 0), (29, 0, 0), (29, 1, 20), (61, 2, 0), (131, 0, 20), (131, 1, 0), (131, 2, 0)]
)
def test_attention_in_one_program_and_in_many(held, each, window, ahead):
    """Lengths that are no power of two, trees across the boundaries of chunks, a short sequence beside a long one; keys
    that are read before those of the pass itself."""
    cache = Cache(32, window)
    cache.pages.extend(1, held)
    out, plain = cache.attend([Feed(1, [1, 2], TREE), Feed(2, [1], Draft.chain((1, 2, 3)))], each, ahead)
    assert torch.allclose(out, plain, atol=1e-5)


def test_attention_of_a_prompt():
    cache = Cache(32)
    cache.pages.extend(1, 45)
    out, plain = cache.attend([Feed(1, [1] * 50), Feed(2, [1])])
    assert torch.allclose(out, plain, atol=1e-5)


def test_the_size_of_a_chunk_is_told_by_the_model_alone():
    assert attention.chunk_keys(64, torch.bfloat16) == 256
    assert attention.chunk_keys(128, torch.bfloat16) == 128
    assert attention.chunk_keys(80, torch.float16) == 128
    assert attention.chunk_keys(64, torch.float32) == 32


def weights(layers=1, vocab=60, hidden=32, inner=40, heads=4, kv=2, d=16, norms=True):
    made = torch.Generator().manual_seed(0)

    def rand(*sizes):
        return torch.randn(*sizes, generator=made) * 0.3

    def layer():
        return Layer(
            1 + rand(hidden),
            Dense(rand((heads + 2 * kv) * d, hidden), rand((heads + 2 * kv) * d)),
            Dense(rand(hidden, heads * d)),
            1 + rand(hidden),
            Dense(rand(2 * inner, hidden)),
            Dense(rand(hidden, inner)),
            1 + rand(d) if norms else None,
            1 + rand(d) if norms else None,
        )

    config = LlamaConfig(hidden, heads, kv, d, 1e-5, None, vocab_size=vocab, num_layers=layers, context=256)
    rope = Rope(1.0 / 10_000 ** (torch.arange(0, d, 2).float() / d))
    stack = TorchStack(config, [layer() for _ in range(layers)])
    return config, Weights(Dense(rand(vocab, hidden)), stack, 1 + rand(hidden), Dense(rand(vocab, hidden)), rope)


@pytest.mark.parametrize(("vocab", "norms", "d"), [(60, True, 16), (60, False, 32), (2100, False, 16), (60, False, 24)])
def test_a_model_of_these_kernels_equals_plain_torch(vocab, norms, d):
    """With 2,100 tokens the sums of the output matrix alone are taken in parts. Without norms of queries and keys these
    are placed by their product, if its strips fit their heads: one strip each, two, and 24 numbers that do not fit."""
    models = (
        Llama(*weights(vocab=vocab, norms=norms, d=d)),
        CudaLlama(*weights(vocab=vocab, norms=norms, d=d), 1 << 20),
    )
    rng = random.Random(1)

    def text(count):
        return [rng.randrange(vocab) for _ in range(count)]

    def run(feeds, layers=()):
        for plain, ours in zip(*(model.forward(feeds, layers) for model in models), strict=True):
            assert torch.allclose(plain.logits, ours.logits, atol=1e-4 * plain.logits.abs().max())
            if layers:
                assert torch.allclose(plain.hidden, ours.hidden, atol=1e-4)

    run([Feed(1, text(66)), Feed(2, text(3))])  # more rows than a strip is read for at once
    run([Feed(1, text(1), Draft((5, 6, 7, 8, 9), (-1, -1, 0, 0, 3))), Feed(2, text(1), Draft.chain((1, 2, 3)))], (0,))
    for model in models:
        model.crop(1, 67, (0, 3, 4))
        model.crop(2, 4, (0,))
    run([Feed(1, text(1)), Feed(2, text(2))])


def test_no_sequence_grows_past_the_context():
    config, rest = weights()
    model = CudaLlama(replace(config, context=40), rest, 1 << 20)
    text, more = list(range(40)), Draft((1, 2, 3), (-1, -1, 0))  # two levels
    model.forward([Feed(7, text[:-3])])
    for feed in (Feed(8, [*text, 1]), Feed(8, text * 5), Feed(7, text[:4]), Feed(7, text[:2], more)):
        with pytest.raises(OutriderError, match=rf"sequence {feed.id} would have \d+ tokens.*context is 40"):
            model.forward([Feed(9, text[:2]), feed])
        assert (model.length(7), model.length(8), model.length(9)) == (37, 0, 0)
    model.forward([Feed(7, text[:1], more)])
    model.free(7)
    assert model.free_pages == model.capacity // model.page


def test_the_page_table_has_a_row_for_every_sequence_that_runs_or_is_paused():
    assert SLOTS >= 2 * MOST_BATCH


def test_a_page_table_that_is_still_on_its_way_is_not_overwritten():
    """Pages are given out on the host's own table; what the device may be reading changes with the next pass only."""
    model = CudaLlama(*weights(), 1 << 20)
    model.forward([Feed(1, [1, 2, 3])])
    staged = model._table._staged.clone()
    model.free(1)
    model.begin(2, list(range(40)))
    model._pages.extend(3, 200)
    assert torch.equal(model._table._staged, staged)
