"""A step's loss and gradients; on a GPU a shape of batch that keeps coming becomes a graph."""

from __future__ import annotations

import contextlib
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.train import kinds
from outrider.train.capture import Teacher
from outrider.train.graphs import Recorder
from outrider.train.objective import Figures
from outrider.train.order import Batch

OFTEN = 3  # a shape that comes so many times is recorded

_Shape = tuple[torch.Size, torch.Size]


@dataclass(frozen=True, eq=False)
class _Graph:
    batch: Batch  # read by it
    names: tuple[str, ...]
    figures: Tensor  # [names] written by it
    graph: torch.cuda.CUDAGraph


class Grader:
    """Adds a batch's gradients to those of the pupil, which must not be None."""

    def __init__(self, pupil: Any, teacher: Teacher, unroll: int) -> None:
        self._pupil, self._teacher, self._unroll = pupil, teacher, unroll
        self._device = teacher.model.device
        self._seen: Counter[_Shape] = Counter()
        self._graphs: dict[_Shape, _Graph] = {}
        self._recorder = Recorder() if self._device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Figures:
        shape = (batch.tokens.shape, torch.Size(()) if batch.known is None else batch.known.shape)
        self._seen[shape] += 1
        if self._recorder is not None and shape not in self._graphs and self._seen[shape] >= OFTEN:
            self._try(self._recorder, shape, batch)
        graph = self._graphs.get(shape)
        if graph is None:
            return self._work(batch)
        for name in ("tokens", "mask", "known"):
            getattr(graph.batch, name).copy_(getattr(batch, name), non_blocking=True)
        graph.graph.replay()
        return dict(zip(graph.names, graph.figures.clone().unbind(), strict=True))

    def _work(self, batch: Batch) -> Figures:
        with self._autocast():
            loss, figures = kinds.loss(self._pupil, self._teacher.lesson(batch), self._unroll)
        loss.backward()
        return figures

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _try(self, recorder: Recorder, shape: _Shape, batch: Batch) -> None:
        """What cannot be recorded, for lack of memory for instance, goes on as it is."""
        assert batch.known is not None
        mine = Batch(batch.tokens.clone(), batch.mask.clone(), batch.known.clone())

        def work() -> tuple[tuple[str, ...], Tensor]:
            figures = self._work(mine)
            return tuple(figures), torch.stack([value.float() for value in figures.values()])

        try:
            graph, (names, stacked) = recorder.record(work)
            self._graphs[shape] = _Graph(mine, names, stacked, graph)
        except RuntimeError:
            self._recorder = None
