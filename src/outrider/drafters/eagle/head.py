"""An EAGLE head: a decoder layer that reads the target's own states (Li et al. 2024, 2025).

The head is the same as vLLM's, under the same names: at place s it reads the embedding of token s + 1 and the state
at s (the target's, joined from several of its blocks; while drafting its own last one) and says what token s + 2 is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.drafters.heads.module import DecoderHead, HeadMLP, HeadNorm


@dataclass(frozen=True)
class EagleConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    norm_eps: float
    rope_theta: float
    vocab_size: int  # the target's
    draft_vocab_size: int  # how many of those tokens the head can write
    layers: tuple[int, ...]  # the target's blocks whose residuals it reads, from 0; (): its final state (EAGLE-1, 2)
    depth: int = 1  # decoder layers
    context: int = 2048  # the target's
    norm_inputs: bool = False  # each block's residual is normalised (vLLM's fc_norm)
    norm_joined: bool = False  # all of them together are (vLLM's norm_before_fc)
    norm_residual: bool = False  # the normalised state goes round the first layer (vLLM's norm_before_residual)
    norm_output: bool = False  # the next step reads the normalised state
    fc_bias: bool = False
    attention_bias: bool = False
    own_output: bool = False  # else the target's output matrix, rows `draft_ids` of it
    own_embedding: bool = False
    rope_scaling: Mapping[str, Any] | None = None  # in Hugging Face's words

    @property
    def first(self) -> bool:
        """Of the first form (EAGLE-1, 2): embedding and final state joined by one matrix, no norms but one."""
        return not self.layers


class EagleAttention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, config.attention_bias)
        self.k_proj = nn.Linear(inputs, keys, config.attention_bias)
        self.v_proj = nn.Linear(inputs, keys, config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, False)


class EagleLayer(nn.Module):
    """A decoder layer; the first one of EAGLE-3 reads [embedding, state]."""

    input_layernorm: HeadNorm
    hidden_norm: HeadNorm

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        self.joins = index == 0 and not config.first
        self.bare = index == 0 and config.first  # without an input norm
        if not self.bare:
            self.input_layernorm = _norm(config, config.hidden_size)
        if self.joins:
            self.hidden_norm = _norm(config, config.hidden_size)
        self.self_attn = EagleAttention(config, config.hidden_size * (2 if self.joins else 1))
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.mlp = HeadMLP(config.hidden_size, config.inner_size)


class EagleHead(DecoderHead):
    config: EagleConfig

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None) -> None:
        """`draft_ids`: the tokens it can write, in ascending order; None: all."""
        super().__init__()
        self.config = config
        joined = len(config.layers) or 2
        self.fc = nn.Linear(joined * config.hidden_size, config.hidden_size, config.fc_bias)
        if config.norm_inputs:
            self.fc_norm = nn.ModuleList(_norm(config, config.hidden_size) for _ in config.layers)
        if config.norm_joined:
            self.input_norm = _norm(config, joined * config.hidden_size)
        self.layers = nn.ModuleList(EagleLayer(config, index) for index in range(config.depth))
        if not config.first:
            self.norm = _norm(config, config.hidden_size)
        if config.own_output:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.set_tokens(draft_ids)
        self.learned = self.draft_ids  # all that it can write, however much it is narrowed
        self.set_rope()

    @property
    def decoder(self) -> list[EagleLayer]:
        return cast("list[EagleLayer]", list(self.layers))

    def by_token(self) -> list[nn.Linear]:
        return [self.lm_head] if self.config.own_output else []

    def combine(self, hidden: Tensor) -> Tensor:
        """[..., layers, hidden] residuals of the target -> [..., hidden], the state that a step reads (EAGLE-3)."""
        if self.config.norm_inputs:
            hidden = torch.stack([norm(x) for norm, x in zip(self.fc_norm, hidden.unbind(-2), strict=True)], -2)
        joined = hidden.flatten(-2)
        if self.config.norm_joined:
            joined = self.input_norm(joined)
        return self.fc(joined.to(self.fc.weight.dtype))


def _norm(config: EagleConfig, size: int) -> HeadNorm:
    return HeadNorm(size, config.norm_eps)
