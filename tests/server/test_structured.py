"""Structured output over HTTP: the real openai client, vLLM's and LoRAX's fields, and grammars that cannot be."""

import json
import re
from enum import Enum
from itertools import product

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

ASK = [{"role": "user", "content": "the red fox and the blue fox"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "name": {"type": "string", "maxLength": 12},
        "wild": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["colour", "age", "name", "wild"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "fox", "schema": SCHEMA, "strict": True}}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Fox(BaseModel):
    colour: Colour
    tails: list[bool]


@pytest.fixture(scope="module")
def on():
    """What vLLM does with grammars is in tests/backends/test_vllm_real.py."""
    return "local"


@pytest.fixture
def client(face):
    with openai.OpenAI(base_url=f"{face.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def given(library):
    """A random model would write spaces without end between the parts of JSON."""
    spaces = {str(token): -100.0 for text, token in library.tokenizer.get_vocab().items() if set(text) <= set("ĠĊčĉ")}
    return dict(model="tiny", temperature=0, max_tokens=200, logit_bias=spaces)


def valid(text, schema=SCHEMA):
    jsonschema.validate(json.loads(text), schema)
    return text


def test_the_client_parses_what_a_pydantic_model_says(client, given):
    answer = client.beta.chat.completions.parse(messages=ASK, response_format=Fox, **given)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Fox)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_no_text_depends_on_the_drafter(client, given, more):
    """Whole and streamed, by three drafters."""
    texts = set()
    for method, stream in product(("none", "ngram", "grammar"), (False, True)):
        asked = {**given, **more, "response_format": FORMAT, "extra_body": {"speculative": {"method": method}}}
        answer = client.chat.completions.create(messages=ASK, stream=stream, **asked)
        chunks = [chunk.choices[0].delta.content or "" for chunk in answer] if stream else []
        texts.add("".join(chunks) or answer.choices[0].message.content)
    [text] = texts
    valid(text)


def test_the_drafter_grammar_drafts_over_http(client, given):
    extra = {"speculative": {"method": "grammar"}}
    answer = client.chat.completions.create(messages=ASK, response_format=FORMAT, extra_body=extra, **given)
    assert answer.metrics["by_drafter"]["grammar"]["accepted"] > 0
    assert answer.metrics["steps"] < answer.usage.completion_tokens


RULES = 'start: "[" pair ("," pair)? "]"\npair: /[ab]/ "=" /[0-9]/'
PAIRS = r"\[[ab]=\d(,[ab]=\d)?\]"
WAYS = {
    "any object": ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    "an object of a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    "guided_json": ({"guided_json": SCHEMA}, SCHEMA),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    "guided_regex": ({"guided_regex": "(ab|cd){2}"}, "(ab|cd){2}"),
    "guided_choice": ({"guided_choice": ["red", "the sea"]}, "red|the sea"),
    "guided_grammar": ({"guided_grammar": RULES}, PAIRS),
    "json": ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    "json_object": ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    "regex": ({"structured_outputs": {"regex": "(ab|cd){2}"}}, "(ab|cd){2}"),
    "no json_object": ({"structured_outputs": {"json_object": False, "regex": "(ab|cd){2}"}}, "(ab|cd){2}"),
    "choice": ({"structured_outputs": {"choice": ["red", "the sea"]}}, "red|the sea"),
    "grammar": ({"structured_outputs": {"grammar": RULES}}, PAIRS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["chat", "completions"])
def test_every_way_to_say_it(face, given, way, path):
    extra, wanted = WAYS[way]
    body = {"messages": ASK} if path == "chat" else {"prompt": "the red fox"}
    path = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    answer = face.post(path, {**given, **body, **extra}).json()
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    if choice["finish_reason"] == "length":  # of any object, a random model may write without end
        assert wanted == {"type": "object"}
        return
    assert choice["finish_reason"] == "stop"
    if isinstance(wanted, dict):
        valid(text, wanted)
    else:
        assert re.fullmatch(wanted, text)


def test_a_limit_that_cuts_it_off_says_so(client, given):
    answer = client.chat.completions.create(messages=ASK, response_format=FORMAT, **{**given, "max_tokens": 3})
    assert answer.choices[0].finish_reason == "length"


def test_lorax_has_the_same(face):
    for kind in ("json_object", "json_schema"):
        asked = {"response_format": {"type": kind, "schema": {"enum": ["red", "blue"]}}, "max_new_tokens": 20}
        answer = face.post("/generate", {"inputs": "the", "parameters": asked})
        assert json.loads(answer.json()["generated_text"]) in ("red", "blue")


def nested(depth):
    schema = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def formed(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


REMOTE = {"$ref": "http://127.0.0.1:1/never.json"}
REFUSED = {
    "a keyword that is not expressed": (formed({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "another": (formed({"not": {"type": "string"}}), "not"),
    "in its depths": (formed({"type": "object", "properties": {"a": {"if": {"type": "null"}}}}), '"if"'),
    "a remote reference": (formed(REMOTE), "http://127.0.0.1:1/never.json"),
    "a remote reference inside": (formed({"type": "array", "items": REMOTE}), "127.0.0.1"),
    "a reference to nothing": (formed({"$ref": "#/$defs/nobody"}), "nobody"),
    "a reference to itself": (formed({"$ref": "#"}), "json_schema cannot be used"),
    "no text at all": (formed({"type": "integer", "minimum": 3, "maximum": 1}), "json_schema cannot be used"),
    "a type that is none": (formed({"type": "person"}), "person"),
    "too long": (formed({"enum": ["x" * 140_000]}), "at most 131,072"),
    "an expression that is none": ({"guided_regex": "(a"}, "regex cannot be used"),
    "an expression that looks behind": ({"guided_regex": "(?<=a)b"}, "regex cannot be used"),
    "rules that are none": ({"guided_grammar": "start: nobody"}, "nobody"),
    "no rules": ({"guided_grammar": ""}, "not empty"),
    "an empty choice": ({"guided_choice": []}, "choice"),
    "text that is no schema": ({"guided_json": "{"}, "no JSON"),
    "two at once": ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex"),
    "two of vLLM's": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "leave all out but one"),
    "a format that is none": ({"response_format": {"type": "xml"}}, "response_format"),
    "a schema without a name": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "name"),
    "a name without a schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
    "with ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "contradict"),
    "spaces by a pattern": ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "whitespace_pattern"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(face, given, case):
    extra, reason = REFUSED[case]
    for path, body in (("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "the"})):
        answer = face.post(path, {**given, **body, **extra})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text[:300]
        assert reason in error["message"], error["message"]
        assert (error["param"] or "").split(".")[0] in {*extra, "guided_regex"} or case == "with ignore_eos"
    assert face.post("/v1/completions", {**given, "prompt": "the", "max_tokens": 1}).status_code == 200


def test_lorax_says_so_in_its_own_shape(face):
    asked = {"response_format": {"type": "json_object", "schema": {"type": "array", "uniqueItems": True}}}
    answer = face.post("/generate", {"inputs": "the", "parameters": asked})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert "uniqueItems" in answer.json()["error"]


def test_a_schema_that_refers_to_itself_is_fine(client, given):
    tree = {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(messages=ASK, **{**given, "max_tokens": 900}, extra_body=formed(tree))
    if answer.choices[0].finish_reason == "stop":
        valid(answer.choices[0].message.content, tree)
    assert answer.choices[0].message.content.startswith('{"value":')


def test_unknown_keywords_say_nothing(client, given):
    schema = {"enum": ["red"], "title": "Fox", "x-mine": {"a": 1}, "deprecated": True, "$comment": "?"}
    answer = client.chat.completions.create(messages=ASK, extra_body=formed(schema), **given)
    assert answer.choices[0].message.content == '"red"'


@pytest.mark.parametrize("depth", [100, 300, 500, 950, 2000, 10_000])
def test_any_depth_is_taken_or_refused(face, depth):
    """json.dumps would not write the deepest."""
    inner = '{"type":"array","items":' * depth + "{}" + "}" * depth
    body = '{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"guided_json":' + inner + "}"
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{face.url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200 if depth <= 100 else answer.status_code in (200, 400), answer.text[:300]


def test_ten_megabytes_are_not_read(face):
    answer = face.post("/v1/chat/completions", {"messages": ASK, **formed({"enum": ["x" * 10_000_000]})})
    assert answer.status_code == 413


EXPLODING = [".*a.{25}b.{25}", "(x+x+)+y", "(.{0,60}a){60}", "(((a{1000}){1000}){1000}){1000}"]


@pytest.mark.parametrize("pattern", EXPLODING)
def test_an_expression_of_many_states_holds_nobody_up(face, given, pattern):
    """It may run or be refused; the next request is answered."""
    asked = {**given, "prompt": "the", "guided_regex": pattern, "max_tokens": 40, "temperature": 1.5, "seed": 1}
    assert face.post("/v1/completions", asked).status_code in (200, 400)
    assert face.post("/v1/completions", {**given, "prompt": "the", "max_tokens": 1}).status_code == 200
