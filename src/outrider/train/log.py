"""The losses of a run, one line per step. Figures wait on the device until a few steps have gathered."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.train.corpus import FOLDER
from outrider.train.objective import Figures

NAME = "log.jsonl"
RECENT = 50  # steps that a shown figure is the mean of


class Log:
    def __init__(self, out: Path, step: int) -> None:
        """What a run that was killed wrote after its checkpoint is dropped: those steps come again."""
        self._path = out / FOLDER / NAME
        kept = [line for line in self._lines() if json.loads(line)["step"] < step]
        self._path.write_text("".join(f"{line}\n" for line in kept))
        self._waiting: list[tuple[int, list[str], Tensor]] = []
        self._recent: deque[dict[str, float]] = deque((json.loads(line) for line in kept[-RECENT:]), RECENT)

    def _lines(self) -> list[str]:
        """A kill may have cut the last line."""
        if not self._path.is_file():
            return []
        return [line for line in self._path.read_text().splitlines() if line.endswith("}")]

    def add(self, step: int, figures: Figures) -> None:
        self._waiting.append((step, list(figures), torch.stack([value.float() for value in figures.values()])))

    def __len__(self) -> int:
        return len(self._waiting)

    def flush(self) -> None:
        """Reading the figures waits for the device."""
        lines = [
            {"step": step, **dict(zip(names, values.tolist(), strict=True))} for step, names, values in self._waiting
        ]
        self._waiting.clear()
        self._recent.extend(lines)
        try:
            with open(self._path, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise OutriderError(f"cannot write {self._path} ({error.strerror}); make room, then --resume") from error

    def recent(self) -> dict[str, float]:
        """Means over the last steps."""
        names = [name for name in (self._recent[-1] if self._recent else ()) if name != "step"]
        return {name: sum(line[name] for line in self._recent if name in line) / len(self._recent) for name in names}

    def curve(self, points: int = 20) -> list[list[float]]:
        """[step, loss] at about so many places, each the mean of the steps since the place before."""
        lines = [json.loads(line) for line in self._lines()]
        width = max(1, -(-len(lines) // points))
        parts = [lines[i : i + width] for i in range(0, len(lines), width)]
        return [[part[-1]["step"], round(sum(line["loss"] for line in part) / len(part), 4)] for part in parts]
