"""Random numbers keyed by (seed, position), so that the numbers of a position never depend on the schedule.

Every number is a hash of (seed, position, stream, index): the k-th token of the vocabulary gets the same noise at a
position however often it is asked for, in any order, on any device and in any batch.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

# One stream per purpose: numbers of different streams are independent.
NOISE, DRAFT, RESIDUAL, ACCEPT = range(4)

_MASK, _MASK_64 = 2**32 - 1, 2**64 - 1
_TWO_32 = float(2**32)


def _mix64(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def _mix(x: int) -> int:
    """The same for 32 bits, in two rounds."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` for an int64 tensor of 32-bit values; both factors are below 2**31, so no product overflows."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def noise(tokens: Tensor, first: int | Tensor, second: int | Tensor) -> Tensor:
    """Exponential noise, float64, for token ids under the two keys of a position, which may be columns of many."""
    bits = _mix_tensor(_mix_tensor(tokens ^ first) ^ second)
    return -((bits.double() + 0.5) / _TWO_32).log()


class Dice:
    """The random numbers of one sequence. `index` tells the samples of one request apart."""

    def __init__(self, seed: int | None = None, index: int = 0) -> None:
        seed = random.getrandbits(64) if seed is None else seed
        self._key = _mix64((seed & _MASK_64) ^ _mix64(index + 0x9E3779B97F4A7C15))

    @property
    def key(self) -> int:
        """64 bits that all its numbers come from."""
        return self._key

    def keys(self, position: int, stream: int = NOISE) -> tuple[int, int]:
        key = _mix64(self._key ^ _mix64(position * 8 + stream))
        return key >> 32, key & _MASK

    def uniform(self, position: int, stream: int, index: int = 0) -> float:
        """A uniform number in (0, 1)."""
        first, second = self.keys(position, stream)
        return (_mix(_mix(index ^ first) ^ second) + 0.5) / _TWO_32

    def noise(self, position: int, tokens: Tensor) -> Tensor:
        """Exponential noise, float64, one number per token id."""
        return noise(tokens, *self.keys(position))

    def choose(self, law: Tensor, position: int) -> int:
        """Draw from `law` with the noise of `position`: argmax(log p + Gumbel) = argmin(exponential / p).

        Two laws that are alike, given the same dice and position, mostly choose the same token.
        """
        support = law.nonzero().squeeze(1)
        if support.numel() == 1:
            return int(support)
        return int(support[(self.noise(position, support) / law[support].double()).argmin()])

    def draw(self, law: Tensor, position: int, stream: int, index: int = 0) -> int:
        """Draw from `law` by inverting its distribution function with a random number of its own."""
        support = law.nonzero().squeeze(1)
        if support.numel() == 1:
            return int(support)
        cumulative = law[support].double().cumsum(0)
        point = self.uniform(position, stream, index) * float(cumulative[-1])
        place = int(torch.searchsorted(cumulative, point, right=True))
        return int(support[min(place, support.numel() - 1)])
