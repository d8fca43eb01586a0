"""The app: what every request passes through, and the routes of the APIs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request as HttpRequest, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from outrider.core.errors import QUOTED, OutriderError, quoted
from outrider.server.access import Access
from outrider.server.context import VERSION, ServerContext, server_of
from outrider.server.errors import LONGEST_MESSAGE, Bad, ServerError, body_of, lorax_shape, shape_of
from outrider.server.faces import anthropic, lora, lorax, openai, playground, responses_api, xinference
from outrider.server.fleet.fleet import Fleet
from outrider.server.middleware import RequestGuard, RequestLog
from outrider.server.options import ServerOptions
from outrider.server.registry import BUILT_IN, Registry
from outrider.server.responses import ClientGone

FIELD = re.compile(r"(?!(str|int|float|bool|none)$)[a-z_][a-z0-9_]*")  # the other parts of a place are types

router = APIRouter()


def create_app(fleet: Fleet, options: ServerOptions = ServerOptions(), registry: Registry = BUILT_IN) -> FastAPI:
    app = FastAPI(title="Outrider", version=VERSION, lifespan=_lifespan, redoc_url=None)
    app.state.fleet = fleet
    app.state.server = ServerContext(fleet, options, Access(options.folders, registry.sources(), options.hub), registry)
    for face in (openai, responses_api, anthropic, xinference, lora, lorax, playground):
        app.include_router(face.router)
    app.include_router(router)
    for kind in (OutriderError, RequestValidationError, HTTPException, ClientGone):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(RequestGuard, options=options)
    if options.cors:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestLog, fleet=fleet)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.server.fleet.close()


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["server"])
async def health(request: HttpRequest) -> Response:
    """200 while every launched model is ready, else 503; the body says which is not, and why."""
    state = server_of(request).fleet.health()
    return JSONResponse(state, 200 if state["status"] == "ok" else 503)


@router.get("/metrics", tags=["server"], response_class=Response)
async def metrics(request: HttpRequest) -> Response:
    """For Prometheus."""
    server = server_of(request)
    text = server.fleet.metrics.text(vllm_names=server.options.timings)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _answer_error(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    if isinstance(error, RequestValidationError):
        error = _bad(error, request.headers.get("content-type", ""))
        error.status = 422 if shape_of(request.url.path) is lorax_shape else 400
    elif isinstance(error, HTTPException):
        error = _with_status(error)
    status, body, headers = body_of(request.url.path, error)
    request.state.refused = str(error)[:LONGEST_MESSAGE]
    return JSONResponse(body, status, headers)


def _bad(error: RequestValidationError, content_type: str) -> Bad:
    """What is wrong with the body, in one line. Where a field may have several shapes, the error is about the shape
    that fits best; one that is only too long or too short fits."""
    first = max(error.errors(), key=lambda each: (each["type"].endswith(("too_long", "too_short")), len(each["loc"])))
    parts = (str(part) for part in first["loc"][1:] if isinstance(part, int) or FIELD.fullmatch(part))
    place = ".".join(parts)[:QUOTED]
    if first["type"] == "json_invalid":
        return Bad(f"the body is not valid JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return Bad(f"unknown field {place!r}; it would be ignored, so it is refused: leave it out", param=place)
    if not place and isinstance(error.body, bytes) and error.body:  # what curl sends unless it is told otherwise
        return Bad(f"the body comes as {quoted(content_type)}; send it with the header content-type: application/json")
    return Bad(f"{place or 'the body'}: {first['msg'].removeprefix('Value error, ')}", param=place or None)


def _with_status(error: HTTPException) -> ServerError:
    shown = Bad(str(error.detail), headers=dict(error.headers or {}))
    shown.status, shown.code = error.status_code, None
    return shown
