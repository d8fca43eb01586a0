"""The runner's end of a worker process that runs one engine: start it, ask it, wait no longer than a time limit."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


class WorkerError(Exception):
    """The worker has ended, is late or sent something that is no answer; it will not answer again."""


class Missing(Exception):
    """The engine's package is not installed for that interpreter."""


class EngineProcess:
    def __init__(
        self, python: str, engine: Path, config: Mapping[str, Any], threads: int, log: Path, calls: bool = False
    ) -> None:
        """Start loading the engine of the file `engine`, for whole calls of texts or for one prompt's ids at a time;
        everything it prints goes to `log`."""
        self._log, self._closed = log, False
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, str(WORKER), str(engine), json.dumps(config), "load_batches" if calls else "load"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=_environment(threads, calls),
                process_group=0,  # Ctrl-C is for the runner; and the engine's own children stop and end with it
            )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # b"" when the worker has ended
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until it has loaded; its load time and versions."""
        return self._loaded(self._answer(timeout))

    def ready_by_now(self) -> dict[str, Any] | None:
        """The same without waiting; None: it still loads."""
        try:
            line = self._lines.get_nowait()
        except queue.Empty:
            return None
        return self._loaded(self._parsed(line))

    def _loaded(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._signal(signal.SIGSTOP)
        if "missing" in answer:
            self.close()
            raise Missing(answer["missing"])
        if "ready" not in answer:
            self.close()
            raise WorkerError(f"did not load: {answer.get('error', answer)}")
        return dict(answer["ready"])

    def ask(self, job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to one job; an answer with `error` leaves the worker usable.

        Between jobs the worker is stopped: some engines wait for work in a loop, which would slow down the others.
        """
        if self._closed:
            raise WorkerError("has ended")
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._why()) from None
        answer = self._answer(timeout)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the latter for a zombie on macOS
            os.killpg(self._process.pid, number)

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise WorkerError(f"no answer within {timeout:g} s; stopped") from None
        return self._parsed(line)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        if not line:
            raise WorkerError(self._why())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise WorkerError(f"answered with something that is not a JSON object: {line[:80]!r}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed while it was read
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(b"")

    def _why(self) -> str:
        """How it ended, with the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)  # its stdout may close a moment before it has ended
        self.close()
        printed = self._log.read_text(errors="replace").strip().splitlines()
        code = self._process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"ended ({how}): {printed[-1].strip()[:200]}" if printed else f"ended ({how})"


def _environment(threads: int, calls: bool) -> dict[str, str]:
    """Where texts become tokens in the time that is measured, all cores may do it."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**os.environ, **counts, "TOKENIZERS_PARALLELISM": str(calls).lower(), "HF_HUB_OFFLINE": "1"}
