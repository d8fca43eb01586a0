"""What heads bring beside adapters: tokens per pass and speed-up with the model's head, and with one for each adapter.

PYTHONPATH=src python scripts/adapter_heads.py --model MODEL --adapter haiku=DIR --head haiku=HEAD_DIR \
    --prompts spec_bench.jsonl --each 2 > heads.jsonl

Rows: the model as it is with its own head; with each adapter and that head; with each adapter and the `--head` of its
name. Prompts: `--each` of every kind of a file in Spec-Bench form (default: our own), and the questions of
scripts/adapter_styles.py. `kept`: all prompts in one batch, every step drafted, greedy; `share` is tokens per pass over
those of the model without an adapter on the same prompts. `speed`: one prompt at a time, as the policy decides, with
drafts and without in turns; the ratio of each round. JSON lines, and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import adapter_styles

from outrider import LLM, SamplingParams
from outrider.bench import workloads
from outrider.core.stats import Stats

Chats = list[list[dict[str, str]]]
KEPT = ("adapter", "head", "prompts", "tokens_per_pass", "share", "acceptance", "ratio", "low", "high", "differ")


@dataclass(frozen=True)
class Row:
    adapter: str  # "": none
    head: str  # a folder; "": the model's own

    @property
    def named(self) -> dict[str, str]:
        return {"adapter": self.adapter or "none", "head": "its own" if self.head else "the model's"}

    def draft(self, way: str) -> str:
        return f"eagle:head={self.head},{way}" if self.head else f"eagle:{way}"


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def asked(path: Path | None, each: int, longest: int) -> dict[str, Chats]:
    taken: Counter[str] = Counter()
    found = []
    for prompt in workloads.read_jsonl(path) if path else workloads.built_in():
        if len(prompt.text) <= longest and taken[prompt.kind] < each:
            taken[prompt.kind] += 1
            found.append(prompt.text)
    sets = {"general": found, "style": adapter_styles.CHECKS}
    return {name: [[{"role": "user", "content": text}] for text in texts] for name, texts in sets.items()}


def kept(llm: LLM, row: Row, chats: Chats, params: SamplingParams, way: str) -> tuple[Stats, list[list[int]]]:
    results = llm.chat(chats, params, draft=row.draft(way), adapter=row.adapter, progress=False)
    return reduce(add, (result.stats for result in results)), [list(result.token_ids) for result in results]


def tokens_per_second(llm: LLM, row: Row, chats: Chats, params: SamplingParams, draft: str) -> float:
    begin, tokens = time.perf_counter(), 0
    for chat in chats:
        tokens += len(llm.chat(chat, params, draft=draft, adapter=row.adapter, progress=False).token_ids)
    return tokens / (time.perf_counter() - begin)


def speeds(llm: LLM, row: Row, chats: Chats, params: SamplingParams, given: argparse.Namespace) -> dict[str, Any]:
    ways = ("none", row.draft(given.way))
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(given.rounds + 1):
        for way in ways if number % 2 else ways[::-1]:
            speed = tokens_per_second(llm, row, chats, params, way)
            if number:  # the first round warms up
                found[way].append(speed)
    plain, drafted = (found[way] for way in ways)
    ratios = sorted(two / one for one, two in zip(plain, drafted, strict=True))
    speeds = {"plain": statistics.median(plain), "drafted": statistics.median(drafted)}
    return {**speeds, "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    adapters, heads = (dict(each.split("=", 1) for each in some) for some in (given.adapter, given.head))
    own = [Row(name, heads[name]) for name in adapters if name in heads]
    rows = [Row("", ""), *(Row(name, "") for name in adapters), *own]
    where = {"device": given.device, "dtype": given.dtype, "cache_memory": given.cache_memory, "threads": given.threads}
    params, sets = SamplingParams(max_tokens=given.tokens), asked(given.prompts, given.each, given.longest)
    table: dict[tuple[Row, str], dict[str, Any]] = {}
    with LLM(given.model, draft="none", adapters=adapters, pace=False, **where) as llm:
        for row in rows:
            for name, chats in sets.items():
                plain = llm.chat(chats, params, draft="none", adapter=row.adapter, progress=False)
                stats, texts = kept(llm, row, chats, params, given.way)
                differ = sum(list(one.token_ids) != two for one, two in zip(plain, texts, strict=True))
                base = table[rows[0], name]["tokens_per_pass"] if table.get((rows[0], name)) else stats.tokens_per_pass
                table[row, name] = {
                    **row.named, "prompts": name, "texts": len(texts), "tokens": stats.tokens, "differ": differ,
                    "tokens_per_pass": stats.tokens_per_pass, "share": stats.tokens_per_pass / base,
                    "acceptance": stats.acceptance_rate,
                }  # fmt: skip
                say("kept", **table[row, name])
    if given.rounds:
        with LLM(given.model, draft="none", adapters=adapters, **where) as llm:
            for row, name in table:
                table[row, name] |= speeds(llm, row, sets[name], params, given)
                say("speed", **table[row, name])
    return list(table.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--head", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--each", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--longest", type=int, default=4000, help="characters: longer prompts are left out")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--way", default="tree=16", help="options of the drafter eagle")
    parser.add_argument("--rounds", type=int, default=3, help="of the speeds; 0: none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-memory", type=float, default=4.0)
    given = parser.parse_args()
    begin = time.perf_counter()
    table = measure(given)
    print("| " + " | ".join(KEPT) + " |\n" + "|---" * 3 + "|---:" * (len(KEPT) - 3) + "|")
    for row in table:
        values = [row.get(name, "") for name in KEPT]
        print("| " + " | ".join(f"{each:.2f}" if isinstance(each, float) else str(each) for each in values) + " |")
    say("end", seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
