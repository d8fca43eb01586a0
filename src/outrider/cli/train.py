"""`outrider train`: a drafter for your own model, from nothing but the model."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.bench import machine, workloads
from outrider.cli import options
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.core.errors import OutriderError
from outrider.models import sources

if TYPE_CHECKING:
    from outrider.train.run import TrainingResult

DATA, LEARN = "What is learned from", "How it is learned"
HELD = 20  # every so manieth prompt of a file is held out, to measure with


def train(
    kind: Annotated[str, typer.Argument(help="eagle, medusa (heads on the model) or draft (a tiny model).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the result.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The target: known name, folder, hub id or GGUF file.",
            show_default=DEFAULT.model,
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    device: options.Device = DEFAULT.device,
    dtype: Annotated[
        str,
        typer.Option(help="Of the target: auto is float32 on a CPU, bfloat16 on a GPU.", rich_help_panel=options.MODEL),
    ] = "auto",
    minutes: Annotated[
        float | None,
        typer.Option(
            help="For writing, learning, measuring and saving; prompts of --eval come after it.",
            show_default="10, if no --tokens",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly.")] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens that the target writes.", show_default="by time", rich_help_panel=DATA)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="User turns to answer: JSONL in Spec-Bench form or with a `prompt`, or a text file with one per line.",
            show_default="the model writes them",
            rich_help_panel=DATA,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The --out of another run: learn from its texts.", show_default=False, rich_help_panel=DATA),
    ] = None,
    writers: Annotated[
        int | None,
        typer.Option(help="Conversations written at once.", show_default="2048, on a CPU 32", rich_help_panel=DATA),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="How often a text is learned from.", show_default="by time, else 1", rich_help_panel=LEARN),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step.", show_default="8192", rich_help_panel=LEARN)
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of the head or draft model; of medusa, blocks per head.",
            show_default="1, draft 4",
            rich_help_panel=LEARN,
        ),
    ] = None,
    reads: Annotated[
        str | None,
        typer.Option(
            help="Blocks of the target, from 0, that an EAGLE head reads: 9,19,29.",
            show_default="three, evenly",
            rich_help_panel=LEARN,
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Of Medusa.", show_default="4", rich_help_panel=LEARN)] = None,
    unroll: Annotated[
        int | None, typer.Option(help="Draft steps an EAGLE head learns.", show_default="6", rich_help_panel=LEARN)
    ] = None,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            help="Tokens a head can write: a number or all.",
            show_default="32768 of a large vocabulary",
            rich_help_panel=LEARN,
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Of Muon.", show_default="0.015", rich_help_panel=LEARN)] = None,
    norm_rate: Annotated[
        float | None,
        typer.Option(help="Of AdamW, for norms.", show_default="0.001", rich_help_panel=LEARN),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides texts and order.", show_default="0")] = None,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: every 30 seconds.", show_default="0")
    ] = 0,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            help="JSONL in Spec-Bench form: tokens per pass by category, when the minutes are over.",
            show_default="prompts of our own",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option(help="Write the head with the target's output rows, which vLLM needs and we do not.")
    ] = True,
) -> None:
    """Train a drafter for a model, on texts that the model itself writes.

    The result is a folder that [bold]--draft eagle:head=DIR[/], medusa:head=DIR or draft_model:model=DIR take.
    Ctrl-C saves and ends; --resume goes on as if nothing had happened.

    [dim]$[/] outrider train eagle --model smollm2-135m --out my-head --minutes 10
    [dim]$[/] outrider train eagle --out my-head --resume
    [dim]$[/] outrider train medusa --out my-medusa --data my-head --minutes 5
    [dim]$[/] outrider train draft --layers 4 --out my-draft --tokens 2000000
    """
    begun = time.monotonic()
    given = {
        "model": model,
        "minutes": minutes,
        "tokens": tokens,
        "epochs": epochs,
        "batch_tokens": batch_tokens,
        "layers": layers,
        "reads": None if reads is None else _numbers(reads),
        "heads": heads,
        "unroll": unroll,
        "draft_vocab": None if draft_vocab is None else _words(draft_vocab),
        "rate": rate,
        "norm_rate": norm_rate,
        "seed": seed,
        "writers": writers,
    }
    rest = _rest(out, prompts, data, evaluation, whole, resume)
    outcome = _run(
        kind,
        {name: value for name, value in given.items() if value is not None},
        rest,
        out=out,
        resume=resume,
        device=device,
        dtype=dtype,
        save_every=save_every,
        begun=begun,
    )
    _report(outcome, out)
    raise typer.Exit(130 if outcome.interrupted else 0)


def _rest(
    out: Path, prompts: Path | None, data: Path | None, evaluation: Path | None, whole: bool, resume: bool
) -> dict[str, Any]:
    """What is learned from and measured with; a run that goes on has it already."""
    from outrider.train import checkpoint

    if not resume:
        asked = read_prompts(prompts) if prompts is not None else []
        return {
            "data": data,
            "prompts": [text for i, (_, text) in enumerate(asked) if i % HELD],
            "held_out": asked[::HELD] or _own(),
            "evaluation": _questions(evaluation),
            "whole": whole,
        }
    if prompts is not None or data is not None:
        raise OutriderError("a run that goes on has its texts already; leave out --prompts and --data with --resume")
    said = {name: value for name, value in checkpoint.stored(out).items() if name != "job"}
    said["data"] = None if said["data"] is None else Path(said["data"])
    return {**said, "evaluation": _questions(evaluation) or said["evaluation"]}


def _run(
    kind: str,
    given: dict[str, Any],
    rest: dict[str, Any],
    *,
    out: Path,
    resume: bool,
    device: str,
    dtype: str,
    save_every: int,
    begun: float,
) -> TrainingResult:
    from outrider import build
    from outrider.settings import Settings
    from outrider.train import checkpoint, job as jobs, run

    job = jobs.resumed(kind, given, checkpoint.stored(out)["job"]) if resume else jobs.new(kind, given)
    where = run.dense(build.place(Settings(model=job.model, device=device, dtype=dtype)))
    if job.model in sources.KNOWN:
        options.pull(job.model)
    with bar() as show, _stoppable() as stop:
        task = run.TrainingTask(
            job,
            out,
            where,
            resume,
            save_every=save_every,
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
    what = "interrupted; go on with --resume" if outcome.interrupted else "done"
    note(f"{what} after {outcome.state.step} steps: {out}")


@contextmanager
def _stoppable() -> Iterator[threading.Event]:
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
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"the prompt file {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if path.suffix != ".jsonl":
        return [("prompts", line) for line in lines]
    return [_prompt(path, number, line) for number, line in enumerate(lines, 1)]


def _prompt(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        said = json.loads(line)
        text = said["prompt"] if "prompt" in said else said["turns"][0]
    except (ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise OutriderError(f"{path}, line {number} is no JSON object with a `prompt` or `turns`; correct that line")
    return str(said.get("category", "prompts")), text


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OutriderError(f"--reads takes block numbers such as 9,19,29, not {text!r}") from None


def _words(text: str) -> int:
    if text == "all":
        return -1
    if not text.isdigit() or not int(text):
        raise OutriderError(f"--draft-vocab takes a number of tokens or all, not {text!r}")
    return int(text)
