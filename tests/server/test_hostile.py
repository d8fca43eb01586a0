"""Requests that are meant to hurt, all to one real server: each gets its 4xx, and the next request is answered.

Nothing is allowed here but the model `tiny`: no folder, no hub, two models at most.
"""

import asyncio
import concurrent.futures
import json
import socket
import struct
import threading

import httpx
import pytest
from ggufs import byte_metadata, llama_metadata, write_llama, write_unchecked
from tiny import CPU, eagle_head

from outrider.drafters.heads import files as heads
from outrider.models.load import load
from outrider.server import protocol
from outrider.server.access import Access
from outrider.server.app import create_app
from outrider.server.errors import Failed
from outrider.server.faces.lorax_bodies import LoraxParameters
from outrider.server.faces.openai_bodies import CompletionBody
from outrider.server.fleet import wire
from outrider.server.fleet.fleet import Fleet
from outrider.server.fleet.supervisor import Process
from outrider.server.options import ServerOptions
from outrider.server.protocol import LARGEST_HEAD
from outrider.server.responses import CHARACTERS_PER_TOKEN

ASK = {"prompt": "a b a b", "max_tokens": 4, "temperature": 0}
INPUTS = {"inputs": "a b a b"}
KEY = {"authorization": "Bearer K"}
CONTEXT = 1024  # of `tiny`
LONE = "\ud800"


@pytest.fixture(scope="module")
def server(serve_all, tiny_folder, tiny_mute):
    options = ServerOptions(api_key="K", hosts=("127.0.0.1", "localhost"), max_models=2, timeout=60.0)
    server = serve_all(options)
    server.launch(tiny_folder, uid="tiny", pace=False)
    return server


@pytest.fixture(autouse=True)
def _goes_on(server):
    """The worker is the same process as before, and answers."""
    before = server.pid("tiny")
    yield
    answer = httpx.post(f"{server.url}/v1/completions", json=ASK, headers=KEY, timeout=60)
    assert (answer.status_code, server.pid("tiny")) == (200, before)
    assert server.get("/health").json()["status"] == "ok"


