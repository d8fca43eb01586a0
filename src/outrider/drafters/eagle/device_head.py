"""The weights of an EAGLE head as the kernels of a GPU read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.eagle.head import EagleHead, EagleLayer
from outrider.models.cuda.batch import NODES
from outrider.models.cuda.model import CudaLlama
from outrider.models.cuda.product import widest_in_parts
from outrider.models.linear import Dense


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    qkv: Dense
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    following: Tensor  # gain of the norm after it


class DeviceHead:
    """A head's weights as the kernels read them."""

    def __init__(self, head: EagleHead, target: CudaLlama) -> None:
        config, first = head.config, head.decoder[0]
        self.ids = head.draft_ids.to(target.device)
        embedding: Any = head.embed_tokens if config.own_embedding else target.weights.embedding
        self.embedding: Tensor = embedding.weight.detach()
        output = head.lm_head.weight if config.own_output else target.output_rows(head.draft_ids)
        self.output = output.detach().to(target.dtype).contiguous()
        self.fc = Dense(head.fc.weight.detach(), None if head.fc.bias is None else head.fc.bias.detach())
        self.norm = head.norm.weight.detach()
        self.entering = first.input_layernorm.weight.detach(), first.hidden_norm.weight.detach()
        norms = [gain.detach() for gain in head.fc_norm.parameters()] if config.norm_inputs else []
        self.input_norms = torch.stack(norms) if norms else None
        self.joined_norm = head.input_norm.weight.detach() if config.norm_joined else None
        following = [*(layer.input_layernorm.weight.detach() for layer in head.decoder[1:]), self.norm]
        self.layers = [_layer(layer, gain) for layer, gain in zip(head.decoder, following, strict=True)]
        cos, sin = head.rope.tables(target.context + NODES)
        half = config.head_dim // 2
        self.angles = cos[:, :half].contiguous().to(target.device), sin[:, half:].contiguous().to(target.device)
        parts = (part for layer in self.layers for part in (layer.qkv.weight, layer.output, layer.down))
        self.widest = widest_in_parts((*parts, self.fc.weight, self.output))


def _layer(layer: EagleLayer, following: Tensor) -> DeviceLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    return DeviceLayer(
        Dense(torch.cat([part.weight.detach() for part in parts]), bias),
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        mlp.down_proj.weight.detach(),
        following,
    )
