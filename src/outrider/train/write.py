"""The target writes the texts: many talks at once through our own engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.engine import Engine
from outrider.train.talks import Ask, Talk, Text

_ASKS = 8  # more than any talk has


@dataclass(eq=False)
class _Running:
    number: int
    talk: Talk
    asks: int = 0


class Writer:
    """Runs talks in an engine: `batch` of them at a time, a new one when one ends."""

    def __init__(self, engine: Engine, ends: frozenset[int], batch: int, seed: int) -> None:
        self._engine, self._ends, self._batch, self._seed = engine, ends, batch, seed
        self._running: dict[int, _Running] = {}  # by the id of its sequence
        self._found: dict[int, list[Text]] = {}  # by the talk's number
        self._ids = 0

    def write(
        self,
        talks: Iterable[tuple[int, Talk]],
        told: Callable[[int], None] = lambda tokens: None,
        until: int | None = None,
    ) -> list[Text]:
        """What these talks, each with its number, came to, in the order of their numbers. `told` hears of the tokens
        as talks end.

        With `until` only the talks below that number are waited for; the others run beside them, to be asked for later:
        the numbers must ascend.
        """
        waiting = iter(talks)
        self._start(waiting)
        while self._engine.busy and self._waited_for(until):
            for seq in self._engine.step():
                ended = self._go_on(seq)
                told(sum(len(text.tokens) for text in ended))
            self._start(waiting)
        done = sorted(number for number in self._found if until is None or number < until)
        return [text for number in done for text in self._found.pop(number)]

    def stop(self) -> None:
        """What still runs, nobody wants."""
        for id in list(self._running):
            self._engine.cancel(id)
        self._running.clear()

    def _waited_for(self, until: int | None) -> bool:
        return until is None or any(running.number < until for running in self._running.values())

    def _start(self, waiting: Iterator[tuple[int, Talk]]) -> None:
        while len(self._running) < self._batch:
            new = list(islice(waiting, self._batch - len(self._running)))
            if not new:
                return
            for number, talk in new:
                self._add(_Running(number, talk), next(talk))

    def _go_on(self, seq: Sequence) -> list[Text]:
        """The next ask of a talk, or its texts when there is none."""
        running = self._running.pop(seq.id)
        if seq.finish == "error":
            raise OutriderError(f"the model could not write texts: {seq.error}")
        try:
            self._add(running, running.talk.send(seq.tokens[seq.prompt :]))
        except StopIteration as end:
            self._found[running.number] = end.value
            return list(end.value)
        return []

    def _add(self, running: _Running, ask: Ask) -> None:
        room = self._engine.model.context - len(ask.tokens)
        if room < 1:  # the talk has outgrown the model's context
            self._found[running.number] = []
            return
        self._ids += 1
        running.asks += 1
        params = SamplingParams(max_tokens=min(ask.most, room), temperature=ask.temperature)
        dice = Dice(self._seed, running.number * _ASKS + running.asks)
        self._running[self._ids] = running
        self._engine.add(Sequence(self._ids, list(ask.tokens), params, self._ends, dice=dice, rule="coupled"))
