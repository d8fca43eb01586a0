"""`serve --timings`: what vLLM's and llama.cpp's clients read of drafts and times."""

import json
from collections import Counter

import foreign
import httpx
import openai
import pytest

from outrider.core.stats import Stats
from outrider.server.faces.measured import llama_timings, speculative_decoding
from outrider.server.options import ServerOptions

ASK = {"model": "hermes", "prompt": "the red fox the red fox the red", "max_tokens": 40, "temperature": 0}
# Of vLLM 0.32 (v1/metrics/stats.py) and of llama.cpp (tools/server/server-task.cpp).
VLLM = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}
PACES = {f"{what}_{name}" for what in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")}


@pytest.fixture(scope="module")
def timed(serve_all, hermes_folder):
    server = serve_all(ServerOptions(timings=True))
    server.launch(hermes_folder, uid="hermes", pace=False)
    return server


class TestShapes:
    def stats(self):
        """Five steps with drafts, which kept 0, 0, 1, 3 and 3 tokens of 4."""
        drafted, accepted = Counter(dict.fromkeys(range(1, 5), 5)), Counter({1: 3, 2: 2, 3: 2})
        counts = dict(tokens=13, steps=6, cached=2, drafts=5, drafted=20, accepted=7)
        by_depth = dict(drafted_by_depth=drafted, accepted_by_depth=accepted)
        return Stats(**counts, **by_depth, first_seconds=0.5, writing_seconds=0.25)

    def test_vllm(self):
        """The example's own arithmetic: sums of the histogram are the other numbers."""
        found = speculative_decoding(self.stats())
        assert found == {
            "mean_acceptance_length": 2.4,
            "draft_acceptance_rate": 0.35,
            "acceptance_histogram": [2, 1, 0, 2, 0],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 7,
            "num_draft_tokens": 20,
            "num_spec_tokens": 4,
        }
        assert set(found) == VLLM

    def test_llama(self):
        found = llama_timings(self.stats(), prompt=12)
        assert set(found) == {"cache_n", *PACES, "draft_n", "draft_n_accepted"}
        assert (found["cache_n"], found["prompt_n"], found["prompt_ms"], found["prompt_per_token_ms"]) == (
            2,
            10,
            500,
            50,
        )
        assert (found["predicted_n"], found["predicted_ms"], found["predicted_per_second"]) == (13, 250, 52)
        assert (found["draft_n"], found["draft_n_accepted"]) == (20, 7)
        assert set(llama_timings(Stats(tokens=1), 3)) == {"cache_n", *PACES}  # as llama.cpp: nothing drafted, no field


def checked(answer, drafts=True):
    timings, metrics = answer["timings"], answer["metrics"]
    assert set(timings) == {"cache_n", *PACES} | ({"draft_n", "draft_n_accepted"} if drafts else set())
    assert timings["predicted_n"] == metrics["tokens"]
    assert timings["predicted_ms"] > 0
    assert ("speculative_decoding" in metrics) == drafts
    if drafts:
        told = metrics["speculative_decoding"]
        assert set(told) == VLLM
        assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] == metrics["drafts"]
        kept = sum(kept * steps for kept, steps in enumerate(told["acceptance_histogram"]))
        assert kept == told["num_accepted_draft_tokens"] == metrics["accepted"]
        assert timings["draft_n"] == told["num_draft_tokens"] == metrics["drafted"]
        assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    return timings


def test_a_whole_answer(timed):
    answer = timed.post("/v1/completions", ASK).json()
    timings = checked(answer)
    assert timings["cache_n"] + timings["prompt_n"] == answer["usage"]["prompt_tokens"]
    plain = timed.post("/v1/completions", {**ASK, "speculative": {"off": True}}).json()
    checked(plain, drafts=False)
    several = timed.post("/v1/completions", {**ASK, "n": 2, "temperature": 1}).json()
    assert "timings" not in several  # as vLLM: of one sequence only
    assert "speculative_decoding" not in several["metrics"]


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_it_in_the_last_chunk(timed, usage):
    body = {**ASK, "stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
    events = [line[6:] for line in timed.post("/v1/completions", body).text.splitlines() if line.startswith("data: ")]
    *chunks, last = map(json.loads, events[:-1])
    assert events[-1] == "[DONE]"
    checked(last)
    assert not any("timings" in chunk for chunk in chunks)
    if not usage:
        assert last["choices"][0]["finish_reason"] == "length"
    with openai.OpenAI(base_url=f"{timed.url}/v1", api_key="none", max_retries=0) as client:
        whole = timed.post("/v1/completions", ASK).json()["choices"][0]["text"]
        stream = client.completions.create(**ASK, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole


def test_the_other_apis_have_it_too(timed):
    asked = {"model": "hermes", "temperature": 0, "speculative": {"method": "ngram", "min_n": 1}}
    words = "the red fox the red fox the red"
    answer = timed.post("/v1/responses", {**asked, "input": words, "max_output_tokens": 60}).json()
    checked(answer, "speculative_decoding" in answer["metrics"])
    with foreign.anthropic().Anthropic(base_url=timed.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(
            model="hermes", max_tokens=60, messages=[{"role": "user", "content": words}], extra_body={"temperature": 0}
        )
    assert said.timings["predicted_n"] == said.usage.output_tokens


def test_the_counters_of_drafts_have_vllms_names_too(timed):
    before = vllms_counters(timed.get("/metrics").text)
    metrics = timed.post("/v1/completions", ASK).json()["metrics"]
    text = timed.get("/metrics").text
    after = vllms_counters(text)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["num_drafts_total"] == metrics["drafts"] > 0
    assert grown["num_draft_tokens_total"] == metrics["drafted"]
    assert grown["num_accepted_tokens_total"] == metrics["accepted"]
    assert grown["num_accepted_tokens_per_pos_total"] == metrics["accepted"]
    assert "outrider_spec_decode_num_drafts_total" in text


def vllms_counters(text):
    """As `vllm bench serve` reads them: summed over labels."""
    found = Counter()
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode_"):
            name, value = line.split("{")[0], line.rsplit(" ", 1)[1]
            found[name.removeprefix("vllm:spec_decode_")] += float(value)
    return found


def test_without_the_option_answers_are_as_before(hermes):
    text = httpx.get(f"{hermes.url}/metrics", headers={"x-api-key": "K"}, timeout=60).text
    assert "outrider_spec_decode_" in text
    assert "vllm:" not in text
    answer = httpx.post(f"{hermes.url}/v1/completions", json=ASK, headers={"x-api-key": "K"}, timeout=60).json()
    assert "timings" not in answer
    assert "speculative_decoding" not in answer["metrics"]
