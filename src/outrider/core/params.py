"""SamplingParams: how tokens are chosen and when to stop. Plain values, checked when they are made; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError, quoted
from outrider.core.grammar_spec import GrammarSpec, grammar_spec
from outrider.core.option import option

if TYPE_CHECKING:
    from torch import Tensor

    Processor = Callable[[Sequence[int], Tensor], Tensor]  # (prompt and output so far, logits [vocab]) -> new logits
BadWord = str | tuple[int, ...]

# Bounds within which no logit overflows in float32, where a law is computed. Others allow less: OpenAI temperatures up
# to 2 and penalties from -2 to 2. The lowest temperature is a normal number of float32; a law is greedy long before.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-37, 100.0
LARGEST_PENALTY = 100.0  # logits, of a presence or frequency penalty, positive or negative
LOWEST_REPETITION, HIGHEST_REPETITION = 0.01, 100.0
CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")
HIGHEST_BIAS = 1e9  # added to a logit; any lower one may be, down to minus infinity, which bans the token


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop. The defaults are greedy decoding of at most 256 tokens."""

    max_tokens: int = option(256, "Stop after this many tokens.")
    temperature: float = option(0.0, "0: always the likeliest token.", flags=("--temperature", "-t"))
    top_k: int = option(0, "Only the k likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Only the likeliest tokens whose probabilities add up to this.")
    min_p: float = option(0.0, "Only tokens with at least this fraction of the highest probability.")
    typical_p: float = option(1.0, "Only the most typical tokens whose probabilities add up to this.")
    seed: int | None = option(None, "The same seed gives the same text with any drafter.", shown="random")
    repetition_penalty: float = option(1.0, "Above 1: make tokens of the prompt and the answer less likely.")
    presence_penalty: float = option(0.0, "Subtracted from the logits of tokens already written.")
    frequency_penalty: float = option(0.0, "The same, once for each time a token was written.")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[BadWord] = option((), "Never write this. Repeatable.", flags=("--bad-word",))  # or token ids
    stop: Sequence[str] = option((), "Stop before this text. Repeatable.")
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = option(0, "Do not end before this many tokens.")
    ignore_eos: bool = option(False, "Go on past the end of the answer.", flags=("--ignore-eos",))
    logprobs: int | None = option(
        None, "With --json: log-probabilities of each token and of this many others.", shown="none"
    )
    n: int = 1
    processors: Sequence[Processor] = ()
    # What the text may be; at most one of these five.
    json_schema: Mapping[str, Any] | str | None = None  # JSON that this schema allows; as an object or as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a text that the whole expression matches
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # a text of this grammar in Lark's notation; its first rule is called start

    def __post_init__(self) -> None:
        for name, ok, need in _RANGES:
            value = getattr(self, name)
            if not _is_number(value) or not ok(value):
                raise OutriderError(f"{name} must be {need}, not {quoted(value)}")
        for name in ("max_tokens", "top_k", "min_tokens", "n", "seed", "logprobs"):
            value = getattr(self, name)
            if value is not None and not _is_whole(value):
                raise OutriderError(f"{name} must be a whole number, not {quoted(value)}")
        if self.logprobs is not None and self.logprobs < 0:
            raise OutriderError(f"logprobs must be None or at least 0, not {self.logprobs!r}")
        if self.min_tokens > self.max_tokens:
            raise OutriderError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, int))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "processors", _processors(self.processors))
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids, int)
            if not allowed:
                raise OutriderError("allowed_token_ids is empty: no token could ever be written; leave it out")
            object.__setattr__(self, "allowed_token_ids", allowed)
        if not isinstance(self.logit_bias, Mapping) or not all(
            _is_whole(token) and _is_number(bias) and bias <= HIGHEST_BIAS for token, bias in self.logit_bias.items()
        ):
            raise OutriderError("logit_bias maps token ids to numbers, such as {1234: -5.0}")
        if "" in self.stop:
            raise OutriderError("a stop string is empty: it would stop at once; leave it out")
        if self.constraint is not None and self.ignore_eos:
            raise OutriderError(f"ignore_eos and {self.constraint.parameter} contradict each other; leave out one")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def constraint(self) -> GrammarSpec | None:
        """What the text may be; None: anything."""
        return grammar_spec(self.json_schema, self.json_object, self.regex, self.choice, self.grammar)

    @property
    def constrained_by(self) -> dict[str, Any]:
        """The parameters that say what the text may be, as far as they are given."""
        named = {name: getattr(self, name) for name in CONSTRAINTS}
        return {name: value for name, value in named.items() if value not in (None, False)}

    @property
    def adjusts(self) -> bool:
        """Whether the context can change the logits at all."""
        return self.constraint is not None or self.penalises

    @property
    def penalises(self) -> bool:
        """Whether it can by anything but a grammar: penalties, bias, bans or processors."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
            or self.processors
        )

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are taken out of the law."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    def token_ids(self) -> set[int]:
        """Every token id that the parameters name, to be checked against a vocabulary."""
        words = (token for word in self.bad_words if not isinstance(word, str) for token in word)
        return {*self.logit_bias, *(self.allowed_token_ids or ()), *self.stop_token_ids, *words}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_tuple(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    items = tuple(value or ()) if isinstance(value, Iterable | None) and not isinstance(value, str) else (value,)
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise OutriderError(f"{name} must be a list of {'text' if kind is str else 'token ids'}, not {quoted(value)}")
    return items


def _bad_words(words: Any) -> tuple[BadWord, ...]:
    items = tuple(words or ()) if isinstance(words, Iterable | None) and not isinstance(words, str) else (words,)
    out = tuple(word if isinstance(word, str) else _as_tuple("bad_words", word, int) for word in items)
    if not all(out):
        raise OutriderError("a bad word is empty; leave it out")
    return out


def _processors(given: Any) -> tuple[Processor, ...]:
    items = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(map(callable, items)):
        raise OutriderError(f"processors must be functions of (tokens, logits), not {quoted(given)}")
    return items


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda v: v >= 1, "at least 1"),
    ("temperature", lambda v: v >= 0.0, "0 (greedy) or more"),
    (
        "temperature",
        lambda v: v == 0.0 or LOWEST_TEMPERATURE <= v <= HIGHEST_TEMPERATURE,
        f"0 (greedy) or between {LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}",
    ),
    ("top_k", lambda v: v >= 0, "0 (off) or more"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "above 0 and at most 1"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "between 0 and 1"),
    ("typical_p", lambda v: 0.0 < v <= 1.0, "above 0 and at most 1"),
    (
        "repetition_penalty",
        lambda v: LOWEST_REPETITION <= v <= HIGHEST_REPETITION,
        f"between {LOWEST_REPETITION:g} and {HIGHEST_REPETITION:g}",
    ),
    *(
        (name, lambda v: abs(v) <= LARGEST_PENALTY, f"between -{LARGEST_PENALTY:g} and {LARGEST_PENALTY:g}")
        for name in ("presence_penalty", "frequency_penalty")
    ),
    ("min_tokens", lambda v: v >= 0, "0 or more"),
    ("n", lambda v: v >= 1, "at least 1"),
)
