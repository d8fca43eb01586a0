"""`outrider serve` as a user runs it: a process of its own, ended by a signal; and a pair to launch over REST."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from outrider import Client

PAIR = {
    "model_name": "tiny",
    "model_size_in_billions": 0.001,
    "quantization": "none",
    "draft_model_name": "draft",
    "draft_model_size_in_billions": "0_0005",
    "draft_quantization": "none",
    "n_gpu": None,
}


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


def write_names(folder: Path, target: Path, draft: Path, stranger: Path) -> Path:
    """A registry that knows one pair, and a model that nobody may launch by its path."""
    models = [
        {"name": "tiny", "size": 0.001, "source": str(target)},
        {"name": "draft", "size": "0_0005", "source": str(draft)},
        {"name": "stranger", "source": str(stranger)},
    ]
    path = folder / "registry.yaml"
    path.write_text(yaml.safe_dump({"models": models}))
    return path
