"""The company audit passes an engine that keeps its promise, and finds every kind of model that does not."""

import json
import random
from dataclasses import replace

import company_breaks as breaks
import packs
import pytest
import tiny

from outrider import LLM, OutriderError, build
from outrider.audit import CompanyPlan, ReferenceStore, audit_company, write_references
from outrider.audit.company import every_draft
from outrider.audit.company_prompts import PromptPlanner
from outrider.core.draft import EMPTY
from outrider.drafters.ngram import Ngram
from outrider.engine.scheduler import Limits
from outrider.prompts import NamedPrompt

WORDS = "the red fox and the blue fox count the stars, one, two, three; a river ends in the sea and"
PROMPTS = tuple(NamedPrompt(f"from {n}", "prose", WORDS[3 * n :] + WORDS[: 3 * n]) for n in range(6))
SMALL = CompanyPlan(batches=(1, 3), chunks=(24, 64), longest=100, max_tokens=6)
ONCE = replace(SMALL, temperatures=(0.0,), runs=1)  # what is broken shows at once


@pytest.fixture
def opened(tiny_folder, monkeypatch):
    """The tiny model inside a wrapper."""
    models = []

    def open_with(wrapper=None, folder=tiny_folder, **settings):
        honest = build.load

        def load(name, where):
            loaded = honest(name, where)
            return replace(loaded, model=wrapper(loaded.model)) if name == str(folder) else loaded

        if wrapper is not None:
            monkeypatch.setattr(build, "load", load)
        models.append(LLM(str(folder), draft="none", pace=False, **settings))
        monkeypatch.setattr(build, "load", honest)
        return models[-1]

    yield open_with
    for llm in models:
        llm.close()


def failing(report, what="differing"):
    """The variants in which something differs, as (drafter, group, batch, chunk, cached)."""
    return {(v.draft, v.group, v.batch, v.chunk, v.cached) for v in report.variants if getattr(v, what)}


def packed(_):
    """Random weights of 4 bits, which the kernels run, for the tokenizer of the tiny model."""
    sizes = dict(vocab_size=304, intermediate_size=64, max_position_embeddings=1024)
    return packs.packed(tiny.reference("llama", **sizes), bits=4)


@pytest.mark.parametrize("wrapper", [None, pytest.param(packed, marks=pytest.mark.native)], ids=["dense", "packed"])
def test_the_engine_passes_with_every_drafter(opened, tiny_draft, wrapper):
    llm = opened(wrapper)
    drafts = [*every_draft(llm), *([] if wrapper else [f"draft_model:model={tiny_draft},length=3"])]
    report = audit_company(llm, drafts, PROMPTS[:3], replace(SMALL, chunks=(24,), longest=60))
    assert report.passed, [variant for variant in report.variants if not variant.passed]
    assert report.promised
    assert report.drafts[0] == "none"
    assert {"ngram", "layer_skip", "prediction"} < set(report.drafts)
    assert {variant.run for variant in report.variants} == {1, 2}
    assert {variant.temperature for variant in report.variants} == {0.0, 0.8}
    assert all(variant.tokens > 0 for variant in report.variants)
    busy = {variant.draft for variant in report.variants if variant.drafted}
    assert busy >= {draft for draft in report.drafts if draft not in ("none", "grammar")}  # no prompt has a grammar


def test_chunks_and_batches_are_those_of_the_plan_and_gone_afterwards(opened, monkeypatch):
    llm, seen = opened(), set()
    scheduler = llm.engine.scheduler
    usual, plan = scheduler.limits, type(scheduler).plan

    def spied(self, *args):
        made = plan(self, *args)
        seen.update((self.limits.chunk, self.limits.batch) for _ in made[:1])
        return made

    monkeypatch.setattr(type(scheduler), "plan", spied)
    report = audit_company(llm, ["none"], PROMPTS[:2], replace(ONCE, batches=(1, 2, 80), chunks=(24, 64), longest=60))
    assert {chunk for chunk, _ in seen} == {variant.chunk for variant in report.variants} == {24, 64, usual.chunk}
    assert {batch for _, batch in seen} == {usual.batch, 80}
    assert scheduler.limits == usual


