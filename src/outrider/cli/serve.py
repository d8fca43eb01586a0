"""`outrider serve`: models behind well-known HTTP APIs."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider import drafters, refusals
from outrider.cli import options
from outrider.cli.fields import Given, command, fields
from outrider.cli.options import DEFAULT
from outrider.cli.screen import note
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.models import sources
from outrider.server import registry as registries
from outrider.server.access import Access
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.options import LAUNCH_DEFAULTS, LIMITS, ServerOptions
from outrider.server.registry import Registry
from outrider.settings import VLLM_DEFAULTS, Settings

if TYPE_CHECKING:
    from outrider.server.run import ServePlan

SERVER, RAY = "Server", "Ray"
LOCAL = ("127.0.0.1", "localhost", "::1")  # listening there, only requests for these names are answered
INSTALL_RAY, INSTALL_SERVER = "pip install '.[ray]' in a checkout", "pip install '.[server]' in a checkout"
PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")  # of the extra `server`
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LaunchOptions:
    """The model that is launched at the start."""

    model_id: str = option("", "The model, as an option instead of an argument.", flags=("--model-id", "--model", "-m"))
    uid: str = option("", "Name of the model in requests.", shown="the model's name")
    no_model: bool = option(False, "Launch no model; clients launch theirs.")
    speculative_tokens: int | None = option(
        None, "Prompt lookup of this many tokens: LoRAX's option; 0: plain decoding.", shown=False
    )
    adapter_id: str = option("", "An EAGLE or Medusa head that drafts.", shown=False)

    def __post_init__(self) -> None:
        if self.speculative_tokens is not None and self.speculative_tokens < 0:
            raise OutriderError(f"--speculative-tokens must be at least 0, not {self.speculative_tokens}")


@dataclass(frozen=True)
class ListenOptions:
    host: str = option("", "Address to listen on; 0.0.0.0: all networks.", shown="127.0.0.1", panel=SERVER)
    port: int = option(8000, "Port to listen on; 0: any free one.", least=0, most=65535, panel=SERVER)
    state: Path | None = option(
        None,
        "A file that lists the launched models; they are launched again after a restart.",
        shown=False,
        panel=SERVER,
    )
    registry: Path | None = option(None, "A YAML file with names for more models.", shown="registry.yaml", panel=SERVER)
    log_level: str = option("info", f"One of {', '.join(LEVELS)}.", panel=SERVER)
    grace: float = option(60.0, "Seconds that running requests have to finish after SIGTERM.", least=0.0, panel=LIMITS)

    def __post_init__(self) -> None:
        if self.log_level not in LEVELS:
            raise OutriderError(f"unknown log level {self.log_level!r}; known: {', '.join(LEVELS)}")


@dataclass(frozen=True)
class RayOptions:
    ray: bool = option(False, "Run as a Ray Serve application, with replicas.")
    ray_address: str = option(
        "", "The Ray cluster to join: HOST:PORT or auto.", shown="RAY_ADDRESS, or a Ray of our own"
    )
    replicas: str = option("1", "Number of replicas: N, or LEAST:MOST, scaled with the load.")
    cpus_per_replica: float = option(
        0.0, "CPUs of each replica, or a fraction of one.", least=0.0, shown="1 for each thread"
    )
    gpus_per_replica: float = option(0.0, "GPUs of each replica, or a fraction of one.", least=0.0)

    @property
    def address(self) -> str:
        """Of a Ray that runs already; "": one of our own is started on this machine."""
        address = self.ray_address or os.environ.get("RAY_ADDRESS", "")
        return address if self.ray and address != "local" else ""


SETTINGS = options.settings(
    "draft",
    *options.ENGINE,
    "max_batch",
    "max_draft_batch",
    *options.ADAPTERS,
    *options.MEMORY,
    draft={"help": "The drafter of requests that name none: NAME or NAME:key=value,...; none for plain decoding."},
    max_batch={"panel": LIMITS},
    max_draft_batch={"panel": LIMITS},
)


@command
def serve(
    model: Annotated[
        str, typer.Argument(help="Known name, folder, hub id or GGUF file.", show_default=DEFAULT.model)
    ] = "",
    *,
    launch: Annotated[LaunchOptions, fields(LaunchOptions, panel=options.MODEL)],
    given: Annotated[Given, options.configured(SETTINGS)],
    listen: Annotated[ListenOptions, fields(ListenOptions)],
    limits: Annotated[WorkerLimits, fields(WorkerLimits)],
    server: Annotated[ServerOptions, fields(ServerOptions)],
    ray: Annotated[RayOptions, fields(RayOptions, panel=RAY)],
) -> None:
    """Serve models over HTTP: the APIs of OpenAI, Anthropic, LoRAX and Xinference, metrics, and a playground.

    [dim]$[/] outrider serve                                  [dim]# smollm2-135m on port 8000[/]
    [dim]$[/] outrider serve model.gguf --draft ngram:length=8 --port 9000
    [dim]$[/] outrider serve --model-id org/name --speculative-tokens 3 --api-key SECRET --host 0.0.0.0
    [dim]$[/] outrider serve --adapter haiku=my-haiku --adapter json=my-json
    [dim]$[/] outrider serve --no-model --state models.json --allow-folder ~/models
    [dim]$[/] outrider serve --ray --replicas 2 --threads 1
    """
    _check_ray(ray, launch, listen)  # first: the extra ray brings the server's packages too
    check_installed()
    if launch.no_model and server.no_launch and listen.state is None:
        raise OutriderError("--no-model and --no-launch together serve nothing; leave out one of them, or add --state")
    from outrider.server.log import configure
    from outrider.server.run import ServePlan, run

    known = registries.load(listen.registry)
    if not ray.address:  # other machines have other files
        server.check_folders()
    spec = _spec(model, launch, given, known, elsewhere=bool(ray.address))
    settings = spec.settings
    if not launch.no_model:
        options.pull_known(settings.model)
    host = listen.host or LOCAL[0]
    if host not in LOCAL and not server.keys:
        note(f"everybody who can reach {host} may ask; --api-key keeps strangers out")
    if options.needs_grammar(settings.draft):
        note(f"the drafter {settings.draft} drafts only for requests that bring a grammar")
    configure(listen.log_level)
    defaults = {name: getattr(settings, name) for name in (*LAUNCH_DEFAULTS, *VLLM_DEFAULTS)}
    plan = ServePlan(
        host,
        listen.port,
        [] if launch.no_model else [spec],
        replace(server, defaults=defaults, hosts=LOCAL if host in LOCAL else ()),
        limits,
        known,
        listen.state,
        listen.grace,
        _greet,
    )
    if ray.ray:
        _run_on_ray(plan, ray, settings, listen.log_level)
    else:
        run(plan)


def _run_on_ray(plan: ServePlan, ray: RayOptions, settings: Settings, level: str) -> None:
    _prepare_ray(ray.address)
    from outrider.server.ray import app as on_ray
    from outrider.server.ray.scale import Scale

    scale = Scale.of(ray.replicas, ray.cpus_per_replica, ray.gpus_per_replica, settings)
    on_ray.run(plan, scale, ray.ray_address, level)


def check_installed() -> None:
    """The base install has no web server; this says how to get one."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise OutriderError(f"a server needs {', '.join(missing)}, not installed for this Python: {INSTALL_SERVER}")


