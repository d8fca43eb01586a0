"""Keys and values on a CPU in pages, as the kernels read them: sequences share the pages of a common prefix.

The kernels compute every row alike whatever shares its pass, so a page that another sequence has filled holds the bits
that this one would compute. Pages of sequences that have ended are kept within the memory budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.large_pages import PAGE as LARGE, large
from outrider.models.pages import Holder, Pages

SIZE = 32  # tokens of a page, the same number as PAGE in kernels.cpp: a hit leaves fewer than these to be run again
TAKEN = 32 << 20  # bytes of memory that pages are cut from, taken at a time: some large pages of the system, few calls
FLOATS = 32  # bits of a number of a key or value as it is computed
SCALED = 16  # numbers of 8 bits that share a scale, the same number as in kernels.cpp
TILE, BLOCK = 16, 32  # keys of 8 bits that are multiplied together, and their numbers; the same as in kernels.cpp
_COLUMNS = 32  # pages that a sequence's table begins with: about a thousand tokens


@dataclass(eq=False)
class PagedSlot(Holder):
    """One sequence's pages, and the table of their addresses for the kernels."""

    values: int = 0  # times 4 bytes: from the keys of a page to its values; twice as many from a head to the next
    table: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_COLUMNS, np.int64))
    address: int = 0  # of the table

    def __post_init__(self) -> None:
        self.address = self.table.ctypes.data

    @property
    def size(self) -> int:
        """Tokens that its pages have space for."""
        return len(self.pages) * SIZE

    def put(self, place: int, address: int) -> None:
        if place >= len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self.address = self.table.ctypes.data
        self.table[place] = address


class PagedCache(Pages[PagedSlot]):
    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        memory: int,
        ahead: int = 0,
        bits: int = FLOATS,
        large: bool = False,
    ) -> None:
        """`memory`: bytes up to which pages of ended sequences are kept. Running sequences get what they need: how much
        that may be is the scheduler's to decide. `ahead`: tokens after a page that its keys depend on, too. `bits`: of
        a number; 8: each 16 of a row share a scale. `large`: keys have one more block of 32 numbers (kept.h)."""
        self._outer = (layers, kv_heads, 2)
        self.bits, self._width = bits, head_dim if bits == FLOATS else -(-head_dim // BLOCK) * BLOCK  # numbers of a row
        self._key_width = self._width + BLOCK * large  # of a key, and what a value takes in memory as well
        super().__init__(memory // self.page_bytes, SIZE, ahead=ahead)
        # Pages of a block. The keys of one layer and head lie side by side for all of them, and so do the values: a
        # long text is then read in long runs (LOG, 2026-11-17: with each page by itself at half the speed).
        self._each = max(1, min(TAKEN // self.page_bytes, self.count))
        self._blocks: list[Tensor] = []
        self._addresses: list[int] = []  # of the blocks

    @property
    def _run_bytes(self) -> int:
        """Of one page's keys of a layer and head: the rows, then their scales."""
        if self.bits == FLOATS:
            return SIZE * self._width * 4
        return SIZE * (self._key_width + 4 * (self._key_width // SCALED))

    @property
    def page_bytes(self) -> int:
        return math.prod(self._outer) * self._run_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.page_bytes // SIZE

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        """Keep `length` tokens and the nodes of `path` that lie after them, moved together."""
        slot = self._holders.get(id)
        if slot is None:
            return
        assert not path or length >= slot.known * SIZE, "a node lies in a page that others share"
        if path and path[-1] >= len(path):  # nodes are in order: else all of them are where they belong
            self._move(slot, length, path)
        slot.length = min(slot.length, length + len(path))
        if slot.length < slot.known * SIZE:
            self._unshare(slot)

    @torch.inference_mode()  # a pass may have made the blocks in this mode, and only there may they then be written
    def _move(self, slot: PagedSlot, length: int, path: Sequence[int]) -> None:
        for place, node in enumerate(path):  # a node never moves onto one that is still to be moved
            if node != place:
                for to, row in zip(self._row(slot, length + place), self._row(slot, length + node), strict=True):
                    to.copy_(row)

    def page(self, slot: PagedSlot, place: int) -> Tensor:
        """[layers, kv_heads, 2, bytes]: the keys and values of the sequence's page at `place`."""
        return self.content(slot.pages[place])

    def content(self, page: int) -> Tensor:
        block, within = divmod(page, self._each)
        self._reach(block)
        return self._blocks[block][:, :, :, within]

    def _reach(self, block: int) -> None:
        """Memory for the pages of this block, and of those before it."""
        while block >= len(self._blocks):
            self._blocks.append(self._more())
            self._addresses.append(self._blocks[-1].data_ptr())

    def _row(self, slot: PagedSlot, place: int) -> tuple[Tensor, ...]:
        """The parts of a row, as kept.h lays them out (PagedRows)."""
        page, within = self.page(slot, place // SIZE), place % SIZE
        if self.bits == FLOATS:
            return (page.view(torch.float32)[..., within * self._width : (within + 1) * self._width],)
        keys, values, outer = page[:, :, 0], page[:, :, 1], page.shape[:2]
        tile, lane = divmod(within, TILE)
        numbers = keys[..., : SIZE * self._key_width].view(*outer, SIZE // TILE, -1, TILE, 4)
        key_scales = keys[..., SIZE * self._key_width :].view(torch.float32).view(*outer, SIZE // TILE, -1, TILE)
        own = SIZE * self._width
        value = values[..., within * self._width : (within + 1) * self._width]
        groups = self._width // SCALED
        value_scales = values[..., own : own + 4 * SIZE * groups].view(torch.float32)
        value_scales = value_scales[..., within * groups : (within + 1) * groups]
        return numbers[:, :, tile, :, lane], key_scales[:, :, tile, :, lane], value, value_scales

    @torch.inference_mode()
    def _unshare(self, slot: PagedSlot) -> None:
        """It goes on in the middle of what others may share: from there on its pages are its own."""
        whole, rest = divmod(slot.length, SIZE)
        gone, slot.pages, slot.known = slot.pages[whole:], slot.pages[:whole], whole
        slot.name = self.name_of(slot.pages[-1]) if whole else 0
        if rest:
            self._give(slot, self._new())
            self.page(slot, whole).copy_(self.content(gone[0]))
        for page in reversed(gone):
            self._let_go(page)

    def name_of(self, page: int) -> int:
        """A name of its own where it was forgotten: no other text goes on from there."""
        return self._known[self._keys[page]][1] if page in self._keys else next(self._names)

    def _open(self) -> PagedSlot:
        return PagedSlot(values=self._each * self._run_bytes // 4)

    def _put(self, holder: PagedSlot, place: int, page: int) -> None:
        block, within = divmod(page, self._each)
        self._reach(block)
        holder.put(place, self._addresses[block] + within * self._run_bytes)

    def _twice(self, holder: PagedSlot, page: int) -> None:
        """It goes on with the known page, which has the same bits, and lets go of its own."""
        own, holder.pages[holder.known] = holder.pages[holder.known], page
        self._take(page)
        self._put(holder, holder.known, page)
        self._let_go(own)

    def _more(self) -> Tensor:
        shape, size = (*self._outer, self._each, self._run_bytes), self._each * self.page_bytes
        if size < LARGE:
            return torch.zeros(shape, dtype=torch.uint8)
        return large(size)[:size].view(shape)
