"""The weights of a block head as the kernels of a GPU read them."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.block.head import BlockHead, SequentialPart
from outrider.drafters.heads.device_weights import DeviceWeights
from outrider.models.cuda.model import CudaLlama
from outrider.models.linear import Dense

TOGETHER = 8192  # tokens whose embeddings are reduced at once


class BlockWeights(DeviceWeights):
    def __init__(self, head: BlockHead, target: CudaLlama) -> None:
        super().__init__(head, target)
        config, layers = head.config, head.decoder
        self.input_norms: Tensor | None = None
        self.embed_proj = self.starts = None
        if config.starts:
            self.input_norms = torch.stack([gain.detach() for gain in head.fc_norm.parameters()])
            self.embed_proj, self.starts = head.embed_proj.weight.detach(), head.slots[0].detach()
        self.joined_norm, self.entering = head.hidden_norm.weight.detach(), layers[0].input_layernorm.weight.detach()
        parts = [part for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        bias = torch.cat([part.bias.detach() for part in parts]) if config.attention_bias else None
        self.kv = Dense(torch.cat([part.weight.detach() for part in parts]), bias)  # of all layers
        gains = [norms[1] for norms in (layer.norms for layer in self.layers) if norms is not None]
        self.key_norms = torch.stack(gains) if gains else None
        self.sequential = SequentialWeights(head, self) if config.rank else None
        slot = None if self.sequential is None else self.sequential.slot
        # what a slot says by itself: its logits, and what it brings to the sums of the sequential part
        self.saying = Dense(self.output) if slot is None else _below(self.output, slot)

    @property
    def matrices(self) -> list[Tensor]:
        own = [self.kv.weight, self.saying.weight]
        own += [] if self.embed_proj is None else [self.embed_proj]
        return [*super().matrices, *own, *([] if self.sequential is None else [self.sequential.output])]


class SequentialWeights:
    def __init__(self, head: BlockHead, weights: DeviceWeights) -> None:
        part, config = head.markov_head, head.config
        self.kind, rank, hidden = config.sequential, config.rank, config.hidden_size
        if config.own_sequential:
            self.before, output = part.markov_w1.weight.detach(), part.markov_w2.weight.detach()
        else:
            self.before = reduced(part, weights.embedding)
            output = weights.output @ part.lift.weight.detach()
        self.output = output.to(weights.output.dtype).contiguous()  # W2, [draft vocabulary, rank]
        self.joint: Tensor | None = None  # what token and state bring to the sums
        self.slot: Dense | None = None  # what the slot brings
        if config.sequential == "rnn":
            joint = part.joint_proj.weight.detach()
            self.joint = joint[:, : 2 * rank].contiguous()
            self.slot = Dense(joint[:, 2 * rank :], part.joint_proj.bias.detach())
        elif config.sequential == "gated":
            joint = part.gate_proj.weight.detach()
            self.joint = joint[:, hidden:].contiguous()
            self.slot = Dense(joint[:, :hidden], part.gate_proj.bias.detach())


def reduced(part: SequentialPart, embedding: Tensor) -> Tensor:
    """[vocab, rank] what stands for each token."""
    return torch.cat([part.reduced(some).detach() for some in embedding.split(TOGETHER)])


def _below(output: Tensor, slot: Dense) -> Dense:
    """Both matrices as one, so that they are one product."""
    assert slot.bias is not None
    bias = torch.cat([slot.bias.new_zeros(len(output)), slot.bias])
    return Dense(torch.cat([output, slot.weight.to(output.dtype)]), bias)
