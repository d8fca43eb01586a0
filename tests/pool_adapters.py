"""Small models and adapters as tensors, for the kernels of a GPU."""

import torch

from outrider.models.adapters.adapter import Adapter, LowRank
from outrider.models.adapters.dense import FIELDS
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack

MATRICES = tuple(FIELDS)


def weights(
    layers=1, vocab=60, hidden=32, inner=40, heads=4, kv=2, d=16, dtype=torch.float32, device="cpu", context=256
):
    made = torch.Generator(device).manual_seed(0)

    def rand(*sizes):
        """Rows keep about the size of what they are made from; a vector is small beside 1."""
        size = sizes[-1] ** -0.5 if len(sizes) > 1 else 0.1
        return (torch.randn(*sizes, generator=made, device=device) * size).to(dtype)

    def layer():
        return Layer(
            1 + rand(hidden),
            Dense(rand((heads + 2 * kv) * d, hidden), rand((heads + 2 * kv) * d)),
            Dense(rand(hidden, heads * d)),
            1 + rand(hidden),
            Dense(rand(2 * inner, hidden)),
            Dense(rand(hidden, inner)),
            1 + rand(d),
            1 + rand(d),
        )

    config = LlamaConfig(hidden, heads, kv, d, 1e-5, None, vocab_size=vocab, num_layers=layers, context=context)
    rope = Rope(1.0 / 10_000 ** (torch.arange(0, d, 2).float() / d))
    stack = TorchStack(config, [layer() for _ in range(layers)])
    embedding, head = Dense(hidden**0.5 * rand(vocab, hidden)), Dense(8 * rand(vocab, hidden))
    return config, Weights(embedding, stack, 1 + rand(hidden), head, rope)


def lora(model, rank, seed, only=None, ends=(), strength=0.5):
    """Random pairs for all seven matrices of each layer, or one of them; large enough to change the text."""
    made = torch.Generator().manual_seed(seed)

    def pair(outputs, inputs):
        a, b = (torch.randn(*sizes, generator=made) for sizes in ((rank, inputs), (outputs, rank)))
        return LowRank(a / inputs**0.5, b * strength / rank**0.5, 1.5)

    names = MATRICES if only is None else (only,)
    shapes = model.adapter_base.shapes
    found = {name: pair(*shape) for name, shape in shapes.items() if name.endswith(names) or name in ends}
    return Adapter(found)
