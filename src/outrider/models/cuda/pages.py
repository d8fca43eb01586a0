"""The pages of a GPU: their table on the host and on the device, and the refusal of more than there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.errors import OutriderError
from outrider.models.pages import Holder, Pages

TRASH = 0  # the page that rows of padding write to


@dataclass(eq=False)
class TableHolder(Holder):
    slot: int = 0  # its row of the table


class PageTable(Pages[TableHolder]):
    def __init__(self, count: int, size: int, slots: int, longest: int, ahead: int = 0) -> None:
        """`count` pages of `size` tokens; at most `slots` sequences of at most `longest` tokens. `ahead`: as Pages."""
        super().__init__(count, size, first=TRASH + 1, ahead=ahead)
        self.table = np.zeros((slots + 1, -(-longest // size) + 1), dtype=np.int32)  # the last row is all trash
        self.changed: set[int] = set()  # rows of the table
        self._slots = list(range(slots - 1, -1, -1))

    @property
    def padding(self) -> int:
        """The slot of rows that belong to no sequence."""
        return len(self.table) - 1

    def reserve(self, holder: TableHolder, count: int) -> None:
        need = self.missing(holder, count)
        if need > self.free_count:
            raise OutriderError(
                f"the cache is full: {need} pages of {self.size} tokens are needed, {self.free_count} free"
            )
        super().reserve(holder, count)

    def take_ahead(self, ids: Sequence[int], count: int) -> list[int] | None:
        """Take pages for `count` more tokens of each sequence; returns their rows of the table, or None if there are
        too few."""
        holders = [self.extend(id, 0) for id in ids]
        if sum(self.missing(holder, count) for holder in holders) > self.free_count:
            return None
        for holder in holders:
            self.reserve(holder, count)
        return [holder.slot for holder in holders]

    def _open(self) -> TableHolder:
        if not self._slots:
            raise OutriderError(f"more than {self.padding} sequences at once; lower max_batch")
        return TableHolder(slot=self._slots.pop())

    def _close(self, holder: TableHolder) -> None:
        self._slots.append(holder.slot)

    def _put(self, holder: TableHolder, place: int, page: int) -> None:
        self.table[holder.slot, place] = page
        self.changed.add(holder.slot)


class DeviceTable:
    """The table where the kernels read it. What the device may still be reading is not written before it has: pages are
    given out on a table of the host's own."""

    def __init__(self, pages: PageTable, device: torch.device) -> None:
        self._pages = pages
        self.table = torch.zeros(pages.table.shape, dtype=torch.int32, device=device)
        self._staged = torch.zeros(pages.table.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows = self._staged.numpy()

    def send(self) -> None:
        """The rows that changed; the copy that was sent before is done."""
        slots = sorted(self._pages.changed)
        if not slots:
            return
        self._rows[slots] = self._pages.table[slots]
        if len(slots) <= 4:
            for slot in slots:
                self.table[slot].copy_(self._staged[slot], non_blocking=True)
        else:
            top = slots[-1] + 1
            self.table[:top].copy_(self._staged[:top], non_blocking=True)
        self._pages.changed.clear()
