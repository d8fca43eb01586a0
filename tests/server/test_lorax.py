"""LoRAX's face, through LoRAX's own client and without it."""

from __future__ import annotations

import json

import httpx
import pytest
from foreign import lorax

from outrider import LLM, SamplingParams
from outrider.server.faces.lorax_bodies import LoraxParameters
from outrider.server.options import ServerOptions

DRAFT = "layer_skip:layers=2,length=3"
PROMPT = "the red fox and the blue fox count the stars, one, two, three; the red fox and the blue"


@pytest.fixture(scope="module")
def url(on, serve_all, tiny_folder, request):
    if on != "local":
        return request.getfixturevalue("face").url
    server = serve_all(ServerOptions(api_key=""))
    server.launch(tiny_folder, draft=DRAFT, uid="tiny", pace=False)
    return server.url


def kept(on, url, folder, tokens):
    """How many tokens of a draft are kept, as the library counts them, or vLLM's own figures in OpenAI's face."""
    if on == "local":
        with LLM(str(folder), draft=DRAFT, pace=False, threads=1, cache_memory=0.05) as llm:
            return llm.generate(PROMPT, SamplingParams(max_tokens=tokens)).stats.accepted
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": tokens}
    return httpx.post(url + "/v1/completions", json=body, timeout=60).json()["metrics"]["accepted"]


def generate(url, path="/generate", inputs=PROMPT, **parameters):
    return httpx.post(url + path, json={"inputs": inputs, "parameters": parameters}, timeout=60)


def events(response):
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_their_client_gets_our_answers(url, library):
    asked = {"prompt": PROMPT, "max_new_tokens": 40}
    whole, stream, async_stream = lorax(url, ("generate", asked), ("generate_stream", asked), ("async_stream", asked))
    expected = library.generate(PROMPT, SamplingParams(max_tokens=40))
    assert whole["generated_text"] == expected.text
    assert [token["id"] for token in whole["details"]["tokens"]] == expected.token_ids
    assert whole["details"]["finish_reason"] == "length"
    assert whole["details"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert whole["details"]["generated_tokens"] == 40
    assert stream == async_stream
    assert [event["token"]["id"] for event in stream] == expected.token_ids
    assert "".join(event["token"]["text"] for event in stream) == expected.text
    assert [event["generated_text"] for event in stream] == [None] * 39 + [expected.text]
    assert stream[-1]["details"]["generated_tokens"] == 40
    assert all(event["token"]["logprob"] < 0 for event in stream)


def test_their_client_understands_our_refusals(url):
    calls = [
        {"watermark": True},
        {"adapter_id": "/etc", "adapter_source": "local"},
        {"adapter_id": "some/adapter"},
        {"max_new_tokens": 10**6},
        {"response_format": {"type": "json_object", "schema": {"type": "array", "uniqueItems": True}}},
    ]
    raised = lorax(url, *(("generate", {"prompt": "the", **call}) for call in calls))
    assert {each["raised"] for each in raised} == {"ValidationError"}
    reasons = ("watermark", "--allow-folder", "--allow-hub", "context", "uniqueItems")
    assert [reason in each["message"] for reason, each in zip(reasons, raised, strict=True)] == [True] * 5
    [streamed] = lorax(url, ("generate_stream", {"prompt": "the", "watermark": True}))
    assert streamed["raised"] == "ValidationError"


def test_skipped_tokens_are_those_kept_from_drafts(on, url, target):
    response = generate(url, max_new_tokens=60, details=True)
    details = response.json()["details"]
    assert details["skipped_tokens"] == kept(on, url, target, 60)
    assert (details["skipped_tokens"] > 0) is (on != "vllm")  # which drafts nothing
    assert response.headers["x-skipped-tokens"] == str(details["skipped_tokens"])
    assert response.headers["x-generated-tokens"] == "60"
    assert response.headers["x-model-id"] == str(target)
    assert events(generate(url, "/generate_stream", max_new_tokens=60, details=True))[-1]["details"] == {
        key: details[key] for key in ("finish_reason", "prompt_tokens", "generated_tokens", "skipped_tokens", "seed")
    }


def test_the_root_answers_in_a_list_or_as_a_stream(url):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}}
    [whole] = httpx.post(url + "/", json=body).json()
    assert set(whole) == {"generated_text"}
    assert events(httpx.post(url + "/", json=body | {"stream": True}))[-1]["generated_text"] == whole["generated_text"]


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7}, True),
        ({"temperature": 0, "do_sample": True, "top_k": 5}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"seed": 7}, False),
    ],
)
def test_what_asks_for_sampling(given, samples):
    assert LoraxParameters(**given).samples is samples


