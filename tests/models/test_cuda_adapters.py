"""Adapters in the kernels of a GPU, interpreted on a CPU, against torch's own. What is equal bit by bit is tested on a
device (tests/gpu/test_adapters.py)."""

import random

import pytest
import torch
from pool_adapters import MATRICES, lora, weights

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.models.adapters.adapter import EMBEDDING, OUTPUT
from outrider.models.base import Feed, one_part
from outrider.models.cuda import low_rank
from outrider.models.cuda.adapters import PassAdapters
from outrider.models.cuda.model import CudaLlama
from outrider.models.llama import Llama

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

VOCAB = 60
RANKS = (1, 8, 64, 16)


class Pair:
    """A model in plain torch and in these kernels, with the same adapters."""

    def __init__(self, ranks=RANKS, units=8, **sizes):
        self.plain, self.ours = Llama(*weights(**sizes)), CudaLlama(*weights(**sizes), 1 << 20)
        self.ours.reserve_adapters(units * self.ours.adapter_bytes(lora(self.ours, 1, 0)))
        self.rng = random.Random(1)
        self.ready = [(None, None)]
        for seed, rank in enumerate(ranks):
            self.add(lora(self.ours, rank, seed), f"{seed}")

    def add(self, adapter, key):
        self.ready.append((self.plain.adapt(adapter, key), self.ours.adapt(adapter, key)))

    def text(self, count):
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def run(self, feeds, layers=()):
        """`feeds`: id, tokens, draft, number of the adapter; 0: none. The outputs of ours."""
        each = [[Feed(id, tokens, draft, self.ready[own][side]) for id, tokens, draft, own in feeds] for side in (0, 1)]
        found = self.plain.forward(each[0], layers), self.ours.forward(each[1], layers)
        for plain, ours in zip(*found, strict=True):
            assert torch.allclose(plain.logits, ours.logits, atol=2e-4 * plain.logits.abs().max())
            if layers:
                assert torch.allclose(plain.hidden, ours.hidden, atol=2e-4 * plain.hidden.abs().max())
        return [ours.logits.clone() for ours in found[1]]

    def crop(self, id, length, path=()):
        self.plain.crop(id, length, path)
        self.ours.crop(id, length, path)


CHAIN, TREE = Draft.chain((1, 2, 3)), Draft((5, 6, 7, 8, 9), (-1, -1, 0, 0, 3))
NONE = Draft(())


def test_rows_of_different_adapters_and_of_none_in_one_pass_equal_plain_torch():
    """Prompts, chains and trees; few rows and more than a strip is read for at once; ranks that fill no unit and
    several."""
    pair = Pair(layers=2)
    pair.run([(1, pair.text(30), NONE, 1), (2, pair.text(20), NONE, 0), (3, pair.text(25), NONE, 3)])
    pair.run([(1, pair.text(1), TREE, 1), (2, pair.text(1), CHAIN, 0), (3, pair.text(1), TREE, 3),
              (4, pair.text(3), NONE, 2), (5, pair.text(2), NONE, 4), (6, pair.text(2), NONE, 3)], (0,))  # fmt: skip
    pair.crop(1, 31, (0, 3, 4))
    pair.crop(2, 21, (0,))
    pair.crop(3, 26)
    pair.run([(id, pair.text(1), NONE, own) for id, own in ((3, 3), (1, 1), (2, 0), (6, 3), (4, 2))])


def test_a_prompt_with_an_adapter_comes_in_any_chunks():
    pair = Pair(ranks=(8,), units=1)
    prompt = pair.text(70)
    whole = pair.run([(1, prompt, NONE, 1)])[0]
    pair.run([(2, prompt[:66], NONE, 1), (3, pair.text(5), NONE, 0)])
    assert torch.allclose(pair.run([(2, prompt[66:], NONE, 1)])[0], whole, atol=1e-4)


@pytest.mark.parametrize("name", [*MATRICES, None])
def test_each_matrix_has_its_own_part(name):
    """Outputs of queries, keys and values may share a strip: their boundaries are no multiples of one."""
    pair = Pair(ranks=(), units=1, heads=3, kv=1, d=12, hidden=24)
    pair.add(lora(pair.ours, 3, 5, only=name), "own")
    base = pair.run([(1, [1, 2, 3], NONE, 0)])[0]
    assert not torch.allclose(pair.run([(2, [1, 2, 3], NONE, 1)])[0], base, atol=1e-3)
    pair.run([(3, pair.text(70), NONE, 1)])


def test_a_pass_with_more_units_than_are_read_at_once_equals_plain_torch():
    """Strips that have outputs of two matrices, rows of a large rank between others, few rows and many."""
    pair = Pair(ranks=(256, 40, 8), units=20, heads=3, kv=1, d=12, hidden=24)
    pair.run([(id, pair.text(1 + id % 2), NONE, id % 4) for id in range(1, 9)])
    pair.run([(id, pair.text(11), NONE, id % 4) for id in range(10, 17)])


def test_more_adapters_than_programs_that_compute_their_inner_values_equal_plain_torch():
    pair = Pair(ranks=(1,) * low_rank.FIRST_TILES + (40,), units=low_rank.FIRST_TILES + 3)
    pair.run([(id, pair.text(1), NONE, id) for id in range(1, len(pair.ready))])


def test_rows_of_many_inputs_equal_plain_torch():
    """Inner values are sums of several sums, whose last inputs fill no block."""
    pair = Pair(ranks=(3, 20), units=3, hidden=172, inner=300)
    pair.run([(id, pair.text(2), NONE, id % 3) for id in range(1, 5)])


