"""Several steps of a batch without the host, by drafters that can guess in rounds: when that can be, and what the
engine is told of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING

from outrider.core.draft import Draft
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.rounds.base import JudgedSteps, LoopedRounds, RoundGuesser
from outrider.models.base import Model, Paged

if TYPE_CHECKING:  # needs Triton, as a target on a device does
    from outrider.drafters.rounds.loop import DeviceLoop

# Drafts that a GPU writes and judges before the host looks, at most. The device waits while the host commits them, 0.2
# ms a round of one sequence and 0.5 of 16 with 8 rounds (LOG, 2026-11-17); a stream comes in pieces of some 20 ms.
ROUNDS = 16
FIRST_RATE = 2.0  # tokens that a round writes of a sequence, before any was seen
LEARNING = 0.2  # weight of the newest rounds in their average
# Numbers of sequences whose rounds have their graphs from the beginning, so that no request waits for kernels to be
# compiled and captured: powers of two up to the batch from which on drafts seldom pay.
PREPARED = (1, 2, 4, 8, 16, 32, 64)


class RoundWriter:
    def __init__(self, loop: DeviceLoop) -> None:
        self._loop, self._rate = loop, FIRST_RATE
        for count in PREPARED:
            loop.prepare(count)

    def serves(self, seqs: Seq[Sequence], budget: int) -> bool:
        """Whether these sequences can be written once their prompts are read, with drafts of up to `budget` nodes."""
        if budget < self._loop.nodes or not all(seq.plain for seq in seqs):
            return False
        return all(guesser.takes(seq) for guesser in self._loop.guessers for seq in seqs) and self._rounds(seqs) > 0

    def can(self, seqs: Seq[Sequence]) -> bool:
        """Whether they can be written now."""
        return all(guesser.follows(seq) for guesser in self._loop.guessers for seq in seqs)

    def write(self, seqs: Seq[Sequence], wait: Callable[[], None]) -> list[JudgedSteps] | None:
        """Some steps of each; None: not now."""
        count = self._rounds(seqs)
        rounds = self._loop.run(seqs, count, wait)
        if rounds is None:
            return None
        written = sum(len(tokens) for own in rounds for tokens in own.tokens)
        self._rate += LEARNING * (written / (count * len(seqs)) - self._rate)
        return list(map(_judged, rounds))

    def _rounds(self, seqs: Seq[Sequence]) -> int:
        """Rounds that the host does not look at: not many more than the sequences still need."""
        needed = math.ceil(max(seq.left for seq in seqs) / self._rate)
        return self._loop.rounds(seqs, max(1, min(ROUNDS, needed)))


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
