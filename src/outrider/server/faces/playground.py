"""The page at `/`: static files from a fixed table, and what the page may choose from."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outrider import drafters
from outrider.drafters.heads.kinds import SHIPPED
from outrider.server.context import server_of
from outrider.server.errors import Unknown
from outrider.server.fleet.fleet import Description

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
def page() -> Response:
    return _file("index.html")


@router.get("/static/{name}")
def file(name: str) -> Response:
    return _file(name)


@router.get("/outrider/models")
def models(request: Request) -> dict[str, Any]:
    """What is launched, and who can draft for it without being told more."""
    launched = server_of(request).fleet.list()
    models = [{**_model(each), "id": name} for each in launched for name in _names(each)]
    return {"models": models, "drafters": [_drafter(name) for name in drafters.names()]}


def _names(launched: Description) -> list[str]:
    """Of the model, and of it with each of its adapters."""
    return [launched.uid, *(f"{launched.uid}:{name}" for name in launched.adapters)]


def _model(launched: Description) -> dict[str, Any]:
    settings = launched.spec.settings
    local = settings.backend == "local"  # vLLM drafts as it was loaded
    return {
        "id": launched.uid,
        "status": launched.status,
        "draft": settings.drafter,
        "drafters": [name for name in drafters.names() if local and _ready(name, settings.model)],
        "context": launched.info.get("context"),
        "chat": launched.info.get("chat", True),
    }


def _file(name: str) -> Response:
    """Only names of the table are ever looked up; no path of a request reaches the file system."""
    found = _files().get(name)
    if found is None:
        raise Unknown(f"the playground has no file {name[:80]!r}")
    content, kind = found
    return Response(content, media_type=kind, headers=_HEADERS)


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    return {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in _FOLDER.iterdir() if path.suffix in _TYPES}


def _ready(name: str, model: str) -> bool:
    """Whether a drafter can be named without more: no option is missing, a head is shipped for the model, and of the
    drafters that are given the expected answer only the drafter that takes text."""
    kind = drafters.find(name)
    fields = dataclasses.fields(kind.Options)
    if kind.parts:
        return True
    if any(field.default is field.default_factory is dataclasses.MISSING for field in fields):
        return False
    if "head" in (field.name for field in fields):
        return (SHIPPED / Path(model).name / name).is_dir()
    return not kind.for_measurement


def _drafter(name: str) -> dict[str, Any]:
    kind = drafters.find(name)
    return {"name": name, "about": _about(kind), "options": [field.name for field in dataclasses.fields(kind.Options)]}


def _about(kind: type[drafters.Drafter]) -> str:
    """The first sentence of what its author wrote, without the papers."""
    text = kind.__doc__ or inspect.getdoc(inspect.getmodule(kind)) or ""
    return _SENTENCE.split(_PAPERS.sub("", " ".join(text.split())))[0].rstrip(".") + "."


_PAPERS = re.compile(r" \([^()]*\d{4}[^()]*\)")
_SENTENCE = re.compile(r"(?<=\.) ")
