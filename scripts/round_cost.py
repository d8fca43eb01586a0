"""What the drafts of heads and draft models cost in rounds on a GPU: time of a round with each drafter, less that of a
round whose draft is there already, with as many nodes.

    PYTHONPATH=src python scripts/round_cost.py [--batches 1,4,16,64] [--rounds 96] [--repeats 5] [--specs SPEC ...]
                                                [--kernels SPEC] [--temperature 0.8 [--seed 1] [--top-p 0.9]
                                                [--top-k 50]]

The target has SmolLM2-135M's sizes and random weights, the heads the sizes that `outrider train` gives them, a draft
model is called by its number of layers of the target's size (`layer_skip` runs a third of the target's), so nothing is
kept and every round writes one token. Texts of 520 tokens; drafters run in turns, and the median over the repeats
counts, with the range. `--kernels block:tree=31`: also how long each kernel of such a round takes, by torch's profiler,
one sequence. With a temperature drafts are verified by rejection, with a seed too by the target's noise; laws of random
weights are flat, so that top-p looks through whole rows (scripts/cut_cost.py has others). Needs torch and triton.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.block.head import BlockConfig, BlockHead
from outrider.drafters.eagle.head import EagleConfig, EagleHead
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables
from outrider.drafters.rounds.loop import DeviceLoop
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.cuda.model import CudaLlama
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INNER, LAYERS, VOCAB = 576, 9, 3, 64, 1536, 30, 49152
DRAFT_VOCAB, CONTEXT, PROMPT = 32768, 2048, 520
EPS, THETA = 1e-5, 100_000.0
SPECS = ("eagle:tree=31", "block:tree=31", "eagle", "block", "layer_skip", "draft_model:model=4")
PART, MEMORY = 8, 4 << 30


def model_of(count: int) -> CudaLlama:
    """`count` layers."""
    made = torch.Generator("cuda").manual_seed(0)

    def rand(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=made, device="cuda") * 0.02).bfloat16()

    rows = (HEADS + 2 * KEY_HEADS) * HEAD_DIM
    layers = [
        Layer(
            1 + rand(HIDDEN),
            Dense(rand(rows, HIDDEN)),
            Dense(rand(HIDDEN, HEADS * HEAD_DIM)),
            1 + rand(HIDDEN),
            Dense(rand(2 * INNER, HIDDEN)),
            Dense(rand(HIDDEN, INNER)),
            None,
            None,
        )
        for _ in range(count)
    ]
    config = LlamaConfig(
        HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, EPS, None, vocab_size=VOCAB, num_layers=count, context=CONTEXT
    )
    rope = Rope(1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    table = rand(VOCAB, HIDDEN)
    weights = Weights(Dense(table), TorchStack(config, layers), 1 + rand(HIDDEN), Dense(table), rope)
    return CudaLlama(config, weights, MEMORY)


def heads() -> dict[str, Any]:
    sizes = (HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INNER, EPS, THETA, VOCAB, DRAFT_VOCAB)
    ids = torch.arange(DRAFT_VOCAB)
    eagle = EagleConfig(*sizes, (1, 14, 26), context=CONTEXT, norm_inputs=True, norm_residual=True)
    block = BlockConfig(*sizes, (1, 7, 14, 20, 26), context=CONTEXT)
    return {"eagle": EagleHead(eagle, ids).requires_grad_(False), "block": BlockHead(block, ids).requires_grad_(False)}


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

    def guesses(self, sequences: int, budget: int) -> ReadyGuesses:
        return ReadyGuesses(sequences, self._other.guesses(sequences, budget).size.nodes)


class ReadyGuesses:
    def __init__(self, sequences: int, nodes: int) -> None:
        self.size = DraftSize(nodes, min(nodes, 8))
        self.found = torch.zeros(sequences, 1 + 3 * nodes, dtype=torch.int32, device="cuda")
        self.found[:, 0] = nodes
        every = torch.arange(nodes, device="cuda", dtype=torch.int32)
        self.found[:, 1 : 1 + nodes] = 7 + every
        self.found[:, 1 + nodes : 1 + 2 * nodes] = torch.where(every < 8, every - 1, every % 7)

    def send(self, seqs: Any, tables: RoundTables) -> None: ...

    def guess(self, tables: RoundTables, number: int) -> None: ...


def sequences(count: int, ids: Iterator[int], params: SamplingParams) -> list[Sequence]:
    made = torch.Generator().manual_seed(1)
    texts = torch.randint(VOCAB, (count, PROMPT), generator=made).tolist()
    return [Sequence(next(ids), text, params, dice=Dice(1)) for text in texts]


def looped(model: CudaLlama, engine: Engine, loop: DeviceLoop, seqs: list[Sequence], rounds: int) -> float:
    """Seconds of a round, after some that do not count."""
    for seq in seqs:
        engine.add(seq)
    while any(model.length(seq.id) < PROMPT - 1 for seq in seqs):
        engine.step()
    begun = written = 0
    begin = 0.0

    def plan(unread: int) -> int:
        nonlocal begun
        begun += PART
        return PART if begun <= rounds + 4 * PART else 0

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
    given = parser.parse_args()
    params = SamplingParams(1000, given.temperature, given.top_k, given.top_p, seed=given.seed)
    model = model_of(LAYERS)
    context = BuildContext(model, lambda name, *_: model_of(int(name)), heads=heads(), cache_bytes=1 << 29)
    made = {spec: drafters.build(named(spec), context) for spec in given.specs}
    loops = {spec: (drafter, drafter.writer._loop) for spec, drafter in made.items()}  # type: ignore[union-attr]
    for spec, drafter in made.items():
        loops[f"{spec} ready"] = drafter, DeviceLoop(model, [ReadyDraft(drafter.guessers[0])])
    ids = iter(range(1, 1 << 30))
    for batch in map(int, given.batches.split(",")):
        times: dict[str, list[float]] = {spec: [] for spec in loops}
        for _ in range(given.repeats + 1):
            for spec, (drafter, loop) in loops.items():
                times[spec].append(once(model, drafter, loop, sequences(batch, ids, params), given.rounds))
        found = {spec: [1e3 * each for each in own[1:]] for spec, own in times.items()}
        for spec, own in found.items():
            print(
                json.dumps(
                    {"batch": batch, "draft": spec, **spread(own, found[f"{spec.removesuffix(' ready')} ready"])}
                )
            )
    if given.kernels:
        drafter, loop = loops[given.kernels]
        kernels(model, drafter, loop, ids, given.rounds, params)


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


def kernels(
    model: CudaLlama, drafter: Any, loop: DeviceLoop, ids: Iterator[int], rounds: int, params: SamplingParams
) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        once(model, drafter, loop, sequences(1, ids, params), rounds)
    total, counts = Counter[str](), Counter[str]()
    for event in record.events():
        total[event.name] += event.device_time
        counts[event.name] += 1
    for name, spent in total.most_common(25):
        print(f"{spent / rounds:8.1f} us a round {counts[name] / rounds:6.1f} times  {name[:80]}", file=sys.stderr)


if __name__ == "__main__":
    main()
