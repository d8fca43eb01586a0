"""LoRA adapters over REST: vLLM's paths that load and unload them, and llama.cpp's list of them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request as HttpRequest
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from outrider.core.adapter import MOST
from outrider.core.errors import quoted
from outrider.server.context import refuse_changes, server_of
from outrider.server.errors import Bad, Exists
from outrider.server.faces.adapters import BadAdapter, find
from outrider.server.faces.fields import Name, StrictBody
from outrider.server.faces.openai_bodies import LoraField
from outrider.server.responses import time_limit

router = APIRouter(tags=["adapters"])

PLACES = (".", "/", "~")  # a path begins so; requests name adapters by their paths, too
Json = dict[str, Any]


class LoadBody(StrictBody):
    """vLLM's, and `model`: which of several launched models it is for."""

    lora_name: Name = Field(min_length=1)
    lora_path: Name = Field(min_length=1)
    load_inplace: bool = False
    model: Name = ""


class UnloadBody(StrictBody):
    lora_name: Name = Field(min_length=1)
    lora_int_id: None = None
    model: Name = ""


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(request: HttpRequest, body: LoadBody) -> Response:
    """Load an adapter under a name; other requests go on meanwhile."""
    server, name = server_of(request), body.lora_name
    refuse_changes(server)
    model = server.fleet.describe(body.model)
    if name.startswith(PLACES):
        raise Bad(f"{quoted(name)} looks like a path; choose another name", param="lora_name")
    if any(name in each.spec.known_as for each in server.fleet.list()):
        raise Exists(f"a launched model is called {quoted(name)}; choose another name")
    if name in model.adapters and not body.load_inplace:
        raise Bad(f"the adapter {quoted(name)} is loaded already; load_inplace: true replaces it", param="lora_name")
    async with time_limit(request):
        place = await find(server.access, body.lora_path)
        if not await asyncio.to_thread(lambda: place.is_lora):
            raise BadAdapter(f"{quoted(body.lora_path)} is no LoRA adapter: give a PEFT folder or a GGUF file")
        await server.fleet.load_adapter(model.uid, name, str(place.path))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(request: HttpRequest, body: UnloadBody) -> Response:
    """Forget an adapter; requests that have it are served on."""
    server = server_of(request)
    refuse_changes(server)
    async with time_limit(request):
        await server.fleet.unload_adapter(body.model, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/lora-adapters")
async def list_adapters(request: HttpRequest, model: str = "") -> list[Json]:
    """llama.cpp's list. A request says which it wants, so that without a word of it every scale is 0."""
    adapters = server_of(request).fleet.describe(model).adapters.values()
    return [{"id": each.number, "path": each.name, "scale": 0.0} for each in adapters]


@router.post("/lora-adapters")
async def scale_adapters(body: Annotated[list[LoraField], Field(max_length=MOST)]) -> Json:
    """llama.cpp sets the scales of all requests to come; here each says its own."""
    raise Bad('scales are given with each request, not for all of them: "lora": [{"id": 0, "scale": 1.0}]')
