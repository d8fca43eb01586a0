"""Everything that is claimed for one GPU, measured by one command:

    PYTHONPATH=src python -m outrider.bench.gpu --model smollm2-135m --out gpu [--transformers]

Writes gpu.json and gpu.md. Weights in the shape of an 8B model are random: its speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from outrider.bench import gpu_peaks, gpu_report, gpu_speeds, machine, workloads
from outrider.bench.gpu_report import Found
from outrider.bench.gpu_speeds import DEVICE
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM
from outrider.models.cuda.model import CudaLlama

Save = Callable[[Found], None]


@contextmanager
def _timed_part(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def measure(model: str, folder: str | None, part: str, save: Save) -> Found:
    found: Found = {"command": " ".join(["python -m outrider.bench.gpu", *(["--transformers"] if folder else [])])}
    found["versions"] = {"torch": torch.__version__, "python": platform.python_version(), **machine.describe()}
    with _timed_part("card"):
        found["card"] = asdict(gpu_peaks.measure(DEVICE))
    copy_tb_s = found["card"]["copy_tb_s"]
    if part != "8b":
        measure_small(model, folder, copy_tb_s, found, save)
    if part != "small":
        measure_8b(copy_tb_s, found)
    save(found)
    return found


def measure_small(model: str, folder: str | None, copy_tb_s: float, found: Found, save: Save) -> None:
    with _timed_part("ready"):
        begin = time.perf_counter()
        llm = LLM(model, device="cuda", dtype="bfloat16", cache_memory=50.0)
        loaded = time.perf_counter() - begin
        llm.generate("Hello", SamplingParams(max_tokens=1))
        found["ready"] = {"load_s": loaded, "first_token_s": time.perf_counter() - begin}
    small = llm.engine.model
    assert isinstance(small, CudaLlama)
    with _timed_part("one stream"):
        found["one stream"] = gpu_speeds.one_stream(llm, workloads.built_in())
    save(found)
    prompts = workloads.select(workloads.built_in(), limit=2)
    ids = [llm.backend.render([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    with _timed_part("small passes"):
        found["small"] = {"bytes": gpu_peaks.pass_bytes(small), "passes": gpu_speeds.passes(small, copy_tb_s)}
    with _timed_part("batches"):
        found["batches"] = gpu_speeds.batches(small, ids)
    with _timed_part("bulk"):
        found["bulk"] = gpu_speeds.bulk(small, ids)
    save(found)
    if folder:
        with _timed_part("transformers"):
            into = found.setdefault("transformers", {})
            gpu_speeds.transformers(folder, llm, prompts[0].text, into, lambda: save(found))


def measure_8b(copy_tb_s: float, found: Found) -> None:
    with _timed_part("8B"):
        big = gpu_speeds.eight_billion()
        found["8B shape"] = {"bytes": gpu_peaks.pass_bytes(big), "passes": gpu_speeds.passes(big, copy_tb_s)}
        found["8B shape"]["oracle"] = gpu_speeds.oracle(big)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--part", choices=("all", "small", "8b"), default="all")
    parser.add_argument("--transformers", action="store_true", help="also measure transformers on the same weights")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    args.out.mkdir(parents=True, exist_ok=True)

    def save(found: Found) -> None:
        (args.out / "gpu.json").write_text(json.dumps(found, indent=1))

    found = measure(args.model, _folder(args.model) if args.transformers else None, args.part, save)
    (args.out / "gpu.md").write_text(gpu_report.markdown(found))
    print(gpu_report.markdown(found))


def _folder(model: str) -> str:
    """The weights in the form that transformers reads."""
    from outrider.models import sources
    from outrider.models.export import as_folder

    return str(as_folder(sources.resolve(model)))


if __name__ == "__main__":
    main()
