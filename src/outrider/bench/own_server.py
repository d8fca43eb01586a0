"""A server of our own for the time of a benchmark: a process, any free port, and its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import OutriderError
from outrider.drafters.history import LEAST

START_TIMEOUT = 900.0  # seconds: a model may have to be downloaded first
STOP_TIMEOUT = 20.0  # seconds, far more than the grace of 1 s that it is given
_MAIN = "import sys; from outrider.cli import main; sys.exit(main())"
_READY = re.compile(r"^listening on (http\S+)", re.MULTILINE)
KEYS = ("OUTRIDER_API_KEY", "OUTRIDER_TENANT_KEYS")  # in the environment: they are for other servers


class OwnServer:
    """`outrider serve` for `streams` streams at once, which begins to load at once; everything it prints goes into the
    log."""

    def __init__(
        self, model: str, draft: str, streams: int, threads: int, log: Path, own: Mapping[str, Any] | None = None
    ) -> None:
        """`own`: further settings, by their names."""
        command = [sys.executable, "-c", _MAIN, "serve", "--model-id", model, "--draft", draft, "--port", "0"]
        command += ["--threads", str(threads), "--max-batch", str(streams), "--max-queue", str(2 * streams)]
        command += ["--grace", "1", "--log-level", "warning"]
        command += ["--history-tokens", str(LEAST)]  # rounds repeat the prompts: a history would answer them
        for name, value in (own or {}).items():
            command += ["--" + name.replace("_", "-"), str(value)]
        env = {key: value for key, value in os.environ.items() if key not in KEYS}
        self.url, self._log = "", log
        with log.open("wb") as file:  # a session of its own: Ctrl-C is ours to handle
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )

    def wait(self) -> None:
        """Until its model is loaded, and it listens at `url`."""
        self.url = self._wait()

    def close(self) -> None:
        """SIGTERM, then SIGKILL if it has not ended in time."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> str:
        """Where it listens, once its model is loaded."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            ended, output = self._process.poll() is not None, self._output()
            if found := _READY.search(output):
                return found[1]
            if ended:
                raise OutriderError(f"the server ended while it started: {_last_line(output)}")
            time.sleep(0.1)
        raise OutriderError(f"the server was not ready after {START_TIMEOUT:.0f} s; see {self._log}")

    def _output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


def _last_line(output: str) -> str:
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
