"""Outrider beside vLLM on one GPU: the same weights, prompts and lengths. How many of each engine's texts differ from
its own first run alone, and how fast it is, the engines in turns.

PYTHONPATH=src python scripts/gpu_beside_vllm.py --vllm FOLDER --model FOLDER --head FOLDER --prompts turns.jsonl \
    --output beside.jsonl

`--vllm`: a folder with vLLM and what it needs, for PYTHONPATH. `--head`: an EAGLE head in the form that vLLM loads.
Every engine has a process of its own (vLLM plain, n-gram, eagle3 and batch-invariant; Outrider) and keeps its model
open. Equality: greedy texts of 128 tokens, each prompt alone, alone again (prompts cached), all in one batch, the batch
again; the engines at the same time, for no time is taken. Speed: whole calls, prompts cached, one engine at a time,
rounds in turns; the ratio is to Outrider's plain decoding in the same round. Needs torch, triton and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
WARM = 4  # prompts of a first round that does not count, where the batch is 1


class Engine:
    """A process; its answers are JSON lines."""

    def __init__(self, name: str, given: argparse.Namespace, speculation: str = "", invariant: bool = False) -> None:
        self.name = name
        command = [sys.executable, __file__, "--work", name, "--model", given.model, "--prompts", str(given.prompts)]
        command += ["--tokens", str(given.tokens), "--speculation", speculation, "--device", given.device]
        command += ["--dtype", given.dtype, "--cache-memory", str(given.cache_memory)]
        own = {"PYTHONPATH": str(HERE / "src")}
        if name.startswith("vllm"):
            own = {
                "PYTHONPATH": given.vllm, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_BATCH_INVARIANT": str(int(invariant)),
                "VLLM_CACHE_ROOT": f"{given.output}.cache.{name.replace(' ', '-')}",
            }  # fmt: skip
        with Path(f"{given.output}.{name.replace(' ', '-')}.log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **own}
            )

    def ask(self, what: str, *values: Any) -> dict[str, Any] | None:
        """None: it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([what, *values]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return next((dict(json.loads(line)) for line in self._process.stdout if line.startswith('{"answer"')), None)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def engines(given: argparse.Namespace) -> list[Engine]:
    made = [Engine("outrider", given)]
    if given.vllm:
        eagle = {"method": "eagle3", "model": given.head, "num_speculative_tokens": 4}
        made.append(Engine("vllm plain", given))
        made.append(Engine("vllm ngram", given, json.dumps(NGRAM)))
        made.append(Engine("vllm invariant", given, invariant=True))
        made += [Engine("vllm eagle3", given, json.dumps(eagle))] if given.head else []
    return made


def work(given: argparse.Namespace) -> int:
    turns = [json.loads(line)["turns"][0] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    generate = outrider_texts(given, turns) if given.work == "outrider" else vllm_texts(given, turns)
    for line in sys.stdin:
        what, *values = json.loads(line)
        said: dict[str, Any] = {}
        if what == "texts":
            draft, count = values
            every = list(range(count))
            alone = [[generate(draft, [each])[0] for each in every] for _ in range(2)]
            batch = [generate(draft, every) for _ in range(2)]
            said = {"alone": alone[0], "again": alone[1], "batch": batch[0], "batch again": batch[1]}
        elif what == "speed":
            draft, batch, single = values
            begin = time.perf_counter()
            if batch == 1:
                texts = [generate(draft, [n * len(turns) // single])[0] for n in range(single)]
            else:
                texts = generate(draft, [n * len(turns) // batch % len(turns) for n in range(batch)])
            said = {"seconds": time.perf_counter() - begin, "tokens": sum(map(len, texts))}
        print(json.dumps({"answer": what, **said}), flush=True)
    return 0


def outrider_texts(given: argparse.Namespace, turns: list[str]) -> Any:
    from outrider import LLM, SamplingParams

    where = {"device": given.device, "dtype": given.dtype}
    llm = LLM(given.model, draft="none", cache_memory=given.cache_memory, max_batch=256, **where)
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)

    def generate(draft: str, places: list[int]) -> list[list[int]]:
        chats = [[{"role": "user", "content": turns[place]}] for place in places]
        return [list(each.token_ids) for each in llm.chat(chats, params, draft=draft, progress=False)]

    return generate


def vllm_texts(given: argparse.Namespace, turns: list[str]) -> Any:
    from vllm import LLM, SamplingParams

    more = {"speculative_config": json.loads(given.speculation)} if given.speculation else {}
    llm = LLM(
        given.model, dtype="bfloat16", max_model_len=4096, kv_cache_memory_bytes=16 << 30, max_num_seqs=256,
        disable_log_stats=True, gpu_memory_utilization=0.15, **more,
    )  # fmt: skip
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, temperature=0)

    def generate(draft: str, places: list[int]) -> list[list[int]]:
        chats = [[{"role": "user", "content": turns[place]}] for place in places]
        return [list(each.outputs[0].token_ids) for each in llm.chat(chats, params, use_tqdm=False)]

    return generate


def together(calls: list[tuple[Engine, tuple[Any, ...]]]) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = [None] * len(calls)

    def ask(place: int) -> None:
        engine, values = calls[place]
        found[place] = engine.ask(*values)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def differing(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def equality(running: list[Engine], count: int, say: Any) -> None:
    """Against the engine's own texts, each alone for the first time; with n-gram and eagle3 also against its plain."""
    drafts = ["none", "ngram", "eagle:tree=16", "auto"]
    calls = [(engine, ("texts", "none", count)) for engine in running if engine.name != "outrider"]
    found = dict(zip((engine.name for engine, _ in calls), together(calls), strict=True))
    for draft in drafts:
        found[f"outrider {draft}"] = running[0].ask("texts", draft, count)
    for name, texts in found.items():
        if texts is None:
            say({"what": "texts", "engine": name, "error": "the process ended"})
            continue
        plain = found["outrider none" if name.startswith("outrider") else "vllm plain"] or texts
        ways = {way: differing(texts["alone"], texts[way]) for way in ("again", "batch", "batch again")}
        say({"what": "texts", "engine": name, "texts": count, **{f"differ {way}": n for way, n in ways.items()},
             "differ from its plain alone": differing(plain["alone"], texts["alone"])})  # fmt: skip


def speeds(running: list[Engine], given: argparse.Namespace, say: Any) -> None:
    ways = [
        (engine, draft) for engine in running for draft in (given.drafts if engine.name == "outrider" else ["none"])
    ]
    for batch in given.batches:
        rounds: dict[str, list[float]] = {}
        for number in range(given.rounds + 1):  # the first one warms up
            for engine, draft in ways if number % 2 else ways[::-1]:
                said = engine.ask("speed", draft, batch, given.single if number else WARM)
                name = f"{engine.name} {draft}" if engine.name == "outrider" else engine.name
                if said is not None and number:
                    rounds.setdefault(name, []).append(said["tokens"] / said["seconds"])
        for name, own in rounds.items():
            ratios = sorted(mine / plain for mine, plain in zip(own, rounds["outrider none"], strict=False))
            say({"what": "speed", "batch": batch, "engine": name, "tokens_s": round(statistics.median(own), 1),
                 "ratio": round(statistics.median(ratios), 3), "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
                 "rounds": len(own)})  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True)
    made.add_argument("--prompts", type=Path, required=True, help="a .jsonl file in Spec-Bench form")
    made.add_argument("--vllm", default="", help="a folder with vLLM; none: Outrider alone")
    made.add_argument("--head", default="", help="an EAGLE head that vLLM loads")
    made.add_argument("--texts", type=int, default=96, help="prompts whose texts are compared")
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--rounds", type=int, default=3, help="of the speeds")
    made.add_argument("--single", type=int, default=24, help="prompts, one after the other, where the batch is 1")
    made.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64, 256]
    )
    every = ["none", "ngram", "eagle:tree=16", "auto"]
    made.add_argument("--drafts", type=lambda text: text.split(","), default=every, help="of Outrider's speeds")
    made.add_argument("--cache-memory", type=float, default=20.0, help="GiB of Outrider's keys and values")
    made.add_argument("--device", default="cuda", help="of Outrider")
    made.add_argument("--dtype", default="bfloat16", help="of Outrider")
    made.add_argument("--output", type=Path, required=True)
    made.add_argument("--wait", type=Path, help="the speeds begin when this file is there")
    made.add_argument("--work", default="", help=argparse.SUPPRESS)
    made.add_argument("--speculation", default="", help=argparse.SUPPRESS)
    return made


def main() -> int:
    if "--work" in sys.argv:  # a worker needs no output
        sys.argv += ["--output", os.devnull]
    given = parser().parse_args()
    if given.work:
        return work(given)
    output = given.output.open("w", encoding="utf-8")

    def say(line: dict[str, Any]) -> None:
        for file in (sys.stdout, output):
            print(json.dumps(line), file=file, flush=True)

    running = engines(given)
    try:
        begin = time.monotonic()
        ready = together([(engine, ("ready",)) for engine in running])
        started = [engine.name for engine, said in zip(running, ready, strict=True) if said is not None]
        say({"what": "started", "engines": started, "seconds": round(time.monotonic() - begin)})
        equality(running, given.texts, say)
        while given.wait is not None and not given.wait.exists():
            time.sleep(0.2)
        speeds([engine for engine in running if engine.name in started], given, say)
    finally:
        for engine in running:
            engine.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
