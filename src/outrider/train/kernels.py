"""On a GPU, each in one kernel: the target's laws, the distance of a head's laws from them with its gradient, and
attention over a text and a few draft steps without storing the scores. Equal to plain torch up to rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.train.forward import placed

BLOCK = 2048  # logits that a program holds at once


@triton.jit
def _law(logits_ptr, ids_ptr, law_ptr, best_ptr, size, count, ALL: tl.constexpr, BLOCK: tl.constexpr):
    """A row of logits [size] -> its softmax at the places ids [count] (ALL: everywhere); its highest probability."""
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, x)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - level) + tl.exp(x - level)
        highest = higher
    most = tl.max(highest, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(highest - most), 0)) + most
    tl.store(best_ptr + row, tl.exp(most - log_sum))
    for start in range(0, count, BLOCK):
        inside = start + column < count
        place = start + column
        if not ALL:
            place = tl.load(ids_ptr + start + column, mask=inside, other=0)
        x = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        tl.store(law_ptr + row.to(tl.int64) * count + start + column, tl.exp(x - log_sum), mask=inside)


def law(logits: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """[n, vocab] -> the probabilities of the tokens `ids` (None: of all) [n, ids], and the highest of all [n]."""
    rows, size = logits.shape
    count = size if ids is None else len(ids)
    found = torch.empty(rows, count, device=logits.device)
    best = torch.empty(rows, device=logits.device)
    _law[(rows,)](logits, ids, found, best, size, count, ids is None, BLOCK, num_warps=8)
    return found, best


@triton.jit
def _distance(
    logits_ptr, law_ptr, best_ptr, weight_ptr, loss_ptr, kept_ptr, hit_ptr, size, nearness, BLOCK: tl.constexpr
):  # fmt: skip
    """A row: three times over its logits x [size], which become the gradient, and the target's law p.

    loss = -sum p log q + nearness (1 - sum min(p, q)), q = softmax(x), so that
    dloss/dx = q sum(p) - p - nearness q ([q < p] - sum of q where q < p).
    """
    row = tl.program_id(0)
    logits, law = logits_ptr + row.to(tl.int64) * size, law_ptr + row.to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < size, other=float("-inf")).to(tl.float32)
        where = tl.where(x > highest, start + column, where)
        higher = tl.maximum(highest, x)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - level) + tl.exp(x - level)
        highest = higher
    most = tl.max(highest, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(highest - most), 0)) + most
    chosen = tl.min(tl.where(highest == most, where, size), 0)
    entropy = tl.zeros([BLOCK], tl.float32)
    kept = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)  # of p
    below = tl.zeros([BLOCK], tl.float32)  # of q where q < p
    for start in range(0, size, BLOCK):
        inside = start + column < size
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.load(law + start + column, mask=inside, other=0.0)
        q = tl.exp(x - log_sum)
        entropy -= tl.where(p > 0.0, p * (x - log_sum), 0.0)
        kept += tl.minimum(p, q)
        mass += p
        below += tl.where(q < p, q, 0.0)
    weight = tl.load(weight_ptr + row)
    all_p, all_below, all_kept = tl.sum(mass, 0), tl.sum(below, 0), tl.sum(kept, 0)
    for start in range(0, size, BLOCK):
        inside = start + column < size
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.load(law + start + column, mask=inside, other=0.0)
        q = tl.exp(x - log_sum)
        slope = q * all_p - p - nearness * q * (tl.where(q < p, 1.0, 0.0) - all_below)
        tl.store(logits + start + column, (slope * weight).to(logits_ptr.dtype.element_ty), mask=inside)
    tl.store(loss_ptr + row, tl.sum(entropy, 0) + nearness * (1.0 - all_kept))
    tl.store(kept_ptr + row, all_kept)
    tl.store(hit_ptr + row, tl.where(tl.load(law + chosen) >= tl.load(best_ptr + row), 1.0, 0.0))


class _Distance(torch.autograd.Function):
    """From the states on: so what comes from above is multiplied with the gradient of a state, not of its logits."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, output: Tensor, law: Tensor, best: Tensor, weight: Tensor, nearness: float
    ) -> Any:
        logits = states @ output.T
        rows, size = logits.shape
        loss, kept, hit = (torch.empty(rows, device=logits.device) for _ in range(3))
        _distance[(rows,)](logits, law, best, weight, loss, kept, hit, size, nearness, BLOCK, num_warps=8)
        ctx.save_for_backward(logits, states, output)
        ctx.mark_non_differentiable(kept, hit)
        return (loss * weight).sum(), kept, hit

    @staticmethod
    def backward(ctx: Any, above: Tensor, *rest: Tensor) -> Any:
        slopes, states, output = ctx.saved_tensors
        of_states = (slopes @ output) * above.to(output.dtype) if ctx.needs_input_grad[0] else None
        of_output = (slopes.T @ states) * above.to(output.dtype) if ctx.needs_input_grad[1] else None
        return of_states, of_output, None, None, None, None


