"""Trees in one call of the kernels: the nodes that `grow` keeps, whatever the head, the request and the company."""

import packs
import pytest
import torch
from eagle_forms import EAGLE_1, FORMS
from tiny import eagle_head, new_engine, prompts

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.eagle.drafter import SHARPNESS, Eagle
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.drafters.eagle.tree import TreeGrowth, grow

pytestmark = pytest.mark.native

PACKABLE = [form for form in FORMS if form not in ("all its own", *EAGLE_1)]


def target():
    return packs.family("llama", 8)[0]


def made(form, confidence=1.0, seed=7, **more):
    """A random head; `confidence` is what its logits are multiplied by."""
    torch.manual_seed(seed)
    head = eagle_head(target(), **{**FORMS[form], **more}).requires_grad_(False)
    head.norm.weight.mul_(confidence)
    return head


def reference(runner, head, ids, tokens, hidden, growth, sizes, allowed=None):
    """What `grow` makes with torch's own functions. `allowed` [draft vocabulary]: tokens that may be written."""

    def offers(logits, paths, depth):
        if allowed is not None:
            logits = logits.where(allowed, -torch.inf)
        best = torch.log_softmax(logits / growth.heat, -1).topk(growth.width)
        return head.draft_ids[best.indices], best.values

    ahead = runner.extend(ids, tokens, torch.cat(hidden))
    return grow(runner, ids, ahead, offers, growth.depth, sizes, growth.stop, growth.least)


