"""The company audit of many drafters on one GPU, divided among processes that run at once, within a time limit:

PYTHONPATH=src python scripts/audit_matrix.py run DIR --model FOLDER -d none -d ngram --prompts turns.jsonl
python scripts/audit_matrix.py status DIR...

Needs torch, triton and transformers. Every process keeps its model open and takes one job after the other: first the
reference texts, then critical lengths and long contexts of every drafter, then batches, the large ones first, which
compare most in a second, and single prompts at last; every batch with every chunk. What has not begun when the time is
up is left out, and `status` says how much of each comparison was made. Files in DIR: references.jsonl,
variants.NN.jsonl (a line as soon as a variant is done), log.NN, jobs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

# (batch from which on, shares of the prompts that are jobs of their own): a job begins with a new drafter, which takes
# seconds, and should still take no more than about a minute on a GPU that others share
SHARES = ((64, 1), (16, 1), (4, 2), (1, 4))
# states of a job; after FAILED comes why. A library may print something else to a worker's stdout
WAITING, BEGUN, DONE, FAILED = "waiting", "begun", "done", "failed: "
END = 5.0  # seconds before the time is up from which on no job begins


@dataclass(frozen=True)
class Job:
    """One call of the audit; without a drafter the reference texts of its prompts."""

    draft: str
    plan: dict[str, Any]  # fields of CompanyPlan

    @property
    def name(self) -> str:
        how = "/".join(f"T={temperature:g}" for temperature in self.plan["temperatures"])
        what = "/".join(self.plan["groups"]) + f" batch {self.plan['batches'][0]} {how}"
        return f"{self.draft or 'references'}: {what} share {self.plan['share'][0]} of {self.plan['share'][1]}"


def references(chunks: Sequence[int], common: dict[str, Any], processes: int) -> Iterator[Job]:
    lengths = {"groups": ["boundaries", "long"], "chunks": list(chunks)}  # critical lengths come from the chunks too
    yield Job("", {**common, **lengths, "batches": [1], "share": [0, 1]})
    for place in range(processes):
        yield Job("", {**common, "groups": ["prompts"], "batches": [1], "share": [place, processes]})


def comparisons(
    drafts: Sequence[str],
    batches: Sequence[int],
    chunks: Sequence[int],
    common: dict[str, Any],
    shares: Sequence[int] = (),
) -> Iterator[Job]:
    """Critical lengths of every drafter, then batches of prompts, the large ones first. `shares`: of the prompts, these
    alone, and no critical lengths; (): all."""
    for temperature, draft in product(common["temperatures"], [] if shares else drafts):
        lengths = {"groups": ["boundaries", "long"], "chunks": list(chunks), "temperatures": [temperature]}
        yield Job(draft, {**common, **lengths, "batches": [1], "share": [0, 1]})
    for batch in sorted(batches, reverse=True):
        count = next(shares for least, shares in SHARES if batch >= least)
        places = [place for place in range(count) if not shares or place in shares]
        for place, temperature, draft in product(places, common["temperatures"], drafts):
            own = {"groups": ["prompts"], "batches": [batch], "share": [place, count], "temperatures": [temperature]}
            yield Job(draft, {**common, **own, "chunks": list(chunks)})


class Driver:
    """The processes, and the jobs that they take."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self._folder, self._until = folder, time.monotonic() + given.seconds
        self._lock, self._jobs = threading.Lock(), (folder / "jobs.jsonl").open("a", encoding="utf-8")
        shared = ["--model", given.model, "--device", given.device, "--dtype", given.dtype]
        shared += ["--cache-memory", str(given.cache_memory), "--prompts", str(given.prompts)]
        shared += ["--raw"] if given.raw else []
        self._workers = [self._start(number, shared) for number in range(given.processes)]

    def _start(self, number: int, options: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "work", str(self._folder), "--number", str(number), *options]
        with (self._folder / f"log.{number:02}").open("a") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def run(self, jobs: Sequence[Job]) -> None:
        """All jobs, as far as the time goes."""
        for job in jobs:
            self._note(job, WAITING)
        waiting = list(reversed(jobs))
        threads = [threading.Thread(target=self._serve, args=(worker, waiting)) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._until - time.monotonic()))

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()

    def _serve(self, worker: subprocess.Popen[str], waiting: list[Job]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while True:
            with self._lock:
                if not waiting or worker.poll() is not None or time.monotonic() > self._until - END:
                    return
                job = waiting.pop()
            self._note(job, BEGUN)
            worker.stdin.write(json.dumps(asdict(job)) + "\n")
            worker.stdin.flush()
            said = next((line.strip() for line in worker.stdout if line.startswith((DONE, FAILED))), "")
            if said or time.monotonic() < self._until:  # else it was ended because the time is up
                self._note(job, said or "the process ended")

    def _note(self, job: Job, state: str) -> None:
        with self._lock:
            said = {"job": job.name, "state": state, "left_s": round(self._until - time.monotonic(), 1)}
            self._jobs.write(json.dumps(said) + "\n")
            self._jobs.flush()


def run(given: argparse.Namespace) -> int:
    given.folder.mkdir(parents=True, exist_ok=True)
    names = ("temperatures", "max_tokens", "longest", "runs")
    common = {**{name: getattr(given, name) for name in names}, "margins": 0, "chunks": []}
    driver = Driver(given.folder, given)
    try:
        driver.run(list(references(given.chunks, common, given.processes)))
        driver.run(list(comparisons(given.draft, given.batches, given.chunks, common, given.shares)))
    finally:
        driver.end()
    return status([given.folder])


def work(given: argparse.Namespace) -> int:
    """One process: jobs from stdin, a word to stdout for each."""
    from outrider import LLM
    from outrider.audit import CompanyPlan, ReferenceStore, audit_company, write_references
    from outrider.bench import workloads
    from outrider.core.errors import one_line
    from outrider.prompts import NamedPrompt

    prompts = [NamedPrompt(each.id, each.kind, each.text) for each in workloads.read_jsonl(given.prompts)]
    where = {"device": given.device, "dtype": given.dtype, "cache_memory": given.cache_memory}
    out = (given.folder / f"variants.{given.number:02}.jsonl").open("a", encoding="utf-8")
    with LLM(given.model, draft="none", pace=False, **where) as llm:
        for line in sys.stdin:
            job = Job(**json.loads(line))
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in job.plan.items()}
            plan, store = CompanyPlan(**fields), ReferenceStore(given.folder / "references.jsonl")

            def found(variant: Any, job: Job = job) -> None:
                print(variant.line, file=sys.stderr, flush=True)
                out.write(json.dumps({"share": job.plan["share"], **asdict(variant)}) + "\n")
                out.flush()

            try:
                if job.draft:
                    audit_company(llm, [job.draft], prompts, plan, raw=given.raw, found=found, store=store)
                else:
                    write_references(llm, prompts, plan, store, raw=given.raw)
                print(DONE, flush=True)
            except Exception as error:  # the other jobs go on; `status` shows it
                print(f"{FAILED}{one_line(error)}", flush=True)
    return 0