def test_of_a_head_the_chain_and_the_tree_are_tried(opened, monkeypatch):
    monkeypatch.setattr("outrider.audit.company.default_drafts", lambda llm: ["ngram", "eagle", "oracle"])
    assert every_draft(opened()) == ["none", "ngram", "ngram:tree=16", "eagle", "eagle:tree=16"]


def test_with_shared_prefixes_each_call_is_made_again_from_the_cache(opened):
    llm = opened(breaks.SharesPrefixes)
    plan = replace(SMALL, batches=(1, 3, 64), chunks=(24,), longest=60, temperatures=(0.8,), runs=1)
    report = audit_company(llm, ["none"], PROMPTS[:3], plan)
    assert report.passed, [variant for variant in report.variants if not variant.passed]
    assert llm.engine.model.shared > 0
    assert {(v.batch, v.cached) for v in report.variants if v.group == "prompts"} >= {(1, True), (3, True), (64, True)}
    assert not any("shares no prefixes" in line for line in report.not_covered)


def test_it_finds_rows_that_depend_on_their_neighbours(opened):
    report = audit_company(opened(breaks.CountsItsNeighbours), ["none", "ngram"], PROMPTS, ONCE)
    found = failing(report)
    assert not report.passed
    assert {("none", "prompts", 3, 512, False), ("ngram", "prompts", 3, 512, False)} <= found
    assert not any(batch == 1 for _, _, batch, _, _ in found)
    variant = next(variant for variant in report.variants if variant.differing)
    assert variant.first == variant.differences[0]
    assert variant.first.plain != variant.first.drafted
    assert variant.first.margin is None or 0 <= variant.first.margin < 0.5
    assert variant.first.position == min(each.position for each in variant.differences)


def test_it_finds_them_in_bfloat16_too(opened):
    llm = opened(breaks.CountsItsNeighbours, dtype="bfloat16")
    assert not audit_company(llm, ["none"], PROMPTS, ONCE).passed


def test_it_finds_what_only_drafts_change(opened):
    report = audit_company(opened(breaks.FlipsWhereDrafted), ["none", "layer_skip"], PROMPTS, ONCE)
    assert {draft for draft, *_ in failing(report)} == {"layer_skip"}
    assert ("layer_skip", "prompts", 1, 512, False) in failing(report)


def test_it_finds_a_cache_that_returns_other_keys(opened):
    found = failing(audit_company(opened(breaks.ReturnsOtherKeys), ["none"], PROMPTS, ONCE))
    assert ("none", "prompts", 1, 512, True) in found
    assert ("none", "prompts", 1, 512, False) not in found  # the cache is empty then


def test_it_finds_sums_that_depend_on_the_chunk(opened):
    plan = replace(ONCE, chunks=(64, 512), longest=400)
    found = failing(audit_company(opened(breaks.SumsByChunk), ["none"], PROMPTS, plan))
    assert ("none", "long", 6, 64, False) in found
    assert not any(batch == 1 or group == "prompts" for _, group, batch, _, _ in found)


def test_it_finds_the_harm_of_a_long_neighbour(opened):
    plan = replace(ONCE, chunks=(64,), longest=500)
    found = failing(audit_company(opened(breaks.MindsALongNeighbour), ["none"], PROMPTS, plan))
    assert {group for _, group, _, _, _ in found} == {"long"}


def test_it_finds_an_error_at_a_boundary(opened):
    plan = replace(ONCE, chunks=(128,), longest=160)
    found = failing(audit_company(opened(breaks.ErrsAtABoundary), ["none"], PROMPTS, plan))
    assert "boundaries" in {group for _, group, _, _, _ in found}
    assert "prompts" not in {group for _, group, _, _, _ in found}