def post(server, path, body):
    content = json.dumps(body).encode()
    headers = {**KEY, "content-type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60)


def refused(server, path, body, status, reason):
    answer = post(server, path, body)
    assert (answer.status_code, len(answer.content) < 5000) == (status, True), answer.text[:300]
    assert reason in answer.text, answer.text[:300]


def ask(**more):
    return "/v1/completions", {**ASK, **more}


def speculate(method, **options):
    return ask(speculative={"method": method, **options})


def launch(**more):
    return "/v1/models", {"model_name": "smollm2-135m", "n_gpu": None, **more}


def generate(**parameters):
    return "/generate", {**INPUTS, "parameters": parameters}


# D1: what passed every check of access, by a name or a value that was read otherwise later
PLACES = [
    (*speculate("eagle", **{" head": "/etc"}), 400, "no option ' head'"),
    (*speculate("eagle", head="/etc"), 403, "--allow-folder"),
    (*speculate("eagle", **{"head ": "/etc"}), 400, "no option"),
    (*speculate("eagle", **{"\thead": "/etc"}), 400, "no option"),
    (*speculate("eagle", **{" allow_pickle": True}), 400, "no option"),
    (*speculate("eagle", allow_pickle=True), 403, "pickles are never opened"),
    (*speculate("eagle", allow_pickle="true"), 400, "true or false"),
    (*speculate("medusa", **{"quantize=none,head": "/etc"}), 400, "no option"),
    (*speculate("draft_model", **{" model": "/etc"}), 400, "no option"),
    (*speculate("draft_model", **{" model": "evil/repo"}), 400, "no option"),
    (*speculate("draft_model", model="evil/repo"), 403, "--allow-hub"),
    (*speculate("draft_model", model="smollm2-135m", tokenizer="/etc"), 403, "--allow-folder"),
    (*speculate("draft_model", model="x,tokenizer=/etc"), 403, "--allow-folder"),
    (*speculate("draft_model:model=/etc"), 400, "unknown drafter"),
    (*speculate("ngram", **{"length=5000,max_n": 3}), 400, "no option"),
    (*ask(speculative={" head": "/etc"}), 400, "no option"),
    (*launch(draft="eagle: head = /etc"), 403, "--allow-folder"),
    (*launch(draft="eagle:head=,head=/etc"), 400, "given twice"),
    (*launch(draft="eagle: allow_pickle = true"), 403, "pickles"),
    (*launch(draft="draft_model:model=evil/repo"), 403, "--allow-hub"),
    (*launch(model_path="/etc"), 403, "--allow-folder"),
    (*generate(adapter_id="/etc"), 403, "--allow-folder"),
    (*generate(adapter_id="evil/repo"), 403, "--allow-hub"),
]
# D2: numbers beyond every bound, as numbers and as text
NUMBERS = [
    (*speculate("ngram", max_n="1000000000"), 400, "a whole number"),
    (*speculate("ngram", max_n=1000000000), 400, "at most 256"),
    (*speculate("ngram", max_n=256), 400, "at most 16"),
    (*speculate("ngram", max_n=256, store="adaptive"), 400, "at most 16"),
    (*speculate("ngram", length="30000000"), 400, "a whole number"),
    (*speculate("ngram", length=30000000), 400, "at most 256"),
    (*speculate("ngram", length=10**400), 400, "at most 256"),
    (*speculate("eagle", tree=10**9), 400, "at most 256"),
    (*speculate("eagle", width=10**9), 400, "at most 256"),
    (*speculate("eagle", vocab=10**9), 400, "at most 1048576"),
    (*speculate("medusa", nodes=10**9), 400, "at most 256"),
    (*speculate("eagle", stop=1e300), 400, "at most 256"),
    (*ask(speculative={"length": 10**9}), 400, "at most 256"),
    (*ask(gamma=10**9), 400, "less than or equal to 64"),
    (*launch(draft="ngram:length=30000000"), 400, "at most 256"),
    (*launch(draft="ngram: max_n = 1000000000"), 400, "at most 256"),
]
# D3: temperatures and penalties that make a logit infinite
EXTREMES = [
    *((*ask(temperature=value), 400, "0 (greedy) or between") for value in (1e39, 1e308, 5e-324, 101)),
    *((*ask(repetition_penalty=value), 400, "repetition_penalty") for value in (1e-38, 0, 1e39, 101)),
    *((*ask(presence_penalty=value), 400, "presence_penalty") for value in (-1e39, 1e39, 101)),
    *((*ask(frequency_penalty=value), 400, "frequency_penalty") for value in (-1e38, 1e38, -101)),
    *((*ask(logit_bias={"5": value}), 400, "logit_bias") for value in (1e39, -1e39, 101)),
    *((*generate(temperature=value), 422, "0 (greedy) or between") for value in (1e39, 5e-324)),
    *((*generate(repetition_penalty=value), 422, "repetition_penalty") for value in (1e-38, 1e39)),
]
# D5: prompts that no context can hold
LONG = "ab" * (CHARACTERS_PER_TOKEN * CONTEXT)
PROMPTS = [
    (*ask(prompt=LONG), 400, "at most 32768 are read"),
    (*ask(prompt=["a", LONG]), 400, "at most 32768 are read"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400, "at most 32768 are read"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab" * CONTEXT}] * 32}, 400, "characters"),
    ("/generate", {"inputs": LONG}, 422, "at most 32768 are read"),
    ("/generate", {"inputs": LONG, "parameters": {"truncate": 5}}, 422, "at most 32768 are read"),
]
# D6: launches without measure
SIZES = [
    (*launch(threads=1024), 400, "threads"),
    (*launch(threads=-1), 400, "threads"),
    (*launch(cache_memory=100_000), 400, "cache_memory"),
    (*launch(cache_memory=1000), 400, "the machine has"),
    (*launch(cache_memory=-1), 400, "cache_memory"),
    (*launch(max_batch=10**12), 400, "max_batch"),
    (*launch(gpu_idx=[0] * 2000), 400, "gpu_idx"),
]
# D9 and lists and texts of any length, in every API
SAYS = {"role": "user", "content": "x"}
LONG_TEXT = "ab" * 2_000_000  # that no context of a tiny model holds
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": LONG_TEXT, "signature": ""}]}
LENGTHS = [
    (*ask(logit_bias={"9" * 5000: 1}), 400, "logit_bias maps token ids"),
    (*ask(logit_bias={str(id): 1 for id in range(2000)}), 400, "logit_bias"),
    (*ask(allowed_token_ids=[5] * 400_000), 400, "at most 16384"),
    (*ask(stop_token_ids=[5] * 2000), 400, "at most 1024"),
    (*ask(stop=["x"] * 100), 400, "stop"),
    (*ask(stop="x" * 2000), 400, "at most 1000"),
    (*ask(bad_words=["x"] * 300), 400, "at most 256"),
    (*ask(bad_words=["x" * 2000]), 400, "at most 1000"),
    (*ask(prompt=["x"] * 300), 400, "at most 256"),
    (*ask(model="x" * 3_900_000), 400, "at most 4096"),
    (*ask(model="x" * 4000), 404, "no model"),
    (*ask(user="x" * 20_000), 400, "not used, so leave it out"),
    (*ask(metadata={"x" * 20_000: 1}), 400, "not used, so leave it out"),
    (*ask(min_tokens=10**12), 400, "min_tokens"),
    (*ask(seed=2**63), 400, "seed"),
    (*ask(**{"x" * 100_000: 1}), 400, "unknown field"),
    (*speculate("x" * 1000), 400, "at most 256"),
    (*speculate("ngram", **{"x" * 100_000: 1}), 400, "no option"),
    (*speculate("ngram", **{f"x{i}": 1 for i in range(100)}), 400, "at most 32 options"),
    (*speculate("draft_model", model="x" * 100_000), 403, "--allow-folder"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 20_000}, 400, "at most 10000"),
    ("/v1/chat/completions", {"messages": [{"role": "x" * 300, "content": ""}]}, 400, "at most 256"),
    ("/v1/messages", {"max_tokens": 4, "system": LONG_TEXT, "messages": [SAYS]}, 400, "characters"),
    ("/v1/messages", {"max_tokens": 4, "messages": [SAYS, THOUGHT, SAYS]}, 400, "characters"),
    ("/v1/responses", {"max_output_tokens": 4, "instructions": LONG_TEXT, "input": "x"}, 400, "characters"),
    ("/v1/responses", {"max_output_tokens": 4, "input": LONG_TEXT}, 400, "characters"),
    (*generate(stop=["x"] * 100), 422, "at most 64"),
    (*generate(stop=["x" * 2000]), 422, "at most 1000"),
    (*generate(adapter_id="x" * 5000), 422, "at most 4096"),
    (*generate(adapter_source="x" * 100_000), 422, "adapter_source"),
    (*launch(model_name="x" * 5000), 400, "at most 4096"),
    (*launch(quantization="x" * 5000), 400, "at most 256"),
    (*launch(model_uid="x" * 5000), 400, "at most 128"),
    (*launch(draft="x" * 5000), 400, "at most 4096"),
    (*launch(model_size_in_billions="9" * 5000), 400, "model_size_in_billions"),
    (*launch(envs={"x" * 20_000: "y"}), 400, "envs"),
]
# D9: half of a surrogate pair, wherever a text can be
HALVES = [
    (*ask(prompt=LONE), 400, "surrogate"),
    (*ask(model=LONE), 400, "surrogate"),
    (*ask(stop=LONE), 400, "surrogate"),
    (*ask(bad_words=[LONE]), 400, "surrogate"),
    (*speculate(LONE), 400, "surrogate"),
    (*speculate("draft_model", model=LONE), 403, "--allow-folder"),
    (*speculate("ngram", **{LONE: 1}), 400, "unicode"),
    (*generate(adapter_id=LONE), 422, "surrogate"),
    (*generate(stop=[LONE]), 422, "surrogate"),
    ("/generate", {"inputs": LONE}, 422, "surrogate"),
    (*launch(quantization=LONE), 400, "surrogate"),
    (*launch(model_name=LONE), 400, "surrogate"),
    (*launch(model_uid=LONE), 400, "surrogate"),
    (*launch(draft=LONE), 400, "surrogate"),
]
# Messages that lack something; constraints that take long to compile, or fetch, or nest
DEEP = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
NAMED = {"name": "x", "schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4}
CONSTRAINTS = [
    (*ask(guided_regex="(" * 200), 400, "regex"),
    (*ask(guided_regex="x" * 200_000), 400, "at most 131,072"),
    (*ask(guided_choice=["x"] * 20_000), 400, "at most 10000"),
    (*ask(guided_choice=[f"x{number}" for number in range(9_000)]), 400, "choice cannot be used"),
    (*ask(guided_grammar="start: start start"), 400, "grammar"),
    (*ask(guided_json={"$ref": "http://127.0.0.1:9/schema.json"}), 400, "does not fetch resources"),
    (*ask(guided_json={"type": "object", "not": {}}), 400, "not"),
    (*ask(guided_json="{" * 1000), 400, "no JSON"),
    (*ask(guided_json={}, guided_regex="a"), 400, "more than once"),
    (*ask(response_format={"type": "json_schema", "json_schema": {"name": "x" * 300, "schema": {}}}), 400, "256"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0 has no content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages.0 has no content"),
    (
        *ask(response_format={"type": "json_schema", "json_schema": {**NAMED, "description": "x" * 20_000}}),
        400,
        "at most 16384",
    ),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 2000}, 400, "at most 1024"),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 2}, 400, "two tools are called 'f'"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "there are no tools"),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
        400,
        "nested deeper than 100",
    ),
]
GROUPS = {
    "places": PLACES,
    "numbers": NUMBERS,
    "extremes": EXTREMES,
    "prompts": PROMPTS,
    "sizes": SIZES,
    "lengths": LENGTHS,
    "halves": HALVES,
    "constraints": CONSTRAINTS,
}


