"""Several adapters as one: the exact weighted sum, or as PEFT's add_weighted_adapter mixes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.adapter import MOST_RANK, AdapterMix
from outrider.core.errors import OutriderError
from outrider.models.adapters.adapter import Adapter, LowRank


def merged(adapters: Sequence[Adapter], mix: AdapterMix) -> Adapter:
    """A pure function: the same adapters and the same mix give the same values. `adapters`: in the order of the mix."""
    names = list(dict.fromkeys(name for adapter in adapters for name in adapter.pairs))
    random = torch.Generator().manual_seed(mix.seed)
    pairs = {}
    for name in names:
        found = [(adapter.pairs[name], weight) for adapter, weight in _weighted(adapters, mix) if name in adapter.pairs]
        pairs[name] = _sum(name, found) if mix.strategy == "cat" else _mixed(name, found, mix, random)
    return Adapter(pairs, adapters[0].base)


def _weighted(adapters: Sequence[Adapter], mix: AdapterMix) -> list[tuple[Adapter, float]]:
    return list(zip(adapters, mix.weights, strict=True))


def _sum(name: str, found: Sequence[tuple[LowRank, float]]) -> LowRank:
    """Exactly what each adds, times its weight: the ranks add up."""
    if len(found) == 1:
        pair, weight = found[0]
        return LowRank(pair.a, pair.b, pair.scale * weight)
    rank = sum(pair.rank for pair, _ in found)
    if rank > MOST_RANK:
        raise OutriderError(
            f"the ranks of {name} add up to {rank}, more than {MOST_RANK}; mix fewer adapters, or with strategy linear"
        )
    return LowRank(
        torch.cat([pair.a for pair, _ in found]), torch.cat([pair.scaled * weight for pair, weight in found], 1)
    )


def _mixed(name: str, found: Sequence[tuple[LowRank, float]], mix: AdapterMix, random: torch.Generator) -> LowRank:
    """A and B are mixed each by itself, with the root of weight times scale: that is PEFT's way."""
    if len({pair.rank for pair, _ in found}) > 1:
        ranks = ", ".join(str(pair.rank) for pair, _ in found)
        raise OutriderError(
            f"{mix.strategy} needs adapters of one rank, and {name} has {ranks}; use strategy cat, which takes any"
        )
    factors = [weight * pair.scale for pair, weight in found]
    roots = [math.sqrt(abs(factor)) for factor in factors]
    signed = [root if factor >= 0 else -root for root, factor in zip(roots, factors, strict=True)]
    a = _values([pair.a for pair, _ in found], signed, mix, random)
    return LowRank(a, _values([pair.b for pair, _ in found], roots, mix, random))


def _values(tensors: Sequence[Tensor], weights: Sequence[float], mix: AdapterMix, random: torch.Generator) -> Tensor:
    density = 1.0 if mix.density is None else mix.density
    if density < 1 and mix.strategy != "linear":
        prune = _largest if mix.strategy == "ties" else _dropped
        tensors = [prune(tensor, density, random) for tensor in tensors]
    stacked = torch.stack(list(tensors))
    weighted = stacked * torch.tensor(weights).view(-1, 1, 1)
    if mix.strategy in ("linear", "dare_linear"):
        return weighted.sum(0)
    agree = _majority(stacked, mix.majority_sign_method)
    return (weighted * agree).sum(0) / agree.sum(0).clamp(min=1.0)


def _largest(tensor: Tensor, density: float, random: torch.Generator) -> Tensor:
    """The share of values with the largest magnitude; the others are 0."""
    mask = torch.zeros(tensor.numel())
    mask[tensor.abs().flatten().topk(int(density * tensor.numel())).indices] = 1
    return tensor * mask.view(tensor.shape)


def _dropped(tensor: Tensor, density: float, random: torch.Generator) -> Tensor:
    """Values dropped at random, the others larger by as much (DARE)."""
    return tensor * torch.bernoulli(torch.full_like(tensor, density), generator=random) / density


def _majority(stacked: Tensor, method: str) -> Tensor:
    """Which values have the sign that most of the adapters agree on."""
    signs = stacked.sign()
    totals = (stacked if method == "total" else signs).sum(0)
    return signs == torch.where(totals >= 0, 1, -1)
