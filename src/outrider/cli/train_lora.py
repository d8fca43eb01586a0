"""`outrider train lora`: an adapter for your own model, from a file of conversations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.fields import Given, command, fields
from outrider.cli.screen import bar, note
from outrider.cli.train import stoppable
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.settings import Settings
from outrider.train.lora_job import LoraJob


@dataclass(frozen=True)
class LoraOptions:
    out: Path = option(help="Folder for the adapter.", flags=("--out", "-o"))
    resume: bool = option(False, "Continue the run in --out, exactly where it stopped.")


JOB = fields(LoraJob, chats={"default": None, "shown": "must be given"})


@command
def train_lora(
    *,
    own: Annotated[LoraOptions, fields(LoraOptions)],
    given: Annotated[Given, JOB],
    place: Annotated[Settings, options.settings("device", "threads")],
) -> None:
    """Train a LoRA adapter on conversations: a line of JSON each, with `messages`, or with `prompt` and `answer`.

    The result is a PEFT folder that [bold]--adapter NAME=DIR[/] takes. Ctrl-C saves and ends; --resume goes on.

    [dim]$[/] outrider train lora --chats haiku.jsonl --out my-haiku
    [dim]$[/] outrider train lora --out my-haiku --resume
    [dim]$[/] outrider generate "Describe the sea." --adapter haiku=my-haiku
    """
    import torch

    from outrider import build
    from outrider.train import lora

    if place.threads:
        torch.set_num_threads(place.threads)
    job = _job(own, given)
    options.pull_known(job.model)
    with bar() as show, stoppable() as stop:
        task = lora.LoraTask(job, own.out, build.device(place.device), own.resume, note, show, stop)
        outcome = lora.train(task)
    what = "interrupted; go on with --resume" if outcome.interrupted else "done"
    note(f"{what} after {outcome.steps} of {outcome.planned} steps: {own.out}")
    raise typer.Exit(130 if outcome.interrupted else 0)


def _job(own: LoraOptions, given: Given) -> LoraJob:
    from outrider.train import lora

    if not own.resume:
        if "chats" not in given:
            raise OutriderError("what is to be learned? give a JSONL file with --chats")
        return LoraJob(**given)
    job = LoraJob(**lora.stored(own.out))
    again = replace(job, **{**given, "chats": given.get("chats", job.chats).resolve()})
    if again != job:
        raise OutriderError("a run that goes on keeps its options; leave them out with --resume, or begin anew")
    return job
