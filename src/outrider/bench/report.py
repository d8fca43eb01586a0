"""The report: JSON with every run, the same tables on the terminal and in Markdown, and a picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.bench import machine
from outrider.bench.peers import OURS, TABLE
from outrider.bench.plan import BenchPlan
from outrider.bench.ratios import ALL, prompt_speeds, summarise
from outrider.bench.run import BenchResult

Report = dict[str, Any]
_STRUCK = re.compile(r"~~(.+?)~~")


@dataclass(frozen=True)
class ReportTable:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # ~~struck~~ as in Markdown
    texts: int  # how many columns at the left are text; the others are numbers


def assemble(plan: BenchPlan, outcome: BenchResult, command: str) -> Report:
    engines = {peer.name: {"plain": peer.plain, "modes": peer.modes} for peer in plan.peers}
    runs, prompts = ([asdict(run) for run in some] for some in (outcome.runs, outcome.prompts))
    also = [peer.name for peer in plan.peers if peer.own]
    summary = summarise(runs, engines, OURS) | {"prompts": prompt_speeds(prompts, OURS, also)}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine.describe(),
        "settings": {
            "model": name_of(plan.model),
            "draft_model": None if plan.draft_model is None else name_of(plan.draft_model),
            "prompts": len(plan.prompts),
            "rounds": plan.rounds,
            "max_tokens": plan.max_tokens,
            "threads": plan.threads,
            "seed": plan.seed,
            "dtype": "auto",
            "prompt_tokens": plan.prompt_tokens,
            "instructions": plan.instructions,
            **plan.own,
        },
        "interrupted": outcome.interrupted,
        "engines": outcome.engines,
        "summary": summary,
        "runs": runs,
        "prompt_runs": prompts,
    }


def tables(report: Report) -> list[ReportTable]:
    """Overall, ours by kind, and our plain against the peers'."""
    rows = report["summary"]["modes"]
    overall = [row for row in rows if row["kind"] == ALL]
    ours = [row for row in rows if row["engine"] == OURS and not row["plain"]]
    summary = report["summary"]
    found = [
        _overall(overall),
        _by_kind("Our drafters by kind", ours),
        _against(summary["against"]),
        _best(summary.get("best", [])),
        _prompts(summary.get("prompts", []), report["settings"].get("prompt_tokens", 0)),
        _engines(report["engines"]),
    ]
    return [table for table in found if table.rows]


def peer_tables(report: Report) -> list[ReportTable]:
    """Every peer's modes by kind: too long for a screen."""
    rows = [row for row in report["summary"]["modes"] if not row["plain"] and row["engine"] != OURS]
    engines = dict.fromkeys(row["engine"] for row in rows)
    return [_by_kind(f"{name} by kind", [row for row in rows if row["engine"] == name]) for name in engines]


def notes(report: Report) -> list[str]:
    """What did not run, and what a reader must know."""
    lines = []
    if report["interrupted"]:
        lines.append("Interrupted: this is a partial report.")
    for name, engine in report["engines"].items():
        by_reason: dict[str, list[str]] = {}
        for mode, how in engine["modes"].items():
            if how != "ok":
                by_reason.setdefault(how, []).append(mode)
        for why, modes in by_reason.items():
            whole = len(modes) == len(engine["modes"])
            lines.append(f"{name}{'' if whole else ' ' + ', '.join(modes)}: {why}")
        known = TABLE[name].notes.items()
        lines += [f"{name} {mode}: {note}" for mode, note in known if engine["modes"].get(mode) == "ok"]
    short = sum(row["too_short"] for row in report["summary"]["modes"] if row["kind"] == ALL)
    if short:
        lines.append(f"{short} runs ended too early to say anything about speed; they count for equality only.")
    return lines


def write(report: Report, folder: Path) -> list[str]:
    """report.json, report.md and, where it can be drawn, report.png. What a user should hear about it."""
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    if not report["summary"]["modes"]:
        return []
    try:
        from outrider.bench.plot import draw
    except ModuleNotFoundError:
        return ["no report.png: matplotlib is not installed (pip install '.[plot]' in a checkout)"]
    draw(report, folder / "report.png")
    return []


