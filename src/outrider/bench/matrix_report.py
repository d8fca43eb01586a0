"""The report of a matrix: JSON with every turn, tables on the terminal and in Markdown, and a picture."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench import machine
from outrider.bench.matrix import CONTROL, MatrixPlan, MatrixResult, measured
from outrider.bench.ratios import ALL, interval
from outrider.bench.report import ReportTable, markdown_table, show_tables
from outrider.drafters import AUTO, PLAIN

# Speed-up below which a cell is marked: no drafter may make a request slower, and 2 % are the noise of a quiet machine.
LEAST = 0.98
NORMAL_95 = 1.96  # standard deviations on each side of the mean that hold 95 % of a normal distribution
Cell = dict[str, Any]
Column = tuple[int, str]  # requests at once, kind of prompts
Logs = dict[tuple[str, int, str], dict[str, list[float]]]  # by drafter and column, then by group: logarithms of ratios


def assemble(plan: MatrixPlan, outcome: MatrixResult, command: str) -> dict[str, Any]:
    models = list(dict.fromkeys(turn["key"][0] for turn in outcome.turns))
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {**machine.describe(), "gpu": machine.gpu(plan.where.get("device", "auto"))},
        "settings": plan.settings(),
        "interrupted": outcome.interrupted,
        "missing": outcome.missing,
        "models": {model: summarise(outcome.turns, model) for model in models},
        "turns": outcome.turns,
    }


def summarise(turns: Sequence[dict[str, Any]], model: str) -> dict[str, Any]:
    """Every cell, and `auto` against the best single drafter of each column."""
    logs: Logs = defaultdict(lambda: defaultdict(list))
    writing: dict[str, list[float]] = defaultdict(list)
    differ: dict[tuple[str, int, str], int] = defaultdict(int)
    for batch, kind, runs, group in measured(turns, model):
        plain = runs[PLAIN]
        for spec in (spec for spec in runs if spec != PLAIN):
            faster = math.log(plain["seconds"] / runs[spec]["seconds"])
            for column in ((batch, kind), (batch, ALL), (0, ALL)):
                logs[spec, *column][f"{batch} {group}"].append(faster)
                differ[spec, *column] += runs[spec]["differ"]
            if batch == 1 and runs[spec]["writing"] > 0 and plain["writing"] > 0:
                writing[spec].append(math.log(plain["writing"] / runs[spec]["writing"]))
    noise = _noise(logs)
    cells = [
        _cell(spec, batch, kind, by, differ[spec, batch, kind], noise.get(batch, 0.0))
        for (spec, batch, kind), by in logs.items()
    ]
    decode = {spec: math.exp(float(np.mean(values))) for spec, values in writing.items()}
    return {"cells": cells, "decode_only": decode, "auto": _auto(cells, logs), "noise": noise}


def _noise(logs: Logs) -> dict[int, float]:
    """By requests at once, 0 for all: the standard deviation of a turn of plain decoding against itself."""
    columns = {batch: by for (spec, batch, kind), by in logs.items() if (spec, kind) == (CONTROL, ALL)}
    found = {batch: [value for values in by.values() for value in values] for batch, by in columns.items()}
    return {batch: math.sqrt(float(np.mean(np.square(values)))) for batch, values in found.items()}


def _cell(spec: str, batch: int, kind: str, by_group: dict[str, list[float]], differ: int, noise: float) -> Cell:
    """Its interval is no narrower than what plain decoding against itself, in as many turns, would have."""
    value, low, high = _mean(by_group)
    if noise and low is not None and high is not None:
        apart = math.exp(NORMAL_95 * noise / math.sqrt(sum(map(len, by_group.values()))))
        low, high = min(low, value / apart), max(high, value * apart)
    below = "" if value >= LEAST else "clearly" if high is None or high < LEAST else "within its interval"
    return {
        "draft": spec, "batch": batch, "kind": kind, "value": value, "low": low, "high": high,
        "groups": len(by_group), "differ": differ, "below": below,
    }  # fmt: skip


def _mean(by_group: dict[str, list[float]]) -> tuple[float, float | None, float | None]:
    """Geometric mean and 95 % interval over groups of prompts; over rounds, where there is only one group."""
    values = list(by_group.values())
    bounds = interval(values if len(values) > 1 else [[each] for each in values[0]])
    low, high = (None, None) if bounds is None else map(math.exp, bounds)
    return math.exp(float(np.mean([np.mean(each) for each in values]))), low, high


def _auto(cells: Sequence[Cell], logs: Logs) -> list[Cell]:
    """`auto` against the single drafter that is best in a column: the ratio of their times, in the same turns."""
    found = []
    autos = [spec for spec in dict.fromkeys(cell["draft"] for cell in cells) if spec.partition(":")[0] == AUTO]
    for batch, kind in dict.fromkeys((cell["batch"], cell["kind"]) for cell in cells):
        column = [cell for cell in cells if (cell["batch"], cell["kind"]) == (batch, kind)]
        single = [cell for cell in column if cell["draft"] not in (*autos, CONTROL)]
        for auto in autos if single else ():
            best = max(single, key=lambda cell: cell["value"])["draft"]
            mine, other = logs[auto, batch, kind], logs[best, batch, kind]
            paired = {
                group: [a - b for a, b in zip(mine[group], other[group], strict=False)]
                for group in mine
                if group in other
            }
            value, low, high = _mean(paired)
            found.append(
                {"draft": auto, "batch": batch, "kind": kind, "best": best, "value": value, "low": low, "high": high}
            )
    return found


def tables(report: dict[str, Any]) -> list[ReportTable]:
    found = []
    for model, summary in report["models"].items():
        batches = dict.fromkeys(cell["batch"] for cell in summary["cells"])
        found += [_batch_table(model, batch, summary) for batch in batches if batch]
        found.append(_overall(model, summary))
    return found


def _batch_table(model: str, batch: int, summary: dict[str, Any]) -> ReportTable:
    cells = [cell for cell in summary["cells"] if cell["batch"] == batch]
    kinds = [*dict.fromkeys(cell["kind"] for cell in cells if cell["kind"] != ALL), ALL]
    rows = []
    for spec in dict.fromkeys(cell["draft"] for cell in cells):
        own = {cell["kind"]: cell for cell in cells if cell["draft"] == spec}
        rows.append((spec, *(_shown(own[kind]) if kind in own else "–" for kind in kinds)))
    for spec in dict.fromkeys(row["draft"] for row in summary["auto"]):
        own = {row["kind"]: row for row in summary["auto"] if (row["draft"], row["batch"]) == (spec, batch)}
        against = (f"{own[kind]['value']:.2f} of {own[kind]['best']}" if kind in own else "–" for kind in kinds)
        rows.append((f"{spec} / best", *against))
    return ReportTable(f"{model}, {batch} at once", ("drafter", *kinds), rows, 1)


def _overall(model: str, summary: dict[str, Any]) -> ReportTable:
    cells = {cell["draft"]: cell for cell in summary["cells"] if cell["batch"] == 0}
    marked = {
        spec: _count(cell for cell in summary["cells"] if cell["draft"] == spec and cell["kind"] != ALL)
        for spec in cells
    }
    decode = summary["decode_only"]
    rows = [
        (spec, _shown(cell), f"{decode[spec]:.2f}×" if spec in decode else "–", *marked[spec], str(cell["differ"]))
        for spec, cell in cells.items()
    ]
    for row in (row for row in summary["auto"] if row["batch"] == 0):
        rows.append((f"{row['draft']} / {row['best']}", _shown({**row, "below": ""}), "", "", "", ""))
    columns = ("drafter", "all turns", "decoding only, one at once", "cells below 0.98", "clearly", "texts that differ")
    return ReportTable(f"{model}, over all", columns, rows, 1)


def _count(cells: Iterable[Cell]) -> tuple[str, str]:
    marks = [cell["below"] for cell in cells]
    return str(sum(map(bool, marks))), str(marks.count("clearly"))


def _shown(cell: Cell) -> str:
    mark = {"clearly": " ▼", "within its interval": " ▽"}.get(cell["below"], "")
    bounds = "" if cell["low"] is None else f" [{cell['low']:.2f}–{cell['high']:.2f}]"
    return f"{cell['value']:.2f}{bounds}{mark}"


def notes(report: dict[str, Any]) -> list[str]:
    lines = ["Interrupted: this is a partial report."] if report["interrupted"] else []
    for model, missing in report["missing"].items():
        lines += [f"{model}, {spec} not measured: {why}" for spec, why in missing.items()]
    for model, summary in report["models"].items():
        shares = [f"{100 * noise:.1f} % with {batch} at once" for batch, noise in summary["noise"].items() if batch]
        if shares:
            lines.append(
                f"{model}, noise of one turn (standard deviation, plain decoding against itself): {', '.join(shares)}. "
                "No interval is narrower than this noise makes it."
            )
    differ = sum(cell["differ"] for each in report["models"].values() for cell in each["cells"] if not cell["batch"])
    return [*lines, f"{differ} texts differ from plain decoding's."]


def _facts(report: dict[str, Any]) -> str:
    settings, where = report["settings"], report["machine"]
    gpu = f", {where['gpu']}" if where["gpu"] else ""
    lines = [
        f"`{report['command']}`",
        f"{report['created']}, {where['cpu']}, {where['cores']} cores{gpu}; commit {where['commit']}",
        f"{settings['rounds']} rounds, greedy, up to {settings['max_tokens']} tokens; prompts, and the first request "
        "of a cold engine, are in the time",
    ]
    rule = (
        "A cell is the speed-up over plain decoding of the same prompts in the same turn: the geometric mean with its "
        "95 % bootstrap interval over groups of prompts (over rounds, where there is one group). ▼: below 0.98 with "
        "its whole interval; ▽: below 0.98, but not its interval. Where there are fewer prompts of a kind than "
        "requests at once, prompts repeat within the group."
    )
    return "  \n".join(lines) + "\n\n" + rule


def markdown(report: dict[str, Any]) -> str:
    parts = ["# outrider bench matrix", _facts(report), *map(markdown_table, tables(report))]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(report))]) + "\n"


def write(report: dict[str, Any], folder: Path) -> list[str]:
    """matrix.json, matrix.md and, where it can be drawn, matrix.png. What a user should hear about it."""
    (folder / "matrix.json").write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "matrix.md").write_text(markdown(report), encoding="utf-8")
    if not report["models"]:
        return []
    try:
        from outrider.bench.matrix_plot import draw
    except ModuleNotFoundError:
        return ["no matrix.png: matplotlib is not installed (pip install '.[plot]' in a checkout)"]
    draw(report, folder / "matrix.png")
    return []


def show(report: dict[str, Any]) -> None:
    show_tables(tables(report), notes(report))
