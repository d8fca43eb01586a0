"""Adapters on a GPU: a row has the same bits alone and in any company, a text is the same with every drafter, adapters
come and go without a graph being captured again, and the text is that of merged weights.

PYTHONPATH=src python -m pytest tests/gpu/test_adapters.py -m gpu -q -p no:cacheprovider
"""

import random
from dataclasses import replace

import pytest
import torch
from pool_adapters import lora, weights
from tiny import eagle_head, medusa_head

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed, one_part
from outrider.models.linear import Dense
from outrider.models.llama_weights import MATRICES
from outrider.models.stack import TorchStack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 997
BF16 = torch.bfloat16
SHAPES = {
    "smollm2": dict(heads=9, kv=3, d=64, hidden=576, inner=1536, dtype=BF16),
    "8b": dict(heads=32, kv=8, d=128, hidden=4096, inner=14336, dtype=BF16),
    "odd": dict(heads=7, kv=1, d=80, hidden=560, inner=1000, dtype=BF16),
    "float32": dict(heads=8, kv=2, d=64, hidden=512, inner=1024, dtype=torch.float32),
}
RANKS = (1, 8, 16, 40, 64, 256)


def cuda(memory=1 << 30, units=40, layers=2, **sizes):
    from outrider.models.cuda.model import CudaLlama

    made = CudaLlama(*weights(layers=layers, vocab=VOCAB, device="cuda", context=4096, **sizes), memory)
    made.reserve_adapters(units * made.adapter_bytes(lora(made, 1, 0)))
    return made


@pytest.fixture(scope="module", params=SHAPES)
def made(request):
    model = cuda(**SHAPES[request.param])
    yield model, [None, *(model.adapt(lora(model, rank, rank), str(rank)) for rank in RANKS)]
    torch.cuda.empty_cache()


