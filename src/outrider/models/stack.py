"""The decoder layers of a llama-like model in plain torch: the reference, and what runs dense weights.

The tokens of all feeds are one matrix for the linear layers; attention goes sequence by sequence over its own keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.models.base import Feed
from outrider.models.cache import Slot
from outrider.models.linear import Linear
from outrider.models.paged_cache import FLOATS, PagedSlot
from outrider.models.rope import rotate

FEW = 16  # queries up to which two small products beat the fused attention kernel


@dataclass(frozen=True)
class StackConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    sliding_window: int | None = None
    kv_bits: int = FLOATS  # of a number in the pages of packed models


@dataclass(frozen=True, eq=False)
class Layer:
    attention_norm: Tensor
    qkv: Linear  # queries, keys and values of all heads in one product
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None = None  # Qwen3
    key_norm: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass is made of, sequence by sequence; a row is a token or a node."""

    feeds: Sequence[Feed]
    slots: Sequence[Slot | PagedSlot]  # with the new rows already counted
    rows: Sequence[slice]
    positions: Sequence[int]  # per row
    parents: Sequence[int]  # per row: the row of its sequence that it follows, or -1

    def adapted(self, index: int, field: str, x: Tensor, y: Tensor) -> Tensor:
        """y = W x of a joined matrix of layer `index`, with what each feed's adapter adds to it."""
        for adapter, rows in self.adapters:
            adapter.weights.add(index, field, x[rows], y[rows])
        return y

    @functools.cached_property
    def adapters(self) -> list[tuple[ReadyAdapter, slice]]:
        """Those of its feeds, each with the rows that have it. The layers of a head run without feeds."""
        pairs = zip(self.feeds, self.rows, strict=False)
        return [(feed.adapter, rows) for feed, rows in pairs if feed.adapter is not None]


def places(feed: Feed, begin: int) -> tuple[list[int], list[int]]:
    """Position and parent of each row of a feed whose first token is at `begin`."""
    count, draft = len(feed.tokens), feed.draft
    positions = [*range(begin, begin + count), *(begin + count - 1 + depth for depth in draft.depths())]
    return positions, [*range(-1, count - 1), *(count + parent for parent in draft.parents)]


class Stack(Protocol):
    layers: tuple[Layer, ...]
    block: int  # rows or keys that attention takes together

    def run(
        self, x: Tensor, batch: Pass, cos: Tensor, sin: Tensor, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """x [rows, hidden] through the layers, and [rows, wanted, hidden] after the layers `wanted`."""
        ...

    def first(self, layers: int) -> Stack: ...


@dataclass(frozen=True, eq=False)
class _Span:
    """One feed's part of a pass: its rows, and its keys and values layer by layer."""

    rows: slice
    new_keys: tuple[Tensor, ...]  # per layer [kv_heads, new, head_dim]: where the new ones go
    new_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]  # per layer [kv_heads, seen, head_dim], the new ones included
    values: tuple[Tensor, ...]
    bias: Tensor | None  # 0 or -inf over the last columns: [group * new, columns] for few queries, else [new, seen]


