"""Which tokens top-k, top-p, min-p and typical-p leave of a law, so defined that every device finds the same ones.

Tokens stand in the order of their logits, equal ones in the order of their ids. What a token weighs is a whole number
of units, made of its distance below the highest logit by operations that all devices round alike. Sums of them are
exact in any order, so a cut does not depend on how anybody sums; models/cuda/cuts.py finds it without a sort.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.params import SamplingParams

# Units of the likeliest token. 2**34: the sum of up to 2**19 tokens is a whole number that float64 holds; a token of
# less than 2**-34 of it weighs nothing, so that 2**17 of them are less than a hundred-thousandth of the law.
UNITS = float(1 << 34)
FAR = 64.0  # bits below the likeliest token: what is further below counts as this far, and weighs nothing
# 2**x for x from 0 to 1, the highest power first, as float32 has them: right to 2e-7, and exact at both ends.
POWERS = (0.001879318617284298, 0.008990994654595852, 0.05581867694854736, 0.240159273147583, 0.6931517124176025, 1.0)
EXPONENT = 1 << 23  # what the exponent of a float32 is multiplied by in its bits
# Bits below the likeliest token: tokens up to there are looked at first, and if they have not the mass the next ones.
# Of 470 laws of SmolLM2 at temperature 1 and top_p 0.95 they had it for 52, 44, 4 and 0 % (LOG, 2026-11-18).
HEADS = (10.0, 13.0, 16.0, 20.0)


class CutNumbers(NamedTuple):
    """The cuts of one law as numbers that float64 holds exactly; all zero: there are none."""

    factor: float = 0.0  # bits that a token loses per logit below the highest; of float32
    top_k: float = 0.0  # 0: any
    top_p: float = 0.0
    farthest: float = 0.0  # logits below the highest, at most; of float32
    typical_p: float = 0.0

    @staticmethod
    def of(params: SamplingParams) -> CutNumbers:
        if params.greedy or not params.cuts:
            return CutNumbers()
        factor = _single(1.0 / (math.log(2.0) * params.temperature))
        farthest = abs(params.temperature * math.log(params.min_p)) if params.min_p > 0.0 else math.inf
        return CutNumbers(factor, params.top_k, params.top_p, _single(farthest), params.typical_p)


def _single(value: float) -> float:
    """Rounded to float32."""
    return float(np.float32(value))


def weights(below: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Of tokens whose logits are `below` the highest, float32: how many bits they are less likely than it, and what
    they weigh beside it. Every operation is rounded once."""
    bits = (below * factor).clamp_(max=FAR)
    up = bits.ceil()
    rest = up - bits
    weight = rest * POWERS[0]
    for power in POWERS[1:-1]:
        weight.add_(power).mul_(rest)
    weight.add_(POWERS[-1])
    power_of_two = up.to(torch.int32).mul_(-EXPONENT).add_(127 * EXPONENT).view(torch.float32)  # that of -up
    return bits, weight.mul_(power_of_two)


def units(below: Tensor, factor: float | Tensor) -> Tensor:
    """What they weigh, in units: whole numbers, of which sums are exact as float64."""
    return weights(below, factor)[1].mul_(UNITS).floor_()


def kept(logits: Tensor, params: SamplingParams) -> Tensor:
    """The tokens that are left of a row [vocab] float32, each cut on what the one before left; at least one. In what
    order they come depends on the cuts."""
    cut, below = CutNumbers.of(params), logits.max() - logits
    left = None  # None: all of them
    if 0 < cut.top_k < len(below):
        left = _first(below, int(cut.top_k), cut)
    if cut.top_p < 1.0:
        left = _nucleus(below, left, cut)
    if cut.farthest < math.inf:
        near = _near(below, cut.farthest) if left is None else left[below[left] <= cut.farthest]
        left = near if len(near) else _all(below)[:1]  # a row of NaN has none
    if cut.typical_p < 1.0:
        left = _typical(below, _all(below) if left is None else left.sort().values, cut)
    return _all(below) if left is None else left


def _all(below: Tensor) -> Tensor:
    return torch.arange(len(below), device=below.device)


def _near(below: Tensor, most: float | Tensor) -> Tensor:
    """The tokens within this distance of the highest logit; on a CPU by numpy, in a fifth of the time."""
    if below.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(below.numpy() <= float(most)))
    return (below <= most).nonzero().squeeze(1)


