"""A real server on a free port: uvicorn in a thread, its models in worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from ggufs import byte_metadata, write_llama

from outrider.server.answers import Options
from outrider.server.app import create_app
from outrider.server.fleet import Fleet
from outrider.server.spec import LaunchSpec
from outrider.server.workers import Limits
from outrider.settings import Settings

LIMITS = Limits(first_wait=0.05, longest_wait=0.2)


class Running:
    """A server that runs: its address, and what is inside."""

    def __init__(self, fleet: Fleet, options: Options, **more: Any) -> None:
        self.fleet = fleet
        config = uvicorn.Config(create_app(fleet, options, **more), port=0, log_config=None, lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def call(self, work: Coroutine[Any, Any, Any], timeout: float = 120) -> Any:
        """Run a coroutine of the fleet's in the server's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def launch(self, model: Any, draft: str = "ngram", uid: str = "", **settings: Any) -> str:
        chosen = Settings(model=str(model), draft=draft, **{"threads": 1, "cache_memory": 0.1, **settings})
        return self.call(self.fleet.launch(LaunchSpec(chosen, uid)))

    def pid(self, uid: str) -> int:
        return self.fleet.describe(uid).info["pid"]

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **more)

    def wait_for(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        """Until it is true, but not for ever."""
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)
        return found

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)


@contextlib.contextmanager
def running(options: Options = Options(), limits: Limits = LIMITS, **more: Any) -> Iterator[Running]:
    server = Running(Fleet(limits), options, **more)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def server(tiny_folder, tiny_draft) -> Iterator[Running]:
    """One tiny model, `tiny`, for tests that leave it as it is."""
    with running(Options(folders=(tiny_draft.parent,))) as server:
        server.launch(tiny_folder, uid="tiny", pace=False)  # what is drafted does not depend on the clock
        yield server


@pytest.fixture(scope="session")
def quick(tmp_path_factory) -> Path:
    """A model of a GGUF file, for long streams: its workers start in half the time, for they need no transformers."""
    metadata = byte_metadata()
    vocab = len(metadata["tokenizer.ggml.tokens"])
    return write_llama(tmp_path_factory.mktemp("quick") / "quick.gguf", vocab, metadata, context=8192)


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Running]:
    """A server of a file's own, without a model."""
    with running() as server:
        yield server


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts servers of a test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(running(*args, **more))


@pytest.fixture(scope="module")
def serve_all() -> Iterator[Callable[..., Running]]:
    """The same, for all tests of a file."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(running(*args, **more))