def markdown(report: Report) -> str:
    parts = [f"# {report['settings']['model']}: outrider bench", _facts(report)]
    parts += [markdown_table(table) for table in (*tables(report), *peer_tables(report))]
    parts += ["\n".join(f"- {note}" for note in notes(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(report: Report) -> None:
    show_tables(tables(report), notes(report))


def show_tables(tables: Sequence[ReportTable], notes: Sequence[str]) -> None:
    """The tables on stdout, the notes under them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for table in tables:
        console.print(f"\n[bold]{table.title}[/]")
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(table.columns):
            grid.add_column(name, justify="left" if number < table.texts else "right")
        for row in table.rows:
            grid.add_row(*(_STRUCK.sub(r"[strike dim]\1[/]", cell.replace("[", r"\[")) for cell in row))
        console.print(grid)
    for note in notes:
        console.print(f"· {note}", markup=False, soft_wrap=True)


def name_of(model: str) -> str:
    """A path says more about the machine than about the model."""
    return Path(model).name if Path(model).exists() else model


def _facts(report: Report) -> str:
    settings, where = report["settings"], report["machine"]
    installed = [pair for engine in report["engines"].values() for pair in engine.get("versions", {}).items()]
    lines = [
        f"`{report['command']}`",
        f"{report['created']}, {where['cpu']}, {where['cores']} cores, {settings['threads']} threads",
        f"{settings['prompts']} prompts, {settings['rounds']} rounds, greedy, up to {settings['max_tokens']} tokens; "
        "decoding only",
        ", ".join(f"{name} {text}" for name, text in dict.fromkeys(installed))
        + (f"; commit {where['commit']}" if where["commit"] else ""),
    ]
    rule = (
        "A speed-up is the geometric mean over prompts against the same engine's plain decoding, with its 95 % "
        "bootstrap interval. It is void where an output differs from that engine's plain output."
    )
    return "  \n".join(lines) + "\n\n" + rule


def _overall(rows: Sequence[Report]) -> ReportTable:
    columns = ("engine", "mode", "tok/s", "speed-up", "kept", "tok/step")
    body = [(row["engine"], row["mode"], speed(row), speed_up(row), *drafting(row)) for row in rows]
    return ReportTable("Decoding speed over all prompts", columns, body, 2)


def _by_kind(title: str, rows: Sequence[Report]) -> ReportTable:
    columns = ("mode", "kind", "tok/s", "speed-up", "kept", "tok/step")
    body = [(row["mode"], row["kind"], speed(row), speed_up(row), *drafting(row)) for row in rows]
    return ReportTable(title, columns, body, 2)


def _against(rows: Sequence[Report]) -> ReportTable:
    columns = ("against", "kind", "speed of our plain", "same text")
    same = [f"{row['same_text']} of {row['compared']}" for row in rows]
    body = [(row["peer"], row["kind"], _times(row["ratio"]), text) for row, text in zip(rows, same, strict=True)]
    return ReportTable("Our plain decoding against the peers' plain decoding", columns, body, 2)


def _best(rows: Sequence[Report]) -> ReportTable:
    columns = ("against", "our mode", "its mode", "our speed")
    body = [(row["peer"], row["mode"], row["its_mode"], _times(row["ratio"])) for row in rows]
    return ReportTable("Our fastest mode against the peers' fastest", columns, body, 3)


def _prompts(rows: Sequence[Report], tokens: int) -> ReportTable:
    also = dict.fromkeys(name for row in rows for name in row.get("also", {}))
    body = [
        (row["engine"], speed(row), _times(row["ratio"]), *(_times(row["also"].get(name)) for name in also))
        for row in rows
    ]
    columns = ("engine", "tok/s", "our speed", *(f"speed of {name}" for name in also))
    return ReportTable(f"Reading prompts of {tokens} tokens", columns, body, 1)


def _engines(engines: Report) -> ReportTable:
    """How each was built and which instructions it uses, as far as it tells."""
    told = {name: engine.get("about", {}) for name, engine in engines.items()}
    body = [
        (name, about.get("source", ""), about.get("compiler", ""), about.get("flags", ""), about["instructions"])
        for name, about in told.items()
        if about.get("instructions")
    ]
    columns = ("engine", "source", "compiler", "flags", "instructions")
    return ReportTable("How the engines were built", columns, body, 5)


def speed(row: Report) -> str:
    return "–" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}"


def speed_up(row: Report) -> str:
    if row["plain"]:
        return "1 (plain)"
    if row["void"]:
        times = "" if row["ratio"] is None else f"~~{row['ratio']['value']:.2f}×~~ "
        return f"{times}void ({row['differ']} of {row['compared']} differ)"
    return _times(row["ratio"])


def _times(ratio: Report | None) -> str:
    if ratio is None:
        return "–"
    if ratio["low"] is None:
        return f"{ratio['value']:.2f}×"
    return f"{ratio['value']:.2f}× [{ratio['low']:.2f}–{ratio['high']:.2f}]"


def drafting(row: Report) -> tuple[str, str]:
    rate, per_step = row["acceptance_rate"], row["tokens_per_step"]
    return "" if rate is None else f"{rate:.0%}", "" if per_step is None else f"{per_step:.2f}"


def markdown_table(table: ReportTable) -> str:
    rules = ["---"] * table.texts + ["--:"] * (len(table.columns) - table.texts)
    lines = [table.columns, tuple(rules), *table.rows]
    return f"## {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
