"""The command line: one file per command. A user's mistake is one line on stderr and exit code 2, never a trace."""

from __future__ import annotations

import errno
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
from outrider.core.errors import OutriderError, one_line

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings a click of its own; this is that click's
TRAIN_LORA = "train lora"  # two words for the user, one command for typer
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # nothing more can be written

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
app.command(TRAIN_LORA, hidden=True)(train_lora.train_lora)  # a command of its own: a head has other options
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
    """Exact speculative decoding: a cheap drafter guesses ahead, the model checks, and the text is the model's own.

    [dim]$[/] outrider demo                             [dim]# see it work[/]
    [dim]$[/] outrider generate "Name three rivers."    [dim]# one answer[/]
    [dim]$[/] outrider chat --draft ngram:length=12     [dim]# a conversation[/]
    [dim]$[/] outrider audit                            [dim]# the proof that it is exact[/]
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    given = list(sys.argv[1:] if args is None else args)
    if given[:2] == TRAIN_LORA.split():
        given[:2] = [TRAIN_LORA]
    try:
        code = app(given or ["--help"], prog_name="outrider", standalone_mode=False)
        sys.stdout.flush()
    except OutriderError as error:
        return _refuse(str(error))
    except UsageError as error:
        if not _usage(error):  # a group of commands alone, which has shown its help
            return 0
        return _refuse(f"{_usage(error)}; see {_command(error)} --help")
    except BrokenPipeError:  # the reader has gone, as in `outrider models | head -1`
        _drop_output()
        return 141
    except OSError as error:  # a full disk, for instance
        return _refuse(_failed_file(error))
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


def _command(error: Exception) -> str:
    """The command that was misused, as the user writes it."""
    context = getattr(error, "ctx", None)
    return "outrider" if context is None else str(context.command_path)


def _failed_file(error: OSError) -> str:
    """What could not be read or written, and why; of other errors of the system, what they say."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    if error.filename is not None:
        return f"cannot read or write {error.filename}: {error.strerror or error}"
    if error.errno in FULL:
        return f"cannot write the output: {error.strerror}"
    return one_line(error, named=True)


def _drop_output() -> None:
    """Throw away what standard output still holds: at exit Python would try to write it once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