# Fields whose texts have no length of their own in the schema, by what bounds them: a check of the field as a whole.
BOUNDED = {
    "the characters that a context holds": {"prompt", "inputs", "content", "text", "arguments", "description"}
    | {"reasoning_content", "system", "thinking", "instructions", "input", "output"},
    "the characters of a grammar": {"schema", "json", "regex", "choice", "grammar", "parameters", "input_schema"}
    | {f"guided_{name}" for name in ("json", "regex", "choice", "grammar")},
}


def unbounded(part, field, parts, seen=frozenset()):
    """The fields of a body's schema with a text or a list of any length."""
    name = part.get("$ref", "").rpartition("/")[2]
    if name in seen:
        return
    part, seen = parts.get(name, part), seen | ({name} - {""})
    fixed = {"maxLength", "maxItems", "maxProperties", "enum", "const", "pattern", "properties"} & part.keys()
    if part.get("type") in ("string", "array", "object") and not fixed:
        yield field
    inner = [(field, each) for kind in ("anyOf", "oneOf", "allOf") for each in part.get(kind, ())]
    inner += [(field, part[key]) for key in ("items", "additionalProperties") if isinstance(part.get(key), dict)]
    for key, each in (*inner, *part.get("properties", {}).items()):
        yield from unbounded(each, key, parts, seen)


