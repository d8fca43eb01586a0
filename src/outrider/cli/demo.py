"""`outrider demo`: a real model answers, and plain decoding runs beside speculation."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outrider import prompts
from outrider.cli import options
from outrider.cli.fields import command
from outrider.cli.screen import Painter, bar, coloured, paint
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import Result
from outrider.settings import Settings

if TYPE_CHECKING:
    from outrider.llm import LLM


@dataclass(frozen=True)
class DemoRun:
    result: Result
    tokens: int  # written after the first step, which reads the prompt
    seconds: float  # that they took


@command
def demo(
    *,
    settings: Annotated[Settings, options.settings("model", "draft", *options.PLACE)],
    params: Annotated[SamplingParams, options.sampling("max_tokens", max_tokens={"default": 144})],
    rounds: Annotated[int, typer.Option(min=1, help="How often each of the two is measured, in turns.")] = 3,
) -> None:
    """See it work: an answer, which of its words were guessed, and plain decoding beside speculation.

    Exit code 1 if the two do not write the very same tokens.

    [dim]$[/] outrider demo
    [dim]$[/] outrider demo --draft ngram:length=16 --rounds 5
    """
    draft = settings.draft
    options.refuse_without_grammar(draft)
    with options.opened(settings) as llm:
        print(f"{prompts.DEMO.text}\n")
        first = _run(llm, params, draft, Painter(llm.tokenizer))
        _print_share(first.result)
        plain, drafted = _measure(llm, params, draft, rounds)
    _print_table(draft, plain, drafted)
    outputs = {tuple(run.result.token_ids) for run in (first, *plain, *drafted)}
    print("The outputs are identical, token by token." if len(outputs) == 1 else "The outputs DIFFER.")
    raise typer.Exit(0 if len(outputs) == 1 else 1)


def _run(llm: LLM, params: SamplingParams, draft: str, painter: Painter | None = None) -> DemoRun:
    """One answer. The clock starts when the prompt has been read and the first tokens are out. Nothing is copied from
    the answers before, which are the same."""
    from outrider.backends.local import Local

    if isinstance(llm.backend, Local):
        llm.backend.forget_texts()
    stream = llm.stream([{"role": "user", "content": prompts.DEMO.text}], params, draft=draft)
    begin, early = 0.0, 0
    for chunk in stream:
        if not begin:
            begin, early = time.perf_counter(), len(chunk.tokens)
        if painter is not None:
            painter.write(chunk)
    seconds, result = time.perf_counter() - begin, stream.result()
    if result.finish_reason == "error":
        raise OutriderError(result.error)
    return DemoRun(result, len(result.token_ids) - early, seconds)


def _measure(llm: LLM, params: SamplingParams, draft: str, rounds: int) -> tuple[list[DemoRun], list[DemoRun]]:
    """Plain and drafted in turn, so that whatever else the machine does falls on both."""
    plain: list[DemoRun] = []
    drafted: list[DemoRun] = []
    with bar() as progress:
        for done in range(rounds):
            progress("measuring", done, rounds)
            plain.append(_run(llm, params, "none"))
            drafted.append(_run(llm, params, draft))
    return plain, drafted


def _print_share(result: Result) -> None:
    drafted = sum(token.drafter is not None for token in result.tokens)
    share = f"{drafted} of {len(result.tokens)} tokens came from drafts ({drafted / len(result.tokens):.0%})"
    colour = f", shown in {paint('this colour', 'drafted', sys.stdout)}" if coloured(sys.stdout) else ""
    print(f"\n\n{share}{colour}.", flush=True)


def _print_table(draft: str, plain: list[DemoRun], drafted: list[DemoRun]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tokens", "steps", "tokens/step", "decode s", "tokens/s", "ratio"):
        table.add_column(column, justify="right")
    ratio = statistics.median(_speed(fast) / _speed(slow) for slow, fast in zip(plain, drafted, strict=True))
    for name, runs, times in (("plain", plain, 1.0), (draft, drafted, ratio)):
        stats = runs[0].result.stats
        seconds = statistics.median(run.seconds for run in runs)
        speed = statistics.median(map(_speed, runs))
        counts = (str(stats.tokens), str(stats.steps), f"{stats.tokens_per_step:.2f}")
        table.add_row(name, *counts, f"{seconds:.2f}", f"{speed:.1f}", f"{times:.2f}x")
    Console(highlight=False).print(table)


def _speed(run: DemoRun) -> float:
    return run.tokens / run.seconds
