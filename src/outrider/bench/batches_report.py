"""The report of drafters x batches on one device: tokens a second, ratios with their spread, equality of texts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.bench import gpu_report
from outrider.bench.batches import Line
from outrider.bench.peers import OURS
from outrider.bench.report import Report, ReportTable, markdown_table, show_tables
from outrider.drafters import PLAIN

SLOWER = 0.98  # a prompt below this ratio is counted


def assemble(lines: Sequence[Line], command: str, parts: Report | None = None) -> Report:
    """From the lines so far, the first of them the header. `parts`: what else was measured on the device."""
    turns = [line for line in lines if line["what"] == "turn"]
    batches = list(dict.fromkeys(turn["batch"] for turn in turns))
    modes = [(line["engine"], line["mode"]) for line in lines if line["what"] == "loaded"]
    alone = _alone(turns)
    rows = [row for batch in batches for mode in modes if (row := _row(turns, batch, mode, alone)) is not None]
    settings = lines[0]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": settings["machine"],
        "settings": {key: value for key, value in settings.items() if key not in ("what", "machine")},
        "loaded": [line for line in lines if line["what"] == "loaded"],
        "lost": [line for line in lines if line["what"] in ("lost", "failed")],
        "notes": [line["text"] for line in lines if line["what"] == "note"],
        "warm_up": _warm_up(lines),
        "rows": rows,
        "parts": parts or {},
        "turns": turns,
    }


def _alone(turns: Sequence[Line]) -> dict[tuple[str, str], str]:
    """By engine and prompt: its first plain text, with as few others beside it as there were."""
    found: dict[tuple[str, str], str] = {}
    for turn in sorted(turns, key=lambda turn: (turn["batch"], turn["round"])):
        if _is_plain(turn):
            for prompt, text in zip(turn["prompts"], turn["texts"], strict=True):
                found.setdefault((turn["engine"], prompt), text)
    return found


def _is_plain(turn: Line) -> bool:
    return bool(turn["mode"] == (PLAIN if turn["engine"] == OURS else "plain"))


def _row(turns: Sequence[Line], batch: int, mode: tuple[str, str], alone: dict[tuple[str, str], str]) -> Report | None:
    here = [turn for turn in turns if turn["batch"] == batch]
    own = [turn for turn in here if (turn["engine"], turn["mode"]) == mode]
    if not own:
        return None
    ours = {_key(turn): turn for turn in here if (turn["engine"], turn["mode"]) == (OURS, PLAIN)}
    base = {_key(turn): turn for turn in here if turn["engine"] == mode[0] and _is_plain(turn)}
    pairs = [(turn, ours[_key(turn)]) for turn in own if _key(turn) in ours]
    equal, compared = _equal(own, base)
    as_alone = [
        text == alone[turn["engine"], prompt]
        for turn in own
        for prompt, text in zip(turn["prompts"], turn["texts"], strict=True)
        if (turn["engine"], prompt) in alone
    ]
    return {
        "batch": batch,
        "engine": mode[0],
        "mode": mode[1],
        "tokens_per_second": statistics.median(_by_round(own)),
        "ratio": _spread(pairs, "seconds"),
        "writing_tokens_per_second": _writing(own),
        "writing_ratio": _spread([pair for pair in pairs if "writing_s" in pair[0]], "writing_s"),
        **_least(pairs),
        "tokens_per_step": _share(own, "tokens", "steps"),
        "acceptance_rate": _share(own, "accepted", "drafted"),
        "equal": equal,
        "compared": compared,
        "as_alone": sum(as_alone),
        "known_alone": len(as_alone),
        "rounds": len({turn["round"] for turn in own}),
        "cold": sum(turn["cold"] for turn in own),
    }


def _key(turn: Line) -> tuple[int, int]:
    return turn["group"], turn["round"]


def _by_round(turns: Sequence[Line], seconds: str = "seconds") -> list[float]:
    rounds = [[turn for turn in turns if turn["round"] == number] for number in sorted({t["round"] for t in turns})]
    return [sum(turn["tokens"] for turn in own) / sum(turn[seconds] for turn in own) for own in rounds]


def _writing(turns: Sequence[Line]) -> float | None:
    """Tokens a second from the first token to the last."""
    known = [turn for turn in turns if turn.get("writing_s")]
    return statistics.median(_by_round(known, "writing_s")) if known else None


def _spread(pairs: Sequence[tuple[Line, Line]], seconds: str) -> Report | None:
    """How many times faster than our plain decoding in the same turns: the median round, the least and the most."""
    rounds = sorted({mine["round"] for mine, _ in pairs})
    ratios = []
    for number in rounds:
        both = [pair for pair in pairs if pair[0]["round"] == number and pair[0][seconds] > 0 and pair[1][seconds] > 0]
        if both:
            mine = sum(one["tokens"] for one, _ in both) / sum(one[seconds] for one, _ in both)
            plain = sum(one["tokens"] for _, one in both) / sum(one[seconds] for _, one in both)
            ratios.append(mine / plain)
    return {"value": statistics.median(ratios), "least": min(ratios), "most": max(ratios)} if ratios else None


def _least(pairs: Sequence[tuple[Line, Line]]) -> Report:
    """The slowest call against plain, by the medians of its rounds, and how many calls are slower than it."""
    ratios = []
    for group in {mine["group"] for mine, _ in pairs}:
        own = [(one["seconds"], plain["seconds"]) for one, plain in pairs if one["group"] == group]
        ratios.append(statistics.median(plain for _, plain in own) / statistics.median(mine for mine, _ in own))
    slower = sum(ratio < SLOWER for ratio in ratios)
    return {"least_call": min(ratios, default=None), "slower_calls": slower, "calls": len(ratios)}


def _equal(own: Sequence[Line], base: dict[tuple[int, int], Line]) -> tuple[int, int]:
    """How many texts are those of the same engine's plain decoding in the same turn, and how many were compared."""
    both = [
        pair
        for turn in own
        if _key(turn) in base
        for pair in zip(turn["texts"], base[_key(turn)]["texts"], strict=True)
    ]
    return sum(mine == plain for mine, plain in both), len(both)


