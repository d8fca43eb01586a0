"""An EAGLE head as it is trained: how it begins, and its loss over several draft steps from every place of a text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.block.head import BlockHead
from outrider.drafters.eagle.head import EagleAttention, EagleConfig, EagleHead
from outrider.models.base import Feed, Model, Readable
from outrider.models.rope import swap_halves
from outrider.train.objective import STEP_DECAY, Comparison, Figures, Laws, TeacherBatch, distances, mean
from outrider.train.widths import inner_size, kept_inner

# Weights under `focus`. A round begins where the last draft was wrong, so mostly after an unlikely token: such a place
# counts BEGINS less the token's probability. A node below a wrong one counts UNREACHED of a node below a right one; not
# 0, because in a tree a sibling of the wrong one may be right.
BEGINS, UNREACHED = 1.5, 0.3

Past = list[tuple[Tensor, Tensor]]  # of one layer, by step: keys and values [b, heads, t, head_dim]


def fresh(
    target: Readable,
    draft_ids: Tensor | None = None,
    layers: Seq[int] = (),
    depth: int = 1,
    norm_inputs: bool = True,
    norm_residual: bool = True,
    norm_output: bool = False,
    inner: int = 0,
) -> EagleHead:
    """A head to be trained, begun from the target's last layers. `layers`: blocks to read; (): three, evenly. `inner`:
    numbers inside its layers; 0: what suits."""
    body, n = target.anatomy, target.num_layers
    layers = tuple(sorted(set(layers) or {max(0, round(n * i / 3) - 1) for i in (1, 2, 3)}))
    if not all(0 <= layer < n for layer in layers) or not 1 <= depth <= n:
        raise OutriderError(f"a head cannot read blocks {layers} with {depth} layers: the target has {n} blocks")
    config = EagleConfig(
        body.hidden_size,
        body.num_heads,
        body.num_kv_heads,
        body.head_dim,
        inner_size(body, inner),
        body.norm_eps,
        body.rope_theta,
        target.vocab_size,
        target.vocab_size if draft_ids is None else len(draft_ids),
        layers,
        depth,
        target.context,
        norm_inputs=norm_inputs,
        norm_residual=norm_residual,
        norm_output=norm_output,
        attention_bias=body.bias,
    )
    head = EagleHead(config, draft_ids)
    with torch.no_grad():
        _copy_layers(head, target)
    return head


def _copy_layers(head: EagleHead, target: Readable) -> None:
    """The last block's state goes through; the layers are the target's last, and mix in the embedding as a value.

    The state's root mean square is 1 and that of the target's residual far larger, so what the layers add is made
    smaller by as much: without that a head of SmolLM2 had learned a quarter as much after the same 40 steps.
    """
    size, first = head.config.hidden_size, target.num_layers - head.config.depth
    head.fc.weight.zero_()
    head.fc.weight[:, -size:] = torch.eye(size)
    head.norm.weight.copy_(target.tensor("model.norm.weight"))
    residual = residual_size(target, max(first - 1, 0))
    for index, layer in enumerate(head.decoder):
        prefix = f"model.layers.{first + index}."
        kept = kept_inner(target, prefix, head.config.inner_size)
        for name, weight in layer.named_parameters():
            if name == "hidden_norm.weight" or (index == 0 and name == "input_layernorm.weight"):
                continue  # stay 1: what the target's norm does is in the matrices that read it
            taken = target.tensor(prefix + name)
            if index == 0 and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                taken = taken * target.tensor(prefix + "input_layernorm.weight")
                taken = torch.cat([taken * float("v_proj" in name), taken], 1)
            if kept is not None and "mlp." in name:
                taken = taken[:, kept] if "down_proj" in name else taken[kept]
            weight.copy_(taken / residual if name.endswith(("o_proj.weight", "down_proj.weight")) else taken)


def residual_size(target: Readable, block: int) -> float:
    """The root mean square of the target's residual after a block, over some text."""
    model = cast(Model, target)
    tokens = [(7919 * i) % target.vocab_size for i in range(1, 65)]
    (output,) = model.forward([Feed(-1, tokens)], [block])
    model.free(-1)
    assert output.hidden is not None
    return float(output.hidden[:, 0].float().pow(2).mean(-1).sqrt().median())


@torch.no_grad()
def calibrate(head: EagleHead, batch: TeacherBatch) -> None:
    """Scale what the layers add to the size of the state they add it to: that is normalised, while the target's own
    layers write for residuals many times as large."""
    residuals = batch.hidden[batch.mask][:, -1].float()  # [tokens, hidden] after the last block that it reads
    size = residuals.square().mean(-1).sqrt().median()
    for layer in head.decoder:
        layer.self_attn.o_proj.weight /= size
        layer.mlp.down_proj.weight /= size


