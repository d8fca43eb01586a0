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
from outrider.core.stats import Stats
from outrider.drafters.heads import files as heads
from outrider.models import sources
from outrider.models.load import load
from outrider.models.weights import LoadOptions
from outrider.train import adapted, checkpoint, held_out, kinds, results
from outrider.train.checkpoint import TrainingState
from outrider.train.data import writer
from outrider.train.data.batches import GrowingOrder
from outrider.train.data.conversations import ChatFormat
from outrider.train.data.corpus import FOLDER, Corpus, CorpusFolder
from outrider.train.held_out import HeldOut
from outrider.train.job import TimeBudget, TrainingJob, as_dict
from outrider.train.loop import WARM_UP, LossLog, TrainingLoop
from outrider.train.objective import Comparison
from outrider.train.optimiser import Optimiser
from outrider.train.progress import Progress, advice
from outrider.train.results import Prompts
from outrider.train.teacher import Teacher
from outrider.train.texts import PARTS, TextSource

LONGEST = 1024  # tokens of a text that are learned from; memory grows with it, and answers are shorter
LOOKS, LOOK_TOKENS = 5, 64  # times acceptance is measured during learning, and tokens of each answer then
LOOKING_SHARE = 0.05  # largest share of the time for these measurements
MEASURING_SHARE = 0.25  # largest share of the time after the texts that is kept for the table at the end
TABLE_TOKENS = 128  # tokens of an answer in the table at the end
TREES_LONGER = 1.5  # times as long as a chain takes, the other ways of drafting take on average
SAVING = 4.0  # seconds kept for the last look at held-out texts and the last checkpoint
SAVE_SECONDS = 30.0  # seconds between two checkpoints: a killed run loses at most these
SAVING_EVERY = 20.0  # times as long as a checkpoint takes: large heads on slow disks are saved more seldom
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
    about: Sequence[str] = ()  # openers of user turns, beside our own
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
            **{name: list(getattr(self, name)) for name in ("prompts", "about", "held_out", "evaluation")},
            "whole": self.whole,
        }


@dataclass(frozen=True)
class TrainingResult:
    measured: results.Measured
    state: TrainingState
    interrupted: bool
    advice: str  # what would help most


