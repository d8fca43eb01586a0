"""Options that several commands share, and how a model is opened from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider import build
from outrider.cli.screen import bar
from outrider.config import read
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.llm import LLM
from outrider.models import sources
from outrider.settings import BACKENDS, DEVICES, DTYPES, QUANTIZE, Config, Settings, from_mapping

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

Backend = Annotated[
    str, typer.Option(help=f"Who speculates: {' or '.join(BACKENDS)} (our engine, or vLLM's).", rich_help_panel=MODEL)
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(help="vLLM's own JSON in place of --draft.", show_default=False, rich_help_panel=MODEL),
]
TensorParallelSize = Annotated[
    int, typer.Option(help="With vllm: devices a layer is spread over.", rich_help_panel=MODEL)
]
PipelineParallelSize = Annotated[
    int, typer.Option(help="With vllm: stages the layers are spread over.", rich_help_panel=MODEL)
]
DataParallelSize = Annotated[int, typer.Option(help="With vllm: copies of the model.", rich_help_panel=MODEL)]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="A YAML file that says all this; options given here go over it.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
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


def opened(model: str, draft: str, **settings: Any) -> AbstractContextManager[LLM]:
    return opened_as(from_mapping({"model": model, "draft": draft, **settings}))


@contextmanager
def opened_as(settings: Settings, notes: Sequence[str] = ()) -> Iterator[LLM]:
    """The model, pulled if need be, and closed in the end."""
    build.check(settings)  # a typing error shows before anything is downloaded
    if settings.model in sources.KNOWN:
        pull(settings.model)
    with bar() as progress:
        progress(f"loading {settings.model}", 0, None)
        llm = LLM.from_settings(settings)
    for note in (*notes, *llm.backend.notes):
        print(f"note: {note}", file=sys.stderr)
    with llm:
        yield llm


def chosen(ctx: typer.Context, file: Path | None, plain: SamplingParams = PLAIN) -> Config:
    """What the config file says, and what was given on the command line over it. `plain`: where neither speaks."""
    said = Config(DEFAULT, plain) if file is None else read(file)
    given = {name: value for name, value in ctx.params.items() if _given(ctx, name)}
    settings, params = _over(said.settings, given), _over(said.params, given)
    if file is not None and {"draft", "speculative_config"} & given.keys():  # one takes the place of the other
        settings = {key: value for key, value in settings.items() if key in given or key not in _SPECULATION}
    return replace(said, settings=from_mapping(settings), params=SamplingParams(**params))


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _over(said: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not at their defaults, and those given."""
    known = {each.name: each for each in fields(said)}
    own = {name: getattr(said, name) for name in known}
    changed = {name: value for name, value in own.items() if value != getattr(type(said)(), name)}
    return {**changed, **{name: value for name, value in given.items() if name in known}}


_SPECULATION = ("draft", "speculative_config")


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
