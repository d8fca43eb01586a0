"""Run a command in this process, as a shell would see it."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from outrider.cli import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Outrider = Callable[..., Done]


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Outrider:
    def run(*args: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with loggers_as_before():
            code = main([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return run


@contextlib.contextmanager
def loggers_as_before() -> Iterator[None]:
    """`serve` makes all loggers write to the stderr of this test, which is closed after it; others log later."""
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [(each, each.level, each.propagate, each.handlers[:]) for each in loggers]
    try:
        yield
    finally:
        for logger, level, propagate, handlers in before:
            logger.setLevel(level)
            logger.propagate, logger.handlers[:] = propagate, handlers
