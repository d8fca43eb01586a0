"""The report of `bench serve`: throughput against plain decoding, what clients wait for, whether texts are equal."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench import machine, report as reports
from outrider.bench.ratios import ALL, differing, ratio
from outrider.bench.report import Report, ReportTable
from outrider.bench.serve import PLAIN, LoadPlan, LoadResult

Rows = Sequence[dict[str, Any]]


def assemble(plan: LoadPlan, outcome: LoadResult, command: str) -> Report:
    waves, runs = [asdict(wave) for wave in outcome.waves], [asdict(run) for run in outcome.runs]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine.describe(),
        "settings": {
            "model": reports.name_of(plan.model),
            "server": plan.url or "of our own",
            "prompts": len(plan.prompts),
            "streams": plan.streams,
            "rounds": plan.rounds,
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "threads": plan.threads or machine.physical_cores(),
            "seed": plan.seed,
            "ignore_eos": plan.ignore_eos,
            "warm_up": plan.warm_up,
            "seconds": plan.seconds,
            **plan.own,
        },
        "interrupted": outcome.interrupted,
        "cut": outcome.cut,
        "summary": summarise(waves, runs, plan.modes),
        "library": sorted(
            _library(waves, [asdict(wave) for wave in outcome.library]),
            key=lambda row: (row["streams"], plan.modes.index(row["mode"])),
        ),
        "waves": waves,
        "runs": [_compact(run) for run in runs],
    }


def summarise(waves: Rows, runs: Rows, modes: Sequence[str]) -> dict[str, Any]:
    alone = _alone(runs)
    levels = list(dict.fromkeys(wave["streams"] for wave in waves))
    rows = [_row(_at(waves, level), _at(runs, level), mode, alone) for level in levels for mode in modes]
    least = _at(runs, min(levels)) if levels else []
    kinds = [*dict.fromkeys(run["kind"] for run in least), ALL]
    by_kind = [_by_kind(least, mode, kind) for mode in modes if mode != PLAIN for kind in kinds]
    return {"levels": [row for row in rows if row is not None], "by_kind": by_kind}


def _library(served: Rows, library: Rows) -> list[dict[str, Any]]:
    """By streams and mode: tokens a second without a server, and which share of them the server keeps in a round."""
    rates = {_wave_key(wave): wave["tokens"] / wave["seconds"] for wave in library}
    shares: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for wave in served:
        key = _wave_key(wave)
        if key in rates and not wave["errors"]:
            with_server = wave["tokens"] / wave["seconds"]
            shares.setdefault(key[:2], []).append((rates[key], with_server / rates[key]))
    found = []
    for (streams, mode), pairs in shares.items():
        kept = [share for _, share in pairs]
        found.append(
            {
                "streams": streams,
                "mode": mode,
                "tokens_per_second": statistics.median(rate for rate, _ in pairs),
                "share": {"value": statistics.median(kept), "least": min(kept), "most": max(kept)},
            }
        )
    return found


def _wave_key(wave: Mapping[str, Any]) -> tuple[int, str, int]:
    return wave["streams"], wave["mode"], wave["round"]


def _alone(runs: Rows) -> dict[str, str]:
    """What each prompt's answer is: the first plain one, with as few others beside it as there were."""
    texts: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: (run["streams"], run["round"])):
        if run["mode"] == PLAIN and not run["error"]:
            texts.setdefault(run["question"], run["text"])
    return texts


