"""`outrider bench matrix`: every drafter on every kind of prompt, alone and in batches, against plain decoding."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from outrider.bench import matrix, matrix_report as reports
from outrider.cli import options
from outrider.cli.bench_serve import WHAT, WorkloadOptions, dated_folder
from outrider.cli.fields import command, fields
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.core.option import option
from outrider.settings import DEVICES, DTYPES

WHERE = ("device", "dtype", "threads", "cache_memory")  # settings of every engine


class MatrixSize(NamedTuple):
    limit: int
    rounds: int
    max_tokens: int
    batches: str


FULL, QUICK = MatrixSize(4, 2, 128, "1,4,16"), MatrixSize(1, 1, 48, "1,4")


@dataclass(frozen=True)
class MatrixOptions(WorkloadOptions):
    model: tuple[str, ...] = option(
        (), "A model. Repeatable.", flags=("--model", "-m"), shown=DEFAULT.model, panel=WHAT
    )
    draft_model: str | None = option(None, "A draft model: alone, and as a part of auto.", panel=WHAT)
    batch: str | None = option(
        None, "Numbers of requests at once, separated by commas.", shown=FULL.batches, panel=WHAT
    )
    device: str = option(DEFAULT.device, f"One of {', '.join(DEVICES)}.")
    dtype: str = option(DEFAULT.dtype, f"One of {', '.join(DTYPES)}.")
    threads: int = option(0, "CPU threads; 0: one per core.")
    cache_memory: float = option(0.0, "GiB for keys and values of each engine; 0: a quarter of the free memory.")
    rounds: int | None = option(None, "How often each group of prompts is run.", shown=str(FULL.rounds))
    max_tokens: int | None = option(None, "Tokens of an answer.", shown=str(FULL.max_tokens))
    control: bool = option(False, "Measure plain decoding twice: its ratio to itself shows what is noise.", panel=WHAT)
    seed: int = option(0, "Decides the order in which drafters take turns.")
    output: Path | None = option(
        None,
        "Folder for the report; a run that was stopped goes on in it.",
        flags=("--output", "-o"),
        shown="./outrider-matrix-DATE",
    )
    quick: bool = option(False, "One prompt of each kind, 48 tokens, one round, 1 and 4 at once.")

    def plan(self) -> matrix.MatrixPlan:
        size = QUICK if self.quick else FULL
        given: dict[str, Any] = {name: getattr(self, name) for name in ("limit", "rounds", "max_tokens")}
        return matrix.MatrixPlan(
            models=self.model or (DEFAULT.model,),
            drafts=self.draft,
            draft_model=self.draft_model,
            batches=matrix.batch_sizes(size.batches if self.batch is None else self.batch),
            prompts=matrix.chosen_prompts(self.prompts, self.kind),
            seed=self.seed,
            control=self.control,
            where={name: getattr(self, name) for name in WHERE},
            output=self.output or dated_folder("outrider-matrix"),
            **{name: getattr(size, name) if value is None else value for name, value in given.items()},
        )


@command
def matrix_command(
    *,
    own: Annotated[
        MatrixOptions,
        fields(
            MatrixOptions,
            draft={"help": "A drafter. Repeatable; default: all drafters that the model has.", "shown": "all"},
            limit={"help": "Prompts of each kind that are run one at a time.", "shown": str(FULL.limit)},
        ),
    ],
) -> None:
    """Measure drafters x requests at once x kinds of prompts, the whole time of requests.

    Plain decoding and all drafters take turns at every group of prompts; prompts, and the first request of a cold
    engine, are in the time. Texts are compared. Cells below 0.98 are marked, and auto is set against the best single
    drafter. Writes matrix.json, matrix.md and matrix.png, and every turn as it is measured, so that the same command
    with the same --output goes on where it was stopped.

    [dim]$[/] outrider bench matrix --quick
    [dim]$[/] outrider bench matrix -m target.gguf --draft-model small.gguf --batch 1 --kind code -o pair
    [dim]$[/] outrider bench matrix --device cuda --batch 1,4,16,64 --prompts spec_bench.jsonl -o h200
    """
    plan = own.plan()
    options.pull_known(*plan.models, plan.draft_model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    with bar("{task.completed:.0f}/{task.total:.0f}") as show:
        outcome = matrix.run(plan, show)
    report = reports.assemble(plan, outcome, shlex.join(["outrider", *sys.argv[1:]]))
    told = reports.write(report, plan.output)
    reports.show(report)
    for line in [*told, f"written to {plan.output}"]:
        note(line)
    raise typer.Exit(130 if outcome.interrupted else 0)
