"""Adapters: what LoRAX calls a head that drafts. An id becomes the spec of the drafter that reads it.

An id is a name in the registry, `eagle` or `medusa` for the head that comes with the model, a folder or a hub id. LoRA
adapters, which would change the model itself, will have their place here; until then they are refused.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.core.errors import OutriderError, quoted
from outrider.drafters.heads.kinds import EAGLE, MEDUSA, kind_of
from outrider.models import sources
from outrider.server.access import Access
from outrider.server.context import ServerContext
from outrider.server.errors import Bad, Forbidden, Unknown
from outrider.server.fleet.fleet import Description

BASE = ("", "__base_model__")  # LoRAX's ids of the model without an adapter
OWN = (EAGLE, MEDUSA)  # the heads that come with a model


class BadAdapter(Bad):
    """An adapter that cannot be had, or is none of this model's."""


async def select(server: ServerContext, name: str) -> tuple[Description, str]:
    """The launched model that a name means, and "": or the only one, and the drafter of the adapter that it means."""
    try:
        return server.fleet.describe(name), ""
    except Unknown as unknown:
        try:
            draft = await draft_of(name, None, server.access)
            return server.fleet.describe(), draft
        except (Forbidden, Unknown):
            raise unknown from None


async def draft_of(id: str | None, source: str | None, access: Access) -> str:
    """The spec of the drafter for an adapter id; "" for the model's own. `source`: hub, local, or None for either."""
    if source not in (None, "hub", "local"):
        raise BadAdapter(f"adapters do not come from {source!r}; adapter_source is hub or local")
    if id is None or id in BASE:
        return ""
    if id in OWN:
        return id
    place = access.source(id)
    here = place.startswith("/")
    if (source == "local" and not here) or (source == "hub" and here and place == id):
        raise BadAdapter(
            f"the adapter {quoted(id)} is {'a folder' if here else 'a hub id'}, and adapter_source is {source}"
        )
    folder = await asyncio.to_thread(_folder, id, place)
    return drafters.from_values(_kind(id, folder), {"head": str(folder)}).text()


def _folder(id: str, place: str) -> Path:
    folder = sources.resolve(place)
    if not folder.is_dir():
        raise BadAdapter(f"the adapter {quoted(id)} is not a folder")
    if "," in str(folder):
        raise BadAdapter(f"the path of the adapter {quoted(id)} has a comma; rename the folder")
    return folder


def _kind(id: str, folder: Path) -> str:
    """Which drafter reads the head, as its files tell."""
    peft = _read(folder / "adapter_config.json")
    if peft is not None:
        kind = str(peft.get("peft_type", "PEFT"))
        raise BadAdapter(
            f"the adapter {quoted(id)} is a {kind} adapter, and those are not served yet; give an EAGLE or Medusa head"
        )
    config = _read(folder / "config.json")
    if config is None:
        raise BadAdapter(f"the adapter {quoted(id)} has no config.json, so it is no head; give the folder of a head")
    return kind_of(config)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutriderError(f"{path.name} of the adapter cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
