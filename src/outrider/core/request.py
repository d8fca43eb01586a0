"""What goes in and what comes out, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.core.adapter import AdapterChoice
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int]  # text, or token ids
Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Token:
    """A committed token and where it came from."""

    id: int
    drafter: str | None = None  # the drafter that guessed it; None: the target wrote it
    depth: int = 0  # how deep in the draft it hung; 0: the target's own
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the likeliest alternatives: (token id, log-probability)


@dataclass(frozen=True)
class Request:
    """Either a prompt or messages."""

    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    params: SamplingParams = SamplingParams()
    draft: str = ""  # "NAME:key=value,..."; "": the drafter that the backend was built with
    prediction: Prompt | None = None  # the output that the caller expects, for the drafter `prediction`
    stream: bool = False  # whether chunks are wanted before the end
    group: str = ""  # requests of one group take turns as one request, and share its memory; "": it is alone
    tools: Sequence[Mapping[str, Any]] | None = None  # for the chat template, as its model was trained to see them
    visible: tuple[int, ...] = ()  # special tokens that are written as text: others are left out
    tenant: str = ""  # who asks: what one tenant writes never serves another as a draft
    adapter: AdapterChoice = ""  # a loaded adapter by name, or a mix of them; "": the model as it is


@dataclass(frozen=True)
class Chunk:
    """What one step added to one sample, or several."""

    text: str
    tokens: tuple[Token, ...]
    index: int = 0  # which of the request's n samples
    finish_reason: Finish | None = None


def joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same text in as few chunks as there can be: one for each sample, in the order in which they begin here."""
    if len(chunks) < 2:
        return list(chunks)
    samples: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
    return [_one(own) if len(own) > 1 else own[0] for own in samples.values()]


def _one(chunks: Sequence[Chunk]) -> Chunk:
    """Of chunks of one sample only the last can have ended it."""
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return Chunk("".join(chunk.text for chunk in chunks), tokens, chunks[0].index, chunks[-1].finish_reason)


@dataclass(frozen=True)
class Result:
    text: str
    token_ids: list[int]
    finish_reason: Finish
    logprobs: list[dict[int, float]] | None  # per token: its own log-probability first, then the likeliest others
    stats: Stats
    prompt_token_ids: list[int]
    tokens: tuple[Token, ...] = ()  # the same tokens, each with the drafter that guessed it
    error: str = ""  # why finish_reason is "error"
    others: tuple[Result, ...] = field(default=(), repr=False)

    @property
    def samples(self) -> tuple[Result, ...]:
        """All n samples of the request; this result is the first."""
        return (self, *self.others)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
            "stats": self.stats.as_dict(),
        }
        if self.error:
            own["error"] = self.error
        if self.others:
            own["samples"] = [sample.as_dict() for sample in self.others]
        return own
