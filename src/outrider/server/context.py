"""What every route works with: the launched models, how the server was started, what requests may open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Request as HttpRequest

from outrider.server.access import Access
from outrider.server.fleet.fleet import Fleet
from outrider.server.registry import Registry

VERSION = version("outrider")
# How the server was started, which launches over REST take over; VLLM_DEFAULTS where they run on vLLM.
LAUNCH_DEFAULTS: tuple[str, ...] = ("backend", "device", "threads", "cache_memory", "max_batch", "max_draft_batch")
LAUNCH_DEFAULTS += ("rule", "pace", "piece")


@dataclass(frozen=True)
class ServerOptions:
    """What `outrider serve` was told, as far as requests are concerned."""

    api_key: str = ""  # "": everybody may ask
    max_body: int = 4 << 20  # bytes
    timeout: float = 600.0  # seconds that a request may take
    cors: tuple[str, ...] = ()  # origins whose pages may ask
    folders: tuple[Path, ...] = ()  # what requests may open
    hub: bool = False  # whether requests may name hub ids
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of launches over REST: device, max_batch, ...


@dataclass(frozen=True)
class ServerContext:
    """What every route works with: `server_of(request)`."""

    fleet: Fleet
    options: ServerOptions
    access: Access
    registry: Registry


def server_of(request: HttpRequest) -> ServerContext:
    server: ServerContext = request.app.state.server
    return server


def id_of(request: HttpRequest) -> str:
    """The request's own, in the log and in the header x-request-id."""
    return str(request.state.request_id)
