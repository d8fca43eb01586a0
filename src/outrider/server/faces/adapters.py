"""Adapter ids of requests: LoRA adapters, which change what the model writes, and heads, which draft for it.

An id is the name of a loaded adapter, a name in the registry, `eagle` or `medusa` for the head that comes with the
model, a folder (of an adapter also a GGUF file) or a hub id. What lies there says what it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.core.adapter import AdapterChoice, AdapterMix
from outrider.core.errors import OutriderError, quoted
from outrider.drafters.heads.kinds import EAGLE, MEDUSA, kind_of
from outrider.models import sources
from outrider.models.adapters import paths
from outrider.server.access import Access
from outrider.server.context import ServerContext
from outrider.server.errors import Bad, Forbidden, ServerError, Unknown
from outrider.server.fleet.fleet import Description

BASE = ("", "__base_model__")  # LoRAX's ids of the model without an adapter
OWN = (EAGLE, MEDUSA)  # the heads that come with a model
LONGEST_ID = 200  # characters of a folder's path or a hub id, which is the adapter's name inside
PEFT_FILES = (paths.CONFIG, paths.WEIGHTS, paths.PICKLE)


class BadAdapter(Bad):
    """An adapter that cannot be had, or is none of this model's."""


@dataclass(frozen=True)
class ChosenAdapter:
    """What an adapter id comes to: what the model runs with, or who drafts for it."""

    adapter: AdapterChoice = ""
    draft: str = ""


@dataclass(frozen=True)
class Place:
    """Where an adapter or a head lies."""

    id: str
    path: Path

    @property
    def is_lora(self) -> bool:
        return self.path.is_file() or paths.is_folder(self.path)


async def select(server: ServerContext, name: str) -> tuple[Description, ChosenAdapter]:
    """The launched model that a name means, and what its adapter comes to, if the name has one: MODEL, ADAPTER (of the
    only model that has it) or MODEL:ADAPTER."""
    try:
        return server.fleet.describe(name), ChosenAdapter()
    except Unknown as unknown:
        found, adapter = named_adapter(server, name)
        try:
            model = found or server.fleet.describe()
            return model, await choose(server, model, adapter)
        except (Forbidden, Unknown):
            raise unknown if found is None else _no_adapter(found, adapter) from None


def named_adapter(server: ServerContext, name: str) -> tuple[Description | None, str]:
    """The model that an adapter's name belongs to, and its id there; None: no launched model knows the name."""
    models = server.fleet.list()
    found = [model for model in models if name in model.adapters or name in model.lost_adapters]
    if len(found) > 1:
        uids = ", ".join(model.uid for model in found)
        raise Unknown(f"{quoted(name)} is an adapter of several models ({uids}); write MODEL:ADAPTER", param="model")
    if found:
        return found[0], name
    for model in models:
        for known in model.spec.known_as:
            if known and name.startswith(f"{known}:"):
                return model, name.removeprefix(f"{known}:")
    return None, name


async def choose(server: ServerContext, model: Description, id: str | None, source: str | None = None) -> ChosenAdapter:
    """What an adapter id comes to for a model; an adapter that is named by its place is loaded. `source`: hub, local,
    or None for either."""
    _check_source(source)
    if id is None or id in BASE:
        return ChosenAdapter()
    if id in model.adapters:
        return ChosenAdapter(adapter=id)
    if id in model.lost_adapters:
        raise BadAdapter(model.lost_adapters[id])
    if id in OWN:
        return ChosenAdapter(draft=id)
    place = await find(server.access, id, source)
    if not await asyncio.to_thread(lambda: place.is_lora):
        return ChosenAdapter(draft=head_of(place))
    return ChosenAdapter(adapter=await _opened(server, model, place))


async def mix(
    server: ServerContext, model: Description, ids: Sequence[str], source: str | None, **how: Any
) -> ChosenAdapter:
    """Several adapters as one; `how`: the other fields of AdapterMix."""
    names = []
    for id in ids:
        chosen = await choose(server, model, id, source)
        if not isinstance(chosen.adapter, str) or not chosen.adapter:
            raise BadAdapter(f"{quoted(id)} is no LoRA adapter, and only those can be merged")
        names.append(chosen.adapter)
    try:
        return ChosenAdapter(adapter=AdapterMix(tuple(names), **how))
    except OutriderError as error:
        raise BadAdapter(str(error)) from error


def scaled(model: Description, scales: Mapping[int, float]) -> AdapterChoice:
    """Adapters by llama.cpp's numbers, each with its strength: the exact sum of what they add."""
    names = {each.number: each.name for each in model.adapters.values()}
    if unknown := [number for number in scales if number not in names]:
        known = ", ".join(map(str, sorted(names))) or "none"
        raise BadAdapter(f"{model.uid} has no adapter with the id {unknown[0]}; there are: {known}", param="lora")
    parts = {names[number]: scale for number, scale in scales.items() if scale}
    return AdapterMix(tuple(parts), tuple(parts.values())) if parts else ""


async def find(access: Access, id: str, source: str | None = None) -> Place:
    """Where an id leads to, if the server may open it for a request."""
    place = access.source(id)
    here = place.startswith("/")
    if (source == "local" and not here) or (source == "hub" and here and place == id):
        raise BadAdapter(
            f"the adapter {quoted(id)} is {'a folder' if here else 'a hub id'}, and adapter_source is {source}"
        )
    path = await asyncio.to_thread(sources.resolve, place)
    access.check_files(path, PEFT_FILES)
    return Place(str(path) if here and not access.knows(id) else id, path)


async def draft_of(id: str, access: Access) -> str:
    """The spec of the drafter for the id of a head."""
    if id in (*BASE, *OWN):
        return "" if id in BASE else id
    place = await find(access, id)
    if place.is_lora:
        raise BadAdapter(f"{quoted(id)} is a LoRA adapter and no head that drafts; serve it with --adapter NAME=PATH")
    return head_of(place)


def head_of(place: Place) -> str:
    """The spec of the drafter that reads the head, as its files tell."""
    if "," in str(place.path):
        raise BadAdapter(f"the path of the adapter {quoted(place.id)} has a comma; rename the folder")
    config = _read(place.path / "config.json")
    if config is None:
        raise BadAdapter(
            f"the adapter {quoted(place.id)} has no config.json, so it is no head, and no {paths.CONFIG}, so "
            "it is no LoRA adapter; give the folder of one"
        )
    return drafters.from_values(kind_of(config), {"head": str(place.path)}).text()


async def _opened(server: ServerContext, model: Description, place: Place) -> str:
    """The adapter that lies there now, loaded if need be; its name in the worker."""
    if len(place.id) > LONGEST_ID:
        raise BadAdapter(f"the path of an adapter has at most {LONGEST_ID} characters; load it under a name")
    try:
        stamp = await asyncio.to_thread(paths.stamp, place.path)
        await server.fleet.open_adapter(model.uid, place.id, str(place.path), [list(file) for file in stamp])
    except ServerError:
        raise
    except OutriderError as error:
        raise BadAdapter(str(error)) from error
    return place.id


def _check_source(source: str | None) -> None:
    if source not in (None, "hub", "local"):
        raise BadAdapter(f"adapters do not come from {source!r}; adapter_source is hub or local")


def _no_adapter(model: Description, id: str) -> Unknown:
    known = ", ".join(list(model.adapters)[:8]) or "none"
    return Unknown(f"the model {model.uid} has no adapter {quoted(id)}; loaded: {known}", param="model")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutriderError(f"{path.name} of the adapter cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
