"""The adapters of a launched model, as the server knows them, through all lives of its worker."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import OutriderError, quoted
from outrider.server.errors import Gone, TooManyModels
from outrider.server.fleet import wire

MOST_ADAPTERS = 1024  # names of adapters that a model has at once: a kilobyte each, and a file or two to be read again
Send = Callable[[Mapping[str, Any]], None]
FileStamp = list[list[Any]]  # of an adapter's files: name, size, time of change and inode of each, as JSON has it


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that requests may name."""

    name: str
    number: int  # llama.cpp's id of it: no other adapter of the model ever has the same
    created: int  # unix seconds
    path: str
    stamp: FileStamp  # of its files, as they were read
    rank: int = 0

    def written(self) -> wire.Json:
        """For a new worker, which reads it again."""
        return {"name": self.name, "path": self.path, "stamp": self.stamp}


@dataclass(eq=False)
class _Wait:
    """Somebody waits for the worker to read an adapter, or to forget it."""

    name: str
    named: bool
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdapterBook:
    """Written when a worker tells what it has; read by requests."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.named: dict[str, ServedAdapter] = {}  # by the names that they were registered under
        self.opened: dict[str, ServedAdapter] = {}  # by folder or hub id, since requests came with it; last used last
        self.lost: dict[str, str] = {}  # adapters that did not come back with a new worker, and why
        self._waits: dict[int, _Wait] = {}
        self._ids, self._numbers = itertools.count(), itertools.count()

    def __len__(self) -> int:
        return len(self.named) + len(self.opened)

    async def load(self, send: Send, name: str, path: str, named: bool) -> None:
        """Have the worker read and check it; an OutriderError says why it cannot be. `named`: under this name, in
        place of the adapter that had it; else `name` is the place where it lies."""
        if named and name not in self.named and len(self.named) >= MOST_ADAPTERS:
            raise TooManyModels(f"{self._uid} has {len(self.named)} adapters, the most that it may have; unload one")
        while not named and name not in self.opened and len(self.opened) >= MOST_ADAPTERS:
            await self.unload(send, next(iter(self.opened)))
        await self._ask(send, name, named, {"load_adapter": name, "path": path})

    async def unload(self, send: Send, name: str) -> None:
        if self.lost.pop(name, None) is not None:
            return
        if name not in self.named and name not in self.opened:
            known = ", ".join(list(self.named)[:8]) or "none"
            raise OutriderError(f"{self._uid} has no adapter {quoted(name)}; loaded: {known}")
        await self._ask(send, name, False, {"unload_adapter": name})

    def use(self, name: str, stamp: FileStamp) -> bool:
        """Whether the adapter of a folder or hub id is there, read from these very files."""
        found = self.opened.pop(name, None)
        if found is not None:
            self.opened[name] = found
        return found is not None and found.stamp == stamp

    def written(self) -> list[wire.Json]:
        return [each.written() for each in (*self.named.values(), *self.opened.values())]

    def begin(self, told: Mapping[str, Any]) -> None:
        """A worker is ready, and has said what it has (`adapters`) and what it could not read again (`lost`)."""
        self.lost.update({name: why for name, why in told.get("lost_adapters", {}).items() if name in self.named})
        there, before = {info["name"]: info for info in told.get("adapters", ())}, self.named
        self.opened = {name: each for name, each in self.opened.items() if name in there}
        self.named = {
            name: self._served(info, before.get(name)) for name, info in there.items() if name not in self.opened
        }

    def hear(self, frame: Mapping[str, Any]) -> None:
        """What a worker says of adapters, also where nobody waits for it any more."""
        for id, info in frame.get("adapter_loaded", ()):
            self._add(info, id in self._waits and self._waits[id].named)
            self._settle(id)
        for id, name in frame.get("adapter_unloaded", ()):
            self.named.pop(name, None)
            self.opened.pop(name, None)
            self._settle(id)
        for id, why in frame.get("adapter_refused", ()):
            self._settle(id, OutriderError(why))

    def drop(self, why: str) -> None:
        """The worker is gone; who waits for it hears so."""
        for id, wait in list(self._waits.items()):
            name = quoted(wait.name)
            self._settle(id, Gone(f"the model {self._uid} stopped while it loaded {name}: {why}; try again"))

    async def _ask(self, send: Send, name: str, named: bool, message: wire.Json) -> None:
        id = next(self._ids)
        wait = self._waits[id] = _Wait(name, named)
        send({"adapter": id, **message})
        await wait.over

    def _settle(self, id: int, error: Exception | None = None) -> None:
        wait = self._waits.pop(id, None)
        if wait is None or wait.over.done():  # its client is gone
            return
        if error is None:
            wait.over.set_result(None)
        else:
            wait.over.set_exception(error)

    def _add(self, info: Mapping[str, Any], named: bool) -> None:
        name = info["name"]
        before = self.named.pop(name, None) or self.opened.pop(name, None)
        (self.named if named else self.opened)[name] = self._served(info, before)
        self.lost.pop(name, None)

    def _served(self, info: Mapping[str, Any], before: ServedAdapter | None) -> ServedAdapter:
        number = next(self._numbers) if before is None else before.number
        return ServedAdapter(info["name"], number, int(time.time()), info["path"], info["stamp"], info["rank"])
