"""The picture of a run: losses, tokens per pass on training and held-out texts, and the time that they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.train.progress import HISTORY

SMOOTH = 60  # points of a curve: each is a mean, as single steps jump
LEARNED, HELD, MEASURED = "#9aa5b1", "#1f77b4", "#2ca02c"


def draw(lines: Sequence[Mapping[str, float]], figures: Mapping[str, Any], path: Path, name: str) -> None:
    figure = Figure(figsize=(12, 4), layout="constrained")
    losses, tokens, time = figure.subplots(1, 3)
    history = figures.get(HISTORY, [])
    _losses(losses, lines, history)
    _tokens(tokens, history, figures.get("live", []))
    time.plot([entry[0] for entry in history], [entry[4] / 60 for entry in history], color=LEARNED)
    _label(time, "minutes since the beginning")
    figure.suptitle(f"a drafter for {name}", fontsize=11)
    figure.savefig(path, dpi=110)


def _losses(axes: Axes, lines: Sequence[Mapping[str, float]], history: Sequence[Sequence[float]]) -> None:
    width = max(1, len(lines) // SMOOTH)
    parts = [lines[i : i + width] for i in range(0, len(lines), width)]
    means = [sum(line["loss"] for line in part) / len(part) for part in parts]
    axes.plot([part[-1]["step"] for part in parts], means, color=LEARNED, label="training")
    axes.plot([entry[0] for entry in history], [entry[1] for entry in history], color=HELD, label="held out")
    _label(axes, "loss")


def _tokens(axes: Axes, history: Sequence[Sequence[float]], live: Sequence[Sequence[float]]) -> None:
    steps = [entry[0] for entry in history]
    axes.plot(steps, [entry[2] for entry in history], color=LEARNED, label="training, from hits")
    axes.plot(steps, [entry[3] for entry in history], color=HELD, label="held out, from hits")
    axes.plot([each[0] for each in live], [each[1] for each in live], "o", color=MEASURED, label="held out, measured")
    _label(axes, "tokens per pass")


def _label(axes: Axes, what: str) -> None:
    axes.set_xlabel("steps")
    axes.set_ylabel(what)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
