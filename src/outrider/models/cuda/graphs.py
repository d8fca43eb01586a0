"""Passes of one shape: their buffers, and their graph once they have one.

A pass reads lengths, pages and masks as tensors, so every pass of a shape is the same kernels over the same buffers.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models.cuda import kernels
from outrider.models.cuda.adapters import AdapterPool, PassAdapters
from outrider.models.cuda.attention import Attention, PartSums, chunk_keys
from outrider.models.cuda.batch import FEW_ROWS, NODES, Batch, Field
from outrider.models.cuda.compiling import is_noting
from outrider.models.cuda.product import Workspace
from outrider.models.llama import LlamaConfig

ROWS = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_ROWS = ROWS[-1]  # of one graph; longer passes run kernel by kernel
LARGE = 1024  # longer passes have a multiple of this many rows, so that buffers come in few sizes
SHORTEST = 256  # tokens: passes over sequences up to this long share a graph, then up to twice as long, and so on
PACKED = 8  # rows of a block in passes that are mostly prompts: few programs then have nothing to do
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """What a graph is made for."""

    rows: int
    blocks: int  # of rows for the attention
    longest: int  # sequence
    tile: int  # query rows times heads that a program of the attention takes
    layers: tuple[int, ...] = ()  # hidden states that are kept
    adapted: bool = False  # whether rows may have adapters


def shape_of(batch: Batch, longest: int, layers: Sequence[int], context: int, adapted: bool = False) -> Shape:
    """The shape that serves a pass over sequences of up to `longest` tokens."""
    fitting = fitting_rows(batch.rows)
    packed = -(-fitting // PACKED)
    blocks = packed if fitting > FEW_ROWS and len(batch.spans) <= packed else fitting
    return Shape(fitting, blocks, reach(longest, context), batch.tile, tuple(layers), adapted)


def fitting_rows(rows: int) -> int:
    """Of the pass that serves one of `rows` rows."""
    return ROWS[bisect_left(ROWS, rows)] if rows <= MOST_ROWS else -(-rows // LARGE) * LARGE


def prompt_rows(most: int) -> list[int]:
    """The rows of the passes that serve prompts: more than a few rows, and up to `most` of them."""
    last = fitting_rows(most)
    return [rows for rows in (*ROWS, *range(MOST_ROWS + LARGE, last + 1, LARGE)) if FEW_ROWS < rows <= last]


def reach(longest: int, context: int) -> int:
    """For how long sequences a pass is made that has one of `longest` tokens."""
    size = SHORTEST
    while size < longest:
        size *= 2
    return min(size, max(SHORTEST, context + NODES))


class Buffers:
    """Where passes of up to `rows` rows work."""

    def __init__(self, config: LlamaConfig, rows: int, widest: int, dtype: torch.dtype, device: torch.device) -> None:
        few = min(rows, FEW_ROWS)
        self.work = Workspace(rows, config.hidden_size, widest, dtype, device)
        self.meta = torch.zeros(len(Field) * rows, dtype=torch.int32, device=device)
        self.x = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.logits = torch.empty(few, config.vocab_size, dtype=torch.float32, device=device)
        self.best = torch.empty(few, dtype=torch.int64, device=device)
        self.best_parts = kernels.best_workspace(self.logits)
        self._kept: dict[int, Tensor] = {}

    def kept(self, layers: Sequence[int]) -> Tensor:
        """[rows, layers, hidden]"""
        count = len(layers)
        if count not in self._kept:
            rows, size = self.x.shape
            self._kept[count] = torch.empty(rows, count, size, dtype=self.x.dtype, device=self.x.device)
        return self._kept[count]


@dataclass(eq=False)
class DevicePass:
    """A pass of one shape."""

    meta: Tensor  # [fields, rows] int32
    staging: Tensor  # the same on the host
    fields: np.ndarray  # a view of it
    x: Tensor  # [rows, hidden]
    logits: Tensor | None  # [rows, vocab] float32; None: too many rows, only those judged are computed
    best: Tensor | None  # [rows]
    best_parts: tuple[Tensor, Tensor]
    hidden: Tensor | None  # [rows, layers, hidden]
    work: Workspace
    attention: Attention
    layers: tuple[int, ...]
    adapters: PassAdapters | None = None  # of its rows; None: none has one
    used: bool = False
    graph: torch.cuda.CUDAGraph | None = None

    @property
    def rows(self) -> int:
        return self.x.shape[0]


class Passes:
    """The passes of one model, by shape. Those of up to MOST_ROWS rows all use the beginning of the same buffers: a
    pass ends before the next begins."""

    def __init__(
        self,
        config: LlamaConfig,
        widest: int,
        dtype: torch.dtype,
        device: torch.device,
        graphs: bool,
        pool: AdapterPool,
    ) -> None:
        """`widest`: outputs of the largest matrix that is summed in parts. `graphs`: False runs kernel by kernel.
        `pool`: of the adapters that rows may have."""
        self._config, self._widest, self._dtype, self._device = config, widest, dtype, device
        self._graphs = graphs and device.type == "cuda"
        self._passes: dict[Shape, DevicePass] = {}
        self._buffers = Buffers(config, MOST_ROWS, widest, dtype, device)
        self._parts = PartSums(config.num_heads, config.head_dim, device)
        self._staging = pinned(len(Field) * MOST_ROWS, device)
        self._pool, self._inner, self._adapter_staging = pool, torch.empty(0), torch.empty(0)
        self._tickets = pool.tickets()
        self._capture = Capture()

    def of(self, shape: Shape) -> DevicePass:
        found = self._passes.get(shape)
        if found is None:
            with self._fitting(shape.rows):
                found = self._made(shape)
            if shape.rows <= MOST_ROWS:
                self._passes[shape] = found
        return found

    @property
    def captured(self) -> int:
        """Graphs that there are."""
        return sum(one.graph is not None for one in self._passes.values())

    def is_first(self, one: DevicePass) -> bool:
        """Whether the pass will run without its graph, or capture it: that takes longer than it will again."""
        return one.graph is None and self._captures(one)

    def run(self, one: DevicePass, compute: Callable[[DevicePass], None]) -> None:
        """Kernel by kernel the first time, which also compiles what is new; from the second time on as a graph: a shape
        that never comes again is not worth one."""
        if is_noting():
            compute(one)
            return
        with self._fitting(one.rows):
            if one.graph is None and one.used and self._captures(one):
                one.graph = self._capture(partial(compute, one))
            if one.graph is None:
                compute(one)
            else:
                one.graph.replay()
        one.used = True

    def compile(self, shape: Shape, compute: Callable[[DevicePass], None]) -> DevicePass:
        """Run a pass once, kernel by kernel; it has no graph yet when it comes again."""
        one = self.of(shape)
        with self._fitting(one.rows):
            compute(one)
        return one

    def _captures(self, one: DevicePass) -> bool:
        return self._graphs and one.rows <= MOST_ROWS

    def _made(self, shape: Shape) -> DevicePass:
        rows, config = shape.rows, self._config
        chunk = chunk_keys(config.head_dim, self._dtype)
        shared = config.num_kv_heads, config.num_heads // config.num_kv_heads
        buffers = self._buffers
        if rows > MOST_ROWS:
            buffers = Buffers(config, rows, self._widest, self._dtype, self._device)
        size = len(Field) * rows
        if size > len(self._staging):
            self._staging = pinned(size, self._device)
        staging = self._staging[:size].view(len(Field), rows)
        return DevicePass(
            buffers.meta[:size].view(len(Field), rows),
            staging,
            staging.numpy(),
            buffers.x[:rows],
            buffers.logits[:rows] if rows <= FEW_ROWS else None,
            buffers.best[:rows] if rows <= FEW_ROWS else None,
            buffers.best_parts,
            buffers.kept(shape.layers)[:rows] if shape.layers else None,
            buffers.work,
            Attention(rows, shape.blocks, shape.tile, shape.longest, chunk, shared, self._parts),
            shape.layers,
            self._adapters(rows) if shape.adapted else None,
        )

    def _adapters(self, rows: int) -> PassAdapters:
        """Inner values of passes of up to MOST_ROWS rows share their memory."""
        pool, most = self._pool, max(rows, MOST_ROWS)
        if rows > MOST_ROWS or not len(self._inner):
            inner = torch.empty(most * pool.inner_values, dtype=self._dtype, device=self._device)
            if rows > MOST_ROWS:
                staging = pinned(PassAdapters.size(pool, rows), self._device)
                return PassAdapters(pool, rows, inner, staging, self._tickets)
            self._inner = inner
            self._adapter_staging = pinned(PassAdapters.size(pool, MOST_ROWS), self._device)
        return PassAdapters(pool, rows, self._inner, self._adapter_staging, self._tickets)

    @contextmanager
    def _fitting(self, rows: int) -> Iterator[None]:
        """What takes memory for a pass; a user hears of it where there is too little."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise OutriderError(
                f"a pass of {rows} rows does not fit: {free / GIB:.1f} GiB are free on the GPU beside "
                "weights and cache; lower the cache memory (--cache-memory), --piece or --max-batch"
            ) from error


class Capture:
    """Makes graphs, all with the same memory: they run one after the other."""

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None  # where graphs are captured
        self._pool: Any = None  # of memory, theirs

    def __call__(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Not with torch.cuda.graph: that gives all unused memory back first, to be asked for again right after."""
        graph = torch.cuda.CUDAGraph()
        if self._side is None:
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        collects = gc.isenabled()
        gc.disable()  # a graph of another model that is found to be garbage now would be freed in the midst of this one
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    compute()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(side)
        return graph


def pinned(size: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Zeros on the host that the device can read while the host goes on."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


class NoEvent:
    """Where there is no device to wait for: the kernels are interpreted, and done when they return."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def event(device: torch.device) -> torch.cuda.Event | NoEvent:
    return torch.cuda.Event() if device.type == "cuda" else NoEvent()
