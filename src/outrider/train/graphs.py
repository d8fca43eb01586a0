"""Work of many small kernels as one CUDA graph: the host would take longer to ask for them than the device to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Recorder:
    """What it records shares one pool of memory: graphs run one after the other and leave results there, no more."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """`work`, not run but recorded, and where its result will lie. A RuntimeError where that cannot be done."""
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
