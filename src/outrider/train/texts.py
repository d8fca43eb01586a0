"""Writing the corpus wave by wave, each wave safe on the disk before the next begins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from outrider.core.errors import OutriderError
from outrider.drafters.base import Drafter, Parts
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Model
from outrider.models.load import Loaded
from outrider.train.chat import Chat
from outrider.train.clock import Clock
from outrider.train.corpus import Corpus, Note, Shelf
from outrider.train.job import Job
from outrider.train.talks import Talk, answer_to, talk
from outrider.train.write import Writer

SHARE = 0.4  # of the time goes into writing
ROUNDS = 4  # talks of a wave for each that runs at once
MEAN = 260  # tokens of a talk, about
WRITERS = {"cpu": 32, "cuda": 2048}
PIECE = {"cpu": 512, "cuda": 2048}  # prompt tokens of a pass; longer ones have no graph

Show = Callable[[str, int, int | None], None]


class Scribe:
    """Has the target write talks; the talk with number n is the same in every run of the same seed."""

    def __init__(self, loaded: Loaded, job: Job, device: str, prompts: Sequence[str]) -> None:
        self._chat, self._ends, self._seed = Chat.of(loaded.tokenizer), loaded.ends, job.seed
        self._prompts = prompts
        self._line: Iterator[tuple[int, Talk]] | None = None  # of talks without an end
        self.batch = job.writers or WRITERS[device]
        limits = Limits(self.batch, PIECE[device])
        plain = Drafter(Drafter.Options(), Parts(loaded.model, _no_other))
        self._writer = Writer(Engine(loaded.model, plain, limits), loaded.ends, self.batch, job.seed)

    def wave(self, first: int, count: int, told: Callable[[int], None], ahead: bool = False) -> Corpus:
        """The talks of `count` numbers. With `ahead` those of the next wave, which follows without a gap, begin as soon
        as there is room: the end of a wave, when few are left, takes as long as its middle."""
        if not ahead:
            return Corpus.of(self._writer.write(self._talks(range(first, first + count)), told))
        if self._line is None:
            self._line = self._talks(itertools.count(first))
        return Corpus.of(self._writer.write(self._line, told, first + count))

    def stop(self) -> None:
        """What was begun ahead is not wanted."""
        self._writer.stop()

    def _talks(self, numbers: Iterable[int]) -> Iterator[tuple[int, Talk]]:
        for number in numbers:
            yield number, self._talk(number)

    def _talk(self, number: int) -> Talk:
        random = Random(f"{self._seed} {number}")
        if self._prompts:
            return answer_to(self._chat, self._prompts[number % len(self._prompts)], random)
        return talk(self._chat, self._ends, random)


def write(scribe: Scribe, shelf: Shelf, note: Note, job: Job, clock: Clock, show: Show) -> Note:
    """Waves until there are enough tokens, or the time for writing is over."""
    until = SHARE * clock.limit
    while not _enough(note, job) and (not note.waves or clock.spent + _next(note, scribe, job) <= until):
        begin, count = clock.spent, _size(note, scribe, job)
        written = _Count(note, job, clock, show)
        corpus = scribe.wave(note.talks, count, written.add, ahead=not job.tokens)
        note = replace(
            note,
            waves=note.waves + 1,
            talks=note.talks + count,
            tokens=note.tokens + len(corpus.tokens),
            seconds=note.seconds + clock.spent - begin,
        )
        shelf.add(corpus, note)
    scribe.stop()
    note = replace(note, complete=True)
    shelf.write(note)
    return note


class _Count:
    """Shows how far the writing is."""

    def __init__(self, note: Note, job: Job, clock: Clock, show: Show) -> None:
        self._tokens, self._job, self._clock, self._show = note.tokens, job, clock, show
        self._before, self._begun = note.tokens, clock.spent

    def add(self, tokens: int) -> None:
        if not tokens:
            return
        self._tokens += tokens
        speed = (self._tokens - self._before) / max(self._clock.spent - self._begun, 1e-9)
        what = f"the target writes: {self._tokens:,} tokens, {speed:,.0f}/s"
        if self._job.tokens:
            self._show(what, self._tokens, self._job.tokens)
        else:
            self._show(what, int(self._clock.spent), int(SHARE * self._clock.limit))


def _enough(note: Note, job: Job) -> bool:
    return 0 < job.tokens <= note.tokens


def _size(note: Note, scribe: Scribe, job: Job) -> int:
    """Talks of the next wave; the first one shows how long they take."""
    full = scribe.batch * (ROUNDS if note.waves or job.tokens else 1)
    mean = note.tokens / note.talks if note.talks else MEAN
    return min(full, math.ceil((job.tokens - note.tokens) / mean)) if job.tokens else full


def _next(note: Note, scribe: Scribe, job: Job) -> float:
    """Seconds that the next wave is going to take."""
    return _size(note, scribe, job) * note.seconds / max(note.talks, 1)


def _no_other(name: str, quantize: str) -> Model:
    raise OutriderError("no other model is loaded while texts are written")
