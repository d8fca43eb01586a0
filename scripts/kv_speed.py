"""What keys and values of 8 bits save on a CPU at a long context, and what they cost in precision.

    python scripts/kv_speed.py [--model FILE] [--context 8000] [--steps 8] [--rounds 9] [--threads 2] [--text 1024]

Speed: steps of one token after `--context` tokens, in turns in one process with the same weights. What lies in the
caches does not matter for it, so they are filled with one number. Seconds are those of the clock and, with one thread,
of the processor, of which the least in each turn is taken: on a machine that others use, too, that is what a step
takes by itself. Precision: the cosine of the logits after the same text of `--text` tokens, at the end of every chunk
of 64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.models.base import Feed
from outrider.models.llama import PackedLlama
from outrider.models.load import load
from outrider.models.native.stack import NativeStack
from outrider.models.weights import LoadOptions

CHUNK = 64  # tokens of a pass where logits are compared
MEMORY = 2 << 30  # bytes for keys and values
FILL = 0x3C  # of every byte: 60 as a number of 8 bits, 0.0115 as a float


def text(count: int, tokenizer: object) -> list[int]:
    """Our own documents, again from the beginning where they end."""
    files = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    tokens: list[int] = tokenizer.encode("\n".join(file.read_text() for file in files))  # type: ignore[attr-defined]
    return (tokens * (1 + count // len(tokens)))[:count]


def with_kv(model: PackedLlama, bits: int) -> PackedLlama:
    """The same weights with keys and values of so many bits."""
    config, stack = replace(model.config, kv_bits=bits), model.weights.stack
    return PackedLlama(config, replace(model.weights, stack=NativeStack(config, stack.layers)), MEMORY)


def fed(model: PackedLlama, tokens: Seq[int], id: int = 0) -> Tensor:
    """The logits after them."""
    [output] = model.forward([Feed(id, tokens)])
    return output.logits[-1]


def step(model: PackedLlama, clock: Callable[[], float]) -> float:
    """Seconds of a pass of one token, which is forgotten again."""
    length, begin = model.length(0), clock()
    fed(model, [7])
    taken = clock() - begin
    model.crop(0, length)
    return taken


@torch.inference_mode()
def fill(model: PackedLlama, count: int) -> None:
    slot = model.pages.extend(0, count)
    for place in range(len(slot.pages)):
        model.pages.page(slot, place).fill_(FILL)


def speed(models: Seq[PackedLlama], args: argparse.Namespace) -> None:
    clocks = {"by the clock": time.perf_counter}
    if args.threads == 1:
        clocks["of the processor"] = time.process_time
    for model in models:
        fill(model, args.context)
        step(model, time.perf_counter)
    for name, clock in clocks.items():
        ratios, least = [], [[], []]  # type: ignore[var-annotated]
        for turn in range(args.rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                least[which].append(min(step(models[which], clock) for _ in range(args.steps)))
            ratios.append(least[0][-1] / least[1][-1])
        one, other = (1e3 * statistics.median(each) for each in least)
        spread = f"{statistics.median(ratios):.3f}x [{min(ratios):.3f}-{max(ratios):.3f}]"
        print(
            f"a step after {args.context}, {name}: {one:.2f} ms with floats, {other:.2f} with 8 bits: {spread}",
            flush=True,
        )
    for model in models:
        model.free(0)


def precision(models: Seq[PackedLlama], tokens: Seq[int]) -> None:
    cosines, same = [], 0
    for begin in range(0, len(tokens), CHUNK):
        one, other = (fed(model, tokens[begin : begin + CHUNK], 1).double() for model in models)
        cosines.append(float(torch.cosine_similarity(one, other, 0)))
        same += int(one.argmax()) == int(other.argmax())
    found = f"least {min(cosines):.6f}, median {statistics.median(cosines):.6f}"
    print(f"cosine of logits at {len(cosines)} places of {len(tokens)} tokens: {found}; same token at {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in {"context": 8000, "steps": 8, "rounds": 9, "threads": 2, "text": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load(args.model, LoadOptions(torch.device("cpu"), None, MEMORY))
    assert isinstance(loaded.model, PackedLlama), "packed weights only"
    models = [with_kv(loaded.model, bits) for bits in (32, 8)]
    if args.rounds:
        speed(models, args)
    if args.text:
        precision(models, text(args.text, loaded.tokenizer))


if __name__ == "__main__":
    main()
