"""EAGLE on a GPU: the kernels, interpreted on a CPU, say and draft what the head in torch does."""

import functools

import pytest
import torch
from eagle_forms import at_work
from looped import head, target
from tiny import VOCAB, eagle_head, family, outputs, plainly, prompts, run

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.eagle.device_kernels import Growth, SequenceField
from outrider.drafters.eagle.device_runner import DeviceRunner
from outrider.drafters.eagle.drafter import Eagle, start
from outrider.drafters.eagle.runner import DraftRequest, DraftShape
from outrider.drafters.eagle.torch_runner import DenseRunner
from outrider.drafters.eagle.tree import grow
from outrider.drafters.heads.chooser import BLUR
from outrider.models.cuda.model import PAGE

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

CHAIN = DraftShape(3, 1, 3, 1.0, 0.0)
TREE = DraftShape(3, 3, 9, 1.0 / 0.75, 0.02)
DEEP = DraftShape(8, 2, 20, 4.0, 0.0)  # of a sharp law, so that its likely paths are long
TEXTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (18, 37, 4)]


def device(form, shape):
    return DeviceRunner(head(form), target(), target().capacity, shape)


@pytest.mark.parametrize("form", ["normed together", "all its own"])
def test_a_head_on_a_device_says_what_it_says_in_torch(form):
    model, texts = family("llama")[1], [text[:8] for text in TEXTS[:2]]
    wanted = at_work(DenseRunner(head(form), model), head(form), model, texts, (3, 3))
    said = at_work(device(form, CHAIN), head(form), model, texts, (3, 3))
    for ours, torchs in zip(said, wanted, strict=True):
        torch.testing.assert_close(ours, torchs, atol=1e-3, rtol=1e-4)


