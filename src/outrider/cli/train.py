"""`outrider train`: a drafter for your own model, from nothing but the model."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.bench import machine, workloads
from outrider.cli import options
from outrider.cli.fields import Given, command, fields
from outrider.cli.screen import bar, note
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.settings import Settings
from outrider.train import job as jobs

if TYPE_CHECKING:
    from outrider.train.run import TrainingResult

LINE_SECONDS = 10.0  # between two lines of progress where no terminal is there
HELD = 20  # one of this many prompts of a file is held out, to measure with


@dataclass(frozen=True)
class PromptFile:
    prompts: Path | None = option(
        None,
        "User turns to answer: JSONL in Spec-Bench form or with a `prompt`, or a text file with one per line.",
        shown="the model writes them",
    )

    about: Path | None = option(
        None,
        "A file with openings of user turns, one per line; the model completes them, and half of the texts use one.",
        shown=False,
    )

    def read(self) -> list[tuple[str, str]]:
        return [] if self.prompts is None else read_prompts(self.prompts)

    def openers(self) -> list[str]:
        """\\n is a new line in them."""
        if self.about is None:
            return []
        if self.prompts is not None:
            raise OutriderError("--prompts are whole user turns and --about their beginnings; give one of them")
        return [text.replace("\\n", "\n") for _, text in read_prompts(self.about)]


@dataclass(frozen=True)
class TrainOptions:
    out: Path = option(help="Folder for the result.", flags=("--out", "-o"))
    resume: bool = option(False, "Continue the run in --out, exactly where it stopped.")
    data: Path | None = option(None, "The --out of another run: learn from its texts.", shown=False, panel=jobs.DATA)
    save_every: int = option(0, "Steps between checkpoints; 0: every 30 seconds.")
    evaluation: Path | None = option(
        None,
        "JSONL in Spec-Bench form: measure tokens per pass by category after the training.",
        flags=("--eval",),
        shown="prompts of our own",
    )
    whole: bool = option(True, "Include the target's output rows: vLLM needs them, Outrider does not.")


PLACE = options.settings(
    "device", "dtype", dtype={"help": "Of the target: auto is float32 on a CPU, bfloat16 on a GPU."}
)


@command
def train(
    kind: Annotated[str, typer.Argument(help="eagle, block, medusa (heads on the model) or draft (a tiny model).")],
    *,
    own: Annotated[TrainOptions, fields(TrainOptions)],
    given: Annotated[Given, fields(jobs.TrainingJob)],
    asked: Annotated[PromptFile, fields(PromptFile, panel=jobs.DATA)],
    place: Annotated[Settings, PLACE],
) -> None:
    """Train a drafter for a model, on texts that the model itself writes; [bold]train lora[/] trains an adapter.

    The result is a folder that [bold]--draft eagle:head=DIR[/], block:head=DIR, medusa:head=DIR or
    draft_model:model=DIR take.
    Ctrl-C saves and ends; --resume goes on as if nothing had happened.

    [dim]$[/] outrider train eagle --model smollm2-135m --out my-head --minutes 10
    [dim]$[/] outrider train eagle --out my-head --resume
    [dim]$[/] outrider train block --out my-block --data my-head --minutes 10
    [dim]$[/] outrider train medusa --out my-medusa --data my-head --minutes 5
    [dim]$[/] outrider train eagle --adapter my-haiku --out my-haiku.outrider-head/eagle
    [dim]$[/] outrider train draft --layers 4 --out my-draft --tokens 2000000
    """
    begun = time.monotonic()
    outcome = _run(kind, given, own, place, _rest(own, asked), begun)
    _report(outcome, own.out)
    raise typer.Exit(130 if outcome.interrupted else 0)


def _rest(own: TrainOptions, asked: PromptFile) -> dict[str, Any]:
    """What is learned from and measured with; a run that goes on has it already."""
    from outrider.train import checkpoint

    if not own.resume:
        texts = asked.read()
        return {
            "data": own.data,
            "prompts": [text for i, (_, text) in enumerate(texts) if i % HELD],
            "about": asked.openers(),
            "held_out": texts[::HELD] or _own(),
            "evaluation": _questions(own.evaluation),
            "whole": own.whole,
        }
    if asked.prompts is not None or asked.about is not None or own.data is not None:
        raise OutriderError("a run that goes on has its texts; leave out --prompts, --about and --data with --resume")
    stored = {name: value for name, value in checkpoint.stored(own.out).items() if name != "job"}
    stored["data"] = None if stored["data"] is None else Path(stored["data"])
    return {**stored, "evaluation": _questions(own.evaluation) or stored["evaluation"]}


def _run(
    kind: str, given: Given, own: TrainOptions, place: Settings, rest: dict[str, Any], begun: float
) -> TrainingResult:
    from outrider import build
    from outrider.train import checkpoint, run

    job = jobs.resumed(kind, given, checkpoint.stored(own.out)["job"]) if own.resume else jobs.new(kind, given)
    where = run.dense(build.load_options(place))
    options.pull_known(job.model)
    with bar(plain=LINE_SECONDS) as show, stoppable() as stop:
        task = run.TrainingTask(
            job,
            own.out,
            where,
            own.resume,
            save_every=own.save_every,
            command=["outrider", *sys.argv[1:]],
            machine=machine.describe(),
            begun=begun,
            show=show,
            note=note,
            stop=stop,
            **rest,
        )
        return run.train(task)


def _report(outcome: TrainingResult, out: Path) -> None:
    from outrider.train import results

    if outcome.measured:
        print(results.text(outcome.measured))
    if outcome.advice and not outcome.interrupted:
        note(outcome.advice)
    what = "interrupted; go on with --resume" if outcome.interrupted else "done"
    best = f"; written as it was after {outcome.state.best_step}" if outcome.state.best else ""
    note(f"{what} after {outcome.state.step} steps{best}: {out}")


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the run after the step it is in; a second Ctrl-C ends it at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own() -> list[tuple[str, str]]:
    return [(prompt.kind, prompt.text) for prompt in workloads.built_in()]


def _questions(path: Path | None) -> list[tuple[str, str]]:
    return [] if path is None else [(prompt.kind, prompt.text) for prompt in workloads.read_jsonl(path)]


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """User turns out of a file, each with its kind."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"the prompt file {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if path.suffix != ".jsonl":
        return [("prompts", line) for line in lines]
    return [_prompt(path, number, line) for number, line in enumerate(lines, 1)]


def _prompt(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
        text = entry["prompt"] if "prompt" in entry else entry["turns"][0]
    except (ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise OutriderError(f"{path}, line {number} is no JSON object with a `prompt` or `turns`; correct that line")
    return str(entry.get("category", "prompts")), text
