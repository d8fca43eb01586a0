"""What a head's confidence is worth: how often tokens that it was so sure of were kept, learned as text goes by."""

from __future__ import annotations

_STEPS = 10  # kinds of confidence
_FADE = 0.99  # what an old observation weighs after each new one of its kind
_WEIGHT = 8.0  # what the head's own word weighs


class Trust:
    def __init__(self) -> None:
        self._tries = [0.0] * _STEPS
        self._hits = [0.0] * _STEPS
        self._said = [0.0] * _STEPS

    def chance(self, said: float) -> float:
        """The head's own chance, corrected by as much as those alike were wrong."""
        kind = _kind(said)
        lack = (self._hits[kind] - self._said[kind]) / (self._tries[kind] + _WEIGHT)
        return min(max(said + lack, 0.001), 0.999)

    def learn(self, said: float, held: bool) -> None:
        kind = _kind(said)
        for sums, value in ((self._tries, 1.0), (self._hits, float(held)), (self._said, said)):
            sums[kind] = _FADE * sums[kind] + value


def _kind(said: float) -> int:
    return min(int(said * _STEPS), _STEPS - 1)
