"""A block head: one call guesses a whole block of tokens (DFlash, DSpark: Chen et al. 2026, DeepSeek 2026).

Some decoder layers read the target's states, joined from several of its blocks, as keys and values. Their rows are the
slots of a block: slot 0 stands at the last committed token, and slot k says what the token k + 1 places after it is. No
slot sees what another guessed, so a small sequential part on top adds what the tokens before it in the block change:
a law of each token given those before it, from which chains and trees are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.heads.module import DecoderHead, HeadMLP, HeadNorm

Sequential = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class BlockConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    norm_eps: float
    rope_theta: float
    vocab_size: int  # the target's
    draft_vocab_size: int  # how many of those tokens the head can write
    layers: tuple[int, ...]  # the target's blocks whose residuals it reads, from 0
    block: int = 8  # tokens that one call guesses
    depth: int = 3  # decoder layers
    context: int = 2048  # the target's
    rank: int = 256  # of the sequential part; 0: it has none, and the tokens of a block do not depend on each other
    sequential: Sequential = "rnn"  # what a token depends on: the one before it, that and the slot, or all before it
    # Whether slots begin from the target's newest state: a head then begins to learn where the target is. The public
    # form (False) begins from the embeddings of the last token and of a mask token.
    starts: bool = True
    causal: bool = True  # a slot sees those before it; the public form sees the whole block
    qk_norm: bool = False  # queries and keys are normalised, as the public form has it
    mask_token: int = 0  # the mask token of the public form
    attention_bias: bool = False
    confidence: bool = True  # it states how likely each guess is kept
    own_sequential: bool = False  # matrices over the vocabulary of its own; else made from the target's
    own_output: bool = False  # else the target's output matrix, rows `draft_ids` of it
    own_embedding: bool = False
    rope_scaling: Mapping[str, Any] | None = None  # in Hugging Face's words


class BlockAttention(nn.Module):
    q_norm: HeadNorm
    k_norm: HeadNorm

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, False)
        self._head_dim, self._normed = config.head_dim, config.qk_norm
        if config.qk_norm:
            self.q_norm = HeadNorm(config.head_dim, config.norm_eps)
            self.k_norm = HeadNorm(config.head_dim, config.norm_eps)

    def queries(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., heads, head_dim]"""
        q = self.q_proj(x).unflatten(-1, (-1, self._head_dim))
        return self.q_norm(q).to(q.dtype) if self._normed else q

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (part(x).unflatten(-1, (-1, self._head_dim)) for part in (self.k_proj, self.v_proj))
        return (self.k_norm(k).to(k.dtype) if self._normed else k), v


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = HeadNorm(config.hidden_size, config.norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, config.norm_eps)
        self.mlp = HeadMLP(config.hidden_size, config.inner_size)


class SequentialPart(nn.Module):
    """What the tokens before it in the block add to the logits of a slot: W2 g, with g [rank] from the embedding W1 of
    the token before it, from the slot's own state, and (rnn) from a state that is carried along the path.

    Where W1 and W2 are not the head's own, they are the target's embedding and output matrix times a small matrix: few
    weights, and tokens that are alike are treated alike. W2 g is then the output matrix times `lift(g)`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.kind, self.rank = config.sequential, config.rank
        rank, hidden = config.rank, config.hidden_size
        if config.own_sequential:
            self.markov_w1 = nn.Embedding(config.vocab_size, rank)
            self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, False)
        else:
            self.reduce, self.lift = nn.Linear(hidden, rank, False), nn.Linear(rank, hidden, False)
        if config.sequential == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.sequential == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def reduced(self, embedded: Tensor) -> Tensor:
        """[..., hidden] embeddings of the target -> [..., rank], what stands for a token."""
        normed = F.rms_norm(embedded.float(), embedded.shape[-1:])
        return self.reduce(normed.to(embedded.dtype))

    def step(self, state: Tensor, before: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """g [..., rank] and the next state, from the state [..., rank], the token before and the slot's own state."""
        if self.kind == "vanilla":
            return before, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([slot, before], -1))) * before, state
        gate, new, out = self.joint_proj(torch.cat([state, before, slot], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1.0 - gate) * torch.tanh(new)


class ConfidencePart(nn.Module):
    """The logit of the probability that a guess is kept if those before it are."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, slot: Tensor, before: Tensor | None) -> Tensor:
        return self.proj(slot if before is None else torch.cat([slot, before], -1)).squeeze(-1)


class BlockHead(DecoderHead):
    config: BlockConfig

    def __init__(self, config: BlockConfig, draft_ids: Tensor | None = None) -> None:
        """`draft_ids`: the tokens it can write, the most frequent first; None: all."""
        super().__init__()
        self.config, hidden = config, config.hidden_size
        if config.starts:
            self.fc_norm = nn.ModuleList(HeadNorm(hidden, config.norm_eps) for _ in config.layers)
            self.embed_proj = nn.Linear(hidden, hidden, False)
            self.slots = nn.Parameter(torch.zeros(1, config.block - 1, hidden))  # of three dimensions: no matrix
        self.fc = nn.Linear(len(config.layers) * hidden, hidden, False)
        self.hidden_norm = HeadNorm(hidden, config.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.depth))
        self.norm = HeadNorm(hidden, config.norm_eps)
        if config.rank:
            self.markov_head = SequentialPart(config)
        if config.confidence:
            self.confidence_head = ConfidencePart(hidden + config.rank)
        if config.own_output:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.set_tokens(draft_ids)
        self.set_rope()

    @property
    def decoder(self) -> list[BlockLayer]:
        return cast("list[BlockLayer]", list(self.layers))

    def by_token(self) -> list[nn.Linear]:
        output = [self.lm_head] if self.config.own_output else []
        sequential = self.config.own_sequential and self.config.rank
        return [*output, self.markov_head.markov_w2] if sequential else output

    def joined(self, hidden: Tensor) -> Tensor:
        """[..., layers, hidden] residuals of the target -> [..., hidden], of which keys and values are made."""
        if self.config.starts:
            hidden = torch.stack([norm(x) for norm, x in zip(self.fc_norm, hidden.unbind(-2), strict=True)], -2)
        dtype = self.hidden_norm.weight.dtype
        return self.hidden_norm(self.fc(hidden.flatten(-2).to(dtype))).to(dtype)

    def begin(self, newest: Tensor, last: Tensor, unknown: Tensor, count: int) -> Tensor:
        """[count, ..., hidden] the slots as they begin. `newest`: the target's newest state, joined; `last`,
        `unknown`: the embeddings of the last token and of the mask token, all [..., hidden]."""
        if not self.config.starts:
            return torch.stack([last, *[unknown.expand_as(last)] * (count - 1)]).to(newest.dtype)
        normed = F.rms_norm(last.float(), last.shape[-1:]).to(newest.dtype)
        first = newest + self.embed_proj(normed).to(newest.dtype)
        return torch.stack([first, *(first + slot.to(newest.dtype) for slot in self.slots[0, : count - 1])])
