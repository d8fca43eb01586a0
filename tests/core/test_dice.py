"""Luck is uniform, independent, and never depends on who asks or when."""

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from tiny import assert_follows

from outrider.core.dice import ACCEPT, DRAFT, NOISE, RESIDUAL, Dice

STREAMS = (NOISE, DRAFT, RESIDUAL, ACCEPT)


def uniform(coins):
    return stats.kstest(coins, "uniform").pvalue > 1e-4


def independent(ours, theirs):
    """Chi-square over an 8 x 8 table of pairs."""
    table, _, _ = numpy.histogram2d(ours, theirs, bins=8, range=[[0, 1], [0, 1]])
    return stats.chi2_contingency(table).pvalue > 1e-4


def coins(seeds=(0,), positions=(0,), stream=ACCEPT, indices=(0,), sample=0):
    return [Dice(s, sample).uniform(p, stream, i) for s in seeds for p in positions for i in indices]


MANY = range(3000)


@pytest.mark.parametrize("vary", ["seeds", "positions", "indices"])
@pytest.mark.parametrize("stream", STREAMS)
def test_coins_are_uniform_along_every_key(vary, stream):
    assert uniform(coins(stream=stream, **{vary: MANY}))


@pytest.mark.parametrize("vary", ["seeds", "positions", "indices"])
def test_coins_that_follow_each_other_are_independent(vary):
    drawn = coins(**{vary: MANY})
    assert independent(drawn[:-1], drawn[1:])


@pytest.mark.parametrize("stream", STREAMS[:-1])
def test_streams_are_independent(stream):
    assert independent(coins(positions=MANY, stream=ACCEPT), coins(positions=MANY, stream=stream))


def test_samples_of_one_request_are_independent():
    assert independent(coins(positions=MANY), coins(positions=MANY, sample=1))


def test_seeds_that_are_neighbours_are_independent():
    assert independent(coins(seeds=[5], positions=MANY), coins(seeds=[6], positions=MANY))


def test_noise_is_exponential_and_independent_of_coins():
    noise = Dice(3).noise(0, torch.arange(3000))
    assert stats.kstest(noise.numpy(), "expon").pvalue > 1e-4
    assert independent((-noise).exp().tolist(), [Dice(3).uniform(0, ACCEPT, i) for i in MANY])


@given(st.integers(), st.integers(0, 10**6), st.sets(st.integers(0, 200_000), min_size=1, max_size=9))
def test_a_token_has_the_same_noise_whatever_is_asked_with_it(seed, position, tokens):
    whole = Dice(seed).noise(position, torch.tensor(sorted(tokens)))
    for token, noise in zip(sorted(tokens), whole.tolist(), strict=True):
        assert Dice(seed).noise(position, torch.tensor([token])).item() == noise
        assert noise > 0


@given(st.integers(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_noise_and_coins_are_one_generator(seed, position, token):
    """The tensor's arithmetic is that of whole numbers, without overflow."""
    coin = Dice(seed).uniform(position, NOISE, token)
    assert 0 < coin < 1
    assert Dice(seed).noise(position, torch.tensor([token])).item() == pytest.approx(-numpy.log(coin), rel=1e-12)


LAW = {0: 0.5, 1: 0.25, 2: 0.0, 3: 0.15, 4: 0.1}


@pytest.mark.parametrize("how", ["choose", "draw"])
def test_tokens_follow_the_law(how):
    law = torch.tensor(list(LAW.values()))
    possible = {token: p for token, p in LAW.items() if p}
    if how == "choose":
        assert_follows([Dice(seed).choose(law, 7) for seed in MANY], possible)
        assert_follows([Dice(7).choose(law, position) for position in MANY], possible)
    else:
        assert_follows([Dice(seed).draw(law, 7, DRAFT) for seed in MANY], possible)
        assert_follows([Dice(7).draw(law, 7, DRAFT, index) for index in MANY], possible)


def test_laws_that_are_alike_mostly_choose_alike():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    same = sum(Dice(seed).choose(p, 0) == Dice(seed).choose(q, 0) for seed in MANY)
    assert same > 0.85 * len(MANY)  # independent draws would agree in 36 of 100


def test_a_certain_token_needs_no_luck():
    law = torch.tensor([0.0, 0.0, 1.0])
    assert Dice(1).choose(law, 0) == Dice(1).draw(law, 0, DRAFT) == 2


def test_without_a_seed_luck_differs():
    assert Dice().uniform(0, ACCEPT) != Dice().uniform(0, ACCEPT)


def test_the_numbers_never_change_silently():
    """A seed that a user has written down must give the same text after an update."""
    assert [Dice(0).uniform(0, stream) for stream in STREAMS] == pytest.approx(COINS, abs=1e-12)
    assert Dice(2**63 + 5, index=3).uniform(123_456, RESIDUAL, 7) == pytest.approx(ODD_COIN, abs=1e-12)
    assert Dice(42).noise(9, torch.tensor([0, 1, 49_151])).tolist() == pytest.approx(NOISES, abs=1e-12)


COINS = [0.6823704974958673, 0.6038516598055139, 0.5974286674754694, 0.5975579862715676]
ODD_COIN = 0.7566176693653688
NOISES = [3.4367726685255713, 0.4408156953583093, 0.6946425849346344]
