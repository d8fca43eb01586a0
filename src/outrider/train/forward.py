"""Decoder layers over whole texts, [batch, tokens, hidden] at once and without a cache: what training needs.

`block` is differentiable and runs everywhere; `fused_blocks` runs the frozen target on a GPU, with the kernels of its
passes around the matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.rope import swap_halves
from outrider.models.stack import Layer, StackConfig


def block(x: Tensor, layer: Layer, config: StackConfig, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, t, hidden] through one layer; cos and sin [t, head_dim]."""
    x = x + _attend(norm(x, layer.attention_norm, config.norm_eps), layer, config, cos, sin)
    gate, up = layer.gate_up(norm(x, layer.mlp_norm, config.norm_eps)).chunk(2, -1)
    return x + layer.down(F.silu(gate) * up)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def _attend(x: Tensor, layer: Layer, config: StackConfig, cos: Tensor, sin: Tensor) -> Tensor:
    b, t, _ = x.shape
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = layer.qkv(x).view(b, t, heads + 2 * kv_heads, config.head_dim).transpose(1, 2)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    if layer.query_norm is not None and layer.key_norm is not None:
        q, k = norm(q, layer.query_norm, config.norm_eps), norm(k, layer.key_norm, config.norm_eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    bias = _window(t, config.sliding_window, x)
    mixed = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, enable_gqa=heads != kv_heads)
    return layer.output(mixed.transpose(1, 2).reshape(b, t, heads * config.head_dim))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; sin has its sign for swapped halves."""
    return x * cos.to(x.dtype) + swap_halves(x) * sin.to(x.dtype)


def _window(t: int, window: int | None, x: Tensor) -> Tensor | None:
    """None: all that came before is seen. Else [t, t] bool."""
    if window is None or t <= window:
        return None
    ones = torch.ones(t, t, dtype=torch.bool, device=x.device)
    return ones.tril() & ones.triu(1 - window)


def can_fuse(layers: Sequence[Layer], config: StackConfig, x: Tensor) -> bool:
    """Whether `fused_blocks` can run these layers for x [b, t, hidden]."""
    plain = all(layer.query_norm is None for layer in layers)
    return x.is_cuda and plain and (config.sliding_window is None or x.shape[1] <= config.sliding_window)


def fused_blocks(x: Tensor, layers: Sequence[Layer], config: StackConfig, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
    """x [b, t, hidden] after each layer, which the next one overwrites; cos and signed sin [positions, head_dim]."""
    from outrider.models.cuda import kernels

    (b, t, size), half = x.shape, config.head_dim // 2
    turns = cos[:, :half].float().contiguous(), sin[:, half:].float().contiguous()
    x, rows = x.reshape(-1, size).clone(), b * t
    normed, delta = torch.empty_like(x), None
    for layer in layers:
        kernels.norm(x, layer.attention_norm, normed, config.norm_eps, rows, delta)
        if delta is not None:
            yield x.view(b, t, size)
        mixed = _fused_attend(layer.qkv(normed), config, turns, b, t)
        kernels.norm(x, layer.mlp_norm, normed, config.norm_eps, rows, layer.output(mixed))
        joined = layer.gate_up(normed)
        inner = torch.empty(rows, joined.shape[1] // 2, dtype=x.dtype, device=x.device)
        kernels.gate(joined, inner, rows)
        delta = layer.down(inner)
    yield (x if delta is None else x + delta).view(b, t, size)


def _fused_attend(joined: Tensor, config: StackConfig, turns: tuple[Tensor, Tensor], b: int, t: int) -> Tensor:
    """[b * t, heads * head_dim] from queries, keys and values side by side."""
    from outrider.models.cuda import kernels

    heads, kv_heads = config.num_heads, config.num_kv_heads
    kernels.turn(joined, turns, t, heads + kv_heads)
    parts = joined.view(b, t, heads + 2 * kv_heads, config.head_dim).transpose(1, 2)
    q, k, v = parts.split([heads, kv_heads, kv_heads], 1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    return mixed.transpose(1, 2).reshape(b * t, heads * config.head_dim)


def placed(rows: Tensor, where: Tensor, text: Tensor) -> Tensor:
    """[n, heads, size] -> [b, heads, t, size] for texts [b, heads, t, ...]: each row at its place `where` [n] of the
    flattened batch, 0 elsewhere; place b * t is left out."""
    texts, places = text.shape[0], text.shape[2]
    full = rows.new_zeros(texts * places + 1, *rows.shape[1:]).index_copy(0, where, rows)
    return full[:-1].unflatten(0, (texts, places)).transpose(1, 2)