@functools.cache
def shown(layers):
    """Some states for all texts, as if a target had shown them."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(len(text), layers, target().config.hidden_size, generator=made) for text in TEXTS]


def in_torch(own, shape, sizes):
    """The same drafts by the code that a CPU runs."""
    runner, ids = DenseRunner(own, family("llama")[1]), range(len(TEXTS))
    hidden = torch.cat([part[:-1] for part in shown(len(own.reads))])
    ahead = runner.extend(ids, [text[1:] for text in TEXTS], hidden)

    def offers(logits, paths, depth):
        best = torch.log_softmax(logits * shape.sharpness, -1).topk(shape.width)
        return own.draft_ids[best.indices], best.values

    return grow(runner, ids, ahead, offers, shape.depth, sizes, shape.stop)


def paths(grown):
    """Probability by path from the root."""
    named = []
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        assert parent < len(named)
        named.append((*(named[parent] if parent >= 0 else ()), token))
    return dict(zip(named, grown.acceptance, strict=True))


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("eagle-3", TREE),
        ("eagle-3", DEEP),
        ("cut, two layers, normed output", CHAIN),
        ("cut, two layers, normed output", TREE),
    ],
    ids=["tree", "tree of 8 levels", "chain of a head with two layers", "its tree"],
)
def test_drafts_that_grow_on_the_device_are_those_that_grow_on_the_host(form, shape):
    """What was committed comes in two parts, of which the second is of fewer sequences."""
    own, sizes = head(form), [shape.nodes, shape.nodes - 1, 1]
    first, second, _ = in_torch(own, shape, sizes)
    asked = [DraftRequest(size) for size in sizes]
    runner, hidden, ids = device(form, shape), shown(len(own.reads)), [0, 1, 2]
    runner.write(ids, [text[1:3] for text in TEXTS], [[(part, range(2))] for part in hidden], asked)
    rest = [[(part[:9], range(2, 9)), (part[9:], range(len(part) - 10))] for part in hidden[:2]]
    written = runner.write(ids[:2], [text[3:] for text in TEXTS[:2]], rest, asked[:2])
    for ours, host in zip(written, (first, second), strict=True):
        assert paths(ours) == pytest.approx(paths(host), rel=2e-3)
        assert ours.tokens
    assert max(map(len, paths(written[0]))) == shape.depth


def test_a_head_whose_numbers_overflow_drafts_nothing():
    runner = device("eagle-3", TREE)
    hidden = torch.full((1, len(head("eagle-3").reads), target().config.hidden_size), torch.nan)
    (grown,) = runner.write([0], [[1]], [[(hidden, [0])]], [DraftRequest(9)])
    assert grown.tokens == []


def test_sampled_drafts_share_the_noise_of_the_target():
    ids, dice, position = torch.arange(1, 120, 2), Dice(5), 31
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(1))
    growth = Growth(2, 3, 0, 3, ids)
    table = torch.zeros(len(SequenceField), 2, dtype=torch.int32)
    table[SequenceField.SIZE] = 3
    table[SequenceField.TOKENS] = position
    table[SequenceField.TEMPERATURE, 1] = torch.tensor(0.7).view(torch.int32)
    low, high = torch.tensor([signed(dice.key)]).view(torch.int32)
    table[SequenceField.KEY_LOW, 1], table[SequenceField.KEY_HIGH, 1] = low, high
    growth.choose(0, logits, table, 1.0)
    growth.collect(table, 0.0)
    noise = dice.noise(position, ids).log()
    laws = torch.stack([logits[0].double(), (logits[1].double() / 0.7 - noise) / BLUR]).softmax(1)
    for row, law in zip(growth.found, laws, strict=True):
        wanted = law.topk(3)
        assert sorted(row[1:4].tolist()) == sorted(ids[wanted.indices].tolist())
        assert sorted(row[7:].view(torch.float32).tolist()) == pytest.approx(sorted(wanted.values.tolist()), rel=1e-4)


def signed(key):
    return key - (1 << 64) if key >= 1 << 63 else key


def test_a_prefix_that_was_taken_in_before_is_taken_by_the_next():
    own, text = head("eagle-3"), TEXTS[1]
    runner, hidden = device("eagle-3", TREE), shown(len(own.reads))[1]
    (wanted,) = runner.write([0], [text[1:]], [[(hidden, range(36))]], [DraftRequest(9)])
    runner.keep(0, text, "a")
    assert runner.begin(1, text, "b") == 0
    assert runner.begin(2, text, "a") == 32
    runner.resume(2, text[:33])
    (found,) = runner.write([2], [text[33:]], [[(hidden, range(32, 36))]], [DraftRequest(9)])
    assert paths(found) == pytest.approx(paths(wanted), rel=1e-3)


@pytest.mark.parametrize(("shape", "levels"), [("tree=6,width=3", 3), ("tree=16,width=2", 8)])
def test_texts_equal_plain_decoding(shape, levels):
    """Two prompts at once, however many levels trees have; the host looks on where penalties are asked for."""
    penalised = SamplingParams(3, 1.0, seed=1, repetition_penalty=1.2)
    asked, params = prompts(2, vocab=VOCAB), [SamplingParams(levels + 2), penalised]
    wanted = [
        plainly(family("llama")[1], prompt, each, dice=Dice(1)) for prompt, each in zip(asked, params, strict=True)
    ]
    context = BuildContext(target(), load=None, heads={"it": head("eagle-3")})
    drafter = drafters.build(f"eagle:head=it,{shape},length={levels}", context)
    assert isinstance(drafter, Eagle)
    assert isinstance(drafter._runner, DeviceRunner)
    seqs = [Sequence(i, list(asked[i]), params[i], dice=Dice(1)) for i in range(2)]
    run(target(), drafter, seqs)
    assert outputs(seqs) == outputs(wanted)
    assert all(seq.stats.drafted for seq in seqs)
    assert drafter._runner.shape.depth == levels


def test_what_the_kernels_cannot_do_runs_in_torch():
    for shape in (DraftShape(70, 1, 70, 1.0, 0.0), DraftShape(8, 16, 64, 1.0, 0.0)):
        assert isinstance(start(head("eagle-3"), target(), "auto", shape=shape), DenseRunner)
    assert isinstance(start(eagle_head(target(), layers=()), target(), "auto", shape=CHAIN), DenseRunner)


def test_its_pages_are_as_many_as_its_memory_holds_and_no_more_than_the_targets():
    """A device takes the memory at once; a few pages come on top, for drafts."""
    config = head("eagle-3").config
    token = 2 * 4 * config.depth * config.num_kv_heads * config.head_dim  # bytes, in the float32 of this target
    fixed = start(head("eagle-3"), target(), "auto", shape=CHAIN)._pages.count
    for memory, held in ((token * 10 * PAGE, 10 * PAGE), (1 << 40, target().capacity)):
        context = BuildContext(target(), None, heads={"own": head("eagle-3")}, cache_bytes=memory)
        drafter = drafters.build("eagle:head=own,length=3", context)
        assert isinstance(drafter._runner, DeviceRunner)
        assert drafter._runner._pages.count - fixed == held // PAGE
