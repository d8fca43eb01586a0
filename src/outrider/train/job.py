"""What a training run is asked to do, and in which time. A resumed run keeps the values that decide its losses."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import OutriderError

KINDS = ("eagle", "medusa", "draft")
MINUTES = 10.0  # of a run for which neither time nor tokens are given
LARGE_VOCABULARY = 40_000  # tokens: from this size on a head writes the most frequent ones only
DRAFT_VOCABULARY = 32_768  # tokens that it then writes (docs/LOG.md: accepts more than 8,192 and 4,096)


@dataclass(frozen=True)
class TrainingJob:
    kind: str
    model: str = "smollm2-135m"
    minutes: float = 0.0  # for writing, learning and measuring on our own prompts; 0: as the tokens take
    tokens: int = 0  # that the target writes; 0: what 40 % of the time is good for
    epochs: float = 0.0  # how often each text is learned from; 0: once, or as often as the time allows
    batch_tokens: int = 8_192  # of one step
    layers: int = 0  # decoder layers of the head or draft model, blocks of each Medusa head; 0: its usual number
    reads: tuple[int, ...] = ()  # the target's blocks that an EAGLE head reads; (): three
    heads: int = 4  # of Medusa
    unroll: int = 6  # draft steps that an EAGLE head is trained for
    draft_vocab: int = 0  # tokens that a head can write; 0: 32768 of a large vocabulary, -1: all
    rate: float = 0.015  # of Muon
    norm_rate: float = 0.001  # of AdamW, for what is no matrix
    seed: int = 0
    writers: int = 0  # conversations that are written at once; 0: what suits the device

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OutriderError(f"cannot train {self.kind!r}; known: {', '.join(KINDS)}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise OutriderError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if not self.minutes and not self.tokens:
            object.__setattr__(self, "minutes", MINUTES)
        object.__setattr__(self, "reads", tuple(self.reads))

    def draft_tokens(self, vocab: int) -> int:
        """How many tokens a head can write."""
        if self.draft_vocab < 0 or (not self.draft_vocab and vocab < LARGE_VOCABULARY):
            return vocab
        return min(self.draft_vocab or DRAFT_VOCABULARY, vocab)


_LEAST = {
    "minutes": 0,
    "tokens": 0,
    "epochs": 0,
    "batch_tokens": 64,
    "layers": 0,
    "heads": 1,
    "unroll": 1,
    "draft_vocab": -1,
    "rate": 0,
    "norm_rate": 0,
    "seed": 0,
    "writers": 0,
}
_CHANGEABLE = {"minutes", "writers"}  # may change when a run is resumed: they do not decide its losses


def new(kind: str, given: Mapping[str, Any]) -> TrainingJob:
    return TrainingJob(kind, **given)


def resumed(kind: str, given: Mapping[str, Any], stored: Mapping[str, Any]) -> TrainingJob:
    """The stored job; what is given again must be as it was."""
    for name, value in {"kind": kind, **given}.items():
        before = tuple(stored[name]) if name == "reads" else stored[name]
        if name not in _CHANGEABLE and value != before:
            raise OutriderError(
                f"the run was begun with {name} {before}, not {value}; leave it out with --resume, or begin anew"
            )
    return TrainingJob(**{**stored, **{name: value for name, value in given.items() if name in _CHANGEABLE}})


def as_dict(job: TrainingJob) -> dict[str, Any]:
    return dataclasses.asdict(job)


class TimeBudget:
    """How much time a run has had, and how much it has left; in seconds."""

    def __init__(self, minutes: float, begun: float) -> None:
        """`minutes`: in all, 0 for no limit. `begun`: when it began, less the time that earlier processes took."""
        self.limit = minutes * 60.0 or math.inf
        self._begun = begun

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        return self.limit - self.spent
