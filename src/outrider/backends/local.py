"""Our engine behind a tokenizer: one thread runs the engine, any thread may submit."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.backends.adapters import AdapterLoader, AdapterWait
from outrider.backends.base import BackendBusy, BackendLoad, BackendStopped, StepClock, StepGate, Stream
from outrider.backends.faults import FaultCounter
from outrider.backends.reader import Reader
from outrider.backends.text import Writer
from outrider.core.adapter import AdapterInfo, ReadyAdapter, names_of
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError, one_line
from outrider.core.grammar import Grammars, Matcher
from outrider.core.params import SamplingParams
from outrider.core.request import Chunk, Request, Result
from outrider.core.sequence import Rule, Sequence
from outrider.drafters.base import Drafter
from outrider.drafters.history.store import HistoryStore
from outrider.engine.engine import Engine
from outrider.models.adapters.store import AdapterStore
from outrider.models.memory import return_heap
from outrider.models.prefix_file import PrefixFile
from outrider.models.tokenizer import Tokenizer


@dataclass(eq=False)
class _LocalJob:
    """One request under way: its samples, and what of each was already delivered."""

    request: Request
    stream: Stream
    seqs: list[Sequence]
    writers: list[Writer | None]
    sent: list[int]
    first: list[float]  # when the first token of each was written; 0: it is not yet
    wait: AdapterWait | None = None  # while its adapter is loaded

    @property
    def adapter(self) -> ReadyAdapter | None:
        return self.seqs[0].adapter


_logger = logging.getLogger("outrider")
_ids = itertools.count()  # of sequences
_calls = itertools.count()  # of calls that hand in requests
IDLE = 8  # drafters kept that requests have named and none uses now: a client's few variants, without a new build
MOST_WITH_WEIGHTS = 4  # drafters with weights of their own that requests have named, in use or idle: bounds memory
IDLE_WITH_WEIGHTS = 2  # of the idle ones, the most with weights of their own: a head or a model each (docs/LOG.md)


class Local(Reader):
    def __init__(
        self,
        engine: Engine,
        drafter: Callable[[str], Callable[[], Drafter]],
        tokenizer: Tokenizer | None = None,
        ends: frozenset[int] = frozenset(),
        rule: Rule = "rejection",
        notes: Seq[str] = (),
        histories: HistoryStore | None = None,
        adapters: AdapterStore | None = None,
        prefixes: PrefixFile | None = None,
        near: Callable[[str, str], str] = lambda draft, adapter: draft,
    ) -> None:
        """`drafter` reads the files of the one that a request names, and returns what builds it. `ends`: the tokens
        that end a sequence. `rule`: for requests without a seed. `notes`: what a user should know about how the model
        was loaded. `histories`: what drafters keep of texts; `prefixes`: the file of shared prefixes; both are closed
        with the backend. `adapters`: those that requests may name. `near`: a drafter's spec -> the same with the heads
        beside an adapter's path."""
        self.engine, self.tokenizer, self.notes = engine, tokenizer, tuple(notes)
        self.vocab_size = engine.model.vocab_size
        self._drafter, self._ends, self._rule, self._near = drafter, ends, rule, near
        self._histories, self._prefixes = histories, prefixes
        # new requests that are taken in together, one to cancel (in a tuple), or None: end
        self._inbox: queue.SimpleQueue[list[_LocalJob] | tuple[_LocalJob] | None] = queue.SimpleQueue()
        self._places: dict[int, tuple[_LocalJob, int]] = {}  # sequence id -> its job, and which sample it is
        self._users: dict[str, int] = {}  # drafter that requests have named -> requests under way; the last used last
        self._thread: threading.Thread | None = None
        self._clock, self._faults, self._fault = StepClock(), FaultCounter(), ""
        self._grammars = Grammars(self._vocabulary)
        if engine.overlaps:
            engine.meanwhile = lambda: self._deliver(engine.scheduler.running)
            engine.interrupted = lambda: not self._inbox.empty()
        self._adapters = AdapterLoader(adapters or AdapterStore(engine.model, 0))
        self._unused: list[_LocalJob] = []  # requests that ended in a pass, which may still use what they hold
        self._lock, self._building, self._counting = threading.Lock(), threading.Lock(), threading.Lock()
        self._freed = threading.Condition(self._counting)  # told when a drafter has one use less
        self._gate = StepGate()
        self._opening = threading.Lock()  # of the thread, or closing it: never taken by the thread, which is waited for

    def submit(self, request: Request) -> Stream:
        [stream] = self.submit_all([request])
        return stream

    def submit_all(self, requests: Seq[Request]) -> list[Stream]:
        """The engine takes them in between two steps, so the same call has the same passes each time."""
        jobs: list[_LocalJob] = []
        call = next(_calls)
        try:
            for request, prompt in zip(requests, self._prompts(requests), strict=True):
                jobs.append(self._checked(request, prompt, call))
            ready = [job for job in jobs if self._adapt(job)]
            self._hand_in(ready)
        except BaseException:
            for job in jobs:
                self._let_go_of(job)
            raise
        for job in jobs:
            if job.wait is not None:
                self._adapters.submit(job.wait)
        return [job.stream for job in jobs]

    def _adapt(self, job: _LocalJob) -> bool:
        """Give it its adapter, if it has one; False: it has to be loaded first."""
        choice = job.request.adapter
        if not choice:
            return True
        ready = self._adapters.take(choice)
        if ready is None:
            job.wait = AdapterWait(choice, lambda ready, error: self._adapted(job, ready, error))
            return False
        for seq in job.seqs:
            seq.adapter = ready
        return True

    def _adapted(self, job: _LocalJob, ready: ReadyAdapter | None, error: Exception | None) -> None:
        """Its adapter is loaded, or cannot be, or nobody wants it any more."""
        assert job.wait is not None
        for seq in job.seqs:
            seq.adapter = ready
        if ready is not None:
            try:
                self._hand_in([job])
            except Exception as failure:  # the engine has stopped
                ready, error = None, failure
        if ready is None:
            self._let_go_of(job)
            if error is not None:
                job.stream.finish(error)
                return
            for index, seq in enumerate(job.seqs):
                seq.finish = "cancelled"
                if job.request.stream:
                    self._send(job, index)
            job.stream.finish(self._outcome(job))
        elif job.wait.cancelled.is_set():  # after it had been loaded: the engine knows it only now
            self._inbox.put((job,))

    def _cancel(self, job: _LocalJob) -> None:
        if job.wait is not None:
            self._adapters.cancel(job.wait)
        self._inbox.put((job,))

    def _checked(self, request: Request, prompt: list[int], call: int) -> _LocalJob:
        """The request as a job, which keeps its drafter until it ends."""
        request, drafter = self._held(request)
        try:
            if request.prediction is not None and not drafter.reads_prediction:
                raise OutriderError("a prediction was given, but only the drafter prediction reads it; choose that one")
            if request.adapter:
                self._adapters.store.check(request.adapter)
            return self._job(request, prompt, call)
        except BaseException:
            self._let_go(request.draft)
            raise

    def _held(self, request: Request) -> tuple[Request, Drafter]:
        """The request with the drafter that it gets. A head beside its adapter comes before the model's own; where too
        many others are in use it is left out, for that costs speed alone."""
        names = names_of(request.adapter)
        if len(names) == 1:
            draft = self._near(request.draft, self._adapters.store.info(names[0]).path)
            if draft != request.draft:
                with contextlib.suppress(BackendBusy):
                    return replace(request, draft=draft), self._hold(draft)
        return request, self._hold(request.draft)

    def _hand_in(self, jobs: list[_LocalJob]) -> None:
        with self._opening, self._lock:  # or the thread could end between the two
            if self._fault:
                raise BackendStopped(f"the engine has stopped ({self._fault}); load the model again in a new process")
            if jobs:
                self._start()
                self._inbox.put(jobs)

    def _job(self, request: Request, prompt: list[int], call: int) -> _LocalJob:
        params = self._resolve(request.params)
        expected = () if request.prediction is None else tuple(self.encode(request.prediction, special=False))
        writers = [self._writer(request) for _ in range(params.n)]
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._ends)
        matchers = self._matchers(params, ends)
        ids = [next(_ids) for _ in writers]
        seqs = []
        for index, (id, writer) in enumerate(zip(ids, writers, strict=True)):
            seq = Sequence(
                id,
                list(prompt),
                params,
                ends,
                request.draft,
                expected,
                Dice(params.seed, index),
                self._rule,
                writer.push if writer else None,
                request=request.group or ids[0],
                call=call,
                matcher=matchers[index],
                tenant=request.tenant,
            )
            self.engine.scheduler.check(seq)  # before the prompt is copied for the next one
            seqs.append(seq)
        stream = Stream(lambda: self._cancel(job), len(prompt))
        job = _LocalJob(request, stream, seqs, writers, [0] * params.n, [0.0] * params.n)
        return job

    def close(self) -> None:
        self._adapters.close()
        with self._opening:
            if self._thread is not None and self._thread.is_alive():
                self._inbox.put(None)
                self._thread.join()
            if self._histories is not None:
                self._histories.close()
            if self._prefixes is not None:
                self._prefixes.close()

    @property
    def context(self) -> int:
        return self.engine.model.context

    @property
    def longest(self) -> int:
        model = self.engine.model
        return min(model.context, model.capacity - self.engine.scheduler.limits.budget)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "num_layers": self.engine.model.num_layers}

    def load(self) -> BackendLoad:
        scheduler = self.engine.scheduler
        return BackendLoad(
            len(scheduler.running),
            len(scheduler.waiting) + self._adapters.waiting,
            scheduler.reserved / self.engine.model.capacity,
            self._clock.waited,
            self._clock.slowest,
            self._fault,
            self._adapters.store.count,
        )

    def load_adapter(self, name: str, path: str | Path, allow_pickle: bool = False) -> AdapterInfo:
        return self._adapters.store.register(name, path, allow_pickle)

    def unload_adapter(self, name: str) -> None:
        self._adapters.store.unregister(name)

    def adapters(self) -> list[AdapterInfo]:
        return self._adapters.store.infos()

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """Bad words as tokens, and every token id within the vocabulary."""
        words = tuple(ids for word in params.bad_words for ids in self._spellings(word))
        self._check_ids(params.token_ids())
        return replace(params, bad_words=words) if params.bad_words else params

    def matcher(self, params: SamplingParams) -> Matcher:
        """At the beginning of the grammar that the parameters have, to see what it allows."""
        [found] = self._matchers(replace(params, n=1), frozenset(params.stop_token_ids) | self._ends)
        if found is None:
            raise OutriderError("the parameters have no grammar")
        return found

    def _matchers(self, params: SamplingParams, ends: frozenset[int]) -> Seq[Matcher | None]:
        """One for each sample. The grammar is compiled here, by the thread that hands the request in."""
        if params.constraint is None:
            return [None] * params.n
        grammar = self._grammars.get(params.constraint)
        return [grammar.matcher(ends) for _ in range(params.n)]

    def _spellings(self, word: str | tuple[int, ...]) -> set[tuple[int, ...]]:
        """A word is written differently at the beginning of a text and after a space."""
        if not isinstance(word, str):
            return {word}
        return {tuple(self.encode(text, special=False)) for text in (word, " " + word.lstrip())} - {()}

    def prepare(self, draft: str) -> None:
        """Build the drafter that requests may name; an OutriderError says why it cannot be."""
        self._hold(draft)
        self._let_go(draft)

    def forget_texts(self) -> None:
        """Drafters copy nothing any more from what was written until now: measurements repeat their prompts."""
        if self._histories is not None:
            self._histories.forget()

    def renew(self, draft: str) -> None:
        """Build a drafter that no request uses anew: what it has learned from earlier sequences is forgotten."""
        with self._building:
            self.forget_texts()
            built = self._build(draft)
            with self._counting:
                old = self.engine.drafters.get(draft)
                names = [name for name, each in self.engine.drafters.items() if each is old] or [draft]
                for name in names if old is not None else ():
                    self.engine.drop(name)
                self.engine.drafters.update(dict.fromkeys(names, built))

    def _hold(self, draft: str) -> Drafter:
        """The drafter of that spec, kept until `_let_go`. A request for one that is there never waits for a build."""
        if (found := self._use(draft)) is not None:
            return found
        with self._building:
            if (found := self._use(draft)) is not None:
                return found
            self._make_place(draft)
            built = self._build(draft)
            if built.has_weights:  # reading and packing its weights took as much again for a moment
                return_heap()
            with self._counting:
                self.engine.drafters[draft], self._users[draft] = built, 1
        return built

    def _build(self, draft: str) -> Drafter:
        """Files are downloaded and read while steps run. On a device none runs during the rest: passes are prepared
        there in the memory that steps use."""
        built = self._drafter(draft)
        with self._gate.between_steps() if self.engine.overlaps else contextlib.nullcontext():
            return built()

    def _make_place(self, draft: str) -> None:
        """Before a drafter with weights of its own is built: drop the longest unused one where there are too many."""
        try:
            heavy_ones = [kind for kind in drafters.kinds(draft) if kind.has_weights]
        except OutriderError:  # building it will tell
            return
        if not heavy_ones:
            return
        with self._freed:
            while len(heavy := self._with_weights()) >= MOST_WITH_WEIGHTS:
                if idle := [spec for spec in heavy if not self._users[spec]]:
                    self._drop(idle[0])
                    return
                if not self._ending(heavy):
                    raise BackendBusy(
                        f"{len(heavy)} other drafters with weights of their own are in use, and no more may be at "
                        "once; try again later, or name another drafter"
                    )
                self._freed.wait()

    def _with_weights(self) -> list[str]:
        """Those with weights beside the backend's own drafter, the last used last."""
        own, there = self.engine.drafters[""], self.engine.drafters
        return [spec for spec in self._users if there[spec].has_weights and there[spec] is not own]

    def _ending(self, specs: Seq[str]) -> bool:
        """Whether one of them is used only by requests that have ended, until the step at hand is over."""
        ended = [job.request.draft for job in list(self._unused)]
        return any(spec in ended and self._users[spec] <= ended.count(spec) for spec in specs)

    def _use(self, draft: str) -> Drafter | None:
        with self._counting:
            found = self.engine.drafters.get(draft)
            if found is not None:
                self._users[draft] = self._users.pop(draft, 0) + 1
            return found

    def _let_go(self, draft: str, job: _LocalJob | None = None) -> None:
        """One use less, of a job if there is one. Of the drafters that no request uses, the last used are kept, and
        always the backend's own."""
        with self._counting:
            self._users[draft] -= 1
            if job in self._unused:
                self._unused.remove(job)
            self._freed.notify_all()
            dropped = [self._drop(spec) for spec in self._too_many()]
        if any(dropped):
            return_heap()

    def _let_go_of(self, job: _LocalJob) -> None:
        """Of the drafter and the adapter that it holds."""
        self._let_go(job.request.draft, job)
        if job.adapter is not None:
            self._adapters.store.release(job.adapter)

    def _let_go_unused(self) -> None:
        """After a pass, when the sequences that have ended in it are taken off."""
        while self._unused:
            self._let_go_of(self._unused[0])

    def _too_many(self) -> list[str]:
        """The idle drafters beyond those that are kept, the longest unused first."""
        drafters = self.engine.drafters
        idle = [spec for spec, users in self._users.items() if not users and drafters[spec] is not drafters[""]]
        heavy = [spec for spec in idle if drafters[spec].has_weights]
        over = {*idle[:-IDLE], *heavy[:-IDLE_WITH_WEIGHTS]}
        return [spec for spec in idle if spec in over]

    def _drop(self, spec: str) -> bool:
        """Whether it had weights of its own."""
        had = self.engine.drafters[spec].has_weights
        del self._users[spec]
        self.engine.drop(spec)
        return had

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """The engine's thread, until the backend is closed or a failure leaves it without a device."""
        while self._turn():
            pass
        self._clock.stop()
        if self._fault:
            self._refuse_the_rest()
            return
        for seq in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self._deliver(self.engine.cancel(seq.id))
        self._let_go_unused()

    def _turn(self) -> bool:
        """Take in, step, deliver. What goes wrong ends requests, not the thread. False: the thread is to end."""
        try:
            if not self._take_in():
                return False
            if self.engine.busy:
                ended = self._step()
                self._faults.succeeded()
                # where passes overlap with what we do here, readers of the others wake up during the next one:
                # now they would take the interpreter from the thread that has to start it
                self._deliver(ended if self.engine.overlaps else [*self.engine.scheduler.running, *ended])
        except Exception as error:
            _logger.exception("a pass failed")
            self._abandon(error)
        self._let_go_unused()
        self._clock.tick()
        return not self._fault

    def _step(self) -> list[Sequence]:
        if not self.engine.overlaps:  # nobody builds between steps
            return self.engine.step()
        with self._gate.step(self._wait_for_a_build):
            return self.engine.step()

    def _wait_for_a_build(self) -> None:
        """No step may run now: readers get what the last one wrote, which they would have during the next."""
        self._clock.tick()
        self._deliver(self.engine.scheduler.running)

    def _take_in(self) -> bool:
        """New requests and cancellations; waits for one when there is nothing to do. False: close."""
        while not self.engine.busy or not self._inbox.empty():
            item = self._next()
            if item is None:
                return False
            if isinstance(item, list):
                for job in item:
                    self._take_on(job)
            else:
                for seq in item[0].seqs:
                    self._deliver(self.engine.cancel(seq.id))
        return True

    def _take_on(self, job: _LocalJob) -> None:
        for index, seq in enumerate(job.seqs):
            self._places[seq.id] = job, index
            self.engine.add(seq)

    def _next(self) -> list[_LocalJob] | tuple[_LocalJob] | None:
        if self.engine.busy or not self._inbox.empty():
            return self._inbox.get()
        self._clock.stop()
        item = self._inbox.get()
        self._clock.tick()
        return item

    def _abandon(self, error: Exception) -> None:
        """A pass failed (out of memory, say): the sequences in it end with the reason, the waiting ones go on, unless
        no pass can succeed any more."""
        reason = f"the pass failed: {one_line(error, named=True)}"
        if self._faults.failed(error):
            self._fault = reason
        waiting = {seq.id for seq in self.engine.scheduler.waiting} if not self._fault else set()
        hit = [job.seqs[index] for id, (job, index) in self._places.items() if id not in waiting]
        for seq in hit:
            if seq.finish is None:
                seq.fail(reason)
        self._sweep()
        self._deliver(hit)

    def _sweep(self) -> None:
        """Free the memory of what has ended; a model that cannot even do that cannot go on."""
        if self._fault:  # freeing may touch the device that is lost
            return
        try:
            self.engine.sweep()
        except Exception as error:
            _logger.exception("sequences could not be freed")
            self._fault = f"sequences could not be freed: {one_line(error, named=True)}"

    def _refuse_the_rest(self) -> None:
        """Requests that came in while the engine stopped."""
        with self._lock:  # a request that is handed in now is in the inbox, or sees the fault
            while not self._inbox.empty():
                item = self._inbox.get()
                for job in item if isinstance(item, list) else ():
                    self._let_go_of(job)
                    job.stream.finish(BackendStopped(self._fault))

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
                self._unused.append(job)
                job.stream.finish(OutriderError(f"the text could not be written: {type(error).__name__}: {error}"))

    def _hand_over(self, job: _LocalJob, index: int) -> None:
        seq = job.seqs[index]
        if seq.output and not job.first[index]:
            job.first[index] = time.perf_counter()
        if seq.finish is not None and seq.output:
            seq.stats.writing_seconds = time.perf_counter() - job.first[index]
        if job.request.stream and (len(seq.output) > job.sent[index] or seq.finish is not None):
            self._send(job, index)
        if seq.finish is not None:
            del self._places[seq.id]
            if not any(sample.id in self._places for sample in job.seqs):  # the last chunk of each was sent
                result = self._outcome(job)
                # a step goes on with the rows of a text that has ended: its adapter must not make place for another
                if self.engine.passing:
                    self._unused.append(job)
                else:
                    self._let_go_of(job)
                job.stream.finish(result)

    def _outcome(self, job: _LocalJob) -> Result:
        first, *others = map(self._result, job.seqs, job.writers)
        return replace(first, others=tuple(others))

    def _send(self, job: _LocalJob, index: int) -> None:
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
