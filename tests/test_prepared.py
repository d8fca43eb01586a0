"""No first request meets a kernel that loading has not compiled: launches are recorded at SmolLM2's sizes, not run."""

import contextlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from pool_adapters import lora
from recorded_device import recorded_device

from outrider import drafters
from outrider.bench.gpu_shapes import EPS, SHAPES, head_sizes, random_eagle, read_layers
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.block.head import BlockConfig, BlockHead
from outrider.drafters.draft_model import READ_AT_ONCE
from outrider.drafters.history.store import HistoryStore
from outrider.drafters.medusa.head import MedusaConfig, MedusaHead
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels run")

SHAPE = replace(SHAPES["smollm2"], layers=4)  # the kernels of all layers but the first are the same
SMALL = replace(SHAPE, hidden=384, inner=1024, heads=6, kv_heads=3, layers=2)
LIMITS = Limits(256)
TOKENS = 12  # that each request writes: some rounds, and some steps
LENGTHS = (1, 5, 20, 40, 70, 100, 200, 300, 600, 1100, 1900)  # tokens of prompts
BATCHES = (4, 16, 64)
GREEDY = SamplingParams(max_tokens=TOKENS)
SAMPLED = {
    "seeded": replace(GREEDY, temperature=0.8, seed=1),
    "rejection": replace(GREEDY, temperature=0.8),
    "seeded and cut": replace(GREEDY, temperature=0.8, top_p=0.9, seed=1),
    "cut": replace(GREEDY, temperature=0.8, top_p=0.9),
}
SPECS = {
    "none": "none",
    "ngram": "ngram",
    "medusa": "medusa:head=three",
    "eagle": "eagle:head=it",
    "eagle:tree=31": "eagle:head=it,tree=31",
    "auto": "auto:head=it",
    "block": "block:head=slots,tree=16",
    "draft_model": "draft_model:model=small",
}


def model(shape):
    """All weights are 0."""
    from outrider.models.cuda.model import CudaLlama

    def zeros(*sizes):
        return torch.zeros(*sizes, dtype=torch.bfloat16)

    size, inner, rows = shape.hidden, shape.inner, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = Layer(
        zeros(size), Dense(zeros(rows, size)), Dense(zeros(size, shape.heads * shape.head_dim)), zeros(size),
        Dense(zeros(2 * inner, size)), Dense(zeros(size, inner)),
    )  # fmt: skip
    sizes = size, shape.heads, shape.kv_heads, shape.head_dim, EPS, None
    config = LlamaConfig(*sizes, vocab_size=shape.vocab, num_layers=shape.layers, context=shape.context)
    rope = Rope(1.0 / shape.theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    stack, table = TorchStack(config, [layer] * shape.layers), Dense(zeros(shape.vocab, size))
    return CudaLlama(config, Weights(table, stack, zeros(size), table, rope), 1 << 29)


def heads(spec):
    if "three" in spec:
        few = 64  # tokens that it writes: its own products are torch's, and run
        medusa = MedusaHead(MedusaConfig(SHAPE.hidden, SHAPE.vocab, few, 3), torch.arange(few))
        medusa.tree = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
        return {"three": medusa.requires_grad_(False)}
    if "slots" in spec:
        config = BlockConfig(*head_sizes(SHAPE), read_layers(SHAPE, 3), context=SHAPE.context)
        return {"slots": BlockHead(config, torch.arange(SHAPE.draft_vocab)).requires_grad_(False)}
    return {"it": random_eagle(SHAPE)} if "it" in spec else {}


def draft_model(name, quantize):
    """As `build.py` loads it."""
    made = model(SMALL)
    made.prepare(rows=READ_AT_ONCE)
    return made


class Requests:
    """An engine as `build.py` makes it, and what its requests launch that loading has not."""

    def __init__(self, launches, spec, adapted=False):
        self._launches, self.model = launches, model(SHAPE)
        given = dict(heads=heads(spec), histories=HistoryStore(1 << 12), cache_bytes=1 << 28)
        self._drafter = drafters.build(spec, BuildContext(self.model, draft_model, **given))
        if adapted:
            self.model.reserve_adapters(1 << 26)
        self.model.prepare(self._drafter.layers, LIMITS.chunk + LIMITS.batch, adapted)
        self._known, self._asked, self.missed = set(launches.keys), 0, {}

    def ask(self, what, count, lengths, params=GREEDY, policy=None, adapter=None):
        engine = Engine(self.model, self._drafter, LIMITS, policy)
        for number in range(count):
            self._asked += 1
            length = lengths[number % len(lengths)]
            tokens = [(self._asked * (place + 7)) % 1000 for place in range(length)]  # no two prompts begin alike
            seq = Sequence(self._asked, tokens, params, dice=Dice(self._asked), adapter=adapter)
            engine.add(seq)
        while engine.busy:
            engine.step()
        assert not engine._pool._failed, "a drafter has failed"
        if new := set(self._launches.keys) - self._known:
            self.missed[what] = sorted(new)
            self._known |= new


@contextlib.contextmanager
def requests(spec, **more):
    with recorded_device() as launches:
        yield Requests(launches, spec, **more)


@pytest.mark.parametrize("name", SPECS)
def test_first_requests_meet_no_kernel_that_is_not_compiled(name):
    with requests(SPECS[name]) as made:
        for length in LENGTHS:
            made.ask(f"a prompt of {length}", 1, (length,))
        for count in BATCHES:
            made.ask(f"{count} at once", count, (30, 60, 100, 150))
            made.ask(f"{count} long ones at once", count, (600, 1100))
            for kind, params in SAMPLED.items():
                made.ask(f"{count} {kind} at once", count, (60, 100), params)
        for kind, params in SAMPLED.items():
            made.ask(f"one {kind}", 1, (60,), params)
        made.ask("256 at once", 256, (60, 100), policy=DraftingPolicy())
        assert made.missed == {}


def test_first_requests_with_adapters_meet_no_kernel_that_is_not_compiled():
    with requests("none", adapted=True) as made:
        ready = made.model.adapt(lora(made.model, 16, 1), "a")
        for length in LENGTHS:
            made.ask(f"a prompt of {length}", 1, (length,), adapter=ready)
        for count in BATCHES:
            made.ask(f"{count} at once", count, (60, 100), adapter=ready)
        assert made.missed == {}
