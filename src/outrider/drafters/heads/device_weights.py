"""The weights that every head with decoder layers has, as the kernels of a GPU read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.block.head import BlockHead, BlockLayer
from outrider.drafters.eagle.head import EagleHead, EagleLayer
from outrider.models.cuda.batch import NODES
from outrider.models.cuda.model import CudaLlama
from outrider.models.cuda.product import widest_in_parts
from outrider.models.linear import Dense


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    qkv: Dense
    norms: tuple[Tensor, Tensor] | None  # gains of queries and keys, where they are normed
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    following: Tensor  # gain of the norm after it


class DeviceWeights:
    def __init__(self, head: EagleHead | BlockHead, target: CudaLlama) -> None:
        config = head.config
        self.ids = head.draft_ids.to(target.device)
        embedding: Any = head.embed_tokens if config.own_embedding else target.weights.embedding
        self.embedding: Tensor = embedding.weight.detach()
        output = head.lm_head.weight if config.own_output else target.output_rows(head.draft_ids)
        self.output = output.detach().to(target.dtype).contiguous()
        self.fc = Dense(head.fc.weight.detach(), None if head.fc.bias is None else head.fc.bias.detach())
        self.norm = head.norm.weight.detach()
        decoder: list[EagleLayer | BlockLayer] = [*head.decoder]
        following = [*(layer.input_layernorm.weight.detach() for layer in decoder[1:]), self.norm]
        self.layers = [_layer(layer, gain) for layer, gain in zip(decoder, following, strict=True)]
        cos, sin = head.rope.tables(target.context + NODES)
        half = config.head_dim // 2
        self.angles = cos[:, :half].contiguous().to(target.device), sin[:, half:].contiguous().to(target.device)

    @property
    def matrices(self) -> list[Tensor]:
        """Those whose sums may be taken in parts."""
        layers = (part for layer in self.layers for part in (layer.qkv.weight, layer.output, layer.down))
        return [*layers, self.fc.weight, self.output]

    @property
    def widest(self) -> int:
        return widest_in_parts(self.matrices)


def _layer(layer: EagleLayer | BlockLayer, following: Tensor) -> DeviceLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    normed = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return DeviceLayer(
        Dense(torch.cat([part.weight.detach() for part in parts]), bias),
        None if normed[0] is None or normed[1] is None else (normed[0].weight.detach(), normed[1].weight.detach()),
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        mlp.down_proj.weight.detach(),
        following,
    )
