"""Bodies of Anthropic's Messages API, and the conversation that they mean.

Every field is honoured, refused with the reason, or harmless (it cannot change the answer). Unknown fields are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.server.errors import Bad
from outrider.server.faces.chat_form import ChatForm, chat_body
from outrider.server.faces.fields import FilledStop, Ignored, StrictBody, Text, Word
from outrider.server.faces.openai_bodies import MOST_MESSAGES, MOST_PARTS, MOST_STOPS, SharedFields
from outrider.server.faces.tool_fields import MOST_TOOLS, ToolName
from outrider.server.tools import Dialect

ERROR = "Error: "  # before the result of a tool that has failed: templates have no other place to say it


class TextBlock(StrictBody):
    type: Literal["text"]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None
    cache_control: Ignored = None  # prompts that begin alike are computed once anyway
    parsed_output: Ignored = None  # what the client has read of the text


class ThinkingBlock(StrictBody):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class ToolUseBlock(StrictBody):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Word
    name: ToolName
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: None = None


class ToolResultBlock(StrictBody):
    type: Literal["tool_result"]
    tool_use_id: Word
    content: Text | Annotated[list[TextBlock], Field(max_length=MOST_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None
    toolset_name: None = None


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(max_length=MOST_PARTS)]


class AnthropicTool(StrictBody):
    """The arguments are held to the schema whether it is strict or not."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: Text | None = None
    strict: bool | None = None
    cache_control: Ignored = None


class AnthropicChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class SchemaOutput(StrictBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    format: SchemaOutput | None = None
    effort: None = None


class ThinkingChoice(StrictBody):
    """Whether to think is the model's own choice; a budget cannot be kept."""

    type: Literal["disabled", "adaptive"]


class AnthropicBody(SharedFields):
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int = Field(ge=1, le=2**31 - 1)
    system: Text | Annotated[list[TextBlock], Field(max_length=MOST_PARTS)] | None = None
    stop_sequences: Annotated[list[FilledStop], Field(max_length=MOST_STOPS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingChoice | None = None
    cache_control: Ignored = None

    def as_chat(self) -> ChatForm:
        """The same as a body of the chat API, and what its fields are called here."""
        if self.messages[-1].role == "assistant":
            raise Bad(
                "the last message is the assistant's, but an answer cannot be begun for the model here; "
                "end with a message of the user",
                param=f"messages.{len(self.messages) - 1}",
            )
        turns = list(self._turns())
        choice = self.tool_choice or AnthropicChoice(type="auto")
        form = None if self.output_config is None else self.output_config.format
        chat = chat_body(
            **self.shared(),
            messages=[fields for _, fields in turns],
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            response_format=None if form is None else _format(form),
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=_choice(choice) if self.tool_choice is not None else None,
            parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
        )
        return ChatForm(chat, tuple(place for place, _ in turns), _NAMES)

    def check(self, model: Dialect) -> None:
        """What depends on the model."""
        if self.thinking is not None and self.thinking.type == "disabled" and model.thinking is not None:
            raise Bad("thinking cannot be disabled: the model decides by itself; leave it out", param="thinking")

    def _turns(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each message of the conversation with its place. Results of tools are messages of their own."""
        if self.system:
            yield "system", {"role": "system", "content": _joined(self.system)}
        for at, message in enumerate(self.messages):
            place = f"messages.{at}"
            if isinstance(message.content, str):
                yield place, {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield place, _answer(message.content, place)
            else:
                yield from ((place, turn) for turn in _asked(message.role, message.content, place))


def _answer(blocks: list[Any], place: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant"}
    for at, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": _arguments(block.input, f"{place}.content.{at}.input")}
            fields.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            raise Bad(f"{place}.content.{at} is a result, which the user sends", param=f"{place}.content.{at}")
        else:
            thought = isinstance(block, ThinkingBlock)
            key = "reasoning_content" if thought else "content"
            fields[key] = fields.get(key, "") + (block.thinking if thought else block.text)
    return fields


def _arguments(given: dict[str, Any], place: str) -> str:
    try:
        return json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise Bad(f"{place} is nested too deeply; make it flatter", param=place) from None


def _asked(role: str, blocks: list[Any], place: str) -> Iterator[dict[str, Any]]:
    """Texts that follow each other are one message."""
    text = ""
    for at, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock | ThinkingBlock):
            raise Bad(f"{place}.content.{at} is of the assistant's; the role is {role}", param=f"{place}.content.{at}")
        if isinstance(block, TextBlock):
            text += block.text
            continue
        if text:
            yield {"role": role, "content": text}
        text = ""
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if text or not blocks:
        yield {"role": role, "content": text}


def _result(block: ToolResultBlock) -> str:
    text = _joined(block.content or "")
    return ERROR + text if block.is_error and not text.startswith(ERROR) else text


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _format(form: SchemaOutput) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: AnthropicChoice) -> Any:
    if (choice.type == "tool") != (choice.name is not None):
        raise Bad("tool_choice has a name if its type is tool, and only then", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]


# Names of the chat API in an error, and what they are here.
_NAMES = (
    (re.compile(r"tools\.(\d+)\.function\.parameters\b"), r"tools.\1.input_schema"),
    (re.compile(r"tools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"\bresponse_format\b"), "output_config.format"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_tokens"),
    (re.compile(r"\btool_call_id\b"), "tool_use_id"),
    (re.compile(r"\.tool_calls\.(\d+)\.function\.arguments\b"), ".content"),
)
