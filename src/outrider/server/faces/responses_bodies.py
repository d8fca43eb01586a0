"""Bodies of OpenAI's Responses API, and the conversation that they mean.

Every field is honoured, refused with the reason, or harmless (it cannot change the answer). Unknown fields are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from outrider.server.errors import Bad
from outrider.server.faces.chat_form import ChatForm, chat_body
from outrider.server.faces.fields import Ignored, StrictBody, Text, Word
from outrider.server.faces.openai_bodies import MOST_MESSAGES, MOST_PARTS, SharedFields
from outrider.server.faces.structured import JsonObjectFormat, NamedSchema, TextFormat
from outrider.server.faces.tool_fields import MOST_TOOLS, ToolName

Role = Literal["user", "assistant", "system", "developer"]


class InputText(StrictBody):
    """Text of either side; what the client has read of it comes back with it."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


class InputMessage(StrictBody):
    type: Literal["message"] = "message"
    role: Role
    content: Text | Annotated[list[InputText], Field(max_length=MOST_PARTS)]
    id: Word | None = None
    status: Word | None = None
    phase: None = None


class FunctionCall(StrictBody):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Word
    name: ToolName
    arguments: Text
    parsed_arguments: Ignored = None
    id: Word | None = None
    status: Word | None = None
    namespace: None = None
    caller: None = None
    async_: Literal[False] | None = Field(None, alias="async")


class FunctionCallOutput(StrictBody):
    type: Literal["function_call_output"]
    call_id: Word
    output: Text | Annotated[list[InputText], Field(max_length=MOST_PARTS)]
    id: Word | None = None
    status: Word | None = None


class ReasoningText(StrictBody):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(StrictBody):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MOST_PARTS)] | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: None = None
    id: Word | None = None
    status: Word | None = None


def _kind(item: Any) -> str:
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponsesTool(StrictBody):
    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(StrictBody):
    type: Literal["function"]
    name: ToolName


class TextSchema(NamedSchema):
    type: Literal["json_schema"]


class TextField(StrictBody):
    format: Annotated[TextFormat | JsonObjectFormat | TextSchema, Field(discriminator="type")] | None = None
    verbosity: Any = None


class ResponsesStreamOptions(StrictBody):
    include_obfuscation: bool | None = None  # harmless: nothing is added to events


@dataclass
class InputTurn:
    """A message of the conversation while its items come."""

    place: str
    fields: dict[str, Any]


class ResponsesBody(SharedFields):
    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    text: TextField | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Any = None
    reasoning: Any = None
    include: Any = None
    top_logprobs: Any = None
    background: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    context_management: Any = None

    def as_chat(self) -> ChatForm:
        """The same as a body of the chat API, and what its fields are called here."""
        self._refuse()
        turns = list(self._turns())
        form = None if self.text is None else self.text.format
        chat = chat_body(
            **self.shared(),
            messages=[turn.fields for turn in turns],
            max_completion_tokens=self.max_output_tokens,
            response_format=_format(form),
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
        )
        return ChatForm(chat, tuple(turn.place for turn in turns), _NAMES)

    def _refuse(self) -> None:
        for name, (neutral, why) in _REFUSED.items():
            if getattr(self, name) not in neutral:
                raise Bad(f"{name} is not supported: {why}; leave it out", param=name)
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise Bad(
                "text.verbosity is not supported: the model has no such setting; leave it out", param="text.verbosity"
            )
        if self.stream_options is not None and not self.stream:
            raise Bad("stream_options is for streams; add stream: true or leave it out", param="stream_options")

    def _turns(self) -> Iterator[InputTurn]:
        """Items of one answer (reasoning, words, calls) become one message, as templates know it."""
        if self.instructions is not None:
            yield InputTurn("instructions", {"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            yield InputTurn("input", {"role": "user", "content": self.input})
            return
        answer: InputTurn | None = None
        for at, item in enumerate(self.input):
            if isinstance(item, FunctionCallOutput) or (isinstance(item, InputMessage) and item.role != "assistant"):
                if answer is not None:
                    yield answer
                answer = None
                yield InputTurn(f"input.{at}", _said(item))
            else:
                answer = answer or InputTurn(f"input.{at}", {"role": "assistant"})
                _add(answer.fields, item)
        if answer is not None:
            yield answer


def _said(item: InputMessage | FunctionCallOutput) -> dict[str, Any]:
    if isinstance(item, FunctionCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
    return {"role": item.role, "content": _joined(item.content)}


def _add(fields: dict[str, Any], item: InputMessage | FunctionCall | ReasoningItem) -> None:
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        fields.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        return
    text = _joined(item.content or "")
    key = "content" if isinstance(item, InputMessage) else "reasoning_content"
    fields[key] = fields.get(key, "") + text


def _joined(content: str | list[InputText] | list[ReasoningText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _format(form: TextFormat | JsonObjectFormat | TextSchema | None) -> Any:
    if not isinstance(form, TextSchema):
        return form
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedChoice) else choice


# Fields that would change the answer and are not honoured: the values that ask for nothing, and why it is refused.
_NOTHING_KEPT = "nothing is kept between requests; send the whole conversation as input"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "truncation": ((None, "disabled"), "a conversation that is too long is an error"),
    "reasoning": ((None, {}), "the model has no such setting"),
    "include": ((None, []), "there is nothing more to include"),
    "top_logprobs": ((None, 0), "log-probabilities come with /v1/chat/completions"),
    "background": ((None, False), _NOTHING_KEPT),
    "previous_response_id": ((None,), _NOTHING_KEPT),
    "conversation": ((None,), _NOTHING_KEPT),
    "prompt": ((None,), _NOTHING_KEPT),
    "max_tool_calls": ((None,), "no tool is called by the server"),
    "context_management": ((None, []), _NOTHING_KEPT),
}
# Names of the chat API in an error, and what they are here.
_NAMES = (
    (re.compile(r"tools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\.tool_call_id\b"), ".call_id"),
    (re.compile(r"\.tool_calls\.\d+\.function\b"), ""),
)
