"""Llama-like models in plain torch: ragged feeds and trees in one pass.

Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2. The tokens of all feeds are one matrix for the linear layers; attention
goes sequence by sequence over that sequence's own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.base import Feed, Output
from outrider.models.cache import Cache, Slot
from outrider.models.linear import Linear

FEW = 16  # queries up to which two small products beat the fused attention kernel


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    sliding_window: int | None = None


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding: frequencies [head_dim / 2] and the factor that some scalings put on both parts."""

    frequencies: Tensor
    scale: float = 1.0

    def tables(self, context: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [context, head_dim]: rotated = x * cos + swapped_halves(x) * sin."""
        angles = torch.outer(torch.arange(context, dtype=torch.float32), self.frequencies.float())
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


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
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    rope: Rope


@dataclass(frozen=True, eq=False)
class _Span:
    """One feed's part of a pass: its rows, and its keys and values layer by layer."""

    rows: slice
    new_keys: tuple[Tensor, ...]  # per layer [kv_heads, new, head_dim]: where the new ones go
    new_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]  # per layer [kv_heads, seen, head_dim], the new ones included
    values: tuple[Tensor, ...]
    bias: Tensor | None  # 0 or -inf over the last columns: [group * new, columns] for few queries, else [new, seen]


class Llama:
    def __init__(self, config: LlamaConfig, weights: Weights, memory: int = 1 << 30) -> None:
        """`memory`: bytes that keys and values may take."""
        self.config, self.weights, self._memory = config, weights, memory
        self.vocab_size, self.num_layers, self.context = config.vocab_size, config.num_layers, config.context
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._cache = Cache(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device)
        self.capacity = memory // (2 * self._cache.bytes_per_token)  # a buffer that doubles may be half empty
        cos, sin = weights.rope.tables(config.context)
        self._cos = cos.to(self.device, self.dtype).unsqueeze(1)  # [context, 1, head_dim]
        self._sin = sin.to(self.device, self.dtype).unsqueeze(1)

    def length(self, id: int) -> int:
        return self._cache.length(id)

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        self._cache.crop(id, length, path)

    def free(self, id: int) -> None:
        self._cache.free(id)

    def first(self, layers: int) -> Llama:
        config = replace(self.config, num_layers=layers)
        return Llama(config, replace(self.weights, layers=self.weights.layers[:layers]), self._memory)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[Output]:
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[_Span] = []
        wanted: list[int] = []  # rows whose logits are asked for
        for feed in feeds:
            start, begin = len(tokens), self._cache.length(feed.id)
            count = len(feed.tokens)
            tokens += feed.tokens
            tokens += feed.draft.tokens
            positions += range(begin, begin + count)
            positions += (begin + count - 1 + depth for depth in feed.draft.depths())
            wanted += range(start + count - 1, len(tokens))
            slot = self._cache.extend(feed.id, len(tokens) - start)
            spans.append(self._span(slice(start, len(tokens)), slot, feed))
        place = torch.tensor(positions, device=self.device)
        cos, sin = self._cos[place], self._sin[place]  # [tokens, 1, head_dim]
        x = F.embedding(torch.tensor(tokens, device=self.device), self.weights.embedding)
        kept: list[Tensor] = []
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attend(index, layer, x, cos, sin, spans)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if index in layers:
                kept.append(x)
        if len(wanted) < len(tokens):
            logits = self._head(x[torch.tensor(wanted, device=self.device)])
        else:
            logits = self._head(x)
        hidden = torch.stack([kept[sorted(layers).index(i)] for i in layers], 1) if layers else None
        return _split(feeds, spans, logits, hidden)

    def _head(self, x: Tensor) -> Tensor:
        return self.weights.head(self._norm(x, self.weights.norm)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _attend(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, spans: Sequence[_Span]
    ) -> Tensor:
        config, count = self.config, x.shape[0]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(self._norm(x, layer.attention_norm)).view(count, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            qk = torch.cat([self._norm(qk[:, :heads], layer.query_norm), self._norm(qk[:, heads:], layer.key_norm)], 1)
        halves = qk.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        qk = torch.addcmul(qk * cos, halves, sin)
        mixed = [self._attend_one(index, span, qk[span.rows], v[span.rows]) for span in spans]
        return layer.output(torch.cat(mixed) if len(mixed) > 1 else mixed[0])

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

    def _span(self, rows: slice, slot: Slot, feed: Feed) -> _Span:
        new, end = rows.stop - rows.start, slot.length
        window = self.config.sliding_window
        begin = 0 if window is None else max(0, end - new - window + 1)  # what the first new token still sees
        return _Span(
            rows,
            slot.keys[:, :, end - new : end].unbind(0),
            slot.values[:, :, end - new : end].unbind(0),
            slot.keys[:, :, begin:end].unbind(0),
            slot.values[:, :, begin:end].unbind(0),
            self._bias(feed, new, end - begin),
        )

    def _bias(self, feed: Feed, new: int, seen: int) -> Tensor | None:
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
        bias = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill_(~allowed, float("-inf")).to(self.device)
        return bias if new > FEW else bias.repeat(self.config.num_heads // self.config.num_kv_heads, 1)


def _visible(feed: Feed, new: int) -> Tensor:
    """[new, new] bool: committed tokens see those before them, nodes see all committed ones and their ancestors."""
    visible = torch.ones(new, new, dtype=torch.bool).tril_()
    if not feed.draft.is_chain:
        count = len(feed.tokens)
        visible[count:, count:] = feed.draft.mask()
    return visible


def _split(feeds: Sequence[Feed], spans: Sequence[_Span], logits: Tensor, hidden: Tensor | None) -> list[Output]:
    outputs, row = [], 0
    for feed, span in zip(feeds, spans, strict=True):
        after = row + 1 + len(feed.draft)
        outputs.append(Output(logits[row:after], None if hidden is None else hidden[span.rows]))
        row = after
    return outputs
