"""Cuts on a GPU: rows keep the tokens that core keeps on a CPU, to the token. Texts with cuts: test_rounds."""

import math
import random
from dataclasses import replace

import pytest
import torch
from cuda_models import cuda_model
from cut_laws import INF, cuts, law

from outrider.core.cuts import kept_rows
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sampling import warp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def cut(logits, params):
    from outrider.models.cuda.cuts import Cuts  # needs triton

    left, found = logits.cuda(), Cuts.of(params, torch.device("cuda"))
    if found is not None:
        found(left)
    return left.cpu()


@pytest.mark.parametrize("size", [1, 37, 301, 4096, 49152, 128_256, 151_936])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_keeps_what_core_keeps_on_a_cpu(size, seed):
    luck, made = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(8 if size < 5000 else 2):
        logits = torch.stack([law(size, luck, made) for _ in range(12)])
        params = [cuts(size, luck) for _ in logits]
        wanted = kept_rows(logits, params)
        assert torch.equal(kept_rows(logits.cuda(), params).cpu(), wanted), "core on the device"
        assert torch.equal(cut(logits, params), logits.where(wanted, -INF))


def test_many_rows_of_usual_laws_and_of_broken_ones():
    """As many programs as there may be, at once and again; rows of NaN among them."""
    made, size = torch.Generator().manual_seed(1), 49152
    logits = torch.randn(160, size, generator=made) * 2
    logits.scatter_add_(1, torch.randint(size, (160, 40), generator=made), 9 + torch.randn(160, 40, generator=made))
    logits[5], logits[6, 3], logits[7] = math.nan, INF, -INF
    ways = [dict(top_p=0.95), dict(top_k=50), dict(top_k=50, top_p=0.9), dict(min_p=0.05), dict(typical_p=0.9), {}]
    params = [SamplingParams(temperature=0.6 + row % 5 / 5, **ways[row % 6]) for row in range(160)]
    wanted = kept_rows(logits.where(logits.abs() < 1e30, -INF), params)
    for _ in range(3):
        left = cut(logits, params)
        for row in (row for row in range(160) if row not in (5, 7)):
            if params[row].cuts:
                assert torch.equal(left[row] > -INF, wanted[row] & (logits[row].abs() < 1e30)), row
            else:
                assert torch.equal(left[row], logits[row])


def test_the_token_is_the_one_that_the_dice_choose_on_a_cpu():
    luck, made, size = random.Random(1), torch.Generator().manual_seed(1), 49152
    logits = torch.stack([law(size, luck, made) for _ in range(60)])
    params = [replace(cuts(size, luck), temperature=luck.choice([0.4, 1.0, 1.6])) for _ in logits]
    dice = [Dice(n) for n in range(60)]
    chosen = cuda_model().choose(logits.cuda(), params, dice, range(60)).tolist()
    laws = [warp(row, each) for row, each in zip(logits, params, strict=True)]
    assert chosen == [one.choose(p, at) for at, (one, p) in enumerate(zip(dice, laws, strict=True))]
