"""On a GPU a row has the same bits whatever shares its pass: any number of rows, any chunks of a prompt, chains, trees,
shared beginnings, long neighbours.

Run with one command: PYTHONPATH=src python -m pytest tests/gpu -m gpu -q -p no:cacheprovider
"""

import random

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams, warp_batch
from outrider.models.base import Feed
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 997

SHAPES = {
    "smollm2": dict(heads=9, kv=3, d=64, hidden=576, inner=1536),
    "qwen2": dict(heads=12, kv=2, d=128, hidden=1536, inner=8960, bias=True),
    "qwen3": dict(heads=16, kv=8, d=128, hidden=2048, inner=6144, norms=True),
    "8b": dict(heads=32, kv=8, d=128, hidden=4096, inner=14336),
    "window": dict(heads=8, kv=2, d=64, hidden=512, inner=1024, window=300),
    "odd": dict(heads=7, kv=1, d=80, hidden=560, inner=1000),
    "float16": dict(heads=8, kv=2, d=64, hidden=512, inner=1024, dtype=torch.float16),
    "float32": dict(heads=8, kv=2, d=64, hidden=512, inner=1024, dtype=torch.float32),
}


def model(heads, kv, d, hidden, inner, bias=False, norms=False, window=None, dtype=torch.bfloat16, layers=2,
          context=8192, memory=1 << 30):  # fmt: skip
    from outrider.models.cuda.model import CudaLlama

    made = torch.Generator("cuda").manual_seed(0)

    def rand(*sizes):
        """Rows keep about the size of what they are made from."""
        return (torch.randn(*sizes, generator=made, device="cuda") / sizes[-1] ** 0.5).to(dtype)

    def layer():
        rows = (heads + 2 * kv) * d
        return Layer(
            1 + rand(hidden),
            Dense(rand(rows, hidden), rand(rows) if bias else None),
            Dense(rand(hidden, heads * d)),
            1 + rand(hidden),
            Dense(rand(2 * inner, hidden)),
            Dense(rand(hidden, inner)),
            1 + rand(d) if norms else None,
            1 + rand(d) if norms else None,
        )

    config = LlamaConfig(hidden, heads, kv, d, 1e-5, window, vocab_size=VOCAB, num_layers=layers, context=context)
    rope = Rope(1.0 / 10_000 ** (torch.arange(0, d, 2).float() / d))
    stack = TorchStack(config, [layer() for _ in range(layers)])
    weights = Weights(Dense(8 * rand(VOCAB, hidden)), stack, 1 + rand(hidden), Dense(rand(VOCAB, hidden)), rope)
    return CudaLlama(config, weights, memory)


@pytest.fixture(scope="module", params=SHAPES)
def made(request):
    yield model(**SHAPES[request.param])
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
    for id in range(200):
        model.free(id)


@pytest.mark.parametrize("held", [40, 255, 700])
def test_a_row_has_the_same_bits_in_a_pass_of_any_size(made, held):
    forget(made)
    made.forward([Feed(1, text(held))])
    alone = logits(made, [Feed(1, [5])])
    assert alone.isfinite().all()
    for rows in (1, 2, 7, 63, 64, 512, 2047, 4095):
        assert torch.equal(alone, logits(made, [Feed(1, [5]), Feed(2, text(rows, 1))])), rows
    many = [Feed(1, [5]), *(Feed(id, text(1 + id % 3, id)) for id in range(10, 110))]
    assert torch.equal(alone, logits(made, many))


@pytest.mark.parametrize("size", [1, 37, 128, 512])
def test_a_prompt_in_any_chunks_gives_the_same_keys_values_and_logits(made, size):
    forget(made)
    prompt = text(600)
    made.forward([Feed(1, prompt)])
    step = max(size, 1)
    begin = 560 if size == 1 else 0
    if begin:
        made.forward([Feed(2, prompt[:begin])])
    for start in range(begin, 600, step):
        made.forward([Feed(2, prompt[start : start + step]), Feed(3, text(1 + start % 90, start))])
    pages = made._pages
    for place in range(0, 600, 7):
        one, two = (divmod(pages.flat(id, place), pages.size) for id in (1, 2))
        assert torch.equal(made._cache[:, :, one[0], :, one[1]], made._cache[:, :, two[0], :, two[1]]), place
    assert torch.equal(logits(made, [Feed(1, [7])]), logits(made, [Feed(2, [7])]))


