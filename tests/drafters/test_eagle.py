"""EAGLE: the head at work says what the head in training says, in torch and in the kernels, in chains and in trees."""

import contextlib
import functools
import gc
import weakref

import packs
import pytest
import torch
import torch.nn.functional as F
from eagle_forms import EAGLE_1, ENDS, FORMS, STEPS, TEXTS, at_work
from tiny import (
    OWN,
    Markov,
    assert_rate,
    eagle_head,
    family,
    family_heads,
    law_by_hand,
    lesson,
    new_engine,
    outputs,
    parts,
    plainly,
    prompts,
    random_heads,
    run,
)

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.draft import EMPTY
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Token
from outrider.core.verify import Verdict
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.eagle.drafter import STOP, TREE_STOP, Eagle, _EagleState, thresholds
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.drafters.eagle.torch_runner import DenseRunner
from outrider.drafters.heads.chooser import Chooser
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed
from outrider.train import eagle
from outrider.train.objective import Comparison


def model():
    return family("llama")[1]


@functools.cache
def head(form):
    torch.manual_seed(7)
    return eagle_head(model(), **FORMS[form]).requires_grad_(False)


def in_training(head, target, texts=TEXTS):
    """What each step of the unrolled head says at every place, [b, t, draft vocabulary] per step."""
    learned = lesson(target, head, texts)
    embedding = head.embed_tokens.weight if head.config.own_embedding else learned.embedding
    state = learned.last if head.config.first else head.combine(learned.hidden)
    pasts, said = [[] for _ in head.layers], []
    turns = eagle.rotations(head, len(texts[0]) + STEPS, state.device)
    for step in range(STEPS):
        embedded = F.embedding(F.pad(learned.tokens[:, 1 + step :], (0, 1 + step)), embedding)
        state, normed = eagle.draft_step(head, embedded, state, pasts, turns[:, step : step + len(texts[0])])
        said.append(F.linear(normed, eagle.output_matrix(head, learned.output)))
    return said


@pytest.mark.parametrize("form", FORMS)
def test_a_head_at_work_says_what_it_said_in_training(form):
    wanted = in_training(head(form), model())
    said = at_work(DenseRunner(head(form), model()), head(form), model())
    for step in range(STEPS):
        expected = torch.stack([wanted[step][i, end] for i, end in enumerate(ENDS)])
        torch.testing.assert_close(said[step], expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("slots", [[3, 0, 7], [5, 6, 7]])
def test_it_does_not_matter_where_sequences_lie(slots):
    """Side by side or not, after others have grown the buffers and gone."""
    runner = DenseRunner(head("eagle-3"), model())
    wanted = at_work(runner, head("eagle-3"), model())
    for id in range(3):
        runner.free(id)
    hidden = torch.randn(300, 3, 32)
    for id in range(100, 108):
        runner.extend([id], [[1] * 300], hidden)
    for id in sorted(slots, reverse=True):
        runner.free(100 + id)
    for step, said in enumerate(at_work(runner, head("eagle-3"), model())):
        torch.testing.assert_close(said, wanted[step], atol=1e-4, rtol=1e-4)


def packed_model():
    return packs.family("llama", 8)[0]


@pytest.mark.native
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernels_say_what_torch_says_with_the_same_weights(form, bits):
    torch.manual_seed(7)
    options = FORMS[form] | ({"ids": torch.arange(0, 40, 2)} if "ids" in FORMS[form] else {})
    target, own = packed_model(), eagle_head(packed_model(), **options).requires_grad_(False)
    packed = PackedRunner(own, target, bits)
    for weight in (*own.fc.parameters(), *own.layers.parameters()):
        if weight.dim() == 2:
            weight.copy_(packs.quant.quantise(weight, bits).dense())
    dense = DenseRunner(own, target)
    dense._output = packed._output  # the same rounding
    wanted = at_work(dense, own, target)
    for step, said in enumerate(at_work(packed, own, target)):
        torch.testing.assert_close(said, wanted[step], atol=0.02 * float(wanted[step].abs().max()), rtol=1e-2)


def branches(runner, head, target):
    """A tree of three levels, and the same paths as chains."""
    layers = head.config.layers
    texts = TEXTS[:2]
    hidden = [
        output.hidden.clone() for output in target.forward([Feed(-1 - i, t) for i, t in enumerate(texts)], layers)
    ]
    for i in range(2):
        target.free(-1 - i)

    def root():
        return runner.extend([0, 1], [text[1:] for text in texts], torch.cat([states[:-1] for states in hidden]))

    def clear():
        runner.free(0)
        runner.free(1)

    rows = root()
    tree = []
    first = runner.step([0, 1], torch.tensor([3, 4, 5, 6]), rows.states[[0, 0, 1, 1]], torch.empty(4, 0).long())
    second = runner.step(
        [0, 1], torch.tensor([7, 8, 9, 1]), first.states[[1, 1, 2, 3]], torch.tensor([[1], [1], [0], [1]])
    )
    trails = torch.tensor([[1, 3], [1, 2], [0, 2], [1, 3]])
    third = runner.step([0, 1], torch.tensor([2, 3, 4, 5]), second.states[[1, 0, 2, 3]], trails)
    tree = torch.cat([first.logits, second.logits, third.logits])
    clear()
    chains = {}
    for paths in (([3], [5]), ([4, 7, 3], [5, 9, 4]), ([4, 8, 2], [6, 1, 5])):
        rows = root()
        for depth in range(len(paths[0])):
            tokens = torch.tensor([path[depth] for path in paths])
            rows = runner.step([0, 1], tokens, rows.states, torch.arange(depth).expand(2, -1))
            for id, path in enumerate(paths):
                chains[id, tuple(path[: depth + 1])] = rows.logits[id]
        clear()
    order = [(0, (3,)), (0, (4,)), (1, (5,)), (1, (6,))]
    order += [(0, (4, 7)), (0, (4, 8)), (1, (5, 9)), (1, (6, 1))]
    order += [(0, (4, 8, 2)), (0, (4, 7, 3)), (1, (5, 9, 4)), (1, (6, 1, 5))]
    return tree, torch.stack([chains[place] for place in order])


def test_a_node_of_a_tree_sees_its_ancestors_and_nothing_else():
    tree, chains = branches(DenseRunner(head("eagle-3"), model()), head("eagle-3"), model())
    torch.testing.assert_close(tree, chains, atol=1e-4, rtol=1e-4)


@pytest.mark.native
def test_so_it_does_in_the_kernels_to_the_bit():
    own = eagle_head(packed_model()).requires_grad_(False)
    tree, chains = branches(PackedRunner(own, packed_model(), 4), own, packed_model())
    assert torch.equal(tree, chains)


@pytest.mark.native
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("all its own", *EAGLE_1)])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_of_a_prompt_alone_the_last_row_is_that_of_a_prompt_in_company(form, rows):
    """Alone, only the last row is computed to its end; beside another sequence all are."""
    own, (alone, beside) = packed_runners(form, 4)
    hidden = torch.randn(rows + 3, len(own.config.layers), 32, generator=torch.Generator().manual_seed(rows))
    text, other = list(range(1, rows + 1)), [5, 6, 7]
    one, two = alone.extend([0], [text], hidden[:rows]), beside.extend([0, 1], [text, other], hidden)
    assert torch.equal(one.states[0], two.states[0])
    assert torch.equal(one.logits[0], two.logits[0])
    more = torch.ones(1, len(own.config.layers), 32)
    assert torch.equal(alone.extend([0], [[3]], more).logits, beside.extend([0], [[3]], more).logits)


