"""A llama-like model's weights by their Hugging Face names, dense, whatever form they are kept in."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from outrider.models.base import Anatomy
from outrider.models.llama_weights import LlamaConfig, Weights

# name in a layer -> where it lies, and its place among the parts that were joined
_MATRICES = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.o_proj": ("output", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
}
_NORMS = {
    "input_layernorm.weight": "attention_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "query_norm",
    "self_attn.k_norm.weight": "key_norm",
}


class Open:
    """What heads beside a llama-like model read of it (models.base.Readable), on whatever device it runs."""

    config: LlamaConfig
    weights: Weights

    @property
    def anatomy(self) -> Anatomy:
        return anatomy(self.config, self.weights)

    def embed(self, ids: Tensor) -> Tensor:
        return self.weights.embedding.rows(ids)

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights.norm, self.config.norm_eps)

    def output_rows(self, ids: Tensor) -> Tensor:
        return self.weights.head.rows(ids)  # type: ignore[attr-defined]

    def tensor(self, name: str) -> Tensor:
        return tensor(self.config, self.weights, name)


def anatomy(config: LlamaConfig, weights: Weights) -> Anatomy:
    layer = weights.stack.layers[-1]
    return Anatomy(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        _outputs(layer.gate_up) // 2,
        config.norm_eps,
        weights.rope.theta,
        layer.qkv.bias is not None,  # type: ignore[attr-defined]
    )


def tensor(config: LlamaConfig, weights: Weights, name: str) -> Tensor:
    """A copy; a KeyError where the model has no such weight."""
    if name == "model.norm.weight":
        return weights.norm.clone()
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return _weight(weights.embedding if name.startswith("model") else weights.head)
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    layer = weights.stack.layers[int(index)]
    found = getattr(layer, _NORMS[rest]).clone() if rest in _NORMS else _part(config, layer, rest)
    if found is None:
        raise KeyError(name)
    return found


def _part(config: LlamaConfig, layer: Any, rest: str) -> Tensor | None:
    stem, _, kind = rest.rpartition(".")
    place, part = _MATRICES[stem]
    linear = getattr(layer, place)
    whole = _weight(linear) if kind == "weight" else linear.bias
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    half = _outputs(layer.gate_up) // 2
    sizes = {"qkv": [heads, kv_heads, kv_heads], "gate_up": [half, half]}.get(place)
    return whole if whole is None or sizes is None else whole.split(sizes)[part].clone()


def _weight(linear: Any) -> Tensor:
    weight: Tensor = linear.weight
    return weight.clone()


def _outputs(linear: Any) -> int:
    outputs = getattr(linear, "outputs", None)
    return int(linear.weight.shape[0] if outputs is None else outputs)
