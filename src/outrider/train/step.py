"""A step's loss and gradients; on a GPU a shape of batch that keeps coming becomes a CUDA graph."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.train import kinds
from outrider.train.data.batches import TextBatch
from outrider.train.objective import Comparison, Figures
from outrider.train.teacher import Teacher

RECORD_AT = 3  # times a shape must come before it is recorded: rare shapes are not worth the memory

T = TypeVar("T")

_Shape = tuple[torch.Size, torch.Size]


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Students have float32 weights and compute in bfloat16 on a GPU."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


def loss_of(student: Any, teacher: Teacher, batch: TextBatch, how: Comparison) -> tuple[Tensor, Figures]:
    return kinds.loss(student, teacher.read(batch), how)


class GraphRecorder:
    """Records work of many small kernels, which the host takes longer to launch than the device to run, as one graph.

    Its graphs share one pool of memory: they run one after the other and leave nothing there but results.
    """

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """`work`, not run but recorded, and where its result will lie. A RuntimeError if it cannot be recorded."""
        if self._side is None:
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side):
            graph.capture_begin(self._pool)
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._side)
        return graph, result


@dataclass(frozen=True, eq=False)
class _StepGraph:
    batch: TextBatch  # read by it
    names: tuple[str, ...]
    figures: Tensor  # [names] written by it
    graph: torch.cuda.CUDAGraph


class GradientStep:
    """Adds a batch's gradients to those of the student, which must not be None."""

    def __init__(self, student: Any, teacher: Teacher, how: Comparison) -> None:
        self._student, self._teacher, self._how = student, teacher, how
        self._device = teacher.model.device
        self._seen: Counter[_Shape] = Counter()
        self._graphs: dict[_Shape, _StepGraph] = {}
        self._recorder = GraphRecorder() if self._device.type == "cuda" else None

    def __call__(self, batch: TextBatch) -> Figures:
        shape = (batch.tokens.shape, torch.Size(()) if batch.known is None else batch.known.shape)
        self._seen[shape] += 1
        if self._recorder is not None and shape not in self._graphs and self._seen[shape] >= RECORD_AT:
            self._record(self._recorder, shape, batch)
        graph = self._graphs.get(shape)
        if graph is None:
            return self._gradients(batch)
        for name in ("tokens", "mask", "known"):
            getattr(graph.batch, name).copy_(getattr(batch, name), non_blocking=True)
        graph.graph.replay()
        return dict(zip(graph.names, graph.figures.clone().unbind(), strict=True))

    def _gradients(self, batch: TextBatch) -> Figures:
        with autocast(self._device):
            loss, figures = loss_of(self._student, self._teacher, batch, self._how)
        loss.backward()
        return figures

    def _record(self, recorder: GraphRecorder, shape: _Shape, batch: TextBatch) -> None:
        """Where it cannot be recorded, for lack of memory for instance, this shape and all new ones run as they are."""
        assert batch.known is not None
        mine = TextBatch(batch.tokens.clone(), batch.mask.clone(), batch.known.clone())

        def work() -> tuple[tuple[str, ...], Tensor]:
            figures = self._gradients(mine)
            return tuple(figures), torch.stack([value.float() for value in figures.values()])

        try:
            graph, (names, stacked) = recorder.record(work)
            self._graphs[shape] = _StepGraph(mine, names, stacked, graph)
        except RuntimeError:
            self._recorder = None
