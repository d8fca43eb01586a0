"""The loop: capture, loss, step. The losses depend on the data, the seed and the planned steps, never on the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from outrider.train.capture import Teacher
from outrider.train.checkpoint import State
from outrider.train.clock import Clock
from outrider.train.grade import Grader
from outrider.train.log import RECENT, Log
from outrider.train.optimiser import Optimiser, rate
from outrider.train.order import Batch, Order

WARM = 20  # steps until the peak
SETTLED = {"cpu": 20, "cuda": 400}  # steps after which all that is done once is done; the last quarter is timed
SPARE = 0.97  # of the time that is left is planned


class Loop:
    def __init__(self, pupil: Any, teacher: Teacher, order: Order, optimiser: Optimiser, unroll: int) -> None:
        self._grade, self._order, self._optimiser = Grader(pupil, teacher, unroll), order, optimiser
        self._device = teacher.model.device

    def run(self, state: State, log: Log, clock: Clock, reserve: float, pauses: float) -> Iterator[None]:
        """One step each time it is asked, until the planned ones are done or only `reserve` seconds are left.

        `pauses`: seconds that whoever asks will take in between.
        """
        batches, timer = self._order.batches(state.step), _Timer(self._device, state.step)
        while not state.planned or state.step < state.planned:
            if state.step and clock.left <= reserve:
                return
            self._step(next(batches), state, log)
            seconds = 0.0 if state.planned else timer.seconds(state.step)
            if seconds:
                state.planned = state.step + max(1, int(SPARE * (clock.left - reserve - pauses) / seconds))
            timer.pause()
            yield
            timer.go_on()

    def _step(self, batch: Batch, state: State, log: Log) -> None:
        figures = self._grade(batch)
        self._optimiser.step(rate(state.step, state.warm, state.planned))
        log.add(state.step, figures)
        if len(log) >= RECENT:
            log.flush()
        state.step += 1


class _Timer:
    """Seconds of a step, once the first ones, which take longer, are over."""

    def __init__(self, device: torch.device, step: int) -> None:
        self._device, self._until = device, step + SETTLED[device.type]
        self._begun: tuple[int, float] | None = None
        self._paused = 0.0  # since then

    def seconds(self, step: int) -> float:
        """0 until it is known; asked after every step."""
        if self._begun is None:
            if step >= self._until - SETTLED[self._device.type] // 4:
                self._begun, self._paused = (step, self._now()), 0.0
            return 0.0
        before, begun = self._begun
        return (self._now() - begun - self._paused) / (step - before) if step >= self._until else 0.0

    def pause(self) -> None:
        """Others do something else now."""
        if self._begun is not None:
            self._paused -= self._now()

    def go_on(self) -> None:
        if self._begun is not None:
            self._paused += time.monotonic()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
