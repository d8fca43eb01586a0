"""`outrider config check`: what a config file will run, in plain words, before anything is loaded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from outrider import drafters, refusals
from outrider.backends import speculation
from outrider.cli.fields import import_engine
from outrider.cli.options import PLAIN, read_config
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.models import sources
from outrider.settings import Config, Settings

app = typer.Typer(help="Look at config files.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A YAML or JSON file, as for --config.", show_default=False)],
) -> None:
    """Say in plain words what a config file will run: the model, where, who drafts, how tokens are chosen.

    Nothing is loaded or downloaded. What cannot run is an error with the reason, and exit code 2.

    [dim]$[/] outrider config check c.yaml
    """
    config = read_config(file)
    lines = explain(config)
    for name, text in lines:
        print(f"{name + ':':10} {text}")
    for note in config.notes:
        print(f"note: {note}")


def explain(config: Config) -> list[tuple[str, str]]:
    settings = config.settings
    refusals.check(settings)
    model = _where(settings.model)
    lines = [("model", f"{settings.model} ({model})"), ("runs on", _engine(settings)), ("drafter", _drafter(settings))]
    lines.append(("sampling", _sampling(config.params)))
    if config.query_prefix:
        lines.append(("prefix", f"{config.query_prefix!r} before each query"))
    return lines


def _where(name: str) -> str:
    """Where a model would come from; an OutriderError if it cannot."""
    if name in sources.KNOWN:
        here = next(model for model in sources.installed() if model.name == name).path
        return "pulled" if here else f"known, not here yet: outrider pull {name}"
    if name.startswith(sources.HUB) or (sources.HUB_ID.fullmatch(name) and not _is_path(name)):
        return "a hub id: taken from the cache of the Hugging Face hub, or downloaded"
    path = sources.resolve(name)
    if path.is_file():
        return "a GGUF file"
    if not (path / "config.json").is_file():
        raise OutriderError(f"{path} has no config.json, so it is not a model folder")
    return "a folder"


def _is_path(name: str) -> bool:
    return name.startswith(".") or Path(name).expanduser().exists()


def _engine(settings: Settings) -> str:
    if settings.backend == "vllm":
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        spread = [f"{name} {getattr(settings, name)}" for name in sizes if getattr(settings, name) > 1]
        given = [f"{name}={value!r}" for name, value in settings.engine_args.items()]
        return ", ".join(["vLLM", f"dtype {settings.dtype}", *spread, *given])
    import_engine()
    from outrider import build

    place = build.load_options(settings)
    rounded = "" if settings.quantize == "none" else f", rounded to {settings.quantize}"
    return f"our own engine, on {place.device}, dtype {settings.numbers}{rounded}"


def _drafter(settings: Settings) -> str:
    spec, model = settings.drafter, _draft_model(settings)
    if spec == drafters.PLAIN:
        return "none: plain decoding"
    return spec if model is None else f"{spec} ({_where(model)})"


def _draft_model(settings: Settings) -> str | None:
    if settings.backend == "local":
        members = drafters.parse(settings.draft).members
        return next((model for member in members if (model := getattr(member.options, "model", None))), None)
    config = settings.speculative_config or speculation.to_vllm(settings.draft) or {}
    drafts = speculation.WORDS.get(config.get("method", "")) is speculation.VllmModelOptions
    return config.get("model") if drafts else None


def _sampling(params: SamplingParams) -> str:
    how = "greedy" if params.greedy else f"temperature {params.temperature:g}"
    own = {each.name: getattr(params, each.name) for each in fields(params)}
    others = [f"{name} {value}" for name, value in own.items() if name not in _ALWAYS and value != getattr(PLAIN, name)]
    return ", ".join([how, f"at most {params.max_tokens} tokens", *others])


_ALWAYS = ("temperature", "max_tokens")
