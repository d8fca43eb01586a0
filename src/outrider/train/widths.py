"""How wide the layers of a head are inside: as wide as the target's, or the most useful part of that."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.models.base import Anatomy, Readable

# Times the hidden size, at most. Llama-like models have 2.7 to 5.8; a head of Qwen2.5-Coder-1.5B with all 8,960 numbers
# had 57 M parameters (docs/LOG.md), most of them there.
WIDEST = 3
MULTIPLE = 256  # which the kernels of packed weights can divide


def inner_size(body: Anatomy, asked: int) -> int:
    """`asked`: 0 for what suits."""
    most = asked or -(-WIDEST * body.hidden_size // MULTIPLE) * MULTIPLE
    return min(most, body.intermediate_size)


def kept_inner(target: Readable, prefix: str, count: int) -> Tensor | None:
    """The `count` inner numbers of a layer of the target that weigh most; None: all."""
    down = target.tensor(prefix + "mlp.down_proj.weight").float()
    if count >= down.shape[1]:
        return None
    up = target.tensor(prefix + "mlp.up_proj.weight").float()
    gate = target.tensor(prefix + "mlp.gate_proj.weight").float()
    weight = down.norm(dim=0) * up.norm(dim=1) * gate.norm(dim=1)
    return torch.sort(weight.topk(count).indices).values
