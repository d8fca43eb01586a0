"""`outrider audit --company` for a machine with torch and transformers only: no typer, rich, pydantic, fastapi or gguf.

PYTHONPATH=src python scripts/audit_company.py --model FOLDER --device cuda --dtype bfloat16 --prompts half.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from outrider import LLM
from outrider.audit import CompanyPlan, ReferenceStore, audit_company
from outrider.bench import machine, workloads
from outrider.core.errors import OutriderError
from outrider.prompts import NamedPrompt

USUAL = CompanyPlan()
WHERE = {"device": "auto", "dtype": "auto", "cache_memory": 0.0, "threads": 0}  # settings of the engine


def numbers(kind: type):
    return lambda text: tuple(kind(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True)
    made.add_argument("--draft", "-d", action="append", default=[], help="repeatable; default: all without arguments")
    made.add_argument("--prompts", help="a .jsonl file in Spec-Bench form; default: our own 32 prompts")
    made.add_argument("--limit", type=int, default=0, help="at most this many prompts, spread over all of them")
    made.add_argument("--raw", action="store_true", help="without chat template")
    made.add_argument("--references", type=Path, help="a file of reference texts that other runs on this model share")
    made.add_argument("--output", type=Path, help="write the report as JSON")
    for name, usual in WHERE.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(usual), default=usual)
    for each in fields(CompanyPlan):
        usual = getattr(USUAL, each.name)
        kind = numbers(type(usual[0])) if isinstance(usual, tuple) else int
        made.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=usual)
    return made


def chosen(path: str | None, limit: int) -> list[NamedPrompt]:
    found = workloads.built_in() if path is None else workloads.read_jsonl(path)
    count = min(len(found), limit or len(found))
    picked = [found[place * len(found) // count] for place in range(count)]
    return [NamedPrompt(prompt.id, prompt.kind, prompt.text) for prompt in picked]


def main() -> int:
    given = parser().parse_args()
    plan = CompanyPlan(**{each.name: getattr(given, each.name) for each in fields(CompanyPlan)})
    where = {name: getattr(given, name) for name in WHERE}
    with LLM(given.model, draft="none", pace=False, **where) as llm:
        report = audit_company(
            llm,
            given.draft,
            chosen(given.prompts, given.limit),
            plan,
            raw=given.raw,
            found=lambda variant: print(variant.line, flush=True),
            store=ReferenceStore(given.references),
        )
    if given.output is not None:
        said = {**report.as_dict(), "machine": machine.describe()}
        given.output.write_text(json.dumps(said, ensure_ascii=False) + "\n", encoding="utf-8")
    for line in report.lines:
        print(line)
    return 0 if report.passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OutriderError as error:
        sys.exit(f"error: {error}")