def distance(
    states: Tensor, output: Tensor, law: Tensor, best: Tensor, weight: Tensor, nearness: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of the rows' losses, and what is kept and hit in each row; see objective.distance."""
    return _Distance.apply(states, output, law, best, weight, nearness)


class _Attend(torch.autograd.Function):
    """Flash attention over the text, joined with the keys of the steps after it by the sums of their weights.

    The backward of the text's part needs nothing but the weights' sum over everything and the output as a whole.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, k: Tensor, v: Tensor, *later: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, total, *rest = flash(q, k, v, 0.0, True, False, scale=scale)
        keys, values = later[::2], later[1::2]
        weights: list[Tensor] = []
        if keys:
            scores = [(q * key).sum(-1, dtype=torch.float32) * scale for key in keys]
            first, total = total, torch.logsumexp(torch.stack([total, *scores]), 0)
            weights = [torch.exp(score - total).unsqueeze(-1) for score in scores]
            mixed = out * torch.exp(first - total).unsqueeze(-1)
            for weight, value in zip(weights, values, strict=True):
                mixed = torch.addcmul(mixed, weight, value)
            out = mixed.to(q.dtype)
        ctx.scale, ctx.rest, ctx.count = scale, rest[:6], len(keys)
        ctx.save_for_backward(q, k, v, out, total, *keys, *values, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        q, k, v, out, total, *rest = ctx.saved_tensors
        keys, values, weights = (rest[i * ctx.count : (i + 1) * ctx.count] for i in range(3))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        with _repeatable():
            of_q, of_k, of_v = flash(
                above, q, k, v, out, total, *ctx.rest[:4], 0.0, True, *ctx.rest[4:], scale=ctx.scale
            )
        level = (above * out).sum(-1, keepdim=True, dtype=torch.float32)
        of_later: list[Tensor] = []
        for key, value, weight in zip(keys, values, weights, strict=True):
            slope = (above * value).sum(-1, keepdim=True, dtype=torch.float32)
            slope = (weight * (slope - level) * ctx.scale).to(q.dtype)
            of_q = of_q + slope * key
            of_later += [slope * q, weight.to(q.dtype) * above]
        return (None, of_q, of_k, of_v, *of_later)


@contextmanager
def _repeatable() -> Iterator[None]:
    """A resumed run has the losses of an uninterrupted run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attend(q: Tensor, past: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """[b, heads, t, head_dim]: place s sees the places up to s of past[0], and place s of all others."""
    return _Attend.apply(scale, q, *(part for pair in past for part in pair))


class _AttendBlocks(torch.autograd.Function):
    """Flash attention over the texts, a slot at a time and with a row for every place, joined with the few keys of the
    blocks themselves as in `_Attend`. Places where no block begins have queries and gradients of 0."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, text: Tensor, values: Tensor, where: Tensor, scale: float,
        causal: bool,
    ) -> Tensor:  # fmt: skip
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        outs, totals, rest = [], [], []
        kept = where.clamp(max=text.shape[0] * text.shape[2] - 1)
        for slot in q:
            out, total, *rest = flash(placed(slot, where, text), text, values, 0.0, True, False, scale=scale)
            outs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, kept))
            totals.append(total.transpose(1, 2).flatten(0, 1).index_select(0, kept))
        first = torch.stack(totals).permute(1, 2, 0)  # [n, heads, slots]
        with torch.autocast(q.device.type, enabled=False):
            weights, total = _own_weights(q, k, first, scale, causal)
            mixed = torch.stack(outs).float() * _by_slot(torch.exp(first - total)).unsqueeze(-1)
            out = (mixed + (weights @ _by_block(v)).permute(2, 0, 1, 3)).to(q.dtype)
        ctx.scale, ctx.rest = scale, rest[:6]
        ctx.save_for_backward(q, k, v, text, values, where, out, total, weights)
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        q, k, v, text, values, where, out, total, weights = ctx.saved_tensors
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        above, kept = above.to(q.dtype), where.clamp(max=text.shape[0] * text.shape[2] - 1)
        of_q, of_text, of_values = [], torch.zeros_like(text), torch.zeros_like(values)
        for slot, (rows, slopes, mixed) in enumerate(zip(q, above, out, strict=True)):
            slopes, rows, mixed = (placed(each, where, text) for each in (slopes, rows, mixed))
            sums = placed(total.select(2, slot).unsqueeze(-1), where, text).squeeze(-1).contiguous()
            with _repeatable():
                parts = flash(
                    slopes, rows, text, values, mixed, sums, *ctx.rest[:4], 0.0, True, *ctx.rest[4:], scale=ctx.scale
                )
            of_q.append(parts[0].transpose(1, 2).flatten(0, 1).index_select(0, kept))
            of_text, of_values = of_text + parts[1], of_values + parts[2]
        with torch.autocast(q.device.type, enabled=False):
            slopes = _by_block(above)
            level = (slopes * _by_block(out)).sum(-1, keepdim=True)
            steep = weights * (slopes @ _by_block(v).transpose(-1, -2) - level) * ctx.scale
            mine = (steep @ _by_block(k), steep.transpose(-1, -2) @ _by_block(q), weights.transpose(-1, -2) @ slopes)
            own_q, of_k, of_v = (each.permute(2, 0, 1, 3).to(q.dtype) for each in mine)
        return torch.stack(of_q) + own_q, of_k, of_v, of_text, of_values, None, None, None


def _own_weights(q: Tensor, k: Tensor, first: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """[n, heads, slots, slots] and [n, heads, slots]: the weights of a block's own keys, and the logarithm of the sum
    over all, of which `first` is that over the text."""
    scores = _by_block(q) @ _by_block(k).transpose(-1, -2) * scale
    if causal:
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    total = torch.logsumexp(torch.cat([first.unsqueeze(-1), scores], -1), -1)
    return torch.exp(scores - total.unsqueeze(-1)), total


def _by_block(x: Tensor) -> Tensor:
    """[slots, n, heads, size] -> [n, heads, slots, size], in float32."""
    return x.permute(1, 2, 0, 3).float()


def _by_slot(x: Tensor) -> Tensor:
    """[n, heads, slots] -> [slots, n, heads]"""
    return x.permute(2, 0, 1)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, text: Tensor, values: Tensor, where: Tensor, scale: float, causal: bool
) -> Tensor:
    """As `train.block.block_attention`."""
    return _AttendBlocks.apply(q, k, v, text, values, where, scale, causal)
