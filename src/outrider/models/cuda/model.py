"""Llama-like models on a GPU: passes of one shape are one graph, which reads lengths, pages and masks as tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.models.base import Feed, Output, Outputs
from outrider.models.cuda import kernels
from outrider.models.cuda.kernels import MOST_ROWS, NODES, PAGE
from outrider.models.cuda.pages import Pages
from outrider.models.linear import Dense, Linear
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.read import Open

ROWS = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST = ROWS[-1]  # rows of one graph; longer passes run kernel by kernel
LARGE = 1024  # they have a multiple of this: for sizes it has not seen cuBLAS has to load other kernels first
SLOTS = 4096  # sequences at once
SHORTEST = 256  # tokens: passes over sequences up to this long share a graph, then up to twice as long, and so on
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """What a graph is made for."""

    rows: int
    longest: int  # sequence
    tile: int  # query rows times heads that a program of the attention takes
    layers: tuple[int, ...] = ()  # hidden states that are kept


@dataclass(eq=False)
class Run:
    """A pass of one shape: its buffers, and its graph once it has one."""

    meta: Tensor  # [FIELDS, rows] int32
    staging: Tensor  # the same on the host
    fields: np.ndarray  # a view of it
    x: Tensor  # [rows, hidden]
    logits: Tensor | None  # [rows, vocab] float32; None: too many rows, only those judged are computed
    best: Tensor | None  # [rows]
    hidden: Tensor | None  # [rows, layers, hidden]
    attention: kernels.Attention
    layers: tuple[int, ...]
    used: bool = False
    graph: torch.cuda.CUDAGraph | None = None


class Buffers:
    """Where passes of up to `rows` rows work."""

    def __init__(self, config: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        few, states = min(rows, MOST_ROWS), config.num_heads * kernels.most_parts(rows)
        self.meta = torch.zeros(kernels.FIELDS * rows, dtype=torch.int32, device=device)
        self.x = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.logits = torch.empty(few, config.vocab_size, dtype=torch.float32, device=device)
        self.best = torch.empty(few, dtype=torch.int64, device=device)
        parts = few, kernels.best_parts(config.vocab_size)
        self.best_parts = torch.empty(parts, device=device), torch.empty(parts, dtype=torch.int32, device=device)
        self.parts = torch.empty(states * config.head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(2, states, dtype=torch.float32, device=device)
        self._kept: dict[int, Tensor] = {}

    def kept(self, layers: Sequence[int]) -> Tensor:
        """[rows, layers, hidden]"""
        count = len(layers)
        if count not in self._kept:
            rows, size = self.x.shape
            self._kept[count] = torch.empty(rows, count, size, dtype=self.x.dtype, device=self.x.device)
        return self._kept[count]


class _Never:
    """Where there is no device to wait for."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class CudaLlama(Open):
    """`graphs`: False runs every kernel by itself, for debugging and comparison."""

    def __init__(self, config: LlamaConfig, weights: Weights, memory: int, graphs: bool = True) -> None:
        self.config, self.weights, self._memory, self._graphs = config, weights, memory, graphs
        self.vocab_size, self.num_layers, self.context = config.vocab_size, config.num_layers, config.context
        self.dtype, self.device = weights.norm.dtype, weights.norm.device
        self._layers = weights.stack.layers
        self._runs: dict[Shape, Run] = {}
        self._last: Run | None = None
        self._marks: list[torch.cuda.Event] | None = None  # before and after each pass, while it is timed
        self._judged: Tensor | None = None  # its rows whose logits came after it
        self._moves: list[tuple[int, int]] = []  # (from, to): keys and values that a kept branch has to move
        self._side: torch.cuda.Stream | None = None  # where graphs are captured
        self._pool: Any = None  # of memory, theirs
        count = memory // (PAGE * self.bytes_per_token)
        if count < 2:
            raise OutriderError(
                f"{memory / GIB:.2f} GiB for keys and values hold no page of {PAGE} tokens, which takes "
                f"{PAGE * self.bytes_per_token / GIB:.3f} GiB; raise the cache memory (--cache-memory)"
            )
        self._pages = Pages(count, PAGE, SLOTS, config.context + NODES)
        self.page, self.capacity = PAGE, (count - 1) * PAGE
        self._allocate()

    @property
    def bytes_per_token(self) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def _allocate(self) -> None:
        config, device = self.config, self.device
        shape = (config.num_layers, 2, self._pages.count, config.num_kv_heads, PAGE, config.head_dim)
        try:
            # zeros: what lies past the end of a sequence is multiplied by 0, and 0 * nan is nan
            self._cache = torch.zeros(shape, dtype=self.dtype, device=device)
            self._table = torch.zeros(self._pages.table.shape, dtype=torch.int32, device=device)
            widest = max(_dense(part).weight.shape[0] for layer in self._layers for part in (layer.qkv, layer.output))
            self._work = kernels.Workspace(config.hidden_size, widest, self.dtype, device)
            self._buffers = Buffers(config, MOST, self.dtype, device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise OutriderError(
                f"keys and values need {self._memory / GIB:.1f} GiB but {free / GIB:.1f} of {total / GIB:.1f} GiB are "
                "free on the GPU; lower the cache memory (--cache-memory), or use a smaller model"
            ) from error
        cos, sin = self.weights.rope.tables(config.context + NODES)  # what is written ahead may pass the end
        half = config.head_dim // 2
        self._turns = cos[:, :half].contiguous().to(device), sin[:, half:].contiguous().to(device)
        self._staging = _pinned(kernels.FIELDS * MOST, device)
        self._told = _pinned(MOST_ROWS, device, torch.int64)  # `best` of the last pass
        self._shadow = _pinned(self._pages.table.size, device).view(self._pages.table.shape)
        self._pages.table = self._shadow.numpy()
        self._sent, self._done = (torch.cuda.Event() if device.type == "cuda" else _Never() for _ in range(2))

    def length(self, id: int) -> int:
        return self._pages.length(id)

    def begin(self, id: int, tokens: Sequence[int]) -> None:
        self._pages.begin(id, tokens)

    def seen(self, id: int, tokens: Sequence[int]) -> None:
        """`tokens` are committed: other sequences that begin so may share what the cache holds of them."""
        self._pages.name(id, tokens)

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        kept = length + len(path)
        if any(node != place for place, node in enumerate(path)) and self._pages.length(id):
            self._moves += (
                (self._pages.flat(id, length + node), self._pages.flat(id, length + place))
                for place, node in enumerate(path)
                if node != place
            )
        self._pages.crop(id, kept)

    def free(self, id: int) -> None:
        self._pages.free(id)

    def first(self, layers: int) -> CudaLlama:
        weights = replace(self.weights, stack=self.weights.stack.first(layers))
        memory = self._memory * layers // self.num_layers  # for as many tokens
        return CudaLlama(replace(self.config, num_layers=layers), weights, memory, self._graphs)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> Sequence[Output]:
        self._move()
        batch = _Batch(feeds, self._pages, self.config.num_heads // self.config.num_kv_heads)
        shape = Shape(_up(batch.rows), _longest(batch.longest, self.context), batch.tile, tuple(layers))
        run = self._run_of(shape)
        first = run.graph is None and self._graphs_for(shape.rows)
        self._send(run, batch)
        self._mark()
        self._go(run)
        self._last, self._judged = run, None
        hidden = None if run.hidden is None else run.hidden[: batch.rows].clone()
        if run.logits is not None and len(batch.judged) == batch.rows:
            self._mark()
            self._done.record()
            best = partial(self._best, batch.rows)
            return Outputs(run.logits[: batch.rows], batch.starts, hidden, batch.begins, best, self.choose, first)
        judged = torch.from_numpy(np.asarray(batch.judged)).to(self.device, non_blocking=True)
        if run.logits is not None:
            logits = run.logits[judged]
        else:
            self._judged, logits = judged, self._head(run.x[judged])
        self._mark()
        return Outputs(logits, batch.starts, hidden, batch.begins, None, self.choose, first)

    def _best(self, rows: int) -> list[int]:
        """The likeliest token of each row of the pass that runs, once it is over."""
        self._done.synchronize()
        return self._told[:rows].tolist()

    @torch.inference_mode()
    def write(self, ids: Sequence[int], last: Sequence[int], dice: Sequence[Dice | None], temperatures: Sequence[float],
              steps: int) -> Tensor:  # fmt: skip
        """Each sequence writes `steps` tokens after its `last` one, without the host: [steps, sequences].

        Afterwards the cache has seen all but the newest token of each. No dice: the likeliest token.
        """
        self._move()
        count = len(ids)
        begin = [self._pages.length(id) for id in ids]
        batch = _Batch(
            [Feed(id, (token,)) for id, token in zip(ids, last, strict=True)],
            self._pages,
            self.config.num_heads // self.config.num_kv_heads,
            ahead=steps - 1,
        )
        longest = _longest(max(begin, default=0) + steps, self.context)
        run = self._run_of(Shape(_up(count), longest, batch.tile))
        self._send(run, batch)
        keys = torch.tensor([_signed(one.key) if one else 0 for one in dice], device=self.device)
        heat = torch.tensor([t if one else 0.0 for one, t in zip(dice, temperatures, strict=True)], device=self.device)
        positions = torch.tensor([place + 1 for place in begin], device=self.device)  # of the token to be written
        written = torch.empty(steps, count, dtype=torch.int64, device=self.device)
        advance = torch.zeros_like(run.meta)
        advance[[kernels.POSITION, kernels.PLACE, kernels.LIMIT, kernels.BASE, kernels.END], :count] = 1
        for step in range(steps):
            self._go(run)
            logits = run.logits[:count] if run.logits is not None else self._head(run.x[:count])
            kernels.choose(logits, keys, positions, heat, written[step])
            if step + 1 < steps:
                run.meta += advance
                run.meta[kernels.TOKEN, :count] = written[step]
                positions += 1
        for id in ids:
            self._pages.extend(id, steps - 1)
        return written

    def choose(self, laws: Tensor, dice: Sequence[Dice], positions: Sequence[int]) -> Tensor:
        """core.verify_batch.choose, in one kernel."""
        out = torch.empty(len(dice), dtype=torch.int64, device=self.device)
        keys = torch.tensor([_signed(one.key) for one in dice], device=self.device)
        at = torch.tensor(positions, device=self.device)
        kernels.choose(laws.log(), keys, at, torch.ones(len(dice), device=self.device), out)
        return out

    @property
    def pass_bytes(self) -> int:
        """Of weights that every pass reads; of the embedding it reads only rows."""
        parts = [part for layer in self._layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(_dense(part).weight.nbytes for part in (*parts, self.weights.head))

    @torch.inference_mode()
    def replay(self) -> None:
        """The last pass once more, for measurement: the device works, and nothing changes."""
        if self._last is not None:
            self._go(self._last)
            if self._judged is not None:
                self._head(self._last.x[self._judged]).argmax(-1)

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """For measurement: when it is left, the list has the milliseconds that the device took for each pass inside."""
        took: list[float] = []
        marks = self._marks = []
        try:
            yield took
        finally:
            self._marks = None
            torch.cuda.synchronize(self.device)
            took += [begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2], strict=True)]

    def _mark(self) -> None:
        if self._marks is not None:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def _send(self, run: Run, batch: _Batch) -> None:
        self._sent.synchronize()  # the device has read what was written there before
        batch.write(run.fields, self._pages.padding)
        run.meta.copy_(run.staging, non_blocking=True)
        changed = self._pages.changed
        if len(changed) <= 4:
            for slot in changed:
                self._table[slot].copy_(self._shadow[slot], non_blocking=True)
        else:
            top = max(changed) + 1
            self._table[:top].copy_(self._shadow[:top], non_blocking=True)
        changed.clear()
        self._sent.record()

    def _move(self) -> None:
        """Branches that were kept move to where the sequence goes on; gathered first, so that no move hides another."""
        if not self._moves:
            return
        pairs = torch.tensor(self._moves, device=self.device)
        self._moves = []
        (from_page, to_page), (from_place, to_place) = (pairs // PAGE).unbind(1), (pairs % PAGE).unbind(1)
        self._cache[:, :, to_page, :, to_place] = self._cache[:, :, from_page, :, from_place]

    def _run_of(self, shape: Shape) -> Run:
        run = self._runs.get(shape)
        if run is None:
            with self._fitting(shape.rows):
                run = self._new_run(shape)
            if shape.rows <= MOST:
                self._runs[shape] = run
        return run

    @contextmanager
    def _fitting(self, rows: int) -> Iterator[None]:
        """What takes memory for a pass; a user hears of it where there is too little."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(self.device)
            raise OutriderError(
                f"a pass of {rows} rows does not fit: {free / GIB:.1f} GiB are free on the GPU beside "
                "weights and cache; lower the cache memory (--cache-memory), --piece or --max-batch"
            ) from error

    def _new_run(self, shape: Shape) -> Run:
        """Runs of up to MOST rows all use the beginning of the same buffers: a pass ends before the next begins."""
        rows, config = shape.rows, self.config
        buffers = self._buffers if rows <= MOST else Buffers(config, rows, self.dtype, self.device)
        attention = kernels.Attention(rows, shape.tile, shape.longest, buffers.parts, buffers.sums)
        size = kernels.FIELDS * rows
        if size > len(self._staging):
            self._staging = _pinned(size, self.device)
        staging = self._staging[:size].view(kernels.FIELDS, rows)
        return Run(
            buffers.meta[:size].view(kernels.FIELDS, rows),
            staging,
            staging.numpy(),
            buffers.x[:rows],
            buffers.logits[:rows] if rows <= MOST_ROWS else None,
            buffers.best[:rows] if rows <= MOST_ROWS else None,
            buffers.kept(shape.layers)[:rows] if shape.layers else None,
            attention,
            shape.layers,
        )

    def _go(self, run: Run) -> None:
        """Kernel by kernel the first time, which also compiles what is new; from the second time on as a graph: a shape
        that never comes again is not worth one."""
        rows = run.x.shape[0]
        with self._fitting(rows):
            if run.graph is None and run.used and self._graphs_for(rows):
                run.graph = self._captured(run)
            if run.graph is None:
                self._compute(run)
            else:
                run.graph.replay()
        run.used = True

    def _graphs_for(self, rows: int) -> bool:
        return self._graphs and rows <= MOST and self.device.type == "cuda"

    def _captured(self, run: Run) -> torch.cuda.CUDAGraph:
        """Not with torch.cuda.graph: that gives all unused memory back first, to be asked for again right after."""
        graph = torch.cuda.CUDAGraph()
        if self._side is None:
            self._side, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                self._compute(run)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph

    def _compute(self, run: Run) -> None:
        """The whole pass over the rows of `run`."""
        rows, config, few = run.x.shape[0], self.config, run.x.shape[0] <= MOST_ROWS
        table = self.weights.embedding.weight  # type: ignore[attr-defined]
        if few:
            kernels.embed(run.meta[kernels.TOKEN], table, self._layers[0].attention_norm, run.x, self._work)
        else:
            torch.index_select(table, 0, run.meta[kernels.TOKEN], out=run.x)
        q = torch.empty(rows, config.num_heads, config.head_dim, dtype=self.dtype, device=self.device)
        mixed = torch.empty_like(q)
        for index in range(self.num_layers):
            (self._few if few else self._many)(index, run, q, mixed)
            if index in run.layers:
                assert run.hidden is not None
                run.hidden[:, run.layers.index(index)].copy_(run.x)
        if run.logits is not None:
            assert run.best is not None
            head = _dense(self.weights.head)
            kernels.linear(self._work.next, head.weight, head.bias, run.logits, rows, self._work, config.norm_eps)
            kernels.best(run.logits, self._buffers.best_parts, run.best)
            self._told[:rows].copy_(run.best, non_blocking=True)

    def _few(self, index: int, run: Run, q: Tensor, mixed: Tensor) -> None:
        """A layer in six kernels; its norms are part of the products around them."""
        layer, rows, eps, x, work = self._layers[index], run.x.shape[0], self.config.norm_eps, run.x, self._work
        following = self._layers[index + 1].attention_norm if index + 1 < self.num_layers else self.weights.norm
        qkv, output, gate_up, down = _dense(layer.qkv), _dense(layer.output), _dense(layer.gate_up), _dense(layer.down)
        joined = torch.empty(rows, qkv.weight.shape[0], dtype=x.dtype, device=x.device)
        kernels.linear(work.next, qkv.weight, qkv.bias, joined, rows, work, eps)
        self._attend(index, run, joined, q, mixed)
        kernels.linear(mixed, output.weight, output.bias, x, rows, work, gain=layer.mlp_norm)
        inner = torch.empty(rows, down.weight.shape[1], dtype=x.dtype, device=x.device)
        kernels.linear(work.next, gate_up.weight, None, inner, rows, work, eps, gate=True)
        kernels.linear(inner, down.weight, None, x, rows, work, gain=following)

    def _attend(self, index: int, run: Run, joined: Tensor, q: Tensor, mixed: Tensor) -> None:
        layer, (keys, values) = self._layers[index], self._cache[index]
        norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
        eps, rows = self.config.norm_eps, run.x.shape[0]
        kernels.place_qkv(joined, norms, eps, q, keys, values, self._table, run.meta, self._turns, rows)
        run.attention(q, keys, values, self._table, run.meta, mixed, self.config.sliding_window or 0)

    def _many(self, index: int, run: Run, q: Tensor, mixed: Tensor) -> None:
        """A layer with its products by cuBLAS."""
        layer, rows, eps, x = self._layers[index], run.x.shape[0], self.config.norm_eps, run.x
        normed = torch.empty_like(x)
        kernels.norm(x, layer.attention_norm, normed, eps, rows)
        self._attend(index, run, layer.qkv(normed), q, mixed)
        kernels.norm(x, layer.mlp_norm, normed, eps, rows, layer.output(mixed.view(rows, -1)))
        joined = layer.gate_up(normed)
        inner = torch.empty(rows, joined.shape[1] // 2, dtype=x.dtype, device=x.device)
        kernels.gate(joined, inner, rows)
        x += layer.down(inner)

    def _head(self, x: Tensor) -> Tensor:
        """[n, vocab] float32 from the residuals of the rows that are judged."""
        head, rows = _dense(self.weights.head), x.shape[0]
        normed = torch.empty_like(x)
        kernels.norm(x, self.weights.norm, normed, self.config.norm_eps, rows)
        if rows > MOST_ROWS:
            return head(normed).float()
        out = torch.empty(rows, self.vocab_size, dtype=torch.float32, device=x.device)
        kernels.linear(normed, head.weight, head.bias, out, rows, self._work)
        return out


def _dense(linear: Linear) -> Dense:
    assert isinstance(linear, Dense)
    return linear


class _Batch:
    """What the feeds are to the kernels: rows, blocks of rows, and what each row may see."""

    def __init__(self, feeds: Sequence[Feed], pages: Pages, group: int, ahead: int = 0) -> None:
        self._parts: list[tuple[Feed, int, int]] = []  # feed, its slot, tokens held before
        self.starts, self.begins = [0], [0]
        self.judged: list[int] = []
        self.longest = widest = 0
        for feed in feeds:
            begin, size = pages.length(feed.id), len(feed.tokens) + len(feed.draft)
            holder = pages.extend(feed.id, size)
            if ahead:
                pages.reserve(holder, ahead)
            self._parts.append((feed, holder.slot, begin))
            row = self.begins[-1]
            self.judged += range(row + len(feed.tokens) - 1, row + size)
            self.begins.append(row + size)
            self.starts.append(len(self.judged))
            self.longest, widest = max(self.longest, begin + size), max(widest, size)
        self.rows = self.begins[-1]
        # passes of few rows all use the small tile, so that a row's sums never depend on its company
        self.tile = (
            max(16, 1 << (group - 1).bit_length()) if self.rows <= MOST_ROWS or widest <= 16 else max(64, 4 * group)
        )
        self._block = self.tile // group

    def write(self, meta: np.ndarray, padding: int) -> None:
        """Into [FIELDS, rows]."""
        meta[:, self.rows :] = 0
        meta[kernels.SLOT, self.rows :] = padding
        meta[kernels.BLOCK_COUNT] = 0
        self._write_rows(meta[:, : self.rows])
        for (feed, _, held), row in zip(self._parts, self.begins, strict=False):
            if not feed.draft.is_chain:  # a chain is as committed tokens: each sees those before
                self._write_tree(meta, feed.draft, row + len(feed.tokens), held + len(feed.tokens))
        spans = [
            (first, min(self._block, end - first))
            for row, end in zip(self.begins, self.begins[1:], strict=False)
            for first in range(row, end, self._block)
        ]
        meta[kernels.BLOCK_ROW : kernels.BLOCK_COUNT + 1, : len(spans)] = np.array(spans, dtype=np.int32).T

    def _write_rows(self, rows: np.ndarray) -> None:
        """As if every draft were a chain; no numpy for each sequence, of which there may be thousands."""
        rows[kernels.TOKEN] = [token for feed, _, _ in self._parts for token in (*feed.tokens, *feed.draft.tokens)]
        each = np.array(  # slot, base, end; from a row's number to its place
            [
                (slot, held + len(feed.tokens), held + end - row, held - row)
                for (feed, slot, held), row, end in zip(self._parts, self.begins, self.begins[1:], strict=False)
            ],
            dtype=np.int32,
        )
        if len(each) > 1:
            each = each.repeat(np.diff(self.begins), 0)
        rows[kernels.SLOT : kernels.LOW] = each.T[:3]
        place = each[:, 3] + np.arange(self.rows, dtype=np.int32)
        rows[kernels.POSITION : kernels.LIMIT] = place
        rows[kernels.LIMIT] = place + 1
        rows[kernels.LOW : kernels.BLOCK_ROW] = 0

    def _write_tree(self, meta: np.ndarray, draft: Draft, row: int, base: int) -> None:
        if len(draft) > NODES:
            raise OutriderError(f"a tree of {len(draft)} nodes; on a GPU at most {NODES} can be verified at once")
        sees: list[int] = []
        for node, parent in enumerate(draft.parents):
            sees.append((0 if parent < 0 else sees[parent]) | 1 << node)
        nodes = slice(row, row + len(draft))
        meta[kernels.POSITION, nodes] = [base - 1 + depth for depth in draft.depths()]
        meta[kernels.LIMIT, nodes] = base
        masks = np.array(sees, dtype=np.uint64)
        meta[kernels.LOW, nodes] = (masks & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        meta[kernels.HIGH, nodes] = (masks >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _pinned(size: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


def _up(rows: int) -> int:
    """The size of graph that a pass of so many rows uses."""
    return ROWS[bisect_left(ROWS, rows)] if rows <= MOST else -(-rows // LARGE) * LARGE


def _longest(tokens: int, context: int) -> int:
    size = SHORTEST
    while size < tokens:
        size *= 2
    return min(size, max(SHORTEST, context + NODES))


def _signed(key: int) -> int:
    """64 bits as torch holds them."""
    return key - (1 << 64) if key >= 1 << 63 else key
