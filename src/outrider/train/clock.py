"""How much time a run has had, and how much it has left."""

from __future__ import annotations

import math
import time


class Clock:
    def __init__(self, minutes: float, begun: float) -> None:
        """`minutes`: in all, 0 for no limit. `begun`: when it began, less what earlier sittings took."""
        self.limit = minutes * 60.0 or math.inf
        self._begun = begun

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        return self.limit - self.spent
