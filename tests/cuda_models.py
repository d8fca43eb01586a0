"""A random model on a GPU, of any shape."""

import torch

from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack


def weights(heads=6, kv_heads=2, head_dim=32, hidden=64, inner=96, layers=2, vocab=300, bias=False, norms=False,
            window=None, dtype=torch.float32, seed=0):  # fmt: skip
    made = torch.Generator("cuda").manual_seed(seed)

    def rand(*sizes):
        return (torch.randn(*sizes, generator=made, device="cuda") * 0.2).to(dtype)

    def layer():
        rows = (heads + 2 * kv_heads) * head_dim
        return Layer(
            1 + rand(hidden),
            Dense(rand(rows, hidden), rand(rows) if bias else None),
            Dense(rand(hidden, heads * head_dim)),
            1 + rand(hidden),
            Dense(rand(2 * inner, hidden)),
            Dense(rand(hidden, inner)),
            1 + rand(head_dim) if norms else None,
            1 + rand(head_dim) if norms else None,
        )

    config = LlamaConfig(
        hidden, heads, kv_heads, head_dim, 1e-5, window, vocab_size=vocab, num_layers=layers, context=2048
    )
    rope = Rope(1.0 / 10_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    stack = TorchStack(config, [layer() for _ in range(layers)])
    return config, Weights(Dense(rand(vocab, hidden)), stack, 1 + rand(hidden), Dense(rand(vocab, hidden)), rope)


def cuda_model(graphs=True, **sizes):
    from outrider.models.cuda.model import CudaLlama

    return CudaLlama(*weights(**sizes), 1 << 24, graphs)
