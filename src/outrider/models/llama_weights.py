"""The sizes and the weights of a llama-like model, as `llama.py` runs them and `read.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.models.linear import Embedding, Linear
from outrider.models.rope import Rope
from outrider.models.stack import Stack, StackConfig


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
