"""What shared prefixes save on a CPU: this checkout against another one, in turns, each in a process of its own.

    python scripts/prefix_speed.py --before OTHER_CHECKOUT [--model smollm2-135m] [--rounds 3] [--chats 16]

Measured with one thread and without drafts, in seconds of processor time, which with one thread are those of a quiet
machine's clock whatever else runs: to the first token of a first and a second turn with 4,000 tokens of history, until
all of some chats at once over one system prompt of 3,000 tokens have their first token, and of a decoding step with a
short and a long context. It also checks that both checkouts write the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

HISTORY, SYSTEM, NEW = 4000, 3000, 20  # tokens: of the first turn, of the system prompt, of each new message
STEPS = 200  # tokens written to measure a decoding step


def tokens(count: int, seed: int) -> list[int]:
    """Unlike text, but a prompt costs the same whatever it says."""
    return [1000 + (seed * 7919 + i * i * 31 + i) % 40000 for i in range(count)]


def measure(model: str, chats: int, seed: int) -> dict[str, Any]:
    from outrider import LLM, SamplingParams

    llm, found, texts = LLM(model, draft="none", threads=1, cache_memory=2.0), {}, []

    def timed(name: str, prompts: Any, count: int = 1) -> Any:
        begin = time.process_time()
        got = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True), progress=False)
        found[name] = time.process_time() - begin
        texts.append([each.token_ids for each in got] if isinstance(got, list) else got.token_ids)
        return got

    timed("warm up", tokens(600, seed), 8)
    history = tokens(HISTORY, seed + 1)
    timed("first turn", history)
    timed("again", history)
    answer = timed("answer", history, STEPS)
    timed("second turn", [*history, *answer.token_ids, *tokens(NEW, seed + 2)])
    timed("short", tokens(8, seed + 3), STEPS)
    found["step, short context"] = found["short"] / STEPS
    found["step, long context"] = (found["answer"] - found["again"]) / (STEPS - 1)
    system = tokens(SYSTEM, seed + 4)
    timed("chats", [[*system, *tokens(NEW, seed + 5 + i)] for i in range(chats)])
    return {"seconds": found, "texts": texts}


def in_checkout(folder: Path, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", args.model, "--chats", args.chats, "--seed", seed]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run([str(part) for part in command], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if args.seed is not None:
        print(json.dumps(measure(args.model, args.chats, args.seed)))
        return
    here, pairs = Path(__file__).parents[1], []
    for seed in range(args.rounds):
        pairs.append([in_checkout(folder, args, seed) for folder in (args.before, here)])
        assert pairs[-1][0]["texts"] == pairs[-1][1]["texts"], "the texts differ"
        show(f"round {seed + 1}", pairs[-1:])
    show("median", pairs)


def show(title: str, pairs: Seq[Seq[dict[str, Any]]]) -> None:
    for name in ("first turn", "second turn", "chats", "step, short context", "step, long context"):
        seconds = [[each["seconds"][name] for each in pair] for pair in pairs]
        before, after = (statistics.median(column) for column in zip(*seconds, strict=True))
        ratio = statistics.median(one / other for one, other in seconds)
        print(f"{title}, {name}: {before:.4f} s before, {after:.4f} s after, {ratio:.3f}x", flush=True)


if __name__ == "__main__":
    main()
