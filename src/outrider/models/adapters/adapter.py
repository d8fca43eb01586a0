"""An adapter as data: for some matrices of a model, a pair of small ones whose product is added; and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core.adapter import MOST_RANK
from outrider.core.errors import OutriderError

EMBEDDING, OUTPUT = "model.embed_tokens", "lm_head"  # the two matrices that are not in a layer
Shapes = Mapping[str, tuple[int, int]]  # Hugging Face name of a matrix -> outputs, inputs


@dataclass(frozen=True)
class AdapterBase:
    """What an adapter must fit: the sizes of a model's matrices, and its heads."""

    shapes: Shapes
    heads: int
    kv_heads: int


@dataclass(frozen=True, eq=False)
class LowRank:
    """y = W x + scale * B (A x). Of the embedding: A's columns are tokens."""

    a: Tensor  # [rank, inputs] float32
    b: Tensor  # [outputs, rank] float32
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def scaled(self) -> Tensor:
        """B with the scale in it."""
        return self.b * self.scale

    @property
    def delta(self) -> Tensor:
        """What is added to the matrix, [outputs, inputs]."""
        return self.scaled @ self.a


@dataclass(frozen=True, eq=False)
class Adapter:
    pairs: Mapping[str, LowRank]  # by the Hugging Face name of the matrix, without .weight
    base: str = ""  # the model that it says it was trained for
    # Whole matrices in place of the model's own (PEFT's modules_to_save): `outrider merge` writes them; none is served
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


def shapes(hidden: int, queries: int, keys: int, inner: int, vocab: int, layers: int) -> dict[str, tuple[int, int]]:
    """The matrices of a llama-like model that an adapter may be for. `queries`, `keys`: outputs of all heads."""
    each = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in each.items()}
    return {**found, EMBEDDING: (hidden, vocab), OUTPUT: (vocab, hidden)}


def check(adapter: Adapter, base: Shapes, what: str) -> None:
    """Refuse an adapter that does not fit the model. `what`: the adapter, as the message calls it."""
    if not adapter.pairs:
        raise OutriderError(f"{what} holds no LoRA matrices; choose another adapter")
    for name, pair in adapter.pairs.items():
        check_shape(name, (pair.b.shape[0], pair.a.shape[1]), base, what)
        if pair.b.shape[1] != pair.rank or not 1 <= pair.rank <= MOST_RANK:
            raise OutriderError(
                f"{what}: {name} has rank {pair.rank} and {pair.b.shape[1]}; both must be the same, 1 to {MOST_RANK}"
            )
        if not (torch.isfinite(pair.a).all() and torch.isfinite(pair.scaled).all()):
            raise OutriderError(f"{what}: {name} has values that are not finite; train or download it again")


def check_shape(name: str, shape: tuple[int, int], base: Shapes, what: str) -> None:
    if name not in base:
        raise OutriderError(
            f"{what} is for a matrix {name}, which the model does not have; it was made for another model"
        )
    if shape != base[name]:
        raise OutriderError(
            f"{what} is for {name} of {shape[0]} x {shape[1]}, and the model's has {base[name][0]} x {base[name][1]}; "
            "it was made for another model"
        )


def refuse_whole(adapter: Adapter, what: str) -> None:
    if adapter.replaced:
        raise OutriderError(
            f"{what} replaces {min(adapter.replaced)} as a whole (modules_to_save), which cannot be done per request; "
            "write model and adapter out as one with outrider merge, and load that"
        )