def test_it_finds_a_drafter_whose_statistics_change_from_run_to_run(opened, monkeypatch):
    honest = Ngram.propose

    def moody(self, seqs, budgets):
        return honest(self, seqs, budgets) if random.random() < 0.7 else [EMPTY] * len(seqs)

    monkeypatch.setattr(Ngram, "propose", moody)
    report = audit_company(opened(), ["none", "ngram"], PROMPTS, replace(ONCE, runs=2))
    assert not report.passed
    assert failing(report) == set()
    assert {draft for draft, *_ in failing(report, "other_statistics")} == {"ngram"}
    assert all(variant.run == 2 for variant in report.variants if variant.other_statistics)


def test_it_says_what_it_does_not_cover(opened):
    report = audit_company(opened(), ["none"], PROMPTS, ONCE)
    assert any("ngram" in line and "layer_skip" in line for line in report.not_covered)
    assert any("shares no prefixes" in line for line in report.not_covered)
    assert any("more than 100 tokens" in line for line in report.not_covered)
    assert not any("oracle" in line for line in report.not_covered)
    assert report.closest > 0


def test_progress_ends_at_the_total(opened):
    seen = []

    def progress(what, done, total):
        seen.append((done, total))

    audit_company(opened(breaks.SharesPrefixes), ["ngram"], PROMPTS[:2], SMALL, progress=progress)
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1] == (len(seen), len(seen))


class Sized:
    """As much of a model as the plan reads."""

    context, capacity, page, rows_alone, boundaries = 4096, 1 << 20, 32, True, (256,)

    def nothing(self, *_):
        raise AssertionError

    begin = seen = write = forget_prefixes = nothing


def test_critical_lengths_come_from_the_model_and_the_engine():
    planner = PromptPlanner(replace(SMALL, chunks=(128,), longest=None), Sized(), Limits(chunk=512), on_gpu=True)
    assert planner.boundaries == (32, 128, 256, 512)
    groups = {group.name: group for group in planner.groups(["a", "b"], [[1, 2, 3], [4, 5]])}
    lengths = [len(prompt) for prompt in groups["boundaries"].prompts]
    assert lengths == [size + step for size in (32, 128, 256, 512) for step in (-1, 0, 1)]
    assert len(groups["long"].prompts[0]) + groups["long"].max_tokens == 4096
    assert groups["long"].prompts[0][:6] == [1, 2, 3, 4, 5, 1]
    assert groups["long"].prompts[1][:6] == [4, 5, 1, 2, 3, 4]


def test_on_a_cpu_long_sequences_are_asked_for():
    for given, longest in ((None, 1024), (0, 4096), (2000, 2000), (9000, 4096)):
        assert PromptPlanner(replace(SMALL, longest=given), Sized(), Limits(), on_gpu=False).longest == longest


def test_batches_are_shuffled_and_filled():
    planner = PromptPlanner(replace(SMALL, batches=(4, 64), groups=("prompts",)), Sized(), Limits(), on_gpu=True)
    group = planner.groups([str(n) for n in range(10)], [[n + 1] for n in range(10)])[0]
    four, many = (next(layout for layout in group.layouts if layout.batch == size) for size in (4, 64))
    calls = group.calls(four, seed=0)
    assert [len(call) for call in calls] == [4, 4, 2]
    order = [index for call in calls for index in call]
    assert sorted(order) == list(range(10)) != order
    assert calls == group.calls(four, seed=0) != group.calls(four, seed=1)
    assert [len(call) for call in group.calls(many, seed=0)] == [64]
    assert {group.params(n, 0.8, seed=5).seed for n in range(10)} == set(range(5, 15))


