"""What the drafts of heads and draft models cost in rounds on a GPU: time of a round with each drafter, less that of a
round whose draft is there already, with as many nodes.

    PYTHONPATH=src python scripts/round_cost.py [--batches 1,4,16,64] [--rounds 96] [--repeats 5] [--specs SPEC ...]
                                                [--shape 8b] [--prompt 520] [--kernels SPEC]
                                                [--temperature 0.8 [--seed 1] [--top-p 0.9] [--top-k 50]]

The target has SmolLM2-135M's sizes and random weights (`--shape 8b`: those of an 8B Llama), the heads the sizes that
`outrider train` gives them, a draft model is called by its number of layers of the target's size (`layer_skip` runs a
third of the target's), so nothing is kept and every round writes one token. Drafters run in turns, and the median over
the repeats counts, with the range; a line is printed as soon as it is known. Graphs are made for the batches that are
asked for alone. `--kernels block:tree=31`: also how long each kernel of such a round takes, by torch's profiler, one
sequence. With a temperature drafts are verified by rejection, with a seed too by the target's noise; laws of random
weights are flat, so that top-p looks through whole rows (scripts/cut_cost.py has others). Needs torch and triton.
`--device cpu --shape tiny` (with TRITON_INTERPRET=1): only to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from outrider import drafters
from outrider.bench.gpu_shapes import SHAPES, ModelShape, head_sizes, random_eagle, random_llama, read_layers
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.block.head import BlockConfig, BlockHead
from outrider.drafters.rounds import writer
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables
from outrider.drafters.rounds.loop import DeviceLoop
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.cuda.model import CudaLlama

SPECS = ("eagle:tree=31", "block:tree=31", "eagle", "block", "layer_skip", "draft_model:model=4")
PART = 8
# Bytes for keys and values: 64 texts of 700 tokens, and of a head's as much again as it needs of that.
MEMORY = {"smollm2": 4 << 30, "8b": 16 << 30, "tiny": 1 << 24}


def heads(shape: ModelShape, specs: Seq[str]) -> dict[str, Any]:
    """Those that are named."""
    names, made = {spec.partition(":")[0] for spec in specs}, dict[str, Any]()
    if "eagle" in names:
        made["eagle"] = random_eagle(shape)
    if "block" in names:
        config = BlockConfig(*head_sizes(shape), read_layers(shape, 5), context=shape.context)
        made["block"] = BlockHead(config, torch.arange(shape.draft_vocab)).requires_grad_(False)
    return made


class ReadyDraft:
    """A guesser whose draft is there already, with as many nodes as another's: all else of a round."""

    name, reads_texts, is_chain = "ready", False, False

    def __init__(self, other: Any) -> None:
        self.layers, self._other = other.layers, other

    def takes(self, seq: Sequence) -> bool:
        return True

    follows = takes

    def draws(self, seq: Sequence) -> bool:
        return False

    def begin(self, *_: Any) -> bool:
        return True

    go_on = begin

    def end(self, *_: Any) -> None: ...

    def guesses(self, sequences: int, budget: int, alone: bool) -> ReadyGuesses:
        other = self._other.guesses(sequences, budget, alone)
        return ReadyGuesses(sequences, other.size.nodes, other.found.device)


class ReadyGuesses:
    def __init__(self, sequences: int, nodes: int, device: torch.device) -> None:
        self.size = DraftSize(nodes, min(nodes, 8))
        self.found = torch.zeros(sequences, 1 + 3 * nodes, dtype=torch.int32, device=device)
        self.found[:, 0] = nodes
        every = torch.arange(nodes, device=device, dtype=torch.int32)
        self.found[:, 1 : 1 + nodes] = 7 + every
        self.found[:, 1 + nodes : 1 + 2 * nodes] = torch.where(every < 8, every - 1, every % 7)

    def send(self, seqs: Any, tables: RoundTables) -> None: ...

    def guess(self, tables: RoundTables, number: int) -> None: ...


def sequences(count: int, ids: Iterator[int], params: SamplingParams, vocab: int, length: int) -> list[Sequence]:
    made = torch.Generator().manual_seed(1)
    texts = torch.randint(vocab, (count, length), generator=made).tolist()
    return [Sequence(next(ids), text, params, dice=Dice(1)) for text in texts]


