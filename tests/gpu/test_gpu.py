"""On a GPU: the kernels against plain torch, graphs on and off, every drafter, same seed, and memory that comes back.

Run with one command: PYTHONPATH=src python -m pytest tests/gpu -m gpu -q -p no:cacheprovider
"""

import random
from dataclasses import replace

import pytest
import torch
from cuda_models import cuda_model, weights

from outrider import drafters
from outrider.backends.local import Local
from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import verify
from outrider.core.verify_batch import Case, verify_batch
from outrider.drafters.base import BuildContext
from outrider.drafters.heads import files as heads
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed
from outrider.models.llama import Llama
from outrider.train import eagle, medusa, objective
from outrider.train.data.batches import BatchOrder
from outrider.train.data.conversations import WrittenText
from outrider.train.data.corpus import Corpus
from outrider.train.forward import block, can_fuse, fused_blocks
from outrider.train.optimiser import Optimiser
from outrider.train.step import RECORD_AT, GradientStep
from outrider.train.teacher import Teacher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {
    "llama": {},
    "bias": {"bias": True},
    "norms": {"norms": True},
    "window": {"window": 80},
    "odd sizes": {"head_dim": 48, "hidden": 80, "inner": 72},
    "one key head": {"heads": 7, "kv_heads": 1},
}
SPECS = [
    "none",
    "ngram",
    "layer_skip:layers=1",
    "draft_model:model=small",
    "draft_model:model=small,greedy=true",
    "oracle",
    "eagle:head={eagle}",
    "eagle:head={eagle},tree=16",
    "eagle:head={eagle},tree=12,lookup=3",
    "medusa:head={medusa}",
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Untrained heads of the model that `cuda_model` makes, by kind."""
    model = cuda_model()
    torch.manual_seed(0)
    made = {"eagle": eagle.fresh(model), "medusa": medusa.fresh(model)}
    found = {kind: tmp_path_factory.mktemp(kind) for kind in made}
    for kind, head in made.items():
        heads.write(head, found[kind], model, dtype=torch.float32)
    return found


TREE = Draft((5, 6, 7, 8, 9), (-1, -1, 0, 0, 3))


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_and_graphs_equal_plain_torch(shape):
    reference = Llama(*weights(**SHAPES[shape]))
    graphs, eager = cuda_model(**SHAPES[shape]), cuda_model(graphs=False, **SHAPES[shape])
    models, luck = (reference, graphs, eager), random.Random(1)

    def text(count):
        return [luck.randrange(300) for _ in range(count)]

    def run(feeds, layers=()):
        for plain, first, second in zip(*(model.forward(feeds, layers) for model in models), strict=True):
            scale = plain.logits.abs().max().item()
            assert (plain.logits - first.logits).abs().max().item() < 5e-4 * scale
            assert torch.equal(first.logits, second.logits)
            if layers:
                assert (plain.hidden - first.hidden).abs().max().item() < 1e-2

    run([Feed(1, text(40)), Feed(2, text(3))])
    run([Feed(1, text(1), TREE), Feed(2, text(1), Draft.chain((1, 2, 3)))], (0, 1))
    for model in models:
        model.crop(1, 41, (0, 3, 4))
        model.crop(2, 4, (0,))
    run([Feed(1, text(1)), Feed(2, text(2)), Feed(3, text(5))])
    run([Feed(1, text(70)), Feed(4, text(30), TREE)], (1,))
    for model in models:
        model.crop(4, 30, (1,))
    run([Feed(4, text(1)), Feed(1, text(1))])
    run([Feed(1, text(230)), Feed(4, text(1))])
    run([Feed(1, text(1), TREE), Feed(4, text(1))])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seen", [50, 125, 250, 505, 700])
def test_a_row_does_not_depend_on_its_company_even_in_bfloat16(seen, head_dim):
    model = cuda_model(dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=head_dim, hidden=512, inner=1024)
    luck = random.Random(2)
    text = [luck.randrange(300) for _ in range(seen + 16)]
    for id in range(3):
        model.forward([Feed(id, text[:seen])])
    coming = text[seen:]
    alone = torch.cat([model.forward([Feed(0, [token])])[0].logits.clone() for token in coming])
    chain = model.forward([Feed(1, coming[:1], Draft.chain(coming[1:]))])[0].logits.clone()
    company = [Feed(2, coming[:1], Draft.chain(coming[1:])), Feed(9, [5], Draft.chain([7] * 40))]
    assert torch.equal(alone, chain)
    assert torch.equal(chain, model.forward(company)[0].logits)


def engine(spec, model, batch=8, piece=64, policy=None):
    small = cuda_model(seed=3)
    small.weights.embedding.weight.copy_(model.weights.embedding.weight)
    drafter = drafters.build(spec, BuildContext(model, lambda name, quantize: small))
    return Engine(model, drafter, Limits(batch, piece), policy)


def answers(spec, params, count=8, model=None, predictions=None, rule="rejection"):
    model = model or cuda_model()
    run = engine(spec, model)
    luck = random.Random(4)
    seqs = []
    for id in range(count):
        prompt = [luck.randrange(20) for _ in range(3 + 17 * id)]
        mine = replace(params, seed=None if params.seed is None else params.seed + id)
        expected = tuple(predictions[id]) if predictions else ()
        seqs.append(Sequence(id, prompt, mine, dice=Dice(mine.seed or id), prediction=expected, rule=rule))
        run.add(seqs[-1])
    while run.busy:
        run.step()
    assert model._pages.free_count == model._pages.count - 1, "pages were lost"
    return [[token.id for token in seq.output] for seq in seqs]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("params", [SamplingParams(40), SamplingParams(40, temperature=0.9, seed=7),
                                    SamplingParams(40, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=3),
                                    SamplingParams(40, repetition_penalty=1.3, logit_bias={5: -3.0})],
                         ids=["greedy", "seeded", "cut", "adjusted"])  # fmt: skip
def test_every_drafter_writes_what_plain_decoding_writes(spec, params, folders):
    plain = answers("none", params)
    assert answers(spec.format(**folders), params, predictions=plain) == plain


def test_graphs_on_and_off_write_the_same():
    params = SamplingParams(40, temperature=0.8, seed=5)
    assert answers("ngram", params) == answers("ngram", params, model=cuda_model(graphs=False))


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_a_large_batch_that_writes_ahead_equals_one_by_one(spec):
    """With a drafter it drafts for some steps and writes ahead for others, as either is tried."""
    params = SamplingParams(30, temperature=0.7, seed=1)
    model = cuda_model()
    run = engine(spec, model, batch=128, piece=4096, policy=DraftingPolicy())
    luck = random.Random(6)
    prompts = [[luck.randrange(300) for _ in range(luck.randrange(2, 90))] for _ in range(150)]
    seqs = [
        Sequence(
            i, list(p), replace(params, seed=i, max_tokens=5 + i % 90, temperature=0.7 if i % 2 else 0.0), dice=Dice(i)
        )
        for i, p in enumerate(prompts)
    ]
    for seq in seqs:
        run.add(seq)
    while run.busy:
        run.step()
    for seq, prompt in list(zip(seqs, prompts, strict=True))[::10]:
        alone = Sequence(1000 + seq.id, list(prompt), seq.params, dice=Dice(seq.id))
        one = engine("none", model)
        one.add(alone)
        while one.busy:
            one.step()
        assert alone.tokens == seq.tokens
    assert model._pages.free_count == model._pages.count - 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_verify_batch_equals_verify_on_the_device(rule):
    torch.manual_seed(0)
    params = SamplingParams(100, temperature=0.8, top_p=0.9)
    cases, rows = [], 0
    for id in range(40):
        draft = TREE if id % 2 else Draft.chain((1, 2, 3))
        if rule == "rejection" and id % 3 == 0:
            draft = replace(draft, probs=torch.softmax(torch.randn(len(draft), 50, device="cuda"), -1))
        cases.append(Case(Sequence(id, [1, 2, 3], params, dice=Dice(id), rule=rule), draft, rows))
        rows += 1 + len(draft)
    logits = torch.randn(rows, 50, device="cuda") * 2
    expected = [verify(c.seq, c.draft, logits[c.start : c.start + 1 + len(c.draft)]) for c in cases]
    assert verify_batch(cases, logits) == expected
    if rule == "coupled":
        assert verify_batch(cases, logits, chooser=cuda_model().choose) == expected


def test_a_shared_beginning_is_computed_once():
    model = cuda_model()
    beginning = [(7 * i) % 300 for i in range(100)]
    run = engine("none", model)

    def ask(id, end):
        seq = Sequence(id, [*beginning, *end], SamplingParams(8))
        run.add(seq)
        while run.busy:
            run.step()
        return [token.id for token in seq.output]

    first = ask(1, [5, 6])
    model.begin(2, [*beginning, 9])
    assert model.length(2) == 96  # three pages of 32
    model.free(2)
    assert ask(3, [5, 6]) == first


def test_cancel_gives_the_memory_back():
    model = cuda_model()
    run = engine("ngram", model)
    for id in range(4):
        run.add(Sequence(id, [1, 2, 3] * 20, SamplingParams(500)))
    for _ in range(3):
        run.step()
    assert len(run.scheduler.running) == 4
    for id in range(4):
        run.cancel(id)
    assert run.step() == []
    assert model._pages.free_count == model._pages.count - 1
    assert not run.busy


class Broken:
    """A tokenizer that fails when the text of a certain token is wanted."""

    chat_template = None

    def decode(self, ids, skip_special_tokens):
        if 7 in ids:
            raise ValueError("no such piece")
        return "".join(chr(97 + id % 26) for id in ids)


def test_streams_carry_every_token_and_one_that_fails_or_is_cancelled_leaves_the_others_alone():
    """Chunks are handed over while the next pass runs."""
    model = cuda_model()
    prompts = [[id, id + 1, 3] * 5 for id in range(6)]
    plain = [Sequence(id, list(prompt), SamplingParams(60)) for id, prompt in enumerate(prompts)]
    alone = engine("none", model)
    for seq in plain:
        alone.add(seq)
    while alone.busy:
        alone.step()
    backend = Local(engine("ngram", model), lambda spec: lambda: None, Broken())
    streams = [backend.submit(Request(prompt, params=SamplingParams(60), stream=True)) for prompt in prompts]
    streams[5].cancel()
    for seq, stream in zip(plain[:5], streams, strict=False):
        expected = [token.id for token in seq.output]
        got = []
        if 7 in expected:
            with pytest.raises(OutriderError, match="no such piece"):
                got += [token.id for chunk in stream for token in chunk.tokens]
            assert got == expected[: len(got)]
        else:
            got += [token.id for chunk in stream for token in chunk.tokens]
            assert got == stream.result().token_ids == expected
    assert streams[5].result().finish_reason == "cancelled"
    backend.close()
    assert model._pages.free_count == model._pages.count - 1


def test_the_fused_distance_equals_plain_torch():
    from outrider.train import kernels as fused  # needs triton

    torch.manual_seed(0)
    rows, words, size = 37, 5000, 64
    states, output = torch.randn(rows, size, device="cuda"), torch.randn(words, size, device="cuda") / 3
    weight = torch.rand(rows, device="cuda")
    chances = torch.softmax(torch.randn(rows, words, device="cuda") * 3, -1) * 0.9
    chances[::2].scatter_(1, (states @ output.T)[::2].argmax(1, True), 0.99)
    laws = objective.Laws(chances, chances.amax(-1))
    plain, other = ((states.clone().requires_grad_(), output.clone().requires_grad_()) for _ in range(2))
    losses, kept, hit = objective.measures(plain[0] @ plain[1].T, laws)
    (0.8 * (losses * weight).sum()).backward()
    loss, kept_too, hit_too = fused.distance(*other, laws.law, laws.best, weight, objective.VARIATION_WEIGHT)
    (0.8 * loss).backward()
    assert torch.allclose(loss, (losses * weight).sum(), rtol=1e-4)
    assert torch.allclose(kept, kept_too, atol=1e-4)
    assert torch.equal(hit, hit_too)
    assert 0 < int(hit.sum()) < rows
    for one, two in zip(plain, other, strict=True):
        assert (one.grad - two.grad).abs().max() < 1e-2 * one.grad.abs().max()


@pytest.mark.parametrize("ids", [None, [3, 1, 4999, 17]])
def test_the_fused_law_equals_plain_torch(ids):
    from outrider.train import kernels as fused  # needs triton

    chosen = None if ids is None else torch.tensor(ids, device="cuda")
    logits = torch.randn(5, 5000, device="cuda") * 4
    laws, best = fused.law(logits, chosen)
    whole = torch.softmax(logits, -1)
    assert torch.allclose(laws, whole if chosen is None else whole[:, chosen], rtol=1e-4, atol=1e-8)
    assert torch.allclose(best, whole.amax(-1), rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_fused_attention_equals_plain_torch(steps):
    torch.manual_seed(0)

    def parts(dtype):
        made = torch.Generator("cuda").manual_seed(1)
        return [
            torch.randn(2, 3, 70, 64, generator=made, device="cuda").to(dtype).requires_grad_()
            for _ in range(1 + 2 * steps)
        ]

    found = []
    for dtype in (torch.float32, torch.bfloat16):  # plain torch, and the kernels
        q, *rest = given = parts(dtype)
        out = eagle.attention_values(q, list(zip(rest[::2], rest[1::2], strict=True)), 0.125)
        out.float().square().sum().backward()
        found.append([out, *(part.grad for part in given)])
    for plain, other in zip(*found, strict=True):
        assert (plain - other.float()).abs().max() < 0.03 * plain.abs().max()


def test_the_teacher_with_kernels_reads_what_it_reads_without():
    config, made = weights(layers=3)
    tokens = torch.randint(300, (3, 41), device="cuda")
    x, (cos, sin) = made.embedding.rows(tokens), (part.cuda() for part in made.rope.tables(64))
    fast_ones = [each.clone() for each in fused_blocks(x, made.stack.layers, config, cos, sin)]
    assert can_fuse(made.stack.layers, config, x)
    for layer, other in zip(made.stack.layers, fast_ones, strict=True):
        x = block(x, layer, config, cos[:41], sin[:41])
        assert (x - other).abs().max() < 1e-3 * x.abs().max()


def lessons():
    """A head, its teacher, and batches of one shape and some others."""
    model = cuda_model(dtype=torch.bfloat16, heads=4, kv_heads=2, head_dim=32, hidden=128, inner=256)
    torch.manual_seed(0)
    head = eagle.fresh(model).to("cuda")
    luck = random.Random(3)
    texts = [WrittenText([luck.randrange(40) for _ in range(30 + 10 * (i % 3))], 12) for i in range(96)]
    order = BatchOrder(Corpus.of(texts), 512, 64, 0, torch.device("cuda"))
    return head, GradientStep(head, Teacher(model, head.reads, 64), objective.Comparison(3)), order


def test_a_training_step_as_a_graph_has_the_gradients_of_its_kernels_one_by_one():
    head, grade, order = lessons()
    optimiser, found, batch = Optimiser(head, 0.01, 0.001), [], next(order.batches(0))
    for _ in range(RECORD_AT + 1):
        torch._foreach_zero_(optimiser._grads)
        loss = float(grade(batch)["loss"])
        found.append((loss, [grad.clone() for grad in optimiser._grads]))
    assert grade._graphs
    assert found[0][0] == found[-1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[-1][1], strict=True))
    assert any(bool(grad.any()) for grad in found[0][1])


def test_training_on_the_device_lowers_the_loss():
    head, grade, order = lessons()
    optimiser, losses = Optimiser(head, 0.01, 0.001), []
    for batch, _ in zip(order.batches(0), range(60), strict=False):
        losses.append(float(grade(batch)["loss"]))
        optimiser.step(1.0)
    assert optimiser._graph is not None
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