def test_sampling_is_ours_and_its_seed_gives_it_again(url, library):
    first = generate(url, max_new_tokens=30, do_sample=True, top_k=9, temperature=1.3, details=True).json()
    seed = first["details"]["seed"]
    again = generate(url, max_new_tokens=30, do_sample=True, top_k=9, temperature=1.3, seed=seed).json()
    ours = library.generate(PROMPT, SamplingParams(max_tokens=30, top_k=9, temperature=1.3, seed=seed))
    assert first["generated_text"] == again["generated_text"] == ours.text
    assert generate(url, max_new_tokens=3, details=True).json()["details"]["seed"] is None


def test_typical_sampling_is_ours(url, library):
    law = dict(max_tokens=20, temperature=0.8, top_p=0.7, typical_p=0.6, repetition_penalty=1.4, seed=3)
    theirs = generate(
        url, max_new_tokens=20, temperature=0.8, top_p=0.7, typical_p=0.6, repetition_penalty=1.4, seed=3
    ).json()
    assert theirs["generated_text"] == library.generate(PROMPT, SamplingParams(**law)).text


def test_the_best_of_several(url):
    for _ in range(8):  # each time the first could be the best by chance
        details = generate(url, max_new_tokens=12, do_sample=True, best_of=4, details=True).json()["details"]
        sequences = (details, *details["best_of_sequences"])
        means = [sum(token["logprob"] for token in each["tokens"]) / len(each["tokens"]) for each in sequences]
        assert len(set(means)) == 4  # they differ
        assert means[0] == max(means)
        assert details["seed"] is None
    [best] = lorax(url, ("generate", {"prompt": PROMPT, "max_new_tokens": 4, "do_sample": True, "best_of": 2}))
    assert len(best["details"]["best_of_sequences"]) == 1


def test_a_stop_sequence_ends_the_text_and_stays_in_it(url):
    plain = generate(url, max_new_tokens=40, details=True).json()
    tokens = plain["details"]["tokens"]
    place, stop = next((i, t["text"]) for i, t in enumerate(tokens) if i > 2 and t["text"].isprintable() and t["text"])
    before = "".join(token["text"] for token in tokens[:place])
    assert stop not in before
    answer = generate(url, max_new_tokens=40, stop=["never to be seen", stop], details=True).json()
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["generated_text"] == before + stop
    assert (
        events(generate(url, "/generate_stream", max_new_tokens=40, stop=[stop]))[-1]["generated_text"] == before + stop
    )


def test_the_end_token_ends_the_text_unless_ignored(url):
    wild = {"max_new_tokens": 900, "do_sample": True, "temperature": 2.0, "details": True}
    answers = ((seed, generate(url, seed=seed, **wild).json()) for seed in range(20))
    seed, ended = next((s, answer) for s, answer in answers if answer["details"]["finish_reason"] == "eos_token")
    last = ended["details"]["tokens"][-1]
    assert (last["text"], last["special"]) == ("<|im_end|>", True)
    assert "<|im_end|>" not in ended["generated_text"]
    onward = generate(url, seed=seed, ignore_eos_token=True, **wild).json()
    assert onward["details"]["finish_reason"] == "length"
    assert onward["details"]["generated_tokens"] == 900


def test_prompt_options(url, library):
    full = generate(url, inputs="the red fox", max_new_tokens=4, return_full_text=True).json()["generated_text"]
    assert full.startswith("the red fox")
    assert len(full) > len("the red fox")
    ids = library.tokenizer.encode(PROMPT)
    cut = generate(url, max_new_tokens=4, truncate=3, decoder_input_details=True).json()
    assert [token["id"] for token in cut["details"]["prefill"]] == ids[-3:]
    assert [token["logprob"] for token in cut["details"]["prefill"]] == [None] * 3
    assert cut["generated_text"] == library.generate(ids[-3:], SamplingParams(max_tokens=4)).text
    chat = generate(url, inputs="Hi", max_new_tokens=4, apply_chat_template=True).json()["generated_text"]
    assert chat == library.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=4)).text


def test_alternatives_are_the_likeliest(url):
    tokens = generate(url, max_new_tokens=5, details=True, return_k_alternatives=3).json()["details"]["tokens"]
    for token in tokens:
        assert token["alternative_tokens"][0]["id"] == token["id"]  # greedy
        chances = [other["logprob"] for other in token["alternative_tokens"]]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 3


