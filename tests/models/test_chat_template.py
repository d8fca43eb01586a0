"""Chat templates are written as transformers writes them, and cannot leave their cage."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from jinja2.exceptions import SecurityError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outrider.core.errors import OutriderError
from outrider.models import chat_template, template_sandbox
from outrider.models.tokenizer import GGUFTokenizer, from_folder

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # and no pad_token

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message goes first, whether there is one or not. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role in ["tool", "ipython"] %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
QWEN = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role != 'system' %}
    {{- turn('system', 'You are a helpful assistant.') }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content, thought = message.content, '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- turn('assistant', '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n')) }}
        {%- else %}
            {{- turn('assistant', content) }}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate\\nuser/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "blocks and lines": """\
  {% for m in messages %}
    {# a comment #}
  {{ m.role }}:
    {% if m.content %}
  {{ m.content }}
    {% endif %}

  {% endfor %}
end

""",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}|{{ loop.index }}\n"
    "{% endgeneration %}{{ x is defined }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}"
    "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}{{ messages }}",
    "what is defined": "{% for x in [bos_token, eos_token, unk_token, pad_token, tools, documents, missing] %}"
    "{{ x is defined }} {{ x is none }} {{ x }};{% endfor %}{{ add_generation_prompt }}",
    "dict and namespace": "{% set ns = namespace({'a': 1}, b=2, self=3) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}"
    "{{ ns.self }}{{ dict(x=1, y=[2]) }}{{ dict([('k', 'v')]).k }}{{ dict.fromkeys(['p', 'q'], 0) }}",
    "filters": "{{ messages | map(attribute='content') | map('string') | join(', ') | upper | replace('<', '&lt;') }}"
    "{{ '<b>' }}{{ '%05.2f' | format(1.5) }}{{ range(3) | list }}{{ messages[-1].get('content', 'none') }}",
    "reasoning": "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}]{% endfor %}",
    "line feeds at the end": "{{ messages[0].content }}\n\n",
    "undefined": "{{ messages[0].missing }}{{ nothing.at.all }}",
    "wrong types": "{{ messages[0].content + 1 }}",
    "no such filter": "{{ messages | frobnicate }}",
    "unclosed": "{% for m in messages %}{{ m }",
    "unknown tag": "a\n{% frobnicate %}",
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "note": "<ü> & 'x'"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": " <|im_end|> hi "}],
    "long": [
        {"role": "system", "content": "日本 👍🏽 \u2028 </s>"},
        {"role": "user", "content": "a < b && c > d {{ x }} {% y %}"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes  "},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "\n\nso", "thinking": "because"},
    ],
    "tools": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "let me see"},
        {"role": "tool", "content": {"sum": 1.5, "ok": True, "none": None}},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done", "reasoning_content": None},
    ],
    "two calls": [{"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}],
    "wrong turn": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "again"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}],
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt": {"add_generation_prompt": True, "tools": None},
    "tools": {"tools": [{"name": "add", "parameters": {"a": {"type": "<int>"}}}], "enable_thinking": False},
    "own tokens": {"bos_token": "<mine>", "date_string": "today", "add_generation_prompt": True},
}


def pair(template: str) -> tuple[GGUFTokenizer, PreTrainedTokenizerFast]:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, "<unk>"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **NAMED)
    return GGUFTokenizer(backend, NAMED, template), theirs


def render(template: str, messages: Any, **extra: Any) -> str:
    return pair(template)[0].apply_chat_template(messages, tokenize=False, **extra)


def outcome(tokenizer: Any, messages: Any, extra: dict[str, Any]) -> str | Exception:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **extra)
    except Exception as error:
        return error


def assert_same(template: str, messages: list[dict[str, Any]], **extra: Any) -> None:
    """The same text, or both refuse, ours in one line with the same words."""
    ours, theirs = (outcome(tokenizer, messages, extra) for tokenizer in pair(template))
    if isinstance(theirs, str):
        assert ours == theirs
        return
    assert isinstance(ours, OutriderError)
    assert "\n" not in str(ours)
    assert " ".join(getattr(theirs, "message", str(theirs)).split()) in str(ours)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_it_writes_what_transformers_does(template: str, chat: str, extra: str) -> None:
    assert_same(TEMPLATES[template], CHATS[chat], **EXTRAS[extra])


@settings(deadline=None)
@given(
    template=st.sampled_from([LLAMA, QWEN, MISTRAL]),
    turns=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text()), min_size=1),
)
def test_any_chat(template: str, turns: list[tuple[str, str]]) -> None:
    assert_same(template, [{"role": role, "content": text} for role, text in turns], date_string="today")


def test_the_templates_here_say_something() -> None:
    """A table of comparisons is worth nothing if both sides refuse everything."""
    assert render(LLAMA, CHATS["one"], date_string="D") == (
        "<s><|start|>system<|end|>\n\nToday Date: D\n\n<|eot|><|start|>user<|end|>\n\nhi<|eot|>"
    )
    assert "<think>\nbecause\n</think>\n\nso" in render(QWEN, CHATS["long"])
    assert render(MISTRAL, CHATS["system"]) == "<s>[INST]   Be brief.\n\n\n <|im_end|> hi [/INST]"
    with pytest.raises(OutriderError, match=r"refused the messages: After .* alternate user/assistant$"):
        render(MISTRAL, CHATS["wrong turn"])
    with pytest.raises(OutriderError, match=r"template is broken \(line 2: Encountered unknown tag 'frobnicate'"):
        render("a\n{% frobnicate %}", CHATS["one"])


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile = chat_template._compile
    monkeypatch.setattr(chat_template, "_compile", lambda source: compiled.append(source) or compile(source))
    ours, _ = pair(QWEN)
    assert compiled == []
    for chat in ("one", "system", "long"):
        ours.apply_chat_template(CHATS[chat], tokenize=False)
    assert compiled == [QWEN]


@pytest.mark.parametrize("depth", [30, 5000])
def test_a_template_nested_without_end(depth: int) -> None:
    with pytest.raises(OutriderError, match="broken") as caught:
        render("{% for x in y %}" * depth + "{% endfor %}" * depth, CHATS["one"])
    assert len(str(caught.value)) < 300


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ['{0.__class__}'] | map('format', 1) | first | attr('__class__') }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ dict.__class__.__mro__ }}",
    "{{ dict.update(messages[0], {'content': 'changed'}) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ namespace({'__html__': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "{% set f = messages[0].update %}{{ f(content='changed') }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('content') }}",
    "{{ messages[0].content.__len__() }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'base' %}",
]
DEAD_ENDS = [  # undefined, and so written as nothing
    "{{ ''['__class__'] }}",
    "{{ (1).__class__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ messages[0].items.__self__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
]


@pytest.mark.parametrize("template", DEAD_ENDS)
def test_inner_workings_are_not_seen(template: str) -> None:
    assert render(template, CHATS["one"]) == ""


@pytest.mark.parametrize("template", ESCAPES)
def test_the_cage_holds(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(OutriderError) as caught:
        render(template, messages)
    assert "\n" not in str(caught.value)
    assert messages == [{"role": "user", "content": "hi"}]


class Tempting:
    def __init__(self) -> None:
        self.called = False

    def save(self) -> None:
        self.called = True


def test_objects_do_not_reach_the_template() -> None:
    object = Tempting()
    messages = [{"role": "user", "content": object}]
    assert render("{{ messages[0].content }}", messages) == "<Tempting>"
    with pytest.raises(OutriderError, match="save"):
        render("{{ messages[0].content.save() }}", messages)
    with pytest.raises(OutriderError, match="save"):
        render("{{ given.save() }}", CHATS["one"], given=object)
    assert not object.called


@pytest.mark.parametrize("wrap", [OrderedDict, MappingProxyType], ids=str)
def test_any_mapping_is_a_message(wrap: Any) -> None:
    message = wrap({"role": "user", "content": "hi"})
    assert render("{{ messages[0].content }}{{ messages | tojson }}", (message,)) == (
        'hi[{"role": "user", "content": "hi"}]'
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        (["hi"], "not 'hi'"),
        ("hi", "mapping"),
        ([None], "mapping"),
        ([{"role": "user", "content": {(1, 2): 3}}], "JSON"),
    ],
)
def test_what_is_no_message(messages: Any, words: str) -> None:
    with pytest.raises(OutriderError, match=words):
        render(QWEN, messages)


def test_without_a_template() -> None:
    ours = GGUFTokenizer(Tokenizer(models.WordLevel({"a": 0}, "a")), {})
    with pytest.raises(OutriderError, match="no chat template"):
        ours.apply_chat_template(CHATS["one"], tokenize=False)


def test_ids_are_not_given() -> None:
    with pytest.raises(ValueError, match="tokenize=False"):
        pair(QWEN)[0].apply_chat_template(CHATS["one"], tokenize=True)  # type: ignore[arg-type]


DOUBLED = "{% set a = 'ab' %}" + "{% set a = a ~ a %}" * 40 + "{{ a|length }}"
DOUBLED_LISTS = "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40
HIDDEN_LISTS = "{% set a = [1] %}" + "{% set a = [a|list, a|batch(1)|list] %}" * 40
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a false test": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a macro of macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop into itself": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a recursive loop": "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 30 }}{% endfor %}",
}
LARGE = {
    "product": "{{ 'a' * 10**9 }}",
    "product of numbers": "{{ 1000000000 * 'a' }}",
    "list": "{{ ([0] * 10**9)|length }}",
    "list of texts": "{% set a = 'a' * 1000000 %}{{ [a] * 1000000 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "powers": "{% set n = namespace(n=2 ** 4000) %}{% for i in range(99) %}{% set n.n = n.n * n.n %}{% endfor %}",
    "percent": "{{ '%1000000000s' % 'a' }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent point": "{{ '%.1000000000f' % 1 }}",
    "format filter": "{{ '%1000000000s'|format('a') }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format within a format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format of many": "{% set a = 'a' * 1000000 %}{{ ('{0}' * 100000).format(a) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "center filter": "{{ 'a'|center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "replace": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 1000000 %}{{ a|replace('a', a) }}",
    "replace nothing": "{% set a = 'a' * 1000000 %}{{ a|replace('', a) }}",
    "join": "{% set a = 'a' * 1000000 %}{{ a.join('b' * 1000000) }}",
    "join filter": "{% set a = 'a' * 1000000 %}{{ ('b' * 1000000)|join(a) }}",
    "join of a map": "{{ (range(1500)|map('center', 10000)|join)|length }}",
    "join method of a map": "{{ ''.join(range(1500)|map('string')|map('center', 10000))|length }}",
    "join of a map by a text": "{% set a = 'a' * 1000000 %}{{ a.join(range(1500)|map('string'))|length }}",
    "join filter of a map by a text": "{% set a = 'a' * 1000000 %}{{ range(1500)|map('string')|join(a)|length }}",
    "list of a map": "{{ range(1500)|map('center', 10000)|list|length }}",
    "sort of a map": "{{ range(1500)|map('center', 10000)|sort|length }}",
    "reverse of a map": "{{ range(1500)|map('center', 10000)|reverse|first }}",
    "select of a map": "{{ range(1500)|map('center', 10000)|select|list|length }}",
    "batch of a map": "{{ range(1500)|map('center', 10000)|batch(9)|list|length }}",
    "groups of a map": "{{ range(1500)|map('center', 10000)|groupby(0)|length }}",
    "arguments of a map": "{{ '{}'.format(*(range(1500)|map('center', 10000)))|length }}",
    "the length of a loop": "{% for a in range(1500)|map('center', 10000) %}{{ loop.length }}{% break %}{% endfor %}",
    "list of a text": "{{ ('あ' * 4000000)|list|length }}",
    "sort of a text": "{{ ('あ' * 4000000)|sort|length }}",
    "slice of a text": "{{ ('あ' * 4000000)|slice(2)|first|length }}",
    "list of numbers": "{{ ([2 ** 2000] * 100000)|string|length }}",
    "indent": "{{ ('a\n' * 1000000)|indent(9999) }}",
    "indent a lot": "{{ 'a\n'|indent(1000000000, true) }}",
    "JSON": "{{ [1]|tojson(indent=1000000000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list|length }}",
    "slice": "{{ [1]|slice(1000000000)|list|length }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "sum of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    "doubled text": DOUBLED,
    "doubled sum": DOUBLED.replace("~", "+"),
    "doubled list": DOUBLED_LISTS + "{{ a }}",
    "doubled list as JSON": DOUBLED_LISTS + "{{ a|tojson }}",
    "doubled list compared": DOUBLED_LISTS + "{{ a == a|list }}",
    "doubled dict": DOUBLED_LISTS.replace("[a, a]", "{'x': a, 'y': a}") + "{{ a }}",
    "doubled dict call": DOUBLED_LISTS.replace("[a, a]", "dict(x=a, y=a)") + "{{ a }}",
    "doubled copies": HIDDEN_LISTS + "{{ a }}",
    "output": "{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "output of the template's own": "{% for a in range(9999) %}" + "a" * 9999 + "{% endfor %}",
    "output kept": "{% set x %}{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}{{ x|length }}",
}


@pytest.fixture
def half_a_gigabyte() -> Iterator[None]:
    """No more than that may be taken: a template that gets through is a MemoryError at once, not a machine at rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 29), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_what_is_to_be_made_is_measured_first() -> None:
    budget = template_sandbox.Budget(0)
    budget.check(budget.characters)
    with pytest.raises(SecurityError, match="it makes a value of"):
        budget.check(budget.characters + 1)


