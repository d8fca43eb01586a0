"""Models that think: their reasoning comes apart from the answer, and a grammar holds the answer alone."""

import json
from types import SimpleNamespace

import foreign
import jsonschema
import openai
import pytest
import transformers
from dialects import ADD, MESSAGES, PARAMETERS, TEMPLATES, save_dialect, without_spaces
from grammars import greedily

from outrider.core.errors import OutriderError
from outrider.core.grammar import Grammar, Vocabulary
from outrider.core.grammar_spec import GrammarSpec
from outrider.server.tools.grammar import CallableTool, call_grammar
from outrider.server.tools.hermes import HERMES
from outrider.server.tools.reasoning import ReasoningParser, Thinking, describe_thinking

MAY = Thinking("<think>", "</think>", False, {})
DOES = Thinking("<think>", "</think>", True, {})
MARKS = ["<think>", "</think>"]
SPECIAL = ["[THINK]", "[/THINK]"]


TEXTS = {
    "thought and answer": (MAY, "<think>\nhm, 2 < 3 </th\n</think>\n\nyes\n", "hm, 2 < 3 </th", "yes\n"),
    "answer alone": (MAY, "<thin yes </think>", "", "<thin yes </think>"),
    "an answer that begins with line breaks": (MAY, "\n\n\nyes", "", "\n\n\nyes"),
    "nothing": (MAY, "", "", ""),
    "an empty thought": (MAY, "<think>\n\n</think>\n\n\n{}", "", "\n{}"),
    "cut off": (MAY, "<think>hm </thi", "hm </thi", ""),
    "begun by the prompt": (DOES, "hm</think>yes", "hm", "yes"),
    "begun and cut off": (DOES, "hm <think> ", "hm <think> ", ""),
    "a second mark is text": (DOES, "a</think>\nb</think>", "a", "b</think>"),
}


class TestParser:
    @pytest.mark.parametrize("case", TEXTS)
    def test_chunks_of_any_length_give_the_same(self, case):
        thinking, text, thought, answer = TEXTS[case]
        for size in range(1, len(text) + 2):
            parser, found = ReasoningParser(thinking), ["", ""]
            places = range(0, max(len(text), 1), size)
            for place in places:
                new = parser.feed(text[place : place + size], last=place == places[-1])
                found = [before + more for before, more in zip(found, new, strict=True)]
            assert found == [thought, answer], size


class TestDescribe:
    def told(self, template, special=()):
        tokens = {id: SimpleNamespace(content=text, special=True) for id, text in enumerate(special)}
        env = transformers.utils.chat_template_utils._compile_jinja_template(template)

        def apply(messages, **more):
            return env.render(messages=messages, **more)

        return describe_thinking(
            SimpleNamespace(chat_template=template, added_tokens_decoder=tokens, apply_chat_template=apply)
        )

    def test_which_templates_think(self):
        assert self.told(MESSAGES) is None
        assert describe_thinking(None) is None
        assert self.told(MESSAGES + "{# <think></think> #}") == vars(MAY)
        assert self.told(MESSAGES + "<think>\n{# </think> #}") == vars(DOES)
        assert self.told(MESSAGES + "<think>\n\n</think>\n\n") is None
        found = self.told(MESSAGES + "{# [THINK][/THINK] #}", SPECIAL)
        assert (found["special"], found["begun"]) == ({"[THINK]": 0, "[/THINK]": 1}, False)

    def test_a_template_that_fails_thinks_as_it_says(self):
        assert self.told("{{ nobody.at.all }}<think></think>") == vars(MAY)


WORDS = [
    *(bytes([byte]) for byte in range(32, 127)),
    b"\n",
    b"</think>",
    b"<think>",
    b'{"',
    b"\n\n",
    b"k>\n\n",
    b"<end>",
]
END = len(WORDS) - 1
ENCODE = greedily(WORDS[:-1])


def fits(rules, text):
    grammar = Grammar(GrammarSpec("grammar", "\n".join(rules)), Vocabulary(WORDS, [END], [END], ENCODE))
    ids = [*ENCODE(text), END]
    return grammar.matcher([END]).allowed(ids) == len(ids)


