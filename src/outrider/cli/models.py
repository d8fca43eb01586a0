"""`outrider pull` and `outrider models`: which models there are, and how they get here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.fields import fields, light_command
from outrider.cli.screen import print_json
from outrider.models import sources


def pull(
    name: Annotated[str, typer.Argument(help="A known name; [bold]outrider models[/] lists them.", show_default=False)],
) -> None:
    """Download a known model into the cache and check it. A model that is already there is not downloaded again.

    [dim]$[/] outrider pull smollm2-135m
    """
    print(options.pull(name))


@light_command
def models(
    *,
    registry: Annotated[
        Path | None, typer.Option(help="The server's registry, a YAML file.", show_default="registry.yaml")
    ] = None,
    printed: Annotated[options.Printed, fields(options.Printed)],
) -> None:
    """List the known models, the models in the Hugging Face cache, and the names in the server's registry.

    [dim]$[/] outrider models
    [dim]$[/] outrider models --json
    """
    from outrider.server.registry import BUILT_IN, load

    found, known = sources.installed(), load(registry)
    named = [entry for entry in known.entries if entry not in BUILT_IN.entries]
    if printed.as_json:
        rows = [{"name": m.name, "size": m.size, "path": None if m.path is None else str(m.path)} for m in found]
        print_json({"models": rows, "registry": [*map(asdict, named)], "heads": [*map(asdict, known.heads)]})
    else:
        _print_table(found, [*named, *known.heads])


def _print_table(found: list[sources.Installed], named: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("model", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("size", justify="right")
    table.add_column("where", overflow="fold")
    for model in found:
        where = str(model.path) if model.path else f"not here yet: outrider pull {model.name}"
        table.add_row(model.name, f"{model.size / 1e6:.0f} MB", where)
    for each in named:
        size = getattr(each, "size", None)
        table.add_row(each.name, f"{size:g} B" if size else "", each.source)
    Console().print(table, highlight=False)
