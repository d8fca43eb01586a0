"""What a pass costs by its rows on a CPU, here and in another checkout, in turns.

    git worktree add ../before REVISION
    python scripts/passes_before.py ../before --model MODEL.gguf [--rounds 9] [--context 256] [--prompt 512] \\
        [--threads 2]

Each checkout has a process of its own; one works, the other waits. A pass of n rows is a token and a chain of n - 1
nodes, all judged, after `--context` tokens; a prompt is one pass of `--prompt` tokens. Of each round the least counts.
Shown: medians over the rounds, the ratio of neighbours with its 10th and 90th percentile, and each number of rows
against one row of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

ROWS = (1, 2, 4, 8, 16)
LEAST = 0.12  # seconds that a round measures one pass at least
REST = 0.05  # seconds before each turn, in which the other checkout's threads fall asleep
PROMPT = 0  # instead of a number of rows


def loaded(name: str) -> Any:
    """The model, also in checkouts whose loading takes other options."""
    import torch

    from outrider.models import load

    try:
        from outrider.models.weights import LoadOptions as Options
    except ImportError:
        Options = load.Place  # type: ignore[attr-defined]
    return load.load(name, Options(torch.device("cpu"), None, 1 << 30)).model


def answer(args: argparse.Namespace) -> None:
    """The other end of a pipe: numbers of rows come in, seconds go out."""
    import torch

    from outrider.core.draft import Draft
    from outrider.models.base import Feed

    torch.set_num_threads(args.threads)
    model = loaded(args.model)
    tokens = [100 + i * i % 5000 for i in range(max(args.context, args.prompt) + max(ROWS))]
    turns = iter(range(1, 1 << 30))

    def prompt() -> None:
        model.forward([Feed(1, [next(turns), *tokens[1 : args.prompt]])])  # no prompt begins as one before
        model.free(1)

    def rows_of(count: int) -> Callable[[], None]:
        draft = Draft.chain(tokens[1:count])

        def one() -> None:
            model.forward([Feed(0, tokens[:1], draft)])
            model.crop(0, args.context)

        return one

    model.forward([Feed(0, tokens[: args.context])])
    for line in sys.stdin:
        count = int(line)
        print(json.dumps(least(prompt if count == PROMPT else rows_of(count), 1 if count == PROMPT else 3)), flush=True)


def least(run: Callable[[], None], times: int) -> float:
    seconds: list[float] = []
    while sum(seconds) < LEAST or len(seconds) < times:
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


class Checkout:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        options = ("--model", args.model, "--context", args.context, "--prompt", args.prompt, "--threads", args.threads)
        command = [sys.executable, __file__, str(folder), "--answer", *map(str, options)]
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def seconds(self, rows: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        time.sleep(REST)
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(args)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    checkouts = [Checkout(folder, args) for folder in (args.before, Path(__file__).parents[1])]
    kinds = (*ROWS, PROMPT)
    for checkout in checkouts:
        for rows in kinds:
            checkout.seconds(rows)  # what runs for the first time
    found: dict[int, list[tuple[float, ...]]] = {rows: [] for rows in kinds}
    for turn in range(args.rounds):
        for rows in kinds:
            order = checkouts if turn % 2 else checkouts[::-1]
            taken = {checkout: checkout.seconds(rows) for checkout in order}
            found[rows].append(tuple(taken[checkout] for checkout in checkouts))
    for checkout in checkouts:
        checkout.close()
    show(found, args.prompt)


def show(found: dict[int, list[tuple[float, ...]]], prompt: int) -> None:
    for rows, rounds in found.items():
        before, now = (1e3 * statistics.median(each) for each in zip(*rounds, strict=True))
        ratios = sorted(one / other for one, other in rounds)
        low, middle, high = (ratios[int(share * (len(ratios) - 1) + 0.5)] for share in (0.1, 0.5, 0.9))
        name = f"prompt of {prompt}" if rows == PROMPT else f"{rows} rows"
        text = f"{name:>14}: {before:8.2f} -> {now:8.2f} ms, {middle:.2f}x [{low:.2f}-{high:.2f}] as fast"
        print(text + f"; of 1 row {of_one(found, rows, 0):.2f} -> {of_one(found, rows, 1):.2f}", flush=True)


def of_one(found: dict[int, Seq[Seq[float]]], rows: int, which: int) -> float:
    return statistics.median(a[which] / b[which] for a, b in zip(found[rows], found[1], strict=True))


if __name__ == "__main__":
    main()
