"""Bodies of OpenAI's API, and what they mean to the engine.

Every field is honoured, refused with the reason, or harmless (it cannot change the answer). Unknown fields are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider import drafters
from outrider.core.adapter import MOST
from outrider.core.params import SamplingParams
from outrider.core.request import Message, Prompt, Request
from outrider.server.access import Access
from outrider.server.errors import Bad
from outrider.server.faces.fields import (
    MOST_ALLOWED,
    MOST_LISTED,
    MOST_WORDS,
    Ignored,
    Name,
    Penalty,
    Repetition,
    Stop,
    StrictBody,
    Temperature,
    Text,
    TokenId,
    TokenIds,
    Word,
)
from outrider.server.faces.structured import Constraint, StructuredFields
from outrider.server.faces.tool_fields import Calls, ToolFields, check_results
from outrider.server.tools import Dialect

MOST_TOKENS = 2048  # tokens of a chat answer without a limit of its own, if the context holds them
MOST_SAMPLES = 128  # choices for a prompt
MOST_PROMPTS = 256  # prompts of a request; each of their samples counts in the queue, and all take turns as one request
MOST_MESSAGES = 10_000  # messages of a conversation
MOST_PARTS = 1000  # texts of a message
MOST_STOPS, MOST_TOP = 16, 20  # stop strings; alternatives shown beside a token
MOST_EXPECTED = 100_000  # characters of a prediction
MOST_OPTIONS = 32  # options of a drafter
TOKEN_DIGITS = 10  # digits of a token's id as text


class TextPart(StrictBody):
    type: Literal["text"]
    text: Text


Parts = Annotated[list[TextPart], Field(max_length=MOST_PARTS)]


class ChatMessage(StrictBody):
    role: Word
    content: Text | Parts | None = None
    name: Word | None = None
    refusal: None = None
    tool_calls: Calls | None = None
    tool_call_id: Word | None = None
    function_call: None = None
    audio: None = None
    annotations: Ignored = None
    parsed: Ignored = None  # what the openai client has read of the content
    reasoning_content: Text | None = None

    def as_message(self, at: int) -> Message:
        """`developer` is OpenAI's newer word for `system`. `at`: its place among the messages."""
        role = "system" if self.role == "developer" else self.role
        if self.content is None and role != "assistant":  # whose message may be calls alone
            raise Bad(f"messages.{at} has no content; add it", param=f"messages.{at}.content")
        message: dict[str, Any] = {"role": role, "content": _joined(self.content)}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:  # templates know it by this name, and most leave it out again
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            places = (f"messages.{at}.tool_calls.{number}" for number in range(len(self.tool_calls)))
            message["tool_calls"] = [call.as_call(place) for call, place in zip(self.tool_calls, places, strict=True)]
        return message


class StreamOptions(StrictBody):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class PredictionField(StrictBody):
    """The output that the caller expects; it is drafted as it stands."""

    type: Literal["content"]
    content: Text | Parts


class SpeculativeField(BaseModel):
    """Who drafts for this request: `method` and its options as in --draft, or `off`."""

    model_config = ConfigDict(extra="allow", strict=True)

    method: Word | None = None
    off: bool = False


class OutriderField(StrictBody):
    """Ours: `tokens` adds to each streamed chunk who wrote each token."""

    tokens: bool = False


class LoraField(StrictBody):
    """llama.cpp's: an adapter by its number, and its strength."""

    id: int = Field(ge=0, le=2**31 - 1)
    scale: float = 1.0


class SharedFields(StrictBody):
    """What the bodies of all APIs of conversations and prompts have, under the same names."""

    model: Name = ""
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_LISTED)] | None = None
    speculative: SpeculativeField | None = None
    prediction: PredictionField | None = None
    # As vLLM has them:
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: Repetition | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_LISTED)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MOST_ALLOWED)] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MOST_WORDS)] | None = None
    # Harmless: they cannot change the answer.
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    def shared(self) -> dict[str, Any]:
        """The values of these fields, for a body of another API."""
        return {name: getattr(self, name) for name in SharedFields.model_fields}


