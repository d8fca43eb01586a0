"""Options that several commands share, and how a model is opened from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider import drafters
from outrider.cli.screen import bar
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM
from outrider.models import sources
from outrider.settings import DEVICES, DTYPES, QUANTIZE, Settings, from_mapping

MODEL, SAMPLING = "Model", "Sampling"
DEFAULT, PLAIN = Settings(), SamplingParams()

Model = Annotated[
    str, typer.Option("--model", "-m", help="Known name, folder, hub id or GGUF file.", rich_help_panel=MODEL)
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        help="Who guesses ahead: NAME or NAME:key=value,...; none for plain decoding.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.", rich_help_panel=MODEL)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.", rich_help_panel=MODEL)]
Quantize = Annotated[
    str, typer.Option(help=f"Round dense weights on loading: {', '.join(QUANTIZE)}.", rich_help_panel=MODEL)
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: one per core.", rich_help_panel=MODEL)]
CacheMemory = Annotated[
    float, typer.Option(help="GiB for keys and values; 0: a quarter of what is free.", rich_help_panel=MODEL)
]

MaxTokens = Annotated[int, typer.Option(help="Stop after this many tokens.", rich_help_panel=SAMPLING)]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0: always the likeliest token.", rich_help_panel=SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Only the likeliest tokens that reach this mass.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float, typer.Option(help="Only tokens at least this likely, next to the likeliest.", rich_help_panel=SAMPLING)
]
TypicalP = Annotated[
    float, typer.Option(help="Only the most typical tokens up to this mass.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text, whoever drafts.", show_default="random", rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: shun tokens of prompt and answer.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken off the logits of tokens already written.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="The same, for each time they were written.", rich_help_panel=SAMPLING)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def opened(model: str, draft: str, **settings: Any) -> Iterator[LLM]:
    """The model, pulled if need be, and closed in the end."""
    chosen = from_mapping({"model": model, "draft": draft, **settings})
    drafters.parse(draft)  # a typing error shows before anything is downloaded
    if model in sources.KNOWN:
        pull(model)
    with bar() as progress:
        progress(f"loading {model}", 0, None)
        llm = LLM.from_settings(chosen)
    for note in llm.backend.notes:
        print(f"note: {note}", file=sys.stderr)
    with llm:
        yield llm


def pull(name: str) -> Path:
    """The known model's file, downloaded under a progress bar if it is not here yet."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with bar(DownloadColumn(), TransferSpeedColumn()) as progress:
        return sources.pull(name, lambda done, total: progress(f"pulling {name}", done, total))


def read_stdin_or(text: str) -> str:
    """The text, or what comes on standard input for "-"."""
    try:
        read = sys.stdin.read() if text == "-" else text
        read.encode()
    except UnicodeError as error:
        raise OutriderError("the prompt is not valid UTF-8 text; convert it first") from error
    return read