def test_every_text_and_list_of_every_body_has_a_bound():
    described = create_app(Fleet(), ServerOptions()).openapi()
    found = set()
    for path, operations in described["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parts = described["components"]["schemas"]
                found |= {(path, field) for field in unbounded(content["schema"], "", parts)}
    known = set().union(*BOUNDED.values())
    assert {(path, field) for path, field in found if field not in known} == set()
    assert {"prompt", "guided_json"} <= {field for _, field in found}  # so much for the search itself


@pytest.mark.parametrize("group", GROUPS)
def test_each_is_refused_with_the_reason(server, group):
    for path, body, status, reason in GROUPS[group]:
        refused(server, path, body, status, reason)


def test_the_bounds_leave_room_for_what_clients_send(server):
    for more in (
        {"temperature": 2.0, "presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1.1},
        {"temperature": 1e-6, "logit_bias": {"5": -100, "6": 100}},
        {"allowed_token_ids": list(range(200)), "stop_token_ids": [7]},
        {"metadata": {f"key{i}": "x" * 512 for i in range(16)}, "user": "somebody"},
        {"speculative": {"method": "ngram", "length": 256, "max_n": 8}},
    ):
        answer = post(server, *ask(**more))
        assert answer.status_code == 200, answer.text


def test_what_is_nested_is_taken_or_refused_at_any_depth(server):
    """Where reading it ends and checking it still goes on depends on the depth of our own calls."""
    headers = {**KEY, "content-type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for depth in (*range(800, 1000, 7), 2000, 20_000):
            body = json.dumps({**ASK, "prompt": [], "user": 0}).replace("0}", "[" * depth + "]" * depth + "}")
            assert client.post("/v1/completions", content=body).status_code == 400


def test_a_seed_keeps_all_of_its_bits(server):
    """As a float, 2^53 and 2^53 + 1 are one number."""
    given = {"prompt": "a b c", "max_tokens": 32, "temperature": 2.0}
    texts = {seed: post(server, "/v1/completions", {**given, "seed": seed}).json() for seed in (2**53, 2**53 + 1)}
    assert texts[2**53]["choices"][0]["text"] != texts[2**53 + 1]["choices"][0]["text"]


@pytest.mark.parametrize("seed", [2**53 + 1, -(2**53) - 1, 2**63 - 1])
def test_a_seed_comes_through_bodies_and_wire_as_it_is(server, seed):
    body = CompletionBody.model_validate_json(json.dumps({**ASK, "seed": seed}))
    (asked,) = body.requests(Access(), "none")
    assert asked.params.seed == seed
    assert wire.request_from_json(json.loads(json.dumps(wire.request_to_json(asked)))).params.seed == seed
    if seed > 0:
        assert LoraxParameters(seed=seed, do_sample=True).params(seed, False).seed == seed


# The most that is taken of what D3 found, each of which made a NaN where a head drafts
AT_THE_BOUNDS = [
    *({"temperature": value} for value in (1e-37, 1e-30, 100.0)),
    *({"temperature": 1.0, "repetition_penalty": value} for value in (0.01, 100.0)),
    *({"temperature": 1.0, "presence_penalty": value, "frequency_penalty": value} for value in (-100.0, 100.0)),
    {"temperature": 100.0, "repetition_penalty": 100.0, "presence_penalty": -100.0, "logit_bias": {"5": 100}},
]


def test_extreme_numbers_beside_a_head_cost_nobody_the_answer(server, tiny_folder, tmp_path):
    """D3: with an EAGLE head, under both rules, while others ask."""
    target = load(str(tiny_folder), CPU).model
    heads.write(eagle_head(target), tmp_path / "head", target)
    server.launch(tiny_folder, f"eagle:head={tmp_path / 'head'}", uid="headed", pace=False)
    seeded = [{**more, **seed} for more in AT_THE_BOUNDS for seed in ({}, {"seed": 5})]
    asked = [{**ASK, "model": "headed", "max_tokens": 12, **more} for more in (*seeded, *[{"temperature": 0}] * 8)]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda body: post(server, "/v1/completions", body), asked))
    assert [answer.status_code for answer in answers] == [200] * len(asked), [answer.text for answer in answers]
    bystanders = [answer.json()["choices"][0]["text"] for answer in answers[-8:]]
    assert len(set(bystanders)) == 1
    assert server.get("/health").json()["status"] == "ok"
    server.call(server.fleet.terminate("headed"))


def test_many_samples_leave_others_their_turn(server):
    """D8: a small request is answered while all 64 samples of a large one still run or wait."""
    large = {"model": "tiny", "prompt": "Once", "n": 64, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=large, headers=KEY, timeout=60) as many:
        lines = many.iter_lines()  # kept: without it the stream would be closed
        next(lines)
        assert post(server, "/v1/completions", ASK).status_code == 200
        assert server.fleet._workers["tiny"]._samples == 64


TEMPLATES = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ '%1000000000s' % 'a' }}",
    "{{ lipsum(n=100000) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_takes_all_time_or_memory(server, tmp_path, template):
    """D11: it came with the model; a chat is refused, and everything else of the model works."""
    metadata = {**byte_metadata(), "tokenizer.chat_template": template}
    model = write_llama(tmp_path / "nasty.gguf", len(metadata["tokenizer.ggml.tokens"]), metadata)
    server.launch(model, uid="nasty")
    pid = server.pid("nasty")
    refused(server, "/v1/chat/completions", {**CHAT, "model": "nasty"}, 400, "the chat template refused the messages")
    assert post(server, "/v1/completions", {**ASK, "model": "nasty"}).status_code == 200
    assert server.pid("nasty") == pid
    server.call(server.fleet.terminate("nasty"))


