"""A whole training run: the target writes, the student learns, the engine measures. Its files lie in --out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.models.load import load
from outrider.models.weights import LoadOptions
from outrider.train import checkpoint, kinds, results
from outrider.train.checkpoint import TrainingState
from outrider.train.data import writer
from outrider.train.data.batches import BatchOrder
from outrider.train.data.conversations import ChatFormat
from outrider.train.data.corpus import Corpus, CorpusFolder, CorpusInfo
from outrider.train.job import TimeBudget, TrainingJob, as_dict
from outrider.train.loop import WARM_UP, LossLog, TrainingLoop
from outrider.train.optimiser import Optimiser
from outrider.train.results import Prompts
from outrider.train.teacher import Teacher

LONGEST = 1024  # tokens of a text that are learned from; memory grows with it, and answers are shorter
LOOKS, LOOK_TOKENS = 5, 64  # times acceptance is measured during learning, and tokens of each answer then
LOOKING_SHARE = 0.05  # largest share of the time for these measurements
MEASURING_SHARE = 0.25  # largest share of the time after the texts that is kept for the table at the end
TABLE_TOKENS = 128  # tokens of an answer in the table at the end
SAVING = 2.0  # seconds kept for the last checkpoint
SAVE_SECONDS = 30.0  # seconds between two checkpoints: a killed run loses at most these
SHOW_SECONDS = 0.5  # seconds between two lines of progress
FEWEST_PROMPTS = 8  # prompts of a file; with fewer a head learns them by heart


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """A job, where it is done, and what is called on the way."""

    job: TrainingJob
    out: Path
    where: LoadOptions
    resume: bool = False
    data: Path | None = None  # of another run, whose texts are learned from
    prompts: Sequence[str] = ()  # user turns; (): the target writes them as well
    held_out: Prompts = ()  # for the acceptance during learning
    evaluation: Prompts = ()  # for the table at the end; (): the held-out ones
    whole: bool = True  # heads with the target's output rows, as vLLM needs them
    save_every: int = 0  # steps; 0: every 30 seconds
    command: Sequence[str] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    show: writer.Show = lambda what, done, total: None
    note: Callable[[str], None] = lambda line: None
    stop: threading.Event = field(default_factory=threading.Event)

    def stored(self) -> dict[str, Any]:
        """What the run needs again when it is resumed."""
        return {
            "job": as_dict(self.job),
            "data": None if self.data is None else str(self.data.resolve()),
            **{name: list(getattr(self, name)) for name in ("prompts", "held_out", "evaluation")},
            "whole": self.whole,
        }


@dataclass(frozen=True)
class TrainingResult:
    measured: results.Measured
    state: TrainingState
    interrupted: bool


def dense(where: LoadOptions) -> LoadOptions:
    """Where the target lives while a student learns from it: packed weights have no gradients to give."""
    return replace(where, dtype=where.dense)


def train(task: TrainingTask) -> TrainingResult:
    """The head lies in task.out; what was measured with it comes back."""
    if task.prompts and len(task.prompts) < FEWEST_PROMPTS:
        raise OutriderError(f"{len(task.prompts)} prompts are too few to learn from; give at least {FEWEST_PROMPTS}")
    state = checkpoint.begin(task.out, task.resume)
    task = replace(task, begun=task.begun - state.seconds)
    return _TrainingRun(task, state).go()


def reserved(seconds: float, left: float) -> float:
    """Seconds of the time that is left which are not for learning. A run that is too short ends late rather than
    without having learned anything."""
    return min(seconds, MEASURING_SHARE * left)


class _TrainingRun:
    def __init__(self, task: TrainingTask, state: TrainingState) -> None:
        self._task, self._job, self._state, self._out = task, task.job, state, task.out
        self._budget = TimeBudget(task.job.minutes, task.begun)
        task.show(f"loading {task.job.model}", 0, None)
        self._loaded = load(task.job.model, task.where)
        self._teacher = Teacher(self._loaded.model, (), min(LONGEST, self._loaded.model.context))
        chat, chunk = ChatFormat.of(self._loaded.tokenizer), writer.PROMPT_CHUNK[self._device.type]
        self._evaluator = results.Evaluator(self._loaded, chat, task.where, chunk)
        source = sources.resolve(task.job.model)
        self._destination = kinds.Destination(
            self._teacher.model, self._name, source, self._loaded.tokenizer, task.whole
        )
        self._saved = self._shown = time.monotonic()
        self._looked = 0.0  # seconds

    def go(self) -> TrainingResult:
        corpus = self._corpus()
        student = self._student(corpus)
        optimiser = Optimiser(student, self._job.rate, self._job.norm_rate)
        if self._state.step:
            checkpoint.restore(self._out, student, optimiser)
        self._learn(student, optimiser, corpus)
        self._save(student, optimiser)
        measured: results.Measured = {}
        if not self._task.stop.is_set():
            measured = self._measure_all()
        self._write_provenance(measured)
        return TrainingResult(measured, self._state, self._task.stop.is_set())

    # The texts.

    def _corpus(self) -> Corpus:
        folder = CorpusFolder(self._task.data or self._out)
        info = folder.info() or self._new_corpus()
        self._check(info, folder)
        checkpoint.record_job(self._out, self._task.stored())
        if not info.complete:
            corpus_writer = writer.CorpusWriter(self._loaded, self._job, self._device.type, self._task.prompts)
            info = writer.write_corpus(corpus_writer, folder, info, self._job, self._budget, self._show_or_stop)
            self._task.note(f"the target wrote {info.tokens:,} tokens in {info.seconds:.0f} s")
        self._state.figures["data"] = vars(info)
        return folder.read(info.waves)

    def _new_corpus(self) -> CorpusInfo:
        if self._task.data is not None:
            raise OutriderError(f"{self._task.data} has no texts of a training run; give the --out of one")
        return CorpusInfo(self._name, self._loaded.model.vocab_size, self._job.seed)

    def _check(self, info: CorpusInfo, folder: CorpusFolder) -> None:
        if (info.model, info.vocab) != (self._name, self._loaded.model.vocab_size):
            raise OutriderError(
                f"the texts in {folder.folder} were written by {info.model} ({info.vocab} tokens), not by {self._name} "
                f"({self._loaded.model.vocab_size} tokens); give texts of this model"
            )
        if self._task.data is not None and not info.complete:
            raise OutriderError(f"the texts in {folder.folder} are not complete; finish that run with --resume first")

    # Learning.

    def _student(self, corpus: Corpus) -> nn.Module:
        vocab = self._loaded.model.vocab_size
        count = self._job.draft_tokens(vocab)
        ids: Tensor | None = None
        if count < vocab:
            ids = corpus.frequent(count, vocab, sorted(self._loaded.ends))
        student = kinds.fresh(self._job, self._teacher.model, ids, self._teacher.longest).to(self._device)
        self._teacher.layers = student.reads  # type: ignore[assignment]
        self._state.figures["parameters"] = sum(weight.numel() for weight in student.parameters())
        return student

    def _learn(self, student: nn.Module, optimiser: Optimiser, corpus: Corpus) -> None:
        state, budget = self._state, self._budget
        order = BatchOrder(corpus, self._job.batch_tokens, self._teacher.longest, self._job.seed, self._device)
        self._plan(order)
        if not state.step:
            kinds.prepare(student, self._teacher.read(next(order.batches(0))))
        log = LossLog(self._out, state.step)
        loop = TrainingLoop(student, self._teacher, order, optimiser, self._job.unroll)
        seconds, reserve = self._times(student)
        for _ in loop.run(state, log, budget, reserve, min(LOOKS * seconds, LOOKING_SHARE * budget.limit)):
            self._after_step(student, optimiser, log)
            if self._task.stop.is_set():
                break
        log.flush()
        state.figures |= {"loss": log.curve(), "last": {name: round(v, 4) for name, v in log.recent().items()}}

    def _plan(self, order: BatchOrder) -> None:
        """Without a limit of time the number of steps is known at once."""
        state, epochs = self._state, self._job.epochs
        if not state.planned and (epochs or not self._job.minutes):
            state.planned = max(1, round((epochs or 1.0) * order.per_epoch))
        state.warm = state.warm or (min(WARM_UP, max(1, state.planned // 10)) if state.planned else WARM_UP)

    def _after_step(self, student: nn.Module, optimiser: Optimiser, log: LossLog) -> None:
        """Measure, save and show, each when it is due."""
        state, now = self._state, time.monotonic()
        every = max(1, (state.planned or 10 * WARM_UP) // LOOKS)
        looked = self._looked < LOOKING_SHARE * self._budget.spent
        if state.step % every == 0 and state.step != state.planned and looked:
            log.flush()
            self._look(student)
            self._task.note(self._line(log))
        if self._save_due(now):
            log.flush()
            self._save(student, optimiser)
            self._saved = time.monotonic()
        if now - self._shown > SHOW_SECONDS:
            self._task.show(self._line(log), state.step, state.planned or None)
            self._shown = now

    def _save_due(self, now: float) -> bool:
        every = self._task.save_every
        return self._state.step % every == 0 if every else now - self._saved > SAVE_SECONDS

    def _line(self, log: LossLog) -> str:
        recent = log.recent()
        hits = " ".join(f"{value:.2f}" for name, value in recent.items() if name.startswith("hit"))
        live = self._state.figures.get("live") or [[0, 0.0]]
        return (
            f"step {self._state.step}/{self._state.planned or '?'}: loss {recent.get('loss', 0.0):.3f}, hits {hits}, "
            f"{live[-1][1]:.2f} tokens per pass"
        )

    # Measuring.

    def _look(self, student: nn.Module) -> float:
        """Acceptance on the held-out prompts as of now; the seconds it took."""
        begin = time.monotonic()
        self._write(student)
        found = results.total(self._evaluator.measure(self._specs[0], self._task.held_out, LOOK_TOKENS))
        self._state.figures.setdefault("live", []).append([self._state.step, round(found.tokens_per_step, 3)])
        self._looked += time.monotonic() - begin
        return time.monotonic() - begin

    def _times(self, student: nn.Module) -> tuple[float, float]:
        """Seconds of a look, and those to keep for the last saving and the table of the held-out prompts. Prompts of
        the user's own, which may be any number, are measured when the time is over."""
        first = self._look(student)
        if self._task.evaluation:
            return first, SAVING
        looks = [first] * len(self._specs)
        if self._device.type == "cuda":  # the first one built what all others use; a tree takes longer than a chain
            looks = [self._timed_look(spec) for spec in self._specs]
        return looks[0], reserved(SAVING + first + sum(looks) * TABLE_TOKENS / LOOK_TOKENS, self._budget.left)

    def _timed_look(self, spec: str) -> float:
        begin = time.monotonic()
        self._evaluator.measure(spec, self._task.held_out, LOOK_TOKENS)
        return time.monotonic() - begin

    def _measure_all(self) -> results.Measured:
        prompts = self._task.evaluation or self._task.held_out
        measured, took = {}, {}
        for way, spec in kinds.specs(self._job.kind, self._out).items():
            self._task.show(f"measuring {way}", 0, None)
            begin = time.monotonic()
            measured[way] = self._evaluator.measure(spec, prompts, TABLE_TOKENS)
            took[way] = round(time.monotonic() - begin, 1)
        self._state.figures["table_seconds"] = took
        facts = {"model": self._name, "prompts": len(prompts), "new tokens": TABLE_TOKENS, "steps": self._state.step}
        results.write_table(measured, self._out, facts)
        return measured

    # Files.

    def _save(self, student: nn.Module, optimiser: Optimiser) -> None:
        self._state.seconds = self._budget.spent
        checkpoint.save(self._out, self._state, student, optimiser)
        self._write(student)

    def _write(self, student: nn.Module) -> None:
        kinds.write(student, self._out, self._destination)

    def _write_provenance(self, measured: results.Measured) -> None:
        state = self._state
        facts = {
            "job": {**as_dict(self._job), "model": self._name},
            "steps": state.step,
            "planned_steps": state.planned,
            "seconds": round(self._budget.spent, 1),
            "interrupted": self._task.stop.is_set(),
            "figures": {**state.figures, "tokens_per_pass": results.figures(measured)},
        }
        results.write_provenance(self._out, self._task.command, self._task.machine, facts)

    @property
    def _specs(self) -> list[str]:
        """The ways in which the head is measured; the first one during learning, too."""
        return list(kinds.specs(self._job.kind, self._out).values())

    @property
    def _name(self) -> str:
        return Path(self._job.model).name

    @property
    def _device(self) -> torch.device:
        return self._task.where.device

    def _show_or_stop(self, what: str, done: int, total: int | None) -> None:
        if self._task.stop.is_set():
            raise KeyboardInterrupt
        self._task.show(what, done, total)
