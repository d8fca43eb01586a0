"""A step's loss and gradients. On a GPU the host would take longer to ask for its thousand kernels than the device to
run them, so a shape of batch that keeps coming becomes a graph."""

from __future__ import annotations

import contextlib
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.lesson import Figures
from outrider.train.capture import Teacher
from outrider.train.order import Batch

OFTEN = 3  # a shape that comes so many times is captured

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
        self._capturing = self._device.type == "cuda"
        self._side: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, batch: Batch) -> Figures:
        shape = (batch.tokens.shape, torch.Size(()) if batch.known is None else batch.known.shape)
        self._seen[shape] += 1
        if self._capturing and shape not in self._graphs and self._seen[shape] >= OFTEN:
            self._try(shape, batch)
        graph = self._graphs.get(shape)
        if graph is None:
            return self._work(batch)
        for name in ("tokens", "mask", "known"):
            getattr(graph.batch, name).copy_(getattr(batch, name), non_blocking=True)
        graph.graph.replay()
        return dict(zip(graph.names, graph.figures.clone().unbind(), strict=True))

    def _work(self, batch: Batch) -> Figures:
        with self._autocast():
            loss, figures = self._pupil.loss(self._teacher.lesson(batch), self._unroll)
        loss.backward()
        return figures

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _try(self, shape: _Shape, batch: Batch) -> None:
        """What cannot be captured, for lack of memory for instance, goes on as it is."""
        try:
            self._graphs[shape] = self._captured(batch)
        except RuntimeError:
            self._capturing = False

    def _captured(self, batch: Batch) -> _Graph:
        assert batch.known is not None
        if self._side is None:
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        mine = Batch(batch.tokens.clone(), batch.mask.clone(), batch.known.clone())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            graph.capture_begin(self._pool)
            try:
                figures = self._work(mine)
                stacked = torch.stack([value.float() for value in figures.values()])
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._side)
        return _Graph(mine, tuple(figures), stacked, graph)
