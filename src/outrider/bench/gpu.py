"""Everything that is claimed for one GPU, measured by one command:

    PYTHONPATH=src python -m outrider.bench.gpu --model smollm2-135m --out gpu [--transformers]

Writes gpu.json and gpu.md. Weights in the shape of an 8B model are random: its speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outrider import drafters
from outrider.bench import card, gpu_report, machine, workloads
from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Parts
from outrider.engine.engine import Engine
from outrider.engine.pace import Pace
from outrider.engine.scheduler import Limits
from outrider.llm import LLM
from outrider.models.base import Feed
from outrider.models.cuda.model import CudaLlama
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Rope, Weights
from outrider.models.stack import Layer, TorchStack

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHES = (1, 4, 16, 64, 256)
BEGINNINGS = 5  # of the sequences by which the host's time is measured
DEVICE = torch.device("cuda")

Found = dict[str, Any]


def eight_billion() -> CudaLlama:
    """Llama 3.1 8B's shape with random weights: layers that add little, and an output matrix that likes the token after
    the last. Near ties, which random weights are full of, would depend on the rounding of a batch."""
    hidden, inner, heads, kv_heads, head_dim, layers, vocab = 4096, 14336, 32, 8, 128, 32, 128256
    torch.manual_seed(0)

    def rand(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=torch.bfloat16) * 0.02

    def layer() -> Layer:
        return Layer(
            1 + rand(hidden),
            Dense(rand((heads + 2 * kv_heads) * head_dim, hidden)),
            Dense(0.1 * rand(hidden, heads * head_dim)),
            1 + rand(hidden),
            Dense(rand(2 * inner, hidden)),
            Dense(0.1 * rand(hidden, inner)),
        )

    config = LlamaConfig(hidden, heads, kv_heads, head_dim, 1e-5, None, vocab, layers, 8192)
    rope = Rope(1.0 / 500_000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    stack = TorchStack(config, [layer() for _ in range(layers)])
    embedding = 50 * rand(vocab, hidden)
    head = rand(vocab, hidden) + 0.02 * embedding.roll(1, 0)
    weights = Weights(Dense(embedding), stack, 1 + rand(hidden), Dense(head), rope)
    return CudaLlama(config, weights, 16 << 30)


def passes(model: CudaLlama, best: float, context: int = 256) -> list[Found]:
    """A pass of one sequence by its rows: the device's time, the wall's, and the share of the copy's bandwidth."""
    found: list[Found] = []
    for rows in ROWS:
        model.forward([Feed(-1, [1] * context)])
        feed = Feed(-1, [2], Draft.chain([3] * (rows - 1)))
        walls = []
        for _ in range(12):
            begin = time.perf_counter()
            model.forward([feed]).logits[-1, -1].item()  # type: ignore[attr-defined]
            walls.append(1e3 * (time.perf_counter() - begin))
            model.crop(-1, context)
        ms = card.device_ms(model.replay)
        model.free(-1)
        share = model.pass_bytes / ms / 1e9 / best
        found.append({"rows": rows, "ms": ms, "wall_ms": statistics.median(walls[2:]), "share": share})
        found[-1]["ratio"] = ms / found[0]["ms"]
    return found


def begin(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, answers: Seq[Seq[int]]) -> list[Sequence]:
    """All prompts at once, each with its first token written."""
    seqs = [
        Sequence(id, list(prompt), params, prediction=tuple(answers[id]) if answers else (), dice=Dice(id))
        for id, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        engine.add(seq)
    while any(not seq.output for seq in seqs):
        engine.step()
    torch.cuda.synchronize()
    return seqs


def run(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, answers: Seq[Seq[int]] = ()) -> Found:
    """How it went after the last prompt was taken in."""
    seqs = begin(engine, prompts, params, answers)
    start, before, steps = time.perf_counter(), sum(len(seq.output) for seq in seqs), 0
    while engine.busy:
        engine.step()
        steps += 1
    seconds, tokens = time.perf_counter() - start, sum(len(seq.output) for seq in seqs) - before
    per_token = 1e3 * seconds * len(seqs) / tokens  # a sequence waits so long for one token
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_pass": tokens / max(1, sum(seq.stats.steps for seq in seqs) - len(seqs)),
        "ms_between_tokens": per_token,
        "ms_per_step": 1e3 * seconds / max(1, steps),
        "answers": [[token.id for token in seq.output] for seq in seqs],
    }


