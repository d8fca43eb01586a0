"""What every route works with: the launched models, how the server was started, what requests may open."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from fastapi import Request as HttpRequest

from outrider.server.access import Access
from outrider.server.errors import Forbidden
from outrider.server.fleet.fleet import Fleet
from outrider.server.options import ServerOptions
from outrider.server.registry import Registry

# The package's own, not that of its metadata: it may run out of a folder. An import of it would point the wrong way.
VERSION: str = sys.modules["outrider"].__version__


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


def refuse_changes(server: ServerContext) -> None:
    if server.options.no_launch:
        raise Forbidden("requests may neither launch nor end models here, nor load adapters (serve --no-launch)")


def tenant_of(request: HttpRequest) -> str:
    """Whose request it is, as a digest of the key; "" where no key is needed."""
    return str(request.state.tenant)


def id_of(request: HttpRequest) -> str:
    """The request's own, in the log and in the header x-request-id."""
    return str(request.state.request_id)
