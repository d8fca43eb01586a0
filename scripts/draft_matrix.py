"""`outrider bench matrix` for a machine with torch and transformers only: no typer, rich, pydantic, fastapi or gguf.

PYTHONPATH=src python scripts/draft_matrix.py --model FOLDER --device cuda --batch 1,4,16,64 --prompts P.jsonl -o h200
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from outrider.bench import matrix, matrix_report as reports
from outrider.core.errors import OutriderError

WHERE = {"device": "auto", "dtype": "auto", "threads": 0, "cache_memory": 0.0}  # settings of every engine


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", "-m", action="append", required=True, help="repeatable")
    made.add_argument("--draft", "-d", action="append", default=[], help="repeatable; default: all that there are")
    made.add_argument("--draft-model", help="alone, and as a part of auto")
    made.add_argument("--batch", default="1,4,16", help="requests at once")
    made.add_argument("--prompts", help="a .jsonl file in Spec-Bench form; default: our own")
    made.add_argument("--kind", action="append", default=[], help="repeatable; default: all")
    for name, usual in (("limit", 4), ("rounds", 2), ("max_tokens", 128), ("seed", 0)):
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=usual)
    for name, value in WHERE.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    made.add_argument("--control", action="store_true", help="measure plain decoding twice")
    made.add_argument("--output", "-o", type=Path, required=True, help="a run that was stopped goes on in it")
    return made


def planned(given: argparse.Namespace) -> matrix.MatrixPlan:
    counts = {name: getattr(given, name) for name in ("limit", "rounds", "max_tokens", "seed")}
    return matrix.MatrixPlan(
        models=tuple(given.model),
        drafts=tuple(given.draft),
        draft_model=given.draft_model,
        batches=matrix.batch_sizes(given.batch),
        prompts=matrix.chosen_prompts(given.prompts, given.kind),
        where={name: getattr(given, name) for name in WHERE},
        output=given.output,
        control=given.control,
        **counts,
    )


def show(what: str, done: int, total: int) -> None:
    print(f"{done}/{total} {what}" if total else what, file=sys.stderr, flush=True)


def main() -> int:
    try:
        plan = planned(parser().parse_args())
        outcome = matrix.run(plan, show)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = reports.assemble(plan, outcome, shlex.join(["scripts/draft_matrix.py", *sys.argv[1:]]))
    for line in reports.write(report, plan.output):
        print(line, file=sys.stderr)
    print(reports.markdown(report))
    return 130 if outcome.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
