"""How long a worker may take for what it does, before it counts as dead."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.backends.base import BackendLoad
from outrider.core.option import option
from outrider.settings import Settings

SLACK = 20  # times the slowest step so far: a long prompt's chunk costs many times a step of one token
CHUNK = 512  # prompt tokens of a step that the limit for a step is made for; larger chunks get more time


@dataclass(frozen=True)
class WorkerLimits:
    """Seconds, where nothing else is said."""

    queue: int = option(
        256, "Sequences that may wait; further ones get a 429.", flags=("--max-queue",), least=0, panel="Limits"
    )
    load: float = 1800.0  # loading may take this long: large models come from slow disks
    silence: float = 30.0  # without a frame from the worker, which sends one every second: its process hangs
    # Without the end of a step while sequences run: the engine's thread hangs. A pass over 512 tokens of a prompt takes
    # a 7B model two minutes on two cores; nothing that works was seen to take longer.
    step: float = 180.0
    # The same on vLLM, which shows outputs and no steps: a prompt has none until all of it is read. Longer than any
    # prompt was seen to take; an engine of vLLM's that has died says so itself.
    vllm_step: float = 1800.0
    first_step: float = 600.0  # the same until the first step has ended: kernels are compiled, weights are read in
    first_wait: float = 0.5  # before a dead worker is started again; doubled each time it dies soon after
    longest_wait: float = 30.0
    farewell: float = 6.0  # to end by itself where it keeps a history; it gives up a second before
    cache_farewell: float = 31.0  # the same where it keeps prefixes
    steady: float = 60.0  # a worker that has lived this long starts again at once

    def farewell_of(self, settings: Settings) -> float:
        """How long it may take to end by itself; 0 where it writes nothing down."""
        return self.cache_farewell if settings.cache_file else self.farewell if settings.history else 0.0

    def next_wait(self, last: float, lived: float) -> float:
        """Before a worker that has died is started again. `last`: the wait before, 0: there was none; `lived`: how long
        it ran."""
        if not last or lived > self.steady:
            return self.first_wait
        return min(2 * last, self.longest_wait)

    def overdue(self, load: BackendLoad, settings: Settings) -> str:
        """Why the engine counts as hung; "" while it does not."""
        longest = self.vllm_step if settings.backend == "vllm" else self.step * max(1.0, settings.piece / CHUNK)
        limit = max(longest, SLACK * load.slowest_step if load.slowest_step else self.first_step)
        if load.since_step <= limit:
            return ""
        return f"no step has ended for {load.since_step:.0f} s while sequences ran"
