"""`outrider audit`: the proof, printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from outrider import prompts as builtin
from outrider.audit import ALPHA, Check, Difference, Report, audit as run
from outrider.cli import options
from outrider.cli.fields import command, fields
from outrider.cli.screen import bar
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.core.params import SamplingParams
from outrider.prompts import NamedPrompt
from outrider.settings import Settings


@dataclass(frozen=True)
class AuditOptions(options.Printed):
    draft: tuple[str, ...] = option(
        (),
        "The drafter to audit: NAME or NAME:key=value,... Repeatable.",
        flags=("--draft", "-d"),
        panel=options.MODEL,
        shown="all that run without arguments",
    )
    prompt: tuple[str, ...] = option((), "A prompt of your own. Repeatable.", shown="six built in")
    prompts: str | None = option(None, "A text file with a prompt per line.")
    raw: bool = option(False, "Continue the prompts as they stand, without chat template.")
    max_tokens: int = option(32, "Tokens to compare for each prompt.")
    samples: int = option(300, "Continuations to sample for the law test.", least=1)
    seed: int = option(0, "The same seed gives the same report.")
    output: Path | None = option(None, "Write the JSON to this file as well.")


@command
def audit(
    *,
    settings: Annotated[Settings, options.settings("model", *options.PLACE)],
    own: Annotated[AuditOptions, fields(AuditOptions)],
) -> None:
    """Prove that drafters change the speed and nothing else. Exit code 1 if one does.

    Against plain decoding by the same model, each drafter is checked for
    [bold]greedy[/]: the same tokens, prompt by prompt;
    [bold]batch[/]: the same tokens with all prompts in one batch;
    [bold]seed[/]: the same tokens at temperature 1 under the same seed;
    [bold]law[/]: sampled continuations follow the model's own distribution (chi-square, alpha 1e-4).

    In float32 and with packed weights any different token is a failure. In bfloat16 and float16 rounding depends on the
    shape of a pass, so a near tie may flip: flips are shown with their margin, and fail when it is 0.5 logits
    (float16: 0.25) or more.

    [dim]$[/] outrider audit
    [dim]$[/] outrider audit --draft ngram:store=adaptive --draft layer_skip:layers=8 --json
    [dim]$[/] outrider audit --model ./my-model --draft draft_model:model=./small --prompts prompts.txt
    """
    SamplingParams(max_tokens=own.max_tokens)  # refuses a bad value before anything is loaded
    chosen = _prompts(own.prompt, own.prompts)
    opened = options.opened(replace(settings, draft=own.draft[0] if own.draft else settings.draft, pace=False))
    with opened as llm, bar("{task.completed:.0f}/{task.total:.0f}") as progress:
        report = run(
            llm,
            own.draft,
            chosen,
            max_tokens=own.max_tokens,
            seed=own.seed,
            samples=own.samples,
            raw=own.raw,
            progress=progress,
        )
    text = json.dumps(report.as_dict(), ensure_ascii=False)
    if own.output is not None:
        _write(own.output, text)
    if own.as_json:
        print(text)
    else:
        _print(report)
    raise typer.Exit(0 if report.passed else 1)


def _prompts(texts: Sequence[str], file: str | None) -> tuple[NamedPrompt, ...]:
    own = tuple(NamedPrompt(f"prompt {number}", "own", text) for number, text in enumerate(texts, 1))
    return own + (builtin.read(file) if file is not None else ()) or builtin.AUDIT


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"cannot write {path} ({error.strerror}); choose another file") from error


def _print(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("drafter", "check", "result", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kept / drafted", justify="right")
    table.add_column("")
    for drafter in report.drafters:
        for check in drafter.checks:
            name = drafter.draft if check is drafter.checks[0] else ""
            result = "[green]passed[/]" if check.passed else "[bold red]FAILED[/]"
            table.add_row(name, check.name, result, f"{check.accepted} / {check.drafted}", _detail(check))
        table.add_section()
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    console.print(table)
    for drafter in report.drafters:
        for check in drafter.checks:
            for difference in check.differences:
                console.print(f"{drafter.draft}, {check.name}: {_describe(difference)}", markup=False)
    ending = "passed" if report.passed else "FAILED"
    counts = f"flips below {report.small_margin:g} logits are near ties" if report.small_margin else "any flip fails"
    size = f"{len(report.prompts)} prompts, {report.seconds:.0f} s"
    console.print(
        f"{report.model}, dtype {report.dtype}, {size}; {counts}, law below p = {ALPHA:g}: {ending}", markup=False
    )


def _detail(check: Check) -> str:
    if check.p_value is not None:
        text = f"{check.compared} samples, p = {check.p_value:.2g}"
    elif check.differences:
        text = f"{len(check.differences)} of the outputs part from plain decoding"
    else:
        text = f"{check.compared} tokens, all the same"
    return text if check.drafted else f"{text}; nothing was drafted, so little is proved"


def _describe(difference: Difference) -> str:
    margin = "one had ended" if difference.margin is None else f"margin {difference.margin:.4g} logits"
    return (
        f"{difference.prompt!r} parts at token {difference.position}: "
        f"plain {difference.plain}, drafted {difference.drafted}; {margin}"
    )