WRONG_FILES = [
    ({"split.count": "two"}, "split.count"),
    ({"tokenizer.ggml.eos_token_id": "1"}, "eos_token_id"),
    ({"llama.context_length": 0}, "context_length"),
]


def test_files_with_wrong_metadata_are_refused_over_http(serve, tmp_path):
    """D10: one line that names the entry, no worker is left, and the next launch is answered."""
    server, known = serve(ServerOptions(folders=(tmp_path,))), byte_metadata()
    vocab = len(known["tokenizer.ggml.tokens"])
    for number, (changes, reason) in enumerate(WRONG_FILES):
        file = write_unchecked(tmp_path / f"{number}.gguf", {**llama_metadata(), **known, **changes}, vocab)
        answer = server.post("/v1/models", {"model_name": file.stem, "model_path": str(file), "n_gpu": None})
        assert (answer.status_code, "\n" in answer.json()["error"]["message"]) == (400, False), answer.text
        assert reason in answer.text
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    junk = server.post("/v1/models", {"model_name": "j", "model_path": str(tmp_path / "junk.gguf"), "n_gpu": None})
    assert junk.status_code == 400
    assert server.get("/health").json() == {"status": "ok", "models": {}}


class TestLaunches:
    def test_an_empty_uid_ends_nothing(self, server):
        for path in ("/v1/models/", "/v1/models"):
            assert httpx.delete(server.url + path, headers=KEY).status_code in (404, 405)

    def test_no_more_models_than_allowed(self, server, tiny_mute):
        assert server.launch(tiny_mute, uid="second")
        refused(server, *launch(), 409, "at most 2 may be (serve --max-models)")
        answer = httpx.delete(f"{server.url}/v1/models/second", headers=KEY)
        assert answer.status_code == 200

    def test_a_worker_killed_while_it_loads_is_no_fault_of_the_request(self, tiny_folder):
        async def killed():
            process = await Process.spawn("x", {"model": str(tiny_folder)})
            process.kill()
            try:
                await process.ready(60)
            finally:
                await process.close()

        with pytest.raises(Failed, match="ended while it loaded: killed by signal 9"):
            asyncio.run(killed())

    def test_where_requests_change_nothing(self, serve):
        closed = serve(ServerOptions(no_launch=True))
        for answer in (closed.post(*launch()), httpx.delete(f"{closed.url}/v1/models/tiny")):
            assert (answer.status_code, "serve --no-launch" in answer.text) == (403, True)


