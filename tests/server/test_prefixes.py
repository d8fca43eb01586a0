"""Prompts that begin alike, over HTTP: what the cache had is counted, and a worker that was killed begins anew."""

import os
import signal

import pytest

WORDS = " ".join(f"the red fox counts {n} stars and the blue fox counts {n} rivers;" for n in range(9))

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def sharing(serve_module, packable_folder):
    serve_module.launch(packable_folder, uid="m", quantize="int4")
    return serve_module


def ask(server, prompt, **more):
    body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    return server.post("/v1/completions", body).json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(server, name):
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"outrider_prefix_cache_{name}_total{{"))


def test_usage_and_metrics_count_what_the_cache_had(sharing):
    first = ask(sharing, WORDS)
    assert cached(first) == 0
    hits, queries = counted(sharing, "hits"), counted(sharing, "queries")
    longer = ask(sharing, WORDS + " and so on")
    prompt = longer["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens"] - 32 <= cached(longer) < prompt
    assert counted(sharing, "hits") - hits == cached(longer)
    assert counted(sharing, "queries") - queries == prompt
    assert ask(sharing, WORDS)["choices"] == first["choices"]


def test_samples_share_a_prompt_that_is_counted_once(sharing):
    prompt = "a new text: " + WORDS
    hits, queries = counted(sharing, "hits"), counted(sharing, "queries")
    answer = ask(sharing, prompt, n=3, temperature=0.7, seed=1)
    assert cached(answer) == 0
    size = answer["usage"]["prompt_tokens"]
    assert counted(sharing, "queries") - queries == 3 * size
    assert counted(sharing, "hits") - hits == 2 * ((size - 1) // 32 * 32)


def test_a_worker_that_was_killed_begins_with_an_empty_cache_and_writes_the_same(sharing):
    before = ask(sharing, WORDS)
    os.kill(sharing.pid("m"), signal.SIGKILL)
    sharing.wait_for(lambda: 'worker_restarts_total{model_name="m"} 1.0' in sharing.get("/metrics").text)
    sharing.wait_for(lambda: sharing.get("/health").status_code == 200)
    again, warm = ask(sharing, WORDS), ask(sharing, WORDS)
    assert again["choices"] == warm["choices"] == before["choices"]
    assert (cached(again), cached(warm) > 0) == (0, True)


class TestCacheFile:
    def launched(self, serve, folder, file, **more):
        serve.launch(folder, uid="m", quantize="int4", cache_file=str(file), **more)
        return serve

    def test_a_restart_has_the_prefixes_and_a_kill_those_of_the_last_end(self, serve, packable_folder, tmp_path):
        server = self.launched(serve(), packable_folder, tmp_path / "cache")
        first = ask(server, WORDS)
        server.call(server.fleet.terminate("m"))
        self.launched(server, packable_folder, tmp_path / "cache")
        again = ask(server, WORDS)
        assert again["choices"] == first["choices"]
        assert cached(again) > 0 == cached(first)
        ask(server, "something else: " + WORDS)
        os.kill(server.pid("m"), signal.SIGKILL)
        server.wait_for(lambda: 'worker_restarts_total{model_name="m"} 1.0' in server.get("/metrics").text)
        server.wait_for(lambda: server.get("/health").status_code == 200)
        after = ask(server, WORDS)
        assert (after["choices"], cached(after)) == (first["choices"], cached(again))
        assert cached(ask(server, "something else: " + WORDS)) == 0

    def test_a_damaged_file_is_ignored_with_a_note(self, serve, packable_folder, tmp_path):
        file = tmp_path / "cache"
        server = self.launched(serve(), packable_folder, file)
        first = ask(server, WORDS)
        server.call(server.fleet.terminate("m"))
        file.write_bytes(file.read_bytes()[:-7])
        self.launched(server, packable_folder, file)
        assert any("is damaged" in note for note in server.fleet.describe("m").info["notes"])
        again = ask(server, WORDS)
        assert (again["choices"], cached(again)) == (first["choices"], 0)

    def test_health_says_what_is_rounded(self, serve, packable_folder, tmp_path):
        server = self.launched(serve(), packable_folder, tmp_path / "cache", kv="int8", activations="int8")
        assert server.get("/health").json()["models"]["m"]["rounded"] == ["kv int8", "activations int8"]
        first, again = ask(server, WORDS), ask(server, WORDS)
        assert (first["choices"], cached(again) > 0) == (again["choices"], True)
