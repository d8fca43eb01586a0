"""What a GPU can do at best: bytes copied and products computed in a second. Measured, not read off a data sheet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from outrider.models.llama import Weights

COPIED = 1 << 32  # bytes of a copy: far more than any cache holds
SIDE = 8192  # rows and columns of the matrices: enough to keep every multiprocessor busy


@dataclass(frozen=True)
class GpuPeaks:
    name: str
    memory_gib: float
    copy_tb_s: float  # bytes read and written
    matrix_tflop_s: float  # bfloat16


@runtime_checkable
class OnDevice(Protocol):
    """A model whose passes run on a device of their own, and can be measured there."""

    weights: Weights
    device: torch.device
    on_pass: Callable[[], None] | None  # called before and after each pass

    def again(self) -> None:
        """The last pass once more, which changes nothing."""
        ...


class WallEvent:
    """A moment by the host's clock, where there is no device: kernels are interpreted, and done when they return."""

    def __init__(self) -> None:
        self._when = 0.0

    def record(self) -> None:
        self._when = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: WallEvent) -> float:
        """Milliseconds, as torch's events have it."""
        return 1e3 * (end._when - self._when)


def moment(device: torch.device) -> Any:
    """An event with a time."""
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else WallEvent()


def settle(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device) -> GpuPeaks:
    about = torch.cuda.get_device_properties(device)
    return GpuPeaks(about.name, about.total_memory / 2**30, _copy(device), _product(device))


def _copy(device: torch.device) -> float:
    size = min(COPIED, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / device_ms(lambda: target.copy_(source), device) / 1e9


def _product(device: torch.device) -> float:
    a, b = (torch.randn(SIDE, SIDE, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / device_ms(lambda: a @ b, device) / 1e9


def device_ms(work: Callable[[], object], device: torch.device, times: int = 10, rounds: int = 5) -> float:
    """The device's own time for `work`, once it is warm: the median of rounds."""
    for _ in range(3):
        work()
    took = []
    for _ in range(rounds):
        begin, end = moment(device), moment(device)
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / times)
    return statistics.median(took)


def pass_bytes(model: OnDevice) -> int:
    """Of weights that every pass reads; of the embedding it reads only rows."""
    layers = model.weights.stack.layers
    parts: list[Any] = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(part.weight.nbytes for part in (*parts, model.weights.head))


def pass_ms(model: OnDevice) -> float:
    """The device's own time for the pass that ran last."""
    return device_ms(model.again, model.device)


@contextmanager
def timed(model: OnDevice) -> Iterator[list[float]]:
    """When it is left, the list has the milliseconds that the device took for each pass inside."""
    took: list[float] = []
    marks: list[Any] = []

    def mark() -> None:
        marks.append(moment(model.device))
        marks[-1].record()

    model.on_pass = mark
    try:
        yield took
    finally:
        model.on_pass = None
        settle(model.device)
        took += [begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2], strict=True)]