def text(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def logits(model, feeds):
    """Of the first feed; every feed is then forgotten by the length it had."""
    held = [(feed.id, model.length(feed.id)) for feed in feeds]
    out = model.forward(feeds)[0].logits.clone()
    for id, length in held:
        model.crop(id, length)
    return out


def forget(model):
    for id in range(300):
        model.free(id)


@pytest.mark.parametrize("own", range(1 + len(RANKS)))
def test_a_row_has_the_same_bits_in_any_company(made, own):
    model, ready = made
    forget(model)
    adapter = ready[own]
    model.forward([Feed(1, text(300), adapter=adapter)])
    alone = logits(model, [Feed(1, [5], adapter=adapter)])
    assert alone.isfinite().all()
    for rows in (1, 7, 63, 64, 200, 511, 2100):
        for other in (0, own, 1, 5):
            feeds = [Feed(1, [5], adapter=adapter), Feed(2, text(rows, 1), adapter=ready[other])]
            assert torch.equal(alone, logits(model, feeds)), (rows, other)
    for count in (30, 63, 100, 250):
        many = [Feed(10 + id, text(1 + id % 2, id), adapter=ready[id % len(ready)]) for id in range(count)]
        many.insert(0, Feed(1, [5], adapter=adapter))
        assert torch.equal(alone, logits(model, many)), count
        assert torch.equal(alone, logits(model, many)), "as a graph"


@pytest.mark.parametrize("shape", ["smollm2", "odd"])
def test_a_row_has_the_same_bits_among_many_adapters(shape):
    """More units than a product reads at once, of as many adapters as there are rows."""
    model = cuda(units=70, **SHAPES[shape])
    ready = [model.adapt(lora(model, 16, seed), str(seed)) for seed in range(64)]
    alone = [logits(model, [Feed(1, [5], adapter=own)]) for own in ready]
    for count in (16, 17, 40, 64):
        for begin in (0, 64 - count):
            feeds = [Feed(100 + id, [5], adapter=own) for id, own in enumerate(ready[begin : begin + count])]
            for _ in range(2):  # kernel by kernel, as a graph
                found = [out.logits.clone() for out in model.forward(feeds)]
                forget(model)
                for number, one in enumerate(found):
                    assert torch.equal(one, alone[begin + number]), (count, begin + number)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("own", [1, 4, 6])
@pytest.mark.parametrize("size", [1, 37, 128, 512])
def test_a_prompt_in_any_chunks_has_the_same_bits(made, size, own):
    model, ready = made
    forget(model)
    prompt, adapter = text(600), ready[own]
    model.forward([Feed(1, prompt, adapter=adapter)])
    begin = 560 if size == 1 else 0
    if begin:
        model.forward([Feed(2, prompt[:begin], adapter=adapter)])
    for start in range(begin, 600, size):
        others = Feed(3, text(1 + start % 90, start), adapter=ready[start % len(ready)])
        model.forward([others, Feed(2, prompt[start : start + size], adapter=adapter)])
        model.free(3)
    one, two = (logits(model, [Feed(id, [7], adapter=adapter)]) for id in (1, 2))
    assert torch.equal(one, two)


TREE = Draft(tuple(range(20, 32)), (-1, -1, 0, 0, 3, 4, 1, 6, 5, 8, 9, 10))


@pytest.mark.parametrize("own", [0, 2, 4])
def test_a_node_of_a_tree_has_the_bits_of_a_committed_token(made, own):
    model, ready = made
    forget(model)
    adapter = ready[own]
    model.forward([Feed(1, text(253), adapter=adapter)])
    tree = logits(model, [Feed(1, [3], TREE, adapter)])
    company = [Feed(1, [3], TREE, adapter), Feed(2, text(9, 2), Draft.chain([1] * 30), ready[5]), Feed(4, text(300, 4))]
    assert torch.equal(tree, logits(model, company))
    for node in range(len(TREE)):
        path = [node]
        while TREE.parents[path[0]] >= 0:
            path.insert(0, TREE.parents[path[0]])
        plain = logits(model, [Feed(1, [3, *(TREE.tokens[each] for each in path)], adapter=adapter)])
        assert torch.equal(tree[1 + node], plain[-1]), node


def test_what_the_device_writes_by_itself_has_the_bits_of_single_passes(made):
    model, ready = made
    forget(model)
    count, owns = 20, [ready[id % len(ready)] for id in range(20)]
    model.forward([Feed(id, text(40 + id, id), adapter=owns[id]) for id in range(count)])
    start, greedy = ([5] * count, [None] * count, [0.0] * count), (one_part(12), lambda: None)
    (part,) = model.write(range(count), *start, *greedy, adapters=owns)
    written = part.tokens.T.tolist()
    forget(model)
    for id in range(count):
        tokens = [*text(40 + id, id), 5]
        for _ in range(12):
            found = model.forward([Feed(id, tokens[model.length(id) :], adapter=owns[id])])[0].logits
            tokens.append(int(found[-1].argmax()))
        assert tokens[-12:] == written[id], id


def merged(config, made, adapter):
    """The same model with an adapter's sums in its weights."""
    layers = []
    for number, layer in enumerate(made.stack.layers):
        own = {}
        for field, names in MATRICES.items():
            old = getattr(layer, field)
            delta = torch.cat([adapter.pairs[f"model.layers.{number}.{name}"].delta for name in names])
            own[field] = Dense((old.weight.float() + delta.to(old.weight.device)).to(old.weight.dtype), old.bias)
        layers.append(replace(layer, **own))
    return config, replace(made, stack=TorchStack(config, layers))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-3), (BF16, 0.06)])
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_the_logits_are_those_of_merged_weights(rank, dtype, near):
    from outrider.models.cuda.model import CudaLlama

    sizes = {**SHAPES["smollm2"], "dtype": dtype}
    model = cuda(**sizes)
    adapter = lora(model, rank, rank)
    other = CudaLlama(*merged(model.config, model.weights, adapter), 1 << 28)
    ready = model.adapt(adapter, "it")
    for rows in (5, 100):
        ours = model.forward([Feed(rows, text(rows), adapter=ready), Feed(7, text(9))])[0].logits[-1]
        theirs, base = (m.forward([Feed(rows + 1, text(rows))])[0].logits[-1] for m in (other, model))
        assert (ours - theirs).norm() < near * theirs.norm()
        assert (base - theirs).norm() > 5 * near * theirs.norm(), "the adapter changes too little to be seen"


