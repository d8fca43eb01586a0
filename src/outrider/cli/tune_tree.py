"""`outrider tune-tree`: the tree of a Medusa head, grown from what its heads get right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outrider.cli import options
from outrider.cli.fields import command, fields
from outrider.cli.screen import bar, note
from outrider.cli.train import PromptFile
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.settings import Settings


@dataclass(frozen=True)
class TuneOptions:
    head: Path = option(help="Folder of a Medusa head; its config gets the tree.")
    nodes: int = option(64, "Nodes of the tree; a shorter draft uses the first ones.")
    tokens: int = option(20_000, "About how many tokens the target writes for the measurement.")

    def __post_init__(self) -> None:
        for name in ("nodes", "tokens"):
            if getattr(self, name) < 1:
                raise OutriderError(f"--{name} must be at least 1, not {getattr(self, name)}")


@command
def tune_tree(
    *,
    own: Annotated[TuneOptions, fields(TuneOptions)],
    asked: Annotated[PromptFile, fields(PromptFile)],
    settings: Annotated[Settings, options.settings("model", "device", "dtype")],
) -> None:
    """Measure how often each rank of each Medusa head is right, and write the tree that keeps the most tokens.

    [dim]$[/] outrider tune-tree --model smollm2-135m --head my-medusa
    """
    from outrider import build
    from outrider.train import run, tune_tree as tuning

    where = run.dense(build.load_options(settings))
    texts = [text for _, text in asked.read()]
    options.pull_known(settings.model)
    with bar() as show:
        tuned = tuning.tune(settings.model, own.head, where, own.nodes, own.tokens, texts, show)
    print("head   rank 1   2      3      4      5")
    for index, row in enumerate(tuned.rates, 1):
        print(f"{index:<6}" + "".join(f"{share:7.3f}" for share in row[:5]))
    deep = max(len(path) for path in tuned.paths)
    note(f"{len(tuned.paths)} nodes, {deep} deep, {tuned.expected:.2f} tokens per pass expected; written to {own.head}")
