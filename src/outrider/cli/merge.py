"""`outrider merge`: a model and its adapters as one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.cli import options
from outrider.cli.fields import command, fields
from outrider.cli.screen import bar, note
from outrider.core.adapter import STRATEGIES, AdapterMix
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.models import sources
from outrider.settings import Settings


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise OutriderError(f"{text!r} are no weights; write numbers with commas between them") from error


@dataclass(frozen=True)
class MergeOptions:
    out: Path = option(help="The new folder; it must not exist yet.", flags=("--out", "-o"))
    weights: tuple[float, ...] = option((), "A weight for each adapter: 1,0.5.", shown="all 1", parse=_numbers)
    strategy: str = option("cat", f"How several adapters become one: {', '.join(STRATEGIES)} (cat: the exact sum).")
    density: float | None = option(None, "The share of values that ties and dare keep.", shown=False)
    majority_sign_method: str = option("total", "For ties: total or frequency.")
    seed: int = option(0, "For dare: which values are dropped.")


@command
def merge(
    *,
    own: Annotated[MergeOptions, fields(MergeOptions)],
    settings: Annotated[Settings, options.settings("model", "adapters")],
) -> None:
    """Write a model and its adapters as one Hugging Face folder, for engines that take no adapters.

    [dim]$[/] outrider merge --adapter haiku=my-haiku --out smollm2-haiku
    [dim]$[/] outrider merge -m my-model --adapter a=A --adapter b=B --strategy ties --density 0.5 -o both
    """
    from outrider.models.adapters.export import write_merged
    from outrider.models.export import as_folder

    if not settings.adapters:
        raise OutriderError("which adapters? give --adapter NAME=PATH, once or several times")
    kinds: dict[str, Any] = {"strategy": own.strategy, "majority_sign_method": own.majority_sign_method}
    mix = AdapterMix(tuple(settings.adapters), own.weights, density=own.density, seed=own.seed, **kinds)
    if own.out.exists():
        raise OutriderError(f"{own.out} is there already; choose another --out, or remove it first")
    options.pull_known(settings.model)
    with bar() as show:
        folder = as_folder(sources.resolve(settings.model))
        write_merged(folder, [Path(path) for path in settings.adapters.values()], mix, own.out, show)
    note(f"written: {own.out}")
