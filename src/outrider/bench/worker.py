"""The worker process: it loads one engine, then answers every JSON line on stdin with one on stdout.

    python worker.py ENGINE_FILE CONFIG LOAD

It runs under any interpreter, so that an engine can live in an environment of its own: nothing of outrider is imported
here, and an engine's file imports its package only inside `load`.

An engine's file has PACKAGES (what must be installed) and `load(config)`, which returns a function
`generate(mode, ids, max_tokens)`. An answer holds `ids` or `text`, `tokens`, `first` (how many of them came with the
first chunk), `prefill_s`, `decode_s` (from the first chunk to the end), `timing` (whose clock: "stream" ours, "engine"
its own) and perhaps `stats`. The function may have an attribute `about`: what a report should say of the engine.

LOAD is `load`, or `load_batches` for whole calls: then `generate` is given texts instead of ids, all of them at once,
writes exactly `max_tokens` tokens of each, and answers with `ids` (a list for each text), `seconds` and perhaps
`writing_s` (from the first token to the last), `steps`, `drafted` and `accepted`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, TextIO

Generate = Callable[[str, list[Any], int], dict[str, Any]]


def main(path: str, config: dict[str, Any], load: str) -> None:
    answers = _own_stdout()
    engine = _import(path)
    begin = time.perf_counter()
    try:
        generate = getattr(engine, load)(config)
    except Exception as error:
        _send(answers, _refusal(error, engine.PACKAGES))
        return
    ready = {"load_s": time.perf_counter() - begin, "versions": _versions(engine.PACKAGES)}
    _send(answers, {"ready": ready | {"about": getattr(generate, "about", {})}})
    for line in sys.stdin:
        _send(answers, _answer(generate, json.loads(line)))


def _own_stdout() -> TextIO:
    """Answers keep stdout for themselves; whatever an engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _import(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(generate: Generate, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return generate(job["mode"], job["ids"], job["max_tokens"])
    except Exception as error:
        traceback.print_exc()
        return {"error": _line(error)}


def _refusal(error: Exception, packages: tuple[str, ...]) -> dict[str, Any]:
    traceback.print_exc()
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in packages:
        return {"missing": error.name}
    return {"error": _line(error)}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = getattr(sys.modules.get(package), "__version__", "unknown")
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script: its neighbours must not hide packages of the same name
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