def packed_runners(form, bits, count=2):
    """As many as wanted, of the same random head."""
    torch.manual_seed(7)
    own = eagle_head(packed_model(), **FORMS[form]).requires_grad_(False)
    return own, [PackedRunner(own, packed_model(), bits) for _ in range(count)]


@pytest.mark.native
@pytest.mark.parametrize("form", FORMS)
def test_a_packed_head_does_not_keep_the_weights_that_it_was_packed_from(form):
    own, (runner,) = packed_runners(form, 4, count=1)
    matrices = [weakref.ref(weight) for weight in (own.fc.weight, *own.layers.parameters()) if weight.dim() == 2]
    del own
    gc.collect()
    assert runner.config
    assert [matrix() for matrix in matrices] == [None] * len(matrices)


def scattered(rows, blocks, seed):
    """States of a target: in two pieces, one turned round and with rows that are not wanted; and the same joined."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randn(blocks, rows + 3, 32, generator=random).transpose(0, 1)
    second = torch.randn(2, blocks, 32, generator=random)
    chosen = list(range(1, rows)) if rows > 1 else []
    return [(first, chosen), (second, [1])], torch.cat([first[chosen], second[1:]])


def stepwise(runner, head, id, tokens, hidden, length, stop):
    """The chain that `extend` and steps of one row write."""
    ahead, reach, chain = runner.extend([id], [tokens], hidden), 1.0, []
    while True:
        chances, places = ahead.logits.softmax(-1).max(-1)
        chain.append((int(head.draft_ids[places]), float(chances)))
        reach *= chain[-1][1]
        if len(chain) == length or reach < stop:
            return chain
        trail = torch.arange(len(chain) - 1).unsqueeze(0)
        ahead = runner.step([id], head.draft_ids[places], ahead.states, trail)


@pytest.mark.native
def test_a_chain_is_written_with_the_common_tokens_and_those_of_its_text():
    """As single steps would, had they no others; the text of another, or of one that had its number, is not its own."""
    target = packed_model()
    torch.manual_seed(5)
    order = torch.randperm(target.vocab_size)[:40]
    own = eagle_head(target, order, norm_inputs=True).requires_grad_(False)
    few, all_of_them = PackedRunner(own, target, 4, common=16), PackedRunner(own, target, 4)
    written, rare = set(), set(order[16:].tolist())
    for turn, (id, rows) in enumerate(((0, 5), (1, 40), (2, 3), (1, 4))):
        for runner in (few, all_of_them):
            runner.free(id)
        text = order[torch.arange(rows) * (turn + 2) % 40].tolist()
        hidden = torch.randn(rows, 3, 32, generator=torch.Generator().manual_seed(turn))
        chain = few.chain(id, text, [(hidden, list(range(rows)))], 5, 0.0)
        allowed = torch.tensor([int(i < 16 or token in text) for i, token in enumerate(order.tolist())])
        ahead, expected = all_of_them.extend([id], [text], hidden), []
        for depth in range(5):
            chances, places = ahead.logits.where(allowed.bool(), -torch.inf).softmax(-1).max(-1)
            expected.append((int(order[places]), float(chances)))
            ahead = all_of_them.step([id], order[places], ahead.states, torch.arange(depth).unsqueeze(0))
        assert [token for token, _ in chain] == [token for token, _ in expected]
        assert [chance for _, chance in chain] == pytest.approx([chance for _, chance in expected], abs=1e-5)
        written.update(token for token, _ in chain)
    assert written & rare, "the test shows nothing"


@pytest.mark.native
def test_fewer_common_tokens_than_a_tile_are_all_there_is():
    target = packed_model()
    torch.manual_seed(5)
    order = torch.randperm(target.vocab_size)
    own = eagle_head(target, order[:40]).requires_grad_(False)
    own.narrow(10)
    runner = PackedRunner(own, target, 4, common=10)
    chain = runner.chain(0, order[10:30].tolist(), [(torch.randn(20, 3, 32), list(range(20)))], 5, 0.0)
    assert len(chain) == 5
    assert {token for token, _ in chain} <= set(order[:10].tolist())


# rows that are taken in, the most that are written, and when to stop before: short ones and long ones in turn
CHAINS = [(5, 4, 0.0), (1, 1, 0.0), (2, 5, 0.1), (90, 5, 0.02), (3, 6, 0.0), (1, 5, 0.5), (1100, 3, 0.0), (4, 5, 0.0)]


def held(cache, slot):
    """Keys and values of one sequence, [layers, heads, 2, tokens, numbers]."""
    pages = [cache.page(slot, place) for place in range(len(slot.pages))]
    return torch.cat(pages, 3)[:, :, :, : slot.length]


@pytest.mark.native
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("all its own", *EAGLE_1)])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_chain_in_one_call_is_that_of_single_steps(form, bits):
    """What was written is forgotten each time, and what was taken in stays, to the bit."""
    own, (whole, single) = packed_runners(form, bits)
    assert whole.chains
    lengths = set()
    for turn, (rows, length, stop) in enumerate(CHAINS):
        tokens = torch.randint(48, (rows,), generator=torch.Generator().manual_seed(turn)).tolist()
        shown, hidden = scattered(rows, len(own.config.layers), turn)
        ours = whole.chain(0, tokens, shown, length, stop)
        theirs = stepwise(single, own, 0, tokens, hidden, length, stop)
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [chance for _, chance in ours] == pytest.approx([chance for _, chance in theirs], abs=1e-5)
        lengths.add((len(ours), length))
    assert {1, 3, 4, 6} <= {count for count, _ in lengths}
    assert any(count < length for count, length in lengths)  # else nothing was stopped
    assert whole._lengths == single._lengths == {0: sum(rows for rows, _, _ in CHAINS)}
    single._cache.crop(0, single._lengths[0])
    ours, theirs = (runner._cache.extend(0, 0) for runner in (whole, single))
    assert ours.length == theirs.length == whole._lengths[0]
    assert torch.equal(held(whole._cache, ours), held(single._cache, theirs))
    after = [runner.extend([0], [[3, 4]], torch.ones(2, len(own.config.layers), 32)) for runner in (whole, single)]
    assert torch.equal(after[0].logits, after[1].logits)


@pytest.mark.native
def test_a_chain_in_one_call_forgets_what_steps_have_drafted():
    """As when other sequences end, and this one is alone from then on."""
    own, (mixed, single) = packed_runners("eagle-3", 4)
    for turn in range(6):
        (shown, hidden), tokens = scattered(3, 3, turn), [turn, 5, 7]
        theirs = stepwise(single, own, 0, tokens, hidden, 4, 0.0)
        ours = mixed.chain(0, tokens, shown, 4, 0.0) if turn % 2 else stepwise(mixed, own, 0, tokens, hidden, 4, 0.0)
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [chance for _, chance in ours] == pytest.approx([chance for _, chance in theirs], abs=1e-5)


@pytest.mark.native
def test_a_chain_of_a_token_that_is_not_there_is_refused():
    _, (whole,) = packed_runners("eagle-3", 4, count=1)
    shown, _ = scattered(2, 3, 0)
    for token in (-1, packed_model().vocab_size):
        with pytest.raises(IndexError, match="does not have"):
            whole.chain(0, [1, token], shown, 3, 0.0)
        whole.free(0)


@pytest.mark.native
@pytest.mark.parametrize("head", ["eagle", "eagle_cut"])
def test_drafts_are_the_same_whether_or_not_a_chain_is_one_call(head, monkeypatch):
    """While sequences run, one after the other, with drafts that are kept and refused."""
    spec, drafts = f"eagle:head={head},length=4,stop=0.05", []
    for way in (Eagle._at_once, lambda _, choosers: choosers):
        drafter = Recording(drafters.build(spec, packs.parts("llama", 8)))
        monkeypatch.undo()
        monkeypatch.setattr(Eagle, "_at_once", way)
        drafts.append(alone(packed_model(), drafter))
        assert len(set(map(len, drafter.paths))) > 1
    assert max(map(len, drafts[0])) == 4
    assert [draft.tokens for draft in drafts[0]] == [draft.tokens for draft in drafts[1]]
    for ours, theirs in zip(*drafts, strict=True):
        assert ours.acceptance == pytest.approx(theirs.acceptance, abs=1e-5)


def alone(target, drafter):
    """The drafts of some sequences, none of which runs beside another."""
    drafts = []
    for i, tokens in enumerate(prompts(6, vocab=target.vocab_size)):
        engine = new_engine(target, drafter)
        engine.add(Sequence(i, list(tokens), SamplingParams(max_tokens=24)))
        while engine.busy:
            engine.step()
            drafts += drafter.last
    return drafts


def accepted(spec, kind="llama", count=24, **params):
    seqs = [
        Sequence(i, list(tokens), SamplingParams(max_tokens=count, **params), dice=Dice(i))
        for i, tokens in enumerate(prompts(8))
    ]
    return run(family(kind)[1], drafters.build(spec, parts(kind)), seqs).stats


def test_a_tree_keeps_more_than_a_chain():
    chain, tree = accepted("eagle:head=eagle,length=4"), accepted("eagle:head=eagle,length=4,tree=24,width=8")
    assert tree.accepted > chain.accepted > 0


def test_nodes_hang_where_the_head_is_confident():
    drafter = drafters.build("eagle:head=eagle,tree=12,width=5,length=4", parts("llama"))
    with begun(drafter, [Sequence(0, prompts(1)[0], SamplingParams(max_tokens=20))]) as seqs:
        (draft,) = drafter.propose(seqs, [64])
    assert len(draft) == 12
    first = [token for token, parent in zip(draft.tokens, draft.parents, strict=True) if parent < 0]
    assert len(set(first)) == len(first)
    assert max(draft.depths()) <= 4
    assert all(0 < chance < 1 for chance in draft.acceptance)


def test_stop_ends_a_chain_that_is_unlikely_to_be_reached():
    lengths = {}
    for stop in (0.0, 0.03, 0.9):
        drafter = drafters.build(f"eagle:head=eagle,length=6,stop={stop}", parts("llama"))
        asked = [Sequence(i, tokens, SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(8))]
        with begun(drafter, asked) as seqs:
            lengths[stop] = [len(draft) for draft in drafter.propose(seqs, [64] * 8)]
    assert lengths[0.0] == [6] * 8
    assert sum(lengths[0.9]) < sum(lengths[0.03]) < 48
    assert min(lengths[0.9]) >= 1


def written_in_vain(drafter, seqs):
    """An engine that has made six steps of a packed model, whose states the drafter was shown without being asked."""
    engine = new_engine(packed_model(), InVain(drafter, asks=False))
    for seq in seqs:
        engine.add(seq)
    for _ in range(6):
        engine.step()
    return engine


@pytest.mark.native
@pytest.mark.parametrize("options", ["", ",tree=6"])
def test_beside_a_packed_target_drafts_end_where_nodes_no_longer_pay(options):
    """By what a row and a step of the head cost; a threshold that was asked for stays."""
    torch.manual_seed(7)
    own, sizes = {"own": eagle_head(packed_model()).requires_grad_(False)}, {}
    for given, row, guess in (("", 0.0, 0.0), ("", 0.02, 0.02), ("", 0.5, 0.5), (",stop=0", 0.5, 0.5)):
        drafter = drafters.build(
            f"eagle:head=own,length=4{options}{given}", BuildContext(packed_model(), None, heads=own)
        )
        seqs = [Sequence(id, list(TEXTS[id % len(TEXTS)]), SamplingParams(max_tokens=40)) for id in range(3)]
        engine = written_in_vain(drafter, seqs)
        drafter.weigh(row, guess)
        sizes[given, row] = sum(len(draft) for draft in drafter.propose(seqs, [8, 8, 8]))
        for seq in seqs:
            engine.cancel(seq.id)
    assert sizes["", 0.0] >= sizes["", 0.02] > sizes["", 0.5]
    assert sizes[",stop=0", 0.5] > sizes["", 0.5]


def test_thresholds_are_those_that_were_found_by_trying():
    """Zen 4: a row 0.25 and a step of the head 0.11 of a token; Zen 5: 0.11 and 0.08 (LOG, 2026-11-19)."""
    assert thresholds(0.25, 0.11, tree=True)[0] == pytest.approx(TREE_STOP, abs=0.05)
    assert thresholds(0.25, 0.11, tree=False)[0] == pytest.approx(STOP, abs=0.05)
    assert thresholds(0.11, 0.08, tree=True)[0] == pytest.approx(0.33, abs=0.01)
    assert thresholds(0.11, 0.08, tree=False)[0] == pytest.approx(0.20, abs=0.01)
    for prices in ((0.0, 0.0), (9.0, 9.0)):  # odd measurements neither end all drafts nor none
        stop, least = thresholds(*prices, tree=True)
        assert 0.0 < least <= stop < 1.0


def test_chances_of_drawn_tokens_do_not_depend_on_the_draw():
    """Two sequences that differ in their luck alone: the first token of each has the same chance, whatever it is."""
    drafter = drafters.build("eagle:head=eagle,length=1", parts("llama"))
    params = SamplingParams(max_tokens=20, temperature=1.5)
    with begun(drafter, [Sequence(i, list(TEXTS[0]), params, dice=Dice(3)) for i in range(20)]) as seqs:
        for i, seq in enumerate(seqs):
            seq.dice = Dice(i)
        drafts = drafter.propose(seqs, [5] * 20)
    assert len({draft.tokens for draft in drafts}) > 3
    assert len({round(draft.acceptance[0], 5) for draft in drafts}) == 1
    assert all(draft.probs is not None for draft in drafts)


class Recording(Drafter):
    """Remembers what the drafter behind it proposed, and what was kept of it."""

    def __init__(self, inner):
        self.inner, self.layers, self.forget = inner, inner.layers, inner.forget
        self.last, self.paths = [], []

    def propose(self, seqs, budgets):
        self.last = self.inner.propose(seqs, budgets)
        return self.last

    def observe(self, step):
        self.paths.append(step.verdict.path)
        self.inner.observe(step)


def test_a_draft_begins_from_the_states_of_what_was_kept():
    """Its first token is what the head in training says after the same text, whatever became of the drafts before."""
    drafter = Recording(drafters.build("eagle:head=eagle,tree=24,width=8,length=4", parts("llama")))
    own, engine = family_heads("llama")["eagle"], new_engine(model(), drafter)
    seqs = [Sequence(i, list(tokens), SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(4))]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    while engine.busy:
        asked = [seq for seq in seqs if seq.finish is None and seq.left > 1]
        wanted = [in_training(own, model(), [seq.tokens])[0][0, -2].argmax() for seq in asked]
        drafter.last = []
        engine.step()
        assert [draft.tokens[0] for draft in drafter.last if draft] == wanted
    assert any(path and path != tuple(range(len(path))) for path in drafter.paths)  # else nothing was moved


@pytest.mark.parametrize("head", ["eagle", "eagle_cut"])
def test_drawn_tokens_are_kept_as_often_as_rejection_promises(head):
    """The sum of min(p, q). A drawn token treated as guessed would stay exact, and be kept less often."""
    target = Markov(seed=1)
    drafter = Recording(
        drafters.build(f"eagle:head={head},length=2", BuildContext(target, None, heads=random_heads(target)))
    )
    params = SamplingParams(max_tokens=6, temperature=1.2, top_k=5)
    seqs = [Sequence(i, [0, 1, 2, 0, 1], params, dice=Dice(500 + i), rule="rejection") for i in range(1500)]
    engine = new_engine(target, drafter, Limits(batch=10_000, chunk=10**6))
    for seq in seqs:
        engine.add(seq)
    engine.step()
    laws = [law_by_hand(target.logits(seq.tokens), seq.tokens, seq.prompt, params) for seq in seqs]
    engine.step()
    kept = [sum(map(min, p, draft.probs[0].tolist())) for p, draft in zip(laws, drafter.last, strict=True)]
    assert_rate(sum(seq.stats.accepted > 0 for seq in seqs), len(seqs), sum(kept) / len(kept))


def test_chains_that_are_looked_at_when_they_are_done_are_the_same(monkeypatch):
    """As a GPU has them."""
    drafts, ways = [], (Eagle._chains, Eagle._blind_chains)
    for stop in (0.0, 0.03):
        for way in ways:
            monkeypatch.setattr(Eagle, "_chains", way)
            drafter = drafters.build(f"eagle:head=eagle,length=5,stop={stop}", parts("llama"))
            asked = [Sequence(i, tokens, SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(6))]
            with begun(drafter, asked) as seqs:
                drafts.append([draft.tokens for draft in drafter.propose(seqs, [64, 64, 64, 2, 64, 1])])
    assert drafts[0] == drafts[1]
    assert drafts[2] == drafts[3]
    assert [len(tokens) for tokens in drafts[0]] == [5, 5, 5, 2, 5, 1]


@pytest.mark.parametrize("spec", ["eagle:head=eagle,length=4", "eagle:head=eagle,length=4,tree=10"])
def test_a_text_that_is_not_asked_for_a_while_is_caught_up_with(spec):
    """The states of skipped steps wait and are taken in later: the draft is the same."""
    drafts = []
    for asked in (True, False):
        drafter = drafters.build(spec, parts("llama"))
        with begun(InVain(drafter, asked), [Sequence(0, list(TEXTS[0]), SamplingParams(max_tokens=30))], 8) as seqs:
            drafts += drafter.propose(seqs, [20])
    assert len(drafts[0]) > 3
    assert drafts[0].tokens == drafts[1].tokens
    assert drafts[0].parents == drafts[1].parents


@contextlib.contextmanager
def begun(drafter, seqs, steps=1, limits=Limits()):
    """The sequences after some steps; afterwards the model, which tests share, forgets them."""
    engine = new_engine(model(), drafter, limits)
    for seq in seqs:
        engine.add(seq)
    for _ in range(steps):
        engine.step()
    try:
        yield seqs
    finally:
        for seq in seqs:
            engine.cancel(seq.id)


class InVain(Drafter):
    """Shows nothing of what the drafter behind it says, if it asks at all."""

    def __init__(self, inner, asks):
        self.inner, self.asks, self.layers = inner, asks, inner.layers
        self.observe, self.forget = inner.observe, inner.forget

    def propose(self, seqs, budgets):
        if self.asks:
            self.inner.propose(seqs, budgets)
        return super().propose(seqs, budgets)


def test_a_long_prompt_is_taken_in_piece_by_piece(monkeypatch):
    """States do not pile up; what the head says is what it says after one piece."""
    tokens = torch.randint(40, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    drafts = []
    for piece in (512, 7):
        monkeypatch.setattr("outrider.drafters.eagle.drafter.PENDING", piece)
        drafter = drafters.build("eagle:head=eagle,length=5", parts("llama"))
        with begun(drafter, [Sequence(0, list(tokens), SamplingParams(max_tokens=20))], 9, Limits(chunk=11)) as seqs:
            assert seqs[0].output
            assert drafter._states[0].waiting == (90 if piece == 512 else 3)
            drafts += drafter.propose(seqs, [5])
    assert drafts[0].tokens == drafts[1].tokens
    assert drafts[0].acceptance == pytest.approx(drafts[1].acceptance, abs=1e-4)


@pytest.mark.parametrize("spec", ["eagle:head=eagle,length=5", "eagle:head=eagle,tree=9"])
def test_what_waits_in_pieces_is_what_waits_as_a_whole(monkeypatch, spec):
    """The head is not asked for many passes of two sequences; then it drafts as if nothing had been put together."""
    drafts = []
    for joined in (1000, 1, 5):
        monkeypatch.setattr("outrider.drafters.eagle.drafter.JOIN_EVERY", joined)
        drafter = drafters.build(spec, parts("llama"))
        seqs = [Sequence(id, list(TEXTS[id]), SamplingParams(max_tokens=40)) for id in range(2)]
        with begun(InVain(drafter, asks=False), seqs, 23):
            pieces = [len(drafter._states[id].pending) for id in range(2)]
            assert max(pieces) == {1000: 23, 1: 23, 5: 7}[joined]
            tokens, shown = drafter.waiting(seqs[0])
            assert (len(tokens), len(shown)) == (sum(len(rows) for _, rows in shown), 2)
            drafts.append([(d.tokens, d.parents, d.acceptance) for d in drafter.propose(seqs, [5, 5])])
    assert drafts[0] == drafts[1] == drafts[2]
    assert all(tokens for tokens, _, _ in drafts[0])


@pytest.mark.native
def test_few_sequences_have_a_call_for_each_chain(monkeypatch):
    """Which says what all chains together, step by step, say."""
    drafts, calls, chain = [], [], PackedRunner.chain
    monkeypatch.setattr(PackedRunner, "chain", lambda self, id, *given: (calls.append(id), chain(self, id, *given))[1])
    torch.manual_seed(7)
    own = {"own": eagle_head(packed_model()).requires_grad_(False)}
    for few in (3, 2):
        monkeypatch.setattr("outrider.drafters.eagle.drafter.FEW", few)
        drafter = drafters.build("eagle:head=own,length=4,stop=0", BuildContext(packed_model(), None, heads=own))
        calls.clear()  # it tried itself on loading
        seqs = [Sequence(id, list(TEXTS[id % len(TEXTS)]), SamplingParams(max_tokens=40)) for id in range(3)]
        engine = written_in_vain(drafter, seqs)
        drafts.append(drafter.propose(seqs, [4, 4, 4]))
        assert calls == ([0, 1, 2] if few == 3 else [])
        for seq in seqs:
            engine.cancel(seq.id)
    assert [draft.tokens for draft in drafts[0]] == [draft.tokens for draft in drafts[1]]
    assert all(len(draft) == 4 for draft in drafts[0])


def test_a_large_pass_is_not_kept_for_a_row_of_it(monkeypatch):
    monkeypatch.setattr("outrider.drafters.eagle.drafter.LARGE", 0)
    hidden = torch.randn(40, 3, 8)
    state = _EagleState(0)
    state.show(hidden[4:6], [0])
    state.show(hidden[:30], range(30))
    (few, rows), (many, _) = state.pending
    assert few.untyped_storage().nbytes() == hidden[:1].nbytes
    assert many.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr()
    assert torch.equal(few[rows], hidden[4:5])


def test_a_head_that_rests_keeps_no_more_than_it_may(monkeypatch):
    """What comes later it is shown again, from there on."""
    monkeypatch.setattr("outrider.drafters.eagle.drafter.RESTING", 60)
    drafter = drafters.build("eagle:head=eagle,length=3", parts("llama"))
    seq = Sequence(0, [1] * 51, SamplingParams(max_tokens=20))
    for count, waiting in ((50, 50), (10, 60), (1, 0), (4, 4)):
        seq.tokens.extend([1] * count)
        drafter.observe(
            Step(seq, [1] * count, EMPTY, Verdict((), 1), torch.randn(count, len(drafter.layers), 32), True)
        )
        assert (drafter._states[0].waiting if 0 in drafter._states else 0) == waiting
    assert drafter._ready(seq)


def test_what_was_left_is_not_read_for_a_text_that_ends_soon(monkeypatch):
    monkeypatch.setattr("outrider.drafters.eagle.drafter.PENDING", 20)
    for left, waiting in ((3, 51), (4, 1)):  # 50 rows and one more; 16 for each token that is left
        drafter = drafters.build("eagle:head=eagle,length=3", parts("llama"))
        seq = Sequence(0, [1] * 51, SamplingParams(max_tokens=left + 2))
        for rests in (True, False):
            seq.append(Token(1))
            fed = 50 if rests else 1
            drafter.observe(
                Step(seq, [1] * fed, EMPTY, Verdict((), 1), torch.randn(fed, len(drafter.layers), 32), rests)
            )
        assert (seq.left, drafter._states[0].waiting) == (left, waiting)


def test_lookup_is_taken_where_it_promises_more_and_the_head_elsewhere():
    repeating = [5, 9, 13, 22, 31, 7] * 6
    seqs = [
        Sequence(0, list(repeating), SamplingParams(max_tokens=24)),
        Sequence(1, list(TEXTS[0]), SamplingParams(max_tokens=24)),
    ]
    drafter = drafters.build("eagle:head=eagle,lookup=3", parts("llama"))
    engine = run(model(), drafter, seqs)
    plain = [plainly(model(), seq.tokens[: seq.prompt], SamplingParams(max_tokens=24)) for seq in seqs]
    assert outputs(seqs) == outputs(plain)
    assert engine.stats.drafted_by_drafter["ngram"] > 0
    assert engine.stats.drafted_by_drafter["eagle"] > 0


def test_several_heads_and_none_share_a_batch():
    seqs = []
    engine = new_engine(model(), drafters.build("none", parts("llama")))
    specs = ["", "eagle:head=eagle,tree=8", "eagle:head=eagle_cut,length=3", "medusa:head=medusa", "eagle:head=eagle_1"]
    for spec in specs[1:]:
        engine.drafters[spec] = drafters.build(spec, parts("llama"))
    for i, tokens in enumerate(prompts(10)):
        seqs.append(Sequence(i, list(tokens), SamplingParams(max_tokens=20), draft=specs[i % 5]))
        engine.add(seqs[-1])
    while engine.busy:
        engine.step()
    plain = [plainly(model(), seq.tokens[: seq.prompt], SamplingParams(max_tokens=20)) for seq in seqs]
    assert outputs(seqs) == outputs(plain)
    assert {token.drafter for seq in seqs for token in seq.output} >= {None, "eagle", "medusa"}


def test_nothing_is_left_of_a_sequence_that_ended():
    drafter = drafters.build("eagle:head=eagle,lookup=2", parts("llama"))
    run(model(), drafter, [Sequence(i, tokens, SamplingParams(max_tokens=9)) for i, tokens in enumerate(prompts(8))])
    head, lookup = drafter.members
    assert head._states == {}
    assert head._runner._slots.lengths == {}
    assert lookup._states == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("length=-1", "eagle:length must be at least 0"),
        ("tree=-3", "eagle:tree must be at least 0"),
        ("width=0", "eagle:width must be at least 1"),
        ("stop=1.5", "eagle:stop must be at least 0 and below 1"),
        ("head=nowhere", "no folder nowhere"),
        ("head=medusa", "medusa:head=medusa"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(OutriderError, match=reason):
        drafters.build(f"eagle:head=eagle,{options}" if "head" not in options else f"eagle:{options}", parts("llama"))


def test_a_target_that_cannot_be_read_is_refused():
    with pytest.raises(OutriderError, match="llama-like target"):
        drafters.build("eagle:head=eagle", BuildContext(family("gpt2")[1], None, heads=random_heads(model())))


def test_without_a_shipped_head_the_error_says_how_to_get_one():
    with pytest.raises(OutriderError, match="outrider train eagle --model tiny --out DIR"):
        drafters.build("eagle", BuildContext(model(), None, "tiny"))


@pytest.mark.native
def test_quantised_heads_beside_a_dense_target():
    packable = packs.saved(packs.reference("llama"), packs.tiny.CPU).model
    drafter = Eagle(
        Eagle.Options(head="own", quantize="int8"), BuildContext(packable, None, heads={"own": eagle_head(packable)})
    )
    assert isinstance(drafter._runner, PackedRunner)


@pytest.mark.native
def test_the_first_chain_of_a_packed_head_is_nobodys(monkeypatch):
    """Written on loading, and nothing of it is left."""
    target = packed_model()
    written = []
    real = PackedRunner.chain

    def counted(self, id, *more):
        written.append((id, real(self, id, *more)))
        return written[-1][1]

    monkeypatch.setattr(PackedRunner, "chain", counted)
    head = eagle_head(target, norm_inputs=True)
    drafter = Eagle(Eagle.Options(head="own"), BuildContext(target, None, heads={"own": head}))
    assert [(id, len(chain)) for id, chain in written] == [(-1, 2)]
    runner = drafter._runner
    assert not runner._lengths
    assert not runner._words
    assert runner.pages.length(-1) == 0


EXTREME = [  # values that a request can no longer have; a processor can still bring such logits about
    dict(temperature=1e39),
    dict(temperature=1e308),
    dict(temperature=5e-324),
    dict(repetition_penalty=1e-38),
    dict(presence_penalty=-1e39),
    dict(frequency_penalty=-1e38),
]


def extreme(values, temperature):
    params = SamplingParams(max_tokens=10, temperature=temperature)
    for name, value in values.items():
        object.__setattr__(params, name, value)  # past the bounds
    return params


class TestOverflow:
    """Numbers that overflow give no draft, and nothing else: neither an error nor another's draft."""

    SPECS = (
        "eagle:head=eagle,length=3",
        "eagle:head=eagle,length=4,tree=9,width=3",
        "eagle:head=eagle_cut,length=4,lookup=2",
        "medusa:head=medusa,nodes=9,length=3",
    )

    @pytest.mark.parametrize("values", EXTREME, ids=str)
    @pytest.mark.parametrize("spec", SPECS)
    def test_extreme_values(self, spec, values):
        for temperature, rule in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection")):
            drafter = drafters.build(spec, parts("llama"))
            asked = [
                Sequence(0, [1, 2, 3] * 3, extreme(values, temperature), dice=Dice(0), rule=rule),
                Sequence(1, [1, 2, 3] * 3, SamplingParams(max_tokens=10)),
            ]
            with begun(drafter, asked) as seqs:
                _, other = drafter.propose(seqs, [4, 4])
                assert other
                assert all(0.0 < p < 1.0 for p in other.acceptance)
            with begun(drafter, [Sequence(2, [1, 2, 3] * 3, SamplingParams(max_tokens=10))]) as seqs:
                assert drafter.propose(seqs, [4])[0].tokens == other.tokens

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("spec", SPECS)
    @pytest.mark.parametrize(("temperature", "rule"), [(0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection")])
    def test_a_head_whose_logits_overflow_drafts_nothing(self, spec, wrong, temperature, rule):
        drafter = drafters.build(spec.replace(",lookup=2", ""), parts("llama"))
        params = SamplingParams(max_tokens=10, temperature=temperature)
        with begun(drafter, [Sequence(0, list(TEXTS[0]), params, dice=Dice(1), rule=rule)]) as seqs:
            broken(drafter, wrong)
            assert len(drafter.propose(seqs, [4])[0]) == 0

    def test_a_slot_that_held_a_nan_is_clean_for_the_next_sequence(self):
        own, runner = head("eagle-3"), DenseRunner(head("eagle-3"), model())
        hidden = torch.randn(5, len(own.config.layers), model().anatomy.hidden_size)
        runner.extend([0], [[1, 2, 3, 4, 5, 6]], torch.full((6, *hidden.shape[1:]), float("nan")))
        runner.free(0)
        runner.extend([1], [[1, 2]], hidden[:2])
        runner.extend([2], [[1, 2, 3]], hidden[:3])
        both = runner.extend([1, 2], [[7], [7]], hidden[3:])  # the longer one's mask covers the end of the other's slot
        assert both.logits.isfinite().all()


def broken(drafter, wrong):
    """Its output matrix gives logits that are all `wrong`."""
    if isinstance(drafter, Eagle):
        output = drafter._runner._output
        drafter._runner._output = lambda x, *more: torch.full_like(output(x, *more), wrong)
    else:
        drafter._outputs = [lambda x, one=one: torch.full_like(one(x), wrong) for one in drafter._outputs]


class TestMemory:
    """The head's keys: as many as the budget allows, and gone with their sequences."""

    def hidden(self, rows):
        return torch.randn(rows, len(head("eagle-3").config.layers), model().anatomy.hidden_size)

    def test_slots_shrink_when_sequences_end(self):
        runner = DenseRunner(head("eagle-3"), model())
        before = runner._slots.keys.nbytes
        for id in range(24):
            runner.extend([id], [list(range(40)) * (1 + 20 * (id == 5))], self.hidden(40 * (1 + 20 * (id == 5))))
        most = runner._slots.keys.nbytes
        assert most >= 24 * 4 * before
        for id in range(23):
            runner.free(id)
        assert runner._slots.keys.nbytes <= 8 * before
        assert runner._slots.lengths == {23: 40}
        runner.free(23)
        assert runner._slots.keys.nbytes == before

    def test_what_is_left_is_moved_whole(self):
        """A sequence goes on as it would have, had there been no others."""
        torch.manual_seed(0)
        alone, runner = (DenseRunner(head("eagle-3"), model()) for _ in range(2))
        first, more = self.hidden(30), self.hidden(1)
        for id in range(16):
            runner.extend([id], [list(range(30))], first if id == 11 else self.hidden(30))
        for id in range(16):
            if id != 11:
                runner.free(id)
        assert runner._slots.keys.shape[1] < 16
        alone.extend([11], [list(range(30))], first)
        torch.testing.assert_close(
            runner.extend([11], [[3]], more).logits, alone.extend([11], [[3]], more).logits, atol=1e-5, rtol=1e-5
        )

    def test_a_sequence_that_outgrows_its_share_begins_anew(self):
        """What is written is the same, and drafts go on."""
        target = Markov(seed=1)
        heads = random_heads(target)
        config = heads["eagle"].config
        memory = 60 * 4 * 2 * 4 * config.depth * config.num_kv_heads * config.head_dim  # 60 tokens, as torch keeps them
        wanted = outputs([plainly(Markov(seed=1), [0, 1, 2], SamplingParams(max_tokens=50))])
        context = BuildContext(target, None, heads=heads, cache_bytes=memory)
        drafter = Recording(drafters.build("eagle:head=eagle,length=3", context))
        held, drafted = [], []
        inner = drafter.inner

        def observe(step):
            Recording.observe(drafter, step)
            inner._restart_long()
            held.append([state.taken + state.waiting for state in inner._states.values()])
            drafted.append(any(map(len, drafter.last)))

        drafter.observe = observe
        seqs = [Sequence(i, [0, 1, 2], SamplingParams(max_tokens=50)) for i in range(3)]
        run(target, drafter, seqs)
        assert outputs(seqs) == wanted * 3
        assert all(max(lengths, default=0) <= 60 // max(len(lengths), 1) for lengths in held[:-6])
        assert max(map(max, filter(None, held))) > 15
        assert any(drafted[-30:])


def test_a_blind_chain_runs_no_more_steps_than_the_widest_budget_needs():
    drafter = drafters.build("eagle:head=eagle,length=6", parts("llama"))
    asked = [Sequence(i, tokens, SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(3))]
    with begun(drafter, asked) as seqs:
        expected = [draft.tokens for draft in drafter.propose(seqs, [1, 3, 2])]
    drafter = drafters.build("eagle:head=eagle,length=6", parts("llama"))
    asked = [Sequence(i, tokens, SamplingParams(max_tokens=20)) for i, tokens in enumerate(prompts(3))]
    with begun(drafter, asked) as seqs:
        step, calls = drafter._runner.step, []
        drafter._runner.step = lambda *given: calls.append(given) or step(*given)
        choosers = [Chooser(seq, budget, False) for seq, budget in zip(seqs, [1, 3, 2], strict=True)]
        drafter._blind_chains(choosers, drafter._catch_up(seqs))
    assert [tuple(chooser.tokens) for chooser in choosers] == expected
    assert len(calls) == 2


class TestLoss:
    """What training rests on."""

    def test_it_falls_and_the_head_learns(self):
        target = model()
        learner = eagle.fresh(target)
        learned = lesson(target, learner, TEXTS)
        optimizer = torch.optim.AdamW(learner.parameters(), 1e-2)
        losses, hits = [], []
        for _ in range(25):
            loss, figures = eagle.loss(learner, learned, Comparison(3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(figures["loss"]))
            hits.append(float(figures["hit3"]))
        assert losses[-1] < 0.9 * losses[0]
        assert hits[-1] > hits[0] + 0.2

    def test_only_what_the_mask_counts_counts(self):
        target, own = model(), head("eagle-3")
        learned = lesson(target, own, TEXTS)
        learned.mask[:, :8] = False
        first, _ = eagle.loss(own, learned, Comparison(2))
        learned.tokens[:, -1] = 0  # the last token is predicted by nobody that counts as an input
        learned.mask[:, -1] = False
        learned.last[:, -1] = torch.randn_like(learned.last[:, -1])
        learned.hidden[:, -1] = torch.randn_like(learned.hidden[:, -1])
        second, _ = eagle.loss(own, learned, Comparison(2))
        learned.last[:, -1] *= 5.0
        third, _ = eagle.loss(own, learned, Comparison(2))
        assert float(first) != float(second)
        assert float(second) == float(third)

    def test_keep_is_the_overlap_of_both_laws_and_hit_that_of_the_likeliest(self):
        target, own = model(), head("cut, two layers, normed output")
        learned = lesson(target, own, TEXTS)
        _, figures = eagle.loss(own, learned, Comparison(STEPS))
        laws = learned.logits(torch.arange(learned.tokens.numel())).softmax(-1).view(*learned.tokens.shape, -1)
        for step, said in enumerate(in_training(own, target)):
            until = len(TEXTS[0]) - 2 - step
            p, q = laws[:, 1 + step : 1 + step + until], torch.softmax(said[:, :until], -1)
            full = torch.zeros_like(p).index_copy_(2, own.draft_ids, q)
            keep = torch.minimum(p, full).sum(-1).mean()
            assert float(figures[f"keep{step + 1}"]) == pytest.approx(float(keep), abs=1e-5)
            hit = (p.argmax(-1) == full.argmax(-1)).float().mean()
            assert float(figures[f"hit{step + 1}"]) == pytest.approx(float(hit), abs=1e-6)

    def test_temperature_and_focus_weigh_as_they_say(self):
        """A reference in loops: the laws at that temperature; places after unlikely tokens and reached nodes first."""
        target, own = model(), head("cut, two layers, normed output")
        learned, how = lesson(target, own, TEXTS), Comparison(STEPS, 0.5, focus=True)
        total, _ = eagle.loss(own, learned, how)
        laws = (learned.logits(torch.arange(learned.tokens.numel())) / 0.5).softmax(-1).view(*learned.tokens.shape, -1)
        best = laws.amax(-1)  # at i: of token i + 1
        expected, hits = 0.0, {}
        for step, said in enumerate(in_training(own, target)):
            logs = torch.log_softmax(said / 0.5, -1)
            losses, weights = [], []
            for text in range(len(TEXTS)):
                for token in range(2 + step, len(TEXTS[0])):
                    p, q = laws[text, token - 1, own.draft_ids], logs[text, token - 2 - step]
                    first = token - step
                    weight = eagle.BEGINS - float(best[text, first - 2])
                    for k in range(step):
                        weight *= eagle.UNREACHED + (1 - eagle.UNREACHED) * hits[k, text, first + k]
                    weights.append(weight)
                    losses.append(float(-(p * q).sum() + 0.7 * (1 - torch.minimum(p, q.exp()).sum())))
                    hits[step, text, token] = float(p[q.argmax()] >= best[text, token - 1])
            mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
            expected += 0.8**step * mean
        assert float(total.detach()) == pytest.approx(expected, rel=1e-4)

    def test_it_works_in_bfloat16(self):
        target, own = model(), eagle.fresh(model(), torch.arange(20))
        learned = lesson(target, own, TEXTS)
        exact, _ = eagle.loss(own, learned, Comparison(6))
        with torch.autocast("cpu", torch.bfloat16):
            rough, _ = eagle.loss(own, learned, Comparison(6))
        assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=0.05)
        rough.backward()
        assert all(weight.grad is not None for weight in own.parameters())

    @pytest.mark.parametrize("kind", OWN)
    def test_a_fresh_head_begins_from_the_targets_last_layer(self, kind):
        target = family(kind)[1]
        own = eagle.fresh(target).requires_grad_(False)
        assert own.reads == (0, 1, 2)
        ours, theirs = own.layers[0].mlp.down_proj.weight, target.tensor("model.layers.2.mlp.down_proj.weight")
        loud = float(theirs.norm() / ours.norm())  # the state is so much quieter than the target's residual
        torch.testing.assert_close(ours * loud, theirs)
        gate = target.tensor("model.layers.2.mlp.gate_proj.weight")
        torch.testing.assert_close(own.layers[0].mlp.gate_proj.weight, gate)

    def test_what_the_layers_add_is_as_loud_beside_the_state_as_in_the_target(self):
        """Else a head has to unlearn that first."""
        target = model()
        # reading this block last, its state is the residual that the last layer reads, normalised
        own = eagle.fresh(target, layers=(0, 1)).requires_grad_(False)
        learned = lesson(target, own, TEXTS)
        state = own.combine(learned.hidden)
        residual = learned.hidden[:, :, -1]
        mlp = own.layers[0].mlp
        normed = own.layers[0].post_attention_layernorm(residual)
        ours = mlp(normed).norm(dim=-1) / state.norm(dim=-1)
        gate, up, down = (target.tensor(f"model.layers.2.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        theirs = F.linear(F.silu(normed @ gate.T) * (normed @ up.T), down).norm(dim=-1) / residual.norm(dim=-1)
        assert 0.5 < float((ours / theirs).median()) < 2.0

    def test_blocks_that_the_target_has_not_are_refused(self):
        with pytest.raises(OutriderError, match="the target has 3 blocks"):
            eagle.fresh(model(), layers=(1, 3))


@pytest.mark.parametrize("kind", OWN)
def test_every_weight_of_a_target_can_be_read(kind):
    """Under its Hugging Face name, dense, as transformers has it."""
    theirs, ours, _ = family(kind)
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.tensor(name), weight)


@pytest.mark.native
def test_weights_of_a_packed_target_are_what_was_packed():
    target = packs.rounded(packs.reference("llama", seed=3), 8)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        torch.testing.assert_close(packed_model().tensor(name), target.tensor(name), atol=1e-6, rtol=1e-5)
