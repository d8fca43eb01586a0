"""How often a guess held, by how many tokens had matched before it and by what else had followed them.

Learned as text goes by, drafted or not.
"""

from __future__ import annotations

MOST = 16  # longer matches are counted with this one
ALONE, AGREED, DIFFERED = 0, 1, 2  # a match before this one: there was none, the same token followed, another did
ALL, ONE = 0.99, 0.98  # what an old observation weighs after each new one of its kind: of all sequences, of one
FIRST, SHARED = 8.0, 24.0  # observations that the guess by length counts for, and that those of all sequences do


def kind(matched: int, others: int = ALONE) -> int:
    """What observations are counted by."""
    return (matched if matched < MOST else MOST) + others * (MOST + 1)


_BEFORE = [1.0 - 0.8 ** (n + 1) for n in range(MOST + 1)] * 3  # by kind: a longer match is believed more


class Odds:
    """`base` is what is believed before anything was seen here: other Odds, or a guess by length."""

    def __init__(self, base: Odds | None = None) -> None:
        self._base = base
        self._weight, self._fade = (FIRST, ALL) if base is None else (SHARED, ONE)
        self._tries, self._hits = [0.0] * len(_BEFORE), [0.0] * len(_BEFORE)

    def chance(self, kind: int) -> float:
        before = _BEFORE[kind] if self._base is None else self._base.chance(kind)
        return (self._hits[kind] + self._weight * before) / (self._tries[kind] + self._weight)

    def learn(self, kind: int, held: bool) -> None:
        self._tries[kind] = self._fade * self._tries[kind] + 1.0
        self._hits[kind] = self._fade * self._hits[kind] + float(held)
        if self._base is not None:
            self._base.learn(kind, held)