class OpenAIBody(SharedFields, StructuredFields):
    """What chat and completions share."""

    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    n: int | None = Field(None, ge=1, le=MOST_SAMPLES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    outrider: OutriderField | None = None
    lora: Annotated[list[LoraField], Field(max_length=MOST)] | None = None
    gamma: int | None = Field(None, ge=1, le=64)  # Xinference's: the length of a draft

    def constrained(self, model: Dialect) -> Constraint | None:
        """What the answer is held to, of a model that calls tools in its own way."""
        return self.constraint()

    def params(self, logprobs: int | None, max_tokens: int, constraint: Constraint | None) -> SamplingParams:
        """OpenAI's default temperature is 1. A number that is left out is ours."""
        given = {
            "top_p": self.top_p,
            "n": self.n,
            "seed": self.seed,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "ignore_eos": self.ignore_eos,
            "bad_words": self.bad_words,
            "stop": self.stop or None,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),  # -1 is vLLM's "off"
            logit_bias=_bias(self.logit_bias),
            logprobs=logprobs,
            **({} if constraint is None else constraint.params),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage) or self.wants_tokens

    @property
    def wants_tokens(self) -> bool:
        return bool(self.outrider and self.outrider.tokens)

    def expected(self) -> str | None:
        if self.prediction is None:
            return None
        text = _joined(self.prediction.content)
        if len(text) > MOST_EXPECTED:
            raise Bad(
                f"the prediction has {len(text)} characters; at most {MOST_EXPECTED} are read", param="prediction"
            )
        return text

    def draft(self, access: Access, own: str) -> str:
        """The drafter that the request asks for, as a spec; "": the model's own, whose spec is `own`."""
        asked, expects = self.speculative, self.prediction is not None
        if self.gamma is not None:
            if asked is not None or expects:
                raise Bad("gamma goes with neither speculative nor prediction; leave out one of them", param="gamma")
            return access.vary(own, {"length": self.gamma})
        if asked is None or (asked.method is None and not asked.off and not asked.model_extra):
            return _for_prediction(access, own) if expects else ""
        options = dict(asked.model_extra or {})
        if len(options) > MOST_OPTIONS:
            raise Bad(f"speculative: at most {MOST_OPTIONS} options are read, not {len(options)}", param="speculative")
        if asked.off:
            return _refuse_off(asked.method, options, expects)
        own_reads = asked.method is None and access.expects(own)
        method = asked.method or (own if own_reads or not expects else "prediction")
        reads = access.expects(method)
        if expects and not reads:
            raise Bad(
                f"a prediction is given, but the method {method} does not read it; leave out one of the two",
                param="speculative",
            )
        if access.needs(method) and not expects:
            raise Bad(f"the method {method} drafts from `prediction`, and none is given; add it", param="prediction")
        if asked.method is None and (own_reads or not expects):
            return access.vary(own, options)
        return access.draft(method, options, own)

    def refuse(self, refused: dict[str, tuple[tuple[Any, ...], str]]) -> None:
        for name, (neutral, why) in refused.items():
            if not any(getattr(self, name) == value for value in neutral):
                raise Bad(f"{name} is not supported: {why}; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise Bad("stream_options is for streams; add stream: true or leave it out", param="stream_options")
        if self.wants_tokens and not self.stream:
            raise Bad("outrider.tokens is for streams; add stream: true or leave it out", param="outrider")


class ChatBody(ToolFields, OpenAIBody):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def request(self, access: Access, own: str, model: Dialect) -> tuple[Request, bool]:
        """The request, and whether its length is cut to what the context holds."""
        self.refuse(_CHAT_REFUSED)
        if self.top_logprobs is not None and not self.logprobs:
            raise Bad("top_logprobs needs logprobs: true; add it or leave it out", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Bad("max_tokens and max_completion_tokens differ; leave out the older max_tokens", param="max_tokens")
        most = self.max_completion_tokens or self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.params(logprobs, most or MOST_TOKENS, self.constrained(model))
        draft, stream = self.draft(access, own), bool(self.stream)
        asked = Request(None, self._conversation(model), params, draft, self.expected(), stream)
        tools = self.shown_tools() if model.format.takes_tools else []
        return replace(asked, tools=tools or None, visible=self._visible(model)), most is None

    def _conversation(self, model: Dialect) -> list[Message]:
        messages = [message.as_message(at) for at, message in enumerate(self.messages)]
        check_results(messages)
        return model.format.messages(messages, self.shown_tools())

    def _visible(self, model: Dialect) -> tuple[int, ...]:
        """The tokens that begin a call, or are around reasoning, if they are no text."""
        marks = {} if model.thinking is None else model.thinking.special
        return (*(model.special.values() if self.shown_tools() else ()), *marks.values())


class CompletionBody(OpenAIBody):
    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: Any = None
    best_of: Any = None
    suffix: Any = None

    def requests(self, access: Access, own: str) -> list[Request]:
        self.refuse(_COMPLETION_REFUSED)
        if self.best_of not in (None, 1) and self.best_of != (self.n or 1):
            raise Bad("best_of beyond n is not supported: all n samples are returned; leave it out", param="best_of")
        params = self.params(self.logprobs, self.max_tokens or 16, self.constraint())
        draft, expected, stream = self.draft(access, own), self.expected(), bool(self.stream)
        return [Request(prompt, None, params, draft, expected, stream) for prompt in self.prompts()]

    def prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


# Fields that would change the answer and are not honoured: the values that ask for nothing, and why it is refused.
_CHAT_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((None, []), "tools is the newer name of it"),
    "function_call": ((None, "none", "auto"), "tool_choice is the newer name of it"),
    "modalities": ((None, ["text"]), "only text is written"),
    "audio": ((None,), "only text is written"),
    "reasoning_effort": ((None,), "the model has no such setting"),
    "verbosity": ((None,), "the model has no such setting"),
    "web_search_options": ((None,), "nothing is searched"),
}
_COMPLETION_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((None, False), "the prompt is not written again"),
    "suffix": ((None, ""), "the model does not fill in the middle"),
}


def _joined(content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    bias = {}
    for token, value in (given or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) <= TOKEN_DIGITS) or not -100 <= value <= 100:
            raise Bad("logit_bias maps token ids to numbers from -100 to 100", param="logit_bias")
        bias[int(token)] = value
    return bias


def _for_prediction(access: Access, own: str) -> str:
    """The model's own drafter if it reads predictions, else the drafter `prediction`."""
    return "" if access.expects(own) else "prediction"


def _refuse_off(method: str | None, options: dict[str, Any], expects: bool) -> str:
    if method not in (None, drafters.PLAIN) or options:
        raise Bad("speculative: off goes with no method and no options; leave them out", param="speculative")
    if expects:
        raise Bad(
            "a prediction is a draft, and speculative: off wants none; leave out one of the two", param="prediction"
        )
    return drafters.PLAIN