def _row(waves: Rows, runs: Rows, mode: str, alone: Mapping[str, str]) -> dict[str, Any] | None:
    own, plain = _of(runs, mode), _of(runs, PLAIN)
    if not own:
        return None
    good = [run for run in own if not run["error"]]
    differ, compared = (0, 0) if mode == PLAIN else differing(_keyed(own), _keyed(plain))
    rates = [wave["tokens"] / wave["seconds"] for wave in _of(waves, mode) if wave["tokens"]]
    return {
        "streams": own[0]["streams"],
        "mode": mode,
        "plain": mode == PLAIN,
        "tokens_per_second": math.exp(np.mean(np.log(rates))) if rates else None,
        "ratio": None if mode == PLAIN else ratio(_timed(_of(waves, mode)), _timed(_of(waves, PLAIN))),
        "differ": differ,
        "compared": compared,
        "void": differ > 0,
        "first_ms": _quantiles([run["first_s"] for run in good]),
        "token_ms": _quantiles([run["decode_s"] / (run["tokens"] - 1) for run in good if run["tokens"] > 1]),
        "pause_ms": _quantiles([pause for run in good for pause in run["pauses"]]),
        "as_alone": sum(run["text"] == alone.get(run["question"]) for run in good),
        "answers": len(own),
        "errors": len(own) - len(good),
        "acceptance_rate": _share(good, "accepted", "drafted"),
        "tokens_per_step": _share(good, "tokens", "steps"),
    }


def _by_kind(runs: Rows, mode: str, kind: str) -> dict[str, Any]:
    of_kind = [run for run in runs if kind in (ALL, run["kind"])]
    own, plain = _keyed(_of(of_kind, mode)), _keyed(_of(of_kind, PLAIN))
    differ, compared = differing(own, plain)
    found = ratio(own, plain)
    return {"mode": mode, "kind": kind, "plain": False, "ratio": found, "void": differ > 0} | {
        "differ": differ,
        "compared": compared,
        "acceptance_rate": _share(own, "accepted", "drafted"),
        "tokens_per_step": _share(own, "tokens", "steps"),
    }


def tables(report: Report) -> list[ReportTable]:
    """Throughput, waiting, and by kind with the fewest streams."""
    rows, least = report["summary"]["levels"], min(report["settings"]["streams"])
    by_kind = f"Decoding speed of a stream by kind, {least} at once"
    found = [
        _throughput(rows),
        _beside_library(report["library"]),
        _waiting(rows),
        _kinds(by_kind, report["summary"]["by_kind"]),
    ]
    return [table for table in found if table.rows]


def notes(report: Report) -> list[str]:
    lines = ["Interrupted: this is a partial report."] if report["interrupted"] else []
    lines += [report["cut"]] if report["cut"] else []
    for row in report["summary"]["levels"]:
        where = f"{row['streams']} at once, {row['mode']}"
        if row["errors"]:
            lines.append(f"{where}: {row['errors']} of {row['answers']} requests failed: {_first_error(report, row)}")
        if row["as_alone"] < row["answers"] - row["errors"]:
            other = row["answers"] - row["errors"] - row["as_alone"]
            lines.append(f"{where}: {other} of {row['answers']} texts are not those of the same prompt run alone.")
    return lines


def write(report: Report, folder: Path) -> None:
    """report.json and report.md."""
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")


