"""The memory of the machine: how much of it is free, and what goes back to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path


def return_heap() -> None:
    """Heap that was freed (after loading, say) goes back to the system; the C library would keep it resident."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc has the call
        ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int:
    """Bytes that can be taken without pushing others out: of the machine, or of the container if it has less."""
    free = (
        _number_in("/proc/meminfo", "MemAvailable:") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2048
    )
    most, used = _number_in("/sys/fs/cgroup/memory.max"), _number_in("/sys/fs/cgroup/memory.current")
    return free * 1024 if most is None or used is None else min(free * 1024, max(most - used, 0))


def _number_in(path: str, word: str = "") -> int | None:
    """The number after a word in a file of the kernel's; None where there is none."""
    try:
        found = re.search(rf"{word}\s*(\d+)", Path(path).read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
