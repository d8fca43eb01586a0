"""Formats of tool calls: their grammars and parsers, on the templates of real models, without a server."""

import itertools
import json

import pytest

from outrider.core.errors import OutriderError
from outrider.core.grammar import Grammar, Vocabulary
from outrider.core.grammar_spec import GrammarSpec, grammar_spec
from outrider.models.chat_template import ChatTemplate
from outrider.server import tools
from outrider.server.tools.generic import GENERIC
from outrider.server.tools.grammar import CallableTool, call_grammar
from outrider.server.tools.hermes import HERMES
from outrider.server.tools.llama import LLAMA
from outrider.server.tools.mistral import MISTRAL
from outrider.server.tools.parser import CallParser

END, TRIGGER = 256, 257
WORDS = [*(bytes([byte]) for byte in range(256)), b"<end>", b"[TOOL_CALLS]"]
VOCABULARY = Vocabulary(WORDS, [END, TRIGGER], [END], lambda text: list(text.encode()))
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [CallableTool("tools.0", "add", ADD), CallableTool("tools.1", "add_all", {"type": "object"})]
A, B = {"a": 1, "b": '}]"\\ {é'}, {"x": [{"y": "\\\\"}], "z": "</tool_call>"}
ONE, TWO = json.dumps(A, ensure_ascii=False), json.dumps(B)
HERMES_ONE = f'<tool_call>\n{{"name": "add", "arguments": {ONE}}}\n</tool_call>'
HERMES_TWO = f'<tool_call>\n{{"name": "add_all", "arguments": {TWO}}}\n</tool_call>'
LLAMA_ONE = f'{{"name": "add", "parameters": {ONE}}}'
ITEMS = [f'{{"name": "add", "arguments": {ONE}}}', f'{{"name": "add_all", "arguments": {TWO}}}']
BOTH = [("add", A), ("add_all", B)]
# format, is the trigger a special token, the answer, its words, its calls
ANSWERS = [
    (HERMES, False, HERMES_ONE, "", BOTH[:1]),
    (HERMES, False, f"Let me <see>.\n{HERMES_ONE}\n{HERMES_TWO}", "Let me <see>.", BOTH),
    (HERMES, False, "a <tool, or <tool_cal", "a <tool, or <tool_cal", []),
    (HERMES, False, "  words \n", "  words \n", []),
    (GENERIC, False, f"é {HERMES_TWO}", "é", BOTH[1:]),
    (LLAMA, False, LLAMA_ONE, "", BOTH[:1]),
    (LLAMA, False, '{"name": 3} is JSON', '{"name": 3} is JSON', []),
    (LLAMA, False, f"Such as {LLAMA_ONE}", f"Such as {LLAMA_ONE}", []),
    (MISTRAL, True, f"[TOOL_CALLS][{ITEMS[0]}]", "", BOTH[:1]),
    (MISTRAL, True, f"Well [TOOL_CALLS] [{', '.join(ITEMS)}]", "Well", BOTH),
    (MISTRAL, False, f"[TOOL_CALLS] [{ITEMS[1]}]", "", BOTH[1:]),
    (MISTRAL, True, "[TOOLS] are words", "[TOOLS] are words", []),
]


def grammar(format, special=False, required=False, several=True, answer=None, of=TOOLS):
    return call_grammar(format, {format.trigger: TRIGGER} if special else {}, of, required, several, answer)


def matcher(*args, **more):
    return Grammar(GrammarSpec("grammar", grammar(*args, **more).text), VOCABULARY).matcher([END])


def ids(text, special):
    parts = text.split("[TOOL_CALLS]") if special else [text]
    return list(itertools.chain(*((TRIGGER, *part.encode()) for part in parts)))[1:]


def accepts(state, text, special=False):
    """Whether all of it may be written, and the answer may end there."""
    written = ids(text, special)
    return state.allowed([*written, END]) == len(written) + 1


def parsed(format, chunks, only_first=None):
    parser = CallParser(format, format.only_first if only_first is None else only_first)
    words, calls = "", {}
    for at, chunk in enumerate(chunks, 1):
        said, deltas = parser.feed(chunk, last=at == len(chunks))
        words += said
        for delta in deltas:
            name, arguments = calls.get(delta.index, ("", ""))
            assert not (name and delta.name)
            calls[delta.index] = name + delta.name, arguments + delta.arguments
    return words, [calls[index] for index in range(parser.calls)]


@pytest.mark.parametrize(("format", "special", "text", "words", "calls"), ANSWERS)
class TestAnswers:
    def test_the_grammar_allows_it(self, format, special, text, words, calls):
        assert accepts(matcher(format, special), text, special)
        assert accepts(matcher(format, special, several=False), text, special) is (len(calls) < 2)
        needed = accepts(matcher(format, special, required=True), text, special)
        assert needed is (bool(calls) and not words)

    def test_the_parser_reads_it_in_chunks_of_any_size(self, format, special, text, words, calls):
        for size in (1, 2, 3, 5, 7, 11, 10_000):
            chunks = [text[at : at + size] for at in range(0, len(text), size)]
            said, found = parsed(format, chunks)
            assert (said, [(name, json.loads(arguments)) for name, arguments in found]) == (words, calls)

    def test_whatever_cuts_it_off_is_read_as_far_as_it_goes(self, format, special, text, words, calls):
        for end in range(len(text)):
            said, found = parsed(format, [text[:end]])
            if words and not calls:
                assert said == text[:end]
            whole = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
            for (name, arguments), (full_name, full) in zip(found, whole, strict=False):
                assert name == full_name
                assert full.startswith(arguments) or json.dumps(json.loads(full)).startswith(arguments)


