"""Drafters against plain decoding on a GPU, in turns within one process: one model, whole calls of `LLM.chat`.

    PYTHONPATH=src python scripts/gpu_turns.py --model FOLDER --prompts turns.jsonl --out turns-out.jsonl \\
        [--modes auto,eagle:tree=31,eagle:tree=15,ngram] [--batches 1,4,16,64,256] [--rounds 3] [--seconds 240]

All modes take their turn at every prompt (one at a time) or batch, plain decoding among them, in an order that changes;
a call is timed from `chat` to its last result (`--tokens` each, no end before that). Texts that differ from plain
decoding's make a mode void. A first pass over all calls comes before the rounds and is told apart: prompts are in no
cache of a head, and what loading did not prepare is compiled and captured. Lines of JSON are written to --out as they
come, the table is printed last. What does not fit into --seconds, loading included, is left out and named. `outrider
bench --device cuda` has a process for each mode, peers, and prompts that no cache knows.

"First call" is the very first one of a mode with that batch, beside plain decoding's median of the same prompts, which
are in the cache then; "least first" the least of all of them. The columns "rounds" and "plain passes" are of the
sequence of a call that has most, as medians over the calls; "ms/round" and "ms/pass" are what the engine itself
measured (0: it did not), "tries" are of all calls.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from outrider import LLM, SamplingParams
from outrider.backends import local
from outrider.bench import machine, workloads
from outrider.bench.batches import DIGEST, Line, batch_sizes
from outrider.bench.batches_figures import assemble
from outrider.bench.peers import OURS
from outrider.bench.report import Report, ReportTable, markdown_table
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.core.request import Result
from outrider.drafters import PLAIN, kinds
from outrider.engine.throughput import BatchWork

MODES = "auto,eagle:tree=31,eagle:tree=15,ngram"


class Call(NamedTuple):
    batch: int
    group: int
    prompts: tuple[BenchPrompt, ...]


class Turns:
    def __init__(self, given: argparse.Namespace, out: TextIO | None) -> None:
        self._given, self._out = given, out
        self._until = time.monotonic() + given.seconds if given.seconds else float("inf")
        self._order, self._took = random.Random(given.seed), dict[tuple[int, str], float]()
        self.modes = [PLAIN, *(mode for mode in given.modes.split(",") if mode != PLAIN)]
        self.batches = batch_sizes(given.batches)
        self._prompts = workloads.chosen(given.prompts, (), None)
        self._params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
        self.lines: list[Line] = []

    def run(self) -> None:
        given = self._given
        heavy = [mode for mode in self.modes if any(kind.has_weights for kind in kinds(mode))]
        if len(heavy) > local.MOST_WITH_WEIGHTS:
            raise OutriderError(f"at most {local.MOST_WITH_WEIGHTS} modes with weights of their own, not {len(heavy)}")
        local.IDLE_WITH_WEIGHTS = local.MOST_WITH_WEIGHTS  # none is dropped and built anew between its turns
        same = {"device": given.device, "tokens": given.tokens, "rounds": given.rounds, "seconds": given.seconds}
        self._say("settings", model=given.model, modes=[f"{OURS} {mode}" for mode in self.modes],
                  batches=self.batches, prompts=len(self._prompts), machine=machine.describe(),
                  gpu=machine.gpu(given.device), **same)  # fmt: skip
        self._llm = self._loaded()
        try:
            for mode in self.modes[1:]:
                self._prepare(mode)
            for batch in self.batches:
                self._measure(batch)
        finally:
            self._llm.close()

    def _loaded(self) -> LLM:
        given, begin = self._given, time.monotonic()
        memory = {"cache_memory": given.cache_memory} if given.cache_memory else {}
        llm = LLM(given.model, PLAIN, given.device, given.dtype, max_batch=max(self.batches), **memory)
        self._say("loaded", engine=OURS, mode=PLAIN, seconds=round(time.monotonic() - begin, 2))
        return llm

    def _prepare(self, mode: str) -> None:
        begin = time.monotonic()
        self._llm.backend.prepare(mode)
        self._say("loaded", engine=OURS, mode=mode, seconds=round(time.monotonic() - begin, 2))

    def _measure(self, batch: int) -> None:
        """All calls once, then rounds of them, as long as there is time."""
        calls = self._calls(batch)
        for call in calls:
            if not self._fits(batch, *self.modes):
                return self._leave_out(f"{batch} at once")
            for mode in self.modes:
                self._say("first", **self._call(mode, call))
        for number in range(1, self._given.rounds + 1):
            for call in calls:
                if not self._fits(batch, *self.modes):
                    return self._leave_out(f"{batch} at once from round {number}, call {call.group} on")
                for mode in self._order.sample(self.modes, len(self.modes)):
                    self._say("turn", **self._call(mode, call), round=number, cold=False)
        return None

    def _fits(self, batch: int, *modes: str) -> bool:
        """By what such calls took, or those of the batch before."""
        known = [self._took.get((batch, mode), self._longest()) for mode in modes]
        return time.monotonic() + sum(known) < self._until

    def _longest(self) -> float:
        return max(self._took.values(), default=0.0)

    def _leave_out(self, what: str) -> None:
        self._say("note", text=f"left out, the time was up: {what}")

    def _calls(self, batch: int) -> list[Call]:
        """Prompts from all over the file: `--single` calls of one, else one call."""
        count, known = self._given.single if batch == 1 else 1, len(self._prompts)
        total = count * batch
        every = [self._prompts[place * known // total % known] for place in range(total)]
        return [Call(batch, group, tuple(every[group * batch : (group + 1) * batch])) for group in range(count)]

    def _call(self, mode: str, call: Call) -> Line:
        chats = [[{"role": "user", "content": prompt.text}] for prompt in call.prompts]
        trial = None if self._llm.engine.policy is None else self._llm.engine.policy.trial
        tries = 0 if trial is None else trial.tries
        self._llm.backend.forget_texts()
        begin = time.perf_counter()
        results = self._llm.chat(chats, self._params, draft=mode, progress=False)
        seconds = time.perf_counter() - begin
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the device was given ahead is not the next mode's
        self._took[call.batch, mode] = max(seconds, 0.5 * self._took.get((call.batch, mode), 0.0))
        line = {"engine": OURS, "mode": mode, "batch": call.batch, "group": call.group, "seconds": seconds}
        if trial is not None:
            round_s, pass_s = trial.pass_seconds(call.batch, BatchWork(frozenset({(mode, "")}), call.batch > 1))
            line |= {"tries": trial.tries - tries, "round_ms": 1e3 * round_s, "pass_ms": 1e3 * pass_s}
        return {**line, **counted(results), "prompts": [prompt.id for prompt in call.prompts]}

    def _say(self, what: str, **line: Any) -> None:
        self.lines.append({"what": what, **line})
        text = json.dumps(self.lines[-1], ensure_ascii=False)
        if self._out is not None:
            print(text, file=self._out, flush=True)
        if what not in ("turn", "first"):
            print(text, flush=True)


def counted(results: Sequence[Result]) -> Line:
    """What a call wrote and drafted; its texts as digests."""
    stats = [result.stats for result in results]
    total = sum(stats[1:], stats[0])
    failed = next((result.error for result in results if result.error), "")
    if failed:
        raise OutriderError(failed)
    return {
        "tokens": total.tokens, "steps": total.steps, "drafts": total.drafts, "drafted": total.drafted,
        "accepted": total.accepted, "rounds": max(each.drafts for each in stats),
        "plain_passes": max(each.steps - each.drafts for each in stats),
        "writing_s": max(each.writing_seconds for each in stats), "cached": total.cached,
        "phases": {phase: round(seconds, 5) for phase, seconds in total.seconds.items()},
        "texts": [hashlib.sha256(json.dumps(list(r.token_ids)).encode()).hexdigest()[:DIGEST] for r in results],
    }  # fmt: skip


def table(lines: Sequence[Line], report: Report) -> ReportTable:
    columns = ("mode", "at once", "tok/s", "of plain", "least call", "first call", "least first", "equal", "tok/round",
               "ms/round", "ms/pass", "rounds", "plain passes", "tries")  # fmt: skip
    return ReportTable("In turns with plain decoding", columns, list(_rows(lines, report)), 1)


def _rows(lines: Sequence[Line], report: Report) -> Iterator[tuple[str, ...]]:
    for row in report["rows"]:
        own = [line for line in lines if is_of(line, row["batch"], row["mode"])]
        plain = [line for line in lines if is_of(line, row["batch"], PLAIN)]
        turns, first = ([line for line in own if line["what"] == what] for what in ("turn", "first"))
        ratio, drafts = row["ratio"], sum(line["drafts"] for line in turns)
        texts = {line["group"]: line["texts"] for line in plain}
        void = row["equal"] < row["compared"] or any(line["texts"] != texts[line["group"]] for line in first)
        firsts = [usual(plain, line["group"]) / line["seconds"] for line in first]
        yield (
            row["mode"],
            str(row["batch"]),
            f"{row['tokens_per_second']:,.0f}",
            "void" if void else f"{ratio['value']:.3f} [{ratio['least']:.3f}-{ratio['most']:.3f}]",
            f"{row['least_call']:.3f}",
            f"{firsts[0]:.3f} ({1e3 * first[0]['seconds']:,.0f} ms)",
            f"{min(firsts):.3f}",
            f"{row['equal']}/{row['compared']}",
            f"{1 + sum(line['accepted'] for line in turns) / drafts:.2f}" if drafts else "-",
            f"{turns[-1].get('round_ms', 0.0):.3f}",
            f"{turns[-1].get('pass_ms', 0.0):.3f}",
            f"{statistics.median(line['rounds'] for line in turns):g}",
            f"{statistics.median(line['plain_passes'] for line in turns):g}",
            str(sum(line.get("tries", 0) for line in own)),
        )


def usual(plain: Sequence[Line], group: int) -> float:
    """Seconds of plain decoding's call with these prompts, in the rounds; of the first pass where there were none."""
    own = [line for line in plain if line["group"] == group]
    return statistics.median(line["seconds"] for line in [line for line in own if line["what"] == "turn"] or own)


