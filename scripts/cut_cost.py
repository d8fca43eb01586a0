"""What cuts (top-k, top-p, min-p, typical-p) cost on a GPU, beside what chooses the tokens: microseconds of the kernels
over some rows of logits, as a graph.

    PYTHONPATH=src python scripts/cut_cost.py [--vocabularies 49152,151936] [--rows 1,32,128] [--repeats 20]

The laws are made up: logits from a normal distribution and a few likely tokens, so that temperature 1 and top_p 0.95
leave tens of tokens, and hundreds of some rows, as of SmolLM2's laws; and flat ones, for which the search goes through
the row. Every way has a fresh copy of the logits, whose time is taken off. `uncut`: the kernels over rows without cuts.
Needs torch and triton.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.cuda import kernels, rejection
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import Capture

TIMES = 20  # of a graph
WAYS = {
    "uncut": dict(),
    "top_p 0.95": dict(top_p=0.95),
    "top_k 50": dict(top_k=50),
    "top_k 50, top_p 0.95": dict(top_k=50, top_p=0.95),
    "min_p 0.05": dict(min_p=0.05),
    "typical_p 0.9": dict(typical_p=0.9),
}


def laws(rows: int, size: int, flat: bool) -> Tensor:
    made = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(rows, size, generator=made, device="cuda") * (1.0 if flat else 1.9)
    likely = torch.randint(size, (rows, 0 if flat else 40), generator=made, device="cuda")
    high = math.log(size) - 1.9 + 3 * torch.randn(likely.shape, generator=made, device="cuda")
    return logits.scatter_(1, likely, high)


def spent(capture: Capture, work: Callable[[], None], repeats: int) -> float:
    """Microseconds, the median over the repeats."""
    work()
    graph = capture(lambda: [work() for _ in range(TIMES)] and None)
    begin, end, found = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    for _ in range(repeats):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / TIMES)
    return statistics.median(found)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="49152,151936")
    parser.add_argument("--rows", default="1,32,128")
    parser.add_argument("--repeats", type=int, default=20)
    given, capture = parser.parse_args(), Capture()
    for size in map(int, given.vocabularies.split(",")):
        for rows in map(int, given.rows.split(",")):
            for flat in (False, True):
                measure(capture, laws(rows, size, flat), flat, given.repeats)


def measure(capture: Capture, logits: Tensor, flat: bool, repeats: int) -> None:
    rows, size = logits.shape
    fresh, out = torch.empty_like(logits), torch.zeros(rows, dtype=torch.int64, device="cuda")
    keys, heat = torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda")
    copied = spent(capture, lambda: fresh.copy_(logits), repeats)
    found = {"vocabulary": size, "rows": rows, "flat": flat}
    found["choose"] = round(spent(capture, lambda: kernels.choose(logits, keys, keys, heat, out), repeats), 1)
    found["verify"] = round(spent(capture, lambda: rejection.verify(logits, keys, keys, heat, out), repeats), 1)
    for name, options in WAYS.items():
        cuts = Cuts.none(rows, "typical_p" in options, logits.device)
        cuts.send([SamplingParams(temperature=1.0, **options)] * rows)

        def cut(cuts: Cuts = cuts) -> None:
            fresh.copy_(logits)
            cuts(fresh)

        found[name] = round(spent(capture, cut, repeats) - copied, 1)
        found[f"{name}: left"] = round(float((fresh > float("-inf")).sum() / rows), 1)
    cuts = Cuts.none(rows, False, logits.device)
    cuts.send([SamplingParams(temperature=1.0, top_p=0.95)] * rows)
    fresh.copy_(logits)
    cuts(fresh)
    found["choose what is left"] = round(
        spent(capture, lambda: kernels.choose(fresh, keys, keys, heat, out, True), repeats), 1
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
