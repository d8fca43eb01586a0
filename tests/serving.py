"""`outrider serve` as a user runs it: a process of its own, ended by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from outrider import Client


@contextmanager
def outrider_serve(*args: object, api_key: str | None = None) -> Iterator[Client]:
    """A client for the server; leaving sends SIGTERM, and it must end well."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0"]
    key = [] if api_key is None else ["--api-key", api_key]
    with subprocess.Popen([*command, *key, *map(str, args)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            with Client(line.split()[2], api_key) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