def is_of(line: Line, batch: int, mode: str) -> bool:
    return line["what"] in ("turn", "first") and (line["batch"], line["mode"]) == (batch, mode)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True, help="a folder, or a GGUF file")
    made.add_argument("--prompts", help="a .jsonl file in Spec-Bench form; without it the built-in prompts")
    made.add_argument("--modes", default=MODES, help="drafters with commas between; plain decoding is always there")
    made.add_argument("--batches", default="1,4,16,64,256")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--single", type=int, default=24, help="prompts, one after the other, where the batch is 1")
    made.add_argument("--seconds", type=float, default=0.0, help="of all, loading included; 0: as long as it takes")
    made.add_argument("--device", default="cuda")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--cache-memory", type=float, default=0.0, help="GiB; 0: a quarter of what is free")
    made.add_argument("--seed", type=int, default=0, help="of the order of the modes")
    made.add_argument("--out", type=Path)
    return made


def main() -> int:
    given = parser().parse_args()
    out = given.out.open("w", encoding="utf-8") if given.out else None
    try:
        turns = Turns(given, out)
        turns.run()
    except OutriderError as error:
        sys.exit(f"gpu_turns: {error}")
    report = assemble(turns.lines, " ".join(sys.argv))
    text = markdown_table(table(turns.lines, report))
    print(text, flush=True)
    if given.out:
        given.out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
