"""A decoder layer over whole texts, [batch, tokens, hidden] at once and without a cache: what learning needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    bias = _window(t, config.sliding_window, x)
    mixed = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, enable_gqa=heads != kv_heads)
    return layer.output(mixed.transpose(1, 2).reshape(b, t, heads * config.head_dim))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; sin has its sign for swapped halves."""
    halves = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x * cos.to(x.dtype) + halves * sin.to(x.dtype)


def _window(t: int, window: int | None, x: Tensor) -> Tensor | None:
    """None: all that came before is seen. Else [t, t] bool."""
    if window is None or t <= window:
        return None
    ones = torch.ones(t, t, dtype=torch.bool, device=x.device)
    return ones.tril() & ones.triu(1 - window)