def looped(model: CudaLlama, engine: Engine, loop: DeviceLoop, seqs: list[Sequence], rounds: int) -> float:
    """Seconds of a round, after some that do not count."""
    for seq in seqs:
        engine.add(seq)
    while any(model.length(seq.id) < len(seq.tokens) - 1 for seq in seqs):
        engine.step()
    begun = written = 0
    begin = 0.0

    def plan(unread: int) -> int:
        nonlocal begun
        begun += PART
        return PART if begun <= rounds + 4 * PART else 0

    while written < rounds:  # a text that outgrows a graph goes on with the next one
        for part in loop.run(seqs, plan, lambda: None):
            commit(seqs, part)
            written += PART
            if written == 2 * PART:
                begin = time.perf_counter()
    return (time.perf_counter() - begin) / (written - 2 * PART)


def commit(seqs: list[Sequence], part: list[LoopedRounds]) -> None:
    for seq, own in zip(seqs, part, strict=True):
        seq.tokens.extend(token for tokens in own.tokens for token in tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: by rejection")
    parser.add_argument("--seed", type=int, help="with a temperature: under the noise of a seed, not by rejection")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--prompt", type=int, default=520, help="tokens of a text")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    batches = [int(batch) for batch in given.batches.split(",")]
    writer.PREPARED = tuple(sorted({1 << (batch - 1).bit_length() for batch in batches}))
    shape, device = SHAPES[given.shape], torch.device(given.device)
    most = min(1000, shape.context - given.prompt)
    params = SamplingParams(most, given.temperature, given.top_k, given.top_p, seed=given.seed)
    model = random_llama(shape, MEMORY[given.shape], device)

    def smaller(name: str, *_: Any) -> CudaLlama:
        return random_llama(replace(shape, layers=int(name)), MEMORY[given.shape] // 4, device)

    context = BuildContext(model, smaller, heads=heads(shape, given.specs), cache_bytes=MEMORY[given.shape] // 8)
    made = {spec: drafters.build(named(spec), context) for spec in given.specs}
    loops = {spec: (drafter, drafter.writer._loop) for spec, drafter in made.items()}  # type: ignore[union-attr]
    for spec, drafter in made.items():
        loops[f"{spec} ready"] = drafter, DeviceLoop(model, [ReadyDraft(drafter.guessers[0])])
    ids = iter(range(1, 1 << 30))

    def seqs(batch: int) -> list[Sequence]:
        return sequences(batch, ids, params, shape.vocab, given.prompt)

    for batch in batches:
        times: dict[str, list[float]] = {spec: [] for spec in loops}
        for _ in range(given.repeats + 1):
            for spec, (drafter, loop) in loops.items():
                times[spec].append(once(model, drafter, loop, seqs(batch), given.rounds))
        found = {spec: [1e3 * each for each in own[1:]] for spec, own in times.items()}
        for spec, own in found.items():
            ready = found[f"{spec.removesuffix(' ready')} ready"]
            said = {"shape": given.shape, "batch": batch, "draft": spec, **spread(own, ready)}
            print(json.dumps(said), flush=True)
    if given.kernels:
        drafter, loop = loops[given.kernels]
        kernels(model, drafter, loop, seqs(1), given.rounds)


def spread(own: list[float], rest: list[float]) -> dict[str, Any]:
    middle, ends = statistics.median(own), [round(min(own), 4), round(max(own), 4)]
    return {"round_ms": round(middle, 4), "range_ms": ends, "draft_ms": round(middle - statistics.median(rest), 4)}


def named(spec: str) -> str:
    name, _, more = spec.partition(":")
    if name not in ("eagle", "block"):
        return spec
    return f"{name}:head={name}" + (f",{more}" if more else "")


def once(model: CudaLlama, drafter: Any, loop: DeviceLoop, seqs: list[Sequence], rounds: int) -> float:
    """A fresh engine, whose drafter never writes by itself."""
    writer, drafter.writer = drafter.writer, None
    engine = Engine(model, drafter, Limits(128, 1 << 16))
    try:
        return looped(model, engine, loop, seqs, rounds)
    finally:
        for seq in seqs:
            engine.cancel(seq.id)
        while engine.busy:
            engine.step()
        drafter.writer = writer


def kernels(model: CudaLlama, drafter: Any, loop: DeviceLoop, seqs: list[Sequence], rounds: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        once(model, drafter, loop, seqs, rounds)
    total, counts = Counter[str](), Counter[str]()
    for event in record.events():
        total[event.name] += event.device_time
        counts[event.name] += 1
    for name, spent in total.most_common(25):
        print(f"{spent / rounds:8.1f} us a round {counts[name] / rounds:6.1f} times  {name[:80]}", file=sys.stderr)


if __name__ == "__main__":
    main()