def test_without_a_limit_the_context_is_filled(url):
    answer = generate(url, inputs="the", details=True, ignore_eos_token=True).json()
    assert answer["details"]["generated_tokens"] + answer["details"]["prompt_tokens"] == 1024


def test_info_and_health(on, url, target, wide_twin):
    told = httpx.get(url + "/info").json()
    assert told["model_id"] == str(target)
    draft = {"local": DRAFT, "vllm": "none", "vllm-drafting": f"draft_model:model={wide_twin},length=4"}[on]
    assert (told["max_total_tokens"], told["draft"]) == (1024, draft)
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"best_of": 2}, "needs sampling"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "exclude each other"),
        ({"best_of": 0}, "greater than 0"),
        ({"best_of": 1000, "do_sample": True}, "less than or equal"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"top_k": 0}, "greater than 0"),
        ({"top_p": 1.5}, "less than 1"),
        ({"typical_p": 0}, "greater than 0"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"max_new_tokens": 0}, "greater than 0"),
        ({"max_new_tokens": -5}, "greater than 0"),
        ({"max_new_tokens": 5000}, "context is 1024"),
        ({"max_new_tokens": "many"}, "valid integer"),
        ({"truncate": 0}, "greater than 0"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"stop": [""]}, "at least 1 character"),
        ({"do_sample": "yes"}, "valid boolean"),
        ({"temperature": "0.5"}, "valid number"),
        ({"watermark": True}, "watermark"),
        ({"adapter_id": "a", "merged_adapters": {"ids": ["a"], "weights": [1.0]}}, "exclude each other"),
        ({"merged_adapters": {"ids": [], "weights": []}}, "at least 1 item"),
        ({"merged_adapters": {"ids": ["a"], "merge_strategy": "soup"}}, "merge_strategy"),
        ({"merged_adapters": {"ids": ["a"], "density": 2.0}}, "density"),
        ({"api_token": "secret"}, "own login"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, '"not"'),
        ({"response_format": {}}, "response_format"),
        ({"adapter_source": "moon"}, "adapter_source"),
        ({"temprature": 1}, "unknown field 'parameters.temprature'"),
    ],
)
def test_bad_parameters_are_refused_in_their_shape(url, parameters, reason):
    response = generate(url, **parameters)
    assert response.status_code == 422
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == "validation"
    assert reason in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"inputs": "the'),
        ("/generate", b'{"inputs": ""}'),
        ("/generate", b'{"inputs": 7}'),
        ("/generate", b'{"inputs": "\\ud800"}'),
        ("/generate", b"{}"),
        ("/generate", b"[]"),
        ("/generate", b'{"inputs": "the", "stream": true}'),
        ("/", b'{"inputs": "the", "stream": "yes"}'),
        ("/generate_stream", b'{"inputs": "the", "parameters": {"best_of": 2, "do_sample": true}}'),
        ("/generate_stream", b'{"inputs": "the", "parameters": {"decoder_input_details": true}}'),
    ],
)
def test_bad_bodies_are_refused_in_their_shape(url, path, body):
    response = httpx.post(url + path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


def test_a_server_with_a_key_and_several_models(serve, tiny_folder, tiny_mute):
    server = serve(ServerOptions(api_key="key"))
    headers = {"authorization": "Bearer key"}
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 900, "ignore_eos_token": True}}

    nothing = httpx.post(server.url + "/generate", json=body, headers=headers)
    assert (nothing.status_code, nothing.json()["error_type"]) == (404, "validation")
    server.launch(tiny_folder, uid="first")
    server.launch(tiny_mute, uid="second")
    assert httpx.post(server.url + "/", json=body).status_code == 401  # GET / is the playground, and open
    assert set(httpx.post(server.url + "/generate", json=body).json()) == {"error", "error_type"}

    # nobody said which, so the first is meant
    assert httpx.get(server.url + "/info", headers=headers).json()["model_id"] == str(tiny_folder)

    # a reader who leaves stops the writing
    with httpx.stream("POST", server.url + "/generate_stream", json=body, headers=headers) as response:
        assert response.headers["x-model-id"] == str(tiny_folder)
        next(response.iter_lines())
        assert server.fleet.describe("first").running == 1
    server.wait_for(lambda: server.fleet.describe("first").running == 0, 10)
    assert 'reason="cancelled"' in httpx.get(server.url + "/metrics", headers=headers).text
