"""Llama-like models on a GPU: a pass puts its feeds into a table, runs the kernels over it, and hands out the logits.

The same kernels run without a device under Triton's interpreter, which is how CI tests them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, product

import numpy as np
import torch
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.sequence import Scope
from outrider.models.adapters.adapter import Adapter
from outrider.models.base import Feed, Output, Outputs, WrittenTokens, check_context, one_part
from outrider.models.cuda import kernels, rejection
from outrider.models.cuda.adapters import AdapterPool
from outrider.models.cuda.attention import chunk_keys
from outrider.models.cuda.batch import FEW_ROWS, LARGE_TILE, NODES, SMALL_TILE, Batch, Field
from outrider.models.cuda.compiling import compile_first, is_noting
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import (
    GIB,
    ROWS,
    SHORTEST,
    DevicePass,
    Passes,
    Shape,
    event,
    pinned,
    prompt_rows,
    reach,
    shape_of,
)
from outrider.models.cuda.looped import LoopedPass
from outrider.models.cuda.low_rank import LowRankSum
from outrider.models.cuda.pages import DeviceTable, PageTable
from outrider.models.cuda.product import Around, linear, norm_scales, widest_in_parts
from outrider.models.cuda.rotary import HeadPlaces
from outrider.models.cuda.writing import IN_FLIGHT, HostCopies, Writing, WrittenPart
from outrider.models.linear import Dense
from outrider.models.llama_weights import LlamaConfig, ReadableWeights, Weights

PAGE = 32  # tokens of one page of keys and values: beginnings are shared in pages, so few tokens are run again
GREEDY = SamplingParams()
SLOTS = 4096  # sequences at once: twice the largest max_batch (settings.MOST_BATCH), as that many may be paused


# Tokens up to which passes of few rows have their graphs from the beginning: chats of usual length. 51 graphs; each
# takes a request that meets it first about 10 ms on an H200.
PREPARED_LENGTHS = (256, 512, 1024)
# Rows up to which kernels are compiled from the beginning, at least: 64 sequences with drafts of 15 nodes that the host
# looks at.
COMPILED_ROWS = 1024
# Texts of one chunk of keys, and of several: their attention has kernels of its own. Of few rows all kernels are among
# those of passes of as many.
PROMPT_LENGTHS, FEW_KINDS = (256, 1024), (1, 16, 32, 64)
# Requests of each kind whose tokens the device chooses by kernels of its own: whether by rejection's draws.
SAMPLED = (
    (SamplingParams(temperature=1.0), False),
    (SamplingParams(temperature=1.0, top_p=0.9), True),
)


class CudaLlama(ReadableWeights):
    """`graphs`: False runs every kernel by itself, for debugging and comparison."""

    adapter_slots: int | None = None

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        memory: int,
        graphs: bool = True,
        adapters: AdapterPool | None = None,
    ) -> None:
        """`adapters`: of the model whose first layers these are."""
        self.config, self.weights, self._memory, self._graphs = config, weights, memory, graphs
        self.vocab_size, self.num_layers, self.context = config.vocab_size, config.num_layers, config.context
        self.dtype, self.device = weights.norm.dtype, weights.norm.device
        self._layers = weights.stack.layers
        self._moves: list[list[int]] = []  # of each sequence: from, to, from, to: what a kept branch has to move
        self.on_pass: Callable[[], None] | None = None  # for measurement: called before and after each pass
        self._last: tuple[DevicePass, Tensor | None] | None = (
            None  # the last pass, and its rows whose logits came after it
        )
        self._adapters = adapters or AdapterPool(self.adapter_base, self.num_layers, self.dtype, self.device)
        count = memory // (PAGE * self.bytes_per_token)
        if count < 2:
            raise OutriderError(
                f"{memory / GIB:.2f} GiB for keys and values hold no page of {PAGE} tokens, which takes "
                f"{PAGE * self.bytes_per_token / GIB:.3f} GiB; raise the cache memory (--cache-memory)"
            )
        self._pages = PageTable(count, PAGE, SLOTS, config.context + NODES)
        self.page, self.capacity = PAGE, (count - 1) * PAGE
        self._allocate()

    @property
    def bytes_per_token(self) -> int:
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    @property
    def rows_alone(self) -> bool:
        return True

    @property
    def boundaries(self) -> tuple[int, ...]:
        chunk = chunk_keys(self.config.head_dim, self.dtype)
        return tuple(sorted({PAGE, chunk, SHORTEST, 2 * chunk, self.config.sliding_window or PAGE}))

    @property
    def padding(self) -> int:
        """The row of the page table for rows that belong to no sequence."""
        return self._pages.padding

    @property
    def free_pages(self) -> int:
        """Pages that can be had; all but one when no sequence is held."""
        return self._pages.free_count

    def _allocate(self) -> None:
        config, device = self.config, self.device
        shape = (config.num_layers, 2, self._pages.count, config.num_kv_heads, PAGE, config.head_dim)
        parts = (part for layer in self._layers for part in (layer.qkv, layer.output, layer.down))
        widest = widest_in_parts(_dense(part).weight for part in (*parts, self.weights.head))
        try:
            # zeros: what lies past the end of a sequence is multiplied by 0, and 0 * nan is nan
            self._cache = torch.zeros(shape, dtype=self.dtype, device=device)
            self._table = DeviceTable(self._pages, device)
            self._passes = Passes(config, widest, self.dtype, device, self._graphs, self._adapters)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise OutriderError(
                f"keys and values need {self._memory / GIB:.1f} GiB but {free / GIB:.1f} of {total / GIB:.1f} GiB are "
                "free on the GPU; lower the cache memory (--cache-memory), or use a smaller model"
            ) from error
        cos, sin = self.weights.rope.tables(config.context + NODES)  # what is written ahead may pass the end
        half = config.head_dim // 2
        self._angles = cos[:, :half].contiguous().to(device), sin[:, half:].contiguous().to(device)
        self._best_tokens = pinned(FEW_ROWS, device, torch.int64)  # of the last pass, on the host
        self._sent, self._done = event(device), event(device)
        self._written_parts = HostCopies(device)

    @property
    def captured(self) -> int:
        """Graphs of passes that there are, for measurement."""
        return self._passes.captured

    def length(self, id: int) -> int:
        return self._pages.length(id)

    def begin(self, id: int, tokens: Sequence[int], scope: Scope = "") -> int:
        return self._pages.begin(id, tokens, scope)

    def seen(self, id: int, tokens: Sequence[int], scope: Scope = "") -> None:
        """`tokens` are committed: other sequences that begin so may share what the cache holds of them."""
        self._pages.name(id, tokens, scope)

    def forget_prefixes(self) -> None:
        self._pages.forget_prefixes()

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        kept = length + len(path)
        if any(node != place for place, node in enumerate(path)) and self._pages.length(id):
            moves = [(length + node, length + place) for place, node in enumerate(path) if node != place]
            self._moves.append([self._pages.flat(id, place) for pair in moves for place in pair])
        self._pages.crop(id, kept)

    def free(self, id: int) -> None:
        self._pages.free(id)

    def first(self, layers: int) -> CudaLlama:
        weights = replace(self.weights, stack=self.weights.stack.first(layers))
        memory = self._memory * layers // self.num_layers  # for as many tokens
        return CudaLlama(replace(self.config, num_layers=layers), weights, memory, self._graphs, self._adapters)

    def reserve_adapters(self, budget: int) -> int:
        return self._adapters.reserve(budget)

    def adapter_bytes(self, adapter: Adapter) -> int:
        return self._adapters.bytes_of(adapter)

    def adapt(self, adapter: Adapter, key: str) -> ReadyAdapter:
        return self._adapters.place(adapter, key)

    def release(self, ready: ReadyAdapter) -> None:
        self._adapters.release(ready.weights)

    @torch.inference_mode()
    def prepare(self, layers: Sequence[int] = (), rows: int = 0, adapted: bool = False) -> None:
        """Compile all kernels now, and capture the graphs of small passes, so that no request waits for them. Kernels
        of passes with adapters too, where there are some already."""
        if adapted:
            self._adapters.allocate()
        kinds = [(tuple(layers), each) for each in (False, True)[: 1 + self._adapters.used]]
        lengths, tile = [size for size in PREPARED_LENGTHS if size <= self.context], self._small_tile
        few = [
            Shape(count, count, longest, tile, *kind)
            for kind, longest, count in product(kinds, lengths, (count for count in ROWS if count <= FEW_ROWS))
        ]
        many = [
            Shape(count, count, longest, size, *kind)
            for kind, longest, count, size in product(
                kinds, PROMPT_LENGTHS, prompt_rows(max(rows, COMPILED_ROWS)), (tile, LARGE_TILE)
            )
        ]
        told_apart = [shape for shape in few if shape.rows in FEW_KINDS and shape.longest in PROMPT_LENGTHS]
        compile_first(partial(self._run_each, [*told_apart, *many]), self.device)
        for shape in few:
            self._capture(shape)
        self._run_each(many)

    @property
    def _small_tile(self) -> int:
        group = self.config.num_heads // self.config.num_kv_heads
        return max(SMALL_TILE, 1 << (group - 1).bit_length())

    def _capture(self, shape: Shape) -> None:
        """A pass in which no row belongs to a sequence, until it has its graph."""
        run = self._passes.of(shape)
        self._send_nothing(run)
        while self._passes.is_first(run):
            self._passes.run(run, self._compute)

    @torch.inference_mode()
    def _run_each(self, shapes: Sequence[Shape]) -> None:
        """Such passes once, kernel by kernel, with the logits of as many rows as have kernels of their own; then a
        sequence writes a token by itself, in each of the ways in which tokens are chosen."""

        def compute(run: DevicePass) -> None:
            self._send_nothing(run)
            self._compute(run)
            for judged in (*FEW_KINDS, FEW_ROWS + 1):
                self._output(run, torch.zeros(judged, dtype=torch.int64, device=self.device))

        for shape in shapes:
            self._passes.compile(shape, compute)
        dice = [Dice(0)]
        for given, params, draws in ((None, GREEDY, False), *((dice, *each) for each in SAMPLED)):
            for _ in self.write([-1], [0], given or [None], [params], one_part(1), lambda: None, draws=[draws]):
                pass
            self.free(-1)

    def _send_nothing(self, run: DevicePass) -> None:
        """Tables in which no row belongs to a sequence."""
        self._sent.synchronize()
        run.fields[:] = 0
        run.fields[Field.SLOT] = self._pages.padding
        run.meta.copy_(run.staging, non_blocking=True)
        if run.adapters is not None:
            run.adapters.send((), ())
        self._sent.record()

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> Sequence[Output]:
        check_context(self, feeds)
        self._move()
        batch = Batch(feeds, self._pages, self.config.num_heads // self.config.num_kv_heads)
        adapters = [feed.adapter for feed in feeds]
        run = self._passes.of(shape_of(batch, batch.longest, layers, self.context, any(adapters)))
        first = self._passes.is_first(run)
        self._send(run, batch, adapters)
        self._mark()
        self._passes.run(run, self._compute)
        hidden = None if run.hidden is None else run.hidden[: batch.rows].clone()
        if run.logits is not None and len(batch.judged) == batch.rows:
            self._mark()
            self._done.record()
            self._last = run, None
            best = partial(self._best, batch.rows)
            return Outputs(run.logits[: batch.rows], batch.starts, hidden, batch.begins, best, self.choose, first)
        judged = torch.from_numpy(np.asarray(batch.judged)).to(self.device, non_blocking=True)
        logits = run.logits[judged] if run.logits is not None else self._output(run, judged)
        self._mark()
        self._last = run, judged
        return Outputs(logits, batch.starts, hidden, batch.begins, None, self.choose, first)

    def _best(self, rows: int) -> list[int]:
        """The likeliest token of each row of the pass that runs, once it is over."""
        self._done.synchronize()
        return self._best_tokens[:rows].tolist()

    @torch.inference_mode()
    def again(self) -> None:
        """The last pass once more, for measurement: the device works, and nothing changes."""
        assert self._last is not None, "no pass has run"
        run, judged = self._last
        self._passes.run(run, self._compute)
        if judged is not None and run.logits is None:
            self._output(run, judged).argmax(-1)

    def write(self, ids: Sequence[int], last: Sequence[int], dice: Sequence[Dice | None],
              params: Sequence[SamplingParams], plan: Callable[[int], int], wait: Callable[[], None],
              layers: Sequence[int] = (), adapters: Sequence[ReadyAdapter | None] = (), draws: Sequence[bool] = (),
              ) -> Iterator[WrittenTokens]:  # fmt: skip
        """Each sequence writes some tokens after its `last` one, without the host, part after part.

        After each part the cache has seen all but the newest token of each. No dice: the likeliest token. Of `params`
        temperature and cuts count. `adapters`: one for each; (): none has one. `draws`: whether each draws as rejection
        does; (): all dice choose.
        """
        parts: deque[WrittenPart] = deque()
        writing: Writing | None = None
        while True:
            while len(parts) < IN_FLIGHT:
                unread = sum(part.steps for part in parts)
                steps = plan(unread)
                if not steps or (writing is not None and not self._can_write(writing, unread + steps)):
                    break
                if writing is None:
                    writing = self._begin_writing(ids, last, dice, params, steps, layers, adapters, draws)
                parts.append(self._write_part(writing, steps))
            if not parts:
                return
            wait()
            part = parts.popleft()
            part.done.synchronize()
            for id in ids:
                self.written(id, part.steps)
            yield WrittenTokens(part.tokens.clone(), part.hidden, part.first)

    @torch.inference_mode()
    def _begin_writing(self, ids: Sequence[int], last: Sequence[int], dice: Sequence[Dice | None],
                       params: Sequence[SamplingParams], steps: int, layers: Sequence[int],
                       adapters: Sequence[ReadyAdapter | None], draws: Sequence[bool]) -> Writing:  # fmt: skip
        self._move()
        begin = [self._pages.length(id) for id in ids]
        feeds = [Feed(id, (token,)) for id, token in zip(ids, last, strict=True)]
        batch = Batch(feeds, self._pages, self.config.num_heads // self.config.num_kv_heads, ahead=steps - 1)
        for id, length in zip(ids, begin, strict=True):
            self._pages.crop(id, length)  # what is written counts when it is read
        shape = shape_of(batch, max(begin, default=0) + steps, layers, self.context, any(adapters))
        run = self._passes.of(shape)
        self._send(run, batch, adapters)
        keys = torch.tensor([_signed(one.key) if one else 0 for one in dice], device=self.device) if any(dice) else None
        asked = [each if one else GREEDY for one, each in zip(dice, params, strict=True)]
        heat = torch.tensor([each.temperature for each in asked], device=self.device)
        drawn, cuts = None, Cuts.of(asked, self.device)
        if any(draws):
            drawn = heat.where(torch.tensor(draws, device=self.device), 0.0)
            heat = heat - drawn
        positions = torch.tensor([place + 1 for place in begin], device=self.device)
        return Writing(tuple(ids), run, shape.longest, keys, heat, drawn, cuts, positions)

    def _can_write(self, writing: Writing, ahead: int) -> bool:
        """Whether there is memory for `ahead` more tokens of each, and the pass is made for texts that long."""
        longest = max(self._pages.length(id) for id in writing.ids) + ahead
        return longest <= writing.longest and self.reserve(writing.ids, ahead) is not None

    @torch.inference_mode()
    def _write_part(self, writing: Writing, steps: int) -> WrittenPart:
        run, count = writing.run, len(writing.ids)
        first = self._passes.is_first(run)
        written = torch.empty(steps, count, dtype=torch.int64, device=self.device)
        every = torch.arange(count, device=self.device)
        hidden = None if run.hidden is None else run.hidden.new_empty(steps, count, *run.hidden.shape[1:])
        for step in range(steps):
            self._passes.run(run, self._compute)
            if hidden is not None and run.hidden is not None:
                hidden[step].copy_(run.hidden[:count])
            self._choose_next(writing, every, written[step])
            kernels.advance(run.meta, written[step], writing.positions)
        tokens, done = self._written_parts.next(written)
        return WrittenPart(tokens, hidden, first, done)

    def _choose_next(self, writing: Writing, every: Tensor, out: Tensor) -> None:
        """The token after the last row of each sequence; `every`: these rows."""
        run, count = writing.run, len(every)
        if writing.keys is None and run.best is not None:
            out.copy_(run.best[:count])
            return
        logits = run.logits[:count] if run.logits is not None else self._output(run, every)
        if writing.keys is None:
            kernels.best(logits, kernels.best_workspace(logits), out)
            return
        if writing.cuts is not None:
            writing.cuts(logits)
        kernels.choose(logits, writing.keys, writing.positions, writing.heat, out, writing.cuts is not None)
        if writing.drawn is not None:
            rejection.verify(logits, writing.keys, writing.positions, writing.drawn, out)

    def looped(
        self,
        sequences: int,
        nodes: int,
        moves: int,
        longest: int,
        layers: Sequence[int],
        sampled: bool,
        adapted: bool = False,
        cuts: Cuts | None = None,
    ) -> LoopedPass:
        """A pass over 1 + `nodes` rows of each of some sequences of up to `longest` tokens, whose table the device
        writes. `moves`: nodes of a sequence that can be kept. `adapted`: whether sequences have adapters. `cuts`: of
        the sequences, if any have some."""
        rows, device = sequences * (1 + nodes), self.device
        tile, group = self._small_tile, self.config.num_heads // self.config.num_kv_heads
        run = self._passes.of(Shape(rows, rows, reach(longest, self.context), tile, tuple(layers), adapted))
        every = torch.arange(rows, device=device)

        def compute() -> Tensor:
            self._compute(run)
            return run.logits if run.logits is not None else self._output(run, every)

        whole, begins = torch.zeros(3, rows, dtype=torch.int64, device=device), torch.arange(sequences + 1) * moves
        return LoopedPass(
            run, compute, self._cache, self._table.table, whole[0], whole[1], whole[2],
            torch.zeros(rows, device=device), sampled, cuts, tile // group, begins.to(device, torch.int32),
            torch.zeros(sequences, moves, 2, dtype=torch.int32, device=device),
        )  # fmt: skip

    def reserve(self, ids: Sequence[int], count: int) -> list[int] | None:
        """Reserve memory for `count` more tokens of each sequence; returns their rows of the page table, or None if
        there is too little. What the host has decided so far is done before the device goes on by itself."""
        self._move()
        slots = self._pages.take_ahead(ids, count)
        self._sent.synchronize()
        self._table.send()
        self._sent.record()
        return slots

    def written(self, id: int, count: int) -> None:
        """The device has written `count` tokens of the sequence by itself."""
        self._pages.extend(id, count)

    def choose(
        self, logits: Tensor, params: Sequence[SamplingParams], dice: Sequence[Dice], positions: Sequence[int]
    ) -> Tensor:
        """core.verify_batch.choose, in the kernels that `write` uses: so both choose the same."""
        cuts = Cuts.of(params, self.device)
        if cuts is not None:
            logits = logits.clone()
            cuts(logits)
        heat = torch.tensor([each.temperature for each in params], device=self.device)
        keys = torch.tensor([_signed(one.key) for one in dice], device=self.device)
        out = torch.empty(len(dice), dtype=torch.int64, device=self.device)
        kernels.choose(logits, keys, torch.tensor(positions, device=self.device), heat, out, cuts is not None)
        return out

    def _mark(self) -> None:
        if self.on_pass is not None:
            self.on_pass()

    def _send(self, run: DevicePass, batch: Batch, adapters: Sequence[ReadyAdapter | None]) -> None:
        """The tables of the pass and the page tables that changed, once the device has read those before."""
        self._sent.synchronize()
        batch.write(run.fields, self._pages.padding)
        run.meta.copy_(run.staging, non_blocking=True)
        if run.adapters is not None:
            run.adapters.send(adapters, np.diff(batch.begins).tolist())
        self._table.send()
        self._sent.record()

    def _move(self) -> None:
        """Branches that were kept move to where the sequence goes on."""
        if not self._moves:
            return
        begins = [0, *accumulate(len(each) // 2 for each in self._moves)]
        table = torch.tensor([*begins, *chain.from_iterable(self._moves)], dtype=torch.int32, device=self.device)
        kernels.move(self._cache, table[: len(begins)], table[len(begins) :])
        self._moves = []

    def _compute(self, run: DevicePass) -> None:
        """The whole pass over its rows."""
        rows, config, work = run.rows, self.config, run.work
        table = _dense(self.weights.embedding).weight
        kernels.embed(run.meta[Field.TOKEN], table, self._layers[0].attention_norm, run.x, work)
        q = torch.empty(rows, config.num_heads, config.head_dim, dtype=self.dtype, device=self.device)
        mixed = torch.empty_like(q)
        different = 2 if is_noting() else self.num_layers  # the kernels of the second layer are those of all others
        for index in range(self.num_layers):
            if index < different:
                self._layer(index, run, q, mixed)
            if index in run.layers:
                assert run.hidden is not None
                kernels.keep(run.x, run.hidden[:, run.layers.index(index)])
        if run.logits is not None:
            assert run.best is not None
            head = _dense(self.weights.head)
            linear(work.next[:rows], head.weight, head.bias, run.logits, work, Around(eps=config.norm_eps))
            kernels.best(run.logits, run.best_parts, run.best)
            self._best_tokens[:rows].copy_(run.best, non_blocking=True)

    def _layer(self, index: int, run: DevicePass, q: Tensor, mixed: Tensor) -> None:
        """A layer; its norms are part of the products around them."""
        layer, rows, eps, x, work = self._layers[index], run.rows, self.config.norm_eps, run.x, run.work
        following = self._layers[index + 1].attention_norm if index + 1 < self.num_layers else self.weights.norm
        qkv, output, gate_up, down = _dense(layer.qkv), _dense(layer.output), _dense(layer.gate_up), _dense(layer.down)

        def added(field: str) -> LowRankSum | None:
            return None if run.adapters is None else run.adapters.sum(index, field)

        keys, values = self._cache[index]
        norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
        places = HeadPlaces(q, keys, values, self._table.table, run.meta, self._angles)
        around = Around(eps=eps, adapters=added("qkv"))
        kernels.qkv(work.next[:rows], qkv.weight, qkv.bias, norms, eps, places, work, around)
        run.attention(q, keys, values, self._table.table, run.meta, mixed, self.config.sliding_window or 0)
        after = Around(gain=layer.mlp_norm, adapters=added("output"))
        linear(mixed.view(rows, -1), output.weight, output.bias, x, work, after)
        inner = torch.empty(rows, down.weight.shape[1], dtype=x.dtype, device=x.device)
        gated = Around(eps=eps, gate=True, adapters=added("gate_up"))
        linear(work.next[:rows], gate_up.weight, None, inner, work, gated)
        linear(inner, down.weight, None, x, work, Around(gain=following, adapters=added("down")))

    def _output(self, run: DevicePass, judged: Tensor) -> Tensor:
        """[n, vocab] float32: the logits of the rows that are judged."""
        head, work = _dense(self.weights.head), run.work
        scale = norm_scales(work, run.rows, self.config.hidden_size, self.config.norm_eps)[judged]
        out = torch.empty(len(judged), self.vocab_size, dtype=torch.float32, device=self.device)
        linear(work.next[judged], head.weight, head.bias, out, work, Around(scale=scale))
        return out


def _dense(linear: object) -> Dense:
    assert isinstance(linear, Dense)
    return linear


def _signed(key: int) -> int:
    """64 bits as torch holds them."""
    return key - (1 << 64) if key >= 1 << 63 else key
