"""Prompts that begin alike are run once on a CPU too, and the text is the same as without that."""

import functools
import itertools

import packs
import pytest
import tiny
from hypothesis import given, settings, strategies as st
from packs import VOCAB
from tiny import ALL_SPECS, drain, new_engine, plainly

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.engine.cost import PassCost
from outrider.engine.drafting import READS_LATE
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.base import Paged, SharesPrefixes
from outrider.models.llama import PackedLlama
from outrider.models.paged_cache import SIZE
from outrider.models.prefix_file import PrefixFile

pytestmark = pytest.mark.native

IDS = itertools.count()
NONE = Drafter(Drafter.Options(), None)


def weights():
    model, _ = packs.family("llama", 4)
    return model.config, model.weights


def fresh(pages=1000):
    """The model with a cache of its own."""
    return PackedLlama(*weights(), memory=pages * SIZE * 2 * 3 * 2 * 8 * 4)


def tokens(count, seed=0):
    return [(i * i + 7 * seed * i + i // 5 + seed) % VOCAB for i in range(count)]


@functools.cache
def _alone(prompt, **params):
    return bits(plainly(fresh(), list(prompt), SamplingParams(**params), dice=Dice(params["seed"])))


def alone(seq):
    """What the sequence writes plainly on a model that has seen nothing."""
    given = {key: getattr(seq.params, key) for key in ("max_tokens", "temperature", "seed", "logprobs")}
    return _alone(tuple(seq.tokens[: seq.prompt]), **given)


def bits(seq):
    """Its tokens, and the logits that they were chosen from."""
    return [(token.id, token.logprob, token.top) for token in seq.output]


def ask(prompt, count=12, **more):
    params = SamplingParams(max_tokens=count, logprobs=3, **more)
    return Sequence(next(IDS), list(prompt), params, dice=Dice(params.seed))


class Counted(PackedLlama):
    """Counts the tokens that it is fed, and may fail."""

    fed, fails = 0, False

    def forward(self, feeds, layers=()):
        if self.fails:
            self.fails = False
            raise OutriderError("out of memory")
        self.fed += sum(len(feed.tokens) for feed in feeds)
        return super().forward(feeds, layers)


def counted(pages=1000):
    return Counted(*weights(), memory=pages * SIZE * 2 * 3 * 2 * 8 * 4)


def run(engine, seqs):
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert [bits(seq) for seq in seqs] == [alone(seq) for seq in seqs]
    return [seq.stats.cached for seq in seqs]


def test_it_shares_but_does_not_write_by_itself():
    assert isinstance(fresh(), SharesPrefixes)
    assert not isinstance(fresh(), Paged)
    assert not isinstance(tiny.ours(tiny.reference("llama")), SharesPrefixes)  # there a row's bits depend on its chunk


@pytest.mark.parametrize("spec", ["none", "eagle:head=eagle,length=3", "draft_model:model=noisy,length=2"])
def test_tenants_share_nothing(spec):
    """Neither one after the other nor at the same time, when a tenant would wait for what it cannot take."""
    model, models = fresh(), {"noisy": fresh()}
    parts = BuildContext(model, lambda name, quantize: models[name], heads=heads())
    engine = new_engine(model, drafters.build(spec, parts))

    def of(tenant):
        seq = ask(tokens(100))
        seq.tenant = tenant
        return seq

    assert run(engine, [of("one")]) == [0]
    assert run(engine, [of("two"), of("three"), of("three")])[:2] == [0, 0]
    assert run(engine, [of("one"), of("two")]) == [96, 96]
    assert run(engine, [of("")]) == [0]


def test_no_tenant_waits_for_what_another_runs():
    """It could not take it over; and that it waits would tell it of the other's prompt."""
    engine, seqs = new_engine(fresh(), NONE), [ask(tokens(100)) for _ in range(3)]
    for seq, tenant in zip(seqs, ("one", "two", "two"), strict=True):
        seq.tenant = tenant
        engine.add(seq)
    engine.step()
    assert [engine.model.length(seq.id) for seq in seqs] == [100, 100, 0]
    drain(engine)


def test_capacity_is_the_budget_in_whole_pages():
    assert fresh(10).capacity == 10 * SIZE


def test_the_second_turn_of_a_chat_runs_only_what_is_new():
    engine = new_engine(counted(), NONE)
    first = ask(tokens(70), 30)
    assert run(engine, [first]) == [0]
    before, prompt = engine.model.fed, [*first.tokens, *tokens(5, 1)]
    assert run(engine, [second := ask(prompt)]) == [96]  # 99 tokens of the first turn were run; whole pages of them
    assert engine.model.fed - before == len(prompt) - 96 + 11
    assert engine.stats.cached == 96
    assert second.stats.as_dict()["cached"] == 96


def test_chats_at_once_over_one_prompt_run_it_once():
    engine = new_engine(counted(), NONE, Limits(chunk=64))
    system = tokens(6 * SIZE)
    chats = [ask([*system, *tokens(3, seed)], 4) for seed in range(8)]
    hits = run(engine, chats)
    assert hits == [0, *[6 * SIZE] * 7]
    assert engine.model.fed == sum(len(seq.tokens) - 1 for seq in chats) - 7 * 6 * SIZE


def test_no_token_of_a_prompt_is_run_twice_where_the_last_chunk_leaves_a_budget():
    engine = new_engine(counted(), NONE, Limits(chunk=80))
    prompt = tokens(5 * SIZE + 9)
    samples = [ask(prompt, 3) for _ in range(4)]
    for seq in samples:
        seq.request = 1
    assert run(engine, samples) == [0, *[5 * SIZE] * 3]


def test_one_that_begins_otherwise_does_not_wait():
    engine = new_engine(counted(), NONE, Limits(chunk=SIZE + 8))
    same, other = tokens(2 * SIZE + 6), tokens(SIZE, 5)
    seqs = [ask(same), ask(same), ask(other)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    assert [engine.model.length(seq.id) for seq in seqs] == [SIZE + 8, 0, 0]
    engine.step()
    assert [engine.model.length(seq.id) for seq in seqs] == [2 * SIZE + 6, SIZE, 10]
    drain(engine)
    assert [bits(seq) for seq in seqs] == [alone(seq) for seq in seqs]


def test_one_that_joins_takes_what_is_run_by_then():
    engine = new_engine(counted(), NONE, Limits(chunk=SIZE))
    prompt = tokens(4 * SIZE + 1)
    early, late = ask(prompt), ask(prompt)
    engine.add(early)
    engine.step()
    engine.step()
    engine.add(late)
    drain(engine)
    assert (early.stats.cached, late.stats.cached) == (0, 4 * SIZE)
    assert bits(early) == bits(late) == alone(late)


def test_a_cancelled_sequence_leaves_what_it_has_run_to_the_one_that_waits():
    engine = new_engine(counted(), NONE, Limits(chunk=SIZE))
    prompt = tokens(4 * SIZE + 1)
    first, second = ask(prompt), ask(prompt)
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.step()
    engine.cancel(first.id)
    drain(engine)
    assert second.stats.cached == 2 * SIZE
    assert bits(second) == alone(second)


def test_a_pass_that_fails_leaves_nothing_to_share():
    engine = new_engine(counted(), NONE, Limits(chunk=SIZE))
    prompt = tokens(3 * SIZE)
    first = ask(prompt)
    engine.add(first)
    engine.step()
    engine.model.fails = True
    with pytest.raises(OutriderError, match="out of memory"):
        engine.step()
    first.fail("out of memory")
    engine.sweep()
    assert run(engine, [ask(prompt)]) == [SIZE]


@pytest.mark.parametrize("pages", [8, 11, 20])
def test_under_eviction(pages):
    """What is kept never keeps a request from running, and what was evicted is run again."""
    engine = new_engine(counted(pages), NONE, Limits(batch=3, budget=0))
    for turn in range(4):
        run(engine, [ask(tokens(40 + 25 * n, n), 20 + turn) for n in (0, 1, 2, 3, 1)])
        assert engine.scheduler.reserved == 0
        assert engine.model._pages._unused <= pages


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_with_every_drafter(spec):
    """Turns of a chat, two samples at once: the text is that of plain decoding without a cache."""
    drafter = drafters.build(spec, packs.parts("llama", 4))
    engine = new_engine(packs.family("llama", 4)[0], drafter)
    prompt, hits = tokens(2 * SIZE + 3, seed=9), []
    for turn in range(3):
        seqs = [ask(prompt), ask(prompt, temperature=0.8, seed=turn)]
        for seq in seqs:
            engine.add(seq)
        drain(engine)
        assert [bits(seq) for seq in seqs] == [alone(seq) for seq in seqs]
        hits.append(seqs[0].stats.cached)
        prompt = [*seqs[0].tokens, *tokens(8, turn)]
    assert (min(hits[1:]) > 0) == drafter.takes_prefixes


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_after_a_restart_with_every_drafter(spec, tmp_path):
    """What the file brings back is taken, and the text is that of plain decoding without a cache."""
    prompt, hits = tokens(3 * SIZE + 3, seed=9), []
    for turn in range(2):
        model = fresh()
        _, models = packs.family("llama", 4)
        context = BuildContext(model, lambda name, quantize, models=models: models[name], heads=heads())
        drafter = drafters.build(spec, context)
        caches = {model.identity(): model.pages}
        for member in drafter.members:
            caches |= member.prefix_caches(model.identity())
        file, engine = PrefixFile(tmp_path / "cache", caches, 1 << 30), new_engine(model, drafter)
        assert file.notes == []
        hits.append(run(engine, [ask(prompt), ask(prompt, temperature=0.8, seed=turn)]))
        file.close()
        prompt = [*prompt, *tokens(8, turn)]
    assert hits[0][0] == 0
    assert (min(hits[1]) >= 2 * SIZE) == drafter.takes_prefixes


@pytest.mark.parametrize("pages", [5, 9, 1000])
def test_under_eviction_after_a_restart(pages, tmp_path):
    """A smaller cache than the one that was saved: it takes what fits, evicts it again, and no text changes."""
    path = tmp_path / "cache"
    for memory in (1000, pages):
        model = fresh(max(memory, 9))
        file = PrefixFile(path, {model.identity(): model.pages}, 1 << 30)
        engine = new_engine(model, NONE, Limits(batch=3, budget=0))
        for turn in range(3):
            seqs = [ask(tokens(40 + 25 * n, n), 20 + turn) for n in (0, 1, 2, 3, 1)]
            for seq in seqs[:3]:
                engine.add(seq)
            engine.step()
            engine.cancel(seqs[1].id)
            run(engine, [ask(seq.tokens[: seq.prompt], 9) for seq in seqs])
            assert bits(seqs[0]) == alone(seqs[0])
        file.close()


def guesses(engine, prompt):
    seq = Sequence(next(IDS), list(prompt), SamplingParams(max_tokens=30))
    engine.add(seq)
    drain(engine)
    assert seq.stats.drafted > 0
    return seq.stats.cached, [(token.id, token.drafter, token.depth) for token in seq.output]


# A block head keeps no prefixes: beside it prompts are run anew (docs/guides/heads.md).
KEEP = set(tiny.HEADS) - {"block"}
HEADS = [spec for spec in ALL_SPECS if spec.split(":")[0] in KEEP and "lookup" not in spec and "+" not in spec]


@pytest.mark.parametrize("spec", HEADS)
def test_a_head_drafts_as_if_it_had_read_the_whole_prompt(spec):
    """Its own keys of the prefix are kept as well, or it needs none of them."""
    engines = []
    for _ in range(2):
        model = fresh()
        engines.append(new_engine(model, drafters.build(spec, BuildContext(model, None, heads=heads()))))
    one, other = engines
    _, first = guesses(one, tokens(3 * SIZE, 4))
    prompt = [*tokens(3 * SIZE, 4), *(id for id, _, _ in first), *tokens(9, 5)]
    cached, after = guesses(one, prompt)
    assert cached == 3 * SIZE
    assert guesses(other, prompt) == (0, after)


def heads():
    return packs.family_heads("llama", 4)


@pytest.mark.parametrize("method", ["prefix", "begin"])
def test_a_drafter_that_fails_at_a_prefix_costs_its_drafts_only(method):
    def fail(*_):
        raise RuntimeError("no prefix")

    failing = type("Failing", (Drafter,), {method: fail, "name": "failing"})(Drafter.Options(), None)
    engine, prompt = new_engine(fresh(), failing), tokens(3 * SIZE, 8)
    assert run(engine, [ask(prompt)]) == [0]
    assert run(engine, [ask(prompt)]) == [2 * SIZE if method == "begin" else 0]


def test_a_head_that_lacks_the_prefix_is_shown_all_of_it():
    """The target has it from a sequence without a head."""
    model = fresh()
    engine = new_engine(model, drafters.build("eagle:head=eagle,length=3", BuildContext(model, None, heads=heads())))
    engine.drafters["none"] = NONE
    prompt = tokens(3 * SIZE, 6)
    plain = Sequence(next(IDS), list(prompt), SamplingParams(max_tokens=9), draft="none")
    engine.add(plain)
    drain(engine)
    cached, found = guesses(engine, prompt)
    assert (cached, [id for id, _, _ in found][:9]) == (0, [token.id for token in plain.output])
    assert guesses(engine, prompt)[0] == 2 * SIZE


def test_heads_of_chats_at_once_share_too():
    model = fresh()
    context = BuildContext(model, None, heads=heads())
    engine = new_engine(model, drafters.build("eagle:head=eagle,length=3", context), Limits(chunk=80))
    chats = [ask([*tokens(6 * SIZE), *tokens(3, seed)], 9) for seed in range(4)]
    for seq in chats:
        engine.add(seq)
    drain(engine)
    assert [bits(seq) for seq in chats] == [alone(seq) for seq in chats]
    assert min(seq.stats.cached for seq in chats[1:]) >= 4 * SIZE


def test_a_head_that_rests_reads_nothing_and_keeps_nobody_from_sharing(monkeypatch):
    """Where rows are dear nothing is drafted for four at once; for one alone, which comes later, the head reads."""
    taken, extend = [], PackedRunner.extend
    monkeypatch.setattr(PackedRunner, "extend", lambda self, *given: (taken.append(1), extend(self, *given))[1])
    model, cost = fresh(), PassCost()
    for rows in (1, 2, 4, 8, 16) * 20:
        cost.learn(rows, 0.001 if rows < 3 else 0.010 * rows)
    drafter = drafters.build("eagle:head=eagle,length=3", BuildContext(model, None, heads=heads()))
    policy = DraftingPolicy(cost)
    policy.record(drafter).learn_gain(0.0, 100.0, 3)  # of a hundred drafts nothing was kept
    monkeypatch.setattr(policy, "use_length", lambda tokens: None)
    monkeypatch.setattr(policy.cost, "learn", lambda rows, seconds: None)
    engine = Engine(model, drafter, Limits(chunk=80), policy)
    taken.clear()  # it tried itself on loading
    chats = [ask([*tokens(6 * SIZE), *tokens(3, seed)], 9 + seed) for seed in range(4)]
    for seq in chats:
        engine.add(seq)
    while not any(seq.finish for seq in chats):
        engine.step()
    assert not taken
    drain(engine)
    assert [bits(seq) for seq in chats] == [alone(seq) for seq in chats]
    assert min(seq.stats.cached for seq in chats[1:]) >= 4 * SIZE
    policy.forget(id(drafter))
    last = Sequence(next(IDS), tokens(3 * SIZE, 9), SamplingParams(max_tokens=30))
    engine.add(last)
    drain(engine)
    assert taken


@pytest.mark.parametrize(("count", "reads"), [(2, True), (READS_LATE, False)])
def test_beside_several_a_head_reads_when_it_is_asked(count, reads, monkeypatch):
    """Where rows cost nothing, so that drafts are expected; it is not asked here. Then one of them is asked for."""
    taken, extend = [], PackedRunner.extend
    monkeypatch.setattr(
        PackedRunner, "extend", lambda self, ids, *more: (taken.extend(ids), extend(self, ids, *more))[1]
    )
    model, cost = fresh(), PassCost(dict.fromkeys((1, 2, 4, 8, 16), 0.001))
    drafter = drafters.build("eagle:head=eagle,length=3", BuildContext(model, None, heads=heads()))
    policy = DraftingPolicy(cost)
    monkeypatch.setattr(policy, "wanted", lambda drafter, seqs, *more: [0] * len(seqs))
    engine = Engine(model, drafter, Limits(chunk=512), policy)
    taken.clear()  # it tried itself on loading
    chats = [ask(tokens(5 * SIZE, seed), 9) for seed in range(count)]
    for seq in chats:
        engine.add(seq)
    while not all(seq.output for seq in chats):
        engine.step()
    assert set(taken) == ({seq.id for seq in chats} if reads else set())
    assert drafter.propose(chats[:1], [3])[0]
    drain(engine)
    assert [bits(seq) for seq in chats] == [alone(seq) for seq in chats]


def test_beside_several_a_head_has_the_prefix_that_it_has_read(monkeypatch):
    """A prompt that one request has had alone; then as many begin with it that heads read late. Their drafts are those
    of a head that has read all of each."""
    prompt, every = tokens(5 * SIZE + 7), range(READS_LATE)  # the head's last page depends on the token after it

    def begun(before, seeds):
        model, cost = fresh(), PassCost(dict.fromkeys((1, 2, 4, 8, 16), 0.001))
        drafter = drafters.build("eagle:head=eagle,length=3", BuildContext(model, None, heads=heads()))
        engine = Engine(model, drafter, Limits(chunk=512), DraftingPolicy(cost))
        for seq in before:
            engine.add(seq)
        drain(engine)
        monkeypatch.setattr(engine.policy, "wanted", lambda drafter, seqs, *more: [0] * len(seqs))
        chats = [ask([*prompt, *tokens(3, seed)], 9) for seed in seeds]
        for seq in chats:
            engine.add(seq)
        while not all(seq.output for seq in chats):
            engine.step()
        drafts = [draft.tokens for draft in drafter.propose(chats, [3] * len(chats))]
        return [seq.stats.cached for seq in chats], drafts

    cached, drafts = begun([ask(prompt, 9)], every)
    assert cached == [5 * SIZE] * len(every)
    assert drafts == [begun([], [seed])[1][0] for seed in every]


def test_a_draft_model_runs_no_prefix_twice_either():
    target, draft = fresh(), counted()
    context = BuildContext(target, lambda name, quantize: draft)
    engine = new_engine(target, drafters.build("draft_model:model=itself,length=3", context))
    first = ask(tokens(70), 30)
    run(engine, [first])
    before = draft.fed
    run(engine, [ask([*first.tokens, *tokens(5, 1)])])
    assert draft.fed - before < 30


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from([7, SIZE, 50, 512]),
    st.integers(9, 30),
)
def test_any_prompts_at_any_time(asked, batch, chunk, pages):
    """Prompts that share more or less of their beginnings, in any chunks, come in while others run."""
    engine, seqs = new_engine(fresh(pages), NONE, Limits(batch, chunk, budget=0)), []
    for seed, count, steps in asked:
        seqs.append(ask([*tokens(count, 3)[: 40 * seed], *tokens(count, seed)][:count], 5))
        engine.add(seqs[-1])
        for _ in range(steps):
            engine.step()
    drain(engine)
    assert [bits(seq) for seq in seqs] == [alone(seq) for seq in seqs]
