"""OpenAI's Responses API: the real openai client, whole and streamed, with schemas and tools."""

import json

import httpx
import jsonschema
import openai
import pytest
from dialects import ADD, PARAMETERS, without_spaces
from pydantic import BaseModel

from outrider.server.options import ServerOptions

TOOLS = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True},
    {"type": "function", "name": "now", "parameters": PARAMETERS["now"], "strict": False},
]
CHAT_TOOLS = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]


@pytest.fixture
def client(hermes):
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="K", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def given(hermes_folder):
    """What the client does not know goes into extra_body, as everywhere."""
    extra = {"logit_bias": without_spaces(hermes_folder), "seed": 3}
    return dict(model="hermes", input="the red fox", temperature=1.0, max_output_tokens=300, extra_body=extra)


def as_chat(client, **more):
    """What the chat API answers to the same."""
    return client.chat.completions.create(model="hermes", temperature=1.0, seed=3, **more)


def test_text_is_what_the_chat_api_writes(client, given):
    asked = {**given, "max_output_tokens": 24}
    answer = client.responses.create(instructions="be brief", **asked)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the red fox"}]
    chat = as_chat(client, messages=messages, max_tokens=24, logit_bias=given["extra_body"]["logit_bias"])
    [item] = answer.output
    assert answer.output_text == chat.choices[0].message.content != ""
    assert (item.type, item.role, item.content[0].type) == ("message", "assistant", "output_text")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    if chat.choices[0].finish_reason == "length":
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.metrics["tokens"] == 24


