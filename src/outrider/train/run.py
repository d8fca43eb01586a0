"""A whole run: the target writes, the pupil learns, the engine measures. Everything that lasts lies in --out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider import drafters
from outrider.build import check_vocabularies
from outrider.core.errors import OutriderError
from outrider.core.stats import Stats
from outrider.drafters.base import Drafter, Parts
from outrider.models import sources
from outrider.models.base import Model
from outrider.models.load import load
from outrider.models.weights import Place
from outrider.train import checkpoint, kinds, provenance, table, texts
from outrider.train.capture import Teacher
from outrider.train.chat import Chat
from outrider.train.checkpoint import State
from outrider.train.clock import Clock
from outrider.train.corpus import Corpus, Note, Shelf
from outrider.train.job import Job, as_dict
from outrider.train.log import Log
from outrider.train.loop import WARM, Loop
from outrider.train.measure import Question, measure, total
from outrider.train.optimiser import Optimiser
from outrider.train.order import Order

LONGEST = 1024  # tokens of a text that are learned from
LIVE, SHORT = 5, 64  # so often acceptance is measured on the way, with so many tokens of each answer
LOOKING = 0.05  # of the time, at most
MEASURING = 0.25  # of the time after the texts may be kept for the table at the end
FULL = 128  # tokens of an answer in the table at the end
FEW = 8  # prompts of a file are too few to learn from

Asked = tuple[str, str]  # kind and text of a prompt


@dataclass(frozen=True, eq=False)
class Task:
    """A job, where it is done, and who looks on."""

    job: Job
    out: Path
    where: Place
    resume: bool = False
    data: Path | None = None  # of another run, whose texts are learned from
    prompts: Sequence[str] = ()  # user turns; (): the target writes them as well
    held_out: Sequence[Asked] = ()  # for the acceptance on the way
    evaluation: Sequence[Asked] = ()  # for the table at the end; (): the held-out ones
    whole: bool = True  # heads with the target's output rows, as vLLM needs them
    save_every: int = 0  # steps; 0: every 30 seconds
    command: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    show: texts.Show = lambda what, done, total: None
    note: Callable[[str], None] = lambda line: None
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Outcome:
    measured: table.Measured
    state: State
    interrupted: bool


def asked(task: Task) -> dict[str, Any]:
    """What a run has to know again when it goes on."""
    return {
        "job": as_dict(task.job),
        "data": None if task.data is None else str(task.data.resolve()),
        **{name: list(getattr(task, name)) for name in ("prompts", "held_out", "evaluation")},
        "whole": task.whole,
    }


def dense(where: Place) -> Place:
    """Where the target lives while something learns from it: packed weights have no gradients to give."""
    return replace(where, dtype=where.dense)


def train(task: Task) -> Outcome:
    """The result lies in task.out; what was measured with it comes back."""
    if task.prompts and len(task.prompts) < FEW:
        raise OutriderError(f"{len(task.prompts)} prompts are too few to learn from; give at least {FEW}")
    state = checkpoint.begin(task.out, task.resume)
    task = replace(task, begun=task.begun - state.seconds)
    return _Run(task, state).go()


def reserved(seconds: float, left: float) -> float:
    """Of the time that is left, what is not for learning. A run that is too short ends late rather than having learned
    nothing."""
    return min(seconds, MEASURING * left)


class _Run:
    def __init__(self, task: Task, state: State) -> None:
        self._task, self._job, self._state, self._out = task, task.job, state, task.out
        self._clock = Clock(task.job.minutes, task.begun)
        task.show(f"loading {task.job.model}", 0, None)
        self._loaded = load(task.job.model, task.where)
        self._teacher = Teacher(self._loaded.model, (), min(LONGEST, self._loaded.model.context))
        self._chat = Chat.of(self._loaded.tokenizer)
        source = sources.resolve(task.job.model)
        self._home = kinds.Home(self._teacher.model, self._name, source, self._loaded.tokenizer, task.whole)
        self._saved = self._shown = time.monotonic()
        self._looked = 0.0  # seconds

    def go(self) -> Outcome:
        corpus = self._corpus()
        pupil = self._pupil(corpus)
        optimiser = Optimiser(pupil, self._job.rate, self._job.norm_rate)
        if self._state.step:
            checkpoint.restore(self._out, pupil, optimiser)
        self._learn(pupil, optimiser, corpus)
        self._save(pupil, optimiser)
        measured: table.Measured = {}
        if not self._task.stop.is_set():
            measured = self._final()
        self._tell(measured)
        return Outcome(measured, self._state, self._task.stop.is_set())

    # The texts.

    def _corpus(self) -> Corpus:
        shelf = Shelf(self._task.data or self._out)
        note = shelf.note() or self._new_note()
        self._check(note, shelf)
        checkpoint.claim(self._out, asked(self._task))
        if not note.complete:
            scribe = texts.Scribe(self._loaded, self._job, self._device.type, self._task.prompts)
            note = texts.write(scribe, shelf, note, self._job, self._clock, self._showing)
            self._task.note(f"the target wrote {note.tokens:,} tokens in {note.seconds:.0f} s")
        self._state.figures["data"] = vars(note)
        return shelf.read(note.waves)

    def _new_note(self) -> Note:
        if self._task.data is not None:
            raise OutriderError(f"{self._task.data} has no texts of a training run; give the --out of one")
        return Note(self._name, self._loaded.model.vocab_size, self._job.seed)

    def _check(self, note: Note, shelf: Shelf) -> None:
        if (note.model, note.vocab) != (self._name, self._loaded.model.vocab_size):
            raise OutriderError(
                f"the texts in {shelf.folder} were written by {note.model} ({note.vocab} tokens), not by {self._name} "
                f"({self._loaded.model.vocab_size} tokens); give texts of this model"
            )
        if self._task.data is not None and not note.complete:
            raise OutriderError(f"the texts in {shelf.folder} are not complete; finish that run with --resume first")

    # Learning.

    def _pupil(self, corpus: Corpus) -> nn.Module:
        vocab = self._loaded.model.vocab_size
        count = self._job.words(vocab)
        ids: Tensor | None = None
        if count < vocab:
            ids = corpus.frequent(count, vocab, sorted(self._loaded.ends))
        pupil = kinds.fresh(self._job, self._teacher.model, ids, self._teacher.longest).to(self._device)
        self._teacher.layers = pupil.reads  # type: ignore[assignment]
        self._state.figures["parameters"] = sum(weight.numel() for weight in pupil.parameters())
        return pupil

    def _learn(self, pupil: nn.Module, optimiser: Optimiser, corpus: Corpus) -> None:
        state, clock = self._state, self._clock
        order = Order(corpus, self._job.batch_tokens, self._teacher.longest, self._job.seed, self._device)
        self._plan(order)
        if not state.step:
            kinds.calibrate(pupil, self._teacher.lesson(next(order.batches(0))))
        log = Log(self._out, state.step)
        loop, (seconds, reserve) = Loop(pupil, self._teacher, order, optimiser, self._job.unroll), self._times(pupil)
        for _ in loop.run(state, log, clock, reserve, min(LIVE * seconds, LOOKING * clock.limit)):
            self._watch(pupil, optimiser, log)
            if self._task.stop.is_set():
                break
        log.flush()
        state.figures |= {"loss": log.curve(), "last": {name: round(v, 4) for name, v in log.recent().items()}}

    def _plan(self, order: Order) -> None:
        """Without a limit of time the number of steps is known at once."""
        state, epochs = self._state, self._job.epochs
        if not state.planned and (epochs or not self._job.minutes):
            state.planned = max(1, round((epochs or 1.0) * order.per_epoch))
        state.warm = state.warm or (min(WARM, max(1, state.planned // 10)) if state.planned else WARM)

    def _watch(self, pupil: nn.Module, optimiser: Optimiser, log: Log) -> None:
        """After each step: show, measure, save, each when it is due."""
        state, now = self._state, time.monotonic()
        every = max(1, (state.planned or 10 * WARM) // LIVE)
        if state.step % every == 0 and state.step != state.planned and self._looked < LOOKING * self._clock.spent:
            log.flush()
            self._look(pupil)
            self._task.note(self._line(log))
        if self._due(now):
            log.flush()
            self._save(pupil, optimiser)
            self._saved = time.monotonic()
        if now - self._shown > 0.5:
            self._task.show(self._line(log), state.step, state.planned or None)
            self._shown = now

    def _due(self, now: float) -> bool:
        every = self._task.save_every
        return self._state.step % every == 0 if every else now - self._saved > 30.0

    def _line(self, log: Log) -> str:
        recent = log.recent()
        hits = " ".join(f"{value:.2f}" for name, value in recent.items() if name.startswith("hit"))
        live = self._state.figures.get("live") or [[0, 0.0]]
        return (
            f"step {self._state.step}/{self._state.planned or '?'}: loss {recent.get('loss', 0.0):.3f}, hits {hits}, "
            f"{live[-1][1]:.2f} tokens per pass"
        )

    # Measuring.

    def _look(self, pupil: nn.Module) -> float:
        """Acceptance on the held-out prompts as of now; the seconds it took."""
        begin = time.monotonic()
        self._write(pupil)
        found = total(self._measure(self._specs[0], self._task.held_out, SHORT))
        self._state.figures.setdefault("live", []).append([self._state.step, round(found.tokens_per_step, 3)])
        self._looked += time.monotonic() - begin
        return time.monotonic() - begin

    def _times(self, pupil: nn.Module) -> tuple[float, float]:
        """Seconds of a look, and those to keep for the last saving and the table of the held-out prompts. Prompts of
        the user's own, which may be any number, are measured when the time is over."""
        first = self._look(pupil)
        if self._task.evaluation:
            return first, 2.0
        looks = [first] * len(self._specs)
        if self._device.type == "cuda":  # the first one built what all others use; a tree takes longer than a chain
            looks = [self._timed(spec) for spec in self._specs]
        return looks[0], reserved(2.0 + first + sum(looks) * FULL / SHORT, self._clock.left)

    def _timed(self, spec: str) -> float:
        begin = time.monotonic()
        self._measure(spec, self._task.held_out, SHORT)
        return time.monotonic() - begin

    def _measure(self, spec: str, asked: Sequence[Asked], tokens: int) -> dict[str, Stats]:
        model = self._loaded.model
        questions = [Question(kind, tuple(self._chat.ask(text))) for kind, text in asked]
        fitting = [question for question in questions if len(question.tokens) + tokens <= model.context]
        return measure(model, self._drafter(spec), fitting, self._loaded.ends, tokens, texts.PIECE[self._device.type])

    def _drafter(self, spec: str) -> Drafter:
        def other(name: str, quantize: str) -> Model:
            found = load(name, self._task.where)
            check_vocabularies(self._loaded, found, name)
            return found.model

        return drafters.build(spec, Parts(self._loaded.model, other))

    def _final(self) -> table.Measured:
        asked = self._task.evaluation or self._task.held_out
        measured, took = {}, {}
        for way, spec in kinds.specs(self._job.kind, self._out).items():
            self._task.show(f"measuring {way}", 0, None)
            begin = time.monotonic()
            measured[way] = self._measure(spec, asked, FULL)
            took[way] = round(time.monotonic() - begin, 1)
        self._state.figures["table_seconds"] = took
        facts = {"model": self._name, "prompts": len(asked), "new tokens": FULL, "steps": self._state.step}
        table.write(measured, self._out, facts)
        return measured

    # What lasts.

    def _save(self, pupil: nn.Module, optimiser: Optimiser) -> None:
        self._state.seconds = self._clock.spent
        checkpoint.save(self._out, self._state, pupil, optimiser)
        self._write(pupil)

    def _write(self, pupil: nn.Module) -> None:
        kinds.write(pupil, self._out, self._home)

    def _tell(self, measured: table.Measured) -> None:
        state = self._state
        facts = {
            "job": {**as_dict(self._job), "model": self._name},
            "steps": state.step,
            "planned_steps": state.planned,
            "seconds": round(self._clock.spent, 1),
            "interrupted": self._task.stop.is_set(),
            "figures": {**state.figures, "tokens_per_pass": table.figures(measured)},
        }
        provenance.write(self._out, self._task.command, self._task.machine, facts)

    @property
    def _specs(self) -> list[str]:
        """The ways in which the head is measured; the first one on the way, too."""
        return list(kinds.specs(self._job.kind, self._out).values())

    @property
    def _name(self) -> str:
        return Path(self._job.model).name

    @property
    def _device(self) -> torch.device:
        return self._task.where.device

    def _showing(self, what: str, done: int, total: int | None) -> None:
        if self._task.stop.is_set():
            raise KeyboardInterrupt
        self._task.show(what, done, total)
