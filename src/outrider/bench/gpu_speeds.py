"""What is measured on one GPU beside whole calls: passes by their rows, plain steps of batches, oracle drafts, bulk
writing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Seq

import torch

from outrider import drafters
from outrider.bench import gpu_peaks
from outrider.bench.gpu_report import Found
from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed
from outrider.models.cuda.model import CudaLlama

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STARTS = 5  # times that sequences are started to measure the host's time: a shared processor has slow moments
TIMED_STEPS, SKIPPED_STEPS = 12, 2  # steps after each start; the first ones capture graphs and do not count
DEVICE = torch.device("cuda")
CALLS = 12  # passes of one size by the clock, of which the first two capture graphs
STEPS = 96  # plain tokens of each sequence, as a run has them, in which steps are timed
RUNS = 3  # of these that count: the median does


def passes(model: CudaLlama, copy_tb_s: float, rows_of: Seq[int] = ROWS, context: int = 256) -> list[Found]:
    """A pass of one sequence by its rows: the device's time, the wall's, and the share of the copy's bandwidth."""
    found: list[Found] = []
    for rows in rows_of:
        model.forward([Feed(-1, [1] * context)])
        feed = Feed(-1, [2], Draft.chain([3] * (rows - 1)))
        walls = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            model.forward([feed]).logits[-1, -1].item()  # type: ignore[attr-defined]
            walls.append(1e3 * (time.perf_counter() - begin))
            model.crop(-1, context)
        ms = gpu_peaks.pass_ms(model)
        model.free(-1)
        share = gpu_peaks.pass_bytes(model) / ms / 1e9 / copy_tb_s
        found.append({"rows": rows, "ms": ms, "wall_ms": statistics.median(walls[2:]), "share": share})
        found[-1]["ratio"] = ms / found[0]["ms"]
    return found