@pytest.mark.parametrize("source", [*ENDLESS.values(), *LARGE.values()], ids=[*ENDLESS, *LARGE])
@pytest.mark.usefixtures("half_a_gigabyte")
def test_a_template_cannot_take_the_machine(source: str) -> None:
    with pytest.raises(OutriderError, match=r"refused the messages|template is broken") as caught:
        render(source, CHATS["one"])
    assert len(str(caught.value)) < 500
    assert not isinstance(caught.value.__cause__, MemoryError)


def test_a_template_that_only_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", -1.0)
    with pytest.raises(OutriderError, match="seconds"):
        render("{% for a in [1] %}{% endfor %}", CHATS["one"])


def test_the_bounds_leave_room_for_a_long_conversation() -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " * 500} for i in range(2000)]
    assert render(QWEN, chat).count("<|im_start|>") >= 2000
    listed = "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
    assert render(listed + "{{ ns.all|length }}", chat) == "2000"


def test_the_template_of_a_folder_is_bounded_too(tmp_path: Path) -> None:
    _, theirs = pair(LARGE["product"])
    theirs.save_pretrained(tmp_path)
    found = from_folder(tmp_path)
    assert found is not None
    with pytest.raises(OutriderError, match="refused the messages"):
        found.apply_chat_template(CHATS["one"], tokenize=False)


@pytest.mark.parametrize("template", [LLAMA, QWEN, MISTRAL], ids=["llama", "qwen", "mistral"])
def test_a_folder_renders_as_transformers_does(tmp_path: Path, template: str) -> None:
    _, theirs = pair(template)
    theirs.save_pretrained(tmp_path)
    found = from_folder(tmp_path)
    assert found is not None
    for generation in (False, True):
        expected = theirs.apply_chat_template(CHATS["one"], tokenize=False, add_generation_prompt=generation)
        assert found.apply_chat_template(CHATS["one"], tokenize=False, add_generation_prompt=generation) == expected
