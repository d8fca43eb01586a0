"""The picture of a matrix: a coloured cell for every drafter and kind, a row of panels for each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from outrider.bench.ratios import ALL

SLOWEST, FASTEST = 0.7, 2.2  # speed-ups at which colours end


def draw(report: dict[str, Any], path: Path) -> None:
    models = report["models"]
    batches = sorted({cell["batch"] for each in models.values() for cell in each["cells"] if cell["batch"]})
    figure = Figure(figsize=(5.2 * len(batches) + 1.0, 3.4 * len(models) + 0.6), layout="constrained")
    panels = figure.subplots(len(models), len(batches), squeeze=False)
    for row, (model, summary) in zip(panels, models.items(), strict=True):
        for axes, batch in zip(row, batches, strict=True):
            _panel(axes, [cell for cell in summary["cells"] if cell["batch"] == batch])
            axes.set_title(f"{model}, {batch} at once", fontsize=9)
    figure.suptitle("speed-up over plain decoding, prompts in the time", fontsize=11)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, cells: list[dict[str, Any]]) -> None:
    kinds = [*dict.fromkeys(cell["kind"] for cell in cells if cell["kind"] != ALL), ALL]
    specs = list(dict.fromkeys(cell["draft"] for cell in cells))
    values = {(cell["draft"], cell["kind"]): cell for cell in cells}
    grid = [[values[spec, kind]["value"] if (spec, kind) in values else 1.0 for kind in kinds] for spec in specs]
    if grid:
        axes.imshow(grid, cmap="RdBu", norm=TwoSlopeNorm(1.0, SLOWEST, FASTEST), aspect="auto")
    for (spec, kind), cell in values.items():
        mark = "▼" if cell["below"] == "clearly" else ""
        axes.text(kinds.index(kind), specs.index(spec), f"{cell['value']:.2f}{mark}", ha="center", va="center", size=7)
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(specs)), specs, fontsize=8)
