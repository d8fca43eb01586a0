"""Rotary frequencies, plain and scaled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models.llama import Rope

FIXED = ("linear", "llama3", "yarn")  # scalings whose frequencies do not depend on the length of the text


def rope(
    head_dim: int, theta: float, context: int, scaling: dict[str, Any] | None = None, factors: Tensor | None = None
) -> Rope:
    """`scaling` in Hugging Face's words; `factors` [head_dim / 2] divide the frequencies (Llama 3 in GGUF)."""
    kind = (scaling or {}).get("rope_type", "default")
    if kind == "default":
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        return Rope(frequencies if factors is None else frequencies / factors, theta=theta)
    if kind not in FIXED:
        raise OutriderError(f"rotary positions scaled by {kind!r} are not known; known: {', '.join(FIXED)}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": theta, **(scaling or {})}
    config = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=context,
        standardize_rope_params=lambda: None,
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rope(frequencies if factors is None else frequencies / factors, scale, theta)