@pytest.mark.parametrize("format", [HERMES, LLAMA, MISTRAL])
def test_what_begins_as_a_call_is_held_to_the_schema(format):
    text = next(text for each, _, text, _, calls in ANSWERS if each is format and len(calls) == 1)
    state = matcher(format)
    for wrong in (
        text.replace('"add"', '"sub"').replace('"add_all"', '"sub"'),
        text.replace('{"a": 1', '{"a": "1"').replace('{"x"', '["x"'),
        text.replace("arguments", "argument").replace("parameters", "parameter"),
        text + " and",
    ):
        assert wrong != text
        assert not accepts(state, wrong)


def test_where_a_call_is_the_whole_answer_one_after_words_is_text():
    """Also where a chunk begins with it."""
    call = next(text for each, _, text, _, calls in ANSWERS if each is LLAMA and calls)
    assert parsed(LLAMA, [call], only_first=True)[1]
    assert parsed(LLAMA, ["Like this: ", call], only_first=True) == ("Like this: " + call, [])


def test_an_answer_in_words_may_have_a_schema_of_its_own():
    answer = grammar_spec({"enum": ["red", "<tool_call>"]}, False, None, None, None)
    state = matcher(HERMES, answer=answer)
    assert accepts(state, HERMES_ONE)
    assert accepts(state, '"red"')
    assert not accepts(state, "red")
    assert parsed(HERMES, ['"<tool', '_call>"'], only_first=True) == ('"<tool_call>"', [])
    assert parsed(HERMES, [HERMES_ONE], only_first=True)[1][0][0] == "add"


def test_an_error_names_the_tool():
    bad = CallableTool("tools.1.function.parameters", "bad", {"type": "object", "not": {}})
    made = grammar(HERMES, of=[TOOLS[0], bad])
    with pytest.raises(OutriderError) as caught:
        Grammar(GrammarSpec("grammar", made.text), VOCABULARY)
    named = made.blamed(caught.value)
    assert str(named) == 'the parameters of the tool bad cannot be used: Unimplemented keys: ["not"]'
    assert named.param == "tools.1.function.parameters"
    assert made.blamed(other := OutriderError("the prompt is empty")) is other


# The part of each template that tells it apart, as its model has it.
TOLD = "{% if tools %}{{ tools|tojson }}"
TEMPLATES = {
    "hermes": TOLD + r'{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}" }}{% endif %}',
    "llama": TOLD + """{{- 'the format {"name": function name, "parameters": dictionary}' }} ipython{% endif %}""",
    "mistral": TOLD + '{% endif %}{% for m in messages if m.tool_calls %}{{- "[TOOL_CALLS] [" }}{% endfor %}',
    "generic": "{% for message in messages %}<|im_start|>{{ message['role'] }}{% endfor %}",
}
OTHERS = {
    "other tags inside": TOLD + "<tool_call>\n<function=example_function_name>\n<parameter=one>{% endif %}",
    "no JSON inside": TOLD + "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>{% endif %}",
    "a name and arguments": TOLD + "[TOOL_CALLS]name[ARGS]{}{% endif %}",
    "tools under another name": TEMPLATES["hermes"].replace("tools", "xml_tools"),
    "it raises": "{{ raise_exception('no') }}" + TEMPLATES["hermes"],
    "none": "",
}


class FakeTokenizer:
    def __init__(self, template, special=()):
        self.chat_template = template
        self.added_tokens_decoder = {id: FakeToken(text) for id, text in special}

    def apply_chat_template(self, messages, tokenize, **variables):
        source = self.chat_template
        return ChatTemplate(source["tool_use"] if isinstance(source, dict) else source).render(messages, variables)


class FakeToken:
    special = True

    def __init__(self, content):
        self.content = content


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_the_format(name):
    said = tools.describe(FakeTokenizer(TEMPLATES[name], [(5, "[TOOL_CALLS]"), (6, "<s>")]))
    assert said == {"format": name, "special": {"[TOOL_CALLS]": 5} if name == "mistral" else {}, "thinking": None}
    assert tools.of(json.loads(json.dumps(said))).format.name == name


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_of_another_form_gets_the_generic_one(name):
    assert tools.describe(FakeTokenizer(OTHERS[name]))["format"] == "generic"
    assert tools.describe(None)["format"] == "generic"


def test_the_template_for_tools_is_the_one_that_counts():
    several = {"default": TEMPLATES["generic"], "tool_use": TEMPLATES["hermes"]}
    assert tools.describe(FakeTokenizer(several))["format"] == "hermes"


def test_where_the_template_knows_no_tools_they_are_told_in_words():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": A}}
    tool = {"type": "function", "function": {"name": "add", "parameters": ADD}}
    asked = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "user", "content": "!"},
    ]
    system, first, called, results, last = GENERIC.messages(asked, [tool])
    assert system["role"] == "system"
    assert json.dumps(tool) in system["content"]
    assert (first, last) == (asked[0], asked[4])
    assert called == {"role": "assistant", "content": f"Well.\n{HERMES_ONE}\n{HERMES_ONE}"}
    assert results["role"] == "user"
    assert results["content"] == "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    told = GENERIC.messages([{"role": "system", "content": "Be kind."}, *asked], [tool])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "user"]
    assert told[0]["content"].startswith("Be kind.\n\n# Tools")
    assert GENERIC.messages(asked[:1], []) == asked[:1]


def test_every_format_has_ids_of_its_own():
    assert {len(MISTRAL.new_id()) for _ in range(20)} == {9}
    assert len({HERMES.new_id() for _ in range(100)}) == 100
