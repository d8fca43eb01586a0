"""What is put together from settings."""

from __future__ import annotations

import threading

import pytest
from tiny import eagle_head

from outrider import LLM, SamplingParams, Settings, build, drafters
from outrider.backends.base import BackendBusy
from outrider.backends.local import IDLE_WITH_WEIGHTS
from outrider.cli import options
from outrider.core.errors import OutriderError
from outrider.drafters.heads import files
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
            assert 4 * head._cache.count * head._cache._page_bytes <= self.MEMORY * build.GIB / 8

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