def test_the_table_of_a_pass_tells_each_row_its_own_units():
    """Units in the order in which their adapters come; every row with an adapter is in one tile."""
    pair = Pair()
    pool, owns = pair.ours._adapters, [pair.ready[own][1] for own in (3, 0, 1, 3, 2)]
    counts = [2, 3, 17, 40, 1]
    staging = torch.zeros(PassAdapters.size(pool, 64)).int()
    made = PassAdapters(pool, 64, torch.empty(64 * pool.inner_values), staging, pool.tickets())
    made.send(owns, counts)
    table = made.sum(0, "qkv")
    each = [own for own, count in zip(owns, counts, strict=True) for _ in range(count)] + [None]
    listed = table.units[4 : 4 + int(table.units[0])].tolist()
    assert listed == [unit for own in (owns[0], owns[2], owns[4]) for unit in own.weights.units]
    for row, own in enumerate(each):
        first, count = int(table.firsts[row]), int(table.counts[row])
        assert listed[first : first + count] == ([] if own is None else list(own.weights.units))
    found = []
    for first, count, start, size in table.tiles[:, table.tiles[1] > 0].T.tolist():
        rows = table.order[start : start + size].tolist()
        assert 0 < size <= table.tile
        assert all(listed[first : first + count] == list(each[row].weights.units) for row in rows)
        found += rows
    assert sorted(found) == [row for row, own in enumerate(each) if own is not None]
    assert table.units[:3].tolist() == [len(listed), int((table.tiles[1] > 0).sum()), 4]
    assert (table.tiles[1, int(table.units[1]) :] == 0).all()


def test_a_row_without_an_adapter_has_the_bits_of_a_pass_without_any():
    pair = Pair()
    before = pair.run([(1, [4, 5, 6], NONE, 0)])[0]
    among = pair.run([(2, [1, 2], TREE, 3), (3, [4, 5, 6], NONE, 0), (4, [7], NONE, 1)])[1]
    assert torch.equal(before, among)


def test_an_adapter_that_leaves_makes_place_and_leaves_nothing_behind():
    """Its units are used again: by an adapter of a smaller rank, whose rest is zero."""
    pair = Pair(ranks=(), units=4)
    pair.add(lora(pair.ours, 64, 1), "large")
    tokens = pair.text(3)
    pair.run([(1, tokens, NONE, 1)])
    with pytest.raises(OutriderError, match="finds 0 of 4"):
        pair.ours.adapt(lora(pair.ours, 1, 2), "more")
    run = {shape: each for shape, each in pair.ours._passes._passes.items() if shape.adapted}
    pair.ours.release(pair.ready.pop()[1])
    pair.add(lora(pair.ours, 1, 3), "small")
    pair.add(lora(pair.ours, 40, 4), "odd")
    pair.run([(2, tokens, NONE, 1), (3, tokens, NONE, 2)])
    for shape, each in run.items():
        assert pair.ours._passes._passes[shape] is each


def test_memory_is_taken_when_the_first_adapter_comes_and_within_the_budget():
    model = CudaLlama(*weights(), 1 << 20)
    unit = model.adapter_bytes(lora(model, 1, 0))
    assert model.adapter_bytes(lora(model, 16, 0)) == unit
    assert model.adapter_bytes(lora(model, 17, 0)) == 2 * unit
    assert model.reserve_adapters(5 * unit + 1) == 5 * unit
    assert not model._adapters.used
    model.adapt(lora(model, 1, 0), "one")
    held = sum(pool.a.nbytes + pool.b.nbytes for pool in model._adapters._joined.values())
    assert held == 5 * unit


@pytest.mark.parametrize("name", [EMBEDDING, OUTPUT])
def test_adapters_of_embedding_and_output_are_refused(name):
    model = CudaLlama(*weights(), 1 << 20)
    with pytest.raises(OutriderError, match="not served on a GPU"):
        model.adapter_bytes(lora(model, 2, 0, ends=(name,)))


def test_a_mix_of_more_than_the_largest_rank_is_refused():
    model = CudaLlama(*weights(), 1 << 20)
    assert model.adapter_bytes(lora(model, 256, 0)) == 16 * model.adapter_bytes(lora(model, 1, 0))
    with pytest.raises(OutriderError, match="a mix of rank 257 is not served on a GPU"):
        model.adapter_bytes(lora(model, 257, 0))


def test_the_target_writes_by_itself_what_it_would_write_step_by_step():
    pair = Pair(ranks=(8, 20), units=3)
    model, prompts = pair.ours, [pair.text(4 + n) for n in range(3)]
    owns = [other for _, other in pair.ready]
    model.forward(
        [Feed(n, prompt[:-1], adapter=own) for n, (prompt, own) in enumerate(zip(prompts, owns, strict=True))]
    )
    last = [prompt[-1] for prompt in prompts]
    (written,) = model.write(range(3), last, [None] * 3, [0.0] * 3, one_part(3), lambda: None, adapters=owns)
    for n, (prompt, own) in enumerate(zip(prompts, owns, strict=True)):
        tokens = list(prompt)
        for _ in range(3):
            logits = model.forward([Feed(10 + n, tokens[model.length(10 + n) :], adapter=own)])[0].logits
            tokens.append(int(logits[-1].argmax()))
        assert tokens[len(prompt) :] == written.tokens[:, n].tolist()


def test_the_first_layers_run_the_same_adapters():
    pair = Pair(ranks=(8, 40), layers=2)
    part, plain = pair.ours.first(1), pair.plain.first(1)
    for own, other in pair.ready:
        feed = [Feed(7, [1, 2, 3], adapter=own)], [Feed(7, [1, 2, 3], adapter=other)]
        one, two = plain.forward(feed[0])[0].logits, part.forward(feed[1])[0].logits
        assert torch.allclose(one, two, atol=1e-4 * one.abs().max())
        plain.free(7), part.free(7)
