"""Cuts on a GPU, interpreted: a row keeps the tokens that core keeps, to the token, and chooses what core chooses."""

import math
import random
from dataclasses import replace

import pytest
import torch
from cut_laws import INF, cuts as some_cuts, law
from looped import draft_table
from tiny import assert_follows

from outrider.core.cuts import CutNumbers, kept_rows, units
from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.sampling import warp
from outrider.core.verify import rejection
from outrider.models.cuda import cuts, kernels
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.rejection import ChainDraws, verify

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
CPU = torch.device("cpu")


def cut(logits, params):
    """By the kernels, which write into the logits; a row for each of the parameters."""
    found = Cuts.of(params, CPU)
    left = logits.clone()
    if found is not None:
        found(left)
    return left


@pytest.fixture(params=["usual", "small"])
def memory(request, monkeypatch):
    """Small: few tokens fit into the memory of a search, so that it goes through the row; and many parts."""
    if request.param == "small":
        monkeypatch.setattr(cuts, "CAPACITY", 8)
        monkeypatch.setattr(cuts, "PART", 32)
    return request.param


@pytest.mark.parametrize("seed", range(6))
def test_a_row_keeps_what_core_keeps(seed, memory):
    luck, made = random.Random(seed), torch.Generator().manual_seed(seed)
    for size in (1, 37, 64, 301) if memory == "small" else (1, 301, 4096, 9001):
        logits = torch.stack([law(size, luck, made) for _ in range(8)])
        params = [some_cuts(size, luck) for _ in logits]
        left, wanted = cut(logits, params), kept_rows(logits, params)
        assert torch.equal(left, logits.where(wanted, -INF))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_the_last_unit_counts(temperature):
    """Masses that are met to the unit by the first tokens, and by one unit more: kernels weigh as core does."""
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(2))
    factor = CutNumbers.of(SamplingParams(temperature=temperature, top_k=1)).factor
    until = units(logits.max() - logits.sort(descending=True).values, factor).double().cumsum(0)
    places = range(1, 120, 7)
    masses = [float((until[n - 1] + more) / until[-1]) for n in places for more in (0.0, 1.0)]
    params = [SamplingParams(temperature=temperature, top_p=mass) for mass in masses]
    left = cut(logits.repeat(len(params), 1), params)
    assert torch.equal(left > -INF, kept_rows(logits.repeat(len(params), 1), params))
    assert (left > -INF).sum(1).tolist() == [n + more for n in places for more in (0, 1)]


@pytest.mark.parametrize("options", [dict(top_k=700), dict(top_k=2999), dict(top_p=0.95), dict(typical_p=0.9)])
def test_a_flat_law_has_more_tokens_near_its_highest_than_the_memory_holds(options, monkeypatch):
    monkeypatch.setattr(cuts, "CAPACITY", 64)
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(1))
    logits[1] = 0.25  # all are equal: nothing but their ids tells them apart
    params = [SamplingParams(temperature=1.0, **options)] * 2
    left = cut(logits, params)
    assert torch.equal(left > -INF, kept_rows(logits, params))
    assert (left[1] > -INF).nonzero().max() < (left[1] > -INF).sum(), "ids in order"


def test_the_rows_of_a_sequence_have_its_cuts_and_those_without_stay_as_they_are():
    made = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 500, generator=made)
    params = [SamplingParams(temperature=0.9, top_p=0.6), SamplingParams(temperature=0.9), SamplingParams(top_k=3)]
    found = Cuts.none(4, False, CPU)
    found.send([*params, SamplingParams(temperature=2.0, top_k=7)])
    left = logits.clone()
    found(left)
    assert torch.equal(left[:3] > -INF, kept_rows(logits[:3], params[:1] * 3))
    assert torch.equal(left[3:9], logits[3:9]), "no cuts, and a greedy request"
    assert (left[9:] > -INF).sum(1).tolist() == [7, 7, 7]
    found.send([None, params[0]])
    left = logits.clone()
    found(left)
    assert (left > -INF).all(1).tolist() == [True] * 3 + [False] * 3 + [True] * 6


