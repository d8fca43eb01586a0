"""What is put together from settings."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from tiny import block_head, eagle_head, medusa_head

from outrider import LLM, SamplingParams, Settings, audit, build, drafters, prompts
from outrider.backends.base import BackendBusy
from outrider.backends.local import IDLE_WITH_WEIGHTS
from outrider.cli import options
from outrider.core.errors import OutriderError
from outrider.drafters.heads import files
from outrider.models.weights import LoadOptions
from outrider.settings import from_mapping

PROMPTS = ["the red fox", "one, two, three", "the sea is green"]


def test_drafters_that_name_one_draft_model_share_it(tiny_folder, tiny_draft):
    specs = [f"draft_model:model={tiny_draft},length={length}" for length in (1, 3, 5)]
    params = SamplingParams(max_tokens=20)
    with LLM(str(tiny_folder), draft="none", pace=False, threads=1, cache_memory=0.1) as llm:
        plain = [result.token_ids for result in llm.generate(PROMPTS, params)]
        streams = [llm.stream(prompt, params, draft=spec) for spec in specs for prompt in PROMPTS]  # in one batch
        assert [stream.result().token_ids for stream in streams] == plain * 3
        kept = [found for spec in specs if (found := llm.backend.engine.drafters.get(spec))]
        assert len(kept) == IDLE_WITH_WEIGHTS  # the third is dropped, the model that they share is not
        assert len({id(drafter._model) for drafter in kept}) == 1


def test_the_spec_of_a_drafter_is_parsed_once(tiny_folder, monkeypatch):
    parsed, parse = [], drafters.parse
    monkeypatch.setattr(drafters, "parse", lambda spec: parsed.append(spec) or parse(spec))
    with options.opened(Settings(str(tiny_folder), "ngram:length=3", threads=1, cache_memory=0.1)) as llm:
        assert llm.generate("the red fox", SamplingParams(max_tokens=4)).token_ids
    assert parsed == ["ngram:length=3"]


@pytest.fixture(scope="module")
def head_folder(packable_folder, tmp_path_factory):
    """An EAGLE head that nobody has trained, for `packable`."""
    with LLM(str(packable_folder), quantize="int4", draft="none", threads=1, cache_memory=0.01) as llm:
        folder = tmp_path_factory.mktemp("heads") / "eagle"
        files.write(eagle_head(llm.engine.model), folder, llm.engine.model)
    return folder


@pytest.mark.parametrize(
    "spec",
    [
        "eagle:head={eagle}",
        "medusa:head={medusa}",
        "block:head={block}",
        "draft_model:model={draft}",
        "draft_model:model={draft},tokenizer={draft}",
        "auto:head={block},model={draft}",
        "eagle:head={eagle}+draft_model:model={draft}+ngram",
    ],
)
def test_the_files_of_a_drafter_that_a_request_names_are_read_before_it_is_built(
    tiny_folder, tiny_draft, tmp_path, spec
):
    """On a device running streams wait for what is left."""
    with LLM(str(tiny_folder), draft="none", pace=False, threads=1, cache_memory=0.05) as llm:
        target, places = llm.engine.model, {}
        for kind, made in (("eagle", eagle_head), ("medusa", medusa_head), ("block", block_head)):
            places[kind] = tmp_path / kind
            files.write(made(target), places[kind], target)
        places["draft"] = shutil.copytree(tiny_draft, tmp_path / "draft")
        named = spec.format(**places)
        read = llm.backend._drafter(named)
        for place in places.values():
            shutil.rmtree(place)
        with pytest.raises(OutriderError, match=r"no (folder|such file)"):
            llm.backend.prepare(named)
        built, params = read(), SamplingParams(max_tokens=20, ignore_eos=True)
        plain = llm.generate(PROMPTS, params)
        llm.engine.drafters[named] = built
        drafted = llm.generate(PROMPTS, params, draft=named)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert sum(each.stats.drafted for each in drafted) > 0


def test_a_drafter_that_the_target_has_no_head_for_is_found_out_once(tiny_folder, monkeypatch):
    looked, find = [], files.find
    monkeypatch.setattr(files, "find", lambda kind, *given: looked.append(kind) or find(kind, *given))
    with LLM(str(tiny_folder), draft="none", pace=False, threads=1, cache_memory=0.05) as llm:
        llm.backend.prepare("auto")
        assert looked == ["eagle", "block"]
        with pytest.raises(OutriderError, match="no head for eagle is shipped"):
            llm.backend.prepare("eagle")


class TestMemoryOfHeads:
    """Keys and values of heads, within `cache_memory` and in number."""

    MEMORY = 0.004  # GiB: the few texts of a test fill it

    def opened(self, folder, draft, **more):
        return LLM(
            str(folder),
            quantize="int4",
            draft=draft,
            pace=False,
            threads=1,
            cache_memory=more.pop("memory", self.MEMORY),
            **more,
        )

    def held(self, cache):
        return sum(block.nbytes for block in cache._blocks)

    def test_a_model_and_its_head_share_the_memory(self, packable_folder, head_folder):
        texts = [[i % 50 + 1, i // 50 + 1] * 400 for i in range(60)]  # more than it holds
        with self.opened(packable_folder, f"eagle:head={head_folder}") as llm:
            results = llm.generate(texts, SamplingParams(max_tokens=8, ignore_eos=True))
            target, head = llm.engine.model, llm.engine.drafters[""]._runner
            held = self.held(target._pages), self.held(head._cache)
            assert sum(result.stats.drafted for result in results) > 0
        given = int(self.MEMORY * build.GIB)
        assert sum(len(text) for text in texts) > target.capacity
        assert min(held) > 0.9 * given / 8, "the texts do not fill it"
        assert sum(held) <= given
        with self.opened(packable_folder, "none") as llm:
            assert llm.engine.model.capacity > target.capacity  # without a head the target has all

    def test_heads_that_requests_name_take_one_share_together(self, packable_folder, head_folder):
        with self.opened(packable_folder, "none") as llm:
            for length in range(1, 5):
                llm.backend.prepare(f"eagle:head={head_folder},length={length}")
            head = llm.engine.drafters[f"eagle:head={head_folder},length=4"]._runner
            assert 4 * head._cache.count * head._cache.page_bytes <= self.MEMORY * build.GIB / 8

    def test_no_more_than_four_are_in_use(self, packable_folder, head_folder):
        go_on = threading.Event()

        def wait(tokens, logits):
            assert go_on.wait(60)
            return logits

        params = SamplingParams(max_tokens=4, ignore_eos=True, processors=(wait,))
        specs = [f"eagle:head={head_folder},length={length}" for length in range(1, 6)]
        with self.opened(packable_folder, "none", memory=0.1) as llm:
            streams = [llm.stream([1, 2, 3], params, draft=spec) for spec in specs[:4]]
            with pytest.raises(BackendBusy, match="4 other drafters with weights of their own are in use"):
                llm.stream([1, 2, 3], params, draft=specs[4])
            streams.append(llm.stream([1, 2, 3], params, draft=specs[0]))  # one that is there
            streams.append(llm.stream([1, 2, 3], params, draft="ngram:length=3"))  # and one without weights
            go_on.set()
            texts = [stream.result().token_ids for stream in streams]
            again = llm.stream([1, 2, 3], params, draft=specs[4]).result()
            assert len(texts) == texts.count(again.token_ids)

    def test_idle_ones_make_way(self, packable_folder, head_folder):
        go_on = threading.Event()

        def wait(tokens, logits):
            assert go_on.wait(60)
            return logits

        waiting = SamplingParams(max_tokens=4, processors=(wait,))
        specs = [f"eagle:head={head_folder},length={length}" for length in range(1, 6)]
        with self.opened(packable_folder, "none", memory=0.1) as llm:
            for spec in specs[:2]:
                llm.backend.prepare(spec)  # and then nobody uses it
            streams = [llm.stream([1, 2, 3], waiting, draft=spec) for spec in specs[2:]]
            assert [spec for spec in specs if spec in llm.engine.drafters] == specs[1:]
            go_on.set()
            assert {stream.result().finish_reason for stream in streams} <= {"length", "stop"}


REMEMBERING = dict(draft="history", threads=1, cache_memory=0.1, pace=False, history_tokens=4096)


class TestHistory:
    """What the drafter `history` has learned, from one process to the next."""

    def test_a_file_keeps_it_over_a_restart(self, tiny_folder, tmp_path):
        file, stats, texts = str(tmp_path / "history"), [], []
        for _ in range(2):
            with LLM(tiny_folder, history=file, **REMEMBERING) as llm:
                result = llm.generate(PROMPTS[0], SamplingParams(24))
                stats, texts = [*stats, result.stats], [*texts, result.text]
        assert texts[0] == texts[1]
        assert stats[1].accepted > stats[0].accepted
        assert stats[1].steps < stats[0].steps

    def test_all_drafters_of_a_process_share_it_whatever_their_options(self, tiny_folder):
        with LLM(tiny_folder, **REMEMBERING) as llm:
            first = llm.generate(PROMPTS[0], SamplingParams(24))
            again = llm.generate(PROMPTS[0], SamplingParams(24), draft="history:length=5,width=1")
        assert again.text == first.text
        assert again.stats.accepted > first.stats.accepted

    def test_a_drafter_that_is_built_anew_begins_without_it(self, tiny_folder):
        with LLM(tiny_folder, **REMEMBERING) as llm:
            first = llm.generate(PROMPTS[0], SamplingParams(24))
            llm.backend.renew("history")
            again = llm.generate(PROMPTS[0], SamplingParams(24))
        assert again.stats.by_drafter == first.stats.by_drafter

    def test_a_tenant_is_not_helped_by_another(self, tiny_folder):
        with LLM(tiny_folder, **REMEMBERING) as llm:
            one, two, again = (
                llm.submit(PROMPTS[0], SamplingParams(24), tenant=tenant).result() for tenant in ("a", "b", "a")
            )
        assert one.stats.by_drafter == two.stats.by_drafter != again.stats.by_drafter

    def test_the_file_of_another_model_is_refused(self, tiny_folder, tiny_twin, tiny_stranger, tmp_path):
        file = str(tmp_path / "history")
        LLM(tiny_folder, history=file, **REMEMBERING).close()
        LLM(tiny_twin, history=file, **REMEMBERING).close()  # the same tokenizer
        before = (tmp_path / "history").read_bytes()
        with pytest.raises(OutriderError, match="a model with another vocabulary; it is untouched"):
            LLM(tiny_stranger, history=file, **REMEMBERING)
        assert (tmp_path / "history").read_bytes() == before

    def test_a_file_that_no_request_may_come_to_use_is_noted(self, tiny_folder, tmp_path):
        file = str(tmp_path / "history")
        with LLM(tiny_folder, history=file, **REMEMBERING | dict(draft="ngram")) as llm:
            assert any(f"only requests that name history use {file}" in note for note in llm.backend.notes)
        with LLM(tiny_folder, history=file, **REMEMBERING) as llm:
            assert not llm.backend.notes

    @pytest.mark.parametrize(
        ("tokens", "reason"), [(63, "at least 64"), (1 << 31, "at most"), ("many", "whole number")]
    )
    def test_a_size_that_cannot_be_is_refused(self, tokens, reason):
        with pytest.raises(OutriderError, match=f"history_tokens must be .*{reason}"):
            from_mapping({"history_tokens": tokens})

    def test_vllm_has_none(self):
        with pytest.raises(OutriderError, match="history cannot be chosen on the backend vllm"):
            build.check(Settings(backend="vllm", history="file"))


LONG = " ".join(f"the red fox counts {n} stars;" for n in range(12))
PACKED = dict(quantize="int4", threads=1, cache_memory=0.05, pace=False)


@pytest.mark.native
class TestCacheFile:
    """Shared prefixes, from one process to the next."""

    def asked(self, folder, file, **more):
        with LLM(str(folder), cache_file=str(file), **PACKED | more) as llm:
            result = llm.generate(LONG, SamplingParams(12))
            return result.stats.cached, result.text, llm.backend.notes

    @pytest.mark.parametrize("more", [{}, {"kv": "int8"}, {"activations": "int8"}, {"draft": "none"}], ids=str)
    def test_a_restart_runs_no_prefix_again_and_writes_the_same(self, packable_folder, tmp_path, more):
        first, again = (self.asked(packable_folder, tmp_path / "cache", **more) for _ in range(2))
        assert first[0] == 0 < again[0]
        assert first[1:] == again[1:] == (first[1], ())

    def test_with_a_head_it_has_the_pages_of_both(self, packable_folder, head_folder, tmp_path):
        draft = f"eagle:head={head_folder}"
        first, again = (self.asked(packable_folder, tmp_path / "cache", draft=draft) for _ in range(2))
        assert (first[0], again[0] > 0, first[1]) == (0, True, again[1])
        assert self.asked(packable_folder, tmp_path / "cache", draft="ngram")[0] >= again[0]

    @pytest.mark.parametrize("more", [{"kv": "int8"}, {"activations": "int8"}, {"quantize": "int8"}], ids=str)
    def test_what_other_numbers_have_computed_is_not_used(self, packable_folder, tmp_path, more):
        plain = self.asked(packable_folder, tmp_path / "other", **more)
        self.asked(packable_folder, tmp_path / "cache")
        cached, text, (note,) = self.asked(packable_folder, tmp_path / "cache", **more)
        assert (cached, text) == plain[:2]
        assert "is of another model" in note

    def test_it_stays_within_its_size(self, packable_folder, tmp_path):
        self.asked(packable_folder, tmp_path / "cache", cache_file_size=0.0)
        assert (tmp_path / "cache").stat().st_size < 200
        assert self.asked(packable_folder, tmp_path / "cache", cache_file_size=0.0)[0] == 0

    def test_dense_weights_have_none(self, packable_folder, tmp_path):
        with pytest.raises(OutriderError, match="cache_file needs packed weights on a CPU"):
            self.asked(packable_folder, tmp_path / "cache", quantize="none")
        assert not (tmp_path / "cache").exists()

    def test_another_file_is_refused_before_anything_runs(self, packable_folder, tmp_path):
        (tmp_path / "notes.txt").write_text("mine\n")
        with pytest.raises(OutriderError, match=r"is not a cache file of Outrider's; it is untouched"):
            self.asked(packable_folder, tmp_path / "notes.txt")
        assert (tmp_path / "notes.txt").read_text() == "mine\n"

    def test_vllm_has_none(self):
        with pytest.raises(OutriderError, match="cache_file cannot be chosen on the backend vllm"):
            build.check(Settings(backend="vllm", cache_file="file"))


@pytest.mark.native
class TestEightBits:
    """kv and activations."""

    @pytest.mark.parametrize("name", ["kv", "activations"])
    def test_need_packed_weights(self, packable_folder, name):
        with pytest.raises(OutriderError, match=f"{name} int8 needs packed weights on a CPU: a quantised GGUF file"):
            LLM(str(packable_folder), threads=1, cache_memory=0.05, **{name: "int8"})

    @pytest.mark.parametrize("name", ["kv", "activations"])
    def test_other_words_are_refused(self, name):
        with pytest.raises(OutriderError, match=f"unknown {name} 'int4'; known: auto, int8"):
            from_mapping({name: "int4"})

    @pytest.mark.parametrize("name", ["kv", "activations"])
    def test_vllm_has_its_own(self, name):
        with pytest.raises(OutriderError, match=f"{name} cannot be chosen on the backend vllm"):
            build.check(Settings(backend="vllm", **{name: "int8"}))

    def test_an_audit_names_them_and_passes(self, packable_folder):
        rounded = dict(kv="int8", activations="int8")
        with LLM(str(packable_folder), draft="ngram", **PACKED | rounded) as llm:
            report = audit.audit(llm, ["ngram"], prompts.AUDIT[:2], max_tokens=12, samples=200)
        assert report.passed
        assert report.dtype == "auto, kv int8, activations int8"

    def test_a_draft_model_of_any_kind_goes_with_them(self, packable_folder, tiny_stranger):
        spec = f"draft_model:model={tiny_stranger}"
        with LLM(str(packable_folder), draft=spec, kv="int8", **PACKED) as llm:
            text = llm.generate(LONG, SamplingParams(12)).text
            assert llm.generate(LONG, SamplingParams(12), draft="none").text == text


@pytest.mark.parametrize(
    ("draft", "device", "memory"),
    [
        ("draft_model:model=x", "cuda", (250, 250)),
        ("ngram+draft_model:model=x", "cuda", (250, 250)),
        ("auto:model=x", "cuda", (250, 250)),
        ("auto", "cuda", (250, 0)),  # what a request may name, on top
        ("draft_model:model=x", "cpu", (1000, 0)),
    ],
)
def test_on_a_gpu_a_draft_model_has_its_pages_within_the_memory_of_the_cache(draft, device, memory):
    where = LoadOptions(torch.device(device), torch.float32, 1000)
    assert build.draft_model_memory(drafters.parse(draft), where) == memory
