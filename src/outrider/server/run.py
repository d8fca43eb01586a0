"""Run the server: listen, launch, serve; the first signal drains, the second ends at once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn

from outrider.core.errors import OutriderError
from outrider.server.app import create_app
from outrider.server.fleet.fleet import Fleet
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.log import log
from outrider.server.options import ServerOptions
from outrider.server.protocol import BoundedHttp
from outrider.server.registry import BUILT_IN, Registry
from outrider.server.state import State


@dataclass(frozen=True)
class ServePlan:
    """All that `outrider serve` was told."""

    host: str = "127.0.0.1"
    port: int = 8000
    models: Sequence[LaunchSpec] = ()
    options: ServerOptions = ServerOptions()
    limits: WorkerLimits = WorkerLimits()
    registry: Registry = BUILT_IN
    state: Path | None = None
    grace: float = 60.0  # seconds that running requests get when the server is told to end
    ready: Callable[[str], None] = field(default=lambda url: None)  # told the address when all models are launched


class Listener(uvicorn.Server):
    """Uvicorn, except that a signal first lets running requests end while new ones get a 503."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, grace: float) -> None:
        super().__init__(config)
        self._fleet, self._grace = fleet, grace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._draining is None:
            log("draining", seconds=self._grace)
            self._draining = asyncio.create_task(self._drain())
        else:
            log("ending at once", level="warning")
            self._draining.cancel()
            self._fleet.abandon("the server was told to end at once")
            self.should_exit = True

    async def _drain(self) -> None:
        await self._fleet.drain(self._grace)
        self.should_exit = True

    async def serve_until_told(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        await self.serve(sockets=[sock])


def run(plan: ServePlan) -> None:
    """Until a signal comes. An OutriderError says why it cannot listen or launch."""
    with listen(plan.host, plan.port) as sock:
        asyncio.run(_run(plan, sock))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        remedy = "choose another --port or --host"
        raise OutriderError(f"cannot listen on {host} port {port} ({reason}); {remedy}") from error


async def _run(plan: ServePlan, sock: socket.socket) -> None:
    fleet = Fleet(plan.limits)
    state = None if plan.state is None else State(plan.state, fleet)
    app = create_app(fleet, plan.options, plan.registry)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=5, server_header=False, http=BoundedHttp
    )
    listener = Listener(config, fleet, plan.grace)
    serving = asyncio.create_task(listener.serve_until_told(sock))
    launching = asyncio.create_task(_launch(plan, fleet, state, _url(sock)))
    try:
        await asyncio.wait({serving, launching}, return_when=asyncio.FIRST_COMPLETED)
        if launching.done() and not fleet.draining:  # what a signal cuts short is no error
            launching.result()
        await serving
    finally:
        launching.cancel()
        listener.should_exit = True
        await asyncio.gather(serving, launching, return_exceptions=True)


async def _launch(plan: ServePlan, fleet: Fleet, state: State | None, url: str) -> None:
    given = [await fleet.launch(spec) for spec in plan.models]
    if state is not None:
        await state.restore(given)
    plan.ready(url)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