def test_a_stream_is_the_same(client, given):
    """Every event with its number; each item begins, grows and ends once."""
    asked = {**given, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage


def test_parse_gives_the_model(client, given):
    class Fox(BaseModel):
        quick: bool
        name: str

    extra = {**given["extra_body"], "repetition_penalty": 1.2}
    answer = client.responses.parse(text_format=Fox, **{**given, "extra_body": extra})
    if answer.status == "completed":
        assert isinstance(answer.output_parsed, Fox)
    else:  # a random model may not come to the end of a text
        assert answer.output_text.startswith('{"quick":')


def test_a_schema_holds_the_text(client, given):
    form = {"format": {"type": "json_schema", "name": "x", "schema": ADD, "strict": True}}
    answer = client.responses.create(text=form, **given)
    assert answer.status == "completed"
    jsonschema.validate(json.loads(answer.output_text), ADD)
    with client.responses.stream(text=form, **given) as stream:
        assert stream.get_final_response().output_text == answer.output_text
    other = client.responses.create(text={"format": {"type": "json_object"}}, **given)
    assert other.status == "incomplete" or isinstance(json.loads(other.output_text), dict)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_loop_of_three_turns(client, given, stream):
    """The items of each answer and the results go back in, and the same conversation in the chat API has the same
    prompt."""
    conversation = [{"role": "user", "content": "the red fox"}]
    chat = [{"role": "user", "content": "the red fox"}]
    for turn in range(3):
        asked = {**given, "input": conversation, "tools": TOOLS, "tool_choice": "required"}
        asked["parallel_tool_calls"] = False
        if stream:
            with client.responses.stream(**asked) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**asked)
        assert answer.status == "completed"
        [call] = answer.output
        jsonschema.validate(json.loads(call.arguments), PARAMETERS[call.name])
        conversation += answer.output
        conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": f"result {turn}"})
        function = {"name": call.name, "arguments": call.arguments}
        chat.append({"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]})
        chat.append({"role": "tool", "tool_call_id": "x", "content": f"result {turn}"})
    last = client.responses.create(**{**given, "input": conversation, "tools": TOOLS, "max_output_tokens": 4})
    same = as_chat(client, messages=chat, tools=CHAT_TOOLS, max_tokens=4)
    assert last.usage.input_tokens == same.usage.prompt_tokens


def test_calls_are_streamed_as_they_come(client, given):
    named = {"type": "function", "name": "add"}
    asked = {**given, "tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False}
    whole = client.responses.create(**asked)
    for _ in range(5):  # a server that falls behind, as on a busy machine, sends what waits as one
        events = list(client.responses.create(stream=True, **asked))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        if len(deltas) > 1:
            break
    assert len(deltas) > 1
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == whole.output[0].arguments == events[-1].response.output[0].arguments
    added = next(event for event in events if event.type == "response.output_item.added")
    assert (added.item.name, added.item.arguments, added.item.status) == ("add", "", "in_progress")


def test_a_limit_that_cuts_off_a_call_says_so(client, given):
    asked = {**given, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 50}
    answer = client.responses.create(**asked)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[-1].status == "incomplete"


def test_drafting_is_chosen_as_everywhere(client, given):
    texts = set()
    for method in ("none", "ngram", "grammar"):
        extra = {**given["extra_body"], "speculative": {"method": method}}
        form = {"format": {"type": "json_schema", "name": "x", "schema": ADD}}
        answer = client.responses.create(**{**given, "text": form, "extra_body": extra})
        texts.add(answer.output_text)
        assert (answer.metrics["drafted"] > 0) == (method == "grammar") or method == "ngram"
    assert len(texts) == 1


REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "nothing is kept"),
    "background": ({"background": True}, "background", "nothing is kept"),
    "reasoning": ({"reasoning": {"effort": "high"}}, "reasoning", "no such setting"),
    "truncation": ({"truncation": "auto"}, "truncation", "too long"),
    "include": ({"include": ["message.output_text.logprobs"]}, "include", "nothing more"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity", "no such setting"),
    "a field that is none": ({"temprature": 1}, "temprature", "unknown field"),
    "stream_options": ({"stream_options": {"include_obfuscation": True}}, "stream_options", "for streams"),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array", "uniqueItems": True}}}},
        "text.format",
        "uniqueItems",
    ),
    "the parameters of a tool": (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "not": {}}}]},
        "tools.0.parameters",
        '"not"',
    ),
    "another kind of tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    "a tool without a name": ({"tools": [{"type": "function", "parameters": ADD}]}, "tools.0.name", "required"),
    "a choice of nobody": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
        "no tool is called so",
    ),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0",
        "input_text",
    ),
    "another kind of item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "item_reference"),
    "no input": ({"input": []}, "input", "at least 1"),
    "a result of nothing": (
        {"input": ["hi", {"type": "function_call_output", "call_id": "x", "output": "3"}]},
        "input",
        "",
    ),
    "a result of no call": (
        {
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call_output", "call_id": "x", "output": "3"},
            ],
        },
        "input.1.call_id",
        "input.1 is the result of a tool, but no message before it has a call with the id 'x'",
    ),
    "arguments that are none": (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "x", "name": "f", "arguments": "["},
            ]
        },
        "input.1.arguments",
        "must be a JSON object",
    ),
    "a drafter that is none": ({"speculative": {"method": "nobody"}}, "", "nobody"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(hermes, case):
    extra, param, reason = REFUSED[case]
    body = {"model": "hermes", "input": "hi", "max_output_tokens": 4, **extra}
    answer = httpx.post(f"{hermes.url}/v1/responses", json=body, headers={"authorization": "Bearer K"}, timeout=60)
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert reason in error["message"], error["message"]
    assert (error["param"] or "").startswith(param), error


def test_errors_are_the_clients_own(hermes, client, given):
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.responses.create(**{**given, "model": "nobody"})
    with (
        openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="X", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.responses.create(**given)


def test_an_error_in_a_stream_is_raised(serve, hermes_folder, given):
    server = serve(ServerOptions(timeout=1.0))
    server.launch(hermes_folder, uid="hermes")
    extra = {**given["extra_body"], "ignore_eos": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="K", max_retries=0) as client:
        asked = {**given, "max_output_tokens": 7000, "extra_body": extra}
        with client.responses.stream(**asked) as stream, pytest.raises(openai.APIError, match="longer than 1 s"):
            stream.get_final_response()
