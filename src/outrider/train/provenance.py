"""Where a head comes from: the command, the code, the machine, the data, the figures. No paths of this machine."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.train.files import write_text

NAME = "provenance.json"


def write(out: Path, command: Sequence[str], machine: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    said = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(_without_folders(word) for word in command),
        "machine": {**machine, "device": _device()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **facts,
    }
    write_text(out / NAME, json.dumps(said, indent=1, ensure_ascii=False) + "\n")


def _without_folders(word: str) -> str:
    """A path is told by its last name."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag + equals + (re.split(r"[/\\]", value.rstrip("/\\"))[-1] if re.match(r"[/.~]|\w:", value) else value)


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
