"""vLLM in its own environment, set up by the documented command, and `outrider serve --backend vllm` out of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[1]
NAMED = os.environ.get("OUTRIDER_VLLM_PYTHON")  # one that is there already
PYTHON = Path(NAMED or ROOT / ".venv-vllm" / "bin" / "python")
INSTALL, OPEN = 900, 300  # seconds that `make vllm` may take, and a server until it listens
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Its engine and its worker are one process, which imports vLLM once instead of twice: 9 s of a core for every start.
# (`run` leaves them two, as they are for a user who sets nothing.)
ONE_PROCESS_LESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SMALL = {"backend": "vllm", "dtype": "float32", "max_batch": 8, "cache_memory": 0.1}
EAGER = {"enforce_eager": True}  # nothing is compiled


def install() -> Path:
    """`make vllm`, which is quick where it has been given before. Its Python."""
    if NAMED is None:
        code, said = _ended(["make", "-C", str(ROOT), "vllm"], INSTALL)
        assert code == 0, (
            f"`make vllm` failed, and vLLM's tests need it (-m 'not vllm' leaves them out): {said[-2000:]}"
        )
    return PYTHON


def _ended(command: list[str], limit: float) -> tuple[int, str]:
    """Its status and what it printed; past the limit it is ended with all that it has started."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, f"{' '.join(command)} took longer than {limit} s: {process.communicate()[0]}"
    return process.returncode, said


def run(*args: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """vLLM's Python with these arguments, to its end."""
    env = {**os.environ, **ENVIRONMENT}
    return subprocess.run([str(PYTHON), *map(str, args)], env=env, capture_output=True, text=True, timeout=600, **more)


class Sessions:
    """One process of vLLM's Python that opens one vLLM after the other behind our Backend: backends/vllm_session.py."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(PYTHON), str(ROOT / "tests" / "backends" / "vllm_session.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ENVIRONMENT, **ONE_PROCESS_LESS},
                start_new_session=True,
            )
        self.versions = self._line()

    def open(self, tasks: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """What a vLLM with these settings answers to the tasks."""
        plan = {"settings": {**SMALL, "max_batch": 4, **settings}, "tasks": tasks}
        assert self._process.stdin is not None
        print(json.dumps(plan), file=self._process.stdin, flush=True)
        return self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        patience = threading.Timer(OPEN, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        assert line, self._log.read_text()[-2000:]
        return json.loads(line)  # and nothing else is on stdout

    def close(self) -> None:
        """Its status once stdin has ended, which must be 0; and nothing is left of it."""
        try:
            rest, _ = self._process.communicate(timeout=60)
            assert (self._process.returncode, rest) == (0, ""), self._log.read_text()[-2000:]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def sessions(log: Path) -> Iterator[Sessions]:
    found = Sessions(log)
    try:
        yield found
    finally:
        found.close()


class Door:
    """A server that runs, from outside."""

    url: str

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **more)

    def wait_for(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        """Until it is true, but not for ever."""
        end = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)
        return found


class Served(Door):
    """`outrider serve` with vLLM's Python, as a user runs it; its log is read."""

    def __init__(self, folder: Path, settings: dict[str, Any], *args: object) -> None:
        config, self._log = folder / "config.yaml", folder / "log"
        config.write_text(yaml.safe_dump({**SMALL, "engine_args": EAGER, **settings}))
        command = [PYTHON, "-m", "outrider", "serve", "--config", config, "--port", 0, *args]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **ENVIRONMENT, **ONE_PROCESS_LESS},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        patience = threading.Timer(OPEN, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line.startswith("listening on "):
            self.close()
            raise AssertionError(f"the server did not start: {self._log.read_text()[-3000:]}")
        self.url = line.split()[2]

    def requests(self) -> list[dict[str, Any]]:
        """What the log says of each request so far."""
        return [line for line in self._lines() if line["event"] == "request"]

    def pid(self, uid: str) -> int:
        """Of a model's worker."""
        return [line["pid"] for line in self._lines() if line["event"] == "ready" and line["model"] == uid][-1]

    def _lines(self) -> list[dict[str, Any]]:
        whole = self._log.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line.startswith("{")]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 0, self._log.read_text()[-3000:]

    def close(self) -> None:
        """All of it, also what a test that failed has left."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def served(folder: Path, settings: dict[str, Any], *args: object) -> Iterator[Served]:
    server = Served(folder, settings, *args)
    try:
        yield server
        server.stop()
    finally:
        server.close()
