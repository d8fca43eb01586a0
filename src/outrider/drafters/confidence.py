"""Calibration: how often guesses of one kind are kept, learned from all text that is written, drafted or not.

A drafter states the probability that a node is kept if its parent is (`Draft.acceptance`). Lookup knows how many tokens
matched before the guess (`MatchCalibration`); a head states a probability of its own (`StatedCalibration`). Where two
drafters guess at the same position, both probabilities are used (`JointCalibration`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq

LONGEST = 16  # tokens: longer matches are counted with this one; few are longer, and they are right about as often
# What followed the match before the most recent one: there was none, the same token, another token.
ALONE, AGREED, DIFFERED = 0, 1, 2
# Weight of an old observation after each new one of its kind (0.99: about the last 100 count). A sequence changes its
# subject faster than all of them together do, so its own counts fade faster.
FADE, SEQUENCE_FADE = 0.99, 0.98
PRIOR_WEIGHT = 8.0  # weight of the prior, in observations: after about this many the measured frequency dominates
SEQUENCE_PRIOR_WEIGHT = 24.0  # the same, where the prior is the frequency over all sequences, which is worth more
BINS = 10  # stated probabilities are counted by tenths
LEAST, MOST = 0.001, 0.999  # no stated probability is corrected to impossible or certain
# Of two drafters: probabilities beyond these say no more about each other, and the share of an error by which one
# guess moves the weights (LOG, 2026-11-18, where head and lookup differ).
SURE, JOINT_RATE = 0.98, 0.05
SETTLED = 30.0  # logit beyond which a probability is LEAST or MOST, whatever its exponential is


class Calibration:
    """Fading counts by kind of guess: how many there were, how many were kept, and what had been stated of them."""

    def __init__(self, kinds: int, fade: float, weight: float) -> None:
        """`fade`: weight of an old observation after each new one; `weight`: observations that a prior counts for."""
        self._fade, self._weight = fade, weight
        self._tries, self._kept, self._stated = ([0.0] * kinds for _ in range(3))

    def frequency(self, kind: int, prior: float) -> float:
        """How often guesses of this kind are kept; `prior` is believed before any was seen."""
        return (self._kept[kind] + self._weight * prior) / (self._tries[kind] + self._weight)

    def correction(self, kind: int) -> float:
        """How much more often they are kept than was stated."""
        return (self._kept[kind] - self._stated[kind]) / (self._tries[kind] + self._weight)

    def count(self, kind: int, kept: bool, stated: float = 0.0) -> None:
        fade = self._fade
        self._tries[kind] = fade * self._tries[kind] + 1.0
        self._kept[kind] = fade * self._kept[kind] + kept
        self._stated[kind] = fade * self._stated[kind] + stated


def match_kind(matched: int, others: int = ALONE) -> int:
    """What guesses of a lookup are counted by: the tokens that matched before it, and what else had followed them."""
    return (matched if matched < LONGEST else LONGEST) + others * (LONGEST + 1)


_PRIOR = [1.0 - 0.8 ** (n + 1) for n in range(LONGEST + 1)] * 3  # by kind: a longer match is believed more


class MatchCalibration(Calibration):
    """By `match_kind`, or by other kinds that have `priors`. The prior is `base`, the calibration over all sequences,
    or else a guess by kind."""

    def __init__(self, base: MatchCalibration | None = None, priors: Seq[float] = _PRIOR) -> None:
        fade, weight = (FADE, PRIOR_WEIGHT) if base is None else (SEQUENCE_FADE, SEQUENCE_PRIOR_WEIGHT)
        self._base = base
        self._priors: Seq[float] = priors if base is None else base._priors
        super().__init__(len(self._priors), fade, weight)

    def probability(self, kind: int) -> float:
        return self.frequency(kind, self._priors[kind] if self._base is None else self._base.probability(kind))

    def learn(self, kind: int, kept: bool) -> None:
        self.count(kind, kept)
        if self._base is not None:
            self._base.learn(kind, kept)


class StatedCalibration(Calibration):
    """By the probability that a head itself states."""

    def __init__(self) -> None:
        super().__init__(BINS, FADE, PRIOR_WEIGHT)

    def probability(self, stated: float) -> float:
        """The head's own probability, corrected by the error of similar ones so far."""
        kind = _bin(stated)
        corrected = stated + (self._kept[kind] - self._stated[kind]) / (self._tries[kind] + self._weight)
        return MOST if corrected > MOST else LEAST if corrected < LEAST else corrected

    def learn(self, stated: float, kept: bool) -> None:
        self.count(_bin(stated), kept, stated)


class JointCalibration:
    """Of a guess at a place where another drafter guesses, too: by the probabilities that both state. It is a logistic
    regression, which needs few guesses to learn from: counts by two probabilities would be too many."""

    def __init__(self, weights: tuple[float, float, float]) -> None:
        """The weights that it begins with: a constant, and of the logits of its own probability and the other's."""
        self._constant, self._own, self._other = weights

    def probability(self, own: float, other: float) -> float:
        score = self._constant + self._own * _logit(own) + self._other * _logit(other)
        if abs(score) > SETTLED:
            return MOST if score > 0.0 else LEAST
        return min(max(1.0 / (1.0 + math.exp(-score)), LEAST), MOST)

    def learn(self, own: float, other: float, kept: bool) -> None:
        found = self.probability(own, other)
        if found == (MOST if kept else LEAST):
            return  # nothing more to learn; weights would grow for ever
        step = JOINT_RATE * (kept - found)
        self._constant += step
        self._own += step * _logit(own)
        self._other += step * _logit(other)


def _logit(stated: float) -> float:
    stated = min(max(stated, 1.0 - SURE), SURE)
    return math.log(stated / (1.0 - stated))


def _bin(stated: float) -> int:
    return min(int(stated * BINS), BINS - 1)


def judged_chain(guessed: Seq[int], written: Seq[int]) -> Iterator[tuple[int, bool]]:
    """Places of a guessed chain that what was written has judged, up to the first wrong one, and whether each held."""
    for place, (guess, token) in enumerate(zip(guessed, written, strict=False)):
        yield place, guess == token
        if guess != token:
            return
