"""The target writes the corpus: many conversations at once through our own engine, wave by wave.

Each wave is safe on the disk before the next begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
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
    mix_for,
)
from outrider.train.data.corpus import Corpus, CorpusFolder, CorpusInfo
from outrider.train.job import TimeBudget, TrainingJob

WRITING_SHARE = 0.4  # share of the time in which the tokens that a job asks for are written, at most
SHARD_SECONDS = 20.0  # of writing that a killed run loses, at most
FEWEST_TOKENS = 16  # of an answer that is learned from though it was cut
HELD_TOKENS = 512  # tokens of the cache that a conversation may hold: a long prompt, an answer, room for pages
ROUNDS = 4  # times the conversations that run at once make a wave; a killed run loses its last wave
MEAN_TOKENS = 260  # tokens of a conversation, about: a guess until a wave has shown it
WRITERS = {"cpu": 32, "cuda": 2048}  # conversations at once, unless --writers says otherwise
PROMPT_CHUNK = {"cpu": 512, "cuda": 2048}  # prompt tokens of a pass that measures; on a GPU longer ones have no graph
# Prompt tokens of a pass that writes. On a GPU a pass costs the host some 15 ms for 2,048 sequences, whatever it feeds:
# with 2,048 tokens a pass the host alone could write 140,000 tokens/s, with 16,384 it could 350,000 (docs/LOG.md).
WRITING_CHUNK = {"cpu": 512, "cuda": 16_384}
# Times the tokens that all conversations may hold: where the cache has as many, they stay in it while a head learns and
# is measured, and go on later; where it has fewer, they are cut.
ROOMY = 1.2
FIRST_ID = 1 << 20  # of their sequences: others of the same model, with which a head is measured, count from 0
_MOST_REQUESTS = 8  # more than any conversation has: each request gets random numbers of its own

Show = Callable[[str, int, int | None], None]


@dataclass(eq=False)
class _Running:
    number: int
    conversation: Conversation
    requests: int = 0
    answers: bool = False  # what it writes now is an answer


class ConversationRunner:
    """Runs conversations in an engine: `batch` of them at a time, a new one when one ends."""

    def __init__(self, engine: Engine, ends: frozenset[int], batch: int, seed: int) -> None:
        self._engine, self._ends, self._batch, self._seed = engine, ends, batch, seed
        self._running: dict[int, _Running] = {}  # by the id of its sequence
        self._done: dict[int, list[WrittenText]] = {}  # by the conversation's number
        self._ids = FIRST_ID
        self.ended = 0  # conversations

    def run(
        self,
        conversations: Iterable[tuple[int, Conversation]],
        on_tokens: Callable[[int], None] = lambda tokens: None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> list[WrittenText]:
        """The texts of the conversations that ended, in the order of their numbers, which ascend. `on_tokens` hears how
        many tokens each one has when it ends.

        While `goes_on` says so; the conversations that still run then go on in the next call.
        """
        waiting = iter(conversations)
        self._start(waiting)
        while self._engine.busy and goes_on():
            for seq in self._engine.step():
                ended = self._go_on(seq)
                on_tokens(sum(len(text.tokens) for text in ended))
            self._start(waiting)
        done, self._done = self._done, {}
        return [text for number in sorted(done) for text in done[number]]

    def stop(self) -> list[WrittenText]:
        """End the conversations that still run. What they have of an answer is as good to learn from as a whole one."""
        texts = []
        for id, running in self._running.items():
            for seq in self._engine.cancel(id):
                if running.answers and len(seq.tokens) - seq.prompt >= FEWEST_TOKENS:
                    texts.append(WrittenText(seq.tokens, seq.prompt, running.number))
        self._running.clear()
        return texts

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
            texts = [replace(text, talk=running.number) for text in end.value]
            self._done[running.number] = texts
            self.ended += 1
            return texts
        return []

    def _add(self, running: _Running, request: WriteRequest) -> None:
        budget = self._engine.model.context - len(request.tokens)
        if budget < 1:  # the conversation has outgrown the model's context
            self._done[running.number] = []
            return
        self._ids += 1
        running.requests += 1
        running.answers = request.answer
        params = SamplingParams(max_tokens=min(request.max_tokens, budget), temperature=request.temperature)
        dice = Dice(self._seed, running.number * _MOST_REQUESTS + running.requests)
        self._running[self._ids] = running
        self._engine.add(Sequence(self._ids, list(request.tokens), params, self._ends, dice=dice, rule="coupled"))


class CorpusWriter:
    """Has the target write conversations; the one with number n is the same in every run of the same seed."""

    def __init__(self, loaded: Loaded, job: TrainingJob, device: str, prompts: Seq[str], about: Seq[str] = ()) -> None:
        """`prompts`: user turns to answer. `about`: openers of user turns beside ours. Both may be empty."""
        self._chat, self._ends, self._seed = ChatFormat.of(loaded.tokenizer), loaded.ends, job.seed
        self._prompts, self._about, self._mix = prompts, about, mix_for(Path(job.model).name)
        self._endless: Iterator[tuple[int, Conversation]] | None = None
        self.started = 0  # the number of the conversation that would be next
        self.batch = job.writers or at_once(loaded.model.capacity, device)
        self._roomy = loaded.model.capacity >= ROOMY * HELD_TOKENS * self.batch
        limits = Limits(self.batch, WRITING_CHUNK[device])
        plain = Drafter(Drafter.Options(), BuildContext(loaded.model, _no_other))
        self._runner = ConversationRunner(Engine(loaded.model, plain, limits), loaded.ends, self.batch, job.seed)

    @property
    def pauses(self) -> bool:
        """Whether conversations may wait in the cache: there is room, and they are not most of what there is."""
        return self._roomy and self._runner.ended > self.batch

    def wave(self, first: int, count: int, on_tokens: Callable[[int], None]) -> Corpus:
        """The conversations of `count` numbers."""
        return self._corpus(self._runner.run(self._numbered(range(first, first + count)), on_tokens))

    def some(self, first: int, on_tokens: Callable[[int], None], goes_on: Callable[[], bool]) -> Corpus:
        """What ends while it goes on; conversations begin with that number, and go on in the next call."""
        if self._endless is None:
            self._endless = self._numbered(itertools.count(first))
        return self._corpus(self._runner.run(self._endless, on_tokens, goes_on))

    def rest(self) -> Corpus:
        """End the conversations that still run; the answers that they have so far."""
        self._endless = None
        return self._corpus(self._runner.stop())

    def _corpus(self, texts: list[WrittenText]) -> Corpus:
        corpus = Corpus.of(texts)
        if self._prompts:  # all answers to one prompt count as one conversation
            corpus = replace(corpus, talks=corpus.talks % len(self._prompts))
        return corpus

    def _numbered(self, numbers: Iterable[int]) -> Iterator[tuple[int, Conversation]]:
        for number in numbers:
            self.started = number + 1
            yield number, self._conversation(number)

    def _conversation(self, number: int) -> Conversation:
        random = Random(f"{self._seed} {number}")
        if self._prompts:
            return answer_to(self._chat, self._prompts[number % len(self._prompts)], random)
        return conversation(self._chat, self._ends, random, self._about, self._mix)


def at_once(capacity: int, device: str) -> int:
    """How many conversations run at once: as many as the cache holds, in tokens, up to what one graph takes."""
    return max(1, min(WRITERS[device], capacity // HELD_TOKENS))


def write_corpus(
    writer: CorpusWriter, folder: CorpusFolder, info: CorpusInfo, job: TrainingJob, budget: TimeBudget, show: Show
) -> CorpusInfo:
    """Waves until there are as many tokens as the job asks for, or the time for writing is over."""
    until = WRITING_SHARE * budget.limit
    while not _enough(info, job) and (not info.waves or budget.spent + _next_seconds(info, writer, job) <= until):
        begin, count = budget.spent, _wave_size(info, writer, job)
        corpus = writer.wave(info.talks, count, _WritingProgress(info, job.tokens, budget, until, show).add)
        info = _counted(folder, info, corpus, info.talks + count, budget.spent - begin)
    return _complete(folder, info)


def write_until(
    writer: CorpusWriter,
    folder: CorpusFolder,
    info: CorpusInfo,
    end: float,
    budget: TimeBudget,
    show: Show,
    cut: bool,
) -> CorpusInfo:
    """Conversations until `end`, in seconds of the run, in shards; at least some. What is begun then goes on in the
    next call; it is cut where there is none, or where it cannot wait."""
    first, begin = info.talks, budget.spent
    while budget.spent < end or not info.tokens:
        until = min(end, budget.spent + SHARD_SECONDS)
        progress = _WritingProgress(info, 0, budget, end, show, until)
        corpus = writer.some(first, progress.add, progress.goes_on)
        if not len(corpus) and not info.tokens:
            end = max(end, budget.spent + 1.0)
        if budget.spent >= end and (cut or not writer.pauses):
            corpus = Corpus.join([corpus, writer.rest()])
        if len(corpus):
            info = _counted(folder, info, corpus, writer.started, budget.spent - begin)
            begin = budget.spent
    return _complete(folder, info)


def _counted(folder: CorpusFolder, info: CorpusInfo, corpus: Corpus, talks: int, seconds: float) -> CorpusInfo:
    tokens = info.tokens + len(corpus.tokens)
    info = replace(info, waves=info.waves + 1, talks=talks, tokens=tokens, seconds=info.seconds + seconds)
    folder.add(corpus, info)
    return info


def _complete(folder: CorpusFolder, info: CorpusInfo) -> CorpusInfo:
    """From now on other runs may learn from it."""
    info = replace(info, complete=True)
    folder.write_info(info)
    return info


class _WritingProgress:
    """Shows how far the writing is."""

    def __init__(
        self, info: CorpusInfo, wanted: int, budget: TimeBudget, end: float, show: Show, until: float = math.inf
    ) -> None:
        """`wanted`: tokens; 0: until `end`, in seconds of the run, in parts of which this one ends at `until`."""
        self._until = until
        self._tokens, self._wanted, self._budget, self._end, self._show = info.tokens, wanted, budget, end, show
        self._before, self._begun = info.tokens, budget.spent

    def goes_on(self) -> bool:
        """Asked after every step: before the first conversation has ended, too, there is something to show."""
        self._say()
        return self._budget.spent < self._until

    def add(self, tokens: int) -> None:
        if tokens:
            self._tokens += tokens
            self._say()

    def _say(self) -> None:
        speed = (self._tokens - self._before) / max(self._budget.spent - self._begun, 1e-9)
        what = f"the target writes: {self._tokens:,} tokens, {speed:,.0f}/s"
        if self._wanted:
            self._show(what, self._tokens, self._wanted)
        else:
            self._show(what, int(self._budget.spent), int(self._end))


def _enough(info: CorpusInfo, job: TrainingJob) -> bool:
    return 0 < job.tokens <= info.tokens


def _wave_size(info: CorpusInfo, writer: CorpusWriter, job: TrainingJob) -> int:
    """Conversations of the next wave."""
    mean = info.tokens / info.talks if info.talks else MEAN_TOKENS
    return min(ROUNDS * writer.batch, math.ceil((job.tokens - info.tokens) / mean))


def _next_seconds(info: CorpusInfo, writer: CorpusWriter, job: TrainingJob) -> float:
    """Seconds that the next wave is going to take."""
    return _wave_size(info, writer, job) * info.seconds / max(info.talks, 1)


def _no_other(name: str, quantize: str) -> Model:
    raise OutriderError("no other model is loaded while texts are written")
