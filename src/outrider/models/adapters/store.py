"""The adapters of a model: registered by name, in memory within a budget; the least recently used ones leave.

Any thread may call it. What is slow (reading files, making an adapter ready) is done by the calling thread without the
lock, so nobody waits for another's adapter.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.core.adapter import AdapterChoice, AdapterInfo, AdapterMix, ReadyAdapter, names_of
from outrider.core.errors import OutriderError, quoted
from outrider.models.adapters import files, paths
from outrider.models.adapters.adapter import Adapter, refuse_whole
from outrider.models.adapters.merge import merged
from outrider.models.base import Model, TakesAdapters

LONGEST_NAME = 200  # characters: a hub id or a path fits, and a message that repeats it stays one line


@dataclass(frozen=True, eq=False)
class _Registered:
    """An adapter by name: the file as it was when it was registered."""

    key: str
    path: Path
    allow_pickle: bool
    stamp: paths.Stamp
    base: str
    rank: int
    nbytes: int


@dataclass(eq=False)
class _Resident:
    ready: ReadyAdapter
    parts: frozenset[str]  # keys of the registered adapters that it is made of
    users: int = 0


class AdapterStore:
    def __init__(self, model: Model, budget: int) -> None:
        """`budget`: bytes of all adapters that are in memory."""
        self._model = model
        self._budget = model.reserve_adapters(budget) if isinstance(model, TakesAdapters) else budget
        self._names: dict[str, _Registered] = {}
        self._resident: OrderedDict[str, _Resident] = OrderedDict()  # by key, longest unused first
        self._reserved = 0  # bytes of adapters that are being made ready
        self._making = 0  # how many these are
        self._crowd = 0  # calls of `load` that wait for memory
        self._changed = threading.Condition()
        self._revisions = itertools.count(1)

    def register(self, name: str, path: str | Path, allow_pickle: bool = False) -> AdapterInfo:
        """Read and check an adapter, and know it by this name from now on; one that had the name is replaced, and
        serves on the requests that have it."""
        model = self._target()
        if not name or len(name) > LONGEST_NAME or name != name.strip():
            raise OutriderError(f"{quoted(name)} is no name for an adapter; give 1 to {LONGEST_NAME} characters")
        where = Path(path)
        stamp = paths.stamp(where)
        adapter = self._read(name, where, allow_pickle)
        ranks = [pair.rank for pair in adapter.pairs.values()]
        size = model.adapter_bytes(adapter)
        self._check_size(name, size)
        key = f"{name}#{next(self._revisions)}"
        with self._changed:
            self._names[name] = _Registered(key, where, allow_pickle, stamp, adapter.base, max(ranks), size)
            self._drop_stale()
            placed = self._make_place(size)
        if placed:
            self._settled(adapter, key, size, [key], users=0)
        return self.info(name)

    def unregister(self, name: str) -> None:
        """Forget the name; requests that have the adapter are served on."""
        with self._changed:
            self._known(name)
            del self._names[name]
            self._drop_stale()

    def info(self, name: str) -> AdapterInfo:
        with self._changed:
            own = self._known(name)
            loaded = own.key in self._resident
            return AdapterInfo(name, str(own.path), own.base, own.rank, own.nbytes, loaded, own.stamp)

    def infos(self) -> list[AdapterInfo]:
        """Of all registered adapters, in the order of their registration."""
        with self._changed:
            names = list(self._names)
            return [self.info(name) for name in names]

    @property
    def used(self) -> int:
        """Bytes of the adapters in memory."""
        with self._changed:
            return self._used()

    @property
    def count(self) -> int:
        """Adapters in memory, mixes among them."""
        return len(self._resident)

    def check(self, choice: AdapterChoice) -> None:
        """Refuse what can never be served."""
        with self._changed:
            self._sources(choice)

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for others to leave memory: who comes later waits behind, or it would wait forever."""
        return self._crowd > 0

    def take(self, choice: AdapterChoice) -> ReadyAdapter | None:
        """The adapter, if it is in memory: kept there until `release`."""
        with self._changed:
            found = self._resident.get(_key(choice, self._sources(choice)))
            return None if found is None else self._used_once_more(found)

    def load(self, choice: AdapterChoice, stop: Callable[[], bool] = lambda: False) -> ReadyAdapter | None:
        """The same, read from its files if need be, and waiting until others leave memory for it. None: `stop` has
        become true (call `wake` then)."""
        ready = self.take(choice)
        if ready is not None:
            return ready
        with self._changed:
            sources = self._sources(choice)
            key = _key(choice, sources)
        parts = [self._again(name, own) for name, own in zip(names_of(choice), sources, strict=True)]
        adapter = merged(parts, choice) if isinstance(choice, AdapterMix) else parts[0]
        size = self._target().adapter_bytes(adapter)
        self._check_size(key, size)
        with self._changed:
            placed = self._wait_for_place(key, size, stop)
            found = self._resident.get(key)
            if found is not None:  # another request has loaded it meanwhile
                return self._used_once_more(found)
            if not placed:
                return None
        return self._settled(adapter, key, size, [own.key for own in sources], users=1)

    def release(self, ready: ReadyAdapter) -> None:
        """One user less."""
        with self._changed:
            self._resident[ready.key].users -= 1
            self._drop_stale()
            self._changed.notify_all()

    def wake(self) -> None:
        """Have `load` look at its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def _target(self) -> TakesAdapters:
        if not isinstance(self._model, TakesAdapters):
            raise OutriderError(
                "this model takes no adapters here (Outrider's own forward of llama-like models does); write model and "
                "adapter out as one with outrider merge, and load that"
            )
        return self._model

    def _known(self, name: str) -> _Registered:
        if name not in self._names:
            known = ", ".join(list(self._names)[:8]) or "none"
            raise OutriderError(f"there is no adapter {quoted(name)}; loaded: {known}")
        return self._names[name]

    def _sources(self, choice: AdapterChoice) -> list[_Registered]:
        """The adapters that it is made of now."""
        return [self._known(name) for name in names_of(choice)]

    def _read(self, name: str, path: Path, allow_pickle: bool) -> Adapter:
        adapter = files.read(path, self._target().adapter_base, allow_pickle)
        refuse_whole(adapter, f"the adapter {name}")
        return adapter

    def _again(self, name: str, own: _Registered) -> Adapter:
        """Read it again, if its files are still those that were registered: an adapter never changes silently."""
        if not own.path.exists() or paths.stamp(own.path) != own.stamp:
            raise OutriderError(
                f"the files of adapter {name} have changed or are gone since it was loaded; load it again"
            )
        return self._read(name, own.path, own.allow_pickle)

    def _check_size(self, name: str, size: int) -> None:
        if size > self._budget:
            raise OutriderError(
                f"the adapter {name} takes {size >> 20} MiB, and all adapters together may take {self._budget >> 20}; "
                "raise adapter_memory"
            )

    def _settled(self, adapter: Adapter, key: str, size: int, parts: Sequence[str], users: int) -> ReadyAdapter:
        """Made ready, and in memory from now on, in the place that `_make_place` has reserved."""
        ready = None
        try:
            ready = self._target().adapt(adapter, key)
        finally:
            with self._changed:  # what was reserved becomes what is taken at once: else others would take the place
                self._reserved -= size
                self._making -= 1
                found = None if ready is None else self._insert(ready, parts, users)
                self._changed.notify_all()
        assert found is not None
        return found

    def _insert(self, ready: ReadyAdapter, parts: Sequence[str], users: int) -> ReadyAdapter:
        found = self._resident.get(ready.key)
        if found is None:
            found = self._resident[ready.key] = _Resident(ready, frozenset(parts))
        else:  # another thread was faster
            self._target().release(ready)
        found.users += users
        self._resident.move_to_end(found.ready.key)
        self._drop_stale()
        return found.ready

    def _wait_for_place(self, key: str, size: int, stop: Callable[[], bool]) -> bool:
        """Whether a place was reserved; not where it is wanted no more, or the adapter has come by another way."""
        placed = False

        def settled() -> bool:
            nonlocal placed
            if stop() or key in self._resident:
                return True
            placed = self._make_place(size)
            return placed

        self._crowd += 1
        try:
            self._changed.wait_for(settled)
        finally:
            self._crowd -= 1
        return placed

    def _used_once_more(self, found: _Resident) -> ReadyAdapter:
        found.users += 1
        self._resident.move_to_end(found.ready.key)
        return found.ready

    def _used(self) -> int:
        return self._reserved + sum(each.ready.nbytes for each in self._resident.values())

    def _make_place(self, size: int) -> bool:
        """Let the longest unused leave until there is place, and reserve it; False: those in use take too much."""
        slots = self._target().adapter_slots
        while self._used() + size > self._budget or (slots is not None and len(self._resident) + self._making >= slots):
            idle = next((key for key, each in self._resident.items() if not each.users), None)
            if idle is None:
                return False
            self._drop(idle)
        self._reserved += size
        self._making += 1
        return True

    def _drop_stale(self) -> None:
        """Adapters that no name leads to any more, and no request uses."""
        current = {own.key for own in self._names.values()}
        for key, each in list(self._resident.items()):
            if not each.users and not each.parts <= current:
                self._drop(key)

    def _drop(self, key: str) -> None:
        self._target().release(self._resident.pop(key).ready)


def _key(choice: AdapterChoice, sources: Sequence[_Registered]) -> str:
    """Of the values that it stands for."""
    if isinstance(choice, str):
        return sources[0].key
    rest = (choice.weights, choice.strategy, choice.density, choice.majority_sign_method, choice.seed)
    return f"{[own.key for own in sources]} {rest}"
