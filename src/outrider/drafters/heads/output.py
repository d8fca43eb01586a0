"""The output matrix of a head: rows of the target's or its own, dense or packed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models.base import Readable
from outrider.models.linear import Dense
from outrider.models.native.library import NoCompiler, library
from outrider.models.native.packed import TILE, Packed, packable
from outrider.models.quant import quantise

BITS = {"int4": 4, "int8": 8}


def bits(quantize: str, target: Readable) -> int:
    """How many bits a head's weights have beside this target; 0: the target's own dtype."""
    if quantize == "auto":
        return 4 if target.packed else 0
    if quantize == "none":
        return 0
    if target.device.type != "cpu":
        raise OutriderError(f"a head is quantised to {quantize} on a CPU only, not on {target.device}; leave it out")
    try:
        library()
    except NoCompiler as reason:
        raise OutriderError(f"a head cannot be quantised to {quantize} here: {reason}") from reason
    return BITS[quantize]


def pack(weight: Tensor, bits: int, bias: Tensor | None = None) -> Packed:
    return Packed([quantise(weight.float(), bits)], [bias])


class OutputMatrix:
    """x [rows, hidden] -> logits [rows, draft vocabulary], float32."""

    def __init__(self, weight: Tensor, bits: int, dtype: torch.dtype) -> None:
        self._count = len(weight)
        if bits and packable(TILE, weight.shape[1]):
            self.linear: Packed | Dense = pack(F.pad(weight, (0, 0, 0, -self._count % TILE)), bits)
        else:
            self.linear = Dense(weight.to(dtype))

    def __call__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """With `norm` [hidden]: of x normalised by its root mean square."""
        if isinstance(self.linear, Packed):
            return self.linear(x, norm, eps)[:, : self._count]
        if norm is not None:
            x = F.rms_norm(x.float(), norm.shape, norm.float(), eps)
        return self.linear(x.to(self.linear.weight.dtype)).float()
