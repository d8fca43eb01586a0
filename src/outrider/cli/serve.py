"""`outrider serve`: models behind the HTTP faces that people know."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider import build
from outrider.cli import options
from outrider.cli.options import DEFAULT
from outrider.cli.screen import note
from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.settings import VLLM_DEFAULTS

if TYPE_CHECKING:
    from outrider.server.access import Access

SERVER, LIMITS, ACCESS, RAY = "Server", "Limits", "Access", "Ray"
LOCAL = ("127.0.0.1", "localhost", "::1")
INSTALL_RAY = "pip install 'outrider[ray]'"
LEVELS = ("debug", "info", "warning", "error")


def serve(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Known name, folder, hub id or GGUF file.", show_default=DEFAULT.model)
    ] = "",
    model_id: Annotated[
        str, typer.Option("--model-id", "--model", "-m", help="The same as an option.", rich_help_panel=options.MODEL)
    ] = "",
    uid: Annotated[
        str, typer.Option(help="What requests call it.", show_default="the model's name", rich_help_panel=options.MODEL)
    ] = "",
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Launch none; clients will.", rich_help_panel=options.MODEL)
    ] = False,
    config: options.ConfigFile = None,
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            help="Who guesses ahead where a request does not say: NAME or NAME:key=value,...; none for plain decoding.",
            show_default=DEFAULT.draft,
            rich_help_panel=options.MODEL,
        ),
    ] = "",
    speculative_tokens: Annotated[
        int,
        typer.Option(
            help="Prompt lookup of that many tokens, as LoRAX says it.",
            show_default=False,
            rich_help_panel=options.MODEL,
        ),
    ] = 0,
    adapter_id: Annotated[
        str,
        typer.Option(help="An EAGLE or Medusa head that drafts.", show_default=False, rich_help_panel=options.MODEL),
    ] = "",
    backend: options.Backend = DEFAULT.backend,
    speculative_config: options.SpeculativeConfig = None,
    device: options.Device = DEFAULT.device,
    dtype: options.Dtype = DEFAULT.dtype,
    quantize: options.Quantize = DEFAULT.quantize,
    threads: options.Threads = DEFAULT.threads,
    cache_memory: options.CacheMemory = DEFAULT.cache_memory,
    tensor_parallel_size: options.TensorParallelSize = DEFAULT.tensor_parallel_size,
    pipeline_parallel_size: options.PipelineParallelSize = DEFAULT.pipeline_parallel_size,
    data_parallel_size: options.DataParallelSize = DEFAULT.data_parallel_size,
    host: Annotated[
        str, typer.Option(help="0.0.0.0: everybody who can reach us.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.", rich_help_panel=SERVER)] = 8000,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Launched models are kept here, and launched again.", show_default=False, rich_help_panel=SERVER
        ),
    ] = None,
    registry: Annotated[
        Path | None,
        typer.Option(help="More models by name, in YAML.", show_default="registry.yaml", rich_help_panel=SERVER),
    ] = None,
    log_level: Annotated[str, typer.Option(help=f"One of {', '.join(LEVELS)}.", rich_help_panel=SERVER)] = "info",
    max_batch: Annotated[
        int, typer.Option(help="Sequences that run at once.", rich_help_panel=LIMITS)
    ] = DEFAULT.max_batch,
    speculation_max_batch_size: Annotated[
        int,
        typer.Option(help="Draft only while at most so many run; 0: as long as it pays.", rich_help_panel=LIMITS),
    ] = 0,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Sequences that may wait; more get a 429.", rich_help_panel=LIMITS)
    ] = 256,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.", rich_help_panel=LIMITS)] = 4 << 20,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds of a request.", rich_help_panel=LIMITS)] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds for running requests after SIGTERM.", rich_help_panel=LIMITS)
    ] = 60.0,
    ray: Annotated[
        bool, typer.Option("--ray", help="As a Ray Serve application, with replicas.", rich_help_panel=RAY)
    ] = False,
    ray_address: Annotated[
        str,
        typer.Option(help="HOST:PORT or auto.", show_default="RAY_ADDRESS, or a Ray of our own", rich_help_panel=RAY),
    ] = "",
    replicas: Annotated[
        str, typer.Option(help="N, or LEAST:MOST for as many as are asked for.", rich_help_panel=RAY)
    ] = "1",
    cpus_per_replica: Annotated[
        float, typer.Option(min=0.0, help="A share will do.", show_default="1 for each thread", rich_help_panel=RAY)
    ] = 0.0,
    gpus_per_replica: Annotated[
        float, typer.Option(min=0.0, help="What a replica sees of the GPUs.", rich_help_panel=RAY)
    ] = 0.0,
    api_key: Annotated[
        str, typer.Option(envvar="OUTRIDER_API_KEY", help="What requests must bring.", rich_help_panel=ACCESS)
    ] = "",
    allow_folder: Annotated[
        list[Path] | None,
        typer.Option(help="Requests may open models and heads in here. Repeatable.", rich_help_panel=ACCESS),
    ] = None,
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Requests may name hub ids.", rich_help_panel=ACCESS)
    ] = False,
    cors: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask; off by default.", rich_help_panel=ACCESS)
    ] = None,
) -> None:
    """Serve models over HTTP: OpenAI's, LoRAX's and Xinference's paths, metrics, and a playground in the browser.

    [dim]$[/] outrider serve                                  [dim]# smollm2-135m on port 8000[/]
    [dim]$[/] outrider serve model.gguf --draft ngram:length=8 --port 9000
    [dim]$[/] outrider serve --model-id org/name --speculative-tokens 3 --api-key SECRET --host 0.0.0.0
    [dim]$[/] outrider serve --no-model --state models.json --allow-folder ~/models
    [dim]$[/] outrider serve --ray --replicas 2 --threads 1
    """
    if log_level not in LEVELS:
        raise OutriderError(f"unknown log level {log_level!r}; known: {', '.join(LEVELS)}")
    for_ray = {"--ray-address": ray_address, "--replicas": replicas != "1"}
    for_ray |= {"--cpus-per-replica": cpus_per_replica, "--gpus-per-replica": gpus_per_replica}
    _check_ray(ray, for_ray, {"--no-model": no_model, "--state": state})
    from outrider.server import registry as registries
    from outrider.server.access import Access
    from outrider.server.context import LAUNCH_DEFAULTS, ServerOptions
    from outrider.server.fleet.limits import WorkerLimits
    from outrider.server.fleet.spec import LaunchSpec
    from outrider.server.log import configure
    from outrider.server.run import Plan, run

    known = registries.load(registry)
    name = _only_one(**{"MODEL": model, "--model-id": model_id, "--no-model": no_model})
    said = options.chosen(ctx, config)
    for line in said.notes:
        note(line)
    choice = known.choose(name if isinstance(name, str) and name else said.settings.model)
    asked = {"--draft": draft, "--speculative-tokens": speculative_tokens, "--adapter-id": adapter_id}
    _only_one(**asked, **{"--speculative-config": speculative_config})
    spec = _draft(said.settings.draft, speculative_tokens, adapter_id, Access((Path("/"),), known.sources(), hub=True))
    settings = replace(
        said.settings,
        model=choice.source,
        draft=spec,
        quantize=said.settings.quantize if choice.quantize == "none" else choice.quantize,
        max_draft_batch=speculation_max_batch_size or said.settings.max_draft_batch,
    )
    build.check(settings)
    if not no_model and settings.model in sources.KNOWN:
        options.pull(settings.model)
    if host not in LOCAL and not api_key:
        note(f"everybody who can reach {host} may ask; --api-key keeps strangers out")
    configure(log_level)
    plan = Plan(
        host,
        port,
        [] if no_model else [LaunchSpec(settings, uid, (choice.name,), choice.family())],
        ServerOptions(
            api_key,
            max_body,
            timeout,
            tuple(cors or ()),
            tuple(allow_folder or ()),
            allow_hub,
            {name: getattr(settings, name) for name in (*LAUNCH_DEFAULTS, *VLLM_DEFAULTS)},
        ),
        WorkerLimits(queue=max_queue),
        known,
        state,
        grace,
        _greet,
    )
    if not ray:
        run(plan)
        return
    _prepare_ray(ray_address or os.environ.get("RAY_ADDRESS", ""))
    from outrider.server.ray import app as on_ray
    from outrider.server.ray.scale import Scale

    on_ray.run(plan, Scale.of(replicas, cpus_per_replica, gpus_per_replica, settings), ray_address, log_level)


def _check_ray(ray: bool, only: dict[str, object], never: dict[str, object]) -> None:
    """Ray is here if it is wanted; what is `only` for it, or `never`, is refused where it does not belong."""
    for name in (name for name, value in (never if ray else only).items() if value):
        if ray:
            raise OutriderError(f"on Ray the model is given at the start and no other is launched; leave out {name}")
        raise OutriderError(f"{name} is for Ray; add --ray or leave it out")
    if ray and importlib.util.find_spec("ray") is None:
        raise OutriderError(f"--ray needs Ray, which is not installed for this Python: {INSTALL_RAY}")


def _prepare_ray(address: str) -> None:
    """What Ray reads when it is imported: that it shall tell nobody that we run it; and a token for a Ray of our own,
    for which it would otherwise write one into the home folder."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def _greet(url: str) -> None:
    print(f"listening on {url}  (playground: {url}/, interface: {url}/docs; Ctrl-C ends)", flush=True)


def _only_one(**given: object) -> object:
    """The one that is given, if any."""
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise OutriderError(f"{names[0]} and {names[1]} say the same thing twice; leave out one of them")
    return given[names[0]] if names else None


def _draft(own: str, tokens: int, adapter: str, access: Access) -> str:
    """Who drafts by default: the drafter that was named, prompt lookup of so many tokens, or a head."""
    if tokens < 0:
        raise OutriderError(f"--speculative-tokens must be at least 0, not {tokens}")
    if tokens:
        return f"ngram:length={tokens}"
    if adapter:
        from outrider.server.faces.adapters import draft_of

        return asyncio.run(draft_of(adapter, None, access))
    return own
