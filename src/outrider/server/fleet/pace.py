"""How often the chunks of many streams are sent: as often as the server can pass them on.

A chunk costs the server about as much whether it holds one token or ten. On a GPU 128 streams write 70,000 tokens a
second, and a chunk for each of them would take five cores. So after a frame of many chunks the next ones wait, and
become longer meanwhile. The first chunk of each sample and its end do not wait. Each worker has a pace of its own, and
above 250 chunks a frame it sends faster than that pace, since nothing waits for longer than LONGEST_WAIT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

CHUNK_SECONDS = 2e-4  # after each chunk sent: the server takes 75 to 115 us for one (docs/LOG.md), and has other work
LONGEST_WAIT = 0.05  # seconds: a reader sees 20 chunks a second at the least


class Pace:
    """Which of the streams that have something are emptied now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._due = clock, 0.0
        self._latest = math.inf  # when the first of those that wait has waited for long enough
        self._held: dict[int, None] = {}  # streams that have something and wait

    @property
    def wait(self) -> float | None:
        """Seconds until something is due; None where nothing waits."""
        return max(0.0, min(self._due, self._latest) - self._clock()) if self._held else None

    def release(self, woken: Iterable[int], urgent: Callable[[int], bool]) -> list[int]:
        """Those that are emptied now, of the ones that wait and the ones that have just been woken.

        One that has become urgent must be woken again.
        """
        news = dict.fromkeys(woken)
        self._held.update(news)
        now = self._clock()
        due = now >= min(self._due, self._latest)
        found = list(self._held) if due else [id for id in news if urgent(id)]
        for id in found:
            del self._held[id]
        if not self._held:
            self._latest = math.inf
        elif self._latest == math.inf:
            self._latest = now + LONGEST_WAIT
        return found

    def sent(self, chunks: int) -> None:
        now = self._clock()
        self._due = min(max(self._due, now) + chunks * CHUNK_SECONDS, now + LONGEST_WAIT)
