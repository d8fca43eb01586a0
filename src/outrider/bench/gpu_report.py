"""What the GPU benchmark found, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

Found = dict[str, Any]


def markdown(found: Found) -> str:
    """The report; gpu.json has every number."""
    card = found["card"]
    lines = [
        f"# {card['name']}: everything from one command",
        "",
        f"`{found['command']}`, commit {found['versions']['commit']}, torch {found['versions']['torch']}, "
        f"Python {found['versions']['python']}.  ",
        f"Copy {card['copy_tb_s']:.2f} TB/s, bfloat16 products {card['matrix_tflop_s']:.0f} TFLOP/s, measured in the "
        "same process. All numbers: gpu.json.",
    ]
    if "8B shape" in found:
        lines += _big(found["8B shape"])
    if "small" in found:
        lines += _small(found)
    return "\n".join([*lines, ""])


def _big(found: Found) -> list[str]:
    oracle = found["oracle"]
    lines = ["", "## 8B shape, random weights, bfloat16", "", *_passes(found["passes"]), ""]
    lines += [f"Oracle drafts, acceptance 0.8, length 5 ({oracle['expected']:.2f} tokens per pass expected):", ""]
    rows = [
        [name, one["speed_up"], one["oracle"]["tokens_per_pass"], one["ms_of_a_step"], one["host_ms"], one["same"]]
        for name, one in oracle.items()
        if name.startswith("batch")
    ]
    return lines + _table(["", "speed-up", "tokens per pass", "ms of a step", "host ms", "same tokens"], rows)


def _small(found: Found) -> list[str]:
    ready, one, bulk = found["ready"], found["one stream"], found["bulk"]
    lines = ["", "## The small model, bfloat16", ""]
    lines += [f"Load {ready['load_s']:.1f} s, first token after {ready['first_token_s']:.1f} s.", ""]
    lines += [*_passes(found["small"]["passes"]), ""]
    lines += [
        f"One stream: plain {one['plain']:.0f} tokens/s, ngram {one['ngram']:.0f} ({one['ratio']:.2f}x); "
        f"{one['same_texts'][0]} of {one['same_texts'][1]} texts the same.",
        "",
    ]
    kinds = [
        [kind, each["plain"], each["ngram"], each["ratio"], f"{min(each['prompts']):.2f}-{max(each['prompts']):.2f}"]
        for kind, each in one["kinds"].items()
    ]
    lines += [*_table(["kind", "plain", "ngram", "ratio", "of its prompts"], kinds), ""]
    batches = [
        [b["batch"], *_speeds(b["none"]), *_speeds(b["ngram"]), f"{b['same']} of {b['batch']}"]
        for b in found["batches"]
    ]
    heads = ["batch", "plain tokens/s", "ms between", "ngram tokens/s", "ms between", "same"]
    lines += [*_table(heads, batches), ""]
    lines += [f"Bulk, {bulk['batch']} at once, sampled: {bulk['tokens_per_second']:,.0f} tokens/s."]
    if "transformers" in found:
        lines += [
            "",
            *_table(["transformers, one stream", "tokens/s"], [[*each] for each in found["transformers"].items()]),
        ]
    return lines


def _passes(passes: Seq[Found]) -> list[str]:
    rows = [[p["rows"], p["ms"], p["wall_ms"], p["share"], p["ratio"]] for p in passes]
    return _table(["rows", "device ms", "wall ms", "of the copy's bandwidth", "ratio"], rows)


def _speeds(found: Found) -> list[float]:
    return [found["tokens_per_second"], found["ms_between_tokens"]]


def _table(heads: Seq[str], rows: Seq[Seq[Any]]) -> list[str]:
    shown = [[_cell(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (list(heads), ["--:"] * len(heads), *shown)]


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"
