"""What a change costs or gains on a GPU: this checkout against an earlier one, and products against cuBLAS. (Drafters
against plain decoding of one checkout, and peers: `outrider bench --device cuda`.)

PYTHONPATH=src python scripts/gpu_price.py --before EARLIER --model FOLDER --prompts turns.jsonl --output price.jsonl

Speeds: `LLM.chat` of batches of prompts x 128 tokens, plain and with ngram, prompts in the cache. Each checkout has a
process of its own that keeps its model open; they run in turns, the order changing from round to round, and only one of
them works at a time. The ratio of a round is this checkout's tokens/s over the earlier one's; `same_texts` says whether
both wrote the same tokens in every round. Bulk: this checkout,
sampled, 2,048 sequences at once, as in docs/benchmarks/gpu-h200. Products: bfloat16, 2,048 rows, the matrices of an 8B
Llama, alone and with the norm, gate or residual that a pass has them do; medians of CUDA events. Needs torch, triton
and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parents[1]
WARM = 2  # calls before the first that counts: a shape that comes a second time is captured as a graph
ROWS = 2048
HIDDEN, INNER, QKV, EPS = 4096, 14336, 6144, 1e-5  # sizes of an 8B Llama

Say = Callable[[dict[str, Any]], None]


class Call(NamedTuple):
    draft: str
    batch: int


class Checkout:
    """The process of one checkout; its answers are JSON lines."""

    def __init__(self, name: str, root: Path, given: argparse.Namespace) -> None:
        self.name = name
        command = [
            sys.executable,
            __file__,
            "--work",
            "--model",
            given.model,
            "--device",
            given.device,
            "--dtype",
            given.dtype,
        ]
        command += [
            "--prompts",
            str(given.prompts),
            "--tokens",
            str(given.tokens),
            "--cache-memory",
            str(given.cache_memory),
            "--single",
            str(given.single),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), *given.also])}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, what: str, *values: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then nothing more comes back either
            self._process.stdin.write(json.dumps([what, *values]) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # anything else a library prints
                return dict(json.loads(line))
        sys.exit(f"error: the process of the checkout {self.name} ended; what it printed is above")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def work(given: argparse.Namespace) -> int:
    """A checkout's process. Only names that both checkouts have are used."""
    from outrider import LLM, SamplingParams

    texts = [json.loads(line)["turns"][0] for line in Path(given.prompts).read_text(encoding="utf-8").splitlines()]
    llm = LLM(
        given.model,
        device=given.device,
        dtype=given.dtype,
        draft="none",
        cache_memory=given.cache_memory,
        max_batch=256,
    )
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)

    def chat(draft: str, batch: int) -> dict[str, Any]:
        count = given.single if batch == 1 else batch
        chats = [[{"role": "user", "content": texts[n * len(texts) // count % len(texts)]}] for n in range(count)]
        written, each = [], []
        for call in [[chat] for chat in chats] if batch == 1 else [chats]:
            begin = time.perf_counter()
            results = llm.chat(call, params, draft=draft, progress=False)
            each.append(time.perf_counter() - begin)
            written += [list(result.token_ids) for result in results]
        stats = [result.stats for result in results]
        digest = hashlib.sha256(json.dumps(written).encode()).hexdigest()
        return {
            "seconds": sum(each),
            "tokens": sum(map(len, written)),
            "texts": digest,
            "each": each,
            "tokens_per_step": sum(one.tokens for one in stats) / sum(one.steps for one in stats),
        }

    def bulk() -> dict[str, Any]:
        from outrider.bench.gpu_speeds import bulk as measure

        ids = [llm.backend.render([{"role": "user", "content": text}]) for text in texts[:16]]
        return dict(measure(llm.engine.model, ids))

    for line in sys.stdin:
        what, *values = json.loads(line)
        print(json.dumps(chat(*values) if what == "chat" else bulk()), flush=True)
    return 0


def warm_up(checkout: Checkout, calls: list[Call], say: Say) -> None:
    """All checkouts at the same time: nothing counts yet, but how long the very first calls take is told."""
    for call in calls:
        for number in range(WARM):
            said = checkout.ask("chat", *call)
            each = [round(seconds, 4) for seconds in said["each"][:3]]
            speed = round(said["tokens"] / said["seconds"])
            say(
                {
                    "what": "warm",
                    "checkout": checkout.name,
                    **call._asdict(),
                    "call": number,
                    "tokens_s": speed,
                    "each": each,
                }
            )


def speeds(checkouts: list[Checkout], calls: list[Call], given: argparse.Namespace, say: Say) -> None:
    """Rounds over all calls until their number or the time is reached."""
    until = time.monotonic() + given.seconds
    threads = [threading.Thread(target=warm_up, args=(checkout, calls, say)) for checkout in checkouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: dict[Call, list[dict[str, float]]] = {call: [] for call in calls}
    texts: dict[Call, set[str]] = {call: set() for call in calls}  # digests of both checkouts', over all rounds
    for number in range(given.rounds):
        if number and time.monotonic() > until:
            say({"what": "note", "text": f"{number} of {given.rounds} rounds: the time was up"})
            break
        for call in calls:
            turn = checkouts if number % 2 == 0 else checkouts[::-1]
            took = {checkout.name: checkout.ask("chat", *call) for checkout in turn}
            found[call].append({name: said["tokens"] / said["seconds"] for name, said in took.items()})
            texts[call] |= {said["texts"] for said in took.values()}
            steps = round(took["now"]["tokens_per_step"], 3)
            say({"what": "round", "round": number, **call._asdict(), **found[call][-1], "tokens_per_step": steps})
    for call, rounds in found.items():
        say({"what": "chat", **call._asdict(), **summary(rounds), "same_texts": len(texts[call]) == 1})


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of tokens/s, and of the ratio within a round with its spread."""
    ratios = [each["now"] / each["before"] for each in rounds if "before" in each]
    said: dict[str, Any] = {name: round(statistics.median(each[name] for each in rounds), 1) for name in rounds[0]}
    return {**said, **(spread(ratios) if ratios else {}), "rounds": len(rounds)}


def spread(ratios: list[float]) -> dict[str, float]:
    found = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 4) for name, value in found.items()}


def products(say: Say) -> None:
    """Each matrix at 2,048 rows: cuBLAS, ours alone, and ours with what a pass has it do besides."""
    import torch

    from outrider.bench.gpu_peaks import device_ms
    from outrider.models.cuda.product import Around, Workspace, linear, widest_in_parts

    device, dtype = torch.device("cuda"), torch.bfloat16
    gain = torch.ones(HIDDEN, device=device, dtype=dtype)
    shapes = {
        "qkv": (QKV, HIDDEN, Around(eps=EPS)),
        "output": (HIDDEN, HIDDEN, Around(gain=gain)),
        "gate_up": (2 * INNER, HIDDEN, Around(eps=EPS, gate=True)),
        "down": (HIDDEN, INNER, Around(gain=gain)),
    }
    for name, (outputs, inputs, around) in shapes.items():
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype) * 0.02
        x = torch.randn(ROWS, inputs, device=device, dtype=dtype)
        work = Workspace(ROWS, HIDDEN, max(widest_in_parts([weight]), outputs), dtype, device)
        residual = torch.randn(ROWS, HIDDEN, device=device, dtype=dtype)  # `work` then has what a norm reads
        square = torch.randn(HIDDEN, HIDDEN, device=device, dtype=dtype) * 0.02
        linear(residual.clone(), square, None, residual, work, Around(gain=gain))
        out = torch.zeros(ROWS, outputs, device=device, dtype=dtype)
        used = out[:, : outputs // 2].contiguous() if around.gate else out.clone()
        ms = {
            "cublas": device_ms(lambda x=x, weight=weight, out=out: torch.matmul(x, weight.T, out=out), device),
            "alone": device_ms(
                lambda x=x, weight=weight, out=out, work=work: linear(x, weight, None, out, work), device
            ),
            "as_used": device_ms(
                lambda x=x, weight=weight, used=used, work=work, around=around: linear(
                    work.next if around.eps else x, weight, None, used, work, around
                ),
                device,
            ),
        }
        shares = {f"share_{kind}": round(ms["cublas"] / ms[kind], 3) for kind in ("alone", "as_used")}
        say({"what": "product", "name": name, "rows": ROWS, **{k: round(v, 4) for k, v in ms.items()}, **shares})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True)
    made.add_argument("--prompts", required=True, help="a .jsonl file in Spec-Bench form")
    made.add_argument("--before", type=Path, help="the earlier checkout (its src/ is enough); without it only this one")
    made.add_argument("--also", action="append", default=[], help="further folders of packages for both; repeatable")
    made.add_argument("--parts", default="chat,bulk,products")
    made.add_argument("--batches", default="1,4,16,64,256")
    made.add_argument("--drafts", default="none,ngram")
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--single", type=int, default=24, help="prompts, one after the other, where the batch is 1")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--seconds", type=float, default=100, help="no round begins later")
    made.add_argument("--device", default="cuda")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--cache-memory", type=float, default=30.0, help="GiB of each process")
    made.add_argument("--output", type=Path)
    made.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> int:
    given = parser().parse_args()
    if given.work:
        return work(given)
    parts, output = given.parts.split(","), given.output.open("w", encoding="utf-8") if given.output else None

    def say(line: dict[str, Any]) -> None:
        for file in filter(None, (sys.stdout, output)):
            print(json.dumps(line), file=file, flush=True)

    roots = {"before": given.before, "now": HERE} if given.before else {"now": HERE}
    checkouts = [Checkout(name, root, given) for name, root in roots.items()] if {"chat", "bulk"} & {*parts} else []
    try:
        if "chat" in parts:
            speeds(
                checkouts,
                [Call(draft, int(batch)) for draft in given.drafts.split(",") for batch in given.batches.split(",")],
                given,
                say,
            )
        if "bulk" in parts:
            say({"what": "bulk", **checkouts[-1].ask("bulk")})
    finally:
        for checkout in checkouts:
            checkout.end()
    if "products" in parts:
        products(say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
