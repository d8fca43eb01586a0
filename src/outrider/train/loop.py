"""The loop: capture, loss, step. The losses depend on the data, the seed and the planned steps, never on the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from outrider.train.capture import Teacher
from outrider.train.checkpoint import State
from outrider.train.clock import Clock
from outrider.train.graphs import Grader
from outrider.train.log import RECENT, Log
from outrider.train.optimiser import Optimiser, rate
from outrider.train.order import Batch, Order

WARM = 20  # steps until the peak; the second half of them shows how long a step takes
SPARE = 0.97  # of the time that is left is planned


class Loop:
    def __init__(self, pupil: Any, teacher: Teacher, order: Order, optimiser: Optimiser, unroll: int) -> None:
        self._grade, self._order, self._optimiser = Grader(pupil, teacher, unroll), order, optimiser
        self._device = teacher.model.device

    def run(self, state: State, log: Log, clock: Clock, reserve: float, pauses: float) -> Iterator[None]:
        """One step each time it is asked, until the planned ones are done or only `reserve` seconds are left.

        `pauses`: seconds that whoever asks will take in between.
        """
        batches, timer = self._order.batches(state.step), _Timer(self._device)
        while not state.planned or state.step < state.planned:
            if state.step and clock.left <= reserve:
                return
            self._step(next(batches), state, log)
            seconds = 0.0 if state.planned else timer.seconds(state.step, state.warm)
            if seconds:
                state.planned = state.step + max(1, int(SPARE * (clock.left - reserve - pauses) / seconds))
            yield

    def _step(self, batch: Batch, state: State, log: Log) -> None:
        figures = self._grade(batch)
        self._optimiser.step(rate(state.step, state.warm, state.planned))
        log.add(state.step, figures)
        if len(log) >= RECENT:
            log.flush()
        state.step += 1


class _Timer:
    """Seconds of a step, by the second half of the warm-up: the first steps of a process take longer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: tuple[int, float] | None = None

    def seconds(self, step: int, warm: int) -> float:
        """0 until it is known; asked after every step."""
        if self._first is None:
            if step >= warm // 2:
                self._first = step, self._now()
            return 0.0
        before, begun = self._first
        return (self._now() - begun) / (step - before) if step >= max(warm, before + warm // 4) else 0.0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()
