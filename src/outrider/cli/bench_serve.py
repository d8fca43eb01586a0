"""`outrider bench serve`: what speculation does to a server under load."""

from __future__ import annotations

import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench import serve as serving, serve_report as reports
from outrider.bench.plan import default_drafts
from outrider.bench.workloads import KINDS
from outrider.cli import options
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.models import sources

SERVER, WHAT = "Server", "What is measured"


def serve(
    url: Annotated[
        str,
        typer.Option(help="A server that runs already.", show_default="one of our own", rich_help_panel=SERVER),
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model of our own server; with --url, the name that requests carry.",
            show_default=DEFAULT.model,
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(help="For --url.", envvar="OUTRIDER_API_KEY", show_default=False, rich_help_panel=SERVER),
    ] = "",
    threads: Annotated[
        int, typer.Option(help="CPU threads of our own server; 0: one per core.", rich_help_panel=SERVER)
    ] = 0,
    streams: Annotated[str, typer.Option(help="Clients at once.", rich_help_panel=WHAT)] = "1,4,16,32",
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "-d",
            help="A drafter: NAME or NAME:key=value,... Repeatable; plain decoding is always measured.",
            show_default=DEFAULT.draft,
            rich_help_panel=WHAT,
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(KINDS)}. Repeatable.", show_default="all", rich_help_panel=WHAT),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A JSONL file in Spec-Bench form: question_id, category, turns.",
            show_default="built in",
            rich_help_panel=WHAT,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each kind.", show_default="all", rich_help_panel=WHAT)
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often all prompts are asked in each mode.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Above 0 each prompt has a seed of its own.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the order of modes, and of the prompts' seeds.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a request is lost.")] = 120.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder.", show_default="./outrider-bench-serve-DATE")
    ] = None,
) -> None:
    """Measure a server under load, with and without speculation.

    The modes take turns: in each round all prompts are asked with speculation off and with each drafter, so many
    streams at once. Shows throughput against plain decoding, time to the first token and between tokens, and checks
    that every text is that of plain decoding, and of the prompt run alone. Writes report.json and report.md.

    [dim]$[/] outrider bench serve --streams 1,4 --limit 1 --rounds 1
    [dim]$[/] outrider bench serve --url http://127.0.0.1:8000 --streams 32 --rounds 10
    [dim]$[/] outrider bench serve --kind edit --streams 1 --draft ngram --draft layer_skip
    """
    plan = serving.make(
        model=(model or "") if url else (model or DEFAULT.model),
        url=url,
        key=api_key,
        drafts=draft or default_drafts(),
        streams=streams,
        prompts=prompts,
        kinds=kind or [],
        limit=limit,
        rounds=rounds,
        max_tokens=max_tokens,
        temperature=temperature,
        threads=threads,
        seed=seed,
        timeout=timeout,
        output=output or Path(f"outrider-bench-serve-{datetime.now():%Y-%m-%d-%H%M%S}"),
    )
    if not url and plan.model in sources.KNOWN:
        options.pull(plan.model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    with bar("{task.completed:.0f}/{task.total:.0f}") as show:
        outcome = serving.run(plan, show)
    report = reports.assemble(plan, outcome, shlex.join(["outrider", *sys.argv[1:]]))
    reports.write(report, plan.output)
    reports.show(report)
    note(f"written to {plan.output}")
    raise typer.Exit(130 if outcome.interrupted else 0)
