"""What a backend is: it takes a request and gives back a stream."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from outrider.core.request import Chunk, Message, Prompt, Request, Result


class Stream:
    """The answer to one request: iterate over its chunks, sync or async, or wait for its result.

    The backend's thread puts chunks in; any other thread or event loop takes them out.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._waker: Callable[[], object] | None = None
        self._result: Result | None = None
        self._error: Exception | None = None

    def put(self, chunk: Chunk) -> None:
        with self._changed:
            self._chunks.append(chunk)
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


class Backend(Protocol):
    tokenizer: Any  # None: prompts are token ids
    notes: tuple[str, ...]  # what a user should know about how the model was loaded

    @property
    def context(self) -> int:
        """The most tokens a sequence can have."""
        ...

    def encode(self, prompt: Prompt, special: bool = True) -> list[int]: ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Messages as the model's own chat template writes them, ready for the answer."""
        ...

    def prepare(self, draft: str) -> None:
        """Make ready the drafter that requests may name; an OutriderError says why it cannot be."""
        ...

    def submit(self, request: Request) -> Stream:
        """Start a request; an OutriderError says why it can never run."""
        ...

    def close(self) -> None:
        """Cancel what runs and give the memory back."""
        ...
