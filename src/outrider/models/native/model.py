"""A packed model whose passes are one call of the kernels each: from tokens to logits and the likeliest tokens.

Every pass empties the processor's caches, so what is done between two of them takes many times as long as in a loop
(LOG, 2026-11-20). Hence no tensors here but those that are given away, and few calls.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.models.base import Feed, Output
from outrider.models.native import structs
from outrider.models.native.library import library
from outrider.models.native.packed import Packed
from outrider.models.native.stack import BYTES, NativeStack
from outrider.models.paged_cache import PagedCache
from outrider.models.stack import places

# The part of a PassStruct that changes from pass to pass, and where it begins: written in one call, for each field that
# is set by itself is looked up in its class.
VARYING, FIXED = struct.Struct("18q"), structs.PassStruct.spans.offset
# Rows of the memory for logits that is used again and again; that of a pass with more goes after the next pass
KEPT = 16


class NativeOutput(Output):
    """Logits as the kernels wrote them, which are a tensor only when somebody asks for it."""

    def __init__(self, logits: npt.NDArray[np.float32], rows: slice, hidden: Tensor | None, best: list[int]) -> None:
        self._numbers, self._rows, self.hidden, self.best = logits, rows, hidden, best

    @functools.cached_property
    def logits(self) -> Tensor:
        return torch.from_numpy(self._numbers[self._rows])


class NativeModel:
    def __init__(self, stack: NativeStack, embedding: Packed, output: Packed, norm: Tensor) -> None:
        """`norm`: before the output matrix."""
        self._stack, self._output, self._keep = stack, output, (embedding, norm)
        self._pass = structs.PassStruct(
            shape=ctypes.addressof(stack.shape),
            layers=ctypes.addressof(stack.structs),
            embedding=ctypes.addressof(embedding.joint.parts[0]),
            output=ctypes.addressof(output.joint),
            norm=norm.data_ptr(),
        )
        self._address = ctypes.c_void_p(ctypes.addressof(self._pass))
        self._run = library().outrider_pass
        self._x = torch.empty(0)  # of the rows of a pass
        self._best = (ctypes.c_int64 * 0)()
        self._logits = self._new_logits(KEPT)
        self._own = self._holders()  # the number of references to it where nobody else has it
        self._turns: tuple[Tensor, Tensor] | None = None  # the tables of the last pass
        self._turned = 0, 0  # where they are
        self._places = 0, 0, 0  # of the states of all rows, the logits and the likeliest tokens

    def forward(
        self, feeds: Sequence[Feed], cache: PagedCache, turns: tuple[Tensor, Tensor], wanted: Sequence[int]
    ) -> list[Output]:
        """`turns`: cos and sin of all positions."""
        stack = self._stack
        tokens: list[int] = []
        spans: list[int] = []
        judged: list[int] = []
        adapted: list[tuple[ReadyAdapter, slice]] = []
        longest, chains = 0, True
        for feed in feeds:
            first, nodes = len(tokens), feed.draft.tokens
            tokens += feed.tokens
            if nodes:
                tokens += nodes
                chains = chains and feed.draft.is_chain
            rows = len(tokens) - first
            slot = cache.extend(feed.id, rows)
            spans += stack.numbers_of(slot, slot.length - rows, first, rows)
            judged.append(1 + len(nodes))
            longest = max(longest, slot.length)
            if feed.adapter is not None:
                adapted.append((feed.adapter, slice(first, first + rows)))
        rows, count, threads = len(tokens), sum(judged), torch.get_num_threads()
        work = stack.workspace(rows, longest, threads)
        numbers, order = array("q", [*tokens, *judged, *spans]), None if chains else _places(feeds, cache)
        at, layers = numbers.buffer_info()[0], array("i", wanted)
        hidden = None
        if wanted:
            assert 0 <= min(wanted) <= max(wanted) < len(stack.layers)
            hidden = torch.empty(rows, len(wanted), stack.config.hidden_size)
        adapters = stack.adapters(adapted, rows)
        if self._turns is not turns or len(self._x) < rows or len(self._best) < count:
            self._grow(turns, rows, count)
        logits = self._logits_of(count)
        VARYING.pack_into(
            self._pass,
            FIXED,
            at + BYTES * (rows + len(judged)),
            len(judged),
            rows,
            at,
            *self._turned,
            0 if order is None else order[0].buffer_info()[0],
            0 if order is None else order[1].buffer_info()[0],
            layers.buffer_info()[0],
            len(wanted),
            0 if hidden is None else hidden.data_ptr(),
            at + BYTES * rows,
            *self._places,
            ctypes.addressof(work.struct),
            0 if adapters is None else ctypes.addressof(adapters),
            threads,
        )
        if (there := self._run(self._address)) < rows:
            raise IndexError(f"token {tokens[there]} of a vocabulary of {self._output.outputs}")
        best = self._best[:count]
        if len(feeds) == 1:
            return [NativeOutput(logits, slice(count), hidden, best)]
        return _split(feeds, judged, logits, hidden, best)

    def _logits_of(self, count: int) -> npt.NDArray[np.float32]:
        """Memory for so many rows: that of the pass before, unless somebody still has logits of it."""
        if count > KEPT or len(self._logits) > KEPT or self._holders() > self._own:
            self._logits = self._new_logits(max(count, KEPT))
            self._place()
        return self._logits

    def _holders(self) -> int:
        return sys.getrefcount(self._logits)

    def _new_logits(self, rows: int) -> npt.NDArray[np.float32]:
        return np.empty((rows, self._output.outputs), np.float32)

    def _grow(self, turns: tuple[Tensor, Tensor], rows: int, count: int) -> None:
        """Buffers that are large enough, and where they are."""
        self._turns, self._turned = turns, (turns[0].data_ptr(), turns[1].data_ptr())
        if len(self._x) < rows:
            self._x = torch.empty(rows, self._stack.config.hidden_size)
        if len(self._best) < count:
            self._best = (ctypes.c_int64 * count)()
        self._place()

    def _place(self) -> None:
        self._places = self._x.data_ptr(), self._logits.ctypes.data, ctypes.addressof(self._best)


def _places(feeds: Sequence[Feed], cache: PagedCache) -> tuple[array[int], array[int]]:
    """Positions and parents of all rows, which the cache has counted already."""
    positions, parents = array("i"), array("i")
    for feed in feeds:
        own, above = places(feed, cache.length(feed.id) - len(feed.tokens) - len(feed.draft))
        positions.extend(own)
        parents.extend(above)
    return positions, parents


def _split(
    feeds: Sequence[Feed],
    judged: Sequence[int],
    logits: npt.NDArray[np.float32],
    hidden: Tensor | None,
    best: Sequence[int],
) -> list[Output]:
    """Each feed's part of what a pass gave."""
    outputs: list[Output] = []
    row = judged_row = 0
    for feed, count in zip(feeds, judged, strict=True):
        end, judged_end = row + len(feed.tokens) + count - 1, judged_row + count
        states = None if hidden is None else hidden[row:end]
        outputs.append(NativeOutput(logits, slice(judged_row, judged_end), states, [*best[judged_row:judged_end]]))
        row, judged_row = end, judged_end
    return outputs