def markdown(report: Report) -> str:
    parts = [f"# {report['settings']['model']}: outrider bench serve", _facts(report)]
    parts += [reports.markdown_table(table) for table in tables(report)]
    parts += ["\n".join(f"- {note}" for note in notes(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(report: Report) -> None:
    reports.show_tables(tables(report), notes(report))


def _facts(report: Report) -> str:
    settings, where = report["settings"], report["machine"]
    drawn = (
        "greedy"
        if settings["temperature"] == 0
        else f"temperature {settings['temperature']:g} with a seed for each prompt"
    )
    lines = [
        f"`{report['command']}`",
        f"{report['created']}, {where['cpu']}, {where['cores']} cores, {settings['threads']} threads",
        f"{settings['prompts']} prompts, {settings['rounds']} rounds, {drawn}, up to {settings['max_tokens']} tokens",
        f"outrider {where['outrider']}" + (f"; commit {where['commit']}" if where["commit"] else ""),
    ]
    rule = (
        "Every round asks all prompts once in each mode, in random order of modes; the same prompts in the same order. "
        "tok/s: all tokens of a round by its time. Against plain: geometric mean over rounds with its 95 % bootstrap "
        "interval; void where a text differs from plain decoding's. Waiting, as a client sees it: until the first "
        "piece, then per token, then the pauses between pieces. Without a server: the same prompts in calls of as many "
        "at once, in turns with the server; its share is the median round, the least and the most in brackets."
    )
    return "  \n".join(lines) + "\n\n" + rule


def _throughput(rows: Rows) -> ReportTable:
    columns = ("at once", "mode", "tok/s", "against plain", "kept", "tok/step", "text as alone")
    body = [
        (
            str(row["streams"]),
            row["mode"],
            reports.speed(row),
            reports.speed_up(row),
            *reports.drafting(row),
            f"{row['as_alone']} of {row['answers']}",
        )
        for row in rows
    ]
    return ReportTable("Throughput", columns, body, 2)


def _beside_library(rows: Rows) -> ReportTable:
    columns = ("at once", "mode", "tok/s without a server", "share of it that the server keeps")
    body = [
        (
            str(row["streams"]),
            row["mode"],
            f"{row['tokens_per_second']:,.1f}",
            f"{row['share']['value']:.2f} [{row['share']['least']:.2f}–{row['share']['most']:.2f}]",
        )
        for row in rows
    ]
    return ReportTable("The same calls without a server", columns, body, 2)


def _waiting(rows: Rows) -> ReportTable:
    columns = ("at once", "mode", "first: median", "95 %", "token: median", "95 %", "pause: median", "99 %")
    body = [
        (
            str(row["streams"]),
            row["mode"],
            *(_ms(row[what][at]) for what, at in _SHOWN),
        )
        for row in rows
    ]
    return ReportTable("Waiting, in milliseconds", columns, body, 2)


_SHOWN = (
    ("first_ms", "p50"),
    ("first_ms", "p95"),
    ("token_ms", "p50"),
    ("token_ms", "p95"),
    ("pause_ms", "p50"),
    ("pause_ms", "p99"),
)


def _kinds(title: str, rows: Rows) -> ReportTable:
    body = [(row["mode"], row["kind"], reports.speed_up(row), *reports.drafting(row)) for row in rows]
    return ReportTable(title, ("mode", "kind", "against plain", "kept", "tok/step"), body, 2)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return dict.fromkeys(("p50", "p95", "p99"))
    values = np.quantile(np.asarray(seconds) * 1000, (0.5, 0.95, 0.99))
    return {name: round(float(value), 3) for name, value in zip(("p50", "p95", "p99"), values, strict=True)}


def _timed(waves: Rows) -> list[dict[str, Any]]:
    """Waves as `ratios` reads them: rounds are what is drawn anew for the interval."""
    return [
        {"prompt": str(w["round"]), "round": w["round"], "tokens": w["tokens"], "first": 0, "decode_s": w["seconds"]}
        | {"error": "requests failed" if w["errors"] else ""}
        for w in waves
    ]


def _keyed(runs: Rows) -> list[dict[str, Any]]:
    """Runs as `ratios` reads them: text is compared, and the first chunk counts as one token."""
    return [{**run, "first": 1, "ids": None} for run in runs]


def _compact(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run for the report: its pauses in three figures."""
    return {**run, "pauses": _quantiles(run["pauses"])}


def _first_error(report: Report, row: Mapping[str, Any]) -> str:
    found = (run["error"] for run in report["runs"] if run["error"] and _same(run, row))
    return next(found, "")


def _same(run: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return bool(run["streams"] == row["streams"] and run["mode"] == row["mode"])


def _at(rows: Rows, streams: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["streams"] == streams]


def _of(rows: Rows, mode: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["mode"] == mode]


def _share(runs: Rows, part: str, whole: str) -> float | None:
    total = sum(run["stats"].get(whole, 0) for run in runs)
    return sum(run["stats"].get(part, 0) for run in runs) / total if total else None
