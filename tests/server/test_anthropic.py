"""Anthropic's Messages API: the real anthropic client, whole and streamed, with schemas and tools."""

import json

import foreign
import httpx
import jsonschema
import pytest
from dialects import ADD, PARAMETERS, without_spaces

from outrider.server.options import ServerOptions

anthropic = foreign.anthropic()
TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": ADD},
    {"name": "now", "input_schema": PARAMETERS["now"]},
]
ASK = [{"role": "user", "content": "the red fox"}]


@pytest.fixture
def client(hermes):
    """Its key comes in the header x-api-key."""
    with anthropic.Anthropic(base_url=hermes.url, api_key="K", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def given(hermes_folder):
    extra = {"logit_bias": without_spaces(hermes_folder), "seed": 3, "temperature": 1.0}
    return dict(model="hermes", messages=ASK, max_tokens=300, extra_body=extra)


def as_chat(hermes, given, **more):
    """What OpenAI's API answers to the same."""
    body = {**given["extra_body"], "model": "hermes", **more}
    answer = httpx.post(
        f"{hermes.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer K"}, timeout=60
    )
    return answer.json()


def test_text_is_what_openais_api_writes(hermes, client, given):
    asked = {**given, "max_tokens": 24}
    answer = client.messages.create(system="be brief", **asked)
    chat = as_chat(hermes, given, messages=[{"role": "system", "content": "be brief"}, *ASK], max_tokens=24)
    [block] = answer.content
    assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "hermes")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == chat["usage"]["completion_tokens"]
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    assert answer.stop_reason == reasons[chat["choices"][0]["finish_reason"]]
    blocks = [
        {"type": "text", "text": "be "},
        {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
    ]
    asked["messages"] = [{"role": "user", "content": [{"type": "text", "text": "the red fox"}]}]
    assert client.messages.create(system=blocks, **asked).content == answer.content


def test_a_stream_is_the_same(client, given):
    asked = {**given, "max_tokens": 24}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    total = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == total
    events = list(client.messages.create(stream=True, **asked))
    assert (events[0].message.usage.input_tokens, events[0].message.usage.output_tokens) == (total, 0)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_named(client, given):
    free = client.messages.create(**{**given, "max_tokens": 40}).content[0].text
    stop = free[10:13]
    answer = client.messages.create(stop_sequences=["zzzzz", stop], **{**given, "max_tokens": 40})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == free[: free.index(stop)]
    with client.messages.stream(stop_sequences=["zzzzz", stop], **{**given, "max_tokens": 40}) as stream:
        last = stream.get_final_message()
    assert (last.stop_sequence, last.content[0].text) == (stop, answer.content[0].text)


def test_a_schema_holds_the_text(client, given):
    form = {"format": {"type": "json_schema", "schema": ADD}}
    answer = client.messages.create(output_config=form, **given)
    assert answer.stop_reason == "end_turn"
    jsonschema.validate(json.loads(answer.content[0].text), ADD)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_loop_of_three_turns(hermes, client, given, stream):
    """The content of each answer and the results go back in, and OpenAI's API makes the same prompt of them."""
    messages, chat = list(ASK), list(ASK)
    for turn in range(3):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        asked = {**given, "messages": messages, "tools": TOOLS, "tool_choice": choice}
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
        assert answer.stop_reason == "tool_use"
        [call] = answer.content
        jsonschema.validate(call.input, PARAMETERS[call.name])
        messages.append({"role": "assistant", "content": answer.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"result {turn}", "is_error": turn == 1}
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "and now?"}]})
        function = {"name": call.name, "arguments": json.dumps(call.input)}
        chat.append({"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]})
        said = "Error: result 1" if turn == 1 else f"result {turn}"
        chat.append({"role": "tool", "tool_call_id": "x", "content": said})
        chat.append({"role": "user", "content": "and now?"})
    last = client.messages.create(**{**given, "messages": messages, "max_tokens": 4})
    same = as_chat(hermes, given, messages=chat, max_tokens=4)
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == same["usage"]["prompt_tokens"]


def test_calls_are_streamed_as_they_come(client, given):
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    asked = {**given, "tools": TOOLS, "tool_choice": choice}
    whole = client.messages.create(**asked)
    events = list(client.messages.create(stream=True, **asked))
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert json.loads("".join(pieces)) == whole.content[0].input
    assert len(pieces) > 1
    assert (events[1].content_block.name, events[1].content_block.input) == ("add", {})
    assert events[-2].delta.stop_reason == "tool_use"


def test_under_none_the_tools_are_hidden(client, given):
    asked = {**given, "max_tokens": 8}
    hidden = client.messages.create(tools=TOOLS, tool_choice={"type": "none"}, **asked)
    assert hidden.content == client.messages.create(**asked).content


def test_a_limit_that_cuts_off_a_call_says_so(client, given):
    asked = {**given, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 50}
    answer = client.messages.create(**asked)
    assert (answer.stop_reason, answer.content[-1].type) == ("max_tokens", "tool_use")


def test_drafting_is_chosen_as_everywhere(client, given):
    answers = []
    for method in ("none", "ngram", "grammar"):
        extra = {**given["extra_body"], "speculative": {"method": method}}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        answers.append(client.messages.create(tools=TOOLS, tool_choice=choice, **{**given, "extra_body": extra}))
    assert len({json.dumps(answer.content[0].input) + answer.content[0].name for answer in answers}) == 1
    assert answers[-1].metrics["accepted"] > 0


RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "3"}
USE = {"type": "tool_use", "id": "x", "name": "f", "input": {}}


def said(role, *blocks):
    return {"messages": [*ASK, {"role": role, "content": list(blocks)}]}


REFUSED = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "an answer that is begun": ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "end with a message"),
    "a field that is none": ({"temprature": 1}, "unknown field 'temprature'"),
    "a container": ({"container": "x"}, "unknown field 'container'"),
    "a budget of thoughts": ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
    "effort": ({"output_config": {"effort": "high"}}, "output_config.effort"),
    "a picture": (said("user", {"type": "image", "source": {}}), "messages.1.content"),
    "a tool of theirs": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    "a tool without a name": ({"tools": [{"input_schema": ADD}]}, "tools.0.name"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    "a schema": ({"tools": [{"name": "f", "input_schema": {"type": "object", "not": {}}}]}, "tools.0.input_schema"),
    "a schema of the text": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
        "uniqueItems",
    ),
    "a choice of nobody": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "no tool is called so"),
    "a choice without a name": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "has a name"),
    "a choice of nothing": ({"tool_choice": {"type": "any"}}, "there are no tools"),
    "a result of no call": (said("user", RESULT), "messages.1 is the result of a tool, but no message"),
    "a result of the assistant's": (
        {"messages": [*ASK, {"role": "assistant", "content": [RESULT]}, *ASK]},
        "messages.1.content.0",
    ),
    "a call of the user's": (said("user", USE), "messages.1.content.0"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences.0"),
    "a drafter that is none": ({"speculative": {"method": "nobody"}}, "nobody"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(hermes, case):
    extra, reason = REFUSED[case]
    body = {"model": "hermes", "messages": ASK, "max_tokens": 4, **extra}
    answer = httpx.post(f"{hermes.url}/v1/messages", json=body, headers={"x-api-key": "K"}, timeout=60)
    assert answer.status_code == 400, answer.text[:300]
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert reason in told["error"]["message"], told["error"]["message"]


def test_errors_are_the_clients_own(hermes, client, given):
    with pytest.raises(anthropic.NotFoundError, match="nobody") as found:
        client.messages.create(**{**given, "model": "nobody"})
    assert found.value.body["error"]["type"] == "not_found_error"
    with (
        anthropic.Anthropic(base_url=hermes.url, api_key="X", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(**given)
    with pytest.raises(anthropic.APIStatusError, match="characters") as large:
        client.messages.create(**{**given, "messages": [{"role": "user", "content": "x" * 300_000}]})
    assert large.value.status_code == 400


def test_an_error_in_a_stream_is_raised(serve, hermes_folder, given):
    server = serve(ServerOptions(timeout=1.0))
    server.launch(hermes_folder, uid="hermes")
    extra = {**given["extra_body"], "ignore_eos": True}
    with anthropic.Anthropic(base_url=server.url, api_key="K", max_retries=0) as client:
        asked = {**given, "max_tokens": 7000, "extra_body": extra}
        with (
            client.messages.stream(**asked) as stream,
            pytest.raises(anthropic.APIStatusError, match="longer than 1 s"),
        ):
            stream.get_final_message()
