"""The decoder layers in one call of the kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.core.errors import OutriderError
from outrider.models.native import structs
from outrider.models.native.library import library
from outrider.models.native.packed import BLOCK, Packed, PackedWorkspace, activations, use_torch_threads
from outrider.models.paged_cache import FLOATS, SCALED, PagedSlot
from outrider.models.stack import Layer, Pass, StackConfig

BYTES = 8  # of a number of `array("q")`, which is how addresses and sizes go to the kernels
KEYS = 16  # keys whose scores are taken together; the same number as in kernels.cpp
TOGETHER = 12  # queries that share one reading of keys and values; the same number as in kernels.cpp
ASKED = 6  # queries in 16 bits that are multiplied together with keys of 8; the same number as in attention.h
ASKED_BYTES = 76  # of a block of such a query: 32 numbers, a scale, two sums; AskedBlock of asked.h
# Passes in a row whose sequences are shorter than an eighth of the buffers' length, after which these are made anew: a
# prompt of 128k tokens leaves half a GB. Enough that turns of long and short sequences do not allocate each time.
SHORT_PASSES = 256
SHORTEST = 1040  # tokens of a sequence that buffers are at least for: most chats never make them grow


class NativeStack:
    """Layers whose matrices are all packed. Every row's result is the same whatever shares the pass."""

    block = KEYS

    def __init__(self, config: StackConfig, layers: Sequence[Layer], widest: int = 0) -> None:
        """`widest`: inputs of a matrix beside the layers that shares their buffers."""
        self.config, self.layers = config, tuple(layers)
        norms = (layers[0].attention_norm, layers[0].mlp_norm)
        if any(norm is not None and norm.dtype != torch.float32 for norm in norms):  # a head may lack the first
            raise OutriderError("packed weights are computed in float32; leave the dtype to Outrider")
        self._inner = packed(layers[0].gate_up).outputs // 2
        matrices = (linear for layer in layers for linear in (layer.qkv, layer.output, layer.down))
        self._widest = max(widest, *(packed(matrix).inputs for matrix in matrices))
        self._norms: list[Tensor] = []  # what the structures point into
        self._places: list[Tensor] = []  # and these
        self.structs = (structs.LayerStruct * len(layers))(*map(self._struct, layers))
        self.shape = structs.ShapeStruct(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=self._inner,
            layers=len(layers),
            window=config.sliding_window or 0,
            kv_bits=config.kv_bits,
            eps=config.norm_eps,
        )
        self._work: PackedWorkspace | None = None
        self._threads = 0  # that its buffers are for
        # Of the adapters of the last pass that had some: whose rows they are, their addresses, their inner values
        self._adapted_by: tuple[int, list[tuple[int, int, int, int]]] = 0, []
        self._owners = (ctypes.c_int64 * 0)()
        self._low = torch.empty(0)
        self._adapted = structs.Adapters()
        self._short = 0  # passes in a row with far shorter sequences than the buffers are for
        self._run = library().outrider_layers

    @property
    def multiply_adds(self) -> int:
        """Of a row in the products of all layers: the number of their weights."""
        matrices = ((layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self.layers)
        return sum(packed(each).outputs * packed(each).inputs for layer in matrices for each in layer)

    @property
    def numbers(self) -> list[Tensor | str | None]:
        """All that its keys and values depend on."""
        found: list[Tensor | str | None] = [repr(self.config)]
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                found += packed(linear).numbers
            found += (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        return found

    def first(self, layers: int) -> NativeStack:
        return NativeStack(self.config, self.layers[:layers])

    def run(
        self,
        x: Tensor,
        batch: Pass,
        cos: Tensor,
        sin: Tensor,
        wanted: Sequence[int],
        head_inputs: structs.HeadInputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`head_inputs`: what a head has beside its layers."""
        rows = x.shape[0]
        assert all(0 <= layer < len(self.layers) for layer in wanted)
        work = self.workspace(rows, max(slot.length for slot in batch.slots))
        spans = (structs.SpanStruct * len(batch.slots))(*(self._span(batch, i) for i in range(len(batch.slots))))
        kept = torch.empty(rows, len(wanted), x.shape[1]) if wanted else None
        adapters = self.adapters(batch.adapters, rows)
        use_torch_threads()
        self._run(
            ctypes.byref(self.shape),
            self.structs,
            spans,
            ctypes.c_int64(len(spans)),
            ctypes.c_int64(rows),
            pointer(x),
            pointer(cos),
            pointer(sin),
            (ctypes.c_int32 * rows)(*batch.positions),
            (ctypes.c_int32 * rows)(*batch.parents),
            (ctypes.c_int32 * len(wanted))(*wanted),
            ctypes.c_int64(len(wanted)),
            None if kept is None else pointer(kept),
            ctypes.byref(work.struct),
            None if head_inputs is None else ctypes.byref(head_inputs),
            None if adapters is None else ctypes.byref(adapters),
        )
        return x, kept

    def workspace(self, rows: int, longest: int, threads: int = 0) -> PackedWorkspace:
        """Buffers for this number of rows and sequences up to this length; 0: no sequence is read. `threads`: torch's,
        if they were looked up."""
        self._drop_large(longest)
        old, threads = self._work, threads or torch.get_num_threads()
        if old is not None and rows <= old.rows and longest <= old.struct.longest and threads <= self._threads:
            return old
        config, inner = self.config, self._inner
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = max(rows, 32, old.rows if old else 0)
        longest = max(2 * longest // 32 * 32 + 16, SHORTEST, old.struct.longest if old else 0)  # no power of 2: rows of
        # scores would all fall on the same lines of the first cache
        work = PackedWorkspace(rows, self._widest)
        work.add(
            qkv=torch.empty(rows, heads + 2 * kv_heads),
            mixed=torch.empty(rows, heads),
            inner=torch.empty(rows, 2 * inner),
            **activations(rows, inner, "gated_"),
            scores=torch.empty(threads, TOGETHER, longest),
            wide=torch.empty(threads, config.head_dim),
            asked=torch.empty(threads, ASKED, 1 - -config.head_dim // BLOCK, ASKED_BYTES, dtype=torch.uint8),
            places=torch.empty(rows, longest, dtype=torch.int32),
            seen=torch.empty(rows, dtype=torch.int32),
            runs=torch.empty(rows, dtype=torch.int32),
            owners=torch.empty(rows, dtype=torch.int32),
        )
        work.struct.longest = longest
        self._work, self._threads = work, threads
        return work

    def adapters(self, adapted: Sequence[tuple[ReadyAdapter, slice]], rows: int) -> structs.Adapters | None:
        """Which adapter each row has; None: no row has one."""
        if not adapted:
            return None
        pairs = ((adapter.weights, own) for adapter, own in adapted)
        spans = [(packed.address, packed.widest, own.start, own.stop) for packed, own in pairs]
        if (rows, spans) != self._adapted_by:  # mostly the rows of the pass before: then what it read is still right
            self._owners = (ctypes.c_int64 * rows)()
            for address, _, start, stop in spans:
                self._owners[start:stop] = [address] * (stop - start)
            widest = max(widest for _, widest, _, _ in spans)
            if self._low.numel() < rows * widest:
                self._low = torch.empty(2 * rows * widest)
            owners = ctypes.addressof(self._owners)
            self._adapted = structs.Adapters(rows=owners, low=self._low.data_ptr(), stride=widest)
            self._adapted_by = rows, spans
        return self._adapted

    def _drop_large(self, longest: int) -> None:
        if self._work is None or not longest:
            return
        self._short = self._short + 1 if max(8 * longest, SHORTEST) < self._work.struct.longest else 0
        if self._short == SHORT_PASSES:
            self._work, self._short = None, 0

    def _span(self, batch: Pass, index: int) -> structs.SpanStruct:
        slot, rows = batch.slots[index], batch.rows[index]
        assert isinstance(slot, PagedSlot)
        return self.place(slot, slot.length - (rows.stop - rows.start), rows)

    def place(self, slot: PagedSlot, start: int, rows: slice) -> structs.SpanStruct:
        return structs.SpanStruct(*self.numbers_of(slot, start, rows.start, rows.stop - rows.start))

    def numbers_of(self, slot: PagedSlot, start: int, first: int, rows: int) -> tuple[int, ...]:
        """The numbers of a SpanStruct: rows of a pass from `first` on, of a sequence that has `start` tokens before."""
        stride = 2 * slot.values
        return slot.address, slot.values, stride, stride * self.config.num_kv_heads, start, first, rows

    def _struct(self, layer: Layer) -> structs.LayerStruct:
        return structs.LayerStruct(
            qkv=packed(layer.qkv).joint,
            output=packed(layer.output).joint,
            gate_up=packed(layer.gate_up).joint,
            down=packed(layer.down).joint,
            attention_norm=self._norm(layer.attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            large=self._large(layer),
        )

    @property
    def large_keys(self) -> bool:
        """Whether some numbers of its keys of 8 bits are kept with 16."""
        return self.config.kv_bits != FLOATS and any(_stands_out(layer) for layer in self.layers)

    def _large(self, layer: Layer) -> int | None:
        """Which: the 16 numbers side by side, which share a scale, with the largest bias or norm among them, and those
        that are rotated together with them."""
        if not self.large_keys:
            return None
        config, norm, bias = self.config, layer.key_norm, packed(layer.qkv).bias
        heads, half = config.num_kv_heads, config.head_dim // 2
        sizes = torch.zeros(heads, config.head_dim)
        if bias is not None:
            first = config.num_heads * config.head_dim
            sizes += bias[first : first + sizes.numel()].view_as(sizes).float().abs()
        if norm is not None:
            sizes += norm.float().abs()
        pairs = torch.nn.functional.pad(torch.maximum(sizes[:, :half], sizes[:, half:]), (0, -half % SCALED))
        group = pairs.view(heads, -1, SCALED).amax(2).argmax(1, keepdim=True)  # [heads, 1]
        first_half = SCALED * group + torch.arange(SCALED)
        large = torch.cat([first_half, first_half + half], 1).int()
        large[torch.cat([first_half, first_half], 1) >= half] = -1
        self._places.append(large)
        return large.data_ptr()

    def _norm(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        self._norms.append(weight.float().contiguous())
        return self._norms[-1].data_ptr()


def _stands_out(layer: Layer) -> bool:
    return layer.key_norm is not None or packed(layer.qkv).bias is not None


def packed(linear: Any) -> Packed:
    assert isinstance(linear, Packed)
    return linear


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
