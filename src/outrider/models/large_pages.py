"""Memory in large pages. A pass reads all weights once; with pages of 4 KiB the processor spends about as long on
translating addresses as on reading the data (docs/LOG.md). Linux gives pages of 2 MiB where they are requested before
the first write.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a large page on x86-64 and on most ARM systems
CHUNK = 32 << 20  # bytes requested at a time: matrices of a layer are smaller than a page, so they share a chunk
ALIGN = 64  # bytes: a line of the processor's caches, and what its widest loads want


class Arena:
    """Tensors side by side. A chunk of memory goes back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def copies(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same numbers in large pages."""
        sizes = {name: -(-tensor.nbytes // ALIGN) * ALIGN for name, tensor in tensors.items()}
        with self._lock:
            space = self._take(sum(sizes.values()))
        placed, at = {}, 0
        for name, tensor in tensors.items():
            placed[name] = space[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            placed[name].copy_(tensor)
            at += sizes[name]
        return placed

    def _take(self, size: int) -> Tensor:
        if size > len(self._chunk) - self._used:
            if size > CHUNK:
                return large(size)[:size]
            self._chunk, self._used = large(CHUNK), 0
        self._used += size
        return self._chunk[self._used - size : self._used]


def large(size: int) -> Tensor:
    """At least `size` bytes, all of them 0, in large pages where the system has them."""
    size = -(-size // PAGE) * PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE
    return whole[begin : begin + size]
