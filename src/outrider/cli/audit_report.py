"""The reports of `outrider audit` on a terminal or in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from outrider.audit import ALPHA, Check, CompanyReport, Difference, Report, Variant

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 200  # columns of a table in a file: the names of variants fit
PASSED, FAILED = "[green]passed[/]", "[bold red]FAILED[/]"


def show(report: Report | CompanyReport) -> None:
    from rich.console import Console

    wide = None if sys.stdout.isatty() or isinstance(report, Report) else WIDE
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, width=wide)
    if isinstance(report, Report):
        _show_checks(report, console)
    else:
        _show_company(report, console)


def _show_checks(report: Report, console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table("drafter", "check", "result", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kept / drafted", justify="right")
    table.add_column("")
    for drafter in report.drafters:
        for check in drafter.checks:
            name = drafter.draft if check is drafter.checks[0] else ""
            result = PASSED if check.passed else FAILED
            table.add_row(name, check.name, result, f"{check.accepted} / {check.drafted}", _detail(check))
        table.add_section()
    console.print(table)
    for drafter in report.drafters:
        for check in drafter.checks:
            for difference in check.differences:
                console.print(f"{drafter.draft}, {check.name}: {difference.description}", markup=False)
    console.print(_summary(report), markup=False)


def _summary(report: Report) -> str:
    counts = "any flip fails"
    if report.small_margin:
        counts = f"transformers runs this model, so flips below {report.small_margin:g} logits count as near ties"
    held = f" under {report.grammar}" if report.grammar else ""
    size = f"{len(report.prompts)} prompts{held}, {report.seconds:.0f} s"
    ending = "passed" if report.passed else "FAILED"
    return f"{report.model}, dtype {report.dtype}, {size}; {counts}, law below p = {ALPHA:g}: {ending}"


def _detail(check: Check) -> str:
    if check.p_value is not None:
        text = f"{check.compared} samples, p = {check.p_value:.2g}"
    elif check.differences:
        text = f"{len(check.differences)} of the outputs part from plain decoding"
    else:
        text = f"{check.compared} tokens, all the same"
    return text if check.drafted else f"{text}; nothing was drafted, so little is proved"


def _show_company(report: CompanyReport, console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table("variant", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("runs", "texts", "tokens", "differ", "kept / drafted", "other statistics"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for _, variants in groupby(_merged(report), key=lambda runs: runs[0].draft):
        for runs in variants:
            table.add_row(*_cells(runs))
        table.add_section()
    console.print(table)
    for variant in report.variants:
        for difference in variant.differences:
            console.print(f"{variant.name}, run {variant.run}: {difference.description}", markup=False)
    for line in report.lines:
        console.print(line, markup=False)


def _merged(report: CompanyReport) -> list[list[Variant]]:
    """The runs of each variant, side by side."""
    by_name: dict[str, list[Variant]] = {}
    for variant in report.variants:
        by_name.setdefault(variant.name, []).append(variant)
    return list(by_name.values())


def _cells(runs: list[Variant]) -> Iterator[str]:
    yield runs[0].name
    yield str(len(runs))
    for name in ("texts", "tokens", "differing"):
        yield f"{sum(getattr(run, name) for run in runs):,}"
    yield f"{sum(run.accepted for run in runs):,} / {sum(run.drafted for run in runs):,}"
    yield str(sum(run.other_statistics for run in runs)) if len(runs) > 1 else "-"
    firsts = [run.first for run in runs if run.first is not None]
    failed = "" if all(run.passed for run in runs) else FAILED
    yield f"{failed} {_briefly(min(firsts, key=lambda each: each.position))}" if firsts else failed


def _briefly(first: Difference) -> str:
    return f"from token {first.position} on" + ("" if first.margin is None else f", margin {first.margin:.4g}")
