"""Adapters per request: heads that draft, by name and by folder, in LoRAX's face and OpenAI's."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from foreign import lorax
from tiny import eagle_head, medusa_head

from outrider import LLM, SamplingParams
from outrider.drafters.heads import files as heads
from outrider.server.options import ServerOptions
from outrider.server.registry import load

PROMPT = "the red fox and the blue fox count"


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), draft="none", threads=1, cache_memory=0.05) as llm:
        yield llm


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, llm, tiny_stranger) -> Path:
    """A folder of them."""
    folder = tmp_path_factory.mktemp("adapters")
    target = llm.backend.engine.model
    torch.manual_seed(0)
    heads.write(eagle_head(target), folder / "eagle-head", target)
    heads.write(medusa_head(target), folder / "medusa-head", target)
    with LLM(str(tiny_stranger), draft="none", threads=1, cache_memory=0.05) as other:
        stranger = other.backend.engine.model
        heads.write(eagle_head(stranger), folder / "of-another-model", stranger)
    for name, file, text in (
        ("lora", "adapter_config.json", json.dumps({"peft_type": "LORA"})),
        ("broken", "config.json", "{"),
        ("list", "config.json", "[]"),
        ("with,comma", "config.json", "{}"),
    ):
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(serve_all, tmp_path_factory, tiny_folder, adapters):
    path = tmp_path_factory.mktemp("registry") / "registry.yaml"
    path.write_text(yaml.safe_dump({"heads": [{"name": "my-eagle", "source": str(adapters / "eagle-head")}]}))
    server = serve_all(ServerOptions(folders=(adapters,)), registry=load(path))
    server.launch(tiny_folder, uid="tiny", draft="ngram", pace=False)
    return server


def generate(server, adapter_id, **more):
    parameters = {"max_new_tokens": 24, "details": True, "adapter_id": adapter_id, **more}
    return server.post("/generate", {"inputs": PROMPT, "parameters": parameters})


def drafters(server, adapter_id):
    """Who drafted for an answer of OpenAI's face."""
    common = {"model": adapter_id, "max_tokens": 24, "temperature": 0}
    asked = {"completions": {"prompt": PROMPT}, "chat/completions": {"messages": [{"role": "user", "content": PROMPT}]}}
    answers = [server.post(f"/v1/{path}", {**common, **body}) for path, body in asked.items()]
    assert [answer.status_code for answer in answers] == [200, 200]
    text, chat = (set(answer.json()["metrics"]["by_drafter"]) for answer in answers)
    assert text == chat or "ngram" in text | chat  # which drafts only where something comes again
    return text | chat


def test_heads_are_chosen_per_request_by_name_or_folder(server, adapters, llm):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24)).text
    eagle, medusa = str(adapters / "eagle-head"), str(adapters / "medusa-head")
    asked = [None, "", "__base_model__", "my-eagle", eagle, medusa] * 4
    with ThreadPoolExecutor(len(asked)) as pool:  # one batch, many drafters
        answers = list(pool.map(lambda id: generate(server, id), asked))
    assert {answer.json()["generated_text"] for answer in answers} == {expected}
    assert drafters(server, "my-eagle") == drafters(server, eagle) == {"eagle"}
    assert drafters(server, medusa) == {"medusa"}
    assert drafters(server, "") <= {"ngram"}
    assert answers[3].headers["x-adapter-id"] == "my-eagle"
    assert "x-adapter-id" not in answers[0].headers


def test_their_client_chooses_a_head(server, adapters, llm):
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24)).text
    asked = {"prompt": PROMPT, "max_new_tokens": 24, "adapter_id": str(adapters / "eagle-head")}
    answers = lorax(
        server.url,
        ("generate", {**asked, "adapter_source": "local"}),
        ("generate_stream", asked),
        ("generate", {**asked, "adapter_id": str(adapters / "lora")}),
    )
    assert answers[0]["generated_text"] == answers[1][-1]["generated_text"] == expected
    assert answers[2]["raised"] == "ValidationError"
    assert "adapter_model.safetensors" in answers[2]["message"]


def test_sampling_with_a_head_is_the_models_own(server, llm):
    law = {"temperature": 1.4, "top_k": 20, "seed": 11}
    answer = generate(server, "my-eagle", **law).json()
    assert answer["generated_text"] == llm.generate(PROMPT, SamplingParams(max_tokens=24, **law)).text


@pytest.mark.parametrize(
    ("adapter", "status", "reason"),
    [
        ("of-another-model", 400, "use a head"),
        ("lora", 400, "adapter_model.safetensors"),
        ("broken", 400, "config.json of the adapter cannot be read"),
        ("list", 400, "not a JSON object"),
        ("empty", 400, "has no config.json"),
        ("with,comma", 400, "comma"),
        ("absent", 400, "no such file or folder"),
        ("x" * 300, 400, "is no path"),
        ("../elsewhere", 403, "--allow-folder"),
    ],
)
def test_an_adapter_that_cannot_be_says_why(server, adapters, adapter, status, reason):
    response = generate(server, f"{adapters}/{adapter}")
    assert (response.status_code, response.json()["error_type"]) == (status, "validation")
    assert reason in response.json()["error"]
    assert generate(server, "my-eagle").status_code == 200  # and the server goes on


def test_sources_are_kept_apart(server, adapters):
    here = str(adapters / "eagle-head")
    for source, reason in (("hub", "is a folder"), ("s3", "hub or local"), ("pbase", "hub or local")):
        response = generate(server, here, adapter_source=source)
        assert (response.status_code, reason in response.json()["error"]) == (400, True)
    assert generate(server, here, adapter_source="local").status_code == 200
    assert generate(server, "some/adapter", adapter_source="hub").status_code == 403


def test_the_model_without_a_head_of_its_own_says_so(server):
    response = generate(server, "eagle")
    assert response.status_code == 400
    assert "head" in response.json()["error"]


def test_what_is_neither_a_model_nor_an_adapter_is_unknown(server):
    for name in ("nobody", "/etc/passwd", "some/adapter"):
        response = server.post("/v1/completions", {"model": name, "prompt": PROMPT})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_no_request_makes_us_unpickle(server, adapters):
    asked = {"method": "medusa", "head": str(adapters / "medusa-head"), "allow_pickle": True}
    response = server.post("/v1/completions", {"prompt": PROMPT, "speculative": asked})
    assert (response.status_code, "pickles" in response.json()["error"]["message"]) == (403, True)
