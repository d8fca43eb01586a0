"""Cuts: what is left is what the definition says, to the token, whoever sums and in whatever order."""

import math
import random

import pytest
import torch
from cut_laws import INF, cuts, law

from outrider.core.cuts import UNITS, CutNumbers, kept, kept_rows, units, weights
from outrider.core.params import SamplingParams
from outrider.core.sampling import warp, warp_batch


def by_hand(logits, params):
    """The definition, with whole numbers of any size: tokens in order, each cut on what the one before left."""
    cut, best = CutNumbers.of(params), max(logits.tolist())
    below = logits.new_tensor(best) - logits
    own = [int(x) for x in units(below, cut.factor).tolist()]
    left = sorted((t for t in range(len(logits)) if logits[t] > -INF), key=lambda t: (float(below[t]), t))
    if params.top_k:
        left = left[: params.top_k]
    if params.top_p < 1.0:
        left = reaching(left, own, params.top_p)
    left = [t for t in left if float(below[t]) <= cut.farthest]
    if params.typical_p < 1.0:
        bits, weight = weights(below, cut.factor)
        whole = sum(own[t] for t in left)
        surprise = sum(int(x) for x in ((weight * bits) * UNITS)[left].floor().tolist())
        far = (bits - torch.tensor(surprise / whole, dtype=torch.float64).float()).abs()
        left = reaching(sorted(left, key=lambda t: (float(far[t]), t)), own, params.typical_p)
    return set(left)


def reaching(order, own, part):
    found, before, need = [], 0, part * float(sum(own[t] for t in order))
    for token in order:
        if found and before >= math.ceil(need):
            break
        found.append(token)
        before += own[token]
    return found


def cases(seed, sizes=(1, 2, 7, 300), count=60):
    luck, made = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = luck.choice(sizes)
        params = cuts(size, luck)
        if params.cuts:
            yield law(size, luck, made), params


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_is_the_definition(seed):
    for logits, params in cases(seed):
        left, wanted = kept(logits, params), by_hand(logits, params)
        assert {t for t in left.tolist() if logits[t] > -INF} == wanted
        assert len(set(left.tolist())) == len(left)
        rows = kept_rows(logits.unsqueeze(0), [params])[0] & (logits > -INF)
        assert set(rows.nonzero().squeeze(1).tolist()) == wanted
        for found in (warp(logits, params), warp_batch(logits.unsqueeze(0), [params])[0]):
            assert set(found.nonzero().squeeze(1).tolist()) <= wanted
            assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_batch_is_its_rows():
    """Rows with cuts and without, of one size; none shows in another."""
    found = [case for seed in range(4) for case in cases(seed, sizes=(90,), count=20)]
    found += [(logits, SamplingParams(temperature=0.8)) for logits, _ in found[:3]]
    logits, params = torch.stack([logits for logits, _ in found]), [params for _, params in found]
    together = kept_rows(logits, params)
    for row, own, each in zip(logits, together, params, strict=True):
        alone = kept_rows(row.unsqueeze(0), [each])[0]
        assert torch.equal(own, alone)
        assert each.cuts or bool(own.all())


@pytest.mark.parametrize(
    "options", [dict(top_k=60), dict(top_p=0.7), dict(typical_p=0.5), dict(top_p=0.999, min_p=1e-6)]
)
def test_where_tokens_stand_does_not_matter(options):
    """The tokens of a flat law in another order: sums of them are the same to the last bit."""
    made, params = torch.Generator().manual_seed(1), SamplingParams(temperature=1.3, **options)
    logits = torch.randn(20_000, generator=made)
    order = torch.randperm(len(logits), generator=made)
    here, there = kept(logits, params), kept(logits[order], params)
    assert sorted(here.tolist()) == sorted(order[there].tolist())
    assert 1 < len(here) < len(logits)


def test_equal_tokens_are_kept_in_the_order_of_their_ids():
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0, 3.0])
    assert kept(logits, SamplingParams(temperature=1.0, top_k=2)).tolist() == [1, 3]
    assert kept(logits, SamplingParams(temperature=1.0, top_k=4)).tolist() == [1, 3, 5, 0]
    assert kept(torch.zeros(8), SamplingParams(temperature=1.0, top_p=0.5)).tolist() == [0, 1, 2, 3]
    assert kept(torch.zeros(8), SamplingParams(temperature=1.0, typical_p=0.3)).tolist() == [0, 1, 2]
    assert kept(torch.tensor([0.0, -0.0, 0.0, -1.0]), SamplingParams(temperature=1.0, top_k=2)).tolist() == [0, 1]


def test_weights_are_those_of_a_softmax():
    below = torch.cat([torch.zeros(1), torch.rand(10_000) * 44])
    for temperature in (0.2, 1.0, 3.0):
        factor = CutNumbers.of(SamplingParams(temperature=temperature, top_k=1)).factor
        bits, weight = weights(below, factor)
        exact = (-below.double() / temperature).exp()
        near = bits < 60
        assert bool(((weight / exact - 1).abs()[near] < 4e-6).all())  # the bits themselves are rounded: 60 of them
        assert float(weight[0]) == 1.0
        assert torch.equal(units(below, factor), (weight.double() * UNITS).floor().float())


@pytest.mark.parametrize("options", [dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1), dict(typical_p=0.5)])
@pytest.mark.parametrize("broken", [math.nan, INF])
def test_numbers_that_overflowed_leave_a_token(options, broken):
    """Not the right one, for there is none; but the text can go on, or end."""
    params = SamplingParams(temperature=1.0, **options)
    for logits in (torch.tensor([0.0, broken, 1.0, 2.0]), torch.full((4,), broken)):
        assert 1 <= len(kept(logits, params)) <= 4
        assert kept_rows(logits.unsqueeze(0), [params]).shape == (1, 4)


def test_no_cuts_are_zeros():
    assert CutNumbers.of(SamplingParams(top_k=5)) == CutNumbers.of(SamplingParams(temperature=0.7)) == CutNumbers()
    cut = CutNumbers.of(SamplingParams(temperature=0.7, min_p=1.0))
    assert (cut.top_k, cut.top_p, cut.typical_p, math.copysign(1.0, cut.farthest)) == (0, 1, 1, 1)
    assert torch.tensor(cut, dtype=torch.float32).double().tolist() == list(cut)
