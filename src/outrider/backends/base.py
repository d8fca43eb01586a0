"""The interface of a backend: it takes a request and returns a stream."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.core.adapter import AdapterInfo
from outrider.core.errors import OutriderError
from outrider.core.request import Chunk, Message, Prompt, Request, Result

WAKE = 1.0  # seconds after which a step that may not begin yet says that it is alive (fleet/limits.py waits longer)


class BackendStopped(OutriderError):
    """Nothing can run on this backend any more; a new one has to be loaded, in a new process for a lost device."""


class BackendBusy(OutriderError):
    """What the request needs is taken by others for now; it may be tried again."""


class Stream:
    """The answer to one request: iterate over its chunks, sync or async, or wait for its result.

    The backend's thread puts chunks in; any other thread or event loop takes them out.
    """

    def __init__(self, cancel: Callable[[], None], prompt_tokens: int) -> None:
        self._cancel, self.prompt_tokens = cancel, prompt_tokens
        self._chunks: deque[Chunk] = deque()
        self._begun: set[int] = set()  # samples of which a chunk has come
        self._urgent = False  # whether a sample begins or ends in the chunks that wait
        self._changed = threading.Condition()
        self._waker: Callable[[], object] | None = None
        self._result: Result | None = None
        self._error: Exception | None = None

    def put(self, chunk: Chunk) -> None:
        with self._changed:
            self._chunks.append(chunk)
            if chunk.index not in self._begun or chunk.finish_reason is not None:
                self._begun.add(chunk.index)
                self._urgent = True
        self._wake()

    def finish(self, outcome: Result | Exception) -> None:
        with self._changed:
            if isinstance(outcome, Exception):
                self._error = outcome
            else:
                self._result = outcome
        self._wake()

    def cancel(self) -> None:
        """Stop writing; what was written stays readable."""
        if not self.done:
            self._cancel()

    @property
    def done(self) -> bool:
        return self._result is not None or self._error is not None

    @property
    def urgent(self) -> bool:
        """Whether its reader should not let it wait: it has ended, or a sample begins or ends in what was not taken."""
        return self._urgent or self.done

    def result(self) -> Result:
        """Wait for the end. Chunks that nobody took are dropped."""
        with self._changed:
            while not self.done:
                self._changed.wait()
        return self._outcome()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                while not self._chunks and not self.done:
                    self._changed.wait()
            if not self._chunks:
                break
            yield self._chunks.popleft()
        self._outcome()

    def watch(self, waker: Callable[[], object]) -> None:
        """Have `waker` called, by the backend's thread, whenever there is something to take, and at the end."""
        self._waker = waker
        if self._chunks or self.done:
            waker()

    def take(self) -> list[Chunk]:
        """The chunks that are here, without waiting."""
        with self._changed:
            self._urgent = False
            return [self._chunks.popleft() for _ in range(len(self._chunks))]

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self.watch(lambda: loop.call_soon_threadsafe(event.set))
        try:
            while True:
                event.clear()
                while self._chunks:
                    yield self._chunks.popleft()
                if self.done and not self._chunks:
                    break
                await event.wait()
        finally:
            self._waker = None
        self._outcome()

    def _outcome(self) -> Result:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is gone, and nobody waits any more
                waker()


@dataclass(frozen=True)
class BackendLoad:
    """How busy a backend is, and whether its engine still steps."""

    running: int = 0  # sequences in the batch
    waiting: int = 0  # sequences that wait for a place in it
    cache: float = 0.0  # share of the keys and values that running sequences may need
    since_step: float = 0.0  # seconds since a step ended; 0: there is nothing to do
    slowest_step: float = 0.0  # seconds of the slowest step so far; 0: none has ended
    fault: str = ""  # why the backend has stopped for good; "": it has not
    adapters: int = 0  # in memory


class StepClock:
    """How long the engine has been at its present step. The engine's thread writes it, any thread reads it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun: float | None = None  # None: there is nothing to do
        self.slowest = 0.0  # seconds

    def tick(self) -> None:
        """A step has ended (if one was under way), and the next begins."""
        begun, self._begun = self._begun, self._now()
        if begun is not None:
            self.slowest = max(self.slowest, self._begun - begun)

    def stop(self) -> None:
        """There is nothing to do."""
        self._begun = None

    @property
    def waited(self) -> float:
        """Seconds since the last step ended; 0 while there is nothing to do."""
        begun = self._begun
        return 0.0 if begun is None else self._now() - begun


class StepGate:
    """Keeps the engine's steps and the work of other threads apart that uses the same memory of a device. Who wants to
    do such work waits for one step at most: the next one lets it go first."""

    def __init__(self) -> None:
        self._next, self._one = threading.Lock(), threading.Lock()

    @contextlib.contextmanager
    def step(self, waiting: Callable[[], None]) -> Iterator[None]:
        """A step. `waiting` is called every WAKE seconds until it may begin."""
        _acquire(self._next, waiting)
        self._next.release()
        _acquire(self._one, waiting)
        try:
            yield
        finally:
            self._one.release()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        with self._next, self._one:
            yield


def _acquire(lock: threading.Lock, waiting: Callable[[], None]) -> None:
    while not lock.acquire(timeout=WAKE):
        waiting()


class Backend(Protocol):
    tokenizer: Any  # None: prompts are token ids
    notes: tuple[str, ...]  # what a user should know about how the model was loaded

    @property
    def context(self) -> int:
        """The most tokens a sequence can have, as the model was trained."""
        ...

    @property
    def longest(self) -> int:
        """The most tokens a sequence can have here: the context, or what the cache memory holds."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a user may want to know of the model: context, notes, chat, text; vocab_size, num_layers where known."""
        ...

    def load(self) -> BackendLoad:
        """How busy it is now. Any thread may ask, also while a step hangs."""
        ...

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]: ...

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Messages as the model's own chat template writes them, ready for the answer. `tools`: which it may call."""
        ...

    def prepare(self, draft: str) -> None:
        """Make ready the drafter that requests may name; an OutriderError says why it cannot be."""
        ...

    def load_adapter(self, name: str, path: str | Path, allow_pickle: bool = False) -> AdapterInfo:
        """Read and check an adapter of the model; requests may name it from now on."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Requests may not name it any more; those that have it are served on."""
        ...

    def adapters(self) -> list[AdapterInfo]:
        """Those that requests may name."""
        ...

    def submit(self, request: Request) -> Stream:
        """Start a request; an OutriderError says why it can never run, BackendStopped that none can any more."""
        ...

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Start several requests together, or none of them if one can never run."""
        ...

    def close(self) -> None:
        """Cancel what runs and give the memory back."""
        ...
