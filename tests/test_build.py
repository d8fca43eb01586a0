"""What is put together from settings."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams, Settings, build, drafters
from outrider.backends.local import IDLE_WITH_WEIGHTS
from outrider.cli import options
from outrider.core.errors import OutriderError
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