def _share(turns: Sequence[Line], part: str, whole: str) -> float | None:
    total = sum(turn.get(whole, 0) for turn in turns)
    return sum(turn.get(part, 0) for turn in turns) / total if total else None


def _warm_up(lines: Sequence[Line]) -> list[Report]:
    """By mode: the seconds of loading and of all its warm-up calls, and its very first call."""
    found: dict[tuple[str, str], Report] = {}
    for line in lines:
        if line["what"] == "loaded":
            found[line["engine"], line["mode"]] = {
                "engine": line["engine"], "mode": line["mode"], "load_s": line["seconds"], "calls_s": 0.0, "calls": 0,
            }  # fmt: skip
        elif line["what"] == "warm-up":
            own = found[line["engine"], line["mode"]]
            own.setdefault("first_tokens_per_second", line["tokens"] / line["seconds"])
            own.setdefault("first_batch", line["batch"])
            own["calls_s"] += line["seconds"]
            own["calls"] += 1
    return list(found.values())


def tables(report: Report) -> list[ReportTable]:
    found = [
        _calls(report["rows"]),
        _written(report["rows"]),
        _warming(report["warm_up"]),
        *gpu_report.tables(report["parts"]),
    ]
    return [table for table in found if table.rows]


def _calls(rows: Sequence[Report]) -> ReportTable:
    columns = (
        "mode",
        "at once",
        "tok/s",
        "of our plain",
        "slowest call",
        "tok/step",
        "texts equal to plain",
        "as alone",
    )
    body = []
    for row in rows:
        plain, ours = _is_plain(row), (row["engine"], row["mode"]) == (OURS, PLAIN)
        body.append(
            (
                f"{row['engine']} {row['mode']}",
                str(row["batch"]),
                f"{row['tokens_per_second']:,.0f}" + (" (cold)" if row["cold"] else ""),
                "1" if ours else _times(row["ratio"]),
                "" if ours else _number(row["least_call"], ".2f"),
                _number(row["tokens_per_step"], ".2f"),
                "" if plain else f"{row['equal']} of {row['compared']}",
                f"{row['as_alone']} of {row['known_alone']}",
            )
        )
    return ReportTable("Whole calls, prompts included", columns, body, 1)


def _written(rows: Sequence[Report]) -> ReportTable:
    columns = ("mode", "at once", "tok/s", "of our plain")
    body = [
        (
            f"{row['engine']} {row['mode']}", str(row["batch"]), f"{row['writing_tokens_per_second']:,.0f}",
            "1" if row["mode"] == PLAIN else _times(row["writing_ratio"]),
        )
        for row in rows
        if row["writing_tokens_per_second"] is not None
    ]  # fmt: skip
    return ReportTable("Of these calls from the first token to the last", columns, body, 1)


def _warming(rows: Sequence[Report]) -> ReportTable:
    columns = ("engine", "mode", "loaded in s", "warm-up calls", "s", "its very first call, tok/s", "at once")
    body = [
        (
            row["engine"], row["mode"], f"{row['load_s']:.1f}", str(row["calls"]), f"{row['calls_s']:.1f}",
            _number(row.get("first_tokens_per_second"), ",.0f"), str(row.get("first_batch", "")),
        )
        for row in rows
    ]  # fmt: skip
    return ReportTable("Loading and warm-up", columns, body, 2)


def _times(ratio: Report | None) -> str:
    return "–" if ratio is None else f"{ratio['value']:.2f}× [{ratio['least']:.2f}–{ratio['most']:.2f}]"


def _number(value: Any, shape: str) -> str:
    return "–" if value is None else format(value, shape)


def notes(report: Report) -> list[str]:
    lines = [*gpu_report.lines(report["parts"]), *report["notes"]]
    for line in report["lost"]:
        where = f", {line['batch']} at once" if "batch" in line else ""
        lines.append(f"{line['engine']} {line['mode']}{where}: {line['error']}")
    for row in report["rows"]:
        name = f"{row['engine']} {row['mode']}, {row['batch']} at once"
        if row["slower_calls"] and row["engine"] == OURS:
            lines.append(f"{name}: {row['slower_calls']} of {row['calls']} calls below {SLOWER}× plain")
        if row["cold"]:
            lines.append(f"{name}: {row['cold']} calls without warm-up: its time was up")
    return lines


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
        "engine's plain texts of the same turn; as alone: to its plain texts with the fewest at once. Slowest call: "
        "the least ratio of a group of prompts, by medians over rounds."
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
