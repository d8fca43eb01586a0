"""`outrider bench`: how fast, against whom, and is it still the same text."""

from __future__ import annotations

import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from outrider.backends import speculation
from outrider.bench import plan as plans, report as reports
from outrider.bench.peers import TABLE
from outrider.bench.run import run
from outrider.bench.workloads import KINDS
from outrider.cli import bench_serve, options
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.models import sources
from outrider.settings import BACKENDS, VLLM_DEFAULTS, Config, Settings

WHAT = "What is measured"
OWN = ("dtype", "quantize", "pace", "piece", "cache_memory")  # settings that one stream can feel


class Size(NamedTuple):
    limit: int | None
    rounds: int
    max_tokens: int


FULL, QUICK = Size(None, 3, 128), Size(1, 1, 48)
app = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command("serve")(bench_serve.serve)


@app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    config: options.ConfigFile = None,
    model: options.Model = DEFAULT.model,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(BACKENDS)}, with the same drafters. Repeatable: both, side by side.",
            show_default=DEFAULT.backend,
            rich_help_panel=WHAT,
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            "-e",
            help=f"One of {', '.join(TABLE)} or all; NAME:mode,... for some of its modes. Repeatable.",
            show_default="outrider",
            rich_help_panel=WHAT,
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "-d",
            help="A drafter of ours: NAME or NAME:key=value,... Repeatable; plain decoding is always measured.",
            show_default=DEFAULT.draft,
            rich_help_panel=WHAT,
        ),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="The draft model for peers that can use one.", rich_help_panel=WHAT)
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(KINDS)}. Repeatable.", show_default="all", rich_help_panel=WHAT),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A JSONL file in Spec-Bench form: question_id, category, turns. Its categories are the kinds.",
            show_default="built in",
            rich_help_panel=WHAT,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each kind.", show_default="all", rich_help_panel=WHAT)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How often each prompt is run.", show_default="3")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer.", show_default="128")] = None,
    dtype: Annotated[str, typer.Option(help="Of our own engine: as with generate.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of every engine; 0: one per core.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides the order in which modes take turns.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a run counts as hung.")] = 120.0,
    python: Annotated[
        list[str] | None, typer.Option(help="The interpreter of an engine: ENGINE=PATH. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder.", show_default="./outrider-bench-DATE")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One prompt of each kind, 48 tokens, one round: under three minutes.")
    ] = False,
) -> None:
    """Measure decoding speed: workloads x engines x drafters.

    Every engine runs in a process of its own; their turns are interleaved prompt by prompt. A speed-up is measured
    against the same engine's plain decoding, with its 95 % confidence interval, and it is [bold]void[/] where the text
    differs. Writes report.json, report.md and report.png.

    [dim]$[/] outrider bench --quick
    [dim]$[/] outrider bench --draft ngram --draft layer_skip --kind edit --kind code
    [dim]$[/] outrider bench --engine all --python vllm=/path/to/python
    [dim]$[/] outrider bench --backend local --backend vllm --draft ngram:length=5
    [dim]$[/] outrider bench serve --streams 1,4,16,32
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    own = {} if dtype == DEFAULT.dtype else {"dtype": Settings(dtype=dtype).dtype}
    if config is not None:
        model, backend, draft, threads, own = _said(ctx, config)
    size = QUICK if quick else FULL
    plan = plans.make(
        model=model,
        engines=engine or ([] if backend else ["outrider"]),
        backends=backend or [],
        drafts=draft or [],
        prompts=prompts,
        kinds=kind or [],
        limit=size.limit if limit is None else limit,
        rounds=size.rounds if rounds is None else rounds,
        max_tokens=size.max_tokens if max_tokens is None else max_tokens,
        threads=threads,
        seed=seed,
        timeout=timeout,
        python=python or [],
        draft_model=draft_model,
        own=own,
        output=output or Path(f"outrider-bench-{datetime.now():%Y-%m-%d-%H%M%S}"),
    )
    for name in sources.KNOWN.keys() & {model, draft_model}:
        options.pull(name)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers end, what was measured is kept
    with bar("{task.completed:.0f}/{task.total:.0f}") as show:
        outcome = run(plan, show)
    report = reports.assemble(plan, outcome, shlex.join(["outrider", *sys.argv[1:]]))
    told = reports.write(report, plan.output)
    reports.show(report)
    for line in [*told, f"written to {plan.output}"]:
        note(line)
    raise typer.Exit(130 if outcome.interrupted else 0)


def _refuse_options(ctx: typer.Context) -> None:
    """What stands before the name of another command would be ignored."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if source is not None and not source.name.startswith("DEFAULT"):
            flag = "--" + name.replace("_", "-")
            raise OutriderError(f"{flag} stands before {ctx.invoked_subcommand}; write it after")


def _said(ctx: typer.Context, file: Path) -> tuple[str, list[str], list[str], int, dict[str, Any]]:
    """Model, backends, drafters, threads and settings of our own engine, of a config file and of what was given on the
    command line over it."""
    lists = {name: ctx.params.pop(name) for name in ("backend", "draft")}
    said = options.chosen(ctx, file)
    for line in said.notes:
        note(line)
    settings = said.settings
    backends = lists["backend"] or [settings.backend]
    _refuse_settings(said, backends)
    if settings.speculative_config is not None and not lists["draft"]:
        lists["draft"] = [speculation.to_draft(settings.speculative_config)]
    own = {name: getattr(settings, name) for name in OWN if getattr(settings, name) != getattr(DEFAULT, name)}
    return (
        settings.model,
        backends,
        lists["draft"] or [settings.draft],
        settings.threads,
        own if settings.backend == "local" else {},
    )


def _refuse_settings(said: Config, backends: list[str]) -> None:
    """What a file says and a benchmark cannot honour."""
    if said.settings.device not in ("auto", "cpu"):
        raise OutriderError(
            f"outrider bench runs on the CPU, not on {said.settings.device}; leave out device, or measure a GPU with "
            "python -m outrider.bench.gpu"
        )
    if "vllm" in backends:
        for name in VLLM_DEFAULTS:
            if getattr(said.settings, name) != getattr(DEFAULT, name):
                raise OutriderError(f"outrider bench runs vLLM with a {name} of its own; leave {name} out of the file")
    if said.params != SamplingParams() or said.query_prefix:
        note(
            "sampling and query_prefix of the file play no part: greedy decoding of the prompts as they are is measured"
        )