class TestGrammar:
    """What the answer alone may be, after any thought."""

    JSON = GrammarSpec("json_schema", json.dumps(ADD))
    GOOD = '{"a": true, "b": "red"}'

    def rules(self, thinking, spec):
        return [*thinking.answer(spec), *thinking.rules()]

    def test_it_starts_after_the_reasoning(self):
        may, does = self.rules(MAY, self.JSON), self.rules(DOES, self.JSON)
        for gap in ("", "\n", "\n\n"):
            assert fits(may, f"<think>{{ hm </think>{gap}{self.GOOD}")
            assert fits(does, f"{{ hm </think>{gap}{self.GOOD}")
        assert fits(may, self.GOOD)
        assert not fits(does, self.GOOD)
        for text in (
            "hm </think>" + self.GOOD,
            "<think>" + self.GOOD,
            "<think></think>red",
            "<think>a</think> </think>",
        ):
            assert not fits(may, text)

    @pytest.mark.parametrize(
        ("parameter", "text", "good", "bad"),
        [
            ("regex", "(?s:.*)x", "<thin x", "<think>x"),
            ("choice", '["red", "blue"]', "blue", "reds"),
            ("json_object", '{"type": "object"}', "{}", "[]"),
            ("grammar", 'start: "a" b\nb: /[0-9]+/', "a12", "12"),
        ],
    )
    def test_every_kind(self, parameter, text, good, bad):
        may = self.rules(MAY, GrammarSpec(parameter, text))
        for thought in ("", "<think>hm</think>\n\n"):
            assert fits(may, thought + good)
            assert not fits(may, thought + bad) or (thought and parameter == "regex")

    def test_calls_come_after_the_reasoning(self):
        tools = [CallableTool("tools.0", "add", ADD)]
        call = f'<tool_call>\n{{"name": "add", "arguments": {self.GOOD}}}\n</tool_call>'
        for required in (False, True):
            rules = call_grammar(HERMES, {}, tools, required, True, None, MAY).text.split("\n")
            assert fits(rules, f"<think>I could write <tool_call> here</think>\n\n{call}")
            assert fits(rules, call)
            assert not fits(rules, "<think>hm</think><tool_call>\n{}")
            for words in ("red", "<think>hm</think>\n\nred"):
                assert fits(rules, words) == (not required)

    def test_an_error_is_about_the_tool(self):
        tools = [CallableTool("tools.0", "add", ADD), CallableTool("tools.1", "f", {"type": "object", "not": {}})]
        made = call_grammar(HERMES, {}, tools, False, True, None, MAY)
        with pytest.raises(OutriderError) as found:
            fits(made.text.split("\n"), "")
        assert made.blamed(found.value).param == "tools.1"


KINDS = {
    "may": dict(template=TEMPLATES["hermes"] + "{# <think></think> #}", added=MARKS),
    "does": dict(template=TEMPLATES["hermes"] + "<think>\n{# </think> #}", added=MARKS),
    "special": dict(template=TEMPLATES["hermes"] + "[THINK]{# [/THINK] #}", special=SPECIAL),
}
ASK = [{"role": "user", "content": "the red fox"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD}}


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    return {name: save_dialect(tiny_folder, tmp_path_factory.mktemp(name), **kind) for name, kind in KINDS.items()}


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


@pytest.fixture
def asked(folders):
    """A bias lets the random model come to the end of its thoughts, and sometimes begin some."""

    def of(model, **more):
        vocabulary = transformers.AutoTokenizer.from_pretrained(folders[model]).get_vocab()
        marks = {str(vocabulary[text]): 8.0 for text in (*MARKS, *SPECIAL) if text in vocabulary}
        bias = {**without_spaces(folders[model]), **marks}
        return dict(model=model, messages=ASK, temperature=1.0, seed=2, max_tokens=400, logit_bias=bias) | more

    return of


def streamed(client, **asked):
    """Put together by hand: (reasoning, words, calls, finish)."""
    parts, calls, finish = {"reasoning_content": "", "content": ""}, [], None
    for chunk in client.chat.completions.create(stream=True, **asked):
        [choice] = chunk.choices
        for name in parts:
            parts[name] += getattr(choice.delta, name, None) or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                calls.append((call.function.name, ""))
            calls[call.index] = calls[call.index][0], calls[call.index][1] + call.function.arguments
        finish = choice.finish_reason or finish
    return parts["reasoning_content"], parts["content"], calls, finish


def whole(client, **asked):
    [answer] = client.chat.completions.create(**asked).choices
    message = answer.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.reasoning_content or "", message.content or "", calls, answer.finish_reason


@pytest.mark.parametrize("model", KINDS)
def test_the_answer_is_held_to_the_schema_and_the_reasoning_is_free(client, asked, model):
    thought = 0
    for seed in range(6):
        given = asked(model, seed=seed, response_format=FORM)
        reasoning, content, _, finish = found = whole(client, **given)
        assert streamed(client, **given) == found
        if finish == "stop":
            jsonschema.validate(json.loads(content), ADD)
            thought += bool(reasoning)
        assert not any(mark in reasoning + content for mark in (*MARKS[1:], *SPECIAL[1:]))
    assert thought > 0


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kind", ["schema", "tools"])
def test_no_answer_depends_on_the_drafter(client, asked, model, kind):
    more = {"response_format": FORM} if kind == "schema" else {"tools": TOOLS, "tool_choice": "required"}
    more["extra_body"] = {"speculative": {"method": "none"}}
    given = asked(model, parallel_tool_calls=False, **more) if kind == "tools" else asked(model, **more)
    plain = whole(client, **given)
    assert plain[3] == ("stop" if kind == "schema" else "tool_calls")
    for extra in ({"speculative": {"method": "ngram", "min_n": 1}}, {"speculative": {"method": "grammar"}}):
        assert whole(client, **{**given, "extra_body": extra}) == plain
        assert streamed(client, **{**given, "extra_body": extra}) == plain


