"""Types of the fields that the bodies of the APIs share: every text and every list has a bound."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from outrider.core.params import (
    HIGHEST_REPETITION,
    HIGHEST_TEMPERATURE,
    LARGEST_PENALTY,
    LOWEST_REPETITION,
    LOWEST_TEMPERATURE,
)

LONGEST_NAME = 4096  # characters of a model's name: it may be a path, and Linux has none longer
LONGEST_WORD = 256  # characters of what is a word or two: a role, a format, a quantization
LONGEST_UID = 128  # characters of a launched model's id
LONGEST_STOP = 1000  # characters of a stop string or a banned word: they are looked for at every token
LARGEST_IGNORED = 16_384  # characters, as JSON, of a field that is taken and not used: OpenAI's `metadata` fits
MOST_TOKEN_IDS = 1 << 20  # ids of a prompt: no context is longer
MOST_LISTED = 1024  # ids that stop or are biased: looked through at every token
MOST_ALLOWED = 16_384  # ids to which an answer can be limited: 16,384 add half a millisecond to every token
MOST_WORDS = 256  # banned words: looked for at every token


def _encodable(value: Any) -> Any:
    """JSON can write half of a surrogate pair, which is no character."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is not text") from None
    return value


def _small(value: Any) -> Any:
    try:
        length = len(json.dumps(value))
    except RecursionError:
        raise ValueError("is nested too deeply; it is not used, so leave it out") from None
    if length > LARGEST_IGNORED:
        raise ValueError(f"has more than {LARGEST_IGNORED} characters; it is not used, so leave it out")
    return value


def _temperature(value: float) -> float:
    if value and not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or between {LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}")
    return value


def _repetition(value: float) -> float:
    if not LOWEST_REPETITION <= value <= HIGHEST_REPETITION:
        raise ValueError(f"must be between {LOWEST_REPETITION:g} and {HIGHEST_REPETITION:g}")
    return value


ENCODABLE = BeforeValidator(_encodable)
Text = Annotated[str, StringConstraints(strict=True), ENCODABLE]
FilledText = Annotated[str, StringConstraints(strict=True, min_length=1), ENCODABLE]
Note = Annotated[str, StringConstraints(strict=True, max_length=LARGEST_IGNORED), ENCODABLE]
Name = Annotated[str, StringConstraints(strict=True, max_length=LONGEST_NAME), ENCODABLE]
Word = Annotated[str, StringConstraints(strict=True, max_length=LONGEST_WORD), ENCODABLE]
Stop = Annotated[str, StringConstraints(strict=True, max_length=LONGEST_STOP), ENCODABLE]
FilledStop = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=LONGEST_STOP), ENCODABLE]
Uid = Annotated[str, StringConstraints(strict=True, max_length=LONGEST_UID), ENCODABLE]
Ignored = Annotated[Any, AfterValidator(_small)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKEN_IDS)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]
Penalty = Annotated[float, Field(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)]
Repetition = Annotated[float, Field(gt=0), AfterValidator(_repetition)]


class StrictBody(BaseModel):
    """Unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
