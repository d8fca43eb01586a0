"""Xinference's face: launch, list, chat, generate and terminate, through Xinference's own client and without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from serving import PAIR, write_names
from stated import DRAFTING
from xinference_client import AsyncRESTfulClient, RESTfulClient

from outrider import SamplingParams
from outrider.server.faces.xinference import GAMMA
from outrider.server.options import ServerOptions
from outrider.server.registry import load

PROMPT = "the red fox and the blue fox count"
MESSAGES = [{"role": "user", "content": "count the stars"}]
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="session", params=["local", pytest.param(DRAFTING, marks=pytest.mark.vllm)])
def on(request):
    return request.param


@pytest.fixture(scope="module")
def server(on, serve_all, tiny_folder, tiny_draft, tiny_stranger, tiny_mute, tmp_path_factory, request):
    """No model yet; the registry knows one pair, and the models' folders are allowed but for the stranger's."""
    if on != "local":
        return request.getfixturevalue("face")
    path = write_names(tmp_path_factory.mktemp("registry"), tiny_folder, tiny_draft, tiny_stranger)
    small = {"threads": 1, "cache_memory": 0.05, "pace": False}  # what is drafted does not depend on the clock
    return serve_all(ServerOptions(folders=(tiny_mute.parent,), defaults=small), registry=load(path))


@pytest.fixture(scope="module")
def theirs(server):
    client = RESTfulClient(server.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def pair(on, server):
    """A speculative pair, launched as Xinference 0.5 did it."""
    if on != "local":
        return "tiny"  # it has been
    response = server.post("/experimental/speculative_llms", {**PAIR, "model_uid": None})
    assert response.status_code == 200, response.text
    return response.json()["model_uid"]


def test_their_client_launches_lists_and_terminates(server, theirs, tiny_folder):
    uid = theirs.launch_model("tiny", model_uid="mine", model_size_in_billions=0.001, quantization="none", n_gpu=None)
    assert uid == "mine"
    listed = theirs.list_models()["mine"]
    assert listed == theirs.describe_model("mine")
    assert listed["model_type"] == "LLM"
    assert listed["model_ability"] == ["generate", "chat"]
    assert (listed["model_name"], listed["model_size_in_billions"], listed["quantization"]) == ("tiny", 0.001, "none")
    assert (listed["status"], listed["context_length"]) == ("ready", 1024)
    assert theirs.get_instance_info("tiny", "mine")[0]["model_uid"] == "mine"
    pid = server.pid("mine")
    with pytest.raises(RuntimeError, match="already launched"):
        theirs.launch_model("tiny", model_uid="mine")
    theirs.terminate_model("mine")
    assert "mine" not in theirs.list_models()
    assert not Path(f"/proc/{pid}").exists()
    for call in (theirs.terminate_model, theirs.describe_model, theirs.get_model):
        with pytest.raises(RuntimeError, match="no model 'mine' is launched"):
            call("mine")


def test_their_client_gets_our_answers_from_a_pair(theirs, pair, library):
    model = theirs.get_model(pair)
    chat = library.chat(MESSAGES, SamplingParams(max_tokens=12)).text
    text = library.generate(PROMPT, SamplingParams(max_tokens=12)).text
    assert model.chat(MESSAGES, generate_config=GREEDY)["choices"][0]["message"]["content"] == chat
    answer = model.generate(PROMPT, GREEDY)
    assert answer["choices"][0]["text"] == text
    assert answer["metrics"]["by_drafter"].keys() == {"draft_model"}
    chunks = list(model.chat(MESSAGES, generate_config={**GREEDY, "stream": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == chat
    chunks = list(model.generate(PROMPT, {**GREEDY, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    model.close()


def test_their_async_client_works_too(server, pair, library):
    async def answer() -> str:
        client = AsyncRESTfulClient(server.url)
        try:
            assert pair in await client.list_models()
            model = await client.get_model(pair)
            chunks = await model.chat(MESSAGES, generate_config={**GREEDY, "stream": True})
            text = "".join([chunk["choices"][0]["delta"].get("content", "") async for chunk in chunks])
            await model.close()
            return text
        finally:
            await client.close()

    assert asyncio.run(answer()) == library.chat(MESSAGES, SamplingParams(max_tokens=12)).text


@pytest.mark.parametrize(
    "config",
    [
        {"gamma": 1},
        {"gamma": 7},
        {"speculative": {"length": 2}},
        {"top_k": 5, "temperature": 0.9, "top_p": 0.8, "seed": 3, "repetition_penalty": 1.3},
        {"stop": ["\x01"], "stop_token_ids": [7], "echo": False},
    ],
    ids=["gamma 1", "gamma 7", "length 2", "sampled", "stops"],
)
def test_a_generate_config_is_honoured(theirs, pair, library, config):
    model = theirs.get_model(pair)
    answer = model.generate(PROMPT, {"max_tokens": 24, "temperature": 0, **config})
    known = {key: value for key, value in config.items() if key not in ("gamma", "speculative", "echo")}
    assert answer["choices"][0]["text"] == library.generate(PROMPT, SamplingParams(max_tokens=24, **known)).text
    length = config.get("gamma") or config.get("speculative", {}).get("length", GAMMA)
    assert max(map(int, answer["metrics"]["by_depth"]), default=0) <= length
    model.close()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"echo": True}, "echo"),
        ({"gamma": 0}, "gamma"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temprature": 1}, "unknown field 'temprature'"),
        ({"gamma": 3, "speculative": {"off": True}}, "leave out one of them"),
    ],
)
def test_what_is_not_is_refused_in_words_that_they_read(theirs, pair, config, reason):
    model = theirs.get_model(pair)
    with pytest.raises(RuntimeError, match=reason):
        model.generate(PROMPT, config)
    with pytest.raises(RuntimeError, match="tools"):
        model.chat(MESSAGES, tools=[{"type": "function"}])
    model.close()


def test_openai_reads_the_same_list(server, pair):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert pair in [model.id for model in client.models.list()]
        found = client.models.retrieve(pair)
        assert (found.object, found.owned_by) == ("model", "outrider")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")


def test_a_folder_is_launched_if_it_is_allowed(server, theirs, tiny_mute, tiny_stranger):
    uid = theirs.launch_model(str(tiny_mute), draft="ngram:length=3", max_batch=2)
    told = theirs.describe_model(uid)
    assert (told["model_ability"], told["draft"]) == (["generate"], "ngram:length=3")
    model = theirs.get_model(uid)
    assert not hasattr(model, "chat")  # without a template their client offers none
    assert model.generate("the", {"max_tokens": 2, "temperature": 0})["usage"]["completion_tokens"] == 2
    model.close()
    theirs.terminate_model(uid)
    for path in (tiny_stranger, "/etc", f"{tiny_mute}/../../..", "org/name"):
        response = server.post("/v1/models", {"model_name": str(path)})
        assert response.status_code == 403
        assert "--allow-" in response.json()["detail"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({}, 400, "model_name"),
        ({"model_name": "tiny", "model_size_in_billions": 70}, 400, "there is: size 0.001 none"),
        ({"model_name": "tiny", "quantization": "q4_0"}, 400, "does not come in quantization q4_0"),
        ({"model_name": "tiny", "model_type": "image"}, 400, "model_type"),
        ({"model_name": "tiny", "model_engine": "transformers"}, 400, "no engine 'transformers'"),
        ({"model_name": "tiny", "model_format": "ggufv2"}, 400, "is safetensors, not ggufv2"),
        ({"model_name": "tiny", "replica": 2}, 400, "replica cannot be chosen"),
        ({"model_name": "tiny", "n_gpu": 2}, 400, "one device"),
        ({"model_name": "tiny", "gpu_idx": [0, 1]}, 400, "one device"),
        ({"model_name": "tiny", "peft_model_config": {"lora_list": []}}, 400, "LoRA"),
        ({"model_name": "tiny", "envs": {"A": "b"}}, 400, "envs cannot be chosen"),
        ({"model_name": "tiny", "mode_path": "/etc"}, 400, "unknown field 'mode_path'"),
        ({"model_name": "tiny", "model_path": "/etc"}, 403, "--allow-folder"),
        ({"model_name": "tiny", "draft": "draft_model:model=/etc"}, 403, "--allow-folder"),
        ({"model_name": "tiny", "draft": "nobody"}, 400, "unknown drafter 'nobody'"),
        ({"model_name": "tiny", "draft": "draft_model:model=tiny,tokenizer=/etc"}, 403, "--allow-folder"),
        ({"model_name": "tiny", "dtype": "int3"}, 400, "unknown dtype"),
        ({"model_name": "tiny", "max_batch": 0}, 400, "max_batch must be at least 1"),
        ({"model_name": "tiny", "model_uid": "a b"}, 400, "is no uid"),
        ({"model_name": "nobody"}, 403, "neither a known name"),
    ],
    ids=str,
)
def test_a_launch_that_cannot_be_says_why(server, body, status, reason):
    before = server.get("/v1/models").json()
    response = server.post("/v1/models", body)
    assert (response.status_code, reason in response.json()["detail"]) == (status, True), response.text
    assert response.json()["error"]["message"] == response.json()["detail"]
    assert server.get("/v1/models").json() == before


def test_a_pair_that_cannot_be_says_why(server):
    response = server.post("/experimental/speculative_llms", {"model_name": "tiny"})
    assert "draft_model_name" in response.json()["detail"]
    response = server.post("/experimental/speculative_llms", {"model_name": "tiny", "draft_model_name": "/etc"})
    assert response.status_code == 403


def test_the_registry_is_listed(theirs):
    listed = theirs.list_model_registrations("LLM")
    assert {"model_name": "tiny", "model_size_in_billions": 0.001, "quantization": "none"} in listed


def test_their_client_brings_the_key(serve):
    server = serve(ServerOptions(api_key="secret"))
    with pytest.raises(RuntimeError, match="API key"):
        RESTfulClient(server.url).list_models()
    client = RESTfulClient(server.url, api_key="secret")
    assert client.list_models() == {}
    assert httpx.get(server.url + "/v1/cluster/auth").json() == {"auth": True}
