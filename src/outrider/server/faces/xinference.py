"""Xinference's API: models and speculative pairs, launched, listed and terminated over REST."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from outrider import drafters
from outrider.models import sources
from outrider.server.context import ServerContext, refuse_changes, server_of
from outrider.server.errors import Bad, TooManyModels, Unknown
from outrider.server.faces.adapters import named_adapter
from outrider.server.faces.fields import MOST_LISTED, Ignored, Name, Uid, Word
from outrider.server.fleet.adapters import ServedAdapter
from outrider.server.fleet.fleet import Description
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.registry import Choice
from outrider.settings import MOST_BATCH, VLLM_DEFAULTS, from_mapping

router = APIRouter(tags=["Xinference"])

GAMMA = 4  # tokens of a draft, unless a request says otherwise
ENGINES = {"outrider": "local", "local": "local", "vllm": "vllm"}
Json = dict[str, Any]
Size = float | Word | None
DeviceIndex = Annotated[StrictInt, Field(ge=0, lt=1024)]

# Bounds on the models that requests launch.
CORES = os.cpu_count() or 1  # threads
MOST_MEMORY = 1024.0  # GiB for keys and values, where it is a GPU's; a CPU's is what the machine has
GIB = 1 << 30

# What Xinference can be asked for and is not offered here; None, False and the default are fine.
NOT_OFFERED = {
    "replica": "one worker serves a model here, with all of its requests in one batch",
    "n_worker": "one worker serves a model here",
    "peft_model_config": "LoRA adapters are loaded with POST /v1/load_lora_adapter",
    "request_limits": "the queue is bounded for all models alike (serve --max-queue)",
    "worker_ip": "there is one machine here",
    "replica_config": "one worker serves a model here",
    "enable_thinking": "it is for the chat template of each request, not for a launch",
    "enable_virtual_env": "a worker runs in the server's own environment",
    "virtual_env_packages": "a worker runs in the server's own environment",
    "virtual_env_find_links": "a worker runs in the server's own environment",
    "envs": "a worker runs in the server's own environment",
}


class Placement(BaseModel):
    """Where a model is to run."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model_uid: Uid | None = None
    n_gpu: StrictInt | Literal["auto"] | None = "auto"


class LaunchBody(Placement):
    model_name: Name
    model_type: Literal["LLM"] | None = "LLM"
    model_engine: Word | None = None
    model_size_in_billions: Size = None
    model_format: Word | None = None
    quantization: Word | None = None
    model_path: Name | None = None
    gpu_idx: DeviceIndex | Annotated[list[DeviceIndex], Field(max_length=MOST_LISTED)] | None = None
    replica: StrictInt | None = 1
    n_worker: StrictInt | None = 1
    peft_model_config: Ignored | None = None
    request_limits: StrictInt | None = None
    worker_ip: Word | None = None
    replica_config: Ignored | None = None
    enable_thinking: StrictBool | None = None
    enable_virtual_env: StrictBool | None = None
    virtual_env_packages: Ignored | None = None
    virtual_env_find_links: Ignored | None = None
    envs: Ignored | None = None
    # Ours: how the model is run.
    draft: Name | None = None
    dtype: Word | None = None
    rule: Word | None = None
    pace: StrictBool | None = None
    max_batch: Annotated[StrictInt, Field(le=MOST_BATCH)] | None = None
    cache_memory: Annotated[float, Field(le=MOST_MEMORY)] | None = None
    threads: Annotated[StrictInt, Field(le=CORES)] | None = None


class PairBody(Placement):
    model_name: Name
    model_size_in_billions: Size = None
    quantization: Word | None = None
    draft_model_name: Name
    draft_model_size_in_billions: Size = None
    draft_quantization: Word | None = None


@router.get("/v1/models")
async def list_models(request: HttpRequest) -> Json:
    """What is launched, for OpenAI's clients and Xinference's alike."""
    models = server_of(request).fleet.list()
    names = Counter(name for model in models for name in (model.uid, *model.adapters))
    adapters = [
        shown_adapter(model, each, names[each.name] > 1) for model in models for each in model.adapters.values()
    ]
    return {"object": "list", "data": [*(shown(model) for model in models), *adapters]}


