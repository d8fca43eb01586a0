"""Tools over HTTP: the real openai client, whole and streamed, on models of every format."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest
import transformers
from dialects import ADD, PARAMETERS, TEMPLATES, save_dialect, without_spaces

from outrider import LLM, SamplingParams

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = [{"role": "user", "content": "the red fox"}]
FORMATS = ["generic", *TEMPLATES]


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    """The tiny model with a longer context and templates of other families; Mistral's trigger is a special token."""
    special = {"mistral": ["[TOOL_CALLS]"]}
    return {
        name: save_dialect(tiny_folder, tmp_path_factory.mktemp(name), TEMPLATES.get(name), special.get(name, ()))
        for name in FORMATS
    }


@pytest.fixture(scope="module")
def served(serve_all, folders):
    server = serve_all()
    for name, folder in folders.items():
        server.launch(folder, uid=name, pace=False)
    return server


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def given(tiny_folder):
    bias = without_spaces(tiny_folder)
    return dict(messages=ASK, tools=TOOLS, temperature=0, max_tokens=300, logit_bias=bias)


def checked(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        assert (call.type, bool(call.id)) == ("function", True)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("model", FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["any", "add"])
def test_a_call_that_is_required_comes_and_fits(client, given, model, choice):
    asked = dict(model=model, tool_choice=choice, parallel_tool_calls=False, **given)
    [answer] = client.chat.completions.create(**asked).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = checked(answer.message.tool_calls)
    assert choice == "required" or call[0] == "add"
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        last = stream.get_final_completion().choices[0]
    assert last.finish_reason == "tool_calls"
    assert checked(last.message.tool_calls) == [call]
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(pieces) == call[1]


@pytest.mark.parametrize("model", FORMATS)
def test_no_answer_depends_on_the_drafter(client, given, model):
    """Greedy and with a seed; whole, and streamed with the chunks that drafts make."""
    for more in ({}, {"temperature": 1.0, "seed": 3}):
        found = set()
        for method in ("none", "ngram", "grammar"):
            extra = {"speculative": {"method": method}}
            asked = {**given, "model": model, "tool_choice": "required", "max_tokens": 120, "extra_body": extra, **more}
            [answer] = client.chat.completions.create(**asked).choices
            calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
            found.add((answer.finish_reason, tuple(calls)))
            assert streamed(client, **asked) == (answer.message.content or "", calls, answer.finish_reason)
        assert len(found) == 1


def streamed(client, **asked):
    """Put together by hand: names come once and first, ids with them."""
    words, calls, finish = "", [], None
    for chunk in client.chat.completions.create(stream=True, **asked):
        [choice] = chunk.choices
        words += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert (call.index, bool(call.id), call.type) == (len(calls), True, "function")
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + call.function.arguments
        finish = choice.finish_reason or finish
    return words, calls, finish


@pytest.mark.parametrize("model", FORMATS)
def test_under_auto_the_model_may_speak(client, given, model, served):
    """And says what it would say if any text were allowed."""
    asked = {**given, "model": model, "temperature": 1.0, "max_tokens": 30}
    for seed in range(4):
        [answer] = client.chat.completions.create(seed=seed, **asked).choices
        assert answer.message.content
        assert answer.message.tool_calls is None
        assert answer.finish_reason in ("stop", "length")
        assert streamed(client, seed=seed, **asked) == (answer.message.content, [], answer.finish_reason)


@pytest.mark.parametrize("model", FORMATS)
def test_under_auto_a_call_that_begins_is_held_to_the_schema(client, given, model, folders):
    """A bias begins the call: on the trigger's own token, or on each of its characters in turn by a stop before it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[model])
    trigger = {"mistral": "[TOOL_CALLS]", "llama": '{"name": "'}.get(model, "<tool_call>")
    ids = tokenizer.encode(trigger, add_special_tokens=False)
    bias = {**given["logit_bias"], **{str(id): 60.0 for id in ids}}
    asked = {**given, "model": model, "logit_bias": bias, "temperature": 1.0, "max_tokens": 300}
    if model != "mistral":  # random text of these letters rarely has them in this order; it is words then
        [answer] = client.chat.completions.create(seed=1, **asked).choices
        checked(answer.message.tool_calls or ())
        return
    [answer] = client.chat.completions.create(seed=1, parallel_tool_calls=False, **asked).choices
    assert answer.finish_reason == "tool_calls"
    assert len(checked(answer.message.tool_calls)) == 1


def test_streams_of_all_kinds_side_by_side(served, client, given):
    """32 at once, of tools, schemas and plain words: each is what it is alone."""
    plain = {name: value for name, value in given.items() if name != "tools"} | {"max_tokens": 24}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "blue"]}}}
    kinds = [
        {**given, "tool_choice": "required", "parallel_tool_calls": False},
        {**given, "max_tokens": 24},
        {**plain, "response_format": form},
        plain,
    ]
    asked = [
        {**kinds[number % 4], "model": FORMATS[number // 4 % 4], "temperature": 1.0, "seed": number}
        for number in range(32)
    ]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda each: streamed(client, **each), asked))
    assert together == [streamed(client, **each) for each in asked]
    assert [finish for _, _, finish in together[::4]] == ["tool_calls"] * 8


def test_none_hides_the_tools(client, given):
    plain = {name: value for name, value in given.items() if name != "tools"}
    alone = client.chat.completions.create(model="hermes", **plain)
    none = client.chat.completions.create(model="hermes", tool_choice="none", **given)
    assert none.choices[0].message == alone.choices[0].message
    assert none.usage.prompt_tokens == alone.usage.prompt_tokens


@pytest.mark.parametrize("model", FORMATS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_loop_of_three_turns(client, given, model, stream):
    """The calls of each answer and their results go back in; the prompt grows by them."""
    messages, before = list(ASK), 0
    for turn in range(3):
        asked = {**given, "model": model, "messages": messages, "tool_choice": "required", "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(stream_options={"include_usage": True}, **asked) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message
        [call] = message.tool_calls
        checked([call])
        assert answer.usage.prompt_tokens > before
        before = answer.usage.prompt_tokens
        messages.append(message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"})
    last = client.chat.completions.create(**{**given, "model": model, "messages": messages, "max_tokens": 4})
    assert last.usage.prompt_tokens > before


def test_the_template_gets_tools_calls_and_results(served, folders):
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": True, "b": "red"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}
    with LLM(str(folders["hermes"]), draft="none", threads=1, cache_memory=0.1) as llm:
        messages = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages.append({"role": "tool", "content": "3", "tool_call_id": "x"})
        text = llm.tokenizer.decode(llm.backend.render(messages, [tool]))
        assert json.dumps([tool]) in text
        assert "CALL add ['a', 'b']" in text
        assert "<|im_start|>tool\n3<|im_end|>" in text
        said = [{**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}]
        messages[1]["tool_calls"] = said
        body = {"model": "hermes", "messages": messages, "tools": TOOLS[:1], "max_tokens": 1, "temperature": 0}
        asked = served.post("/v1/chat/completions", body).json()
        plain = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, messages[2]]
        assert asked["usage"]["prompt_tokens"] == len(llm.backend.render(plain, [tool]))


def test_an_answer_may_have_a_schema_beside_the_tools(client, given):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "blue"]}}}
    [answer] = client.chat.completions.create(model="hermes", response_format=form, **given).choices
    if answer.finish_reason == "tool_calls":
        checked(answer.message.tool_calls)
    else:
        assert json.loads(answer.message.content) in ("red", "blue")


def test_a_limit_that_cuts_off_a_call_says_so(client, given):
    [answer] = client.chat.completions.create(
        model="generic", tool_choice={"type": "function", "function": {"name": "add"}}, **{**given, "max_tokens": 50}
    ).choices
    assert answer.finish_reason == "length"
    [call] = answer.message.tool_calls
    assert call.function.name == "add"
    assert '{"a":true,"b":"red"}'.startswith(re.sub(r"\s", "", call.function.arguments)[:5])


def test_a_stop_string_in_a_call_is_no_call(client, given):
    add = {"type": "function", "function": {"name": "add"}}
    [answer] = client.chat.completions.create(model="hermes", tool_choice=add, stop=['"b"'], **given).choices
    assert answer.finish_reason == "stop"
    assert [call.function.name for call in answer.message.tool_calls] == ["add"]
    assert '"b"' not in answer.message.tool_calls[0].function.arguments


def test_several_choices_and_log_probabilities(client, given):
    asked = dict(model="hermes", n=3, logprobs=True, tool_choice="required", parallel_tool_calls=False)
    answer = client.chat.completions.create(**{**given, "temperature": 1.0, "seed": 2}, **asked)
    assert len(answer.choices) == 3
    for choice in answer.choices:
        checked(choice.message.tool_calls)
        assert choice.logprobs.content


def function(**more):
    return {"tools": [{"type": "function", "function": {"name": "f", **more}}]}


CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
DEEP = {"type": "object", "properties": {}}
for _ in range(120):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


def said(*messages):
    return {"messages": [*ASK, *messages]}


def called(**function):
    return said({"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]})


REFUSED = {
    "without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
    "without a function": ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    "a name that is none": (function(name="a b"), "tools.0.function.name", "match"),
    "an empty name": (function(name=""), "tools.0.function.name", "match"),
    "another kind": ({"tools": [{"type": "browser"}]}, "tools.0.type", "'function'"),
    "twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.function.name", "two tools are called 'add'"),
    "too many": ({"tools": [TOOLS[0]] * 2000}, "tools", "at most 1024"),
    "a keyword": (function(parameters={"type": "object", "not": {}}), "tools.0.function.parameters", '"not"'),
    "a second one": (
        {"tools": [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": {"if": {}}}}]},
        "tools.1.function.parameters",
        'the parameters of the tool g cannot be used: Unimplemented keys: ["if"]',
    ),
    "no object": (function(parameters={"type": "array"}), "tools.0.function.parameters", "of the type object"),
    "a remote reference": (function(parameters={"$ref": "http://127.0.0.1:1/x"}), "tools.0", "127.0.0.1"),
    "deep": (function(parameters=DEEP), "tools.0.function.parameters", "deeper than 100 levels"),
    "long": (function(description="x" * 300_000), None, "characters"),
    "a choice that is none": ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "tool_choice"),
    "a choice of nobody": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "no tool is called so",
    ),
    "a choice of nothing": ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "tools is the newer name"),
    "two grammars": ({"tools": TOOLS, "guided_grammar": "start: /a/"}, "guided_grammar", "two grammars"),
    "a schema beside": (
        {"tools": TOOLS, "guided_json": {"type": "array", "uniqueItems": True}},
        "guided_json",
        "uniqueItems",
    ),
    "a result of nothing": (
        said({"role": "tool", "content": "3", "tool_call_id": "x"}),
        "messages.1.tool_call_id",
        "no message before it has a call with the id 'x'",
    ),
    "a result of another call": (
        said({"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3", "tool_call_id": "y"}),
        "messages.2.tool_call_id",
        "no message before it has a call with the id 'y'",
    ),
    "a result without an id": (said({"role": "tool", "content": "3"}), "messages.1", "no tool_call_id"),
    "arguments that are no JSON": (called(arguments="{"), "messages.1.tool_calls.0.function.arguments", "JSON object"),
    "arguments that are no object": (called(arguments="[]"), "messages.1.tool_calls.0", "JSON object"),
    "deep arguments": (called(arguments='{"a":' * 500 + "1" + "}" * 500), "messages.1.tool_calls.0", "levels"),
    "deepest arguments": (called(arguments="[" * 10**5), "messages.1.tool_calls.0", "JSON object"),
    "a call without a name": (
        said({"role": "assistant", "tool_calls": [{"id": "x", "function": {}}]}),
        "messages.1.tool_calls.0.function.name",
        "required",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(served, case):
    more, param, reason = REFUSED[case]
    for model in ("generic", "hermes"):
        body = {"model": model, "messages": ASK, "max_tokens": 4, "temperature": 0, **more}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text[:300]
        assert reason in error["message"], error["message"]
        assert param is None or error["param"].startswith(param), error
        served.post("/v1/chat/completions", {"model": model, "messages": ASK, "max_tokens": 1}).raise_for_status()


def test_the_library_shows_special_tokens_that_are_asked_for(folders):
    from outrider.core.request import Request

    with LLM(str(folders["mistral"]), draft="none", threads=1, cache_memory=0.1) as llm:
        [id] = llm.tokenizer.encode("[TOOL_CALLS]", add_special_tokens=False)
        rules = f'start: "the " <[{id}]> "sea" <[{id}]>'
        params = SamplingParams(grammar=rules, max_tokens=20)
        for stream in (False, True):
            for visible, text in (((), "the sea"), ((id,), "the [TOOL_CALLS]sea[TOOL_CALLS]")):
                answer = llm.backend.submit(Request("the", params=params, stream=stream, visible=visible))
                chunks = "".join(chunk.text for chunk in answer)
                assert (answer.result().text, chunks) == (text, text if stream else "")