@pytest.mark.parametrize(("batch", "shorter"), [(1, False), (4, True)])
def test_alone_other_chunks_are_for_prompts_that_they_divide_otherwise(batch, shorter):
    plan = replace(SMALL, batches=(batch,), chunks=(128, 512, 2048), groups=("prompts",), longest=None)
    planner = PromptPlanner(plan, Sized(), Limits(chunk=512), on_gpu=True)
    (group,) = planner.groups(["a", "b", "c"], [[1] * 128, [1] * 129, [1] * 513])
    found = {
        layout.chunk: sorted({index for call in group.calls(layout, seed=0) for index in call})
        for layout in group.layouts
    }
    every = [0, 1, 2]
    assert found == {512: every, 128: every if shorter else [1, 2], 2048: every if shorter else [2]}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(batches=(0,)), "batches"),
        (dict(groups=("short",)), "boundaries"),
        (dict(groups=()), "group"),
        (dict(chunks=(0,)), "chunks"),
        (dict(temperatures=()), "temperature"),
        (dict(temperatures=(-1.0,)), "temperatures"),
        (dict(runs=0), "run"),
        (dict(longest=6), "max_tokens"),
        (dict(share=(2, 2)), "share"),
        (dict(share=(0, 0)), "share"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong, says):
    with pytest.raises(OutriderError, match=says):
        replace(SMALL, **wrong)


def test_without_a_prompt_that_fits_it_says_so(opened):
    with pytest.raises(OutriderError, match="longest"):
        audit_company(opened(), ["none"], PROMPTS, replace(SMALL, longest=8, max_tokens=4))


def test_shares_are_all_prompts_once_each_with_its_own_seed():
    def own(share):
        planner = PromptPlanner(replace(SMALL, share=share), Sized(), Limits(), on_gpu=True)
        groups = {group.name: group for group in planner.groups(list("abcdefg"), [[n + 1] for n in range(7)])}
        rest = [group.prompts for name, group in groups.items() if name != "prompts"]
        group = groups["prompts"]
        return {name: group.params(n, 0.8, seed=5).seed for n, name in enumerate(group.names)}, rest

    whole, others = own((0, 1))
    shares = [own((n, 3)) for n in range(3)]
    assert sum(len(seeds) for seeds, _ in shares) == 7
    assert {name: seed for seeds, _ in shares for name, seed in seeds.items()} == whole
    assert all(rest == others for _, rest in shares)  # lengths that are critical do not depend on the share


def test_a_share_says_that_there_are_others(opened):
    report = audit_company(opened(), ["none"], PROMPTS, replace(ONCE, share=(1, 2), groups=("prompts",)))
    assert report.passed
    assert report.groups == {"prompts": 3}
    assert any("share 1 of 2" in line for line in report.not_covered)


def test_reference_texts_are_written_once_and_shared(opened, tmp_path, monkeypatch):
    path, plan = tmp_path / "references.jsonl", replace(ONCE, temperatures=(0.0, 0.8), groups=("prompts",), margins=0)
    write_references(opened(), PROMPTS, replace(plan, share=(0, 2)), ReferenceStore(path))
    assert path.read_text().count("\n") == 6
    added = []
    monkeypatch.setattr(ReferenceStore, "put", lambda self, subject, *what: added.append(what))
    again = audit_company(opened(), ["ngram"], PROMPTS, plan, store=ReferenceStore(path))
    assert again.passed
    assert again.closest is None
    assert len(added) == 6  # the other share's


def test_a_wrong_reference_from_a_file_fails_the_audit(opened, tmp_path):
    path = tmp_path / "references.jsonl"
    assert audit_company(opened(), ["none"], PROMPTS[:2], ONCE, store=ReferenceStore(path)).passed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["tokens"][-1] ^= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = audit_company(opened(), ["none"], PROMPTS[:2], ONCE, store=ReferenceStore(path))
    assert {variant.differing > 0 for variant in report.variants if variant.group == "prompts"} == {True}
    other = audit_company(opened(dtype="bfloat16"), ["none"], PROMPTS[:1], replace(ONCE, batches=(1,)),
                          store=ReferenceStore(path))  # fmt: skip
    assert not any(variant.differing for variant in other.variants if variant.batch == 1)  # texts of its own dtype


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "junk").write_text("junk\n")
    with pytest.raises(OutriderError, match="reference texts"):
        ReferenceStore(tmp_path / "junk")
