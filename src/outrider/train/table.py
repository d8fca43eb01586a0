"""Tokens per pass by category, for each way of drafting: as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.stats import Stats
from outrider.train.files import write_text
from outrider.train.measure import total

NAME = "tokens_per_pass"
ALL = "all"
Measured = Mapping[str, Mapping[str, Stats]]  # way of drafting -> kind of question -> what was kept


def figures(measured: Measured) -> dict[str, Any]:
    """way of drafting -> kind of question -> figures, all kinds together last."""
    return {
        way: {kind: _figure(stats) for kind, stats in {**by_kind, ALL: total(dict(by_kind))}.items()}
        for way, by_kind in measured.items()
    }


def write(measured: Measured, out: Path, facts: Mapping[str, Any]) -> None:
    said = {**facts, "tokens_per_pass": figures(measured)}
    write_text(out / f"{NAME}.json", json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    write_text(out / f"{NAME}.md", markdown(measured, facts))


def markdown(measured: Measured, facts: Mapping[str, Any]) -> str:
    (head, *rows), told = cells(measured), ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:], "", told]) + "\n"


def text(measured: Measured) -> str:
    """For a terminal."""
    return "\n".join(f"{row[0]:24}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in cells(measured))


def cells(measured: Measured) -> list[list[str]]:
    shown = figures(measured)
    kinds = list(next(iter(shown.values())))
    rows = [[kind, *(f"{shown[way][kind]['tokens_per_pass']:.2f}" for way in shown)] for kind in kinds]
    whole = ["all, prompts' passes too", *(f"{shown[way][ALL]['with_prompts']:.2f}" for way in shown)]
    return [["tokens per pass", *shown], *rows, whole]


def _figure(stats: Stats) -> dict[str, Any]:
    return {
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "with_prompts": round(stats.tokens_per_step, 3),
        "tokens": stats.tokens,
        "passes": stats.steps,
        "kept_by_depth": {str(depth): counts for depth, counts in stats.by_depth.items()},
    }
