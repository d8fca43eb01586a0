"""The target over whole texts on a GPU: train.block with the kernels of its passes around the products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.stack import Layer, StackConfig


def fits(layers: Sequence[Layer], config: StackConfig, x: Tensor) -> bool:
    """Whether these blocks can be run so, for x [b, t, hidden]."""
    plain = all(layer.query_norm is None for layer in layers)
    return x.is_cuda and plain and (config.sliding_window is None or x.shape[1] <= config.sliding_window)


def blocks(x: Tensor, layers: Sequence[Layer], config: StackConfig, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
    """x [b, t, hidden] after each layer, which the next one overwrites; cos and signed sin [places, head_dim]."""
    from outrider.models.cuda import kernels

    (b, t, size), half = x.shape, config.head_dim // 2
    turns = cos[:, :half].float().contiguous(), sin[:, half:].float().contiguous()
    x, rows = x.reshape(-1, size).clone(), b * t
    normed, delta = torch.empty_like(x), None
    for layer in layers:
        kernels.norm(x, layer.attention_norm, normed, config.norm_eps, rows, delta)
        if delta is not None:
            yield x.view(b, t, size)
        mixed = _attend(layer.qkv(normed), config, turns, b, t)
        kernels.norm(x, layer.mlp_norm, normed, config.norm_eps, rows, layer.output(mixed))
        joined = layer.gate_up(normed)
        inner = torch.empty(rows, joined.shape[1] // 2, dtype=x.dtype, device=x.device)
        kernels.gate(joined, inner, rows)
        delta = layer.down(inner)
    yield (x if delta is None else x + delta).view(b, t, size)


def _attend(joined: Tensor, config: StackConfig, turns: tuple[Tensor, Tensor], b: int, t: int) -> Tensor:
    """[b * t, heads * head_dim] from queries, keys and values side by side."""
    from outrider.models.cuda import kernels

    heads, kv_heads = config.num_heads, config.num_kv_heads
    kernels.turn(joined, turns, t, heads + kv_heads)
    parts = joined.view(b, t, heads + 2 * kv_heads, config.head_dim).transpose(1, 2)
    q, k, v = parts.split([heads, kv_heads, kv_heads], 1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    return mixed.transpose(1, 2).reshape(b * t, heads * config.head_dim)
