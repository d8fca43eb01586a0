"""The report of drafters x batches on one device, from its figures: tables, notes, files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench import gpu_report
from outrider.bench.batches_figures import SLOWER, is_plain
from outrider.bench.peers import OURS
from outrider.bench.report import Report, ReportTable, markdown_table, show_tables
from outrider.drafters import PLAIN


def tables(report: Report) -> list[ReportTable]:
    found = [
        _calls(report["rows"]),
        _one_at_a_time(report["rows"]),
        _written(report["rows"]),
        _loading(report["warm_up"]),
        *gpu_report.tables(report["parts"]),
    ]
    return [table for table in found if table.rows]


def _calls(rows: Sequence[Report]) -> ReportTable:
    columns = (
        "mode",
        "at once",
        "tok/s",
        "of our plain",
        "least prompt",
        "tok/step",
        "texts equal to plain",
        "as alone",
    )
    body = []
    for row in rows:
        plain, ours = is_plain(row), (row["engine"], row["mode"]) == (OURS, PLAIN)
        alone = None if ours else row["one_at_a_time"]
        body.append(
            (
                f"{row['engine']} {row['mode']}",
                str(row["batch"]),
                f"{row['tokens_per_second']:,.0f}" + (" (cold)" if row["cold"] else ""),
                "1" if ours else _times(row["ratio"]),
                "" if alone is None else f"{alone['least_prompt']['ratio']:.2f}",
                _number(row["tokens_per_step"], ".2f"),
                "" if plain else f"{row['equal']} of {row['compared']}",
                f"{row['as_alone']} of {row['known_alone']}",
            )
        )
    return ReportTable("Whole calls, prompts included", columns, body, 1)


def _one_at_a_time(rows: Sequence[Report]) -> ReportTable:
    columns = ("mode", "first request, ms", "plain's", "of plain", "least prompt", "below", "least request", "below")
    body = []
    for row in rows:
        found = row["one_at_a_time"]
        if found is not None and (row["engine"], row["mode"]) != (OURS, PLAIN):
            first, prompt, request = found["first_request"], found["least_prompt"], found["least_request"]
            body.append(
                (
                    f"{row['engine']} {row['mode']}",
                    f"{1e3 * first['seconds']:,.1f}",
                    f"{1e3 * first['plain_seconds']:,.1f}",
                    f"{first['ratio']:.2f}×",
                    f"{prompt['ratio']:.2f}× ({prompt['prompt']})",
                    f"{found['slower_prompts']} of {found['prompts']}",
                    f"{request['ratio']:.2f}× ({request['prompt']}, round {request['round']})",
                    f"{found['slower_requests']} of {found['requests']}",
                )
            )
    return ReportTable(
        f"One at a time, from the first request after loading on; below: {SLOWER}× plain", columns, body, 1
    )


def _written(rows: Sequence[Report]) -> ReportTable:
    columns = ("mode", "at once", "tok/s", "of our plain", "the rest of a call (prompts), ms")
    body = [
        (
            f"{row['engine']} {row['mode']}", str(row["batch"]), f"{row['writing_tokens_per_second']:,.0f}",
            "1" if row["mode"] == PLAIN else _times(row["writing_ratio"]), _number(row["reading_ms"], ",.1f"),
        )
        for row in rows
        if row["writing_tokens_per_second"] is not None
    ]  # fmt: skip
    return ReportTable("Of these calls from the first token to the last", columns, body, 1)


def _loading(rows: Sequence[Report]) -> ReportTable:
    columns = ("engine", "mode", "loaded in s", "its first call, ms", "at once", "warm-up calls", "s")
    body = [
        (
            row["engine"], row["mode"], f"{row['load_s']:.1f}",
            f"{1e3 * row['first_call_s']:,.1f}" if "first_call_s" in row else "–", str(row.get("first_batch", "–")),
            str(row["calls"]), f"{row['calls_s']:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    return ReportTable("Loading, beside the others that load; in no other figure", columns, body, 2)


def _times(ratio: Report | None) -> str:
    return "–" if ratio is None else f"{ratio['value']:.2f}× [{ratio['least']:.2f}–{ratio['most']:.2f}]"


def _number(value: Any, shape: str) -> str:
    return "–" if value is None else format(value, shape)


def notes(report: Report) -> list[str]:
    lines = [*gpu_report.lines(report["parts"]), *report["notes"], *_lost(report["lost"])]
    for row in report["rows"]:
        name = f"{row['engine']} {row['mode']}, {row['batch']} at once"
        if row["slower_calls"] and row["engine"] == OURS and row["batch"] > 1:
            lines.append(f"{name}: {row['slower_calls']} of {row['calls']} calls below {SLOWER}× plain")
        if row["cold"]:
            lines.append(f"{name}: {row['cold']} calls without warm-up: its time was up")
    return lines


def _lost(lines: Sequence[Report]) -> list[str]:
    """Modes and calls that failed; the same fault of the same mode once."""
    said = Counter[str]()
    for line in lines:
        where = f", {line['batch']} at once" if "batch" in line else ""
        said[f"{line['engine']} {line['mode']}{where}: {line['error']}"] += 1
    return [text if times == 1 else f"{text} ({times} times)" for text, times in said.items()]


def markdown(report: Report) -> str:
    settings, where = report["settings"], report["machine"]
    facts = [
        f"`{report['command']}`",
        f"{report['created']}, {settings['gpu'] or where['cpu']}",
        f"commit {where['commit']}, Python {where['python']}",
        f"{settings['prompts']} prompts, {settings['rounds']} rounds, {settings['max_tokens']} tokens each, greedy, "
        "end tokens ignored",
    ]
    rule = (
        "The time of a call counts from texts to texts, its prompts included, none of which is in a cache. Every mode "
        "has a process of its own; all take turns at every group of prompts. Ratios: the median over rounds, the least "
        "and the most in brackets, to our plain decoding of the same prompts in the same round. Equal: to the same "
        "engine's plain texts of the same turn; as alone: to its plain texts with the fewest at once. Least prompt: "
        "the lowest ratio of a prompt that is asked alone, by medians over rounds; least request: of any request in "
        "any round. One at a time nothing is warmed up, so the first request after loading is among them."
    )
    parts = [f"# {settings['model']}: outrider bench --device {settings['device']}", "  \n".join(facts), rule]
    parts += [markdown_table(table) for table in tables(report)]
    parts += ["\n".join(f"- {note}" for note in notes(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def write(report: Report, folder: Path) -> None:
    """report.json and report.md, replaced as a whole: a run may be cut off at any time."""
    whole = {"report.json": json.dumps(report, indent=1, ensure_ascii=False) + "\n", "report.md": markdown(report)}
    for name, text in whole.items():
        (folder / f"{name}.new").write_text(text, encoding="utf-8")
        (folder / f"{name}.new").replace(folder / name)


def show(report: Report) -> None:
    show_tables(tables(report), notes(report))
