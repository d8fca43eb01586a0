"""What runs inside a replica of Ray's: one backend, and an answer to each request as a run of frames (wire.py)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from outrider import build
from outrider.core.request import Token
from outrider.server.fleet import wire
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.worker import Session, describe
from outrider.settings import from_mapping

_logger = logging.getLogger("outrider.worker")
DEALT = ("accepted", "chunks", "results", "refused", "busy", "failed")  # what a frame has for single requests
LAST = ("results", "refused", "busy", "failed")


class Replica:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = from_mapping(settings)
        self._backend = build.backend(self._settings)
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._ids = itertools.count()
        self._inboxes: dict[int, asyncio.Queue[wire.Json]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault = ""
        self._session = _ReplicaSession(self, self._backend)
        self._sender = threading.Thread(target=self._send, name="outrider-sender", daemon=True)
        self._sender.start()

    async def answer(self, request: wire.Json, fit: wire.Json) -> AsyncIterator[wire.Json]:
        """Frames without ids, for there is only one request; a caller that stops reading stops the sequence."""
        self._loop = asyncio.get_running_loop()
        id, inbox = next(self._ids), asyncio.Queue[wire.Json]()
        self._inboxes[id] = inbox
        self._session.hear({"submit": id, "request": request, "fit": fit})
        try:
            frame: wire.Json = {}
            while not any(kind in frame for kind in LAST):
                frame = await inbox.get()
                yield frame
        finally:
            del self._inboxes[id]
            self._session.hear({"cancel": id})

    async def describe(self) -> wire.Json:
        return {**describe(self._backend), "name": self._name}

    def check_health(self) -> None:
        """Ray asks every few seconds, and starts another replica in place of a failed one."""
        if not self._sender.is_alive():
            raise RuntimeError(f"the replica sends nothing any more: {self._fault}")
        if why := WorkerLimits().overdue(self._backend.load(), self._settings):
            raise RuntimeError(why)

    def send(self, message: wire.Json) -> None:
        """The session's link; called by the sending thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deal, message)

    def _send(self) -> None:
        try:
            while not self._fault:
                self._fault = self._session.send()
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error}"
            _logger.exception("frames could not be sent")

    def _deal(self, frame: wire.Json) -> None:
        """To each request its part; the load and the texts of tokens are for all."""
        parts: dict[int, wire.Json] = {}
        for kind in DEALT:
            for id, content in frame.get(kind, ()):
                parts.setdefault(id, {}).setdefault(kind, []).append(content)
        shared = {kind: content for kind, content in frame.items() if kind not in DEALT}
        for id, part in parts.items():
            if id in self._inboxes:
                self._inboxes[id].put_nowait({**shared, **part, "replica": self._name})


class _ReplicaSession(Session):
    def _show(self, tokens: Iterable[Token], frame: dict[str, Any]) -> None:
        """Every time anew: this reader may not have seen what was shown before."""
        self._shown.clear()
        super()._show(tokens, frame)