def connected(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_all(sock):
    found = b""
    try:
        while part := sock.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


class TestHeads:
    """D4: heads of requests (the line and the headers) that are too large or never end."""

    @pytest.mark.parametrize(
        "begin",
        [b"GET /health HTTP/1.1\r\nx: ", b"GET /", b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n"],
        ids=["header", "line", "headers"],
    )
    def test_endless_ones_are_cut_off(self, server, begin):
        with connected(server) as sock:
            sock.sendall(begin)
            sent = 0
            try:
                while sent < 64 * LARGEST_HEAD:
                    sent += sock.send(b"a: b\r\n" * 1000 if begin.endswith(b"\n") else b"x" * 6000)
            except OSError:
                pass
            assert sent < 64 * LARGEST_HEAD  # it does not read on

    def test_the_status_says_so(self, server):
        with connected(server) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * (LARGEST_HEAD + 1))
            assert read_all(sock).startswith(b"HTTP/1.1 431 ")

    def test_endless_trailers_are_cut_off(self, server):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer K\r\n"
        with connected(server) as sock:
            sock.sendall(head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
            sock.sendall(b"x: " + b"y" * 3 * LARGEST_HEAD)
            assert b"HTTP/1.1 431 " in read_all(sock)

    def test_large_bodies_and_many_requests_on_a_connection_are_none(self, server):
        with httpx.Client(base_url=server.url, headers={**KEY, "x-note": "y" * 30_000}) as client:
            for _ in range(4):
                assert client.get("/health").status_code == 200
                answer = client.post("/v1/completions", json={**ASK, "prompt": "a " * 100_000}, timeout=60)
                assert (answer.status_code, "characters" in answer.text) == (400, True)

    def test_one_that_never_ends_is_closed(self, server, monkeypatch):
        monkeypatch.setattr(protocol.BoundedHttp, "longest_head", 0.2)
        with connected(server) as silent, connected(server) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nhost: loc")
            assert read_all(slow) == read_all(silent) == b""


def test_a_body_that_does_not_come_is_not_waited_for(serve):
    server = serve(ServerOptions(timeout=0.3))
    with connected(server) as sock:
        sock.settimeout(10.0)  # far longer than 0.3 s
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come within 0.3 s" in answer


# Kinds of bodies that a browser lets any page send.
KINDS = ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data", ""]


class TestOtherSites:
    """What a page in the user's browser can send to us without being asked."""

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]:1", "0.0.0.0", "evillocalhost"],
    )
    def test_a_name_that_was_bound_to_our_address(self, server, host):
        for path in ("/health", "/v1/models", "/"):
            answer = server.get(path, headers={**KEY, "host": host})
            assert (answer.status_code, "Host header" in answer.text) == (421, True)

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "app.localhost", "localhost."])
    def test_our_own_names(self, server, host):
        assert server.get("/health", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/generate", "/"])
    def test_a_post_without_a_preflight_does_nothing(self, server, kind, path):
        """A browser sends these at once, and JSON only after it has asked; so nothing but JSON is read."""
        bodies = {"/generate": INPUTS, "/": INPUTS, "/v1/models": launch()[1]}
        headers = {**KEY, "origin": "https://evil.example", **({"content-type": kind} if kind else {})}
        before = server.get("/v1/models", headers=KEY).json()
        answer = httpx.post(server.url + path, content=json.dumps(bodies.get(path, ASK)), headers=headers)
        assert answer.status_code in (400, 415, 422), answer.text
        assert "access-control-allow-origin" not in answer.headers
        assert server.get("/v1/models", headers=KEY).json() == before


def test_health_can_be_asked_for_without_its_body(server):
    answer = httpx.head(f"{server.url}/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_clients_that_reset_their_connections_leave_nothing(server):
    def reset():
        with connected(server) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    threads = [threading.Thread(target=reset) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
