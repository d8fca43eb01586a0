"""Heads that were trained for an adapter: they lie beside it, and requests with the adapter draft with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outrider import drafters
from outrider.core.errors import OutriderError
from outrider.drafters import AUTO, DrafterSpec
from outrider.drafters.heads import files
from outrider.drafters.heads.kinds import BLOCK, EAGLE, MEDUSA

# Drafter -> the kinds of heads that it takes, the first that is there
_KINDS = {EAGLE: (EAGLE,), BLOCK: (BLOCK,), MEDUSA: (MEDUSA,), AUTO: (EAGLE, BLOCK)}


def with_heads(draft: str, adapter: str) -> str:
    """The spec with the heads that lie beside the adapter's folder or file, where it names none; else as it is."""
    spec = drafters.parse(draft)
    members = [_with_head(member, adapter) for member in spec.members]
    return draft if members == list(spec.members) else drafters.combine(members).text()


def _with_head(member: DrafterSpec, adapter: str) -> DrafterSpec:
    if member.name not in _KINDS or member.options.head:
        return member
    near = (files.beside(kind, adapter) for kind in _KINDS[member.name])
    folder = next((each for each in near if each is not None), None)
    if folder is None:
        return member
    _check_links(folder, Path(adapter))
    closed = {"allow_pickle": False} if getattr(member.options, "allow_pickle", False) else {}  # meant for another head
    return member._replace(options=replace(member.options, head=str(folder), **closed))


def _check_links(folder: Path, adapter: Path) -> None:
    """Who may write into the folder of adapters must not have files opened that lie elsewhere."""
    around = adapter.resolve().parent
    for file in (folder, *folder.iterdir()):
        if not file.resolve().is_relative_to(around):
            raise OutriderError(f"the head {folder} beside the adapter is a link to elsewhere; copy the files there")
