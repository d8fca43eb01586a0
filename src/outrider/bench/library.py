"""The calls of a load without a server: what the library itself needs for the same prompts."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.bench import prepare
from outrider.bench.peers import OURS, TABLE
from outrider.bench.process import EngineProcess, WorkerError
from outrider.core.errors import OutriderError
from outrider.models import sources

LOAD_TIMEOUT = 600.0  # seconds: on a GPU Triton compiles on loading


class LibraryCalls:
    """Our engine with one drafter in a process of its own, which begins to load at once and is stopped between two
    waves."""

    def __init__(
        self, model: str, draft: str, batch: int, output: Path, *, threads: int, own: Mapping[str, Any]
    ) -> None:
        path = sources.resolve(model).resolve()
        settings = dict(own)
        config = {
            "model": str(path),
            "modes": [draft],
            "chat": prepare.has_chat_template(path),
            "device": settings.pop("device", "auto"),
            "threads": threads,
            "batch": batch,
            "cached": True,
            "own": settings,
        }
        log = output / f"library-{hashlib.sha256(draft.encode()).hexdigest()[:6]}.log"
        self._draft = draft
        self._worker = EngineProcess(sys.executable, TABLE[OURS].path, config, threads, log, calls=True)

    def wait(self) -> None:
        """Until it has loaded."""
        try:
            self._worker.ready(LOAD_TIMEOUT)
        except WorkerError as error:
            raise OutriderError(f"the library with {self._draft}: {error}") from None

    def wave(self, texts: Sequence[str], at_once: int, max_tokens: int, timeout: float) -> tuple[int, float]:
        """Tokens and seconds of all texts, `at_once` in a call. All have the same number of tokens, so that no place in
        a batch is empty."""
        tokens, seconds = 0, 0.0
        for begin in range(0, len(texts), at_once):
            job = {"mode": self._draft, "ids": list(texts[begin : begin + at_once]), "max_tokens": max_tokens}
            try:
                answer = self._worker.ask(job, timeout)
            except WorkerError as error:
                answer = {"error": str(error)}
            if "error" in answer:
                raise OutriderError(f"the library with {self._draft}: {answer['error']}")
            tokens += sum(map(len, answer["ids"]))
            seconds += answer["seconds"]
        return tokens, seconds

    def close(self) -> None:
        self._worker.close()