@router.post("/v1/models")
async def launch_model(request: HttpRequest, body: LaunchBody, wait_ready: Annotated[bool, Query()] = True) -> Json:
    """Launch a model; the answer comes when it is ready."""
    server = server_of(request)
    if not wait_ready:
        raise Bad("wait_ready=false is not offered: the answer comes when the model is ready", param="wait_ready")
    _refuse(body)
    name = body.model_path or body.model_name
    choice = _choose(server, name, body.model_size_in_billions, body.quantization)
    _check_format(choice, body.model_format)
    settings = _settings(server, choice, device=_device(body.n_gpu, body.gpu_idx), backend=_backend(body.model_engine))
    for field in ("dtype", "rule", "pace", "max_batch", "cache_memory", "threads"):
        if (value := getattr(body, field)) is not None:
            settings[field] = value
    if body.cache_memory:
        _check_memory(body.cache_memory, settings)
    if body.draft is not None:
        settings["draft"] = server.access.on(settings["backend"]).draft_of_text(body.draft)
    return await _launch(server, body, settings, choice, body.model_name)


@router.post("/experimental/speculative_llms")
async def launch_speculative_llm(request: HttpRequest, body: PairBody) -> Json:
    """Launch a model together with a smaller model that drafts for it."""
    server = server_of(request)
    choice = _choose(server, body.model_name, body.model_size_in_billions, body.quantization)
    draft = _choose(server, body.draft_model_name, body.draft_model_size_in_billions, body.draft_quantization)
    settings = _settings(server, choice, device=_device(body.n_gpu))
    settings["draft"] = _pair(draft)
    family = {
        "draft_model_name": draft.name,
        "draft_model_size_in_billions": draft.size,
        "draft_quantization": draft.quantization,
    }
    return await _launch(server, body, settings, choice, body.model_name, **family)


@router.get("/v1/models/instances")
async def instances(request: HttpRequest, model_name: str = "", model_uid: str = "") -> list[Json]:
    """The workers of the launched models, one for each."""
    models = [shown(model) for model in server_of(request).fleet.list()]
    return [
        {"model_uid": model["id"], "model_name": model["model_name"], "replica": 1, "status": model["status"]}
        for model in models
        if model_name in ("", model["model_name"]) and model_uid in ("", model["id"])
    ]


@router.get("/v1/models/{uid:path}")
async def describe_model(request: HttpRequest, uid: str) -> Json:
    server = server_of(request)
    try:
        return shown(server.fleet.describe(uid))
    except Unknown as unknown:
        model, adapter = named_adapter(server, uid)
        if model is None or adapter not in model.adapters:
            raise unknown from None
        return shown_adapter(model, model.adapters[adapter], uid != adapter)


@router.delete("/v1/models/{uid:path}")
async def terminate_model(request: HttpRequest, uid: str) -> Json:
    """End a model's worker. What it is answering ends with an error."""
    server = server_of(request)
    refuse_changes(server)
    if not uid:
        raise Unknown("name the model to end: DELETE /v1/models/UID", param="model_uid")
    await server.fleet.terminate(uid)
    return {}


@router.get("/v1/model_registrations/{model_type}")
async def registrations(request: HttpRequest, model_type: Literal["LLM"], detailed: bool = False) -> list[Json]:
    """The registry."""
    entries = server_of(request).registry.entries
    return [
        {"model_name": each.name, "model_size_in_billions": each.size, "quantization": each.quantization}
        for each in entries
    ]


@router.get("/v1/cluster/auth")
async def cluster_auth(request: HttpRequest) -> Json:
    """Whether a key is needed; asked by Xinference's client before anything else."""
    return {"auth": bool(server_of(request).options.keys)}


def shown(model: Description) -> Json:
    """A launched model, as OpenAI's clients and Xinference's expect it."""
    spec, info = model.spec, model.info
    return {
        "id": model.uid,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "model_type": "LLM",
        "model_name": Path(spec.settings.model).name if _is_path(spec.settings.model) else spec.settings.model,
        "model_ability": ["generate", "chat"] if info.get("chat") else ["generate"],
        "model_format": "ggufv2" if _is_gguf(spec.settings.model) else "pytorch",
        "model_size_in_billions": None,
        "quantization": spec.settings.quantize,
        "context_length": info.get("context"),
        "replica": 1,
        "status": model.status,
        "reason": model.reason,
        "draft": spec.settings.drafter,
        **spec.family,
    }


