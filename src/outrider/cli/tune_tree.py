"""`outrider tune-tree`: the tree of a Medusa head, grown from what its heads get right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.cli.train import read_prompts
from outrider.core.errors import OutriderError
from outrider.models import sources


def tune_tree(
    head: Annotated[Path, typer.Option(help="Folder of a Medusa head; its config gets the tree.")],
    model: options.Model = DEFAULT.model,
    nodes: Annotated[int, typer.Option(help="Of the tree. A shorter draft takes the first of them.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens that the target writes to measure with, about.")] = 20_000,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="User turns to answer: JSONL in Spec-Bench form or with a `prompt`, or a text file with one per line.",
            show_default="the model writes them",
        ),
    ] = None,
    device: options.Device = DEFAULT.device,
    dtype: options.Dtype = DEFAULT.dtype,
) -> None:
    """Measure how often each rank of each Medusa head is right, and write the tree that keeps most.

    [dim]$[/] outrider tune-tree --model smollm2-135m --head my-medusa
    """
    from outrider import build
    from outrider.settings import Settings
    from outrider.train import run, tune_tree as tuning

    for name, value in (("nodes", nodes), ("tokens", tokens)):
        if value < 1:
            raise OutriderError(f"--{name} must be at least 1, not {value}")
    asked = [] if prompts is None else [text for _, text in read_prompts(prompts)]
    where = run.dense(build.place(Settings(model=model, device=device, dtype=dtype)))
    if model in sources.KNOWN:
        options.pull(model)
    with bar() as show:
        tuned = tuning.tune(model, head, where, nodes, tokens, asked, show)
    print("head   rank 1   2      3      4      5")
    for index, row in enumerate(tuned.rates, 1):
        print(f"{index:<6}" + "".join(f"{share:7.3f}" for share in row[:5]))
    deep = max(len(path) for path in tuned.paths)
    note(f"{len(tuned.paths)} nodes, {deep} deep, {tuned.expected:.2f} tokens per pass expected; written to {head}")
