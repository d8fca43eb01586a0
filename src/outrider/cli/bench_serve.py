"""`outrider bench serve`: what speculation does to a server under load."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench import serve as serving, serve_report as reports
from outrider.bench.plan import default_drafts
from outrider.bench.workloads import KINDS
from outrider.cli import options
from outrider.cli.fields import command, fields
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.cli.serve import check_installed
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.settings import DEVICES, DTYPES

SERVER, WHAT = "Server", "What is measured"
OWN = ("device", "dtype", "cache_memory")  # settings of a server of our own


@dataclass(frozen=True)
class WorkloadOptions:
    """Which drafters are measured, on which prompts."""

    draft: tuple[str, ...] = option(
        (),
        "A drafter: NAME or NAME:key=value,... Repeatable; plain decoding is always measured.",
        flags=("--draft", "-d"),
        shown=DEFAULT.draft,
        panel=WHAT,
    )
    kind: tuple[str, ...] = option((), f"One of {', '.join(KINDS)}. Repeatable.", shown="all", panel=WHAT)
    prompts: str | None = option(
        None, "A JSONL file in Spec-Bench form: question_id, category, turns.", shown="built in", panel=WHAT
    )
    limit: int | None = option(None, "Prompts of each kind.", shown="all", panel=WHAT)


@dataclass(frozen=True)
class BenchServeOptions(WorkloadOptions):
    url: str = option("", "A server that runs already.", shown="one of our own", panel=SERVER)
    model: str | None = option(
        None,
        "The model of our own server; with --url, the name that requests carry.",
        flags=("--model", "-m"),
        shown=DEFAULT.model,
        panel=SERVER,
    )
    api_key: str = option("", "For --url.", env="OUTRIDER_API_KEY", shown=False, panel=SERVER)
    threads: int = option(0, "CPU threads of our own server; 0: one per core.", panel=SERVER)
    device: str = option(DEFAULT.device, f"Of our own server: one of {', '.join(DEVICES)}.", panel=SERVER)
    dtype: str = option(DEFAULT.dtype, f"Of our own server: one of {', '.join(DTYPES)}.", panel=SERVER)
    cache_memory: float = option(
        DEFAULT.cache_memory, "GiB for keys and values of our own server.", shown="a share", panel=SERVER
    )
    library: bool = option(
        False,
        "Also make the same calls without a server, and report the share of that speed that the server keeps.",
        panel=WHAT,
    )
    streams: str = option("1,4,16,32", "Clients at once.", panel=WHAT)
    rounds: int = option(3, "How often all prompts are asked in each mode.")
    max_tokens: int = option(128, "Tokens of an answer.")
    temperature: float = option(0.0, "Above 0 each prompt has a seed of its own.")
    seed: int = option(0, "Seed for the order of modes and the prompts' seeds.")
    ignore_eos: bool = option(False, "Every answer has --max-tokens tokens.")
    warm_up: bool = option(False, "A first round of everything that does not count; prompts are then in the cache.")
    seconds: float = option(0.0, "Start no round after this many seconds, loading included; 0: no limit.")
    timeout: float = option(120.0, "Seconds of silence after which a request is lost.")
    output: Path | None = option(
        None, "Folder for the report.", flags=("--output", "-o"), shown="./outrider-bench-serve-DATE"
    )

    def plan(self) -> serving.LoadPlan:
        same = ("url", "streams", "prompts", "limit", "rounds", "max_tokens", "temperature", "threads", "seed")
        own = {name: getattr(self, name) for name in OWN if getattr(self, name) != getattr(DEFAULT, name)}
        if own and self.url:
            raise OutriderError(f"{', '.join(own)}: only for a server of our own; leave out --url or these")
        request = serving.LoadRequest(
            model=self.model or ("" if self.url else DEFAULT.model),
            key=self.api_key,
            drafts=self.draft or default_drafts(),
            kinds=self.kind,
            timeout=self.timeout,
            output=self.output or dated_folder("outrider-bench-serve"),
            own=own,
            **{name: getattr(self, name) for name in (*same, "library", "ignore_eos", "warm_up", "seconds")},
        )
        return request.plan()


def dated_folder(name: str) -> Path:
    return Path(f"{name}-{datetime.now():%Y-%m-%d-%H%M%S}")


@command
def serve(*, own: Annotated[BenchServeOptions, fields(BenchServeOptions)]) -> None:
    """Measure a server under load, with and without speculation.

    The modes take turns: in each round all prompts are asked with speculation off and with each drafter, from --streams
    clients at once. Shows throughput against plain decoding, time to the first token and between tokens, and checks
    that every text is that of plain decoding, and of the prompt run alone. Writes report.json and report.md, after
    every round.

    [dim]$[/] outrider bench serve --streams 1,4 --limit 1 --rounds 1
    [dim]$[/] outrider bench serve --url http://127.0.0.1:8000 --streams 32 --rounds 10
    [dim]$[/] outrider bench serve --device cuda --streams 1,8,32,128 --warm-up --ignore-eos --library
    [dim]$[/] outrider bench serve --kind edit --streams 1 --draft ngram --draft layer_skip
    """
    if not own.url:
        check_installed()
    plan = own.plan()
    if not own.url:
        options.pull_known(plan.model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    command = shlex.join(["outrider", *sys.argv[1:]])

    def save(outcome: serving.LoadResult) -> None:
        reports.write(reports.assemble(plan, outcome, command), plan.output)

    with bar("{task.completed:.0f}/{task.total:.0f}", plain=5.0) as show:
        outcome = serving.run(plan, show, save)
    save(outcome)
    reports.show(reports.assemble(plan, outcome, command))
    note(f"written to {plan.output}")
    raise typer.Exit(130 if outcome.interrupted else 0)
