"""What was found of a GPU beside batches, as tables."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outrider.bench.report import ReportTable

Found = dict[str, Any]


def tables(found: Found) -> list[ReportTable]:
    """One for each part that was measured."""
    made = []
    if "passes" in found:
        made.append(_passes("Passes of the model by their rows", found["passes"]))
    shape = found.get("8B shape", {})
    if "plain" in shape:
        made.append(_plain(shape["plain"]))
    if "passes" in shape:
        made.append(_passes("Passes of an 8B shape, random weights, bfloat16", shape["passes"]))
    if "oracle" in shape:
        made.append(_oracle(shape["oracle"]))
    return made


def lines(found: Found) -> list[str]:
    """What needs no table."""
    said = []
    if "card" in found:
        card = found["card"]
        said.append(
            f"{card['name']}: copy {card['copy_tb_s']:.2f} TB/s, bfloat16 products {card['matrix_tflop_s']:.0f} TFLOP/s"
        )
    if "ready" in found:
        said.append(f"load {found['ready']['load_s']:.1f} s, first token after {found['ready']['first_token_s']:.1f} s")
    if "bulk" in found:
        bulk = found["bulk"]
        said.append(f"bulk, {bulk['batch']} at once, sampled: {bulk['tokens_per_second']:,.0f} tokens/s")
    return said


def _passes(title: str, passes: Seq[Found]) -> ReportTable:
    columns = ("rows", "device ms", "wall ms", "of the copy's bandwidth", "ratio")
    body = [_cells(p["rows"], p["ms"], p["wall_ms"], p["share"], p["ratio"]) for p in passes]
    return ReportTable(title, columns, body, 0)


def _plain(steps: Seq[Found]) -> ReportTable:
    columns = ("at once", "device ms", "of the copy's bandwidth", "ms of a step", "host ms", "tok/s")
    body = [
        _cells(s["batch"], s["device_ms"], s["share"], s["ms_of_a_step"], s["host_ms"], s["tokens_per_second"])
        for s in steps
    ]
    title = "Plain steps of an 8B shape: weights, keys and values read by a pass, and what a step takes beside it"
    return ReportTable(title, columns, body, 0)


def _oracle(oracle: Found) -> ReportTable:
    columns = (
        "",
        "plain tok/s",
        "oracle tok/s",
        "speed-up",
        "tokens per pass",
        "ms of a step",
        "host ms",
        "same tokens",
    )
    body = [
        _cells(
            name,
            o["plain"]["tokens_per_second"],
            o["oracle"]["tokens_per_second"],
            o["speed_up"],
            o["oracle"]["tokens_per_pass"],
            o["ms_of_a_step"],
            o["host_ms"],
            o["same"],
        )
        for name, o in oracle.items()
        if name.startswith("batch")
    ]
    title = f"Oracle drafts, acceptance 0.8, length 5 ({oracle['expected']:.2f} tokens per pass expected)"
    return ReportTable(title, columns, body, 1)


def _cells(*values: Any) -> tuple[str, ...]:
    return tuple(_cell(value) for value in values)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"
