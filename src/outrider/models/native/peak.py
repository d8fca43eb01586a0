"""What the processor's arithmetic could do at best, for the kernels' products."""

from __future__ import annotations

import ctypes

from outrider.models.native.library import library

SECONDS = 0.02  # of one measurement: long enough for the clock, short enough to fit between two interruptions
TRIES = 5  # measurements of which the best counts: a moment in which another process ran is no peak


def multiply_adds_per_second(threads: int) -> float | None:
    """Multiply-adds of 8 bits by 8 in a loop on registers; None where the kernels are the general ones."""
    kernels = library()
    kernels.outrider_threads(ctypes.c_int64(threads))
    kernels.outrider_peak.restype = ctypes.c_double
    best = max(kernels.outrider_peak(ctypes.c_double(SECONDS)) for _ in range(TRIES))
    return best or None
