"""Parts of `outrider bench --device cuda` beside batches: what the card can do, passes by their rows, bulk writing, and
the shape of an 8B model (its weights are random: its speed does not depend on them)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.bench import gpu_peaks, gpu_shapes, gpu_speeds, workloads
from outrider.bench.gpu_report import Found
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.models.cuda.model import CudaLlama
from outrider.settings import Settings

SHAPE_MEMORY = 16 << 30  # bytes for keys and values of the 8B shape: 64 sequences of 2,048 tokens
BULK_PROMPTS = 2  # of each kind, whose ends bulk writing continues


def measure(
    model: str,
    own: Mapping[str, Any],
    parts: Sequence[str],
    found: Found,
    save: Callable[[], None],
    show: Callable[[str, int, int], None],
) -> None:
    """`parts`: of passes, bulk, 8b and 8b-oracle. What is found so far is saved after each."""
    show("the card", 0, len(parts))
    found["card"] = asdict(gpu_peaks.measure(gpu_speeds.DEVICE))
    copy_tb_s = found["card"]["copy_tb_s"]
    if {"passes", "bulk"} & {*parts}:
        begin = time.perf_counter()
        with LLM.from_settings(Settings(model, draft="none", device="cuda", **own)) as llm:
            found["ready"] = {"load_s": time.perf_counter() - begin}
            llm.generate("Hello", SamplingParams(max_tokens=1))
            found["ready"]["first_token_s"] = time.perf_counter() - begin
            _measure_own(llm, copy_tb_s, parts, found, save, show)
    if {"8b", "8b-oracle"} & {*parts}:
        show("the shape of an 8B model", len(parts) - 1, len(parts))
        big = gpu_shapes.random_llama(gpu_shapes.SHAPES["8b"], SHAPE_MEMORY, gpu_speeds.DEVICE)
        measure_shape(big, copy_tb_s, parts, found, save, show)


def measure_shape(
    model: CudaLlama,
    copy_tb_s: float,
    parts: Sequence[str],
    found: Found,
    save: Callable[[], None],
    show: Callable[[str, int, int], None],
) -> None:
    """A model of random weights: plain steps of one and of many sequences, passes by their rows, oracle drafts."""
    own = found["8B shape"] = {"bytes": gpu_peaks.pass_bytes(model)}
    if "8b" in parts:
        show("8B shape: plain steps, 1 and 64 at once", 0, 3)
        own["plain"] = gpu_speeds.plain_steps(model, copy_tb_s)
        save()
        show("8B shape: passes by their rows", 1, 3)
        own["passes"] = gpu_speeds.passes(model, copy_tb_s)
        save()
    if "8b-oracle" in parts:
        show("8B shape: oracle drafts", 2, 3)
        own["oracle"] = gpu_speeds.oracle(model)
        save()


def _measure_own(
    llm: LLM,
    copy_tb_s: float,
    parts: Sequence[str],
    found: Found,
    save: Callable[[], None],
    show: Callable[[str, int, int], None],
) -> None:
    model = llm.engine.model
    assert isinstance(model, CudaLlama)
    if "passes" in parts:
        show("passes by their rows", 0, len(parts))
        found["passes"] = gpu_speeds.passes(model, copy_tb_s)
        save()
    if "bulk" in parts:
        show("bulk writing", 1, len(parts))
        prompts = workloads.select(workloads.built_in(), limit=BULK_PROMPTS)
        ids = [llm.backend.render([{"role": "user", "content": prompt.text}]) for prompt in prompts]
        found["bulk"] = gpu_speeds.bulk(model, ids)
        save()
