"""What keys and values of 8 bits save on a CPU at a long context, and what they cost in precision.

    python scripts/kv_speed.py [--model FILE] [--tokens 8000] [--steps 32] [--rounds 5] [--threads 2]

One process, the same weights: both caches are filled with the same text, then both write, in turns of `--steps` tokens,
the text's own continuation. Cosines are those of the logits after the same tokens, at the ends of the prompt's chunks
and at every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.base import Feed
from outrider.models.llama import PackedLlama
from outrider.models.load import load
from outrider.models.native.stack import NativeStack
from outrider.models.weights import LoadOptions

CHUNK = 512  # prompt tokens of a pass
MEMORY = 2 << 30  # bytes for keys and values


def text(count: int, tokenizer: object) -> list[int]:
    """Our own documents, again from the beginning where they end."""
    files = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    tokens: list[int] = tokenizer.encode("\n".join(file.read_text() for file in files))  # type: ignore[attr-defined]
    return (tokens * (1 + count // len(tokens)))[:count]


def with_kv(model: PackedLlama, bits: int) -> PackedLlama:
    """The same weights with keys and values of so many bits."""
    config, stack = replace(model.config, kv_bits=bits), model.weights.stack
    return PackedLlama(config, replace(model.weights, stack=NativeStack(config, stack.layers)), MEMORY)


def fed(model: PackedLlama, tokens: Seq[int]) -> tuple[Tensor, float]:
    """The logits after them, and the seconds of the pass."""
    begin = time.perf_counter()
    [output] = model.forward([Feed(0, tokens)])
    return output.logits[-1], time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, LoadOptions(torch.device("cpu"), None, MEMORY))
    assert isinstance(loaded.model, PackedLlama), "packed weights only"
    models = [with_kv(loaded.model, bits) for bits in (32, 8)]
    tokens = text(args.tokens + 2 * args.rounds * args.steps, loaded.tokenizer)
    logits: list[tuple[Tensor, Tensor]] = []
    seconds = [0.0, 0.0]
    for begin in range(0, args.tokens, CHUNK):
        both = [fed(model, tokens[begin : min(begin + CHUNK, args.tokens)]) for model in models]
        seconds = [total + each[1] for total, each in zip(seconds, both, strict=True)]
        logits.append((both[0][0], both[1][0]))
    print(f"prompt of {args.tokens}: {seconds[0]:.2f} s with floats, {seconds[1]:.2f} s with 8 bits", flush=True)
    ratios = []
    for turn in range(args.rounds):
        begin = args.tokens + turn * args.steps
        order = (0, 1) if turn % 2 else (1, 0)
        found = {
            which: [fed(models[which], [token]) for token in tokens[begin : begin + args.steps]] for which in order
        }
        logits += [(a[0], b[0]) for a, b in zip(found[0], found[1], strict=True)]
        one, other = (statistics.median(each[1] for each in found[which]) for which in (0, 1))
        ratios.append(one / other)
        print(
            f"turn {turn + 1}: {1e3 * one:.2f} ms a step with floats, {1e3 * other:.2f} with 8 bits, {one / other:.3f}x"
        )
    cosines = [float(torch.cosine_similarity(a.double(), b.double(), 0)) for a, b in logits]
    same = sum(int(a.argmax()) == int(b.argmax()) for a, b in logits)
    print(f"median {statistics.median(ratios):.3f}x [{min(ratios):.3f}-{max(ratios):.3f}]")
    print(
        f"cosine of logits at {len(cosines)} places: least {min(cosines):.6f}, median {statistics.median(cosines):.6f}"
    )
    print(f"the likeliest token is the same at {same} of {len(logits)}")


if __name__ == "__main__":
    main()
