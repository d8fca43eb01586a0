"""Block heads on a GPU: the kernels, interpreted on a CPU, say and draft what the head in torch does."""

import functools

import pytest
import torch
from block_forms import FORMS, block_forms
from looped import target
from tiny import VOCAB, eagle_head, family, outputs, plainly, prompts, run

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.block.device_runner import BlockDeviceRunner
from outrider.drafters.block.drafter import start
from outrider.drafters.block.runner import BlockRunner
from outrider.drafters.eagle.runner import DraftRequest, DraftShape
from outrider.drafters.eagle.tree import grow
from outrider.drafters.heads import files
from outrider.drafters.heads.chooser import Chooser, offers_with_noise
from outrider.models.cuda.model import PAGE

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]

CHAIN = DraftShape(4, 1, 4, 1.0, 0.0)
TREE = DraftShape(4, 3, 9, 1.0 / 0.75, 0.02)
TEXTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (18, 37, 4)]


@functools.cache
def head(form):
    return block_forms(target(), form)


def device(form, shape):
    return BlockDeviceRunner(head(form), target(), target().capacity, shape)


@functools.cache
def shown(layers):
    """Some states for all texts, as if a target had shown them."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(len(text), layers, target().config.hidden_size, generator=made) for text in TEXTS]


def in_torch(own, shape, sizes, offers=None):
    """The same drafts by the code that a CPU runs."""
    runner, ids = BlockRunner(own, family("llama")[1], shape.depth), range(len(TEXTS))
    hidden = torch.cat([part[:-1] for part in shown(len(own.reads))])
    ahead = runner.extend(ids, [text[1:] for text in TEXTS], hidden)

    def likeliest(logits, paths, depth):
        best = torch.log_softmax(logits * shape.sharpness, -1).topk(shape.width)
        return own.draft_ids[best.indices], best.values

    return grow(runner, ids, ahead, offers or likeliest, shape.depth, sizes, shape.stop)


def paths(grown):
    """Probability by path from the root."""
    named = []
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        assert parent < len(named)
        named.append((*(named[parent] if parent >= 0 else ()), token))
    return dict(zip(named, grown.acceptance, strict=True))


@pytest.mark.parametrize(("form", "shape"), [*((form, TREE) for form in FORMS), ("own", CHAIN)])
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


def test_sampled_drafts_share_the_noise_of_the_target():
    params = SamplingParams(9, 0.8, seed=1)
    seqs = [Sequence(i, text, params, dice=Dice(5, i), rule="coupled") for i, text in enumerate(TEXTS)]
    choosers = [Chooser(seq, TREE.nodes, False) for seq in seqs]
    own = head("own")

    def offers(logits, paths, depth):
        return offers_with_noise(choosers, logits, own.draft_ids, depth, TREE.width)

    wanted = in_torch(own, TREE, [TREE.nodes] * len(TEXTS), offers)
    asked = [DraftRequest(TREE.nodes, len(seq.tokens), 0.8, seq.dice.key) for seq in seqs]
    runner, hidden = device("own", TREE), shown(len(own.reads))
    states = [[(part, range(len(part) - 1))] for part in hidden]
    written = runner.write(range(len(TEXTS)), [text[1:] for text in TEXTS], states, asked)
    for ours, host in zip(written, wanted, strict=True):
        assert paths(ours) == pytest.approx(paths(host), rel=5e-3)


@pytest.mark.parametrize("form", ["own", "public"])
def test_a_head_on_a_device_says_what_it_says_in_torch(form):
    """Where the host chooses the tokens: read in chunks, then along two paths of each of two sequences."""
    own, runner = head(form), device(form, CHAIN)
    torchs = BlockRunner(own, family("llama")[1], CHAIN.depth)
    hidden, texts = [part[:12] for part in shown(len(own.reads))[:2]], [text[1:13] for text in TEXTS[:2]]
    for each in (runner, torchs):
        each.read([3, 4], [text[:7] for text in texts], torch.cat([part[:7] for part in hidden]))
    tokens = torch.tensor([5, 11, 2, 7])
    found = []
    for each in (runner, torchs):
        ahead = each.extend([3, 4], [text[7:] for text in texts], torch.cat([part[7:] for part in hidden]))
        below = each.step([3, 4], tokens, ahead.states.repeat_interleave(2, 0), torch.zeros(4, 0, dtype=torch.long))
        one = each.step([4], tokens[:1], below.states[3:], torch.zeros(1, 1, dtype=torch.long))
        found.append((ahead, below, one))
    for ours, host in zip(*found, strict=True):
        torch.testing.assert_close(ours.logits, host.logits, atol=1e-3, rtol=1e-4)


def test_a_head_whose_numbers_overflow_drafts_nothing():
    runner = device("own", TREE)
    hidden = torch.full((1, len(head("own").reads), target().config.hidden_size), torch.nan)
    (grown,) = runner.write([0], [[1]], [[(hidden, [0])]], [DraftRequest(9)])
    assert grown.tokens == []


def test_a_prefix_that_was_taken_in_before_is_taken_by_the_next():
    own, text = head("own"), TEXTS[1]
    runner, hidden = device("own", TREE), shown(len(own.reads))[1]
    (wanted,) = runner.write([0], [text[1:]], [[(hidden, range(36))]], [DraftRequest(9)])
    runner.keep(0, text, "a")
    assert runner.begin(1, text, "b") == 0
    assert runner.begin(2, text, "a") == 32
    runner.resume(2, text[:33])
    (found,) = runner.write([2], [text[33:]], [[(hidden, range(32, 36))]], [DraftRequest(9)])
    assert paths(found) == pytest.approx(paths(wanted), rel=1e-3)


def test_texts_equal_plain_decoding_where_the_host_looks_on():
    """Two prompts at once, of which one asks for penalties."""
    penalised = SamplingParams(3, 1.0, seed=1, repetition_penalty=1.2)
    asked, params = prompts(2, vocab=VOCAB), [SamplingParams(4), penalised]
    wanted = [
        plainly(family("llama")[1], prompt, each, dice=Dice(1)) for prompt, each in zip(asked, params, strict=True)
    ]
    context = BuildContext(target(), load=None, heads={"it": head("own")})
    drafter = drafters.build("block:head=it,tree=6,width=3,length=3", context)
    assert isinstance(drafter._runner, BlockDeviceRunner)
    seqs = [Sequence(i, list(asked[i]), params[i], dice=Dice(1)) for i in range(2)]
    run(target(), drafter, seqs)
    assert outputs(seqs) == outputs(wanted)
    assert all(seq.stats.drafted for seq in seqs)


def test_auto_takes_the_block_head_of_two_that_lie_beside_the_model(tmp_path):
    """On a CPU it is the EAGLE head (test_block.py)."""
    files.write(head("own"), tmp_path / "heads" / "block", target(), "m")
    files.write(eagle_head(target()), tmp_path / "heads" / "eagle", target(), "m")
    made = drafters.build("auto", BuildContext(target(), load=None, name=str(tmp_path)))
    names = [member.name for member in made.members]
    assert "block" in names
    assert "eagle" not in names
    assert [guesser.name for guesser in made.guessers] == ["block", "ngram"]


def test_what_the_kernels_cannot_do_runs_in_torch():
    assert isinstance(start(head("own"), target(), "auto", 100, DraftShape(4, 6, 65, 1.0, 0.0)), BlockRunner)
    context = BuildContext(target(), load=None, heads={"it": head("own")})
    assert drafters.build("block:head=it,tree=65", context).guessers == ()


def test_its_pages_are_as_many_as_its_memory_holds_and_no_more_than_the_targets():
    """A device takes the memory at once; a few pages come on top, for drafts."""
    config = head("own").config
    token = 2 * 4 * config.depth * config.num_kv_heads * config.head_dim  # bytes, in the float32 of this target
    fixed = start(head("own"), target(), "auto", 0, CHAIN)._pages.count
    for memory, held in ((token * 10 * PAGE, 10 * PAGE), (1 << 40, target().capacity)):
        context = BuildContext(target(), None, heads={"own": head("own")}, cache_bytes=memory)
        drafter = drafters.build("block:head=own,length=3", context)
        assert isinstance(drafter._runner, BlockDeviceRunner)
        assert drafter._runner._pages.count - fixed == held // PAGE
