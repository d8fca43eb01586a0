"""Chat templates: programs in Jinja that come with a model. They run in a sandbox, in the dialect of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from outrider.core.errors import OutriderError, one_line, quoted
from outrider.models import template_sandbox
from outrider.models.template_sandbox import BoundedEnvironment, check_indent

_REASONING = ("reasoning_content", "thinking", "reasoning")  # one field's names; templates read the first or second


class ChatTemplate:
    def __init__(self, source: str) -> None:
        self._template = _compile(source)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The messages as the model was taught to read them; an OutriderError says why they cannot be written."""
        _check(messages)
        text = _as_json({"tools": None, "documents": None, **variables, "messages": list(messages)})
        given = json.loads(text)  # plain values: the sandbox cannot know which methods of other objects are harmless
        given["messages"] = [_with_reasoning(message) for message in given["messages"]]
        try:
            return template_sandbox.render(self._template, given, len(text))
        except Exception as error:  # the template is the model's own code: whatever it raises is about the messages
            raise OutriderError(f"the chat template refused the messages: {one_line(error)}") from error


def _compile(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except Exception as error:  # nested too deep, or not text
        reason = one_line(error)
    raise OutriderError(f"the model's chat template is broken ({reason}); use a prompt instead of messages (--raw)")


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)
    return environment


class _Generation(Extension):
    """{% generation %} marks for training what the assistant said; here it is written like anything else."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """dict(...) without its class, whose methods would change what the sandbox guards."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """namespace(...) that cannot pass for an object with inner workings of its own."""

    def __init__(*args: Any, **entries: Any) -> None:  # without a self, so that a template may say namespace(self=1)
        values = dict(*args[1:], **entries)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # what it holds may hold it, and have no end


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names must not begin with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes for HTML, with < and & escaped."""
    check_indent(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise OutriderError("there are no messages to answer; give at least one")
    for message in messages:
        if not isinstance(message, Mapping):
            raise OutriderError(f"a message is a mapping with a role and a content, not {quoted(message)}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=_stand_in)
    except (TypeError, ValueError, RecursionError) as error:
        raise OutriderError(f"the messages cannot be written as JSON: {one_line(error)}") from error


def _stand_in(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"
