"""The target writes the corpus: many conversations at once through our own engine, wave by wave.

Each wave is safe on the disk before the next begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Model
from outrider.models.load import Loaded
from outrider.train.data.conversations import (
    ChatFormat,
    Conversation,
    WriteRequest,
    WrittenText,
    answer_to,
    conversation,
)
from outrider.train.data.corpus import Corpus, CorpusFolder, CorpusInfo
from outrider.train.job import TimeBudget, TrainingJob

WRITING_SHARE = 0.4  # share of the time that goes into writing; the rest is for learning and measuring
ROUNDS = 4  # times the conversations that run at once make a wave; a killed run loses its last wave
MEAN_TOKENS = 260  # tokens of a conversation, about: a guess until a wave has shown it
WRITERS = {"cpu": 32, "cuda": 2048}  # conversations at once, unless --writers says otherwise
PROMPT_CHUNK = {"cpu": 512, "cuda": 2048}  # prompt tokens of a pass; on a GPU longer ones have no graph
_MOST_REQUESTS = 8  # more than any conversation has: each request gets random numbers of its own

Show = Callable[[str, int, int | None], None]


@dataclass(eq=False)
class _Running:
    number: int
    conversation: Conversation
    requests: int = 0


class ConversationRunner:
    """Runs conversations in an engine: `batch` of them at a time, a new one when one ends."""

    def __init__(self, engine: Engine, ends: frozenset[int], batch: int, seed: int) -> None:
        self._engine, self._ends, self._batch, self._seed = engine, ends, batch, seed
        self._running: dict[int, _Running] = {}  # by the id of its sequence
        self._done: dict[int, list[WrittenText]] = {}  # by the conversation's number
        self._ids = 0

    def run(
        self,
        conversations: Iterable[tuple[int, Conversation]],
        on_tokens: Callable[[int], None] = lambda tokens: None,
        until: int | None = None,
    ) -> list[WrittenText]:
        """The texts of these numbered conversations, in the order of their numbers. `on_tokens` hears how many tokens
        each one has when it ends.

        With `until` only the conversations below that number are waited for; the others run beside them, for a later
        call: the numbers must ascend.
        """
        waiting = iter(conversations)
        self._start(waiting)
        while self._engine.busy and self._waited_for(until):
            for seq in self._engine.step():
                ended = self._go_on(seq)
                on_tokens(sum(len(text.tokens) for text in ended))
            self._start(waiting)
        done = sorted(number for number in self._done if until is None or number < until)
        return [text for number in done for text in self._done.pop(number)]

    def stop(self) -> None:
        """Drop the conversations that still run."""
        for id in list(self._running):
            self._engine.cancel(id)
        self._running.clear()

    def _waited_for(self, until: int | None) -> bool:
        return until is None or any(running.number < until for running in self._running.values())

    def _start(self, waiting: Iterator[tuple[int, Conversation]]) -> None:
        while len(self._running) < self._batch:
            new = list(islice(waiting, self._batch - len(self._running)))
            if not new:
                return
            for number, begun in new:
                self._add(_Running(number, begun), next(begun))

    def _go_on(self, seq: Sequence) -> list[WrittenText]:
        """The next request of a conversation, or its texts when there is none."""
        running = self._running.pop(seq.id)
        if seq.finish == "error":
            raise OutriderError(f"the model could not write texts: {seq.error}")
        try:
            self._add(running, running.conversation.send(seq.tokens[seq.prompt :]))
        except StopIteration as end:
            self._done[running.number] = end.value
            return list(end.value)
        return []

    def _add(self, running: _Running, request: WriteRequest) -> None:
        budget = self._engine.model.context - len(request.tokens)
        if budget < 1:  # the conversation has outgrown the model's context
            self._done[running.number] = []
            return
        self._ids += 1
        running.requests += 1
        params = SamplingParams(max_tokens=min(request.max_tokens, budget), temperature=request.temperature)
        dice = Dice(self._seed, running.number * _MOST_REQUESTS + running.requests)
        self._running[self._ids] = running
        self._engine.add(Sequence(self._ids, list(request.tokens), params, self._ends, dice=dice, rule="coupled"))


class CorpusWriter:
    """Has the target write conversations; the one with number n is the same in every run of the same seed."""

    def __init__(self, loaded: Loaded, job: TrainingJob, device: str, prompts: Seq[str]) -> None:
        self._chat, self._ends, self._seed = ChatFormat.of(loaded.tokenizer), loaded.ends, job.seed
        self._prompts = prompts
        self._endless: Iterator[tuple[int, Conversation]] | None = None  # the conversations that run ahead
        self.batch = job.writers or WRITERS[device]
        limits = Limits(self.batch, PROMPT_CHUNK[device])
        plain = Drafter(Drafter.Options(), BuildContext(loaded.model, _no_other))
        self._runner = ConversationRunner(Engine(loaded.model, plain, limits), loaded.ends, self.batch, job.seed)

    def wave(self, first: int, count: int, on_tokens: Callable[[int], None], ahead: bool = False) -> Corpus:
        """The conversations of `count` numbers. With `ahead` those of the next wave, which follows without a gap, begin
        as soon as a place is free: the end of a wave, when few are left, takes as long as its middle."""
        if not ahead:
            return Corpus.of(self._runner.run(self._numbered(range(first, first + count)), on_tokens))
        if self._endless is None:
            self._endless = self._numbered(itertools.count(first))
        return Corpus.of(self._runner.run(self._endless, on_tokens, first + count))

    def stop(self) -> None:
        """Drop the conversations that were begun ahead."""
        self._runner.stop()

    def _numbered(self, numbers: Iterable[int]) -> Iterator[tuple[int, Conversation]]:
        for number in numbers:
            yield number, self._conversation(number)

    def _conversation(self, number: int) -> Conversation:
        random = Random(f"{self._seed} {number}")
        if self._prompts:
            return answer_to(self._chat, self._prompts[number % len(self._prompts)], random)
        return conversation(self._chat, self._ends, random)


def write_corpus(
    writer: CorpusWriter, folder: CorpusFolder, info: CorpusInfo, job: TrainingJob, budget: TimeBudget, show: Show
) -> CorpusInfo:
    """Waves until there are enough tokens, or the time for writing is over."""
    until = WRITING_SHARE * budget.limit
    while not _enough(info, job) and (not info.waves or budget.spent + _next_seconds(info, writer, job) <= until):
        begin, count = budget.spent, _wave_size(info, writer, job)
        progress = _WritingProgress(info, job, budget, show)
        corpus = writer.wave(info.talks, count, progress.add, ahead=not job.tokens)
        info = replace(
            info,
            waves=info.waves + 1,
            talks=info.talks + count,
            tokens=info.tokens + len(corpus.tokens),
            seconds=info.seconds + budget.spent - begin,
        )
        folder.add(corpus, info)
    writer.stop()
    info = replace(info, complete=True)
    folder.write_info(info)
    return info


class _WritingProgress:
    """Shows how far the writing is."""

    def __init__(self, info: CorpusInfo, job: TrainingJob, budget: TimeBudget, show: Show) -> None:
        self._tokens, self._job, self._budget, self._show = info.tokens, job, budget, show
        self._before, self._begun = info.tokens, budget.spent

    def add(self, tokens: int) -> None:
        if not tokens:
            return
        self._tokens += tokens
        speed = (self._tokens - self._before) / max(self._budget.spent - self._begun, 1e-9)
        what = f"the target writes: {self._tokens:,} tokens, {speed:,.0f}/s"
        if self._job.tokens:
            self._show(what, self._tokens, self._job.tokens)
        else:
            self._show(what, int(self._budget.spent), int(WRITING_SHARE * self._budget.limit))


def _enough(info: CorpusInfo, job: TrainingJob) -> bool:
    return 0 < job.tokens <= info.tokens


def _wave_size(info: CorpusInfo, writer: CorpusWriter, job: TrainingJob) -> int:
    """Conversations of the next wave; the first one shows how long they take."""
    full = writer.batch * (ROUNDS if info.waves or job.tokens else 1)
    mean = info.tokens / info.talks if info.talks else MEAN_TOKENS
    return min(full, math.ceil((job.tokens - info.tokens) / mean)) if job.tokens else full


def _next_seconds(info: CorpusInfo, writer: CorpusWriter, job: TrainingJob) -> float:
    """Seconds that the next wave is going to take."""
    return _wave_size(info, writer, job) * info.seconds / max(info.talks, 1)


def _no_other(name: str, quantize: str) -> Model:
    raise OutriderError("no other model is loaded while texts are written")
