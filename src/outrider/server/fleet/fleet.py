"""The launched models: launch, list, describe, terminate, submit. Each one is a worker process (supervisor.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import OutriderError, quoted
from outrider.core.request import Request
from outrider.server.errors import Exists, Gone, Unknown
from outrider.server.fleet.adapters import FileStamp, ServedAdapter
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.fleet.supervisor import Fit, ServerStream, Worker
from outrider.server.metrics import Metrics

UID = re.compile(r"[\w][\w.:/@+-]{0,127}")


@dataclass(frozen=True)
class Description:
    """A launched model as the APIs show it."""

    spec: LaunchSpec
    status: str  # loading, ready, restarting, failed
    created: int  # unix seconds
    restarts: int
    reason: str  # why it is not ready
    info: Mapping[str, Any]  # what the worker said of its model: context, vocab_size, chat, num_layers, notes, ...
    running: int
    waiting: int
    cache: float = 0.0  # the share of keys and values that is spoken for
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)  # by the names that they are registered under
    lost_adapters: Mapping[str, str] = field(default_factory=dict)  # names that a restart has lost, and why

    @property
    def uid(self) -> str:
        return self.spec.uid


class Fleet:
    def __init__(self, limits: WorkerLimits = WorkerLimits(), metrics: Metrics | None = None) -> None:
        self.limits, self.metrics = limits, metrics or Metrics()
        self.draining = False
        self.changed: list[Callable[[], None]] = []  # told after a launch or a termination, for the state file
        self.lost: dict[str, Description] = {}  # models that could not be launched again after a restart
        self._workers: dict[str, Worker] = {}

    def add(self, worker: Worker) -> None:
        self._workers[worker.uid] = worker

    async def launch(self, spec: LaunchSpec) -> str:
        """Start a worker and wait until its model is loaded; an OutriderError says why it cannot be. The uid."""
        self._refuse_when_draining()
        spec = dataclasses.replace(spec, uid=self.new_uid(spec))
        worker = self._workers[spec.uid] = Worker(spec, self.limits, self.metrics)
        try:
            await worker.start()
        except BaseException:
            if self._workers.get(spec.uid) is worker:  # it may have been terminated, and another launched in its place
                del self._workers[spec.uid]
            await worker.close()
            raise
        self.lost.pop(spec.uid, None)
        self._tell()
        return spec.uid

    def list(self) -> list[Description]:
        return [*(self._describe(worker) for worker in self._workers.values()), *self.lost.values()]

    def describe(self, name: str = "") -> Description:
        return self.lost[name] if name in self.lost else self._describe(self._find(name))

    async def terminate(self, name: str) -> None:
        if self.lost.pop(name, None) is None:
            worker = self._find(name)
            del self._workers[worker.uid]
            await worker.close()
        self._tell()

    async def submit(
        self, name: str, request: Request, pieces: bool = False, clip: bool = False, truncate: int = 0
    ) -> ServerStream:
        """Start a request on the model with that uid or name ("" when there is only one). Raises before anything is
        written: Unknown, Busy, Gone, or the OutriderError with which the engine refused it.

        `pieces`: the text of each token will be asked for (`stream.piece(token_id)`). `clip`: cut max_tokens to what
        the context holds beside the prompt. `truncate`: keep only this many of the prompt's last tokens.
        """
        self._refuse_when_draining()
        return await self._find(name).submit(request, Fit(pieces, clip, truncate))

    async def load_adapter(self, name: str, adapter: str, path: str) -> None:
        """Have the model read an adapter, which requests may name from now on; one that had the name is replaced."""
        self._refuse_when_draining()
        await self._find(name).load_adapter(adapter, path, named=True)

    async def open_adapter(self, name: str, place: str, path: str, stamp: FileStamp) -> None:
        """The same for one that goes by the place where it lies, unless it is there already. `stamp`: its files."""
        self._refuse_when_draining()
        worker = self._find(name)
        if not worker.adapters.use(place, stamp):
            await worker.load_adapter(place, path, named=False)

    async def unload_adapter(self, name: str, adapter: str) -> None:
        await self._find(name).unload_adapter(adapter)

    def health(self) -> dict[str, Any]:
        """ "ok" when every model is ready; "degraded" while one is not."""
        models = {d.uid: {"status": d.status, "restarts": d.restarts, "reason": d.reason} for d in self.list()}
        for each in self.list():
            if each.spec.settings.rounded:
                models[each.uid]["rounded"] = each.spec.settings.rounded
        ready = all(model["status"] == "ready" for model in models.values())
        status = "draining" if self.draining else "ok" if ready else "degraded"
        return {"status": status, "models": models}

    async def drain(self, grace: float) -> None:
        """Refuse what is new, and let what runs end within `grace` seconds; what does not is stopped."""
        self.draining = True
        await asyncio.gather(*(worker.idle(grace) for worker in self._workers.values()))
        self.abandon("the server is shutting down")

    def abandon(self, why: str) -> None:
        """Stop all that runs; the clients that wait for it hear why."""
        self.draining = True
        for worker in self._workers.values():
            worker.drop(why)

    async def close(self) -> None:
        """Stop the workers, now."""
        self.draining = True
        workers = list(self._workers.values())
        await asyncio.gather(*(worker.close() for worker in workers))
        self._workers.clear()

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise Gone("the server is shutting down; try another one", retry_after=10)

    def _find(self, name: str) -> Worker:
        if name in self._workers:
            return self._workers[name]
        found = [worker for worker in self._workers.values() if not name or name in worker.spec.known_as]
        if len(found) == 1:
            return found[0]
        known = ", ".join(self._workers) or "none"
        if found:
            raise Unknown(f"{quoted(name)} means several launched models; name one by its uid: {known}", param="model")
        raise Unknown(f"no model {quoted(name)} is launched; launched: {known}", param="model")

    def new_uid(self, spec: LaunchSpec) -> str:
        if not spec.uid:
            stem = re.sub(r"[^\w.-]+", "-", spec.settings.model.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
            return next(uid for uid in _numbered(stem) if uid not in self._workers)
        if not UID.fullmatch(spec.uid):
            raise OutriderError(f"{spec.uid[:80]!r} is no uid: letters, digits and ._:/@+- only, at most 128")
        if spec.uid in self._workers:
            raise Exists(f"a model is already launched as {spec.uid!r}; terminate it first or choose another uid")
        return spec.uid

    def _describe(self, worker: Worker) -> Description:
        return Description(
            worker.spec,
            worker.status,
            worker.created,
            worker.restarts,
            worker.reason,
            worker.info,
            worker.running,
            worker.waiting,
            worker.cache,
            worker.adapters.named,
            worker.adapters.lost,
        )

    def _tell(self) -> None:
        for listener in self.changed:
            listener()


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}-{number}" for number in itertools.count(2))
