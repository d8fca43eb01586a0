"""What an adapter costs in a pass on a CPU: passes with and without one in turns, on one machine, with the spread.

    python scripts/adapter_cost.py --model smollm2-135m --rank 16 --rounds 40

Rank 16 on all seven matrices of every layer, random values: what a pass costs does not depend on them. `near`: the same
with the first layer's values in place of every layer's, so that they stay in the caches; what it costs less is memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from outrider import build
from outrider.core.adapter import ReadyAdapter
from outrider.core.draft import Draft
from outrider.models.adapters.adapter import Adapter, LowRank
from outrider.models.base import Feed, TakesAdapters
from outrider.models.load import load
from outrider.settings import Settings

CONTEXT = 150  # tokens of each sequence before the passes that are timed


def random_adapter(model, rank: int, seed: int) -> Adapter:
    random = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, (outputs, inputs) in model.adapter_base.shapes.items():
        if name.startswith("model.layers."):
            a = torch.randn(rank, inputs, generator=random) / inputs**0.5
            pairs[name] = LowRank(a, torch.randn(outputs, rank, generator=random) * 0.01)
    return Adapter(pairs)


def near(ready: ReadyAdapter) -> ReadyAdapter:
    """The same work on the values of one layer. For times only."""
    own: Any = ready.weights
    layers = type(own.layers)(*([own.layers[0]] * len(own.layers)))
    return replace(ready, weights=replace(own, layers=layers))


class Passes:
    """Passes over sequences that stay as they are: each is cropped to what it was."""

    def __init__(self, model) -> None:
        self.model, self.text = model, [(7 * i) % 1000 + 5 for i in range(CONTEXT)]
        self.ids = 0

    def sequences(self, adapters) -> list[tuple[int, object]]:
        out = []
        for adapter in adapters:
            self.ids += 1
            self.model.forward([Feed(self.ids, self.text, adapter=adapter)])
            out.append((self.ids, adapter))
        return out

    def milliseconds(self, seqs, rows: int) -> float:
        """Of one pass in which each sequence has this number of rows."""
        draft = Draft.chain([9 + i for i in range(rows - 1)])
        feeds = [Feed(id, [8], draft, adapter) for id, adapter in seqs]
        begin = time.perf_counter()
        self.model.forward(feeds)
        took = time.perf_counter() - begin
        for id, _ in seqs:
            self.model.crop(id, CONTEXT)
        return 1000 * took


def in_turns(passes: Passes, ways: dict[str, tuple[list, int]], rounds: int, each: int) -> dict[str, list[float]]:
    """Medians of `each` passes, the ways in turns, the first way changing from round to round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took = statistics.median(passes.milliseconds(*ways[name]) for _ in range(each))
            if turn >= 2:  # the first rounds warm up
                found[name].append(took)
    return found


def ratio(found: dict[str, list[float]], way: str, to: str) -> dict[str, float]:
    each = sorted(a / b for a, b in zip(found[way], found[to], strict=True))
    low, high = each[len(each) // 10], each[-1 - len(each) // 10]
    least = min(found[way]) / min(found[to])  # what a busy machine disturbs least
    ms = {"ms": statistics.median(found[way]), "ms without": statistics.median(found[to])}
    return {"ratio": statistics.median(each), "10%": low, "90%": high, "of the least": least, **ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--each", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = load(given.model, build.load_options(Settings(model=given.model))).model
    assert isinstance(model, TakesAdapters), "this model takes no adapters"
    ready = [model.adapt(random_adapter(model, given.rank, seed), f"{seed}#1") for seed in range(8)]
    passes = Passes(model)
    results = {}
    for rows in (1, 2, 4, 8):
        kinds = {"plain": None, "adapter": ready[0], "near": near(ready[0])}
        ways = {name: (passes.sequences([adapter]), rows) for name, adapter in kinds.items()}
        found = in_turns(passes, ways, given.rounds, given.each)
        results[f"{rows} rows, one adapter against none"] = ratio(found, "adapter", "plain")
        results[f"{rows} rows, one adapter that is near against none"] = ratio(found, "near", "plain")
    batches = {"eight": ready, "one": ready[:1] * 8, "none": [None] * 8}
    ways = {name: (passes.sequences(adapters), 1) for name, adapters in batches.items()}
    found = in_turns(passes, ways, given.rounds, given.each)
    results["8 sequences, 8 adapters against one"] = ratio(found, "eight", "one")
    results["8 sequences, one adapter against none"] = ratio(found, "one", "none")
    rounded = {name: {key: round(value, 3) for key, value in each.items()} for name, each in results.items()}
    print(json.dumps({"rank": given.rank, "bytes of an adapter": ready[0].nbytes, **rounded}, indent=1))


if __name__ == "__main__":
    main()
