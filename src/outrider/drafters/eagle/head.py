"""An EAGLE head: a decoder layer that reads the target's own states (Li et al. 2024, 2025).

The head is the same as vLLM's, under the same names: at place s it reads the embedding of token s + 1 and the state
at s (the target's, joined from several of its blocks; while drafting its own last one) and says what token s + 2 is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.rope import rope


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


class EagleMLP(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.inner_size, False)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_size, False)
        self.down_proj = nn.Linear(config.inner_size, config.hidden_size, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A decoder layer; the first one of EAGLE-3 reads [embedding, state]."""

    input_layernorm: Norm
    hidden_norm: Norm

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
        self.mlp = EagleMLP(config)


class EagleHead(nn.Module):
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
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids.clone()
        self.register_buffer("draft_ids", ids, persistent=False)
        self.learned = ids  # all that it can write, however much it is narrowed
        self.draft_ids: Tensor
        scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
        self.rope = rope(config.head_dim, config.rope_theta, config.context, scaling)
        self.register_buffer("frequencies", self.rope.frequencies.float(), persistent=False)
        self.frequencies: Tensor

    @property
    def decoder(self) -> list[EagleLayer]:
        return cast("list[EagleLayer]", list(self.layers))

    @property
    def reads(self) -> tuple[int, ...]:
        """The target's blocks whose residuals it needs, in that order."""
        return self.config.layers

    def narrow(self, vocab: int) -> None:
        """From now on it writes only the first `vocab` of its tokens."""
        self.draft_ids = self.draft_ids[:vocab]
        self.config = replace(self.config, draft_vocab_size=len(self.draft_ids))
        if self.config.own_output:
            self.lm_head.weight = nn.Parameter(self.lm_head.weight[:vocab])

    @property
    def writes_all(self) -> bool:
        """Whether it can write every token of the target."""
        return self.config.draft_vocab_size == self.config.vocab_size

    def combine(self, hidden: Tensor) -> Tensor:
        """[..., layers, hidden] residuals of the target -> [..., hidden], the state that a step reads (EAGLE-3)."""
        if self.config.norm_inputs:
            hidden = torch.stack([norm(x) for norm, x in zip(self.fc_norm, hidden.unbind(-2), strict=True)], -2)
        joined = hidden.flatten(-2)
        if self.config.norm_joined:
            joined = self.input_norm(joined)
        return self.fc(joined.to(self.fc.weight.dtype))


class Norm(nn.Module):
    """Root mean square, in float32 whatever the rest is computed in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


def _norm(config: EagleConfig, size: int) -> Norm:
    return Norm(size, config.norm_eps)