def plain_steps(
    model: CudaLlama, copy_tb_s: float, batches: Seq[int] = (1, 64), context: int = 256, tokens: int = STEPS
) -> list[Found]:
    """Plain decoding of one sequence and of many: the device's time for a pass, the share of the copy's bandwidth that
    weights, keys and values take in it, and what a step takes by the clock beside the pass: the host's part."""
    found = []
    for batch in batches:
        size, ms = _pass_of(model, batch, context)
        engine, params = new_engine(model, "none", batch), SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompts = [_text(model, number, context - tokens // 2) for number in range(batch)]
        runs = [run(engine, prompts, params)["ms_between_tokens"] for _ in range(2 + RUNS)]  # the first two capture
        step = statistics.median(runs[2:])
        found.append(
            {
                "batch": batch,
                "device_ms": ms,
                "share": size / ms / 1e9 / copy_tb_s,
                "ms_of_a_step": step,
                "host_ms": step - ms,
                "tokens_per_second": 1e3 * batch / step,
            }
        )
    return found


def _pass_of(model: CudaLlama, batch: int, context: int) -> tuple[int, float]:
    """Bytes that a pass of one token of each sequence reads, and the device's milliseconds for it."""
    ids = range(batch)
    model.forward([Feed(id, _text(model, id, context)) for id in ids])
    model.forward([Feed(id, [2]) for id in ids])
    ms = gpu_peaks.pass_ms(model)
    for id in ids:
        model.free(id)
    return gpu_peaks.pass_bytes(model) + batch * context * model.bytes_per_token, ms


def _text(model: CudaLlama, number: int, length: int) -> list[int]:
    """Tokens that no other number's text begins with."""
    return [(7 * number + place) % min(1000, model.vocab_size) for place in range(length)]


def start_all(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, answers: Seq[Seq[int]]) -> list[Sequence]:
    """All prompts at once, each with its first token written."""
    seqs = [
        Sequence(id, list(prompt), params, prediction=tuple(answers[id]) if answers else (), dice=Dice(id))
        for id, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        engine.add(seq)
    while any(not seq.output for seq in seqs):
        engine.step()
    gpu_peaks.settle(_device(engine))
    return seqs


def _device(engine: Engine) -> torch.device:
    assert isinstance(engine.model, CudaLlama)
    return engine.model.device


def run(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, answers: Seq[Seq[int]] = ()) -> Found:
    """How it went after the last prompt was taken in."""
    seqs = start_all(engine, prompts, params, answers)
    start, before, steps = time.perf_counter(), sum(len(seq.output) for seq in seqs), 0
    while engine.busy:
        engine.step()
        steps += 1
    seconds, tokens = time.perf_counter() - start, sum(len(seq.output) for seq in seqs) - before
    per_token = 1e3 * seconds * len(seqs) / tokens  # of one sequence
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_pass": tokens / max(1, sum(seq.stats.steps for seq in seqs) - len(seqs)),
        "ms_between_tokens": per_token,
        "ms_per_step": 1e3 * seconds / max(1, steps),
        "answers": [[token.id for token in seq.output] for seq in seqs],
    }


def host_time(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, answers: Seq[Seq[int]]) -> Found:
    """Medians of a step of the whole batch: its time by the clock, the pass in it by the device's events, the rest."""
    walls: list[float] = []
    passes: list[float] = []
    for _ in range(STARTS):
        seqs = start_all(engine, prompts, params, answers)
        wall, device = _timed_steps(engine)
        walls += wall[SKIPPED_STEPS:]
        passes += device[SKIPPED_STEPS:]
        for seq in seqs:
            engine.cancel(seq.id)
    rest = statistics.median(wall - ms for wall, ms in zip(walls, passes, strict=True))
    return {"ms_of_a_step": statistics.median(walls), "device_ms": statistics.median(passes), "host_ms": rest}


def _timed_steps(engine: Engine) -> tuple[list[float], list[float]]:
    """Milliseconds of each step by the clock, and of its pass on the device."""
    model = engine.model
    assert isinstance(model, CudaLlama)
    walls = []
    with gpu_peaks.timed(model) as device:
        for _ in range(TIMED_STEPS):
            start = time.perf_counter()
            engine.step()  # the verdicts are on the host when it returns
            walls.append(1e3 * (time.perf_counter() - start))
    return walls, list(device)


def new_engine(model: CudaLlama, draft: str, batch: int, pace: bool = False, chunk: int = 8192) -> Engine:
    parts = BuildContext(model, lambda name, quantize: model)
    return Engine(model, drafters.build(draft, parts), Limits(batch, chunk), DraftingPolicy() if pace else None)


def oracle(model: CudaLlama, cases: Seq[tuple[int, int]] = ((1, 256), (64, 96))) -> Found:
    """Drafts of 5 that are right 8 times of 10 and cost nothing, against plain decoding, one sequence and many.
    `cases`: sequences, and tokens of each."""
    found: Found = {"acceptance": 0.8, "length": 5, "expected": (1 - 0.8**6) / (1 - 0.8)}
    for batch, tokens in cases:
        prompts = [_text(model, number, 64) for number in range(batch)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        plain, fast = new_engine(model, "none", batch), new_engine(model, "oracle:rate=0.8,length=5", batch)
        answers = run(plain, prompts, params)["answers"]
        for _ in range(2):  # a shape that comes a second time is captured
            run(plain, prompts, params)
            run(fast, prompts, params, answers)
        without = run(plain, prompts, params)
        with_it = run(fast, prompts, params, answers)
        found[f"batch {batch}"] = {
            "plain": _without_answers(without),
            "oracle": _without_answers(with_it),
            "speed_up": with_it["tokens_per_second"] / without["tokens_per_second"],
            "same": with_it["answers"] == answers,
            **host_time(fast, prompts, params, answers),
        }
    return found


def _without_answers(found: Found) -> Found:
    return {key: value for key, value in found.items() if key != "answers"}


def bulk(model: CudaLlama, prompts: Seq[Seq[int]], batch: int = 2048) -> Found:
    """As much text as it can write: sampled, more sequences than run at once, prompts included in the time."""
    engine = new_engine(model, "none", batch, chunk=2048)
    for rounds in (1, 1, 4):  # the last one counts
        seqs = [
            Sequence(id, list(prompts[id % len(prompts)][-64:]),
                     SamplingParams(max_tokens=100 + id % 200, temperature=0.8, seed=id, ignore_eos=True))
            for id in range(rounds * batch)
        ]  # fmt: skip
        for seq in seqs:
            seq.dice = Dice(seq.params.seed)
            engine.add(seq)
        gpu_peaks.settle(model.device)
        begin = time.perf_counter()
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - begin
    tokens = sum(len(seq.output) for seq in seqs)
    return {"batch": batch, "sequences": len(seqs), "tokens": tokens, "tokens_per_second": tokens / seconds}
