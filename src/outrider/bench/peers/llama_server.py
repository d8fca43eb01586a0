"""llama.cpp, or a fork of it, by its own program llama-server, built for this machine (outrider bench --build-peers).

How it speculates is fixed when it is started. It runs in this process's group, so that it stops and ends with it.
"""

from __future__ import annotations

import ctypes
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PACKAGES = ()
_TYPES = {"draft-model": "draft-simple"}
_LOADING = 503  # the server's answer until the model is loaded
_SETS = re.compile(r"(\w+) = 1\b")


def load(config: dict[str, Any]) -> Any:
    (mode,) = config["modes"]
    port = _free_port()
    server = subprocess.Popen(_command(mode, config, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    threading.Thread(target=_follow, args=(server,), daemon=True).start()
    address = f"http://127.0.0.1:{port}"
    _await(server, address)

    def generate(mode: str, ids: list[int], max_tokens: int) -> dict[str, Any]:
        job = {"prompt": ids, "n_predict": max_tokens, "temperature": 0, "top_k": 1, "cache_prompt": False}
        answer = _post(f"{address}/completion", job)
        times = answer["timings"]
        return {
            "text": answer["content"],
            "tokens": times["predicted_n"],
            "first": 1,
            "prefill_s": times["prompt_ms"] / 1000,
            "decode_s": times["predicted_ms"] / 1000,  # it counts from the first token on
            "timing": "engine",
            "stats": {"drafted": times.get("draft_n", 0), "accepted": times.get("draft_n_accepted", 0)},
        }

    generate.about = {"instructions": _instructions(config["program"]), **config["build"]}  # type: ignore[attr-defined]
    return generate


def _command(mode: str, config: dict[str, Any], port: int) -> list[str]:
    threads = str(config["threads"])
    command = [config["program"], "--model", config["model"], "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ctx-size", str(config["context"]), "--parallel", "1", "--threads", threads]
    command += ["--threads-batch", threads]
    if mode != "plain":
        command += ["--spec-type", _TYPES.get(mode, mode)]
    if mode == "draft-model":
        command += ["--model-draft", config["draft_model"]]
    return command


def _follow(server: subprocess.Popen[str]) -> None:
    """Its log goes into ours."""
    assert server.stdout is not None
    for line in server.stdout:
        sys.stderr.write(line)


def _instructions(program: str) -> str:
    """What the library beside the program says that it uses."""
    try:
        said = ctypes.CDLL(str(Path(program).with_name("libllama.so"))).llama_print_system_info
    except (OSError, AttributeError):
        return "unknown"
    said.restype = ctypes.c_char_p
    return " ".join(_SETS.findall(said().decode()))


def _await(server: subprocess.Popen[str], address: str) -> None:
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with exit code {server.returncode}")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
        except urllib.error.HTTPError as error:
            if error.code != _LOADING:
                raise RuntimeError(f"llama-server answers {error.code}") from error
        except OSError:  # it does not listen yet
            pass
        else:
            return
        time.sleep(0.1)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"llama-server answers {error.code}: {error.read()[:200]!r}") from error


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