def status(folders: Sequence[Path]) -> int:
    """What was compared and what differs; 1 if anything differs, or a job failed."""
    bad = 0
    for folder in folders:
        paths = sorted(folder.glob("variants.*.jsonl"))
        whole = [line for path in paths for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        lines = [json.loads(line) for line in whole]
        texts, tokens = (sum(line[name] for line in lines) for name in ("texts", "tokens"))
        print(f"{folder}: {len(lines)} variants, {texts:,} texts, {tokens:,} tokens")
        bad += _table(lines) + _unfinished(folder)
    return 1 if bad else 0


def _table(lines: Sequence[dict[str, Any]]) -> int:
    """A line for each kind of comparison, texts summed over shares and runs; how many texts are wrong."""
    keys = ("draft", "group", "temperature", "batch", "chunk", "cached")
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        kinds[tuple(line[key] for key in keys)].append(line)
    wrong = 0
    for (draft, group, temperature, batch, chunk, cached), own in sorted(kinds.items()):
        tokens, differing, other, drafted, kept = (
            sum(line[name] for line in own)
            for name in ("tokens", "differing", "other_statistics", "drafted", "accepted")
        )
        by_run = [
            sum(line["texts"] for line in own if line["run"] == run) for run in sorted({line["run"] for line in own})
        ]
        wrong += differing + other
        how = f"{group:10} T={temperature:g} batch {batch:<3} chunk {chunk:<5}{'cached' if cached else 'fresh '}"
        runs = "+".join(map(str, by_run))
        result = f"differ {differing}, statistics {other}, {kept}/{drafted} kept"
        print(f"  {draft[:40]:40} {how} texts {runs:10} tokens {tokens:<9,} {result}")
    return wrong


def _unfinished(folder: Path) -> int:
    """Jobs that were cut off by the time limit, or that failed; how many failed."""
    states: dict[str, str] = {}
    if (folder / "jobs.jsonl").exists():
        for line in (folder / "jobs.jsonl").read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            states[said["job"]] = said["state"]
    waiting = [job for job, state in states.items() if state == WAITING]
    print(f"  jobs: {len(states)}, of which {len(waiting)} were not begun: {'; '.join(waiting) or 'none'}")
    for job, state in states.items():
        if state not in (DONE, WAITING):
            print(f"  {job}: {'not finished' if state == BEGUN else state}")
    return sum(state not in (DONE, BEGUN, WAITING) for state in states.values())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = made.add_subparsers(dest="verb", required=True)
    for verb in ("run", "work"):
        one = verbs.add_parser(verb)
        one.add_argument("folder", type=Path)
        one.add_argument("--model", required=True)
        one.add_argument("--prompts", type=Path, required=True, help="a .jsonl file in Spec-Bench form")
        one.add_argument("--raw", action="store_true", help="without chat template")
        one.add_argument("--device", default="cuda")
        one.add_argument("--dtype", default="bfloat16")
        one.add_argument("--cache-memory", type=float, default=2.5, help="GiB of keys and values of each process")
        if verb == "work":
            one.add_argument("--number", type=int, required=True)
    one = verbs.choices["run"]
    one.add_argument("--draft", "-d", action="append", required=True, help="repeatable")
    one.add_argument("--processes", type=int, default=14)
    one.add_argument("--seconds", type=float, default=300)
    one.add_argument("--max-tokens", type=int, default=128)
    one.add_argument("--longest", type=int, default=0)
    one.add_argument("--runs", type=int, default=2)
    for name, kind, usual in (
        ("batches", int, [64, 16, 4, 1]),
        ("chunks", int, [128, 512, 2048]),
        ("temperatures", float, [0.0, 0.8]),
        ("shares", int, []),  # of the prompts: those of a batch of 1 are divided into 0 to 3, of 4 into 0 and 1
    ):
        one.add_argument(
            f"--{name}", type=lambda text, kind=kind: [kind(part) for part in text.split(",")], default=usual
        )
    verbs.add_parser("status").add_argument("folder", type=Path, nargs="+")
    return made


def main() -> int:
    given = parser().parse_args()
    return status(given.folder) if given.verb == "status" else {"run": run, "work": work}[given.verb](given)


if __name__ == "__main__":
    sys.exit(main())
