"""Schemas and conversations that are meant to hurt, to every API: each gets its 4xx, and the worker goes on."""

import json

import httpx
import pytest

WORDS = [{"role": "user", "content": "the red fox"}]
KEY = {"x-api-key": "K", "content-type": "application/json"}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
PLACE = "SCHEMA"  # stands for a schema, whose text json.dumps may not be able to write


def body(api, where):
    """A request with a schema for its answer, or for the arguments of a tool."""
    base = {
        "chat": {"messages": WORDS, "max_tokens": 30},
        "responses": {"input": "the red fox", "max_output_tokens": 30},
        "messages": {"messages": WORDS, "max_tokens": 30},
    }[api]
    if where == "tool":
        tool = {
            "chat": {"type": "function", "function": {"name": "f", "parameters": PLACE}},
            "responses": {"type": "function", "name": "f", "parameters": PLACE},
            "messages": {"name": "f", "input_schema": PLACE},
        }[api]
        return {**base, "tools": [tool]}
    return (
        base
        | {
            "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PLACE}}},
            "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": PLACE}}},
            "messages": {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}},
        }[api]
    )


@pytest.fixture(autouse=True)
def _goes_on(hermes):
    before = hermes.pid("hermes")
    yield
    answer = httpx.post(f"{hermes.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=KEY, timeout=30)
    assert (answer.status_code, hermes.pid("hermes")) == (200, before)


def ask(hermes, api, where, schema):
    text = json.dumps({"model": "hermes", "temperature": 0, **body(api, where)}).replace(f'"{PLACE}"', schema)
    return httpx.post(hermes.url + PATHS[api], content=text, headers=KEY, timeout=60)


def reason(answer):
    return answer.json()["error"]["message"]


def wrapped(schema):
    """As a property, for arguments are objects."""
    return f'{{"type": "object", "properties": {{"p": {schema}}}, "required": ["p"], "additionalProperties": false}}'


def deep(levels):
    return '{"type": "object", "properties": {"a":' * levels + "{}" + "}}" * levels


REFUSED = {
    "ten megabytes": ('{"enum": ["%s"]}' % ("x" * 10_000_000), 413, "bytes"),
    "too long": ('{"enum": ["%s"]}' % ("x" * 200_000), 400, "characters"),
    "depth 10,000": (deep(10_000), 400, ""),
    "depth 2,000": (deep(2_000), 400, ""),
    "a remote reference": ('{"$ref": "http://127.0.0.1:1/never.json"}', 400, "127.0.0.1"),
    "a reference to nothing": ('{"$ref": "#/$defs/nobody"}', 400, "nobody"),
    "a keyword that is not expressed": ('{"type": "array", "uniqueItems": true}', 400, "uniqueItems"),
    "a format that is not known": ('{"type": "string", "format": "nonsense"}', 400, "nonsense"),
}


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("where", ["answer", "tool"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(hermes, api, where, case):
    schema, status, says = REFUSED[case]
    answer = ask(hermes, api, where, wrapped(schema))
    assert answer.status_code == status, answer.text[:300]
    assert says in reason(answer), reason(answer)[:300]
    if api == "messages":
        kind = {400: "invalid_request_error", 413: "request_too_large"}[status]
        assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("where", ["answer", "tool"])
def test_unknown_keywords_say_nothing(hermes, api, where):
    schema = wrapped('{"enum": ["red"], "x-mine": {"a": 1}, "deprecated": true, "$comment": "?"}')
    assert ask(hermes, api, where, schema).status_code == 200


@pytest.mark.parametrize("api", PATHS)
def test_references_in_a_circle_have_no_text(hermes, api):
    """Found when the grammar is made, or when the text comes to it."""
    for schema in ('{"$ref": "#"}', wrapped('{"$ref": "#/properties/p"}')):
        answer = ask(hermes, api, "answer", schema)
        assert answer.status_code == 400
        assert "cannot" in reason(answer)
        assert "OutriderError" not in reason(answer)


@pytest.mark.parametrize("api", PATHS)
def test_a_recursive_schema_that_the_limit_cuts_off_says_so(hermes, api):
    """Every link wants the next: no text of it ever ends."""
    link = '{"type": "object", "properties": {"n": {"$ref": "#"}, "v": {"const": "red fox"}}, "required": ["v"]}'
    answer = ask(hermes, api, "answer", link.replace('"required": ["v"]', '"required": ["v", "w"]'))
    assert answer.status_code == 200
    told = answer.json()
    found = {
        "chat": lambda: told["choices"][0]["finish_reason"],
        "responses": lambda: told["incomplete_details"]["reason"],
        "messages": lambda: told["stop_reason"],
    }[api]()
    assert found == {"chat": "length", "responses": "max_output_tokens", "messages": "max_tokens"}[api]


@pytest.mark.parametrize("pattern", [".*a.{25}b.{25}", "(x+x+)+y", "(.{0,60}a){60}", "(((a{999}){999}){999}){999}"])
@pytest.mark.parametrize("api", PATHS)
def test_an_expression_of_many_states_holds_nobody_up(hermes, api, pattern):
    """It may run or be refused."""
    schema = json.dumps({"type": "string", "pattern": f"^{pattern}$"})
    assert ask(hermes, api, "answer", schema).status_code in (200, 400)


ARGUMENTS = '{"a":' * 10_000 + "1" + "}" * 10_000


def test_arguments_of_earlier_calls_may_be_anything(hermes):
    """As text, or as JSON of any depth."""
    use = {"type": "tool_use", "id": "x", "name": "f", "input": PLACE}
    turns = [*WORDS, {"role": "assistant", "content": [use]}, *WORDS]
    text = json.dumps({"model": "hermes", "messages": turns, "max_tokens": 4}).replace(f'"{PLACE}"', ARGUMENTS)
    answer = httpx.post(f"{hermes.url}/v1/messages", content=text, headers=KEY, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    shallow = json.dumps({"model": "hermes", "messages": turns, "max_tokens": 4})
    for levels, status in ((20, 200), (300, 400)):
        given = shallow.replace(f'"{PLACE}"', '{"a":' * levels + "1" + "}" * levels)
        answer = httpx.post(f"{hermes.url}/v1/messages", content=given, headers=KEY, timeout=60)
        assert answer.status_code == status, answer.text[:300]
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": ARGUMENTS}
    asked = {"model": "hermes", "input": [*WORDS, call], "max_output_tokens": 4}
    answer = httpx.post(f"{hermes.url}/v1/responses", json=asked, headers=KEY, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1.arguments")
