"""Our engine behind a tokenizer: one thread runs the engine, any thread may submit."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from outrider.backends.base import Stream
from outrider.backends.text import Writer
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.request import Chunk, Message, Prompt, Request, Result
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Rule, Sequence
from outrider.drafters.base import Drafter
from outrider.engine.engine import Engine
from outrider.models.tokenizer import Tokenizer


@dataclass(eq=False)
class _Job:
    """One request under way: its samples, and what of each was already delivered."""

    request: Request
    stream: Stream
    seqs: list[Sequence]
    writers: list[Writer | None]
    sent: list[int]


_ids = itertools.count()  # of sequences


class Local:
    def __init__(
        self,
        engine: Engine,
        drafter: Callable[[str], Drafter],
        tokenizer: Tokenizer | None = None,
        ends: frozenset[int] = frozenset(),
        rule: Rule = "rejection",
        notes: Seq[str] = (),
    ) -> None:
        """`drafter` builds the one that a request names. `ends`: the tokens that end a sequence. `rule`: for requests
        without a seed. `notes`: what a user should know about how the model was loaded."""
        self.engine, self.tokenizer, self.notes = engine, tokenizer, tuple(notes)
        self._drafter, self._ends, self._rule = drafter, ends, rule
        self._inbox: queue.SimpleQueue[_Job | tuple[_Job] | None] = queue.SimpleQueue()  # new, to cancel, or: end
        self._places: dict[int, tuple[_Job, int]] = {}  # sequence id -> its job, and which sample it is
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, request: Request) -> Stream:
        params = self._resolve(request.params)
        prompt = self._prompt(request)
        expected = () if request.prediction is None else tuple(self.encode(request.prediction, special=False))
        writers = [self._writer(request) for _ in range(params.n)]
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends)
        self.prepare(request.draft)
        if request.prediction is not None and not self.engine.drafters[request.draft].expects:
            raise OutriderError("a prediction was given, but only the drafter prediction reads it; choose that one")
        seqs = [
            Sequence(
                next(_ids),
                list(prompt),
                params,
                ends,
                request.draft,
                expected,
                Dice(params.seed, index),
                self._rule,
                writer.push if writer else None,
            )
            for index, writer in enumerate(writers)
        ]
        for seq in seqs:
            self.engine.scheduler.check(seq)
        stream = Stream(lambda: self._inbox.put((job,)))
        job = _Job(request, stream, seqs, writers, [0] * params.n)
        with self._lock:  # or the thread could end between the two
            self._start()
            self._inbox.put(job)
        return stream

    def close(self) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                self._inbox.put(None)
                self._thread.join()

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            ids = [int(token) for token in prompt]
            self._check_ids(ids)
            return ids
        return list(self._need_tokenizer().encode(prompt, add_special_tokens=special))

    def render(self, messages: Seq[Message]) -> list[int]:
        """Messages as the model's own chat template writes them, ready for the answer."""
        tokenizer = self._need_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise OutriderError("the model has no chat template; give a prompt instead of messages (--raw)")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except OutriderError:
            raise
        except Exception as error:  # the template is the model's own code: whatever it raises is about the messages
            reason = " ".join(str(error).split())
            raise OutriderError(f"the chat template refused the messages: {reason}") from error
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _prompt(self, request: Request) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise OutriderError("a request has either a prompt or messages")
        if request.messages is not None:
            return self.render(request.messages)
        assert request.prompt is not None
        return self.encode(request.prompt)

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """Bad words as tokens, and every token id within the vocabulary."""
        words = tuple(ids for word in params.bad_words for ids in self._spellings(word))
        self._check_ids(params.token_ids())
        return replace(params, bad_words=words) if params.bad_words else params

    def _spellings(self, word: str | tuple[int, ...]) -> set[tuple[int, ...]]:
        """A word is written differently at the beginning of a text and after a space."""
        if not isinstance(word, str):
            return {word}
        return {tuple(self.encode(text, special=False)) for text in (word, " " + word.lstrip())} - {()}

    def _writer(self, request: Request) -> Writer | None:
        """Text is written token by token only where somebody reads it so."""
        if request.params.stop:
            return Writer(self._need_tokenizer(), request.params.stop, request.params.min_tokens)
        return Writer(self.tokenizer) if request.stream and self.tokenizer is not None else None

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise OutriderError("the model has no tokenizer, so text cannot be read; give token ids instead")
        return self.tokenizer

    def _check_ids(self, ids: Any) -> None:
        size = self.engine.model.vocab_size
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            raise OutriderError(f"token id {bad} is outside the vocabulary of {size} tokens")

    def prepare(self, draft: str) -> None:
        """Build the drafter that requests may name; an OutriderError says why it cannot be."""
        with self._lock:
            if draft not in self.engine.drafters:
                self.engine.drafters[draft] = self._drafter(draft)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """The engine's thread: take in, step, deliver. Whatever goes wrong ends requests, never the thread."""
        while True:
            try:
                if not self._take_in():
                    break
                if self.engine.busy:
                    ended = self.engine.step()
                    self._deliver([*self.engine.scheduler.running, *ended])
            except Exception as error:
                self._abandon(error)
        for seq in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self._deliver(self.engine.cancel(seq.id))

    def _take_in(self) -> bool:
        """New requests and cancellations; waits for one when there is nothing to do. False: close."""
        while not self.engine.busy or not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, _Job):
                for index, seq in enumerate(item.seqs):
                    self._places[seq.id] = item, index
                    self.engine.add(seq)
            else:
                for seq in item[0].seqs:
                    self._deliver(self.engine.cancel(seq.id))
        return True

    def _abandon(self, error: Exception) -> None:
        """A pass failed (out of memory, say): the sequences in it end with the reason, the waiting ones go on."""
        reason = f"the pass failed: {type(error).__name__}: {' '.join(str(error).split())}"
        waiting = {seq.id for seq in self.engine.scheduler.waiting}
        hit = [job.seqs[index] for id, (job, index) in self._places.items() if id not in waiting]
        for seq in hit:
            if seq.finish is None:
                seq.fail(reason)
        self.engine.sweep()
        self._deliver(hit)

    def _deliver(self, seqs: Seq[Sequence]) -> None:
        for seq in seqs:
            if seq.id not in self._places:
                continue
            job, index = self._places[seq.id]
            try:
                self._hand_over(job, index)
            except Exception as error:  # of a tokenizer, say: this request ends, the others go on
                for sample in job.seqs:
                    self._places.pop(sample.id, None)
                    self.engine.cancel(sample.id)
                job.stream.finish(OutriderError(f"the text could not be written: {type(error).__name__}: {error}"))

    def _hand_over(self, job: _Job, index: int) -> None:
        seq = job.seqs[index]
        if job.request.stream and (len(seq.output) > job.sent[index] or seq.finish is not None):
            self._send(job, index)
        if seq.finish is not None:
            del self._places[seq.id]
            if not any(sample.id in self._places for sample in job.seqs):  # the last chunk of each was sent
                first, *others = map(self._result, job.seqs, job.writers)
                job.stream.finish(replace(first, others=tuple(others)))

    def _send(self, job: _Job, index: int) -> None:
        seq, writer = job.seqs[index], job.writers[index]
        text = writer.take(last=seq.finish is not None) if writer else ""
        tokens = tuple(seq.output[job.sent[index] :])
        job.stream.put(Chunk(text, tokens, index, seq.finish))
        job.sent[index] = len(seq.output)

    def _text(self, seq: Sequence, writer: Writer | None) -> str:
        if writer is not None:
            writer.take(last=True)
            return writer.text
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode([token.id for token in seq.output], skip_special_tokens=True))

    def _result(self, seq: Sequence, writer: Writer | None) -> Result:
        assert seq.finish is not None
        logprobs = None
        if seq.params.logprobs is not None:
            logprobs = [{token.id: token.logprob or 0.0, **dict(token.top)} for token in seq.output]
        return Result(
            self._text(seq, writer),
            [token.id for token in seq.output],
            seq.finish,
            logprobs,
            seq.stats,
            seq.tokens[: seq.prompt],
            tuple(seq.output),
            seq.error,
        )
