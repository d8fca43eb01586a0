"""What is put together from settings."""

from __future__ import annotations

from outrider import LLM, SamplingParams, Settings, drafters
from outrider.backends.local import IDLE_WITH_WEIGHTS
from outrider.cli import options

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
