"""The loop: states of the target, loss, step; and the losses as lines of a file.

The losses depend on the data, the seed and the planned steps, never on the time.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.train.checkpoint import TrainingState
from outrider.train.data.batches import GrowingOrder, TextBatch
from outrider.train.data.corpus import FOLDER
from outrider.train.job import TimeBudget
from outrider.train.objective import Comparison, Figures
from outrider.train.optimiser import Optimiser, rate
from outrider.train.step import GradientStep
from outrider.train.teacher import Teacher

WARM_UP = 20  # steps until the rate reaches its peak; a run with few planned steps takes a tenth of them
SETTLED = {"cpu": 20, "cuda": 400}  # steps after which compiling and recording are over; the last quarter is timed
SETTLED_SHARE = 0.1  # of the time: after that they are over, so that short runs have a plan as well
TIMED = 5  # steps whose mean is taken then, at least
PLANNED_SHARE = 0.97  # share of the time left that is planned: steps vary a little
# Times in a run that the plan is checked, by the time of the steps since the last one with all that lay between them: a
# GPU that others use, too, gets slower, and a run that ends before its last step ends with a rate that has not fallen.
CHECKS, FEWEST_CHECKED = 10, 200  # steps, at least: fewer say little
LATE, EARLY = 1.02, 0.9  # times the time left that the planned steps may take before as many are planned as fit
LOG = "log.jsonl"
RECENT = 50  # steps whose mean is shown; also how many wait on the device before they are written


class TrainingLoop:
    def __init__(
        self, student: Any, teacher: Teacher, order: GrowingOrder, optimiser: Optimiser, how: Comparison
    ) -> None:
        self._gradients, self._order, self._optimiser = GradientStep(student, teacher, how), order, optimiser
        self._device = teacher.model.device
        self.seconds = 0.0  # of a step; 0: not known yet
        self.later = 0.0  # seconds of the time left that are for texts which are not written yet
        self._mark = 0, 0.0  # step and time since which the plan is checked
        self._by_time = False  # whether the time decides how many steps there are

    def run(
        self, state: TrainingState, log: LossLog, budget: TimeBudget, reserve: float, pauses: float
    ) -> Iterator[None]:
        """One step each time it is asked, until the planned ones are done or only `reserve` seconds are left.

        `pauses`: seconds that the caller will take in between.
        """
        timer = _StepTimer(self._device, state.step, SETTLED_SHARE * budget.limit)
        self._mark = state.step, time.monotonic()
        while not state.planned or state.step < state.planned:
            if state.step and budget.left <= reserve:
                return
            self._step(self._order.batch(state.step), state, log)
            self.seconds = self.seconds or timer.seconds(state.step)
            if self.seconds and not state.planned:
                self.plan(state, budget.left - reserve - pauses)
            elif self.seconds and state.step - self._mark[0] >= max(FEWEST_CHECKED, state.planned // CHECKS):
                self._check(state, budget.left - reserve - self.later)
            timer.pause()
            yield
            timer.go_on()

    def plan(self, state: TrainingState, seconds: float) -> None:
        """As many steps as fit into that time from now on."""
        state.planned = state.step + max(1, int(PLANNED_SHARE * seconds / self.seconds))
        self._by_time, self._mark = True, (state.step, time.monotonic())

    def _check(self, state: TrainingState, seconds: float) -> None:
        """Plan anew where the planned steps no longer fit into that time, or would leave much of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        (before, begun), now = self._mark, time.monotonic()
        self._mark, each = (state.step, now), (now - begun) / (state.step - before)
        needed = each * (state.planned - state.step)
        if needed > LATE * seconds or (self._by_time and needed < EARLY * seconds):
            state.planned = state.step + max(1, int(seconds / each))

    def _step(self, batch: TextBatch, state: TrainingState, log: LossLog) -> None:
        try:
            figures = self._gradients(batch)
        except torch.OutOfMemoryError as error:
            raise OutriderError(
                f"a step of {batch.tokens.numel():,} tokens does not fit into the device's memory; free some and go on "
                "with --resume, or begin anew with smaller --batch-tokens"
            ) from error
        self._optimiser.step(rate(state.step, state.warm, state.planned))
        if len(log) >= RECENT:  # before the new one: what is measured after this step belongs on its line
            log.flush()
        log.add(state.step, figures)
        state.step += 1


