"""Recognises failures of a pass from which the process cannot recover."""

from __future__ import annotations

import torch

REPEATS = 3  # passes in a row that run out of memory: by then what was freed in between does not help
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Also where the failure was put into words for the user."""
    if error.__cause__ is not None and out_of_memory(error.__cause__):
        return True
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def device_lost(error: BaseException) -> bool:
    """CUDA keeps such an error: every later call of the process raises it again."""
    if out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


class FaultCounter:
    """Counts the failed passes that come one after the other."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def succeeded(self) -> None:
        self._in_a_row = 0

    def failed(self, error: BaseException) -> bool:
        """Whether the process cannot recover."""
        self._in_a_row = self._in_a_row + 1 if out_of_memory(error) else 0
        return device_lost(error) or self._in_a_row >= REPEATS
