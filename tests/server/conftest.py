"""A real server on a free port: uvicorn in a thread, its models in worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from dialects import TEMPLATES, save_dialect
from ggufs import byte_metadata, write_llama
from on_vllm import Door, Served, served
from serving import PAIR, write_names
from stated import DRAFTING, PLAIN, Refusal, refusal

from outrider import LLM, SamplingParams
from outrider.server.app import create_app
from outrider.server.fleet.fleet import Fleet
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.options import ServerOptions
from outrider.server.protocol import BoundedHttp
from outrider.settings import Settings

LIMITS = WorkerLimits(first_wait=0.05, longest_wait=0.2)


class Running(Door):
    """A server that runs, and what is inside."""

    def __init__(self, fleet: Fleet, options: ServerOptions, **more: Any) -> None:
        self.fleet = fleet
        app = create_app(fleet, options, **more)
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="on", http=BoundedHttp)
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

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)


@contextlib.contextmanager
def running(options: ServerOptions = ServerOptions(), limits: WorkerLimits = LIMITS, **more: Any) -> Iterator[Running]:
    server = Running(Fleet(limits), options, **more)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def server(tiny_folder, tiny_draft) -> Iterator[Running]:
    """One tiny model, `tiny`, for tests that leave it as it is."""
    with running(ServerOptions(folders=(tiny_draft.parent,))) as server:
        server.launch(tiny_folder, uid="tiny", pace=False)  # what is drafted does not depend on the clock
        yield server


@pytest.fixture(scope="session")
def hermes_folder(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model with a template that knows tools."""
    return save_dialect(tiny_folder, tmp_path_factory.mktemp("hermes"), TEMPLATES["hermes"])


@pytest.fixture(scope="session")
def hermes(hermes_folder) -> Iterator[Running]:
    """It is served as `hermes` to those who have the key K."""
    with running(ServerOptions(api_key="K")) as server:
        server.launch(hermes_folder, uid="hermes", pace=False)
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


# The faces on our own engine, on vLLM, and on vLLM with a draft model. What these two refuse is in stated.py.
BACKENDS = ["local", *(pytest.param(each, marks=pytest.mark.vllm) for each in (PLAIN, DRAFTING))]


@pytest.fixture(scope="session", params=BACKENDS)
def on(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")  # a module may have an `on` of its own
def target(on: str, request: pytest.FixtureRequest) -> Path:
    """The model that is served as `tiny`."""
    return request.getfixturevalue("tiny_folder" if on == "local" else "wide_folder")


@pytest.fixture(scope="module")  # a module may have an `on` of its own
def face(on: str, request: pytest.FixtureRequest) -> Door:
    """A server with the model `tiny`."""
    return request.getfixturevalue({"local": "server", PLAIN: "vllm_plain", DRAFTING: "vllm_drafting"}[on])


@pytest.fixture(scope="session")
def vllm_plain(vllm_python, wide_folder, tiny_draft, tmp_path_factory) -> Iterator[Served]:
    settings = {"model": str(wide_folder), "draft": "none"}
    with served(tmp_path_factory.mktemp("plain"), settings, "--uid", "tiny", *allowed(tiny_draft)) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_drafting(vllm_python, names, tiny_draft, tiny_mute, tmp_path_factory) -> Iterator[Served]:
    """Started without a model: the pair is launched over REST, on the backend that the server was started with."""
    args = ("--no-model", "--registry", names, *allowed(tiny_draft), *allowed(tiny_mute))
    with served(tmp_path_factory.mktemp("drafting"), {}, *args) as server:
        response = server.post("/experimental/speculative_llms", {**PAIR, "model_uid": "tiny"})
        assert response.status_code == 200, response.text
        yield server


def allowed(folder: Path) -> tuple[str, str]:
    return "--allow-folder", str(folder.parent)


@pytest.fixture(scope="session")
def names(wide_folder, wide_twin, tiny_stranger, tmp_path_factory) -> Path:
    return write_names(tmp_path_factory.mktemp("names"), wide_folder, wide_twin, tiny_stranger)


class Library:
    """What the library writes without any draft. vLLM has other luck: there a text that is drawn is compared with
    what the same server writes for the same seed when OpenAI's face is asked."""

    def __init__(self, llm: LLM, lucky: Door | None) -> None:
        self.tokenizer, self._llm, self._lucky = llm.tokenizer, llm, lucky

    def generate(self, prompt: Any, params: SamplingParams) -> Any:
        if self._lucky is None or params.greedy:
            return self._llm.generate(prompt, params)
        return self._ask("/v1/completions", params, prompt=prompt)

    def chat(self, messages: Any, params: SamplingParams) -> Any:
        if self._lucky is None or params.greedy:
            return self._llm.chat(messages, params)
        return self._ask("/v1/chat/completions", params, messages=messages)

    def _ask(self, path: str, params: SamplingParams, **more: Any) -> Any:
        assert self._lucky is not None
        asked = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        plain = SamplingParams()
        asked = {name: value for name, value in asked.items() if value != getattr(plain, name)}
        choices = self._lucky.post(path, {"model": "tiny", **asked, **more}).json()["choices"]
        texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
        return SimpleNamespace(text=texts[0], samples=[SimpleNamespace(text=text) for text in texts])


@pytest.fixture(scope="module")
def library(on: str, target: Path, request: pytest.FixtureRequest) -> Iterator[Library]:
    with LLM(str(target), draft="none", threads=1, cache_memory=0.1) as llm:
        yield Library(llm, None if on == "local" else request.getfixturevalue("face"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A test of what vLLM cannot do: its last request must be refused as stated, and it ends there."""
    stated = refusal(pyfuncitem)
    if stated is None:
        return (yield)
    server: Served = pyfuncitem._request.getfixturevalue("face")
    before = len(server.requests())
    try:
        yield
    except Exception as error:
        try:
            server.wait_for(lambda: _is_refused(server.requests()[before:], stated), 30)
        except AssertionError:
            raise AssertionError(f"not refused as stated: {stated}; {server.requests()[before:][-1:]}") from error
        return True
    raise AssertionError(f"vLLM can do it after all: {stated}")


def _is_refused(requests: list[dict[str, Any]], stated: Refusal) -> bool:
    last = requests[-1] if requests else {}
    return last.get("status") == stated.status and stated.says in last.get("refused", "")