class _StepTimer:
    """Seconds of a step, once the first steps, which take longer, are over."""

    def __init__(self, device: torch.device, step: int, seconds: float) -> None:
        """`seconds` after which they count as over, however few there were."""
        self._device, self._until, self._seconds = device, step + SETTLED[device.type], seconds
        self._made = time.monotonic()
        self._begun: tuple[int, float] | None = None
        self._paused = 0.0  # since then

    def seconds(self, step: int) -> float:
        """0 until it is known; asked after every step."""
        waited = time.monotonic() - self._made
        if self._begun is None:
            if step >= self._until - SETTLED[self._device.type] // 4 or waited >= 0.75 * self._seconds:
                self._begun, self._paused = (step, self._now()), 0.0
            return 0.0
        before, begun = self._begun
        over = step >= self._until or (waited >= self._seconds and step >= before + TIMED)
        return (self._now() - begun - self._paused) / (step - before) if over else 0.0

    def pause(self) -> None:
        """The caller does something else now."""
        if self._begun is not None:
            self._paused -= self._now()

    def go_on(self) -> None:
        if self._begun is not None:
            self._paused += time.monotonic()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


class LossLog:
    """One line per step. Figures wait on the device until some steps have gathered."""

    def __init__(self, out: Path, step: int) -> None:
        """Lines that a killed run wrote after its checkpoint are dropped: those steps come again."""
        self._path = out / FOLDER / LOG
        kept = [line for line in self._lines() if json.loads(line)["step"] < step]
        self._path.write_text("".join(f"{line}\n" for line in kept))
        self._waiting: list[tuple[int, list[str], Tensor]] = []
        self._held: dict[int, dict[str, float]] = {}
        self.last_held_out: dict[str, float] = {}
        self._recent: deque[dict[str, float]] = deque((json.loads(line) for line in kept[-RECENT:]), RECENT)

    def _lines(self) -> list[str]:
        """A kill may have cut the last line."""
        if not self._path.is_file():
            return []
        return [line for line in self._path.read_text().splitlines() if line.endswith("}")]

    def add(self, step: int, figures: Figures) -> None:
        self._waiting.append((step, list(figures), torch.stack([value.float() for value in figures.values()])))

    def held_out(self, step: int, figures: dict[str, float]) -> None:
        """What was measured on held-out texts after that step, which is not written yet."""
        if figures:
            self._held[step] = {f"held_{name}": value for name, value in figures.items()}
            self.last_held_out = figures

    def __len__(self) -> int:
        return len(self._waiting)

    def flush(self) -> None:
        """Reading the figures waits for the device."""
        lines = [
            {"step": step, **dict(zip(names, values.tolist(), strict=True)), **self._held.pop(step, {})}
            for step, names, values in self._waiting
        ]
        self._waiting.clear()
        self._recent.extend(lines)
        try:
            with open(self._path, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise OutriderError(f"cannot write {self._path} ({error.strerror}); make space, then --resume") from error

    def recent(self, steps: int = RECENT) -> dict[str, float]:
        """Means over the last steps, as far as they are written."""
        lines = list(self._recent)[-steps:]
        names = [name for name in (lines[-1] if lines else ()) if name != "step" and not name.startswith("held_")]
        return {name: sum(line[name] for line in lines if name in line) / len(lines) for name in names}

    def lines(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self._lines()]

    def curve(self, points: int = 20) -> list[list[float]]:
        """[step, loss] at about this many steps, each the mean since the one before."""
        lines = self.lines()
        width = max(1, -(-len(lines) // points))
        parts = [lines[i : i + width] for i in range(0, len(lines), width)]
        return [[part[-1]["step"], round(sum(line["loss"] for line in part) / len(part), 4)] for part in parts]
