"""Run a command in this process, as a shell would see it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
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
        code = main([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return run
