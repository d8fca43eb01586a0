"""The app: what every request passes through, and the faces."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request as HttpRequest, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import OutriderError
from outrider.server.access import Access
from outrider.server.answers import VERSION, ClientGone, Options, Server, server_of
from outrider.server.errors import Bad, ServerError, TooLarge, Unauthorised, body_of, lorax_shape, shape_of
from outrider.server.faces import lorax, openai, playground, xinference
from outrider.server.fleet.fleet import Fleet
from outrider.server.log import log
from outrider.server.registry import BUILT_IN, Registry

OPEN = ("/health", "/", "/favicon.ico", "/v1/cluster/auth")  # what one may GET without a key, and /static/ all
FIELD = re.compile(r"(?!(str|int|float|bool|none)$)[a-z_][a-z0-9_]*")  # the other parts of a place are types
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")

router = APIRouter()


def create_app(fleet: Fleet, options: Options = Options(), registry: Registry = BUILT_IN) -> FastAPI:
    app = FastAPI(title="Outrider", version=VERSION, lifespan=_lifespan, redoc_url=None)
    app.state.fleet = fleet
    app.state.server = Server(fleet, options, Access(options.folders, registry.sources(), options.hub), registry)
    for face in (router, openai.router, xinference.router, lorax.router, playground.router):
        app.include_router(face)
    for kind in (OutriderError, RequestValidationError, HTTPException, ClientGone):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(Gate, options=options)
    if options.cors:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Journal, fleet=fleet)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.server.fleet.close()


@router.get("/health", tags=["server"])
async def health(request: HttpRequest) -> Response:
    """200 while every launched model is ready, else 503; the body says which is not, and why."""
    said = server_of(request).fleet.health()
    return JSONResponse(said, 200 if said["status"] == "ok" else 503)


@router.get("/metrics", tags=["server"], response_class=Response)
async def metrics(request: HttpRequest) -> Response:
    """For Prometheus."""
    return Response(server_of(request).fleet.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _answer_error(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    if isinstance(error, RequestValidationError):
        error = _bad(error)
        error.status = 422 if shape_of(request.url.path) is lorax_shape else 400
    elif isinstance(error, HTTPException):
        error = _with_status(error)
    status, body, headers = body_of(request.url.path, error)
    request.state.refused = str(error)
    return JSONResponse(body, status, headers)


def _bad(error: RequestValidationError) -> Bad:
    """What is wrong with the body, in one line; of several possible shapes the one that fitted furthest tells."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))
    place = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, int) or FIELD.fullmatch(part))
    if first["type"] == "json_invalid":
        return Bad(f"the body is not valid JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return Bad(f"unknown field {place!r}; it would be ignored, so it is refused: leave it out", param=place)
    return Bad(f"{place or 'the body'}: {first['msg']}", param=place or None)


def _with_status(error: HTTPException) -> ServerError:
    shown = Bad(str(error.detail), headers=dict(error.headers or {}))
    shown.status, shown.code = error.status_code, None
    return shown


class Gate:
    """Lets in who has the key, and bodies of a bearable size."""

    def __init__(self, app: ASGIApp, options: Options) -> None:
        self._app, self._most = app, options.max_body
        self._key = options.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope, headers)
            self._check_length(headers)
            receive = await self._read(receive)
        except ClientGone:
            return
        except (Unauthorised, TooLarge) as error:
            status, body, more = body_of(scope["path"], error)
            await JSONResponse(body, status, {**more, "connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        reads = scope["method"] in ("GET", "HEAD")
        if not self._key or (reads and (scope["path"] in OPEN or scope["path"].startswith("/static/"))):
            return
        given = headers.get(b"authorization", b"")
        given = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given, self._key):
            raise Unauthorised("the API key is missing or wrong; send it as Authorization: Bearer KEY")

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most:
            raise TooLarge(f"the body has {int(length)} bytes; at most {self._most} are taken (serve --max-body)")

    async def _read(self, receive: Receive) -> Receive:
        """The body, counted as it comes: not every client says its length. It is then there for the app to take."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most:
                raise TooLarge(f"the body has more than {self._most} bytes (serve --max-body)")
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return first.pop() if first else await receive()

        return replayed


class Journal:
    """Gives every request an id and a time when it began, and the log a line when it is over."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app, self._metrics = app, fleet.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=id, begun=asyncio.get_running_loop().time())
        begin, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # a fault of ours: it is told, and the server goes on
            log("failed", level="error", request_id=id, trace=traceback.format_exc())
            if not status:
                code, body, _ = body_of(scope["path"], error)
                await JSONResponse(body, code)(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.http.labels(path, str(status)).inc()
            seconds = round(time.perf_counter() - begin, 4)
            log(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=seconds,
                request_id=id,
                refused=scope["state"].get("refused"),
            )


def _request_id(scope: Scope) -> str:
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