def host(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams, answers: Seq[Seq[int]]) -> Found:
    """A step of the whole batch: its time by the clock, the time of the pass in it by the device's, and the rest.

    Medians over several beginnings: a processor that others use as well has slow moments."""
    model = engine.model
    assert isinstance(model, CudaLlama)
    walls: list[float] = []
    passes: list[float] = []
    for _ in range(BEGINNINGS):
        seqs = begin(engine, prompts, params, answers)
        with model.timed() as device:
            for step in range(12):
                start = time.perf_counter()
                engine.step()  # the verdicts are on the host when it returns
                if step > 1:
                    walls.append(1e3 * (time.perf_counter() - start))
        passes += device[2:]
        for seq in seqs:
            engine.cancel(seq.id)
    rest = statistics.median(wall - ms for wall, ms in zip(walls, passes, strict=True))
    return {"ms_of_a_step": statistics.median(walls), "device_ms": statistics.median(passes), "host_ms": rest}


def new_engine(model: CudaLlama, draft: str, batch: int, pace: bool = False, piece: int = 8192) -> Engine:
    parts = Parts(model, lambda name, quantize: model)
    return Engine(model, drafters.build(draft, parts), Limits(batch, piece), Pace() if pace else None)


def oracle(model: CudaLlama) -> Found:
    """Drafts of 5 that are right 8 times of 10 and cost nothing, against plain decoding, one sequence and many."""
    said: Found = {"acceptance": 0.8, "length": 5, "expected": (1 - 0.8**6) / (1 - 0.8)}
    for batch, tokens in ((1, 768), (64, 96)):
        prompts = [[(7 * i + j) % 1000 for j in range(64)] for i in range(batch)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        plain, fast = new_engine(model, "none", batch), new_engine(model, "oracle:rate=0.8,length=5", batch)
        answers = run(plain, prompts, params)["answers"]
        for _ in range(2):  # what comes a second time is captured
            run(plain, prompts, params)
            run(fast, prompts, params, answers)
        without = run(plain, prompts, params)
        with_it = run(fast, prompts, params, answers)
        said[f"batch {batch}"] = {
            "plain": _short(without),
            "oracle": _short(with_it),
            "speed_up": with_it["tokens_per_second"] / without["tokens_per_second"],
            "same": with_it["answers"] == answers,
            **host(fast, prompts, params, answers),
        }
    return said


def _short(said: Found) -> Found:
    return {key: value for key, value in said.items() if key != "answers"}


def one_stream(llm: LLM, prompts: Seq[workloads.Prompt], rounds: int = 3) -> Found:
    """Plain and prompt lookup, prompt by prompt in turns: tokens a second after the first token, and the same text."""
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    speeds: list[dict[str, list[float]]] = [{"none": [], "ngram": []} for _ in prompts]
    same = [0, 0]  # texts that were, of all
    for number in range(2 + rounds):
        for prompt, both in zip(prompts, speeds, strict=True):
            texts = []
            for draft, found in both.items():
                stream = llm.stream([{"role": "user", "content": prompt.text}], params, draft=draft)
                times = [(time.perf_counter(), len(chunk.tokens)) for chunk in stream]
                texts.append([token.id for token in stream.result().tokens])
                if number > 1:  # the first rounds capture graphs
                    found.append(sum(count for _, count in times[1:]) / (times[-1][0] - times[0][0]))
            if number:  # in the first round one computes the prompt and the other finds it in the cache
                same = [same[0] + (texts[0] == texts[1]), same[1] + 1]
    kinds = {}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        own = [both for prompt, both in zip(prompts, speeds, strict=True) if prompt.kind == kind]
        kinds[kind] = _compared(own) | {"prompts": [_compared([both])["ratio"] for both in own]}
    return {**_compared(speeds), "same_texts": same, "kinds": kinds}


def _compared(speeds: Seq[dict[str, list[float]]]) -> Found:
    """Tokens a second over all of these prompts, and lookup against plain."""
    plain = statistics.harmonic_mean([speed for both in speeds for speed in both["none"]])
    lookup = statistics.harmonic_mean([speed for both in speeds for speed in both["ngram"]])
    return {"plain": plain, "ngram": lookup, "ratio": lookup / plain}


def batches(model: CudaLlama, prompts: Seq[Seq[int]]) -> list[Found]:
    found = []
    for batch in BATCHES:
        some = [prompts[i % len(prompts)] for i in range(batch)]
        params = SamplingParams(max_tokens=128, ignore_eos=True)
        row: Found = {"batch": batch}
        engines = {draft: new_engine(model, draft, batch, pace=True) for draft in ("none", "ngram")}
        for engine in engines.values():
            for _ in range(3):  # captures graphs, teaches the pace
                run(engine, some, params)
        said = {draft: run(engine, some, params) for draft, engine in engines.items()}
        row |= {draft: _short(one) for draft, one in said.items()}
        row["same"] = sum(a == b for a, b in zip(said["none"]["answers"], said["ngram"]["answers"], strict=True))
        found.append(row)
    return found


def bulk(model: CudaLlama, prompts: Seq[Seq[int]], batch: int = 2048) -> Found:
    """As much text as it can write: sampled, more sequences than run at once, prompts included in the time."""
    engine = new_engine(model, "none", batch, piece=2048)
    for rounds in (1, 1, 4):  # the last one counts
        seqs = [
            Sequence(id, list(prompts[id % len(prompts)][-64:]),
                     SamplingParams(max_tokens=100 + id % 200, temperature=0.8, seed=id, ignore_eos=True))
            for id in range(rounds * batch)
        ]  # fmt: skip
        for seq in seqs:
            seq.dice = Dice(seq.params.seed)
            engine.add(seq)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - begin
    tokens = sum(len(seq.output) for seq in seqs)
    return {"batch": batch, "sequences": len(seqs), "tokens": tokens, "tokens_per_second": tokens / seconds}


def transformers(folder: str, llm: LLM, text: str, said: Found, save: Callable[[], None]) -> None:
    """transformers on the same weights and prompt: as it comes, and with a static cache and compiled."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    ids = torch.tensor([llm.backend.render([{"role": "user", "content": text}])], device=DEVICE)

    def speed(rounds: int, **options: Any) -> float:
        took = []
        for number in range(1 + rounds):
            lengths = []
            for count in (1, 128):  # what the difference takes is decoding alone
                torch.cuda.synchronize()
                start = time.perf_counter()
                model.generate(
                    ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **options
                )
                torch.cuda.synchronize()
                lengths.append(time.perf_counter() - start)
            if number:
                took.append(127 / (lengths[1] - lengths[0]))
        return statistics.median(took)

    said["outrider"] = one_stream(llm, [workloads.Prompt("", "chat", text)], 2)["plain"]
    said["default"] = speed(1)
    said["prompt lookup"] = speed(1, prompt_lookup_num_tokens=10)
    save()
    try:
        said["static cache, compiled"] = speed(2, cache_implementation="static")  # generate compiles by itself
    except Exception as error:  # somebody else's compiler: the rest was measured all the same
        said["static cache, compiled"] = f"failed: {type(error).__name__}: {str(error)[:200]}"
    save()


@contextmanager
def _part(name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def measure(model: str, folder: str | None, part: str, save: Callable[[Found], None]) -> Found:
    found: Found = {"command": " ".join(["python -m outrider.bench.gpu", *(["--transformers"] if folder else [])])}
    found["versions"] = {"torch": torch.__version__, "python": platform.python_version(), **machine.describe()}
    with _part("card"):
        found["card"] = asdict(card.measure(DEVICE))
    best = found["card"]["copy_tb_s"]
    if part != "8b":
        measure_small(model, folder, best, found, save)
    if part != "small":
        measure_8b(best, found)
    save(found)
    return found


def measure_small(model: str, folder: str | None, best: float, found: Found, save: Callable[[Found], None]) -> None:
    with _part("ready"):
        begin = time.perf_counter()
        llm = LLM(model, device="cuda", dtype="bfloat16", cache_memory=50.0)
        loaded = time.perf_counter() - begin
        llm.generate("Hello", SamplingParams(max_tokens=1))
        found["ready"] = {"load_s": loaded, "first_token_s": time.perf_counter() - begin}
    small = llm.engine.model
    assert isinstance(small, CudaLlama)
    with _part("one stream"):
        found["one stream"] = one_stream(llm, workloads.built_in())
    save(found)
    prompts = workloads.select(workloads.built_in(), limit=2)
    ids = [llm.backend.render([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    with _part("small passes"):
        found["small"] = {"bytes": small.pass_bytes, "passes": passes(small, best)}
    with _part("batches"):
        found["batches"] = batches(small, ids)
    with _part("bulk"):
        found["bulk"] = bulk(small, ids)
    save(found)
    if folder:
        with _part("transformers"):
            transformers(folder, llm, prompts[0].text, found.setdefault("transformers", {}), lambda: save(found))


def measure_8b(best: float, found: Found) -> None:
    with _part("8B"):
        big = eight_billion()
        found["8B shape"] = {"bytes": big.pass_bytes, "passes": passes(big, best)}
        found["8B shape"]["oracle"] = oracle(big)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--part", choices=("all", "small", "8b"), default="all")
    parser.add_argument("--transformers", action="store_true", help="also measure transformers on the same weights")
    said = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    said.out.mkdir(parents=True, exist_ok=True)
    folder = None
    if said.transformers:
        from outrider.models import sources
        from outrider.models.export import as_folder

        folder = str(as_folder(sources.resolve(said.model)))

    def save(found: Found) -> None:
        (said.out / "gpu.json").write_text(json.dumps(found, indent=1))

    found = measure(said.model, folder, said.part, save)
    (said.out / "gpu.md").write_text(gpu_report.markdown(found))
    print(gpu_report.markdown(found))


if __name__ == "__main__":
    main()
