"""The grammar of an answer that may call tools, or must: free until a call begins, then held to the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.grammar_spec import GrammarSpec, grammar_spec
from outrider.core.lark import lark_rule
from outrider.server.errors import Bad
from outrider.server.tools.base import ToolFormat, escaped, literal
from outrider.server.tools.reasoning import ANYTHING, Thinking

_PLACE = re.compile(r"^grammar cannot be used: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)$", re.S)


@dataclass(frozen=True)
class CallableTool:
    field: str  # its place in the body
    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class CallGrammar:
    text: str
    lines: Mapping[int, CallableTool]  # line of the text, from 1 on -> the tool whose parameters it has

    def blamed(self, error: OutriderError) -> OutriderError:
        """The error with the tool that it is about."""
        match = _PLACE.match(str(error))
        tool = self.lines.get(int(match[1])) if match else None
        if match is None or tool is None:
            return error
        return Bad(f"the parameters of the tool {tool.name} cannot be used: {match[2]}", param=tool.field)


def call_grammar(
    format: ToolFormat,
    special: Mapping[str, int],
    tools: Sequence[CallableTool],
    required: bool,
    several: bool,
    answer: GrammarSpec | None = None,
    thinking: Thinking | None = None,
) -> CallGrammar:
    """`special`: triggers that are single tokens, with their ids. `required`: no words, only calls. `answer`: what an
    answer in words may be; None: anything. `thinking`: there may be reasoning before all of it."""
    trigger = f"<[{special[format.trigger]}]>" if format.trigger in special else literal(format.trigger)
    words = ANYTHING + ("" if thinking is None else thinking.not_thought())
    lines = _start(format, trigger, format.trigger in special, required, answer, words)
    lines += format.rules(several)
    heads = (literal(f'{tool.name}", "{format.key}": ') for tool in tools)
    lines += ["pick: " + " | ".join(f"{head} args_{number}" for number, head in enumerate(heads))]
    first = len(lines) + 1
    lines += [lark_rule(_checked(tool), f"args_{number}") for number, tool in enumerate(tools)]
    if thinking is not None:
        lines = [lines[0].replace("start:", "answer:", 1), *lines[1:], *thinking.rules()]
    return CallGrammar("\n".join(lines), dict(enumerate(tools, first)))


def _start(
    format: ToolFormat, trigger: str, is_special: bool, required: bool, answer: GrammarSpec | None, words: str
) -> list[str]:
    """The rules of the beginning. Words are lazy: they end where the trigger is complete."""
    if required:
        return [f"start: {trigger} calls"]
    if answer is not None:
        return [f"start: {trigger} calls | reply", lark_rule(answer, "reply")]
    if format.only_first:
        return [f"start: {trigger} calls | WORDS", f"WORDS: {words} & ~/(?s:{escaped(format.trigger)}.*)/"]
    if is_special:
        return [f"start: WORDS {trigger} calls | WORDS", f"WORDS: {words}"]
    return ["start: begin calls | WORDS", f"begin[lazy]: WORDS {trigger}", f"WORDS: {words}"]


def _checked(tool: CallableTool) -> GrammarSpec:
    """Arguments are always an object."""
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise Bad(f"the parameters of the tool {tool.name} must be of the type object", param=tool.field)
    try:
        spec = grammar_spec({**tool.parameters, "type": kind}, False, None, None, None)
    except OutriderError as error:
        reason = str(error).removeprefix("json_schema ")
        raise Bad(f"the schema of the tool {tool.name} {reason}", param=tool.field) from error
    assert spec is not None
    return spec
