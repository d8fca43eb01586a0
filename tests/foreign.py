"""Clients of other projects, unmodified from PyPI, whose pins exclude ours: each in a folder of its own, without the
packages that it wants beside it (our own environment has those), and run in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CLIENTS = Path(__file__).parents[1] / ".venv-clients"
LORAX = "lorax-client==0.6.3"
ANTHROPIC = ("anthropic==2.8.0", "docstring_parser==0.17.0")  # with what of its needs our own environment lacks

# Reads [[method, arguments], ...], makes the calls, and writes what came of each; streams become lists.
LORAX_CALLS = """
import asyncio, json, sys
from lorax import AsyncClient, Client

def plain(value):
    return json.loads(value.model_dump_json())

async def stream(client, arguments):
    return [plain(event) async for event in client.generate_stream(**arguments)]

def call(method, arguments):
    try:
        if method == "async_stream":
            return asyncio.run(stream(AsyncClient(sys.argv[1], timeout=60), arguments))
        found = getattr(Client(sys.argv[1], timeout=60), method)(**arguments)
        return [plain(event) for event in found] if method == "generate_stream" else plain(found)
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}

print(json.dumps([call(*each) for each in json.load(sys.stdin)]))
"""


def lorax(url: str, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """What LoRAX's own client makes of our server."""
    env = {**os.environ, "PYTHONPATH": str(installed(LORAX)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", LORAX_CALLS, url]
    done = subprocess.run(command, input=json.dumps(calls), env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def anthropic() -> Any:
    """Anthropic's own client, as a module. Its other needs are in our environment, for `openai` has them too."""
    for requirement in ANTHROPIC:
        folder = str(installed(requirement))
        if folder not in sys.path:
            sys.path.append(folder)
    return importlib.import_module("anthropic")


def installed(requirement: str) -> Path:
    """The package in its folder; fetched the first time."""
    folder = CLIENTS / requirement
    if not folder.is_dir():
        CLIENTS.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=CLIENTS) as scratch:
            part = Path(scratch) / "part"
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
            pip = subprocess.run(
                [*command, "--no-deps", "--target", str(part), requirement], capture_output=True, text=True
            )
            assert pip.returncode == 0, f"pip cannot fetch {requirement}: {pip.stderr}"
            with contextlib.suppress(OSError):  # another process was faster
                part.rename(folder)
    return folder
