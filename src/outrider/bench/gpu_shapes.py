"""Models and heads of a given size with random weights, for measurements on a GPU: speed does not depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.eagle.head import EagleConfig, EagleHead
from outrider.models.cuda.model import CudaLlama
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack

EPS = 1e-5  # of norms


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    context: int
    theta: float  # of rotary embeddings
    draft_vocab: int  # tokens that a head of this target writes


SHAPES = {
    "smollm2": ModelShape(576, 1536, 9, 3, 64, 30, 49152, 2048, 1e5, 32768),  # SmolLM2-135M
    "8b": ModelShape(4096, 14336, 32, 8, 128, 32, 128256, 8192, 5e5, 32768),  # Llama 3.1 8B
    "tiny": ModelShape(32, 48, 4, 2, 16, 2, 96, 512, 1e4, 64),  # to see that a measurement runs
}


def random_llama(
    shape: ModelShape, memory: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> CudaLlama:
    """Layers that add little, and an output matrix that likes the token after the last: near ties, which random weights
    are full of, would depend on the rounding of a batch. `memory`: bytes for keys and values."""
    made = torch.Generator(device).manual_seed(0)

    def rand(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=made, device=device, dtype=dtype) * 0.02

    def layer() -> Layer:
        rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return Layer(
            1 + rand(shape.hidden),
            Dense(rand(rows, shape.hidden)),
            Dense(0.1 * rand(shape.hidden, shape.heads * shape.head_dim)),
            1 + rand(shape.hidden),
            Dense(rand(2 * shape.inner, shape.hidden)),
            Dense(0.1 * rand(shape.hidden, shape.inner)),
        )

    sizes = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, EPS, None
    config = LlamaConfig(*sizes, vocab_size=shape.vocab, num_layers=shape.layers, context=shape.context)
    rope = Rope(1.0 / shape.theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    stack = TorchStack(config, [layer() for _ in range(shape.layers)])
    embedding = 50 * rand(shape.vocab, shape.hidden)
    head = rand(shape.vocab, shape.hidden) + 0.02 * embedding.roll(1, 0)
    weights = Weights(Dense(embedding), stack, 1 + rand(shape.hidden), Dense(head), rope)
    return CudaLlama(config, weights, memory)


def random_eagle(shape: ModelShape) -> EagleHead:
    """A head as `outrider train eagle` makes them for such a target."""
    config = EagleConfig(
        *head_sizes(shape), read_layers(shape, 3), context=shape.context, norm_inputs=True, norm_residual=True
    )
    return EagleHead(config, torch.arange(shape.draft_vocab)).requires_grad_(False)


def read_layers(shape: ModelShape, count: int) -> tuple[int, ...]:
    """Of the target, whose states a head reads: from the second to the fourth last, or all of a small one."""
    if shape.layers < 8:
        return tuple(range(min(count, shape.layers)))
    return tuple(1 + place * (shape.layers - 5) // (count - 1) for place in range(count))


def head_sizes(shape: ModelShape) -> tuple[int, int, int, int, int, float, float, int, int]:
    """The first fields of a head's config."""
    attention = shape.heads, shape.kv_heads, shape.head_dim
    return shape.hidden, *attention, shape.inner, EPS, shape.theta, shape.vocab, shape.draft_vocab