@pytest.mark.parametrize("options", [dict(top_k=9), dict(top_p=0.8), dict(min_p=0.2), dict(typical_p=0.7, top_k=30)])
def test_what_is_added_counts(options):
    """A head's slots: the same for all rows of a sequence."""
    made = torch.Generator().manual_seed(4)
    logits, added = torch.randn(6, 400, generator=made), 2 * torch.randn(2, 3, 400, generator=made)[:, 1]
    params = [SamplingParams(temperature=0.8, **options), SamplingParams(temperature=1.2, **options)]
    found, left = Cuts.of(params, CPU), logits.clone()
    found(left, added)
    rows = [params[row // 3] for row in range(6)]
    assert torch.equal(left > -INF, kept_rows(logits + added.repeat_interleave(3, 0), rows))


@pytest.mark.parametrize("options", [dict(top_k=3), dict(top_p=0.6), dict(min_p=0.3), dict(typical_p=0.5)])
def test_numbers_that_overflowed_are_left_out(options):
    """A row of nothing else stays as it is; the others know nothing of it."""
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(5))
    logits[1], logits[3] = math.nan, -INF
    logits[2, 7], logits[2, 9], logits[4, 11] = math.nan, INF, 1e31
    params = [SamplingParams(temperature=1.0, **options)] * 5
    left = cut(logits, params)
    clean = logits.where(logits.abs() < 1e30, -INF)
    for row in (0, 2, 4):
        assert torch.equal(left[row] > -INF, kept_rows(clean[row : row + 1], params[:1])[0])
    assert bool(left[1].isnan().all() | (left[1] == -INF).all())
    assert bool((left[3] == -INF).all())
    out = torch.zeros(5, dtype=torch.int64)
    kernels.choose(left, torch.arange(5), torch.arange(5), torch.ones(5), out, True)
    assert bool(((out >= 0) & (out < 200)).all())


def signed(key):
    return key - (1 << 64) if key >= 1 << 63 else key


@pytest.mark.parametrize("size", [300, 9001])
def test_the_token_is_the_one_that_the_dice_choose(size):
    luck, made = random.Random(size), torch.Generator().manual_seed(size)
    logits = torch.stack([law(size, luck, made) for _ in range(40)])
    params = [replace(some_cuts(size, luck), temperature=luck.choice([0.4, 1.0, 1.6])) for _ in logits]
    dice, out = [Dice(n) for n in range(40)], torch.zeros(40, dtype=torch.int64)
    heat = torch.tensor([each.temperature for each in params])
    keys = torch.tensor([signed(one.key) for one in dice])
    kernels.choose(cut(logits, params), keys, torch.arange(40), heat, out, True)
    laws = [warp(row, each) for row, each in zip(logits, params, strict=True)]
    assert out.tolist() == [one.choose(p, at) for at, (one, p) in enumerate(zip(dice, laws, strict=True))]


CUT = [dict(top_k=3), dict(top_p=0.6), dict(min_p=0.3), dict(typical_p=0.7), dict(top_k=9, top_p=0.9, min_p=0.05)]


@pytest.mark.parametrize("options", CUT)
def test_a_verdict_on_guesses_is_that_of_the_rule(options):
    """Likely children and such as the cut has taken out."""
    size, count = 60, 30
    logits = 2 * torch.randn(count, 3, size, generator=torch.Generator().manual_seed(6))
    first = logits[:, 0].topk(4).indices
    drafts = [Draft((int(a), int(b), int(c)), (-1, -1, 0)) for a, b, c in first[:, [1, 0, 3]].tolist()]
    drafts[::5] = [Draft((int(row[0].argmin()),), (-1,)) for row in logits[::5]]
    params, dice = SamplingParams(temperature=1.1, **options), [Dice(n) for n in range(count)]
    rows = torch.cat([logits, logits[:, :1]], 1)  # 1 + 3 nodes; the last one's children are never asked
    left = cut(rows.flatten(0, 1), [params] * 4 * count)
    positions = torch.tensor([[9, *(9 + d for d in draft.depths()), 0, 0][:4] for draft in drafts])
    keys, out = torch.tensor([signed(one.key) for one in dice]), torch.zeros(4 * count, dtype=torch.int64)
    table, heat = draft_table(drafts, 2, 3), torch.full((count,), params.temperature)
    verify(left, keys, positions.flatten(), heat, out, table, 2)
    kept = set()
    for draft, own, chosen, one in zip(drafts, rows, out.view(count, 4).tolist(), dice, strict=True):
        wanted = rejection(draft, lambda node, own=own: warp(own[node + 1], params), one, 9)
        node, path = -1, []
        while (child := draft.child(node, chosen[node + 1])) is not None:
            path.append(child)
            node = child
        assert (tuple(path), chosen[node + 1]) == (wanted.path, wanted.token)
        kept.add(len(path))
    assert len(kept) > 1


@pytest.mark.parametrize("options", CUT[3:])
def test_what_is_drawn_and_kept_follows_the_cut_law(options):
    """A chain that is drawn from a cut law and judged by another: of all dice together the first token has the law of
    the target, cut as core cuts it."""
    count, size, params = 600, 12, SamplingParams(temperature=0.9, **options)
    made = torch.Generator().manual_seed(8)
    p, q = 1.5 * torch.randn(2, size, generator=made)
    dice, ones = [Dice(n) for n in range(count)], torch.ones(count, dtype=torch.int32)
    keys, laws, tokens = torch.tensor([signed(one.key) for one in dice]), torch.zeros(count, 1, size), ones * 0
    said = cut(q.unsqueeze(0), [params]).repeat(count, 1)
    ChainDraws(keys, 6 * ones, 0.9 * ones.float(), ones, 1, laws).draw(0, said, tokens, torch.zeros(count))
    torch.testing.assert_close(laws[0, 0], warp(q, params), rtol=1e-5, atol=1e-7)
    table, out = torch.zeros(count, 2 + 3, dtype=torch.int32), torch.zeros(2 * count, dtype=torch.int64)
    table[:, 0], table[:, 2], table[:, 3] = 1, tokens, -1
    left = cut(p.unsqueeze(0), [params]).repeat(2 * count, 1)
    verify(left, keys, torch.tensor([7, 8]).repeat(count), 0.9 * ones.float(), out, table, 2, laws, ones)
    law = warp(p, params)
    assert_follows(out[::2].tolist(), {token: float(law[token]) for token in range(size) if law[token] > 0})