def _up_to(below: Tensor, most: float | Tensor) -> Tensor:
    """The same in order: to sort a whole vocabulary takes as long as a pass."""
    tokens = _near(below, most)
    return tokens[below[tokens].argsort(stable=True)]


def _first(below: Tensor, count: int, cut: CutNumbers) -> Tensor:
    order = _up_to(below, HEADS[0] / cut.factor)
    if len(order) < count:
        order = _up_to(below, below.topk(count, largest=False).values[-1])
    return order[:count] if len(order) else _all(below)[:count]  # a row of NaN has no order


def _nucleus(below: Tensor, left: Tensor | None, cut: CutNumbers) -> Tensor:
    """The first tokens that have a part `top_p` of what is left."""
    if left is not None:
        own = units(below[left], cut.factor)
        return _reaching(left, own, _needed(cut.top_p, own))
    every = units(below, cut.factor)
    needed = _needed(cut.top_p, every)
    for bits in HEADS:
        tokens = _near(below, bits / cut.factor)
        if bool(every[tokens].sum(dtype=torch.float64) >= needed):
            break
    else:
        tokens = _all(below)
    order = tokens[below[tokens].argsort(stable=True)]
    return _reaching(order, every[order], needed)


def _needed(part: float | Tensor, own: Tensor) -> Tensor:
    """Units that the first tokens must reach to have that part of all."""
    return (part * own.sum(-1, keepdim=True, dtype=torch.float64)).ceil()


def _reaching(order: Tensor, own: Tensor, needed: Tensor) -> Tensor:
    before = own.cumsum(0, dtype=torch.float64) - own
    return order[: max(1, int((before < needed).sum()))]


def _typical(below: Tensor, tokens: Tensor, cut: CutNumbers) -> Tensor:
    """Of these tokens those whose surprise is nearest to the mean one, which is the entropy."""
    far, own = _surprise(below[tokens], None, cut.factor)
    order = far.argsort(stable=True)
    return _reaching(tokens[order], own[order], _needed(cut.typical_p, own))


def _surprise(below: Tensor, left: Tensor | None, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """How far the surprise of each token is from the mean surprise of the remaining tokens, in bits, and its units."""
    bits, weight = weights(below, factor)
    own, surprise = (weight * UNITS).floor_(), (weight * bits).mul_(UNITS).floor_()
    if left is not None:
        own, surprise = own.where(left, 0.0), surprise.where(left, 0.0)
    whole = own.sum(-1, keepdim=True, dtype=torch.float64)
    mean = surprise.sum(-1, keepdim=True, dtype=torch.float64) / whole
    return (bits - mean.float()).abs_(), own


def kept_rows(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`kept` for [n, vocab] float32, each row under its own parameters: [n, vocab] bool."""
    cuts = list(map(CutNumbers.of, params))
    below = logits.max(-1, keepdim=True).values - logits
    left = torch.ones_like(below, dtype=torch.bool)

    def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=logits.device).unsqueeze(1)

    factor = column((cut.factor for cut in cuts), torch.float32)
    if any(cut.top_k or 0.0 < cut.top_p < 1.0 for cut in cuts):
        order = below.argsort(dim=-1, stable=True)
        rank = torch.arange(below.shape[1], device=logits.device)
        first = rank < column(cut.top_k or math.inf for cut in cuts)
        own = units(below.gather(1, order), factor).where(first, 0.0)
        left = torch.zeros_like(left).scatter_(1, order, first & _reached(own, column(c.top_p or 1.0 for c in cuts)))
    if any(cut.factor and cut.farthest < math.inf for cut in cuts):
        left &= below <= column((cut.farthest if cut.factor else math.inf for cut in cuts), torch.float32)
    if any(0.0 < cut.typical_p < 1.0 for cut in cuts):
        left &= _typical_rows(below, left, factor, column(cut.typical_p or 1.0 for cut in cuts))
    return left


def _reached(own: Tensor, part: Tensor) -> Tensor:
    """Which tokens [n, any], in their order, are needed to reach that part of all; a part of 1: every one is left."""
    found = own.cumsum(-1, dtype=torch.float64) - own < _needed(part, own)
    found[:, 0] = True
    return found | (part == 1.0)


def _typical_rows(below: Tensor, left: Tensor, factor: Tensor, part: Tensor) -> Tensor:
    far, own = _surprise(below, left, factor)
    order = far.where(left, math.inf).argsort(dim=-1, stable=True)
    return torch.zeros_like(left).scatter_(1, order, _reached(own.gather(1, order), part))
