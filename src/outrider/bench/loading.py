"""Workers that load beside each other: how many at once, which memory is each one's, and which are ready.

A worker that loads on a GPU compiles kernels on one core for most of the time, so several take as long as the slowest.
All of them stay loaded, so none may take the share of memory that it would take alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench import machine
from outrider.bench.process import EngineProcess, Missing, WorkerError
from outrider.models.memory import available_memory

GIB = 1 << 30
LOOK = 0.05  # seconds between two looks at those that load: little beside the seconds that loading takes
ALONE = 1 / 4  # of the free memory: what an engine takes for keys and values by itself (build.py)
# Bytes of a process on a GPU beside weights, keys and values: its context, the kernels' workspaces and the graphs. An
# estimate, not measured; what it lacks comes out of the part that FILLED leaves.
PROCESS = 3 * GIB
FILLED = 0.8  # of what weights and processes leave: for keys and values. The rest is for heads and draft models.
LEAST = GIB  # bytes for keys and values of a worker: where that does not fit, loading says so


@dataclass(frozen=True)
class LoadedWorker:
    """How it went with one worker."""

    place: int  # in the order in which they were to be started
    ready: dict[str, Any] | None  # what the worker said; None: it did not load
    why: str  # it did not
    seconds: float  # since its process was started


def load(starts: Sequence[Callable[[], EngineProcess]], at_once: int, timeout: float) -> Iterator[LoadedWorker]:
    """Start workers, `at_once` at a time, and yield each as soon as it has loaded, failed to, or taken `timeout`
    seconds. One that is ready stands still while the others load. Whoever calls ends the workers."""
    waiting, loading = deque(enumerate(starts)), dict[int, tuple[EngineProcess, float]]()
    while waiting or loading:
        while waiting and len(loading) < at_once:
            place, start = waiting.popleft()
            loading[place] = start(), time.monotonic()
        for place, (worker, begin) in list(loading.items()):
            seconds = time.monotonic() - begin
            found = _look(worker, place, seconds, timeout)
            if found is not None:
                del loading[place]
                yield found
        time.sleep(LOOK)


def _look(worker: EngineProcess, place: int, seconds: float, timeout: float) -> LoadedWorker | None:
    """None: it still loads."""
    try:
        ready = worker.ready_by_now()
    except Missing as error:
        return LoadedWorker(place, None, f"not installed: {error}", seconds)
    except WorkerError as error:
        return LoadedWorker(place, None, str(error), seconds)
    if ready is not None:
        return LoadedWorker(place, ready, "", seconds)
    if seconds <= timeout:
        return None
    worker.close()
    return LoadedWorker(place, None, f"not loaded within {timeout:g} s; stopped", seconds)


def at_once(device: str, asked: int) -> int:
    """Workers that load at a time; `asked`: 0 for as many as make sense. On a CPU one: an engine measures there what
    its passes cost while it loads, and others beside it would be measured too."""
    return asked or (1 if device == "cpu" else machine.physical_cores())


def free_memory(device: str) -> tuple[int, int]:
    """Bytes that are free where models are, and all that there are."""
    if device == "cpu":
        free = available_memory()
        return free, free
    import torch

    return torch.cuda.mem_get_info(device)


def weight_bytes(path: Path) -> int:
    """Of a model on a GPU, nearly: folders as their files are, GGUF files in 16 bits."""
    from outrider.models.gguf import GGUFFile

    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return sum(2 * math.prod(tensor.shape) for _, tensor in GGUFFile(path).tensors())


def cache_bytes(free: int, workers: int, weights: int) -> int:
    """For the keys and values of each of some workers that are all loaded, each with its own weights: as much as one
    alone would take, or an equal part of what is left."""
    left = free - workers * (weights + PROCESS)
    return max(LEAST, min(int(free * ALONE), int(left * FILLED) // workers))


def fit(free: int, workers: int, weights: int) -> bool:
    """Whether there is memory for as many workers, as far as one can tell."""
    return workers * (weights + PROCESS + LEAST) <= free
