"""outrider.Client against a real `outrider serve`."""

from __future__ import annotations

import gc
import http.server
import threading
import time

import httpx
import pytest
from serving import outrider_serve

from outrider import LLM, Client, OutriderError, SamplingParams

PROMPT = "the red fox and the blue fox count"
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "count the stars"},
]
GREEDY = {"max_tokens": 10, "temperature": 0}
LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def client(tiny_folder, tiny_draft, tmp_path_factory):
    folders = [flag for folder in (tiny_folder, tiny_draft) for flag in ("--allow-folder", folder)]
    small = ("--threads", 1, "--cache-memory", 0.1)
    with outrider_serve("--no-model", *folders, *small, "--log-level", "error", api_key="secret") as client:
        yield client


@pytest.fixture(scope="module")
def model(client, tiny_folder, tiny_draft):
    uid = client.launch_speculative_llm(str(tiny_folder), None, "none", str(tiny_draft), None, None, None, "a/pair")
    assert uid == "a/pair"
    return client.get_model(uid)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), draft="none", threads=1, cache_memory=0.05) as llm:
        yield llm


def running(client: Client) -> int:
    text = httpx.get(client.base_url + "/metrics", headers={"authorization": "Bearer secret"}).text
    [line] = [line for line in text.splitlines() if line.startswith("outrider_num_requests_running{")]
    return int(float(line.split()[-1]))


def wait_until_idle(client: Client) -> None:
    end = time.monotonic() + 10
    while running(client):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_pair_is_launched_listed_and_described(client, model):
    told = client.describe_model("a/pair")
    assert client.list_models() == {"a/pair": told}
    assert (told["status"], told["draft"].partition(":")[0]) == ("ready", "draft_model")


def test_both_forms_of_chat(model, llm):
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=10)).text
    answers = [
        model.chat(MESSAGES, generate_config=GREEDY),
        model.chat(MESSAGES, None, None, GREEDY),
        model.chat("count the stars", "be brief", MESSAGES[1:3], None, GREEDY),
        model.chat(
            prompt="count the stars", system_prompt="be brief", chat_history=MESSAGES[1:3], generate_config=GREEDY
        ),
    ]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [expected] * 4


def test_generate_whole_and_as_a_stream(model, llm):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=10)).text
    assert model.generate(PROMPT, GREEDY)["choices"][0]["text"] == expected
    assert model.generate(PROMPT, {**GREEDY, "gamma": 2})["choices"][0]["text"] == expected
    with model.generate(PROMPT, {**GREEDY, "stream": True}) as chunks:
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    chunks = model.chat("count the stars", generate_config={**GREEDY, "stream": True})
    assert chunks.__next__()["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


def test_closing_or_dropping_a_stream_ends_the_writing(client, model):
    chunks = model.generate(PROMPT, LONG)
    next(chunks)
    chunks.close()
    assert list(chunks) == []
    wait_until_idle(client)
    unread = model.generate(PROMPT, LONG)
    del unread
    gc.collect()
    wait_until_idle(client)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model: model.generate(PROMPT, {"temprature": 1}), r"refused \(400\): unknown field 'temprature'"),
        (lambda model: model.generate(PROMPT, {"max_tokens": 10**6}), "context"),
        (lambda model: model.chat(MESSAGES, tools=[{"type": "function"}]), "tools"),
        (lambda model: model.chat(MESSAGES, enable_thinking=True), "chat_template_kwargs"),
        (lambda model: model.chat(), "messages"),
        (lambda model: model.chat(MESSAGES, system_prompt="x"), "system_prompt"),
        (lambda model: model.generate(PROMPT, {"stop": object()}), "JSON"),
        (lambda model: model._client.get_model("nobody"), r"refused \(404\): no model 'nobody'"),
        (lambda model: model._client.terminate_model("nobody"), "404"),
        (lambda model: model._client.launch_model("nobody"), "403"),
        (lambda model: model._client.launch_model("smollm2", 70), "there is: size 0.135 q4_1"),
        (lambda model: Client(model._client.base_url).list_models(), r"refused \(401\)"),
        (lambda model: Client("http://127.0.0.1:1").list_models(), "is the server running"),
        (lambda model: Client("127.0.0.1:8000").list_models(), "http"),
        (lambda model: Client("http://[nowhere").list_models(), "nowhere"),
    ],
)
def test_errors_are_ours_and_say_why(model, call, reason):
    with pytest.raises(OutriderError, match=reason) as caught:
        call(model)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_none_of_ours():
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 500)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            with pytest.raises(OutriderError, match="did not answer in JSON"):
                client.list_models()
            with pytest.raises(OutriderError, match=r"refused \(500\): <html>"):
                client.describe_model("x")
        server.shutdown()


def test_a_model_that_is_terminated_ends_its_streams_with_the_reason(client, model):
    chunks = model.generate(PROMPT, LONG)
    next(chunks)
    client.terminate_model("a/pair")
    with pytest.raises(OutriderError, match=r"failed while answering: .*terminated"):
        list(chunks)
    assert client.list_models() == {}
