"""Where keys and values of dense models lie: one growing buffer per sequence, so that torch reads it in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.large_pages import PAGE, large

EXTRA = 192  # tokens that a new buffer holds beyond the given ones: a short answer fits
SPARE = 2  # buffers kept of ended sequences for the next ones: to allocate one takes longer than a pass


@dataclass(eq=False)
class Slot:
    """One sequence's keys and values, [layers, kv_heads, size, head_dim] each."""

    keys: Tensor
    values: Tensor
    length: int = 0  # tokens and nodes it holds

    @property
    def size(self) -> int:
        return self.keys.shape[2]


class Cache:
    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._slots: dict[int, Slot] = {}
        self._spare: list[Slot] = []  # the last ones last

    @property
    def bytes_per_token(self) -> int:
        layers, kv_heads, head_dim = self._shape
        return 2 * layers * kv_heads * head_dim * self._dtype.itemsize

    def length(self, id: int) -> int:
        slot = self._slots.get(id)
        return slot.length if slot else 0

    def extend(self, id: int, count: int) -> Slot:
        """The sequence's slot, with space for `count` more tokens, which it now counts as held."""
        slot = self._slots.get(id)
        if slot is None:
            slot = self._slots[id] = self._new(count + EXTRA)
        need = slot.length + count
        if need > slot.size:
            bigger = self._new(max(need + EXTRA, 2 * slot.size))
            bigger.keys[:, :, : slot.length] = slot.keys[:, :, : slot.length]
            bigger.values[:, :, : slot.length] = slot.values[:, :, : slot.length]
            bigger.length = slot.length
            self._keep(slot)
            slot = self._slots[id] = bigger
        slot.length = need
        return slot

    @torch.inference_mode()  # a pass made the buffers in this mode, and only there may they be written
    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        """Keep `length` tokens and the nodes of `path` that lie after them, moved together."""
        slot = self._slots.get(id)
        if slot is None:
            return
        kept = length + len(path)
        if any(node != place for place, node in enumerate(path)):
            # indexing copies before it writes, so a move onto a place that is still to be read is safe
            nodes = torch.tensor(path, device=self._device) + length
            slot.keys[:, :, length:kept] = slot.keys[:, :, nodes]
            slot.values[:, :, length:kept] = slot.values[:, :, nodes]
        slot.length = min(slot.length, kept)

    def free(self, id: int) -> None:
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._keep(slot)

    def _keep(self, slot: Slot) -> None:
        if self._device.type == "cpu" and slot.keys.nbytes >= PAGE:
            self._spare = [*self._spare, slot][-SPARE:]

    def _new(self, size: int) -> Slot:
        fitting = [slot for slot in self._spare if size <= slot.size <= 4 * size]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.size)
            self._spare.remove(slot)
            slot.length = 0
            slot.keys.zero_()  # masked attention multiplies what lies past the end by 0: it must not be a NaN
            slot.values.zero_()
            return slot
        layers, kv_heads, head_dim = self._shape
        shape = (layers, kv_heads, size, head_dim)
        return Slot(self._zeros(shape), self._zeros(shape))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or size < PAGE:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        return large(size)[:size].view(self._dtype).view(shape)
