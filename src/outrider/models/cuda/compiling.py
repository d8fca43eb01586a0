"""Kernels that are compiled beside each other before any of them runs.

Triton compiles a kernel where it is first launched, and the launch waits. Here work is done once without launching
anything: what it would launch is noted, and what is not compiled yet is compiled by threads. Nine tenths of that time
go to the compiler and ptxas (LOG, 2026-11-18, what first requests met), which are no Python.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

MOST_THREADS = 16  # of which each takes some 100 MB while it compiles
_one_at_a_time = threading.Lock()
_noting: int | None = None  # the thread whose launches are noted

Found = dict[str, JITFunction]  # by all that a kernel is to be compiled for, as Triton writes it: the kernel


def is_noting() -> bool:
    """Whether what this thread launches does not run now, so that nothing may be captured, and nothing counts."""
    return _noting == threading.get_ident()


def compile_first(work: Callable[[], None], device: torch.device) -> None:
    """Compile all kernels that `work` launches. It is done without them, so it must not depend on what they write."""
    if device.type != "cuda":
        return
    with _one_at_a_time:
        found: Found = {}
        with _noted(found):
            work()

        def compiled(each: tuple[str, JITFunction]) -> None:
            with suppress(Exception):  # its launch will compile it once more, and tell
                torch.cuda.set_device(device)  # of this thread
                each[1].preload(each[0])

        with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(compiled, found.items()))


@contextmanager
def _noted(found: Found) -> Iterator[None]:
    """Until the end this thread launches nothing; `found` has the kernels that are not compiled yet."""
    global _noting
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def noted_run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or is_noting(), **options)

    def noted(*, key: Any, fn: Any, compile: Any, **rest: Any) -> bool | None:
        """Called for a kernel that is not compiled; True: it is not to be."""
        if not is_noting():
            return None if hook is None else hook(key=key, fn=fn, compile=compile, **rest)
        found[compile["specialization_data"]] = fn.jit_function
        return True

    JITFunction.run, knobs.runtime.jit_cache_hook, _noting = noted_run, noted, threading.get_ident()
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook, _noting = run, hook, None
