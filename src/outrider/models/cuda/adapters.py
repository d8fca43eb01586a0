"""Adapters on a GPU: a pool of units that adapters are placed in, and tables that say which rows of a pass are whose.

The pool never moves and the tables are tensors, so a graph that was captured once serves whichever adapters come and
go: nothing is captured again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.core.errors import OutriderError
from outrider.models.adapters.adapter import EMBEDDING, OUTPUT, Adapter, AdapterBase
from outrider.models.adapters.dense import FIELDS, joined
from outrider.models.cuda.batch import FEW_ROWS
from outrider.models.cuda.low_rank import HEADER, PLACES, UNIT, LowRankSum
from outrider.models.cuda.tickets import Tickets

MOST_UNITS = 1024  # of a pool: every pass with adapters sends a table of them, 4 KiB
FEW_TILE, LARGE_TILE = 16, 64  # rows of one adapter that a program takes: the fewest for the matrix units; of prompts


@dataclass(frozen=True, eq=False)
class PlacedAdapter:
    units: tuple[int, ...]  # of the pool, in their order


@dataclass(frozen=True, eq=False)
class _JoinedPool:
    """The units of one joined matrix of every layer."""

    a: Tensor  # [layers, units, matrices, UNIT, inputs]
    b: Tensor  # [layers, units, outputs, UNIT]
    ends: tuple[int, ...]  # the outputs at which each matrix ends


@dataclass(frozen=True)
class _JoinedSizes:
    inputs: int
    ends: tuple[int, ...]

    @property
    def values(self) -> int:
        """Of one unit, in one layer."""
        return UNIT * (len(self.ends) * self.inputs + self.ends[-1])


class AdapterPool:
    """Memory is taken when the first adapter is placed: a model without any pays nothing."""

    def __init__(self, base: AdapterBase, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._base, self._layers, self._dtype, self._device = base, layers, dtype, device
        self._sizes = _joined_sizes(base)
        self._lock = threading.Lock()
        self._joined: dict[str, _JoinedPool] = {}
        self._free: list[int] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.most = 0  # units

    @property
    def used(self) -> bool:
        """Whether an adapter was placed yet."""
        return bool(self._joined)

    @property
    def unit_bytes(self) -> int:
        values = sum(sizes.values for sizes in self._sizes.values())
        return self._layers * values * self._dtype.itemsize

    def reserve(self, budget: int) -> int:
        """For adapters of up to so many bytes; as many as there will be."""
        with self._lock:
            if not self._joined:
                self.most = min(MOST_UNITS, budget // self.unit_bytes)
            return self.most * self.unit_bytes

    def bytes_of(self, adapter: Adapter) -> int:
        if EMBEDDING in adapter.pairs or OUTPUT in adapter.pairs:
            raise OutriderError(
                "LoRA of the embedding or the output matrix is not served on a GPU; write model and adapter out as one "
                "with outrider merge, or serve it on a CPU (--device cpu)"
            )
        rank = max(pair.rank for pair in adapter.pairs.values())
        if rank > PLACES * UNIT:
            raise OutriderError(
                f"a mix of rank {rank} is not served on a GPU, where ranks are at most {PLACES * UNIT}; mix fewer "
                "adapters, or by another strategy than cat"
            )
        return _units_of(adapter) * self.unit_bytes

    def place(self, adapter: Adapter, key: str) -> ReadyAdapter:
        """Any thread may call it while passes run: they do not wait for it, and no pass reads what it writes yet."""
        size, count = self.bytes_of(adapter), _units_of(adapter)
        self.allocate()
        with self._lock:
            if count > len(self._free):
                raise OutriderError(f"an adapter of {count} units finds {len(self._free)} of {self.most} on the GPU")
            units = tuple(sorted(self._free.pop() for _ in range(count)))
        placed = PlacedAdapter(units)
        if self._stream is not None:  # a pass of a request that was cancelled may still read what the units held
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream), torch.inference_mode():
            self._write(adapter, placed)
        if self._stream is not None:
            self._stream.synchronize()
        return ReadyAdapter(key, placed, size)

    def release(self, placed: PlacedAdapter) -> None:
        with self._lock:
            self._free += placed.units

    def joined(self, field: str) -> _JoinedPool:
        return self._joined[field]

    def tickets(self) -> Tickets:
        """For the products of passes that run one after the other."""
        return Tickets(self._layers * len(self._sizes), self._device)

    def product(self, layer: int, field: str) -> int:
        """The number of a product in a pass."""
        return layer * len(self._sizes) + list(self._sizes).index(field)

    @property
    def inner_values(self) -> int:
        """Numbers that the inner values of one row take, at most."""
        return max(len(sizes.ends) for sizes in self._sizes.values()) * PLACES * UNIT

    def allocate(self) -> None:
        """The memory for all adapters, once."""
        with self._lock:
            if not self._joined and self.most:
                self._allocate()

    def _allocate(self) -> None:
        try:
            self._joined = {field: self._pool(sizes) for field, sizes in self._sizes.items()}
        except torch.OutOfMemoryError as error:
            self._joined = {}
            raise OutriderError(
                f"{self.most * self.unit_bytes / (1 << 30):.1f} GiB for adapters do not fit on the GPU beside weights "
                "and cache; lower adapter_memory or the cache memory (--cache-memory)"
            ) from error
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._free = list(range(self.most - 1, -1, -1))

    def _pool(self, sizes: _JoinedSizes) -> _JoinedPool:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(self._layers, self.most, *shape, dtype=self._dtype, device=self._device)

        matrices, outputs = len(sizes.ends), sizes.ends[-1]
        return _JoinedPool(zeros(matrices, UNIT, sizes.inputs), zeros(outputs, UNIT), sizes.ends)

    def _write(self, adapter: Adapter, placed: PlacedAdapter) -> None:
        """Every value of its units: what they held before is gone, and what a rank does not fill is zero."""
        count, where = len(placed.units), torch.tensor(placed.units, device=self._device)
        for layer in range(self._layers):
            pairs = joined(adapter, self._base, layer)
            for field, pool in self._joined.items():
                a = torch.zeros(len(pool.ends), count * UNIT, pool.a.shape[-1])
                b = torch.zeros(pool.ends[-1], count * UNIT)
                for first, pair in pairs.get(field, ()):
                    matrix = next(number for number, end in enumerate(pool.ends) if first < end)
                    a[matrix, : pair.rank] = pair.a
                    b[first : first + len(pair.b), : pair.rank] = pair.scaled
                a = a.view(len(pool.ends), count, UNIT, -1).transpose(0, 1)
                b = b.view(-1, count, UNIT).transpose(0, 1)
                pool.a[layer].index_copy_(0, where, a.to(self._device, self._dtype))
                pool.b[layer].index_copy_(0, where, b.to(self._device, self._dtype))


class PassAdapters:
    """The adapters of the rows of a pass, as the kernels read them; `rows` and the pool decide its sizes."""

    def __init__(self, pool: AdapterPool, rows: int, inner: Tensor, pinned: Tensor, tickets: Tickets) -> None:
        """`inner`: where inner values go. `pinned`: on the host, as large as `size`. `tickets`: of all passes with this
        `inner`."""
        self._pool, self._inner, self._rows, self._tickets = pool, inner, rows, tickets
        self._tile = FEW_TILE if rows <= FEW_ROWS else LARGE_TILE
        self._most, self._tiles = _whole(pool.most), _tiles(rows, self._tile, pool.most)
        self._host = pinned[: self.size(pool, rows)]
        self._device = torch.zeros_like(self._host, device=inner.device)
        self._cut = self._parts(self._device)
        self._sums: dict[tuple[int, str], LowRankSum] = {}

    @classmethod
    def size(cls, pool: AdapterPool, rows: int) -> int:
        """Numbers of its table."""
        tile = FEW_TILE if rows <= FEW_ROWS else LARGE_TILE
        return HEADER + _whole(pool.most) + 4 * _tiles(rows, tile, pool.most) + 3 * _whole(rows)

    def _parts(self, table: Tensor) -> list[Tensor]:
        """Its units, its tiles, of each row its first unit and how many, and the order of its rows."""
        return list(table.split([HEADER + self._most, 4 * self._tiles, *[_whole(self._rows)] * 3]))

    def send(self, adapters: Sequence[ReadyAdapter | None], counts: Sequence[int]) -> None:
        """Of consecutive rows: each adapter, and how many rows have it. The device has read what was sent before."""
        units, tiles, firsts, held, order = (part.numpy() for part in self._parts(self._host))
        self._host.zero_()
        listed: list[int] = []
        begins: dict[PlacedAdapter, int] = {}
        for placed in (adapter.weights for adapter in adapters if adapter is not None):
            if placed not in begins:
                begins[placed] = len(listed)
                listed += placed.units
        units[HEADER : HEADER + len(listed)] = listed
        rows, own = sum(counts), [None if adapter is None else adapter.weights for adapter in adapters]
        firsts[:rows] = np.repeat([0 if placed is None else begins[placed] for placed in own], counts)
        held[:rows] = np.repeat([0 if placed is None else len(placed.units) for placed in own], counts)
        keys = np.where(held > 0, firsts, -1)[: self._rows]
        order[: self._rows] = np.argsort(keys, kind="stable")
        ordered, table, at = keys[order[: self._rows]], tiles.reshape(4, -1), 0
        for placed, begin in begins.items():
            start, end = np.searchsorted(ordered, [begin, begin + 1])
            for first in range(start, end, self._tile):
                table[:, at] = begin, len(placed.units), first, min(self._tile, end - first)
                at += 1
        units[:3] = len(listed), at, max((len(placed.units) for placed in begins), default=0)
        self._device.copy_(self._host, non_blocking=True)

    def sum(self, layer: int, field: str) -> LowRankSum:
        """What the adapters add to one joined matrix."""
        key = layer, field
        if key not in self._sums:
            pool = self._pool.joined(field)
            units, tiles, firsts, counts, order = self._cut
            self._sums[key] = LowRankSum(
                pool.a[layer], pool.b[layer], pool.ends, self._inner, units, firsts, counts, order,
                tiles.view(4, -1), self._tile, self._tickets, self._pool.product(layer, field),
            )  # fmt: skip
        return self._sums[key]


def _joined_sizes(base: AdapterBase) -> dict[str, _JoinedSizes]:
    found: dict[str, _JoinedSizes] = {}
    for name, field in FIELDS.items():
        outputs, inputs = base.shapes[f"model.layers.0.{name}"]
        ends = found[field].ends if field in found else ()
        found[field] = _JoinedSizes(inputs, (*ends, (ends[-1] if ends else 0) + outputs))
    return found


def _units_of(adapter: Adapter) -> int:
    return -(-max(pair.rank for pair in adapter.pairs.values()) // UNIT)


def _whole(count: int) -> int:
    """A multiple of 4: what follows begins at 16 bytes."""
    return -(-count // 4) * 4


def _tiles(rows: int, tile: int, units: int) -> int:
    """Tiles of one adapter's rows that a pass may have: no more than rows; each adapter has one that is not full."""
    return _whole(min(rows, rows // tile + units))
