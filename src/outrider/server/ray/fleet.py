"""A fleet whose one model is a Ray Serve deployment: Ray chooses the replica and starts dead ones again."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.backends.base import BackendLoad
from outrider.core.errors import one_line
from outrider.core.request import Request, Result
from outrider.server.errors import Bad, Failed, Gone
from outrider.server.fleet import wire
from outrider.server.fleet.fleet import Fleet
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.fleet.supervisor import Fit, ServerStream, Worker
from outrider.server.log import log
from outrider.server.metrics import Metrics
from outrider.server.ray.replica import DEALT

LOOK = 1.0  # seconds between checks of the replicas
TRIES = 3  # a request whose replica dies before it has written anything goes to another


class RayWorker(Worker):
    """The replicas of a model, as if they were one worker."""

    def __init__(
        self, spec: LaunchSpec, limits: WorkerLimits, metrics: Metrics, handle: DeploymentHandle, place: tuple[str, str]
    ) -> None:
        super().__init__(spec, limits, metrics)
        self._handle, self._place = handle.options(stream=True), place
        self._describe, self._up = handle.describe, metrics.up
        self.replicas = 0  # that run
        self._loads: dict[str, BackendLoad] = {}  # by replica
        self._followers: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def submit(self, request: Request, fit: Fit) -> ServerStream:
        if self.status != "ready":
            raise Gone(f"the model {self.uid} is {self.status}: {self.reason or 'not ready yet'}; try again soon")
        self.refuse_when_full(request.params.n)
        body = wire.request_to_json(request)
        stream = self.open_stream(request.params.n, request.adapter)
        self._followers[stream.id] = asyncio.create_task(self._follow(stream, body, dataclasses.asdict(fit)))
        return await self.taken_in(stream)

    async def load_adapter(self, name: str, path: str, named: bool) -> None:
        raise Bad("on Ray adapters are given at the start (serve --adapter NAME=PATH), for all replicas to have them")

    async def unload_adapter(self, name: str) -> None:
        raise Bad("on Ray adapters are given at the start, and none is unloaded; end the application instead")

    def cancel(self, stream: ServerStream) -> None:
        self._finish(stream.id, Gone("the request was cancelled"))

    async def close(self) -> None:
        followers = list(self._followers.values())
        await super().close()
        await asyncio.gather(*followers, return_exceptions=True)

    @property
    def _places(self) -> int:
        return self.spec.settings.max_batch * max(1, self.replicas)

    async def _follow(self, stream: ServerStream, body: wire.Json, fit: wire.Json) -> None:
        """Hear the whole answer, from another replica if the first dies before it says a word."""
        try:
            for left in reversed(range(TRIES)):
                error = await self._listen(stream, body, fit)
                if error is None:
                    return
                if stream.last or not left or not _died(error):
                    self._finish(stream.id, _shown(self.uid, error))
                    return
                log("sent again", level="warning", model=self.uid, reason=one_line(error, named=True))
        finally:
            self._followers.pop(stream.id, None)

    async def _listen(self, stream: ServerStream, body: wire.Json, fit: wire.Json) -> Exception | None:
        frames = self._handle.answer.remote(body, fit)
        try:
            async for frame in frames:
                self._hear(_addressed(frame, stream.id))
        except asyncio.CancelledError:
            frames.cancel()
            raise
        except (RayError, RayServeException) as error:
            return error
        return None if stream.done else Failed("the replica ended its answer without a result")

    def _finish(self, id: int, outcome: Result | Exception) -> None:
        """The follower of a stream that is over is cancelled: its replica stops the sequence."""
        super()._finish(id, outcome)
        follower = self._followers.get(id)
        if follower is not None and isinstance(outcome, Exception) and follower is not asyncio.current_task():
            follower.cancel()
        if not self.answering:
            self._loads.clear()
            super()._note(BackendLoad())

    def _hear(self, message: wire.Json) -> None:
        self._loads[message["replica"]] = BackendLoad(**message["load"])
        super()._hear(message)

    def _note(self, load: BackendLoad) -> None:
        """All replicas together; the fullest cache counts."""
        loads = self._loads.values()
        running, waiting = sum(each.running for each in loads), sum(each.waiting for each in loads)
        cache = max(each.cache for each in loads)
        super()._note(dataclasses.replace(load, running=running, waiting=waiting, cache=cache))

    async def _supervise(self) -> None:
        """Ray starts dead replicas again; here is only told how many run."""
        while True:
            try:
                await self._look()
            except (RayError, RayServeException, OSError) as error:
                log("no word from Ray", level="warning", reason=one_line(error, named=True))
            await asyncio.sleep(LOOK)

    async def _look(self) -> None:
        app, deployment = self._place
        found = (await asyncio.to_thread(serve.status)).applications.get(app)
        seen = None if found is None else found.deployments.get(deployment)
        running = 0 if seen is None else seen.replica_states.get("RUNNING", 0)
        if running and not self.info:
            self.info = await self._describe.remote()
            self.adapters.begin(self.info)
        if self.replicas != running:
            log("replicas", model=self.uid, running=running, before=self.replicas)
        if running < self.replicas:
            self._loads.clear()
        self.replicas, self.status = running, "ready" if running else "restarting" if self.info else "loading"
        self.reason = "" if running or seen is None else seen.message or "no replica runs"
        self._up.labels(self.uid).set(float(running > 0))


class RayFleet(Fleet):
    """One model, given at the start."""

    def __init__(
        self, spec: LaunchSpec, limits: WorkerLimits, handle: DeploymentHandle, place: tuple[str, str]
    ) -> None:
        super().__init__(limits)
        spec = dataclasses.replace(spec, uid=self.new_uid(spec))
        self._worker = RayWorker(spec, limits, self.metrics, handle, place)
        self.add(self._worker)

    async def start(self) -> None:
        await self._worker.start()
        end = time.monotonic() + 60
        while self._worker.status != "ready" and time.monotonic() < end:  # later requests get a 503
            await asyncio.sleep(0.05)

    async def launch(self, spec: LaunchSpec) -> str:
        raise Bad("this server runs on Ray, with the model that it was started with; it launches no others")

    async def terminate(self, name: str) -> None:
        raise Bad("this server runs on Ray, with the model that it was started with; end the application instead")

    def health(self) -> dict[str, Any]:
        health = super().health()
        health["models"][self._worker.uid]["replicas"] = self._worker.replicas
        return health


def _addressed(frame: wire.Json, id: int) -> wire.Json:
    """A replica's frame as a worker would have sent it: with the stream's id at every part."""
    return {kind: [[id, part] for part in content] if kind in DEALT else content for kind, content in frame.items()}


def _died(error: Exception) -> bool:
    """Whether the replica is gone, rather than that our own code in it raised."""
    return not isinstance(error, Failed | RayTaskError)


def _shown(uid: str, error: Exception) -> Exception:
    if not _died(error):
        return error if isinstance(error, Failed) else Failed(one_line(error, named=True))
    return Gone(f"the model {uid} stopped while it answered: its replica is gone; try again")
