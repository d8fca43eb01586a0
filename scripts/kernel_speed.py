"""How fast the CPU's products of packed matrices are, by rows, and what part of the arithmetic peak they reach.

    python scripts/kernel_speed.py [--before OTHER_CHECKOUT] [--rounds 3] [--threads 2] [--rows 1,8] [--models smollm2]

Each matrix of a layer has enough copies that a turn through them does not stay in a cache, as in a real pass. Shapes
and rows take turns, and so do the checkouts, each in a process of its own; the figures are medians over the rounds.
A multiplication and an addition are two operations. The peak is that of a loop of dot products on registers;
activations have 16 bits, so every multiplication takes two of its 8-bit ones. With --before it also checks that both
write the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 128, 512)
STREAM = 48 << 20  # bytes of copies of a model's matrices: more than a third-level cache of 32 MiB
LEAST = 0.02  # seconds that a measurement takes at least
# outputs, inputs and bits of the matrices of a layer (joined as in a pass), and of others: 6 bits are those of Q6_K
OTHERS = ("output", "down of 6 bits")
MODELS = {
    "smollm2": {
        "qkv": (960, 576, 4),
        "o": (576, 576, 4),
        "gate_up": (3072, 576, 4),
        "down": (576, 1536, 4),
        "output": (49152, 576, 8),
    },
    "qwen-1.5b": {
        "qkv": (2048, 1536, 4),
        "o": (1536, 1536, 4),
        "gate_up": (17920, 1536, 4),
        "down": (1536, 8960, 4),
        "down of 6 bits": (1536, 8960, 6),
        "output": (151936, 1536, 6),
    },
}


def measure(models: list[str], rows: list[int], threads: int, seed: int) -> dict[str, Any]:
    import torch

    from outrider.models.native.packed import Packed

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    seconds, digests = {}, {}
    for model in models:
        layer = MODELS[model]
        matrices = {}
        for name, (outputs, inputs, bits) in layer.items():
            one = made(outputs, inputs, bits)
            size = Packed([one]).nbytes
            matrices[name] = [Packed([one]) for _ in range(max(1, STREAM // len(layer) // size))]
        for name, count in turns(layer, rows, seed):
            x = torch.randn(count, layer[name][1], generator=torch.Generator().manual_seed(count))
            key = f"{model} {name} {count}"
            seconds[key] = time_of(matrices[name], x)
            digests[key] = hashlib.sha256(matrices[name][0](x).numpy().tobytes()).hexdigest()[:16]
    return {"seconds": seconds, "digests": digests, "peak": peak(threads)}


def made(outputs: int, inputs: int, bits: int) -> Any:
    """A matrix of random weights; of 6 bits as a file has it, in whatever way this checkout keeps it."""
    import numpy as np
    import torch

    from outrider.models.gguf import GGUFTensor
    from outrider.models.quant import from_gguf, quantise

    if bits != 6:
        return quantise(torch.randn(outputs, inputs) / inputs**0.5, bits)
    blocks = np.random.default_rng(0).integers(0, 256, (outputs, inputs // 256, 210), dtype=np.uint8)
    blocks[..., 208:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)  # the scale of a super-block
    return from_gguf(GGUFTensor("Q6_K", (outputs, inputs), blocks.reshape(outputs, -1)))


def turns(layer: dict[str, Any], rows: list[int], seed: int) -> Iterator[tuple[str, int]]:
    order = [(name, count) for count in rows for name in layer]
    random.Random(seed).shuffle(order)
    return iter(order)


def time_of(products: list[Any], x: Any) -> float:
    """Of one product: the median of turns through all copies."""
    each, begin = [], time.perf_counter()
    while len(each) < 4 or time.perf_counter() - begin < LEAST:
        start = time.perf_counter()
        for product in products:
            product(x)
        each.append((time.perf_counter() - start) / len(products))
    return statistics.median(each[1:])


def peak(threads: int) -> float | None:
    """Multiply-adds of 8 bits in a second; None in checkouts that do not measure it."""
    try:
        from outrider.models.native.peak import multiply_adds_per_second
    except ImportError:
        return None
    return multiply_adds_per_second(threads)


def in_checkout(folder: Path, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    options = ("--models", args.models, "--rows", args.rows, "--threads", args.threads, "--seed", seed)
    command = [sys.executable, __file__, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if args.seed is not None:
        rows = [int(count) for count in args.rows.split(",")]
        print(json.dumps(measure(args.models.split(","), rows, args.threads, args.seed)))
        return
    folders = [*filter(None, [args.before]), Path(__file__).parents[1]]
    rounds = [[in_checkout(folder, args, seed) for folder in folders] for seed in range(args.rounds)]
    assert all(one["digests"] == each[0]["digests"] for each in rounds for one in each), "the bits differ"
    show(rounds, args)


def show(rounds: list[list[dict[str, Any]]], args: argparse.Namespace) -> None:
    best = statistics.median(each[-1]["peak"] for each in rounds)
    print(f"peak: {best / 1e9:.0f} billion 8-bit multiply-adds a second, {args.threads} threads")
    for model in args.models.split(","):
        for count in map(int, args.rows.split(",")):
            total, work = [0.0] * len(rounds[0]), 0  # of a layer: seconds in each checkout, and weights
            for name, (outputs, inputs, _) in MODELS[model].items():
                key = f"{model} {name} {count}"
                taken = zip(*([one["seconds"][key] for one in each] for each in rounds), strict=True)
                seconds = [statistics.median(each) for each in taken]
                if name not in OTHERS:
                    total = [one + more for one, more in zip(total, seconds, strict=True)]
                    work += outputs * inputs
                line(f"{model} {name} {outputs}x{inputs}", count, seconds, outputs * inputs * count, best)
            line(f"{model} a layer", count, total, work * count, best)


def line(title: str, rows: int, seconds: list[float], multiply_adds: int, best: float) -> None:
    each = multiply_adds / seconds[-1]  # in a second
    text = f"{title:32} {rows:4} rows: {1e6 * seconds[-1]:9.1f} us {2e-9 * each:7.0f} GOP/s"
    text += f" {200 * each / best:5.1f} % of peak"
    if len(seconds) > 1:
        text += f"  before {1e6 * seconds[0]:9.1f} us, {seconds[0] / seconds[-1]:.2f}x"
    print(text, flush=True)


if __name__ == "__main__":
    main()
