"""What holds a worker's memory under mixed traffic: resident size by stage, and the largest owners.

    python scripts/worker_memory.py [--model smollm2-135m] [--rounds 3] [--requests 8] [--minutes 4]

Each round sends some requests at once for each drafter, with prompts of different lengths; with --minutes, rounds go on
for that long. Then it prints what is left: tensors that Python can reach, drafters, and how much of the heap the C
library returns when asked. The last line has the resident size at the start, at its peak and at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import time
from collections import Counter
from pathlib import Path

import torch

from outrider import build
from outrider.core.request import Request
from outrider.core.sampling import SamplingParams
from outrider.settings import Settings

DRAFTS = ("none", "ngram", "layer_skip", "medusa", "eagle", "eagle:lookup=3", "eagle:length=6", "eagle:tree=16")
MIB = 1 << 20


def resident() -> int:
    """MiB of this process that lie in memory, without pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) >> 10


def tensors() -> Counter[str]:
    """MiB of the tensors that Python can reach, by shape."""
    seen, sizes = set(), Counter[str]()
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[f"{tuple(thing.shape)} {thing.dtype}"] += storage.nbytes()
    return Counter({name: size // MIB for name, size in sizes.items() if size >= MIB})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.0, help="rounds go on for this long")
    args = parser.parse_args()
    backend = build.local(Settings(model=args.model, threads=1, cache_memory=0.5))
    start = peak = resident()
    end = time.monotonic() + 60 * args.minutes
    print(f"loaded {start} MiB")
    for number in itertools.count():
        if number >= args.rounds and time.monotonic() >= end:
            break
        for draft in DRAFTS:
            prompts = [f"{i} {'the fox reads a long book about rivers ' * (2 + 2 * i)}" for i in range(args.requests)]
            params = SamplingParams(max_tokens=24)
            streams = [backend.submit(Request(prompt, params=params, draft=draft)) for prompt in prompts]
            for stream in streams:
                stream.result()
            peak = max(peak, resident())
            print(f"round {number} {draft}: {resident()} MiB", flush=True)
    idle = resident()
    gc.collect()
    print("tensors, MiB:", tensors().most_common(12), "in all", sum(tensors().values()))
    print("drafters:", len(set(backend.engine.drafters.values())))
    before = resident()
    ctypes.CDLL(None).malloc_trim(0)
    print(f"malloc_trim gives back {before - resident()} of {before} MiB")
    for draft in list(backend.engine.drafters):
        if draft not in ("", "ngram"):
            backend.engine.drop(draft)
    gc.collect()
    before = resident()
    ctypes.CDLL(None).malloc_trim(0)
    print(f"without drafters {before} MiB, trimmed {resident()} MiB")
    print(f"{number} rounds: {start} MiB at the start, {peak} at the peak, {idle} at the end")
    backend.close()


if __name__ == "__main__":
    main()
