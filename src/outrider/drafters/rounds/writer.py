"""Several steps of a batch without the host, by drafters that can guess in rounds: when that can be, and what the
engine is told of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING

from outrider.core.draft import Draft
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.rounds.base import JudgedSteps, LoopedRounds, RoundGuesser
from outrider.models.base import Model, Paged

if TYPE_CHECKING:  # needs Triton, as a target on a device does
    from outrider.drafters.rounds.loop import DeviceLoop

# Rounds of a part, which the host reads at once: committing them takes the host 0.2 ms a round of one sequence (LOG,
# 2026-11-17) while the device is at the next part, and a stream comes in pieces of some 10 ms.
PART = 8
# Rounds of the first two parts of a step: a way that is only tried then ends sooner, and a stream begins sooner.
FIRST_PARTS = 4
FIRST_RATE = 2.0  # tokens that a round writes of a sequence, before any was seen
LEARNING = 0.2  # weight of the newest rounds in their average
# Numbers of sequences whose rounds have their graphs from the beginning, so that no request waits for kernels to be
# compiled and captured: powers of two up to the batch from which on drafts seldom pay.
PREPARED = (1, 2, 4, 8, 16, 32, 64)


class RoundWriter:
    def __init__(self, loop: DeviceLoop) -> None:
        self._loop, self._rate = loop, FIRST_RATE
        loop.prepare(PREPARED)

    def serves(self, seqs: Seq[Sequence], budget: int) -> bool:
        """Whether these sequences can be written once their prompts are read, with drafts of up to `budget` nodes."""
        if budget < self._loop.nodes or not all(seq.plain for seq in seqs):
            return False
        return all(guesser.takes(seq) for guesser in self._loop.guessers for seq in seqs) and self._rounds(seqs) > 0

    def can(self, seqs: Seq[Sequence]) -> bool:
        """Whether they can be written now."""
        return all(guesser.follows(seq) for guesser in self._loop.guessers for seq in seqs)

    def write(
        self, seqs: Seq[Sequence], wait: Callable[[], None], going: Callable[[int], bool]
    ) -> Iterator[list[JudgedSteps]]:
        """Steps of each, part after part; no part: not now."""
        begun = 0

        def plan(unread: int) -> int:
            nonlocal begun
            rounds = 0
            if not begun or (going(begun) and not self._loop.shrinks(seqs)):
                rounds = min(self._rounds(seqs, unread), max(begun, FIRST_PARTS))
            begun += rounds
            return rounds

        for part in self._loop.run(seqs, plan, wait):
            rounds = [own for own, seq in zip(part, seqs, strict=True) if seq.finish is None]
            if rounds:
                written = sum(len(tokens) for own in rounds for tokens in own.tokens)
                rate = written / sum(len(own.tokens) for own in rounds)
                self._rate += LEARNING * (rate - self._rate)
            yield list(map(_judged, part))

    def _rounds(self, seqs: Seq[Sequence], unread: int = 0) -> int:
        """Rounds of the next part, where some are not read yet: half of what the sequences still need by the average.
        So parts become small towards the end, few rounds come after it, and little is left to commit when it is there
        (simulated for 127 tokens of one sequence: 3 % sooner than with whole parts; LOG, 2026-11-17)."""
        needed = math.ceil(max(seq.left for seq in seqs if seq.finish is None) / self._rate) - unread
        return self._loop.rounds(seqs, min(PART, (needed + 1) // 2), unread) if needed > 0 else 0


def _judged(rounds: LoopedRounds) -> JudgedSteps:
    """What the host has to know of rounds that the device judged."""
    return JudgedSteps(
        rounds.tokens,
        rounds.sources,
        rounds.drafts,
        rounds.drafted_by_depth,
        rounds.drafted_by_source,
        partial(_step, rounds),
    )


def _step(rounds: LoopedRounds, number: int) -> tuple[Draft, Verdict]:
    one = rounds.round(number)
    draft = Draft(tuple(one.tokens), tuple(one.parents), sources=tuple(one.sources))
    return draft, Verdict(one.path, rounds.tokens[number][-1])


def round_writer(target: Model, guessers: Seq[RoundGuesser]) -> RoundWriter | None:
    """What writes with these guessers; None where nobody can guess in rounds."""
    if not guessers or not isinstance(target, Paged):
        return None
    from outrider.drafters.rounds.loop import DeviceLoop
    from outrider.models.cuda.model import CudaLlama

    return RoundWriter(DeviceLoop(target, guessers)) if isinstance(target, CudaLlama) else None
