"""Adapters as requests and sequences carry them: by name, as a mix of several, and ready to run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from outrider.core.errors import OutriderError, quoted

# How adapters become one. `cat`: exactly the weighted sum of what each adds; the others: PEFT's add_weighted_adapter.
Strategy = Literal["cat", "linear", "ties", "dare_linear", "dare_ties"]
Majority = Literal["total", "frequency"]  # how ties finds the sign that most adapters agree on: by sum, or by count
STRATEGIES: tuple[str, ...] = get_args(Strategy)
PRUNING = ("ties", "dare_linear", "dare_ties")  # strategies that keep a part of the values only: `density`
MOST_RANK = 256  # the largest rank of a matrix: larger adapters are rare, and no longer small
MOST = 16  # adapters of a mix: more than anybody merges, and few enough to read for one request


@dataclass(frozen=True)
class AdapterMix:
    """Several adapters that serve a request as one, or one with another weight."""

    names: tuple[str, ...]
    weights: tuple[float, ...] = ()  # one for each; (): all 1
    strategy: Strategy = "cat"
    density: float | None = None  # the share of values that pruning keeps, above 0 and at most 1
    majority_sign_method: Majority = "total"
    seed: int = 0  # of what dare_linear and dare_ties drop: the same seed, the same adapter

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "weights", tuple(map(float, self.weights)) or (1.0,) * len(self.names))
        if not 1 <= len(self.names) <= MOST or not all(self.names):
            raise OutriderError(f"a mix has 1 to {MOST} named adapters, not {len(self.names)}")
        if len(self.weights) != len(self.names) or not all(map(math.isfinite, self.weights)):
            raise OutriderError(f"each adapter needs one finite weight: {len(self.names)} in all, not {self.weights}")
        if self.strategy not in STRATEGIES:
            raise OutriderError(f"unknown merge strategy {quoted(self.strategy)}; known: {', '.join(STRATEGIES)}")
        if self.majority_sign_method not in get_args(Majority):
            known = ", ".join(get_args(Majority))
            raise OutriderError(f"unknown majority_sign_method {quoted(self.majority_sign_method)}; known: {known}")
        self._check_density()

    def _check_density(self) -> None:
        if self.strategy not in PRUNING:
            if self.density not in (None, 1.0):
                raise OutriderError(f"density is for {', '.join(PRUNING)}; leave it out with {self.strategy}")
        elif self.density is None or not 0 < self.density <= 1:
            raise OutriderError(f"{self.strategy} needs a density above 0 and at most 1, not {self.density}")


AdapterChoice = str | AdapterMix  # what a request names; "": the model as it is


@dataclass(frozen=True, eq=False)
class ReadyAdapter:
    """An adapter as the target runs it: made by the model's `adapt`, carried by the sequences that use it."""

    key: str  # of its values: two adapters with different values never have the same; prefixes are shared by it
    weights: Any  # what the model made of it, its own business
    nbytes: int


@dataclass(frozen=True)
class AdapterInfo:
    """What a user may know of a registered adapter."""

    name: str
    path: str
    base: str  # the model that it says it was trained for; "": it does not say
    rank: int  # the largest of its matrices
    nbytes: int  # when it is ready
    loaded: bool  # whether it is in memory now
    stamp: tuple[tuple[str, int, int, int], ...] = field(default=(), repr=False)  # of its files, as they were read


def names_of(choice: AdapterChoice) -> tuple[str, ...]:
    """The adapters that a choice is made of."""
    return choice.names if isinstance(choice, AdapterMix) else (choice,) if choice else ()
