"""What a server must survive: crowds, clients that vanish, those that wait too long, strangers, and its own end."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fastapi import Request as HttpRequest

from outrider import LLM, SamplingParams
from outrider.server.app import create_app
from outrider.server.errors import Timeout
from outrider.server.fleet.fleet import Fleet
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.options import ServerOptions
from outrider.server.responses import time_limit

ENDLESS = {"prompt": "the red fox", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
TEXT = "the red fox and the blue fox count the stars one two three a river ends in the sea"


def events(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def stream(server, body, vanish_after=None):
    """The text of a streamed completion; or the client goes away after so many events."""
    pieces = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                said = json.loads(line.removeprefix("data: "))
                assert "error" not in said, said
                pieces += [choice["text"] for choice in said["choices"]]
            if vanish_after is not None and len(pieces) >= vanish_after:
                return None
    assert line == "" or line == "data: [DONE]"
    return "".join(pieces)


def bodies(count, tokens):
    """Half greedy, half sampled with a seed, each with another prompt and all kinds of drafters."""
    methods = [{}, {"off": True}, {"method": "ngram", "min_n": 1, "length": 4}, {"method": "layer_skip", "length": 3}]
    for i in range(count):
        prompt = TEXT[i : 2 * i + 9]
        sampled = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        yield {"prompt": prompt, "max_tokens": tokens, "speculative": methods[i // 2 % 4], **sampled}


def alone(llm, body):
    """The same prompt, by itself and without drafts, from the library."""
    params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body.get("seed"))
    return llm.generate(body["prompt"], params).text


def crowd(server, llm, count, tokens, rounds=1):
    """Many streams at once, a quarter of which vanish: the others are as if each were alone."""
    asked = list(bodies(count, tokens))
    expected = [alone(llm, body) for body in asked]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for _ in range(rounds):
            vanish = [2 if i % 4 == 3 else None for i in range(count)]
            got = list(pool.map(lambda body, after: stream(server, body, after), asked, vanish))
            stayed = [i for i, after in enumerate(vanish) if after is None]
            assert [got[i] for i in stayed] == [expected[i] for i in stayed]
    settled(server)


def settled(server, seconds=30):
    """Slots and memory are as at the start."""
    server.wait_for(lambda: server.fleet._workers[server.fleet.list()[0].uid]._samples == 0, seconds)
    server.wait_for(lambda: [(m.running, m.waiting, m.cache) for m in server.fleet.list()] == [(0, 0, 0.0)], seconds)


@pytest.fixture(scope="module")
def plain(tiny_folder):
    with LLM(str(tiny_folder), draft="none", threads=1, cache_memory=0.1) as llm:
        yield llm


def test_32_streams_are_as_if_each_were_alone(server, plain):
    crowd(server, plain, count=32, tokens=24, rounds=2)


@pytest.mark.real
def test_32_streams_of_a_real_model(serve):
    from outrider.models import sources

    if not any(model.name == "smollm2-135m" and model.path for model in sources.installed()):
        pytest.skip("smollm2-135m is not in the cache: outrider pull smollm2-135m")
    server = serve()
    server.launch("smollm2-135m", cache_memory=0.9)
    with LLM("smollm2-135m", draft="none", cache_memory=0.2) as llm:
        crowd(server, llm, count=32, tokens=16)


class TestVanishingClients:
    def test_a_stream_that_nobody_reads_is_stopped(self, server):
        for _ in range(3):
            stream(server, {**ENDLESS, "max_tokens": 1000}, vanish_after=1)
        settled(server, 5)

    def test_an_answer_that_nobody_waits_for_is_stopped(self, serve, quick):
        server = serve()
        server.launch(quick)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=0.3)
        settled(server, 5)
        assert 'outrider_requests_total{finish_reason="cancelled"' in server.get("/metrics").text

    def test_one_that_waits_in_the_queue_is_taken_out(self, serve, quick):
        server = serve()
        server.launch(quick, max_batch=1)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}) as first:
            next(first.iter_lines())
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=0.3)
            server.wait_for(lambda: 'outrider_requests_total{finish_reason="cancelled"' in server.get("/metrics").text)
            assert server.fleet._workers["quick.gguf"]._samples <= 1  # the first one, if it is not done by now
        settled(server)


class TestLimits:
    def test_a_full_queue_says_when_to_come_back(self, serve, quick):
        server = serve(limits=WorkerLimits(queue=1))
        server.launch(quick, max_batch=1)
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                body = {**ENDLESS, "stream": True}
                answer = stack.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body))
                assert answer.status_code == 200
            refused = server.post("/v1/completions", ENDLESS)
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert server.post("/v1/completions", {**ENDLESS, "prompt": ["a", "b"]}).status_code == 429
        settled(server)
        assert server.post("/v1/completions", {**ENDLESS, "max_tokens": 1}).status_code == 200
        too_many = server.post("/v1/completions", {**ENDLESS, "max_tokens": 1, "n": 3})
        assert too_many.status_code == 429

    def test_a_list_of_prompts_leaves_others_their_turn(self, serve, quick):
        """Its prompts are one request: a small one is answered while they all still run or wait."""
        server = serve()
        server.launch(quick, uid="tiny", max_batch=2)
        body = {
            **ENDLESS,
            "prompt": ["the red fox"] * 6,
            "max_tokens": 2000,
            "speculative": {"off": True},
            "stream": True,
        }
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as many:
            lines = many.iter_lines()  # kept: without it the stream would be closed
            next(lines)
            assert server.post("/v1/completions", {**ENDLESS, "max_tokens": 2}).status_code == 200
            assert server.fleet._workers["tiny"]._samples == 6
        settled(server)

    def test_who_asks_for_too_long_is_stopped(self, serve, quick):
        server = serve(ServerOptions(timeout=0.8))
        server.launch(quick)
        late = server.post("/v1/completions", ENDLESS)
        assert (late.status_code, late.json()["error"]["type"]) == (408, "timeout_error")
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}) as answer:
            *_, last = events(answer.iter_lines())
        assert json.loads(last)["error"]["code"] == "timeout"
        settled(server, 5)

    def test_waiting_and_answering_share_the_time(self):
        """Where a request has waited for its turn, its answer has only what is left."""

        async def answer() -> None:
            begun = asyncio.get_running_loop().time() - 60.0
            request = HttpRequest({"type": "http", "app": app, "state": {"begun": begun}})
            async with time_limit(request):
                await asyncio.sleep(0.01)

        app = create_app(Fleet(), ServerOptions(timeout=90.0))
        asyncio.run(answer())
        app = create_app(Fleet(), ServerOptions(timeout=50.0))
        with pytest.raises(Timeout, match="took longer than 50 s"):
            asyncio.run(answer())

    def test_bodies_are_bounded(self, serve):
        server = serve(ServerOptions(max_body=1000))
        big = json.dumps({"prompt": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}
        told = server.post("/v1/completions", content=big, headers=headers)
        untold = server.post("/v1/completions", content=iter([big[:500], big[500:]]), headers=headers)
        for answer in (told, untold):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 404  # no model, but it was read


class TestStrangers:
    @pytest.fixture
    def locked(self, serve):
        return serve(ServerOptions(api_key="sesame"))

    @pytest.mark.parametrize(
        "headers",
        [{}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Bearer sesame2"}],
    )
    def test_without_the_key_nothing_opens(self, locked, headers):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/info"):
            answer = locked.get(path, headers=headers)
            assert answer.status_code == 401, path
        assert locked.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == 401
        error = locked.get("/v1/models", headers=headers).json()["error"]
        assert error["code"] == "invalid_api_key"

    def test_with_it_everything_does(self, locked):
        assert locked.get("/metrics", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert locked.get("/metrics", headers={"x-api-key": "sesame"}).status_code == 200
        assert locked.get("/health").status_code == 200

    def test_pages_of_others_may_not_ask_unless_told(self, server, serve):
        origin = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
        assert "access-control-allow-origin" not in server.get("/health", headers=origin).headers
        opened = serve(ServerOptions(cors=("https://elsewhere.example",)))
        answer = opened.get("/health", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://elsewhere.example"
        asked = httpx.options(f"{opened.url}/v1/completions", headers=origin)
        assert asked.status_code == 200
        other = opened.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_requests_have_ids(server):
    named = server.get("/health", headers={"x-request-id": "abc-1"})
    assert named.headers["x-request-id"] == "abc-1"
    made = [
        server.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 200)
    ]
    assert len(set(made)) == 3
    assert all(len(id) == 32 for id in made)
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "abc-2"})
    assert answer.json()["id"] == "cmpl-abc-2"


class Served:
    """`outrider serve` in a process of its own."""

    def __init__(self, *args):
        command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--threads", "1", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()
        self.url = self.said.split()[2] if self.said else ""

    def end(self, *signals):
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        return self.process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


class TestTheCommand:
    def test_a_signal_lets_what_runs_end(self, quick):
        body = {**ENDLESS, "max_tokens": 3000, "stream": True}
        with Served(quick, "--cache-memory", 0.1) as served:
            with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                next(lines)
                served.process.send_signal(signal.SIGTERM)
                refused = _when_draining(served)
                assert refused.status_code == 503
                assert "shutting down" in refused.json()["error"]["message"]
                *_, last = events(lines)
            assert last == "[DONE]"
            assert served.process.wait(30) == 0
            log = [json.loads(line) for line in served.process.stderr]
        assert {"ready", "draining", "request"} <= {line["event"] for line in log}
        asked = [line for line in log if line["event"] == "request" and line["path"] == "/v1/completions"]
        assert all(line["request_id"] for line in asked)
        assert {line["status"] for line in asked} == {200, 503}

    def test_a_second_signal_ends_it_at_once(self, quick):
        with Served(quick, "--cache-memory", 0.1) as served:
            ended = threading.Thread(target=_read_to_the_end, args=(served.url,))
            ended.start()
            time.sleep(0.5)
            begin = time.monotonic()
            assert served.end(signal.SIGTERM, signal.SIGTERM) == 0
            assert time.monotonic() - begin < 20
            ended.join(10)

    def test_a_local_host_that_is_named_answers_to_local_names_alone(self):
        with Served("--no-model", "--host", "127.0.0.1") as served:
            status = {
                name: httpx.get(f"{served.url}/v1/models", headers={"host": name}).status_code
                for name in ("evil.example", "localhost", "127.0.0.1:1")
            }
        assert status == {"evil.example": 421, "localhost": 200, "127.0.0.1:1": 200}

    def test_a_taken_port_is_one_line(self, quick):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            done = _outrider("serve", quick, "--port", port)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"port {port} (Address already in use)" in done.stderr

    def test_what_cannot_be_served_is_one_line(self):
        """What is refused before anything starts: tests/cli/test_serve.py."""
        done = _outrider("serve", "/nowhere", "--port", 0)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "no such file or folder" in done.stderr

    def test_speculative_tokens_mean_prompt_lookup(self, quick):
        with Served("--model-id", quick, "--speculative-tokens", 3, "--cache-memory", 0.1, "--uid", "m") as served:
            body = {"prompt": "abcabcabcabcabc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            said = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
            assert said["model"] == "m"
            assert set(said["metrics"]["by_depth"]) <= {"1", "2", "3"}
            assert served.end(signal.SIGINT) == 0


def _when_draining(served):
    while True:
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=30)
        if answer.status_code != 200:
            return answer


def _read_to_the_end(url):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=60)


def _outrider(*args):
    command = [sys.executable, "-m", "outrider", *map(str, args)]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
