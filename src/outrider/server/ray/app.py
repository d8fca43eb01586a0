"""The server as a Ray Serve application: one ingress with all the HTTP APIs, and replicas of the model behind it.

outrider serve --ray --replicas 2
serve run outrider.server.ray.app:application model=smollm2-135m replicas=1:4
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import OutriderError, one_line
from outrider.server import log
from outrider.server.app import create_app
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.fleet.spec import LaunchSpec, settings_as_dict
from outrider.server.options import ServerOptions
from outrider.server.ray.fleet import RayFleet
from outrider.server.ray.replica import Replica
from outrider.server.ray.scale import Scale
from outrider.server.registry import BUILT_IN, Registry
from outrider.server.run import ServePlan, listen
from outrider.settings import from_mapping

APP, INGRESS, MODEL = "outrider", "Ingress", "Model"
STORE = 100 << 20  # bytes of shared memory for a Ray of our own: frames are small
ALIVE = 2.0  # seconds between Ray's looks at a replica's health
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # the app itself writes a line per request


@dataclass(frozen=True)
class IngressConfig:
    """What the ingress needs to know."""

    spec: LaunchSpec
    options: ServerOptions
    limits: WorkerLimits
    registry: Registry
    level: str = "info"


class WithoutRequestId:
    """Leaves out x-request-id: Ray's proxy adds it again, with the same id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [each for each in message.get("headers", ()) if each[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, without)


@serve.ingress()
class Ingress:
    """The app of server/app.py within Ray: Ray's proxy hands it every request."""

    def __init__(self, config: IngressConfig, handle: Any) -> None:
        log.configure(config.level)
        place = (serve.get_replica_context().app_name, MODEL)
        self._fleet = RayFleet(config.spec, config.limits, handle, place)
        self._made = create_app(self._fleet, config.options, config.registry)
        self._made.add_middleware(WithoutRequestId)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        await self._fleet.start()
        return self._made

    async def drain(self, grace: float) -> None:
        """Refuse what is new, and let what runs end."""
        await self._fleet.drain(grace)


def assemble(config: IngressConfig, scale: Scale, grace: float = 60.0, starts: int = 20) -> serve.Application:
    """Ingress and model. Requests wait in the ingress until a replica has a place, so a dead replica loses few.

    `starts`: how many replicas may fail to start, before the first one has, until it is given up; 20 is Ray's own.
    """
    settings = scale.fitted(config.spec.settings)
    model = serve.deployment(Replica, name=MODEL).options(
        **scale.replicas(settings.max_batch),
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        max_ongoing_requests=settings.max_batch,
        health_check_period_s=ALIVE,
        graceful_shutdown_timeout_s=grace,
        max_constructor_retry_count=starts,
        logging_config=QUIET,
    )
    most = config.limits.queue + settings.max_batch * scale.most
    ingress = serve.deployment(Ingress, name=INGRESS).options(
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * most + 100,  # the app says 429 itself, and health must get through
        health_check_period_s=ALIVE,
        graceful_shutdown_timeout_s=grace,
        logging_config=QUIET,
    )
    return ingress.bind(config, model.bind(settings_as_dict(settings)))


def application(args: Mapping[str, Any]) -> serve.Application:
    """For `serve run`, `serve deploy` and KubeRay: settings, and uid, replicas, cpus_per_replica, gpus_per_replica."""
    given = dict(args)
    uid, replicas = str(given.pop("uid", "")), str(given.pop("replicas", "1"))
    cpus, gpus = float(given.pop("cpus_per_replica", 0)), float(given.pop("gpus_per_replica", 0))
    settings = from_mapping(given)
    choice = BUILT_IN.choose(settings.model)
    spec = LaunchSpec(replace(settings, model=choice.source), uid or choice.name, (choice.name,), choice.family())
    more = tuple(os.environ.get("OUTRIDER_TENANT_KEYS", "").split())
    options = ServerOptions(api_key=os.environ.get("OUTRIDER_API_KEY", ""), tenant_keys=more)
    return assemble(IngressConfig(spec, options, WorkerLimits(), BUILT_IN), Scale.of(replicas, cpus, gpus, settings))


def run(plan: ServePlan, scale: Scale, address: str, level: str) -> None:
    """Until a signal comes. An OutriderError says why it cannot be."""
    (spec,) = plan.models
    port = _free(plan.host, plan.port)
    config = IngressConfig(spec, plan.options, plan.limits, plan.registry, level)
    with _joined(address, scale), _told_to_end() as end, _serving(plan.host, port):
        handle = _deploy(assemble(config, scale, plan.grace, starts=1))  # why it fails is told at once
        host = f"[{plan.host}]" if ":" in plan.host else plan.host
        plan.ready(f"http://{host}:{port}")
        end.wait()
        log.log("draining", seconds=plan.grace)
        with contextlib.suppress(Exception):  # an ingress that has died has nothing to drain
            handle.drain.remote(plan.grace).result(timeout_s=plan.grace + 10)


def _free(host: str, port: int) -> int:
    """The port, if it can be listened on here; Ray's own error about it would be long."""
    with listen(host, port) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def _joined(address: str, scale: Scale) -> Iterator[None]:
    """A Ray that runs already, or one of our own on this machine, which ends with us."""
    address = address or os.environ.get("RAY_ADDRESS", "") or "local"
    if address != "local":
        _check_address(address)
    how: dict[str, Any] = {"object_store_memory": STORE, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=True, logging_level="warning", namespace=APP, **how)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = one_line(error)
        raise OutriderError(f"cannot join Ray at {address} ({reason}); is it running? ray start --head") from error
    try:
        scale.check(ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise OutriderError(f"{address!r} is no address of Ray: auto or HOST:PORT, from a machine of the cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        remedy = "start Ray there (ray start --head), or leave out --ray-address for one of our own"
        raise OutriderError(f"no Ray answers at {address} ({error.strerror or error}); {remedy}") from error


@contextlib.contextmanager
def _serving(host: str, port: int) -> Iterator[None]:
    """Ray Serve, listening for us alone."""
    if _serve_runs():
        raise OutriderError(
            "Ray Serve runs there already and listens where it was told to; deploy into it (serve deploy FILE, see the "
            "guide) or end it (serve shutdown)"
        )
    try:
        logging.getLogger("ray.serve").setLevel("WARNING")
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=QUIET)
        yield
    finally:
        with contextlib.suppress(Exception):  # Ray itself may be gone
            serve.shutdown()


def _serve_runs() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _deploy(app: serve.Application) -> Any:
    try:
        return serve.run(app, name=APP, route_prefix="/")
    except RuntimeError as error:
        raise OutriderError(f"the replicas cannot start: {_why(error)}") from error


def _why(error: RuntimeError) -> str:
    """Our own line, out of the traces that Ray keeps of its replicas."""
    app = serve.status().applications.get(APP)
    told = "\n".join([str(error), *(each.message for each in app.deployments.values())] if app else [str(error)])
    found = re.findall(r"OutriderError: (.+)", told)
    return str(found[-1]) if found else " ".join(told.split())[-300:]


class _Stopped(BaseException):
    """A signal while the replicas load, or a second one."""


@contextlib.contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Set by the first SIGTERM or Ctrl-C; a second one ends at once."""
    end = _End()
    before = {each: signal.signal(each, end.hear) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield end
    except _Stopped:
        log.log("ending at once", level="warning")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _End(threading.Event):
    waiting = False

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting = True
        return super().wait(timeout)

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_set() or not self.waiting:
            raise _Stopped
        self.set()