TREE = Draft(tuple(range(20, 32)), (-1, -1, 0, 0, 3, 4, 1, 6, 5, 8, 9, 10))


@pytest.mark.parametrize("held", [30, 121, 126, 127, 250, 253, 255, 256, 510, 640])
def test_a_node_of_a_tree_has_the_bits_of_a_committed_token(made, held):
    """Wherever its ancestors lie in the cache, and across the boundaries of chunks and pages."""
    forget(made)
    prompt = text(held)
    made.forward([Feed(1, prompt)])
    tree = logits(made, [Feed(1, [3], TREE)])
    company = [Feed(1, [3], TREE), Feed(2, text(9, 2), Draft.chain([1] * 30)), Feed(4, text(300, 4))]
    assert torch.equal(tree, logits(made, company))
    for node in range(len(TREE)):
        path = [node]
        while TREE.parents[path[0]] >= 0:
            path.insert(0, TREE.parents[path[0]])
        plain = logits(made, [Feed(1, [3, *(TREE.tokens[each] for each in path)])])
        assert torch.equal(tree[1 + node], plain[-1]), node


def test_a_kept_branch_goes_on_as_if_it_had_been_written_plainly(made):
    forget(made)
    for held in (124, 250):
        made.forward([Feed(1, text(held))])
        made.forward([Feed(1, [3], TREE)])
        made.crop(1, held + 1, (0, 3, 4, 5))
        made.forward([Feed(2, [*text(held), 3, 20, 23, 24, 25])])
        assert torch.equal(logits(made, [Feed(1, [9])]), logits(made, [Feed(2, [9])]))
        forget(made)


def test_a_shared_beginning_is_the_same_numbers(made):
    forget(made)
    prompt = text(500, 8)
    made.forward([Feed(1, prompt)])
    fresh = logits(made, [Feed(1, [4])])
    made.seen(1, prompt)
    made.free(1)
    made.begin(2, prompt)
    assert made.length(2) == 480
    made.forward([Feed(2, prompt[480:])])
    assert torch.equal(fresh, logits(made, [Feed(2, [4])]))


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_long_neighbour_changes_nothing(name):
    """Contexts that are no power of two, beyond 8,192 and 32,768 tokens; drafts across these boundaries."""
    made = model(**SHAPES[name], layers=1, context=40_960, memory=2 << 30)
    for start in range(0, 33_000, 4096):
        made.forward([Feed(9, text(min(4096, 33_000 - start), start))])
    for held in (100, 8_188, 16_380, 32_766):
        while made.length(1) < held:
            made.forward([Feed(1, text(min(2000, held - made.length(1)), made.length(1)))])
        coming = text(8, held)
        plain = []
        for token in coming:
            plain.append(made.forward([Feed(1, [token])])[0].logits.clone())
        made.crop(1, held)
        chain = Draft.chain(coming[1:])
        assert torch.equal(torch.cat(plain), logits(made, [Feed(1, coming[:1], chain)]))
        assert torch.equal(torch.cat(plain), logits(made, [Feed(1, coming[:1], chain), Feed(9, [1])]))


def test_attention_counts_every_key_once():
    """Against plain torch, at a length that is no power of two, in one pass and token by token."""
    from outrider.models.llama import Llama

    for shape in ("float32", "window"):
        made = model(**{**SHAPES[shape], "dtype": torch.float32}, layers=1, context=4096)
        plain = Llama(made.config, made.weights)
        prompt = text(3000)
        for feeds in ([Feed(1, prompt)], [Feed(1, [5])], [Feed(1, [6], TREE)]):
            one, two = (each.forward(feeds)[0].logits for each in (made, plain))
            assert (one - two).abs().max() < 1e-3 * two.abs().max()


@pytest.mark.parametrize("vocab", [1003, 49_152])
def test_a_law_does_not_depend_on_how_many_there_are(vocab):
    scores = torch.randn(300, vocab, generator=torch.Generator("cuda").manual_seed(0), device="cuda") * 3
    params = [SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01), SamplingParams(temperature=0.7)]
    whole = warp_batch(scores, [params[row % 2] for row in range(300)])
    for rows in (1, 2, 17, 100):
        part = warp_batch(scores[40 : 40 + rows], [params[row % 2] for row in range(rows)])
        assert torch.equal(part, whole[40 : 40 + rows])