def loss(head: EagleHead, batch: TeacherBatch, how: Comparison) -> tuple[Tensor, Figures]:
    """Distillation over some draft steps from every place of the text, each with its own past of earlier steps. Both
    laws are compared at a temperature; the head's own logits stay those of temperature 1.

    The figures: loss, and per depth (from 1) `hit`, how often its likeliest token is the target's, and `keep`, the
    share of draws that rejection would keep.
    """
    answers, ids = batch.answers(), None if head.writes_all else head.draft_ids
    laws, output = Laws.of(batch, answers, ids, how.temperature), output_matrix(head, batch.output)
    embedding = head.embed_tokens.weight if head.config.own_embedding else batch.embedding
    state = batch.last if head.config.first else head.combine(batch.hidden)
    pasts: list[Past] = [[] for _ in head.layers]
    turns = rotations(head, batch.tokens.shape[1] + how.steps, state.device)
    total, figures, rows = torch.zeros((), device=state.device), {}, batch.tokens.shape[1]
    begins = answers.one_before(BEGINS - laws.best, 1.0)  # where the target was unsure a draft ended: a round begins
    for step in range(min(how.steps, rows - 2)):
        embedded = F.embedding(shifted(batch.tokens, 1 + step), embedding)
        state, normed = draft_step(head, embedded, state, pasts, turns[:, step : step + rows])
        places, counts = answers.before(2 + step)
        normed = normed.flatten(0, 1).index_select(0, places) / how.temperature
        part, kept, hit = distances(normed, output, laws, counts * begins if how.focus else counts)
        begins = answers.one_before(begins * (UNREACHED + (1 - UNREACHED) * hit), 1.0)
        figures[f"keep{step + 1}"], figures[f"hit{step + 1}"] = mean(kept, counts), mean(hit, counts)
        total = total + STEP_DECAY**step * part
    figures["loss"] = total.detach()
    return total, figures


def output_matrix(head: EagleHead, target: Tensor) -> Tensor:
    """[draft vocabulary, hidden]; `target`: the target's own, [vocab, hidden]."""
    if head.config.own_output:
        return head.lm_head.weight
    return target if head.writes_all else target[head.draft_ids]


def rotations(head: EagleHead | BlockHead, places: int, device: torch.device) -> Tensor:
    """cos and signed sin, [2, places, head_dim]"""
    angles = torch.outer(torch.arange(places, device=device, dtype=torch.float32), head.frequencies)
    cos, sin = angles.cos() * head.rope.scale, angles.sin() * head.rope.scale
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])


def draft_step(
    head: EagleHead, embedded: Tensor, state: Tensor, pasts: list[Past], turns: Tensor
) -> tuple[Tensor, Tensor]:
    """One draft step at every place: the next state, and what the logits are made of, [b, t, hidden] each."""
    x = head.fc(torch.cat([embedded.to(state.dtype), state], -1)) if head.config.first else state
    for layer, past in zip(head.decoder, pasts, strict=True):
        if layer.joins:
            normed = layer.hidden_norm(x)
            read = torch.cat([layer.input_layernorm(embedded.to(x.dtype)), normed], -1)
            x = normed if head.config.norm_residual else x
        else:
            read = x if layer.bare else layer.input_layernorm(x)
        x = x + _attend(head.config, layer.self_attn, read, past, turns)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    if head.config.first:
        return x, x
    normed = head.norm(x)
    return (normed if head.config.norm_output else x), normed


def _attend(config: EagleConfig, attention: EagleAttention, x: Tensor, past: Past, turns: Tensor) -> Tensor:
    """Place s of step j sees the places up to s of step 0 and place s of the steps 1 to j."""
    (b, t, _), groups = x.shape, config.num_heads // config.num_kv_heads
    q = turned(attention.q_proj(x).view(b, t, config.num_heads, -1).transpose(1, 2), turns)
    k = turned(attention.k_proj(x).view(b, t, config.num_kv_heads, -1).transpose(1, 2), turns)
    v = attention.v_proj(x).view(b, t, config.num_kv_heads, -1).transpose(1, 2)
    past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    values = attention_values(q, past, config.head_dim**-0.5)
    return attention.o_proj(values.transpose(1, 2).reshape(b, t, -1))


def attention_values(q: Tensor, past: Seq[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Values [b, heads, t, head_dim]: place s sees the places up to s of past[0], and place s of all others."""
    if q.is_cuda and q.dtype != torch.float32:
        from outrider.train.kernels import attend  # needs triton

        return attend(q, past, scale)
    (k, v), later, t = past[0], past[1:], q.shape[2]
    q = q * scale
    unseen = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)).float().masked_fill(unseen, float("-inf"))
    own = [(q * key).sum(-1, keepdim=True).float() for key, _ in later]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(v.dtype)
    mixed = weights[..., :t] @ v
    for place, (_, value) in enumerate(later):
        mixed = mixed + weights[..., t + place, None] * value
    return mixed


def shifted(x: Tensor, places: int) -> Tensor:
    """[b, t, ...] -> the same with x[:, i + places] at i; zeros where there is nothing."""
    return torch.cat([x[:, places:], torch.zeros_like(x[:, :places])], 1)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """[b, heads, t, head_dim] rotated; turns [2, t, head_dim]."""
    cos, sin = turns.to(x.dtype)
    return x * cos + swap_halves(x) * sin