def test_adapters_come_and_go_without_a_graph_captured_again():
    model = cuda(**SHAPES["smollm2"], units=4)
    first = model.adapt(lora(model, 64, 1), "first")
    feeds = [Feed(1, text(3), adapter=first), Feed(2, text(4))]
    before = [logits(model, feeds) for _ in range(3)][-1]
    graphs = {shape: run.graph for shape, run in model._passes._passes.items() if shape.adapted}
    assert graphs
    assert all(graph is not None for graph in graphs.values())
    model.release(first)
    second, third = model.adapt(lora(model, 40, 2), "second"), model.adapt(lora(model, 5, 3), "third")
    alone = cuda(**SHAPES["smollm2"], units=4)
    wanted = logits(alone, [Feed(1, text(3), adapter=alone.adapt(lora(alone, 40, 2), "second"))])
    found = logits(model, [Feed(1, text(3), adapter=second), Feed(2, text(4), adapter=third)])
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before)
    model.release(second)
    model.release(third)
    again = model.adapt(lora(model, 64, 1), "first")
    assert torch.equal(before, logits(model, [Feed(1, text(3), adapter=again), Feed(2, text(4))]))
    for shape, graph in graphs.items():
        assert model._passes._passes[shape].graph is graph


SPECS = (
    "none",
    "ngram",
    "layer_skip:layers=1",
    "eagle:head=it",
    "eagle:head=it,tree=16",
    "medusa:head=three",
    "eagle:head=it,tree=16+ngram",
    "auto:head=it",
)


@pytest.fixture(scope="module")
def small():
    model = cuda(heads=6, kv=2, d=32, hidden=64, inner=96, dtype=BF16, memory=1 << 26)
    torch.manual_seed(7)
    three = medusa_head(model).requires_grad_(False)
    three.tree = ((0,), (1,), (0, 0), (2,), (0, 1), (0, 0, 0), (1, 0))
    heads = {"it": eagle_head(model).requires_grad_(False), "three": three}
    return model, heads, [None, *(model.adapt(lora(model, rank, rank, strength=1.0), str(rank)) for rank in RANKS)]


def sequences(count, ready, sampled):
    luck, made = random.Random(9), []
    for id in range(count):
        prompt = [luck.randrange(12) for _ in range(2 + luck.randrange(70))] * 2
        params = SamplingParams(40 - id % 7, 0.7, seed=id) if sampled and id % 3 == 0 else SamplingParams(40 - id % 7)
        made.append(Sequence(id, prompt, params, dice=Dice(id), adapter=ready[id % len(ready)]))
    return made


def drain(run, seqs):
    for seq in seqs:
        run.add(seq)
    while run.busy:
        run.step()
    assert run.model.free_pages == run.model._pages.count - 1, "pages were lost"
    return [[token.id for token in seq.output] for seq in seqs]


def engine(spec, model, heads):
    return Engine(model, drafters.build(spec, BuildContext(model, load=None, heads=heads)), Limits(128, 4096))


@pytest.mark.parametrize("spec", SPECS)
def test_a_text_is_the_same_with_every_drafter_alone_and_in_company(spec, small):
    model, heads, ready = small
    plain = engine("none", model, {})
    wanted = [drain(plain, [seq])[0] for seq in sequences(20, ready, spec != "medusa:head=three")]
    bare = [drain(plain, [seq])[0] for seq in sequences(20, [None], spec != "medusa:head=three")]
    assert sum(one != two for one, two in zip(wanted, bare, strict=True)) >= 12, "the adapters change nothing"
    run = engine(spec, model, heads)
    for _ in range(2):  # kernel by kernel and captured; prompts fresh and cached
        assert drain(run, sequences(20, ready, spec != "medusa:head=three")) == wanted