def _spec(model: str, launch: LaunchOptions, given: Given, known: Registry, elsewhere: bool) -> LaunchSpec:
    """The model that was asked for, and how it runs. `elsewhere`: maybe on other machines."""
    name = _only_one(**{"MODEL": model, "--model-id": launch.model_id, "--no-model": launch.no_model})
    config = options.chosen(given)
    for line in config.notes:
        note(line)
    choice = known.choose(name if isinstance(name, str) and name else config.settings.model)
    _only_one(
        **{
            "--draft": given.get("draft"),
            "--speculative-tokens": launch.speculative_tokens is not None,
            "--adapter-id": launch.adapter_id,
            "--speculative-config": given.get("speculative_config"),
        }
    )
    settings = replace(
        config.settings,
        model=choice.source,
        draft=_draft(config.settings.draft, launch, Access((Path("/"),), known.sources(), hub=True), elsewhere),
        quantize=config.settings.quantize if choice.quantize == "none" else choice.quantize,
    )
    refusals.check(settings)
    if not launch.no_model and not elsewhere and settings.backend == DEFAULT.backend:
        sources.check(settings.model)  # a mistyped path shows before a server is started
    return LaunchSpec(settings, launch.uid, (choice.name,), choice.family())


def _check_ray(ray: RayOptions, launch: LaunchOptions, listen: ListenOptions) -> None:
    """Ray is here if it is wanted, and an option for it, or against it, is refused where it does not belong."""
    never = {"--no-model": launch.no_model, "--state": listen.state}
    only = {"--ray-address": ray.ray_address, "--replicas": ray.replicas != RayOptions.replicas}
    only |= {"--cpus-per-replica": ray.cpus_per_replica, "--gpus-per-replica": ray.gpus_per_replica}
    for name in (name for name, value in (never if ray.ray else only).items() if value):
        if ray.ray:
            raise OutriderError(f"on Ray the model is given at the start and no other is launched; leave out {name}")
        raise OutriderError(f"{name} is for Ray; add --ray or leave it out")
    if ray.ray and importlib.util.find_spec("ray") is None:
        raise OutriderError(f"--ray needs Ray, which is not installed for this Python: {INSTALL_RAY}")


def _prepare_ray(address: str) -> None:
    """What Ray reads when it is imported: no usage statistics; and a token for a Ray of our own, for which it would
    otherwise write one into the home folder."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address and "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def _greet(url: str) -> None:
    print(f"listening on {url}  (playground: {url}/, interface: {url}/docs; Ctrl-C ends)", flush=True)


def _only_one(**given: object) -> object:
    """The given value, if any."""
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise OutriderError(f"{names[0]} and {names[1]} exclude each other; leave out one of them")
    return given[names[0]] if names else None


def _draft(own: str, launch: LaunchOptions, access: Access, elsewhere: bool = False) -> str:
    """The default drafter: the drafter that was named, prompt lookup of a number of tokens, a head, or none."""
    if launch.speculative_tokens == 0:
        return drafters.PLAIN
    if launch.speculative_tokens:
        return f"{drafters.LOOKUP}:length={launch.speculative_tokens}"
    if launch.adapter_id:
        from outrider.server.faces.adapters import BASE, OWN, draft_of

        if elsewhere and launch.adapter_id not in (*BASE, *OWN):
            raise OutriderError(
                "--adapter-id reads a head on this machine, and the replicas may run on others; name its kind and its "
                "folder there: --draft eagle:head=FOLDER (or block, or medusa)"
            )
        return asyncio.run(draft_of(launch.adapter_id, access))
    return own