def assert_same(ours, theirs):
    assert [tree.tokens for tree in ours] == [tree.tokens for tree in theirs]
    assert [tree.parents for tree in ours] == [tree.parents for tree in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.acceptance == pytest.approx(other.acceptance, abs=1e-5)


def states(rows, head, random):
    """Of a target, [rows, blocks, hidden]: shown as a view of more, turned round."""
    blocks = len(head.config.layers)
    return torch.randn(blocks, rows + 2, 32, generator=random).transpose(0, 1)


@pytest.mark.parametrize("form", PACKABLE)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("confidence", [1.0, 5.0, 20.0])
def test_a_tree_in_one_call_has_the_nodes_that_grow_keeps(form, bits, confidence):
    """Alone and in company, of all sizes; what was drafted is forgotten, what was taken in stays."""
    head = made(form, confidence)
    whole, single = (PackedRunner(head, target(), bits) for _ in range(2))
    random = torch.Generator().manual_seed(bits)

    def number(least, most):
        return int(torch.randint(least, most + 1, (1,), generator=random))

    kept = []
    for turn in range(25):
        ids = torch.randperm(4, generator=random)[: number(1, 4)].tolist()
        width = number(1, 6)
        stop = [0.0, 0.02, 0.2, 0.4][turn % 4]
        growth = TreeGrowth(number(1, 7), width, SHARPNESS, stop, stop / number(1, 4))
        sizes = [number(2, 16) for _ in ids]
        tokens = [torch.randint(48, (number(1, 40),), generator=random).tolist() for _ in ids]
        shown = [states(len(own), head, random) for own in tokens]
        hidden = [each[1:-1] for each in shown]
        parts = [[(each, list(range(1, len(own) + 1)))] for each, own in zip(shown, tokens, strict=True)]
        ours = whole.trees(ids, tokens, parts, growth, sizes)
        theirs = reference(single, head, ids, tokens, hidden, growth, sizes)
        assert_same(ours, theirs)
        assert whole._lengths == single._lengths
        kept += [len(tree.tokens) for tree in ours]
        assert all(max((len(path) for path in paths(tree)), default=0) <= growth.depth for tree in ours)
    assert len(set(kept)) > 4
    for id in range(4):
        single._cache.crop(id, single._lengths[id])
        assert whole._cache.length(id) == single._cache.length(id)
    rows = [[3, 4]] * 4, torch.ones(8, len(head.config.layers), 32)
    assert torch.equal(whole.extend(range(4), *rows).logits, single.extend(range(4), *rows).logits)


def paths(tree):
    found = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize("size", range(2, 25))
@pytest.mark.parametrize("width", [1, 3, 6])
def test_no_more_rows_are_followed_than_there_is_space_for(size, width):
    """A head that is certain, and one that knows nothing: where the place after the last row is another's."""
    for confidence in (0.0, 0.5, 40.0):
        head = made("eagle-3", confidence)
        runner = PackedRunner(head, target(), 4)
        growth = TreeGrowth(16, width, SHARPNESS, 0.0, 0.0)
        runner.trees([0], [[1, 2]], [[(torch.ones(2, 3, 32), [0, 1])]], growth, [size])
        slot = runner._cache.extend(0, 0)
        used = torch.cat([runner._cache.page(slot, place) for place in range(len(slot.pages))], 3).view(torch.float32)
        rows = used.view(*used.shape[:3], -1, head.config.head_dim).abs().sum((0, 1, 2, 4)).count_nonzero()
        assert 2 <= rows <= 2 + growth.rows(size)


def test_trees_have_the_vocabulary_of_chains():
    """The common tokens and those of the text, each once; in company all that the head has."""
    order = torch.randperm(48, generator=torch.Generator().manual_seed(5))[:40]
    head = made("eagle-3", 3.0, ids=order, norm_inputs=True)
    few, all_of_them = PackedRunner(head, target(), 4, common=16), PackedRunner(head, target(), 4)
    growth, written = TreeGrowth(4, 5, SHARPNESS, 0.0, 0.0), set()
    for turn, (id, rows) in enumerate(((0, 5), (1, 40), (2, 3), (1, 4))):
        for runner in (few, all_of_them):
            runner.free(id)
        text = order[torch.arange(rows) * (turn + 2) % 40].tolist()
        hidden = torch.randn(rows, 3, 32, generator=torch.Generator().manual_seed(turn))
        ours = few.trees([id], [text], [[(hidden, range(rows))]], growth, [12])
        allowed = torch.tensor([i < 16 or token in text for i, token in enumerate(order.tolist())])
        assert_same(ours, reference(all_of_them, head, [id], [text], [hidden], growth, [12], allowed))
        written.update(ours[0].tokens)
    assert written & set(order[16:].tolist()), "the test shows nothing"
    hidden = torch.randn(3, 3, 32, generator=torch.Generator().manual_seed(9))
    both = [[5, 6], [7]], [hidden[:2], hidden[2:]]
    ours = few.trees([0, 1], both[0], [[(part, range(len(part)))] for part in both[1]], growth, [12, 9])
    for runner, id in ((all_of_them, 0), (all_of_them, 1)):
        runner._lengths[id] = few._lengths[id] - len(both[0][id])
    assert_same(ours, reference(all_of_them, head, [0, 1], *both, growth, [12, 9]))


def test_a_tree_of_a_token_that_is_not_there_is_refused_and_leaves_nothing():
    head = made("eagle-3")
    runner = PackedRunner(head, target(), 4)
    shown = [(torch.ones(2, 3, 32), range(2))]
    for token in (-1, target().vocab_size):
        with pytest.raises(IndexError, match="does not have"):
            runner.trees([0], [[1, token]], [shown], TreeGrowth(4, 4, SHARPNESS, 0.0, 0.0), [8])
        assert runner._cache.length(0) == 2
        runner.free(0)


def test_numbers_that_overflow_give_no_node():
    head = made("eagle-3", float("inf"))
    runner = PackedRunner(head, target(), 4)
    (tree,) = runner.trees(
        [0], [[1, 2]], [[(torch.ones(2, 3, 32), range(2))]], TreeGrowth(4, 4, SHARPNESS, 0.0, 0.0), [8]
    )
    assert (tree.tokens, tree.parents, tree.acceptance) == ([], [], [])


PARAMS = [{}, dict(temperature=0.8), dict(repetition_penalty=1.2), {}]


@pytest.mark.parametrize("head", ["eagle", "eagle_cut"])
@pytest.mark.parametrize("company", [1, 4])
@pytest.mark.parametrize("shape", ["width=4,stop=0.05", "stop=0.3"])
def test_drafts_are_the_same_whether_or_not_a_tree_is_one_call(head, company, shape, monkeypatch):
    """While sequences run, with drafts that are kept and refused, among others that sample or are penalised."""
    spec, drafts, calls = f"eagle:head={head},tree=7,{shape}", [], []
    real = PackedRunner.trees
    monkeypatch.setattr(PackedRunner, "trees", lambda self, ids, *more: calls.append(ids) or real(self, ids, *more))
    for at_once in (True, False):
        drafter = drafters.build(spec, packs.parts("llama", 8))
        if not at_once:
            monkeypatch.setattr(Eagle, "_at_once", lambda self, choosers: choosers)
        drafts.append(drafted(drafter, company))
    assert {len(ids) for ids in calls} == ({1} if company == 1 else {1, 2})
    assert max(map(len, drafts[0])) > 3
    assert [(draft.tokens, draft.parents) for draft in drafts[0]] == [(d.tokens, d.parents) for d in drafts[1]]
    for ours, theirs in zip(*drafts, strict=True):
        assert ours.acceptance == pytest.approx(theirs.acceptance, abs=1e-4)


def drafted(drafter, company):
    """The drafts of some sequences, of which as many run together."""
    drafts, real = [], drafter.propose

    def propose(seqs, budgets):
        found = real(seqs, budgets)
        drafts.extend(found)
        return found

    drafter.propose = propose
    seqs = [
        Sequence(i, list(tokens), SamplingParams(max_tokens=10 + 4 * i, **PARAMS[i]), dice=Dice(i))
        for i, tokens in enumerate(prompts(4, vocab=target().vocab_size))
    ]
    for first in range(0, len(seqs), company):
        engine = new_engine(target(), drafter)
        for seq in seqs[first : first + company]:
            engine.add(seq)
        while engine.busy:
            engine.step()
    return drafts
