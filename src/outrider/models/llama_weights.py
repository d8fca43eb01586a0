"""The sizes and weights of a llama-like model; each weight by its Hugging Face name, whatever form it is kept in."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from outrider.models.adapters.adapter import AdapterBase, shapes
from outrider.models.base import Anatomy
from outrider.models.linear import Embedding, Linear
from outrider.models.native.packed import Packed
from outrider.models.rope import Rope
from outrider.models.stack import Stack, StackConfig

# Field of a Layer -> the Hugging Face names of the matrices that are joined in it; below, of the norm in it.
MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
_PARTS = {name: (field, part) for field, names in MATRICES.items() for part, name in enumerate(names)}
_FIELDS = {f"{name}.weight": field for field, name in NORMS.items()}


@dataclass(frozen=True)
class LlamaConfig(StackConfig):
    vocab_size: int = 0
    num_layers: int = 0
    context: int = 0


@dataclass(frozen=True, eq=False)
class Weights:
    embedding: Embedding
    stack: Stack  # the decoder layers
    norm: Tensor
    head: Linear
    rope: Rope


class ReadableWeights:
    """What heads beside a llama-like model read of it (models.base.Readable), on whatever device it runs."""

    config: LlamaConfig
    weights: Weights

    @property
    def anatomy(self) -> Anatomy:
        return anatomy(self.config, self.weights)

    @functools.cached_property
    def adapter_base(self) -> AdapterBase:
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = (config.hidden_size, queries, keys, self.anatomy.intermediate_size)
        return AdapterBase(shapes(*sizes, config.vocab_size, config.num_layers), config.num_heads, config.num_kv_heads)

    @property
    def packed(self) -> bool:
        return isinstance(self.weights.head, Packed)

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
    found = getattr(layer, _FIELDS[rest]).clone() if rest in _FIELDS else _part(config, layer, rest)
    if found is None:
        raise KeyError(name)
    return found


def _part(config: LlamaConfig, layer: Any, rest: str) -> Tensor | None:
    stem, _, kind = rest.rpartition(".")
    place, part = _PARTS[stem]
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
