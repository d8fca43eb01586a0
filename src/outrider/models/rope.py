"""Rotary position embedding: frequencies, plain and scaled, and the rotation itself."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OutriderError, one_line, quoted

FIXED = ("linear", "llama3", "yarn")  # scalings whose frequencies do not depend on the length of the text
LARGEST = 1000.0  # scale of cos and sin: YaRN's is 1.5 for 128 times the context; attention overflows far above this


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding: frequencies [head_dim / 2] and the factor that some scalings put on both parts."""

    frequencies: Tensor
    scale: float = 1.0
    theta: float = 10_000.0  # that the frequencies were made from

    def tables(self, context: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [context, head_dim], for `rotate`."""
        angles = torch.outer(torch.arange(context, dtype=torch.float32), self.frequencies.float())
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def swap_halves(x: Tensor) -> Tensor:
    """The second half of the last dimension before the first."""
    return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] at its positions. The last product is not rounded before it is added, as a model always did;
    training rounds it (`x * cos + swap_halves(x) * sin`), and a checkpoint goes on with the same bits."""
    return torch.addcmul(x * cos, swap_halves(x), sin)


def rope(
    head_dim: int, theta: float, context: int, scaling: dict[str, Any] | None = None, factors: Tensor | None = None
) -> Rope:
    """`scaling` in Hugging Face's words; `factors` [head_dim / 2] divide the frequencies (Llama 3 in GGUF)."""
    kind = (scaling or {}).get("rope_type", "default")
    if kind not in ("default", *FIXED):
        raise OutriderError(f"rotary positions scaled by {kind!r} are not known; known: {', '.join(FIXED)}")
    try:
        with torch.device("cpu"):  # also for a head that is made without memory, on the device meta
            made = _plain(head_dim, theta) if kind == "default" else _scaled(head_dim, theta, context, scaling or {})
        made = made if factors is None else Rope(made.frequencies / factors, made.scale, theta)
        usable, reason = bool(made.frequencies.isfinite().all()) and 0 < made.scale <= LARGEST, "out of range"
    except Exception as error:  # whatever numbers out of a file make transformers or torch raise
        usable, reason = False, one_line(error, named=True)
    if not usable:
        given = f"theta {quoted(theta)} and scaling {quoted(scaling)}"
        raise OutriderError(f"rotary positions cannot be computed with {given} ({reason}); get the model's files again")
    return made


def _plain(head_dim: int, theta: float) -> Rope:
    return Rope(1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), theta=theta)


def _scaled(head_dim: int, theta: float, context: int, scaling: dict[str, Any]) -> Rope:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters={"rope_theta": theta, **scaling},
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=context,
        standardize_rope_params=lambda: None,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    return Rope(frequencies, scale, theta)