@dataclass(frozen=True, eq=False)
class _Learning:
    """What a run learns with."""

    student: nn.Module
    optimiser: Optimiser
    order: GrowingOrder
    texts: TextSource
    held: Corpus  # texts that are never learned from


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
        self._how = Comparison(task.job.unroll, task.job.temperature, task.job.focus)
        task.show(f"loading {task.job.model}", 0, None)
        self._loaded = load(task.job.model, task.where)
        self._teacher = Teacher(self._loaded.model, (), min(LONGEST, self._loaded.model.context))
        self._adapter = self._fold()
        # read now, so that nobody waits for texts to hear that there is no such head
        self._begun = kinds.begun(task.job, self._teacher.model) if task.job.begin else None
        chat, chunk = ChatFormat.of(self._loaded.tokenizer), writer.PROMPT_CHUNK[self._device.type]
        self._evaluator = results.Evaluator(self._loaded, chat, task.where, chunk)
        source = sources.resolve(task.job.model)
        self._destination = kinds.Destination(
            self._teacher.model, self._name, source, self._loaded.tokenizer, task.whole
        )
        self._saved = self._shown = time.monotonic()
        self._looked, self._looked_at = 0.0, state.step  # seconds of all looks, and the step of the last one
        self._save_seconds = SAVE_SECONDS
        self._divide_at = 0  # step at which the time is divided anew between texts and steps

    def go(self) -> TrainingResult:
        texts = self._begin_texts()
        first = texts.read(self._state.segments[0][1])
        student = self._student(first)
        held = held_out.choose(first, held_out.MOST[self._device.type])
        optimiser = Optimiser(student, self._job.rate, self._job.norm_rate)
        measure = HeldOut(held, self._teacher, self._job.batch_tokens, self._how)
        self._progress = Progress(self._state, measure, kinds.file_dtype(self._teacher.model))
        if self._state.step:
            self._progress.best = checkpoint.restore(self._out, student, optimiser)
        learning = _Learning(student, optimiser, self._order(texts, held), texts, held)
        log = self._learn(learning)
        texts.end()
        self._save(student, optimiser)
        said = advice(self._state.figures, self._epochs(texts))
        self._state.figures["advice"] = said
        self._write_provenance({})  # the head is there: whatever ends the measuring, it says where it comes from
        measured = self._measure_all()
        self._write_provenance(measured)
        self._draw(log)
        self._say_place()
        return TrainingResult(measured, self._state, self._task.stop.is_set(), said)

    def _fold(self) -> str:
        """From now on the target is the adapted one; the adapter's name and digest, or "" where there is none."""
        if not self._job.adapter:
            return ""
        path = Path(self._job.adapter)
        adapted.fold(self._teacher.model, path)
        return adapted.named(path)

    def _say_place(self) -> None:
        """Whether requests with the adapter find the head, and where they would."""
        if not self._adapter or self._job.kind == "draft":
            return
        adapter, kind = Path(self._job.adapter), self._job.kind
        near = heads.beside(kind, str(adapter))
        if near is not None and near.resolve() == self._out.resolve():
            self._task.note(f"requests with the adapter {adapter.name} and the drafter {kind} find this head")
            return
        place = adapter.with_name(f"{adapter.name}.outrider-head") / kind
        self._task.note(f"move the head to {place}, and requests with the adapter find it")

    # The texts.

    def _begin_texts(self) -> TextSource:
        task, given = self._task, self._task.data is not None
        texts = TextSource(
            self._loaded, self._job, self._name, self._adapter, CorpusFolder(task.data or self._out), given,
            task.prompts, task.about, self._budget, self._show_or_stop,
        )  # fmt: skip
        checkpoint.record_job(self._out, task.stored())
        texts.begin()
        self._state.segments = self._state.segments or [[0, texts.info.waves]]
        self._say_texts(texts)
        return texts

    def _say_texts(self, texts: TextSource) -> None:
        info = texts.info
        self._state.figures["data"] = vars(info)
        speed = info.tokens / max(info.seconds, 1e-9)
        self._task.note(f"the target wrote {info.tokens:,} tokens in {info.seconds:.0f} s ({speed:,.0f}/s)")

    def _order(self, texts: TextSource, held: Corpus) -> GrowingOrder:
        order = GrowingOrder(self._job.batch_tokens, self._teacher.longest, self._job.seed, self._device)
        before = 0
        for step, waves in self._state.segments:
            self._add(order, step, texts, before, waves, held)
            before = waves
        return order

    @staticmethod
    def _add(order: GrowingOrder, step: int, texts: TextSource, before: int, waves: int, held: Corpus) -> None:
        """From that step on also the texts of the waves from `before` up to `waves`."""
        old, new = texts.read(before), texts.read(waves, before)
        order.add(step, held_out.without(old, held), held_out.without(new, held))

    def _divide(self, learning: _Learning, loop: TrainingLoop, left: float) -> None:
        """Write a part of the further texts now if they help more than steps do; then as many steps as still fit beside
        the parts to come."""
        state, texts, begun = self._state, learning.texts, self._budget.spent
        parts = self._parts_left(texts)
        now, loop.later = texts.wanted(left, loop.seconds, state.step, self._progress.gap(), parts)
        if now:
            before = texts.info.waves
            texts.write(now, last=parts == 1)
            if texts.info.waves > before:  # else no conversation got far enough
                self._say_texts(texts)
                self._learn_also(learning, before)
            loop.plan(state, left - loop.later - (self._budget.spent - begun))
            self._save(learning.student, learning.optimiser)
        self._divide_at = state.step + max(1, (state.planned - state.step) // (self._parts_left(texts) + 1))

    def _parts_left(self, texts: TextSource) -> int:
        """Times that further texts are still to be written."""
        return max(0, PARTS + 1 - len(self._state.segments)) if texts.grows else 0

    def _learn_also(self, learning: _Learning, before: int) -> None:
        """From the next step on also the texts of the waves from `before` on."""
        state, waves = self._state, learning.texts.info.waves
        state.segments.append([state.step, waves])
        self._add(learning.order, state.step, learning.texts, before, waves, learning.held)

    def _epochs(self, texts: TextSource) -> float:
        return self._state.step * self._job.batch_tokens / max(texts.info.tokens, 1)

    # Learning.

    def _student(self, corpus: Corpus) -> nn.Module:
        student = (self._begun or self._new_student(corpus)).to(self._device)
        self._teacher.layers = student.reads  # type: ignore[assignment]
        self._state.figures["parameters"] = sum(weight.numel() for weight in student.parameters())
        return student

    def _new_student(self, corpus: Corpus) -> nn.Module:
        vocab = self._loaded.model.vocab_size
        count = self._job.draft_tokens(vocab)
        ids: Tensor | None = None
        if count < vocab:
            ids = corpus.frequent(count, vocab, sorted(self._loaded.ends))
        return kinds.fresh(self._job, self._teacher.model, ids, self._teacher.longest)

    def _learn(self, learning: _Learning) -> LossLog:
        state, budget, student = self._state, self._budget, learning.student
        self._plan(learning.order)
        if not state.step and self._begun is None:
            kinds.prepare(student, self._teacher.read(learning.order.batch(0)))
        log = LossLog(self._out, state.step)
        loop = TrainingLoop(student, self._teacher, learning.order, learning.optimiser, self._how)
        seconds, reserve = self._times(student)
        pauses = min(LOOKS * seconds, LOOKING_SHARE * budget.limit)
        for _ in loop.run(state, log, budget, reserve, pauses):
            self._after_step(student, learning.optimiser, log)
            if self._task.stop.is_set():
                break
            if self._parts_left(learning.texts) and loop.seconds and self._divide_at <= state.step < state.planned:
                self._divide(learning, loop, budget.left - reserve - pauses)
        if not self._task.stop.is_set():  # a run that goes on looks when it is due
            self._progress.look(student, log, budget.spent)
        log.flush()
        state.figures |= {"loss": log.curve(), "last": {name: round(v, 4) for name, v in log.recent().items()}}
        state.figures |= {"epochs": round(self._epochs(learning.texts), 2), "best_step": state.best_step}
        return log

    def _plan(self, order: GrowingOrder) -> None:
        """Without a limit of time the number of steps is known at once."""
        state, epochs = self._state, self._job.epochs
        if not state.planned and (epochs or not self._job.minutes):
            state.planned = max(1, round((epochs or 1.0) * order.per_epoch))
        state.warm = state.warm or (min(WARM_UP, max(1, state.planned // 10)) if state.planned else WARM_UP)

    def _after_step(self, student: nn.Module, optimiser: Optimiser, log: LossLog) -> None:
        """Measure, save and show, each when it is due."""
        state, now, progress = self._state, time.monotonic(), self._progress
        if progress.due():
            progress.look(student, log, self._budget.spent)
            if warning := progress.warning():
                self._task.note(warning)
        every = max(1, state.planned // LOOKS)  # 0: there is no plan yet, and the run is young
        affordable = self._looked < LOOKING_SHARE * self._budget.spent
        if state.planned and state.step - self._looked_at >= every and state.step != state.planned and affordable:
            log.flush()
            self._look(student)
            self._task.note(progress.line(log))
        if self._save_due(now):
            log.flush()
            self._save(student, optimiser)
        if now - self._shown > SHOW_SECONDS:
            self._task.show(progress.line(log), state.step, state.planned or None)
            self._shown = now

    def _save_due(self, now: float) -> bool:
        every = self._task.save_every
        return self._state.step % every == 0 if every else now - self._saved > self._save_seconds

    # Measuring.

    def _look(self, student: nn.Module) -> float:
        """Acceptance on the held-out prompts as of now; the seconds it took."""
        begin = time.monotonic()
        self._task.show(f"measuring after {self._state.step} steps", 0, None)
        kinds.write(student, self._trial, self._destination)  # the file in --out keeps the best weights
        found = results.total(self._evaluator.measure(self._specs[0], self._task.held_out, LOOK_TOKENS))
        self._state.figures.setdefault("live", []).append([self._state.step, round(found.tokens_per_step, 3)])
        self._looked, self._looked_at = self._looked + time.monotonic() - begin, self._state.step
        return time.monotonic() - begin

    def _times(self, student: nn.Module) -> tuple[float, float]:
        """Seconds of a look, and those to keep for the last saving and the table of the held-out prompts. Prompts of
        the user's own, which may be any number, are measured when the time is over."""
        first = self._look(student)
        self._looked = 0.0  # it also compiled: if that counted, a short run would never measure again
        if self._task.evaluation:
            return first, SAVING
        one = (
            self._timed_look(self._specs[0]) if self._device.type == "cuda" else first
        )  # the first one compiled as well
        table = TREES_LONGER * one * len(self._specs) * TABLE_TOKENS / LOOK_TOKENS
        return one, reserved(SAVING + first + table, self._budget.left)

    def _timed_look(self, spec: str) -> float:
        begin = time.monotonic()
        self._evaluator.measure(spec, self._task.held_out, LOOK_TOKENS)
        return time.monotonic() - begin

    def _measure_all(self) -> results.Measured:
        """The table, written as it grows; a run that is to stop ends it after the way that it is at."""
        prompts = self._task.evaluation or self._task.held_out
        measured: dict[str, dict[str, Stats]] = {}
        took = self._state.figures["table_seconds"] = {}
        facts = {"model": self._name, "prompts": len(prompts), "new tokens": TABLE_TOKENS, "steps": self._state.step}
        if self._adapter:
            facts["adapter"] = self._adapter
        for way, spec in kinds.specs(self._job.kind, self._out).items():
            if self._task.stop.is_set():
                break
            self._task.show(f"measuring {way}", 0, None)
            begin = time.monotonic()
            measured[way] = self._evaluator.measure(spec, prompts, TABLE_TOKENS)
            took[way] = round(time.monotonic() - begin, 1)
            kept = results.total(measured[way]).tokens_per_pass
            self._task.note(f"{way}: {kept:.2f} tokens per pass, {len(prompts)} prompts, {took[way]:.0f} s")
            results.write_table(measured, self._out, facts)
        return measured

    # Files.

    def _save(self, student: nn.Module, optimiser: Optimiser) -> None:
        """A checkpoint, and the head as it was best."""
        begin = time.monotonic()
        self._state.seconds = self._budget.spent
        checkpoint.save(self._out, self._state, student, optimiser, self._progress.best)
        with self._progress.best_weights(student):
            kinds.write(student, self._out, self._destination)
        self._saved = time.monotonic()
        self._save_seconds = max(SAVE_SECONDS, SAVING_EVERY * (self._saved - begin))

    def _draw(self, log: LossLog) -> None:
        try:
            from outrider.train.plot import draw
        except ImportError:
            self._task.note("no training.png: matplotlib is not installed (pip install '.[plot]' in a checkout)")
            return
        draw(log.lines(), self._state.figures, self._out / "training.png", self._name)

    def _write_provenance(self, measured: results.Measured) -> None:
        state = self._state
        facts = {
            "job": {
                **as_dict(self._job),
                "model": self._name,
                "adapter": self._adapter,
                "begin": Path(self._job.begin).name,
            },
            "steps": state.step,
            "planned_steps": state.planned,
            "seconds": round(self._budget.spent, 1),
            "interrupted": self._task.stop.is_set(),
            "figures": {**state.figures, "tokens_per_pass": results.figures(measured)},
        }
        results.write_provenance(self._out, self._task.command, self._task.machine, facts)

    @property
    def _specs(self) -> list[str]:
        """The ways in which a head is measured while it learns: the first one from time to time."""
        return list(kinds.specs(self._job.kind, self._trial).values())

    @property
    def _trial(self) -> Path:
        """Where the head lies as it is now, to be measured."""
        return self._out / FOLDER / "now"

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
