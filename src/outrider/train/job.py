"""What a training run is asked to do, and in which time. A resumed run keeps the values that decide its losses."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.option import option

KINDS = ("eagle", "block", "medusa", "draft")
SEQUENTIAL = ("vanilla", "gated", "rnn")
MINUTES = 10.0  # minutes of a run for which neither time nor tokens are given
LARGE_VOCABULARY = 40_000  # tokens: from this size on a head writes the most frequent ones only
DRAFT_VOCABULARY = 32_768  # tokens that it then writes (docs/LOG.md: accepts more than 8,192 and 4,096)
RATE, BEGUN_RATE = 0.015, 0.006  # of Muon, for a new head and for one that is trained already (docs/LOG.md)
SHIPPED = "shipped"  # in place of a folder: the head that is shipped for the model or lies beside it
DATA, LEARN = "What is learned from", "How it is learned"  # headings of --help


def _block_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OutriderError(f"--reads takes block numbers such as 9,19,29, not {text!r}") from None


def _vocabulary(text: str) -> int:
    if text == "all":
        return -1
    if not text.isdigit() or not int(text):
        raise OutriderError(f"--draft-vocab takes a number of tokens or all, not {text!r}")
    return int(text)


def _whole_path(text: str) -> str:
    return str(Path(text).expanduser().resolve())


def _head_path(text: str) -> str:
    return text if text == SHIPPED else _whole_path(text)


@dataclass(frozen=True)
class TrainingJob:
    kind: str
    model: str = option(
        "smollm2-135m", "The target: known name, folder, hub id or GGUF file.", flags=("--model", "-m"), panel="Model"
    )
    adapter: str = option(
        "",
        "Train a drafter for the model with this adapter: a PEFT folder or GGUF file.",
        shown=False,
        panel="Model",
        parse=_whole_path,
    )
    minutes: float = option(
        0.0,
        "Time for writing, learning, measuring and saving; measuring with --eval comes on top.",
        shown="10, if no --tokens",
    )
    tokens: int = option(0, "Tokens that the target writes.", shown="by time", panel=DATA)  # 0: as texts.py divides it
    writers: int = option(0, "Conversations written at once.", shown="2048, on a CPU 32", panel=DATA)
    epochs: float = option(0.0, "How often a text is learned from.", shown="by time, else 1", panel=LEARN)
    batch_tokens: int = option(8_192, "Tokens in one training step.", panel=LEARN)
    layers: int = option(
        0,
        "Layers of the head or draft model (medusa: blocks per head).",
        shown="eagle and medusa 1, block 3, draft 4",
        panel=LEARN,
    )
    inner: int = option(
        0,
        "Width of the MLP in an EAGLE or block head.",
        shown="as the target, at most 3 times hidden",
        panel=LEARN,
    )
    reads: tuple[int, ...] = option(
        (),
        "Blocks of the target, from 0, that an EAGLE or block head reads: 9,19,29.",
        shown="three, block five, evenly",
        panel=LEARN,
        parse=_block_numbers,
    )
    begin: str = option(
        "",
        "Continue to train this head: a folder, or shipped for the head that comes with the model.",
        shown="the target's layers",
        panel=LEARN,
        parse=_head_path,
    )
    heads: int = option(4, "Number of Medusa heads.", panel=LEARN)
    unroll: int = option(6, "Draft steps that an EAGLE head is trained for.", panel=LEARN)
    temperature: float = option(
        1.0,
        "Temperature at which an EAGLE head and the target are compared: below 1 their likeliest tokens count more.",
        panel=LEARN,
    )
    focus: bool = option(
        False,
        "Weight the loss of an EAGLE head towards the starts of drafts and the nodes that verification reaches.",
        panel=LEARN,
    )
    block: int = option(8, "Tokens that one call of a block head guesses.", panel=LEARN)
    sequential: str = option(
        "rnn",
        "What a token of a block depends on: vanilla (the token before it), gated, rnn (all tokens before it).",
        panel=LEARN,
    )
    public: bool = option(False, "Train a block head in the public form (DSpark); not loaded in vLLM yet.", panel=LEARN)
    draft_vocab: int = option(
        0,  # -1: all
        "Tokens a head can write: a number or all.",
        shown="32768 of a large vocabulary",
        panel=LEARN,
        parse=_vocabulary,
    )
    rate: float = option(0.0, "Learning rate of Muon.", shown=f"{RATE:g}, with --begin {BEGUN_RATE:g}", panel=LEARN)
    norm_rate: float = option(0.001, "Learning rate of AdamW, which trains the norms.", panel=LEARN)
    seed: int = option(0, "Decides the texts and their order.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OutriderError(f"cannot train {self.kind!r}; known: {', '.join(KINDS)}")
        if self.sequential not in SEQUENTIAL:
            raise OutriderError(f"--sequential takes {', '.join(SEQUENTIAL)}, not {self.sequential!r}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise OutriderError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        for name in ("temperature", "focus"):
            if self.kind != "eagle" and getattr(self, name) != _default(name):
                raise OutriderError(f"--{name} is for EAGLE heads, not for {self.kind}; leave it out")
        if not self.minutes and not self.tokens:
            object.__setattr__(self, "minutes", MINUTES)
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "rate", self.rate or (BEGUN_RATE if self.begin else RATE))
        if self.begin:
            self._check_begun()

    def _check_begun(self) -> None:
        """A head that is trained already is as it is; an EAGLE head may grow."""
        if self.kind == "draft":
            raise OutriderError("--begin takes a head; a draft model begins with the target's own layers")
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        fixed = [name for name in _SHAPES if self.kind != "eagle" or name not in _GROWING]
        other = next((name for name in fixed if getattr(self, name) != usual[name]), None)
        if other is not None:
            option = f"--{other.replace('_', '-')}"
            raise OutriderError(f"{option} makes another head than the one that --begin names; leave one of them out")

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
    "temperature": 0.05,
    "inner": 0,
    "block": 2,
    "draft_vocab": -1,
    "rate": 0,
    "norm_rate": 0,
    "seed": 0,
    "writers": 0,
}
_CHOSEN = ("minutes", "tokens", "writers", "epochs", "layers", "inner", "rate")  # 0: by us, where nothing is given
_SHAPES = ("layers", "inner", "reads", "heads", "block", "sequential", "public", "draft_vocab")  # decide what a head is
_GROWING = ("inner", "reads")  # of these, what an EAGLE head may have more of when it goes on learning
_CHANGEABLE = {"minutes", "writers"}  # may change when a run is resumed: they do not decide its losses


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(TrainingJob) if field.name == name)


def new(kind: str, given: Mapping[str, Any]) -> TrainingJob:
    """`given`: what the user chose; the rest is chosen here."""
    _refuse_zeros(given)
    return TrainingJob(kind, **given)


def resumed(kind: str, given: Mapping[str, Any], stored: Mapping[str, Any]) -> TrainingJob:
    """The stored job; what is given again must be as it was."""
    _refuse_zeros(given)
    stored = {
        "adapter": "",
        "begin": "",
        "temperature": 1.0,
        "focus": False,
        **stored,
    }  # runs of earlier versions had none
    for name, value in {"kind": kind, **given}.items():
        before = tuple(stored[name]) if name == "reads" else stored[name]
        if name not in _CHANGEABLE and value != before:
            raise OutriderError(
                f"the run was begun with {name} {before}, not {value}; leave it out with --resume, or begin anew"
            )
    return TrainingJob(**{**stored, **{name: value for name, value in given.items() if name in _CHANGEABLE}})


def _refuse_zeros(given: Mapping[str, Any]) -> None:
    """0 stands for our own choice in a job, and a user who writes it means something else."""
    for name in _CHOSEN:
        if given.get(name) == 0:
            raise OutriderError(f"--{name.replace('_', '-')} must be more than 0; leave it out for the default")


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