def shown_adapter(model: Description, adapter: ServedAdapter, whole: bool) -> Json:
    """An adapter of a launched model, as OpenAI's clients find it. `whole`: its name alone would mean others, too."""
    return {
        "id": f"{model.uid}:{adapter.name}" if whole else adapter.name,
        "object": "model",
        "created": adapter.created,
        "owned_by": "outrider",
        "parent": model.uid,
        "root": adapter.name,
        "model_type": "LLM",
        "model_name": adapter.name,
        "status": model.status,
        "rank": adapter.rank,
    }


async def _launch(
    server: ServerContext, body: Placement, settings: Json, choice: Choice, name: str, **family: Any
) -> Json:
    shown_as = {**choice.family(), "model_name": name, **family}
    spec = LaunchSpec(from_mapping(settings), body.model_uid or "", (name,), shown_as)
    _refuse_more(server)
    return {"model_uid": await server.fleet.launch(spec)}


def _refuse_more(server: ServerContext) -> None:
    """Where requests may launch nothing, or nothing more. Called right before a launch, which then counts at once."""
    refuse_changes(server)
    count, most = len(server.fleet.list()), server.options.max_models
    if count >= most:
        raise TooManyModels(f"{count} models are launched, and at most {most} may be (serve --max-models); end one")


def _choose(server: ServerContext, name: str, size: Size, quantization: str | None) -> Choice:
    return server.registry.choose(name, size, quantization, server.access.source)


def _settings(server: ServerContext, choice: Choice, **more: str | None) -> Json:
    given = {key: value for key, value in more.items() if value is not None}
    settings = {"backend": "local", **server.options.defaults, "model": choice.source, "quantize": choice.quantize}
    settings |= given
    return _without(settings, ("adapter_memory",) if settings["backend"] == "vllm" else VLLM_DEFAULTS)


def _without(settings: Json, names: tuple[str, ...]) -> Json:
    return {name: value for name, value in settings.items() if name not in names}


def _refuse(body: LaunchBody) -> None:
    for field, reason in NOT_OFFERED.items():
        if getattr(body, field) not in (None, False, LaunchBody.model_fields[field].default):
            raise Bad(f"{field} cannot be chosen: {reason}; leave it out", param=field)


def _check_memory(cache_memory: float, settings: Json) -> None:
    """A CPU's must be there; it is reserved at once."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if cache_memory > there and _on_cpu(settings.get("device", "auto")):
        raise Bad(f"cache_memory is {cache_memory:g} GiB, and the machine has {there:.1f}", param="cache_memory")


def _on_cpu(device: str) -> bool:
    if device == "cpu":
        return True
    from outrider import build  # torch knows whether there is a GPU

    return build.device(device).type == "cpu"


def _device(n_gpu: int | str | None, index: int | list[int] | None = None) -> str | None:
    """None: as the server decides."""
    indices = [index] if isinstance(index, int) else index or []
    if len(indices) > 1 or (isinstance(n_gpu, int) and n_gpu not in (0, 1)):
        raise Bad("a model runs on one device here; give n_gpu of 0, 1 or auto, and one gpu_idx", param="n_gpu")
    if indices:
        return f"cuda:{indices[0]}"
    return {"auto": None, None: "cpu", 0: "cpu", 1: "cuda"}[n_gpu]


def _backend(engine: str | None) -> str | None:
    """None: as the server was started."""
    if engine is None:
        return None
    if engine.lower() in ENGINES:
        return ENGINES[engine.lower()]
    raise Bad(f"there is no engine {engine[:80]!r} here; leave it out, or say outrider or vllm", param="model_engine")


def _check_format(choice: Choice, format: str | None) -> None:
    if format is not None and format.lower().startswith(("gguf", "ggml")) != _is_gguf(choice.source):
        kind = "a GGUF file" if _is_gguf(choice.source) else "safetensors"
        raise Bad(f"{choice.name} is {kind}, not {format[:80]}; leave out model_format", param="model_format")


def _is_gguf(source: str) -> bool:
    return source in sources.KNOWN or source.lower().endswith(".gguf")


def _is_path(source: str) -> bool:
    return source.startswith((".", "/", "~"))


def _pair(draft: Choice) -> str:
    options = {"model": draft.source, "length": GAMMA, "quantize": draft.quantize}
    return drafters.from_values(drafters.DRAFT_MODEL, options).text()
