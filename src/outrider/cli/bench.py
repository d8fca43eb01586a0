"""`outrider bench`: how fast, compared with which engines, and whether the text is the same."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from outrider.backends import speculation
from outrider.bench import formats, plan as plans, report as reports
from outrider.bench.build_peers import INSTRUCTIONS
from outrider.bench.formats import FORMATS
from outrider.bench.peers import TABLE
from outrider.bench.run import Show, run
from outrider.cli import bench_batches, bench_matrix, bench_serve, options
from outrider.cli.bench_batches import BatchOptions
from outrider.cli.bench_serve import WHAT, WorkloadOptions
from outrider.cli.fields import Given, fields, import_engine, light_command, was_given
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.core.params import SamplingParams
from outrider.models import sources
from outrider.settings import BACKENDS, DTYPES, VLLM_DEFAULTS, Config, Settings

OWN = ("dtype", "quantize", "kv", "activations", "pace", "piece", "cache_memory")  # settings that one stream can feel

PEERS = ("prompt_tokens", "formats", "build_peers", "llama_source", "instructions")


class Size(NamedTuple):
    limit: int | None
    rounds: int
    max_tokens: int


FULL, QUICK = Size(None, 3, 128), Size(1, 1, 48)
app = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command("serve")(bench_serve.serve)
app.command("matrix")(bench_matrix.matrix_command)


@dataclass(frozen=True)
class BenchOptions(BatchOptions, WorkloadOptions):
    backend: tuple[str, ...] = option(
        (),
        f"One of {', '.join(BACKENDS)}, with the same drafters. Repeatable: both, side by side.",
        shown=DEFAULT.backend,
        panel=WHAT,
    )
    engine: tuple[str, ...] = option(
        (),
        f"One of {', '.join(TABLE)} or all; NAME:mode,... for some of its modes. Repeatable.",
        flags=("--engine", "-e"),
        shown="outrider",
        panel=WHAT,
    )
    draft_model: str | None = option(None, "The draft model for peers that can use one.", panel=WHAT)
    rounds: int | None = option(None, "How often each prompt is run.", shown=str(FULL.rounds))
    max_tokens: int | None = option(None, "Tokens of an answer.", shown=str(FULL.max_tokens))
    seed: int = option(0, "Decides the order in which modes take turns.")
    timeout: float = option(120.0, "Seconds after which a run counts as hung.")
    python: tuple[str, ...] = option((), "The interpreter of an engine: ENGINE=PATH. Repeatable.")
    prompt_tokens: int = option(0, "Also measure how fast prompts of this many tokens are read; 0: no.")
    formats: str = option("", f"Measure the model in each of these: {', '.join(FORMATS)}, with commas.", panel=WHAT)
    build_peers: bool = option(False, "Build llama.cpp for this machine, once, and measure it too.", panel=WHAT)
    llama_source: str | None = option(
        None, "The source tree to build: llama.cpp's or ik_llama.cpp's.", shown="an sdist", panel=WHAT
    )
    instructions: str = option(
        "native",
        f"Instruction set for our kernels and for peers built here: {', '.join(INSTRUCTIONS)}.",
        panel=WHAT,
    )
    output: Path | None = option(
        None, "Folder for the report.", flags=("--output", "-o"), shown="./outrider-bench-DATE"
    )
    quick: bool = option(False, "One prompt of each kind, 48 tokens, one round: under three minutes.")

    def sized(self, name: str) -> Any:
        """`limit`, `rounds` or `max_tokens`: as given, or as the size of the benchmark has it."""
        given = getattr(self, name)
        return getattr(QUICK if self.quick else FULL, name) if given is None else given


SETTINGS = options.settings(
    "model",
    "device",
    "dtype",
    "threads",
    device={"help": "cpu or cuda: on a GPU whole calls of batches are measured.", "panel": "", "shown": "cpu"},
    dtype={"help": f"Data type of our own engine: {', '.join(DTYPES)}.", "panel": ""},
    threads={"help": "CPU threads of every engine; 0: one per core.", "panel": ""},
)
WORKLOAD = fields(
    BenchOptions,
    draft={"help": "A drafter of ours: NAME or NAME:key=value,... Repeatable; plain decoding is always measured."},
    prompts={"help": "A JSONL file in Spec-Bench form: question_id, category, turns. Its categories are the kinds."},
)


@app.callback(invoke_without_command=True)
@light_command
def bench(
    ctx: typer.Context,
    *,
    given: Annotated[Given, options.configured(SETTINGS)],
    own: Annotated[BenchOptions, WORKLOAD],
) -> None:
    """Measure decoding speed: workloads x engines x drafters.

    Every engine runs in a process of its own; their turns are interleaved prompt by prompt. A speed-up is measured
    against the same engine's plain decoding, with its 95 % confidence interval, and it is [bold]void[/] where the text
    differs. Writes report.json, report.md and report.png.

    On a GPU (or with --batches) whole calls of many prompts are measured, prompts included, each drafter in a process
    of its own, with transformers and vLLM beside them if they are named. The processes load beside each other and work
    one at a time; every turn is written as it ends. Exit code 1: some of them did not load, or calls failed.

    [dim]$[/] outrider bench --quick
    [dim]$[/] outrider bench --draft ngram --draft layer_skip --kind edit --kind code
    [dim]$[/] outrider bench --engine all --python vllm=/path/to/python
    [dim]$[/] outrider bench --backend local --backend vllm --draft ngram:length=5
    [dim]$[/] outrider bench --device cuda --draft auto --draft ngram --engine transformers --prompts spec_bench.jsonl
    [dim]$[/] outrider bench serve --streams 1,4,16,32
    [dim]$[/] outrider bench matrix --quick
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    import_engine()
    config = options.chosen(given)
    if "config" in given:
        own = _with_file(own, config)
    if bench_batches.asked_for(own, config.settings):
        output = own.output or bench_serve.dated_folder("outrider-bench")
        raise typer.Exit(bench_batches.measure(own, config.settings, _changed(config.settings), output))
    bench_batches.refuse(own)
    request = _request(own, config.settings)
    plan = request.plan()
    options.pull_known(plan.model, own.draft_model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers end, what was measured is kept
    with bar("{task.completed:.0f}/{task.total:.0f}") as show:
        plan = request.built(plan, show)
        interrupted = _measured(plan, show) if not plan.formats else _in_formats(plan, show)
    note(f"written to {plan.output}")
    raise typer.Exit(130 if interrupted else 0)


def _measured(plan: plans.BenchPlan, show: Show) -> bool:
    """Measure, write and show; whether it was interrupted."""
    outcome = run(plan, show)
    report = reports.assemble(plan, outcome, shlex.join(["outrider", *sys.argv[1:]]))
    told = reports.write(report, plan.output)
    reports.show(report)
    for line in told:
        note(line)
    return outcome.interrupted


def _in_formats(plan: plans.BenchPlan, show: Show) -> bool:
    """The same in every format, each with a report in a folder of its own."""
    source = sources.resolve(plan.model)
    quantizer = next((built.quantizer for built in plan.programs.values()), None)
    for name in plan.formats:
        show(f"writing the model as {name}", 0, 0)
        file = formats.write(source, name, quantizer)
        folder = plan.output / name
        folder.mkdir(parents=True, exist_ok=True)
        if _measured(replace(plan, model=str(file), output=folder), show):
            return True
    return False


def _changed(settings: Settings) -> dict[str, Any]:
    """Settings of our own engine that are not the default's."""
    return {name: getattr(settings, name) for name in OWN if getattr(settings, name) != getattr(DEFAULT, name)}


def _request(own: BenchOptions, settings: Settings) -> plans.BenchRequest:
    return plans.BenchRequest(
        model=settings.model,
        engines=own.engine or ([] if own.backend else ["outrider"]),
        backends=own.backend,
        drafts=own.draft,
        prompts=own.prompts,
        kinds=own.kind,
        limit=own.sized("limit"),
        rounds=own.sized("rounds"),
        max_tokens=own.sized("max_tokens"),
        threads=settings.threads,
        seed=own.seed,
        timeout=own.timeout,
        python=own.python,
        draft_model=own.draft_model,
        own=_changed(settings) if settings.backend == "local" else {},
        output=own.output or bench_serve.dated_folder("outrider-bench"),
        **{name: getattr(own, name) for name in PEERS},
    )


def _refuse_options(ctx: typer.Context) -> None:
    """What stands before the name of another command would be ignored."""
    for name in ctx.params:
        if was_given(ctx, name):
            flag = "--" + name.replace("_", "-")
            raise OutriderError(f"{flag} stands before {ctx.invoked_subcommand}; write it after")


def _with_file(own: BenchOptions, config: Config) -> BenchOptions:
    """The options with the backend and the drafter of a config file, where none are given."""
    for line in config.notes:
        note(line)
    settings = config.settings
    backends = own.backend or (settings.backend,)
    _refuse_settings(config, backends)
    foreign = settings.speculative_config
    drafted = settings.draft if foreign is None else speculation.to_draft(foreign)
    return replace(own, backend=backends, draft=own.draft or (drafted,))


def _refuse_settings(config: Config, backends: Sequence[str]) -> None:
    """What a file says and a benchmark cannot honour."""
    if "vllm" in backends:
        for name in VLLM_DEFAULTS:
            if getattr(config.settings, name) != getattr(DEFAULT, name):
                raise OutriderError(f"outrider bench runs vLLM with a {name} of its own; leave {name} out of the file")
    if config.params != SamplingParams() or config.query_prefix:
        note(
            "sampling and query_prefix of the file play no part: greedy decoding of the prompts as they are is measured"
        )
