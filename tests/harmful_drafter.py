"""A drafter of somebody else's, installed for the workers that a test starts: it does harm when it is asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

DRAFTER = """
import time

import torch

from outrider.core.draft import EMPTY
from outrider.drafters.base import Drafter

HANG, LOSE, FILL = 111, 112, 113  # max_tokens that ask for it


class Harmful(Drafter):
    name = "harmful"

    def __init__(self, options, parts):
        self._forward, parts.target.forward = parts.target.forward, self.forward
        self._asked = set()

    def propose(self, seqs, budgets):
        self._asked = {seq.params.max_tokens for seq in seqs}
        while HANG in self._asked:
            time.sleep(0.01)
        return [EMPTY] * len(seqs)

    def forward(self, feeds, layers=()):
        if LOSE in self._asked:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if FILL in self._asked:
            self._asked = set()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self._forward(feeds, layers)
"""
HANG, LOSE, FILL = 111, 112, 113


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package that is installed: a module, and an entry point that names it."""
    (folder / "harmful.py").write_text(DRAFTER)
    info = folder / "harmful-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: harmful\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[outrider.drafters]\nharmful = harmful:Harmful\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.syspath_prepend(str(folder))
