"""The picture: how fast every mode decodes, and what our drafters bring on each kind of prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from outrider.bench.peers import OURS
from outrider.bench.ratios import ALL

PLAIN, DRAFTED, VOID = "#9aa5b1", "#1f77b4", "#e4a5a5"
ABOVE: dict[str, Any] = {
    "fontsize": 8,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.0),
    "ncols": 3,
    "frameon": False,
}
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")


def draw(report: dict[str, Any], path: Path) -> None:
    rows = report["summary"]["modes"]
    overall = [row for row in rows if row["kind"] == ALL and row["tokens_per_second"] is not None]
    ours = [row for row in rows if row["engine"] == OURS and row["ratio"] is not None and row["kind"] != ALL]
    figure = Figure(figsize=(13 if ours else 7, max(4.6, 1.8 + 0.34 * len(overall))), layout="constrained")
    left, *right = figure.subplots(1, 2 if ours else 1, squeeze=False)[0]
    _speeds(left, overall)
    if ours:
        _speed_ups(right[0], ours)
    settings = report["settings"]
    size = f"{settings['prompts']} prompts × {settings['rounds']} rounds"
    title = f"{settings['model']}, {settings['threads']} threads, {size}"
    figure.suptitle(title + (" (interrupted)" if report["interrupted"] else ""), fontsize=11)
    figure.savefig(path, dpi=130)


def _speeds(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        colour = PLAIN if row["plain"] else VOID if row["void"] else DRAFTED
        axes.barh(place, row["tokens_per_second"], color=colour, hatch="//" if row["void"] else None, edgecolor="white")
        axes.text(row["tokens_per_second"], place, f" {row['tokens_per_second']:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['engine']}  {row['mode']}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("decoded tokens per second")
    axes.legend(handles=_legend(rows), **ABOVE)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(rows: Sequence[dict[str, Any]]) -> list[Patch]:
    shown = [Patch(color=PLAIN, label="plain"), Patch(color=DRAFTED, label="speculative")]
    void = Patch(facecolor=VOID, hatch="//", edgecolor="white", label="void: output differs from plain")
    return [*shown, void] if any(row["void"] for row in rows) else shown


def _speed_ups(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        for row in (row for row in rows if row["mode"] == mode):
            place = kinds.index(row["kind"]) + (number - (len(modes) - 1) / 2) * width
            _bar(axes, place, width, row, COLOURS[number % len(COLOURS)])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("speed-up over our plain decoding")
    colours = [Patch(color=COLOURS[number % len(COLOURS)], label=mode) for number, mode in enumerate(modes)]
    void = Patch(facecolor="white", hatch="///", edgecolor="grey", label="void: output differs from plain")
    axes.legend(handles=[*colours, void] if any(row["void"] for row in rows) else colours, **ABOVE)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: Axes, place: float, width: float, row: dict[str, Any], colour: str) -> None:
    """A speed-up with its interval; a void one is only an outline."""
    ratio = row["ratio"]
    look: dict[str, Any] = (
        {"facecolor": "white", "edgecolor": colour, "hatch": "///"} if row["void"] else {"color": colour}
    )
    axes.bar(place, ratio["value"], width * 0.92, **look)
    if ratio["low"] is not None:
        axes.plot([place, place], [ratio["low"], ratio["high"]], color="black", linewidth=1)
