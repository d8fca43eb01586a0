"""Requests that wait for their adapter: separate threads load it, so that no other request has to wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.core.adapter import AdapterChoice, ReadyAdapter
from outrider.core.errors import OutriderError, one_line
from outrider.models.adapters.store import AdapterStore

LOADERS = 4  # threads that load: a slow disk holds up this number of adapters before another has to wait


class AdapterRefused(OutriderError):
    """The adapter that a request has named cannot be had: its files are gone, say."""


@dataclass(eq=False)
class AdapterWait:
    """One request that waits."""

    choice: AdapterChoice
    done: Callable[[ReadyAdapter | None, Exception | None], None]  # None, None: it was cancelled
    cancelled: threading.Event = field(default_factory=threading.Event)


class AdapterLoader:
    def __init__(self, store: AdapterStore) -> None:
        self.store = store
        self._inbox: queue.SimpleQueue[AdapterWait | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.waiting = 0  # requests that are not answered yet

    def take(self, choice: AdapterChoice) -> ReadyAdapter | None:
        """The adapter, if it can be had at once."""
        return None if self.store.crowded else self.store.take(choice)

    def submit(self, wait: AdapterWait) -> None:
        with self._lock:
            self.waiting += 1
            self._inbox.put(wait)
            if len(self._threads) < LOADERS:
                self._threads.append(threading.Thread(target=self._run, name="outrider-adapters", daemon=True))
                self._threads[-1].start()

    def cancel(self, wait: AdapterWait) -> None:
        wait.cancelled.set()
        self.store.wake()

    def close(self) -> None:
        """Those that wait are told that they are cancelled."""
        with self._lock:
            self._closed, threads, self._threads = True, self._threads, []
            for _ in threads:
                self._inbox.put(None)
        self.store.wake()
        for thread in threads:
            thread.join()
        self._closed = False

    def _run(self) -> None:
        while (wait := self._inbox.get()) is not None:
            try:
                ready, error = self._load(wait), None
            except Exception as failure:  # of a file, or of the machine: this request ends, the others go on
                said = one_line(failure, named=True)
                why = str(failure) if isinstance(failure, OutriderError) else f"the adapter could not be loaded: {said}"
                ready, error = None, AdapterRefused(why)
            with self._lock:
                self.waiting -= 1
            wait.done(ready, error)

    def _load(self, wait: AdapterWait) -> ReadyAdapter | None:
        def stop() -> bool:
            return self._closed or wait.cancelled.is_set()

        return None if stop() else self.store.load(wait.choice, stop)
