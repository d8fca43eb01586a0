"""The command line: one file per command. A user's mistake is one line on stderr and exit code 2, never a trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli import (
    audit,
    bench,
    chat,
    config,
    demo,
    generate,
    merge,
    models,
    profile,
    serve,
    train,
    train_lora,
    tune_tree,
)
from outrider.cli.screen import paint
from outrider.core.errors import OutriderError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings a click of its own; this is that click's

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    audit.audit,
    profile.profile,
    train.train,
    tune_tree.tune_tree,
    merge.merge,
    models.pull,
    models.models,
    demo.demo,
):
    app.command()(command)
app.command("train-lora", hidden=True)(train_lora.train_lora)  # `train lora`: its options are others than of a head
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact speculative decoding: a cheap drafter guesses ahead, the model checks, the text is the model's own.

    [dim]$[/] outrider demo                             [dim]# see it work[/]
    [dim]$[/] outrider generate "Name three rivers."    [dim]# one answer[/]
    [dim]$[/] outrider chat --draft ngram:length=12     [dim]# a conversation[/]
    [dim]$[/] outrider audit                            [dim]# the proof that it is exact[/]
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:2] == ["train", "lora"]:
        given[:2] = ["train-lora"]
    try:
        code = app(given or ["--help"], prog_name="outrider", standalone_mode=False)
        sys.stdout.flush()
    except OutriderError as error:
        return _refuse(str(error))
    except UsageError as error:
        return _refuse(f"{_usage(error)}; see outrider --help or outrider COMMAND --help")
    except BrokenPipeError:  # the reader has gone, as in `outrider models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        print("\ninterrupted", file=sys.stderr)
    return int(code or 0)


def _refuse(reason: str) -> int:
    print(paint("error:", "red", sys.stderr), " ".join(reason.split()), file=sys.stderr)
    return 2


def _usage(error: Exception) -> str:
    message: str = error.format_message()  # type: ignore[attr-defined]
    return message.rstrip(".")
