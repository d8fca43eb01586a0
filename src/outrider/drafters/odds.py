"""How often a guess held, by how many tokens had matched before it: learned as text goes by, drafted or not."""

from __future__ import annotations

MOST = 16  # longer matches are counted with this one
FIRST = [1.0 - 0.8 ** (n + 1) for n in range(MOST + 1)]  # believed before anything was seen
FADE = 0.95  # what an old observation weighs after each new one of its kind


class Odds:
    """`base` is what is believed before anything was seen here: other Odds, or a guess by length."""

    def __init__(self, base: Odds | None = None, weight: float = 4.0) -> None:
        self._base, self._weight = base, weight
        self._tries = [0.0] * (MOST + 1)
        self._hits = [0.0] * (MOST + 1)

    def chance(self, matched: int) -> float:
        n = matched if matched < MOST else MOST
        before = FIRST[n] if self._base is None else self._base.chance(n)
        return (self._hits[n] + self._weight * before) / (self._tries[n] + self._weight)

    def learn(self, matched: int, held: bool) -> None:
        n = min(matched, MOST)
        self._tries[n] = FADE * self._tries[n] + 1.0
        self._hits[n] = FADE * self._hits[n] + float(held)
        if self._base is not None:
            self._base.learn(matched, held)
