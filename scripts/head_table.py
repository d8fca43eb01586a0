"""Tokens per pass of heads: chains and trees, by kind of prompt, greedy and at temperature 1 under both rules.

    PYTHONPATH=src python scripts/head_table.py --model MODEL --head eagle=DIR --head block=DIR \
        [--prompts spec_bench.jsonl] [--tokens 128] [--limit N] [--sampled-limit N] [--out DIR] [--device cuda]

`--head eagle=` is the head that is shipped for the model. `--limit` takes that many prompts of each kind, and
`--sampled-limit` does at temperature 1. The table is printed as it grows, and written to head_table.json and
head_table.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from outrider import build
from outrider.bench import machine, workloads
from outrider.core.errors import OutriderError
from outrider.models.load import load
from outrider.settings import Settings
from outrider.train import results, run
from outrider.train.data import writer
from outrider.train.data.conversations import ChatFormat

CHAINS, TREES = (5, 7), (16, 32, 64)
# name, temperature, rule, whether trees are measured: under rejection drawn drafts are chains
LAWS = (("greedy", 0.0, "coupled", True), ("coupled", 1.0, "coupled", True), ("rejection", 1.0, "rejection", False))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", action="append", required=True, metavar="KIND=DIR")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--sampled-limit", type=int, default=4)
    parser.add_argument("--laws", default="greedy,coupled,rejection")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def some(prompts: list[workloads.BenchPrompt], limit: int) -> list[tuple[str, str]]:
    """At most `limit` of each kind; 0: all."""
    taken: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for prompt in prompts:
        if not limit or len(taken[prompt.kind]) < limit:
            taken[prompt.kind].append((prompt.kind, prompt.text))
    return [each for kind in taken.values() for each in kind]


def specs(kind: str, folder: str, trees: bool) -> dict[str, str]:
    head = f"head={folder}," if folder else ""
    found = {f"chain {length}": f"{kind}:{head}length={length}" for length in CHAINS}
    return found | ({f"tree {nodes}": f"{kind}:{head}tree={nodes}" for nodes in TREES} if trees else {})


def main() -> None:
    asked = parsed()
    where = run.dense(build.load_options(Settings(model=asked.model, device=asked.device)))
    target = load(asked.model, where)
    chunk = writer.PROMPT_CHUNK[where.device.type]
    evaluator = results.Evaluator(target, ChatFormat.of(target.tokenizer), where, chunk, Path(asked.model).name)
    prompts = workloads.read_jsonl(asked.prompts) if asked.prompts else workloads.built_in()
    measured: dict[str, dict[str, Any]] = {}
    for law, temperature, rule, trees in (each for each in LAWS if each[0] in asked.laws.split(",")):
        chosen = some(prompts, asked.limit if law == "greedy" else asked.sampled_limit)
        for head in asked.head:
            kind, _, folder = head.partition("=")
            for way, spec in specs(kind, folder, trees).items():
                begin = time.monotonic()
                name = f"{kind} {law} {way}"
                measured[name] = evaluator.measure(spec, chosen, asked.tokens, temperature, rule)
                kept = results.total(measured[name]).tokens_per_pass
                print(
                    f"{name}: {kept:.2f} tokens per pass, {len(chosen)} prompts, {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
                write(asked, measured)


def write(asked: argparse.Namespace, measured: dict[str, dict[str, Any]]) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    facts = {"model": Path(asked.model).name, "new tokens": asked.tokens}
    content = {**facts, "machine": machine.describe(), "tokens_per_pass": results.figures(measured)}
    (asked.out / "head_table.json").write_text(json.dumps(content, indent=1) + "\n")
    (asked.out / "head_table.md").write_text(results.markdown(measured, facts))


if __name__ == "__main__":
    try:
        main()
    except OutriderError as error:
        sys.exit(f"head_table: {error}")
