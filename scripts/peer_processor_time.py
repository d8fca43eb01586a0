"""Our plain decoding and prompts against llama.cpp built for this machine: processor time, one thread each, in turns.

For a machine that is not quiet: the clock says how many others run, the processor time of an engine much less so. Build
the peer first: outrider bench --build-peers.

    python scripts/peer_processor_time.py MODEL.gguf --format q4_0 --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path

from outrider.bench import build_peers, formats, prepare, workloads
from outrider.bench.peers import TABLE
from outrider.bench.process import EngineProcess

TICK = os.sysconf("SC_CLK_TCK")
SHORTEST = 16  # tokens: a shorter text says little, by a clock of hundredths of a second
TIMEOUT = 600.0  # seconds for one answer, on a machine with many others


def processor_time(group: int) -> float:
    """Seconds of all processes of a group."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def taken(engine: EngineProcess, mode: str, ids: list[int], tokens: int) -> tuple[float, int]:
    """Seconds of one answer, and its tokens: a text may end early."""
    group = engine._process.pid
    before = processor_time(group)
    answer = engine.ask({"mode": mode, "ids": ids, "max_tokens": tokens}, TIMEOUT)
    return processor_time(group) - before, answer["tokens"]


def engines(model: Path, instructions: str, own: dict[str, str], folder: Path) -> dict[str, EngineProcess]:
    built = build_peers.kept_builds(instructions)["llama.cpp-native"]
    shared = {"model": str(model), "draft_model": None, "ends": [], "threads": 1, "context": 1024, "speculation": {}}
    shared |= {"kernels": build_peers.INSTRUCTIONS[instructions][1], "program": built.server, "build": {}, "own": own}
    python = os.environ.get("PYTHON") or sys.executable
    made = {}
    for name, mode in (("outrider", "none"), ("llama.cpp-native", "plain")):
        log = folder / f"{name}.log"
        made[name] = EngineProcess(python, TABLE[name].path, shared | {"modes": [mode]}, 1, log)
        made[name].ready(TIMEOUT)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--instructions", default="native")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--own", nargs="*", default=[], help="settings of our engine, as in activations=int8")
    args = parser.parse_args()
    builds = build_peers.kept_builds(args.instructions)
    model = formats.write(args.model, args.format, builds["llama.cpp-native"].quantizer)
    tasks = prepare.read_tokenizer(model).render(workloads.built_in())
    long = prepare.long_prompts(tasks, args.prompt)
    modes = {"outrider": "none", "llama.cpp-native": "plain"}
    prompts: dict[str, list[float]] = {name: [] for name in modes}
    decodes: dict[str, list[float]] = {name: [] for name in modes}
    kept: dict[str, list[bool]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as folder:
        running = engines(model, args.instructions, dict(item.split("=") for item in args.own), Path(folder))
        for name, engine in running.items():
            taken(engine, modes[name], long[0].ids, 2)
        for number in range(args.rounds):
            ids = long[number % len(long)].turned(number + 1).ids
            asked = tasks[number * 5 % len(tasks)]
            for name in sorted(modes, reverse=bool(number % 2)):
                prompts[name].append(taken(running[name], modes[name], ids, 2)[0] / args.prompt)
                # the prompt alone, turned: or the second request would find the pages of the first
                short = taken(running[name], modes[name], asked.turned(1).ids, 2)
                more = taken(running[name], modes[name], asked.ids, 2 + args.tokens)
                decodes[name].append((more[0] - short[0]) / max(1, more[1] - short[1]))
                kept[name].append(more[1] - short[1] >= SHORTEST)
        for engine in running.values():
            engine.close()
    long_enough = [all(both) for both in zip(*kept.values(), strict=True)]
    decodes = {name: list(itertools.compress(some, long_enough)) for name, some in decodes.items()}
    for what, times in (("prompt", prompts), ("decode", decodes)):
        ratios = [b / a for a, b in zip(times["outrider"], times["llama.cpp-native"], strict=True)]
        speeds = ", ".join(f"{name} {1 / statistics.median(some):.1f}" for name, some in times.items())
        spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
        print(f"{args.format} {what}: tokens per processor second: {speeds}; ratio {spread}")


if __name__ == "__main__":
    main()
