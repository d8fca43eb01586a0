"""Tools in OpenAI's chat bodies: which there are, whether one must be called, calls and results of earlier turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from outrider.core.errors import OutriderError
from outrider.core.grammar_spec import GrammarSpec, grammar_spec
from outrider.core.request import Message
from outrider.server.errors import Bad
from outrider.server.faces.fields import Ignored, StrictBody, Text, Word
from outrider.server.faces.structured import Constraint, StructuredFields
from outrider.server.tools import Dialect
from outrider.server.tools.base import Tool
from outrider.server.tools.grammar import CallableTool, CallGrammar, call_grammar

MOST_TOOLS = 1024  # tools of a request, and calls of a message
DEEPEST = 100  # levels of a schema or of arguments: templates and grammars recurse along them
ToolName = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class FunctionBody(StrictBody):
    """The arguments are held to the schema whether it is strict or not."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(StrictBody):
    type: Literal["function"]
    function: FunctionBody

    def as_tool(self) -> Tool:
        """As templates read it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {"type": "function", "function": {**function, "parameters": self.function.parameters or NO_PARAMETERS}}


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class NamedFunction(StrictBody):
    name: ToolName


class NamedTool(StrictBody):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(StrictBody):
    name: ToolName
    arguments: Text
    parsed_arguments: Ignored = None  # what the openai client has read of them


class ToolCallBody(StrictBody):
    """A call of an earlier answer."""

    id: Word
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients keep it from the stream

    def as_call(self, place: str) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments, place)}
        return {"id": self.id, "type": self.type, "function": function}


Calls = Annotated[list[ToolCallBody], Field(max_length=MOST_TOOLS)]


@dataclass(frozen=True)
class CallConstraint(Constraint):
    """The grammar of an answer that may call tools."""

    grammar: CallGrammar
    answers: Constraint | None  # what an answer in words is held to

    def blamed(self, error: OutriderError) -> OutriderError:
        found = self.grammar.blamed(error)
        if found is error and self.answers is not None and str(error).startswith("grammar cannot be used"):
            return Bad(str(error), param=self.answers.field)
        return found


@dataclass(frozen=True)
class ThoughtfulConstraint(Constraint):
    """The grammar of an answer after reasoning."""

    answer: Constraint  # what the answer itself is held to

    def blamed(self, error: OutriderError) -> OutriderError:
        reason = _PLACE.sub(f"{self.answer.parameter} cannot be used: ", str(error))
        return error if reason == str(error) else Bad(reason, param=self.answer.field)


# What stands before the reason where a grammar was made by us, so that the place tells a user nothing.
_PLACE = re.compile(
    r"^grammar cannot be used: (at \d+\(\d+\): )?(failed to compile JSON schema: |invalid regex .* \(in regex\): )?"
)


class ToolFields(StructuredFields):
    tools: Annotated[list[ToolBody], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def shown_tools(self) -> list[Tool]:
        """What the model is told of; nothing where it may not call any."""
        return [] if self.tool_choice == "none" else [tool.as_tool() for tool in self.tools or ()]

    def constrained(self, model: Dialect) -> Constraint | None:
        """What the answer is held to: words, calls, or either."""
        answers = self.constraint()
        _check_tools(self.tools or ())
        if not self.tools or self.tool_choice == "none":
            _refuse_choice(self.tool_choice)
            return answers if answers is None else _after_reasoning(answers, model)
        required, several = self.tool_choice not in (None, "auto"), self.parallel_tool_calls is not False
        spec = None if answers is None or required else _spec(answers)
        asked = model.format, model.special, self._callable(), required, several, spec, model.thinking
        grammar = call_grammar(*asked)
        return CallConstraint("tools", "grammar", grammar.text, grammar, answers)

    def _callable(self) -> list[CallableTool]:
        """The tools of which a call may be written."""
        places = [
            (f"tools.{at}.function.parameters", tool.as_tool()["function"]) for at, tool in enumerate(self.tools or ())
        ]
        found = [CallableTool(place, function["name"], function["parameters"]) for place, function in places]
        if not isinstance(self.tool_choice, NamedTool):
            return found
        wanted = self.tool_choice.function.name
        named = [tool for tool in found if tool.name == wanted]
        if not named:
            raise Bad(f"tool_choice names {wanted!r}, and no tool is called so", param="tool_choice")
        return named


_NOTHING: dict[str, Any] = dict(json_schema=None, json_object=False, regex=None, choice=None, grammar=None)


def _after_reasoning(answers: Constraint, model: Dialect) -> Constraint:
    """Models that think do so freely; what follows is held to the grammar."""
    if model.thinking is None:
        return answers
    spec = _grammar_of(answers)
    text = "\n".join([*model.thinking.answer(spec), *model.thinking.rules()])
    return ThoughtfulConstraint(answers.field, "grammar", text, answers)


def _spec(answers: Constraint) -> GrammarSpec:
    if answers.parameter == "grammar":
        raise Bad(f"{answers.field} and tools are two grammars; leave out one of them", param=answers.field)
    return _grammar_of(answers)


def _grammar_of(answers: Constraint) -> GrammarSpec:
    try:
        spec = grammar_spec(**{**_NOTHING, **answers.params})
    except OutriderError as error:
        raise answers.blamed(error) from error
    assert spec is not None
    return spec


def check_results(messages: Sequence[Message]) -> None:
    """A result is of a call before it."""
    called: dict[str, str] = {}
    for at, message in enumerate(messages):
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] != "tool":
            continue
        id = message.get("tool_call_id")
        if id is None:
            raise Bad(f"messages.{at} is the result of a tool, but has no tool_call_id", param=f"messages.{at}")
        if id not in called:
            raise Bad(
                f"messages.{at} is the result of a tool, but no message before it has a call with the id {id!r}",
                param=f"messages.{at}.tool_call_id",
            )


def _check_tools(tools: Sequence[ToolBody]) -> None:
    names = set()
    for at, tool in enumerate(tools):
        if tool.function.name in names:
            raise Bad(
                f"two tools are called {tool.function.name!r}; rename one of them", param=f"tools.{at}.function.name"
            )
        names.add(tool.function.name)
        _check_depth(tool.function.parameters, f"tools.{at}.function.parameters")


def _refuse_choice(choice: Any) -> None:
    if choice not in (None, "none", "auto"):
        raise Bad("tool_choice asks for a call, and there are no tools; add tools or leave it out", param="tool_choice")


def _arguments(text: str, place: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Bad(f"{place}.function.arguments must be a JSON object as text", param=f"{place}.function.arguments")
    _check_depth(found, f"{place}.function.arguments")
    return found


def _check_depth(value: Any, place: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise Bad(f"{place} is nested deeper than {DEEPEST} levels; make it flatter", param=place)
        level = [inner for each in level for inner in _inner(each)]


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
