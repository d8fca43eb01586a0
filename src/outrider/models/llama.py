"""Llama-like models: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2. Ragged feeds and trees in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.core.sequence import Scope
from outrider.models.adapters import dense
from outrider.models.adapters.adapter import Adapter
from outrider.models.base import Feed, Output, check_context
from outrider.models.cache import Cache, Slot
from outrider.models.llama_weights import LlamaConfig, ReadableWeights, Weights
from outrider.models.native import adapters as native_adapters, library
from outrider.models.native.model import NativeModel
from outrider.models.native.packed import Packed
from outrider.models.native.stack import NativeStack
from outrider.models.paged_cache import SIZE, PagedCache, PagedSlot
from outrider.models.prefix_file import digest
from outrider.models.stack import Pass, places

__all__ = ["Llama", "LlamaConfig", "PackedLlama", "Weights", "on_cpu"]

_POSITIONS = 1024  # positions that the rotary tables begin with: enough for a short text, and little memory


class Llama(ReadableWeights):
    def __init__(self, config: LlamaConfig, weights: Weights, memory: int = 1 << 30) -> None:
        """`memory`: bytes that keys and values may take."""
        self.config, self.weights, self._memory = config, weights, memory
        self.vocab_size, self.num_layers, self.context = config.vocab_size, config.num_layers, config.context
        self.dtype, self.device = weights.norm.dtype, weights.norm.device
        self._cache, self.capacity = self._memory_for(config.num_layers, config.num_kv_heads, config.head_dim)
        # cos and sin of the positions met so far and some more, [positions, head_dim] each
        self._turned, self._positions = (torch.empty(0), torch.empty(0)), 0

    @property
    def rows_alone(self) -> bool:
        return self.device.type == "cpu"

    @property
    def boundaries(self) -> tuple[int, ...]:
        block = self.weights.stack.block
        return tuple(sorted({block, self.config.sliding_window or block}))

    def _memory_for(self, layers: int, kv_heads: int, head_dim: int) -> tuple[Cache | PagedCache, int]:
        """The cache, and how many tokens it may hold."""
        cache = Cache(layers, kv_heads, head_dim, self.dtype, self.device)
        return cache, self._memory // (2 * cache.bytes_per_token)  # a buffer that doubles may be half empty

    def length(self, id: int) -> int:
        return self._cache.length(id)

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        self._cache.crop(id, length, path)

    def free(self, id: int) -> None:
        self._cache.free(id)

    def first(self, layers: int) -> Llama:
        weights = replace(self.weights, stack=self.weights.stack.first(layers))
        return type(self)(replace(self.config, num_layers=layers), weights, self._memory)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[Output]:
        check_context(self, feeds)
        tokens = [token for feed in feeds for token in (*feed.tokens, *feed.draft.tokens)]
        batch = self._pass(feeds)
        cos, sin = self._turns(batch.positions)
        x = self.weights.embedding.rows(torch.tensor(tokens, device=self.device))
        for adapter, rows in batch.adapters:
            if adapter.weights.ends.embedding is not None:
                adapter.weights.ends.embed(x[rows], tokens[rows])
        x, hidden = self.weights.stack.run(x, batch, cos, sin, layers)
        x = x[self._judged(batch)]
        outputs = _split(batch, self._head(x), hidden)
        self._adapt_logits(batch, outputs, x)
        return outputs

    adapter_slots: int | None = None

    def reserve_adapters(self, budget: int) -> int:
        return budget

    def adapter_bytes(self, adapter: Adapter) -> int:
        return adapter.nbytes * self.dtype.itemsize // 4

    def adapt(self, adapter: Adapter, key: str) -> ReadyAdapter:
        placed = dense.place(adapter, self.adapter_base, self.num_layers, self.dtype, self.device)
        return ReadyAdapter(key, placed, placed.nbytes)

    def release(self, ready: ReadyAdapter) -> None:
        """Its memory is free when no sequence has it any more."""

    def _adapt_logits(self, batch: Pass, outputs: Sequence[Output], x: Tensor) -> None:
        """What adapters add to the output matrix. x: the states of the judged rows."""
        row = 0
        for feed, output in zip(batch.feeds, outputs, strict=True):
            count = len(output.logits)
            if feed.adapter is not None and feed.adapter.weights.ends.output is not None:
                feed.adapter.weights.ends.judge(output.logits, self.normed(x[row : row + count]))
            row += count

    def _pass(self, feeds: Sequence[Feed]) -> Pass:
        slots: list[Slot | PagedSlot] = []
        rows = []
        positions: list[int] = []
        parents: list[int] = []
        for feed in feeds:
            start, (own, above) = len(positions), places(feed, self._cache.length(feed.id))
            positions += own
            parents += above
            rows.append(slice(start, len(positions)))
            slots.append(self._cache.extend(feed.id, len(positions) - start))
        return Pass(feeds, slots, rows, positions, parents)

    def _turns(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos and sin at these positions. The tables grow with the texts: a long context's would take 100 MB."""
        last = max(positions, default=0)
        cos, sin = self._tables(last + 1)
        first = last + 1 - len(positions)
        if list(positions) == list(range(first, last + 1)):  # one sequence and a chain, or nothing: no copy
            return cos[first : last + 1], sin[first : last + 1]
        place = torch.tensor(positions, device=self.device)
        return cos[place], sin[place]

    def _tables(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of at least so many positions."""
        if count > self._positions:
            cos, sin = self.weights.rope.tables(min(2 * count - 2 + _POSITIONS, self.context))
            self._turned, self._positions = (cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)), len(cos)
        return self._turned

    def _judged(self, batch: Pass) -> Tensor | slice:
        """The rows whose logits are asked for: each feed's last token and its nodes."""
        wanted = [
            row
            for feed, rows in zip(batch.feeds, batch.rows, strict=True)
            for row in range(rows.start + len(feed.tokens) - 1, rows.stop)
        ]
        return slice(None) if len(wanted) == len(batch.positions) else torch.tensor(wanted, device=self.device)

    def _head(self, x: Tensor) -> Tensor:
        if isinstance(self.weights.head, Packed):  # as the layers do it: every row alike, whatever shares the pass
            return self.weights.head(x, self.weights.norm, self.config.norm_eps)
        return self.weights.head(self.normed(x)).float()


class PackedLlama(Llama):
    """Layers that the kernels run: a row's keys and values are the same bits in any pass, so sequences share them."""

    page = SIZE

    def _memory_for(self, layers: int, kv_heads: int, head_dim: int) -> tuple[PagedCache, int]:
        stack = self.weights.stack
        large = isinstance(stack, NativeStack) and stack.large_keys
        self._pages = PagedCache(layers, kv_heads, head_dim, self._memory, bits=self.config.kv_bits, large=large)
        return self._pages, self._pages.count * SIZE

    @functools.cached_property
    def _native(self) -> NativeModel | None:
        """What runs whole passes; None where some of the model's matrices are not packed."""
        weights = self.weights
        if not (isinstance(weights.embedding, Packed) and isinstance(weights.head, Packed)):
            return None
        assert isinstance(weights.stack, NativeStack)
        return NativeModel(weights.stack, weights.embedding, weights.head, weights.norm)

    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[Output]:
        """In one call, where torch adds nothing before the layers or after them."""
        if self._native is None or not feeds:
            return super().forward(feeds, layers)
        for feed in feeds:
            if feed.adapter is not None and feed.adapter.weights.ends.nbytes:
                return super().forward(feeds, layers)
        longest = check_context(self, feeds)
        return self._native.forward(feeds, self._pages, self._tables(longest), layers)

    @property
    def pages(self) -> PagedCache:
        return self._pages

    def identity(self) -> str:
        """A digest of all that the bits of its keys and values depend on; it reads every weight."""
        weights, stack = self.weights, self.weights.stack
        assert isinstance(stack, NativeStack)
        assert isinstance(weights.embedding, Packed)
        rope = weights.rope
        versions = f"torch {torch.__version__} kernels {library.identity()} {rope.scale}"
        return digest(versions, repr(self.config), *weights.embedding.numbers, rope.frequencies, *stack.numbers)

    def adapter_bytes(self, adapter: Adapter) -> int:
        return native_adapters.packed_bytes(adapter)

    def adapt(self, adapter: Adapter, key: str) -> ReadyAdapter:
        packed = native_adapters.pack(adapter, self.adapter_base, self.num_layers)
        return ReadyAdapter(key, packed, packed.nbytes)

    def begin(self, id: int, tokens: Sequence[int], scope: Scope = "") -> int:
        return self._pages.begin(id, tokens, scope)

    def seen(self, id: int, tokens: Sequence[int], scope: Scope = "") -> None:
        self._pages.name(id, tokens, scope)

    def forget_prefixes(self) -> None:
        self._pages.forget_prefixes()


def on_cpu(config: LlamaConfig, weights: Weights, memory: int) -> Llama:
    """The model whose cache is laid out as its layers read it."""
    return (PackedLlama if isinstance(weights.stack, NativeStack) else Llama)(config, weights, memory)


def _split(batch: Pass, logits: Tensor, hidden: Tensor | None) -> list[Output]:
    outputs, row = [], 0
    for feed, rows in zip(batch.feeds, batch.rows, strict=True):
        after = row + 1 + len(feed.draft)
        outputs.append(Output(logits[row:after], None if hidden is None else hidden[rows]))
        row = after
    return outputs