@pytest.mark.parametrize("model", KINDS)
def test_reasoning_may_end_inside_a_draft(client, asked, model):
    """The prediction is the whole text, both sides of the mark; a random model rarely writes the tokens of its text."""
    inside = 0
    for seed in range(8):
        given = asked(model, seed=seed, response_format=FORM, extra_body={"speculative": {"method": "none"}})
        plain = written(client, given)
        text = "".join(token["text"] for token in plain[:-1])
        extra = {"prediction": {"type": "content", "content": text}, "speculative": {"method": "prediction"}}
        drafted = written(client, {**given, "extra_body": extra})
        assert [token["id"] for token in drafted] == [token["id"] for token in plain]
        assert whole(client, **{**given, "extra_body": extra}) == whole(client, **given)
        ends = [place for place, token in enumerate(drafted) if token["text"] in (MARKS[1], SPECIAL[1])]
        inside += sum(0 < drafted[end]["depth"] < drafted[end + 1]["depth"] for end in ends if end + 1 < len(drafted))
    assert inside > 0


def written(client, given):
    """Every token."""
    extra = {**given["extra_body"], "outrider": {"tokens": True}}
    chunks = client.chat.completions.create(stream=True, **{**given, "extra_body": extra})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return [token for choice in choices for token in getattr(choice, "outrider", {"tokens": []})["tokens"]]


def test_words_without_a_grammar_are_split_too(client, asked):
    found = whole(client, **asked("does", max_tokens=60))
    assert found[0]
    assert streamed(client, **asked("does", max_tokens=60)) == found
    free = client.completions.create(model="does", prompt="the red fox", max_tokens=4)
    assert isinstance(free.choices[0].text, str)


def test_a_schema_that_cannot_be_used_names_its_field(client, asked):
    for schema, reason in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "http://x/y"}, "http://x/y"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=reason) as found:
            client.chat.completions.create(**asked("may", response_format=form))
        assert found.value.param == "response_format"
        assert str(found.value.body["message"]).startswith("json_schema cannot be used: ")


def test_reasoning_goes_back_in(client, asked):
    """The template gets it under its own name; this one writes it out."""
    answer = {"role": "assistant", "content": "a"}
    turns = [*ASK, answer, *ASK]
    plain = client.chat.completions.create(**asked("may", messages=turns, max_tokens=1))
    answer["reasoning_content"] = "I think"
    with_it = client.chat.completions.create(**asked("may", messages=turns, max_tokens=1))
    assert with_it.usage.prompt_tokens > plain.usage.prompt_tokens


def test_the_other_apis_have_it_as_their_own_blocks(served, client, asked):
    given = asked("does", response_format=FORM)
    reasoning, content, _, _ = whole(client, **given)
    extra = {"logit_bias": given["logit_bias"], "seed": 2, "temperature": 1.0}
    form = {"format": {"type": "json_schema", "name": "x", "schema": ADD}}
    asking = dict(model="does", input="the red fox", text=form, max_output_tokens=400, extra_body=extra)
    answer = client.responses.create(**asking)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert (answer.output[0].content[0].text, answer.output_text) == (reasoning, content)
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    events = list(client.responses.create(stream=True, **asking))
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == reasoning
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]

    anthropic = foreign.anthropic()
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        config = {"format": {"type": "json_schema", "schema": ADD}}
        said = dict(model="does", messages=ASK, max_tokens=400, output_config=config, extra_body=extra)
        blocks = other.messages.create(**said).content
        assert [(block.type) for block in blocks] == ["thinking", "text"]
        assert (blocks[0].thinking, blocks[1].text) == (reasoning, content)
        with other.messages.stream(**said) as stream:
            last = stream.get_final_message().content
        assert (last[0], last[1].text) == (blocks[0], content)
        turn = [*ASK, {"role": "assistant", "content": blocks}, *ASK]
        assert other.messages.create(**{**said, "messages": turn}).usage.output_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="thinking cannot be disabled"):
            other.messages.create(thinking={"type": "disabled"}, **said)


def test_a_call_after_reasoning(client, asked):
    given = asked("does", tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    reasoning, content, calls, finish = whole(client, **given)
    assert (finish, bool(reasoning), content) == ("tool_calls", True, "")
    [(name, arguments)] = calls
    jsonschema.validate(json.loads(arguments), PARAMETERS[name])