class TorchStack:
    block = FEW

    def __init__(self, config: StackConfig, layers: Sequence[Layer]) -> None:
        self.config, self.layers = config, tuple(layers)

    def first(self, layers: int) -> TorchStack:
        return TorchStack(self.config, self.layers[:layers])

    def run(
        self, x: Tensor, batch: Pass, cos: Tensor, sin: Tensor, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [rows, 1, head_dim]
        spans = [self._span(*parts, x) for parts in zip(batch.rows, batch.slots, batch.feeds, strict=True)]
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = x + self._attend(index, layer, x, cos, sin, spans, batch)
            normed = self._norm(x, layer.mlp_norm)
            gate, up = batch.adapted(index, "gate_up", normed, layer.gate_up(normed)).chunk(2, -1)
            inner = F.silu(gate) * up
            x = x + batch.adapted(index, "down", inner, layer.down(inner))
            if index in wanted:
                kept[index] = x
        return x, torch.stack([kept[index] for index in wanted], 1) if wanted else None

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _attend(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, spans: Sequence[_Span], batch: Pass
    ) -> Tensor:
        config, count = self.config, x.shape[0]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        normed = self._norm(x, layer.attention_norm)
        qkv = batch.adapted(index, "qkv", normed, layer.qkv(normed)).view(count, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            qk = torch.cat([self._norm(qk[:, :heads], layer.query_norm), self._norm(qk[:, heads:], layer.key_norm)], 1)
        qk = rotate(qk, cos, sin)
        mixed = [self._attend_one(index, span, qk[span.rows], v[span.rows]) for span in spans]
        joined = torch.cat(mixed) if len(mixed) > 1 else mixed[0]
        return batch.adapted(index, "output", joined, layer.output(joined))

    def _attend_one(self, index: int, span: _Span, qk: Tensor, v: Tensor) -> Tensor:
        """One sequence's new tokens [new, heads, head_dim] over all of its keys -> [new, heads * head_dim]."""
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        count, group = qk.shape[0], heads // kv_heads
        span.new_keys[index].copy_(qk[:, heads:].transpose(0, 1))
        span.new_values[index].copy_(v.transpose(0, 1))
        keys, values = span.keys[index], span.values[index]
        q = qk[:, :heads].transpose(0, 1)  # [heads, new, head_dim]
        if count > FEW:
            q, keys, values = q.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
            mixed = F.scaled_dot_product_attention(q, keys, values, span.bias, enable_gqa=group > 1)[0]
            return mixed.transpose(0, 1).reshape(count, heads * head_dim)
        # the queries that share a key head lie side by side: no key is copied
        q = q.reshape(kv_heads, group * count, head_dim)
        scores = torch.bmm(q * head_dim**-0.5, keys.transpose(1, 2))  # [kv_heads, group * new, seen]
        if span.bias is not None:
            scores[:, :, -span.bias.shape[1] :] += span.bias
        mixed = torch.bmm(scores.softmax(-1), values)
        return mixed.view(heads, count, head_dim).transpose(0, 1).reshape(count, heads * head_dim)

    def _span(self, rows: slice, slot: Slot | PagedSlot, feed: Feed, x: Tensor) -> _Span:
        assert isinstance(slot, Slot)
        new, end = rows.stop - rows.start, slot.length
        window = self.config.sliding_window
        begin = 0 if window is None else max(0, end - new - window + 1)  # what the first new token still sees
        return _Span(
            rows,
            slot.keys[:, :, end - new : end].unbind(0),
            slot.values[:, :, end - new : end].unbind(0),
            slot.keys[:, :, begin:end].unbind(0),
            slot.values[:, :, begin:end].unbind(0),
            self._bias(feed, new, end - begin, x),
        )

    def _bias(self, feed: Feed, new: int, seen: int, x: Tensor) -> Tensor | None:
        """What each new token must not see."""
        if new == 1:
            return None
        allowed = _visible(feed, new)
        window = self.config.sliding_window
        if new > FEW or (window is not None and seen > window):
            allowed = torch.cat([torch.ones(new, seen - new, dtype=torch.bool), allowed], 1)
        if window is not None and seen > window:
            depth = torch.tensor([*range(len(feed.tokens)), *(len(feed.tokens) - 1 + d for d in feed.draft.depths())])
            place = torch.cat([torch.arange(-(seen - new), 0), depth])  # of each key, from the first new token
            allowed &= depth.unsqueeze(1) - place < window
        bias = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill_(~allowed, float("-inf")).to(x.device)
        return bias if new > FEW else bias.repeat(self.config.num_heads // self.config.num_kv_heads, 1)


def _visible(feed: Feed, new: int) -> Tensor:
    """[new, new] bool: committed tokens see those before them, nodes see all committed ones and their ancestors."""
    visible = torch.ones(new, new, dtype=torch.bool).tril_()
    if not feed.draft.is_chain:
        count = len(feed.tokens)
        visible[count:, count:] = feed.draft.mask()
    return visible
