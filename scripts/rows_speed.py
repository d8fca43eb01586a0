"""What a pass costs by its rows on a CPU, with activations of 16 bits and of 8, in turns in one process.

    python scripts/rows_speed.py [--model smollm2-135m] [--context 256] [--prompt 512] [--rounds 7] [--threads 2]

A pass of n rows is a token and a chain of n - 1 nodes, all judged, after `--context` tokens; a prompt is one pass of
`--prompt` tokens, of which the last is judged. Both kinds of activations use the same weights. Of each round the least
counts, of the clock or, with one thread, of the processor: others may use the machine, too. Figures are medians over
the rounds; ratios of the two are medians of the ratios of each round, with their range.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from outrider.core.draft import Draft
from outrider.models.base import Feed
from outrider.models.llama import PackedLlama
from outrider.models.load import load
from outrider.models.native.packed import Packed
from outrider.models.native.stack import NativeStack, packed
from outrider.models.weights import LoadOptions

ROWS = (1, 2, 4, 8, 16)
BITS = (16, 8)
LEAST = 0.15  # seconds that a round measures one pass at least


def set_bits(model: PackedLlama, bits: int) -> None:
    for each in matrices(model):
        each.joint.activations = bits


def matrices(model: PackedLlama) -> list[Packed]:
    layers = model.weights.stack.layers
    found = [packed(m) for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*found, packed(model.weights.head), packed(model.weights.embedding)]


def with_bits(model: PackedLlama, bits: int) -> PackedLlama:
    """The same weights, whose layers take activations of so many bits."""
    set_bits(model, bits)
    stack = NativeStack(model.config, model.weights.stack.layers)
    return PackedLlama(model.config, replace(model.weights, stack=stack), 1 << 30)


def now() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def time_of(model: PackedLlama, tokens: Seq[int], rows: int) -> float:
    """Of one pass after what the sequence 0 holds: the least of several."""
    seconds: list[float] = []
    context, nodes = model.length(0), Draft.chain(tokens[1:rows])
    while sum(seconds) < LEAST or len(seconds) < 3:
        begin = now()
        model.forward([Feed(0, tokens[:1], nodes)])
        seconds.append(now() - begin)
        model.crop(0, context)
    return min(seconds)


def time_of_prompt(model: PackedLlama, tokens: Seq[int]) -> float:
    begin = now()
    model.forward([Feed(1, tokens)])
    taken = now() - begin
    model.free(1)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, LoadOptions(torch.device("cpu"), None, 1 << 30))
    assert isinstance(loaded.model, PackedLlama), "packed weights only"
    models = {bits: with_bits(loaded.model, bits) for bits in BITS}
    tokens = [100 + i * i % 5000 for i in range(max(args.context, args.prompt))]
    for bits, model in models.items():
        set_bits(model, bits)
        model.forward([Feed(0, tokens[: args.context])])
        time_of_prompt(model, tokens[: args.prompt])
    found: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.rounds):
        for rows in ROWS:
            for bits in BITS if turn % 2 else reversed(BITS):
                set_bits(models[bits], bits)
                found.setdefault((f"{rows} rows", bits), []).append(time_of(models[bits], tokens, rows))
        for bits in BITS if turn % 2 else reversed(BITS):
            set_bits(models[bits], bits)
            prompt = tokens[: args.prompt]
            found.setdefault((f"prompt of {args.prompt}", bits), []).append(time_of_prompt(models[bits], prompt))
    show(found)


def show(found: dict[tuple[str, int], list[float]]) -> None:
    ones = {bits: found["1 rows", bits] for bits in BITS}
    for what in dict.fromkeys(name for name, _ in found):
        parts = []
        for bits in BITS:
            each = found[what, bits]
            over = statistics.median(a / b for a, b in zip(each, ones[bits], strict=True))
            parts.append(f"{bits} bits {1e3 * statistics.median(each):8.2f} ms ({over:.2f} of 1 row)")
        ratios = [a / b for a, b in zip(found[what, 16], found[what, 8], strict=True)]
        spread = f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}-{max(ratios):.2f}]"
        print(f"{what:>14}: {', '.join(parts)}; 8 bits are {spread} as fast", flush=True)


if __name__ == "__main__":
    main()
