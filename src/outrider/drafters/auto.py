"""All drafters that fit the target, together: a head (named, lying beside the target, or shipped for it), lookup in the
current text and in earlier ones, the answer that the caller expects, the grammar of the request, and a draft model
if one is named."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider import drafters
from outrider.core.errors import OutriderError
from outrider.drafters import AUTO, DRAFT_MODEL, GRAMMAR, HISTORY, LOOKUP, PREDICTION, DrafterSpec
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.combined import Combined
from outrider.drafters.heads import files
from outrider.drafters.heads.kinds import BLOCK, EAGLE
from outrider.models.base import Paged

# Nodes of the head's tree on a GPU, where rows are nearly free: with 10 of lookup beside them and the last token they
# are 32 rows (drafters/rounds/base.py). On a CPU every node costs, and a chain is best.
TREE_ON_GPU = 21
# Of `history`: lookup copies from the request's own prompt already, so where no other text is there it is not asked
# (LOG, 2026-11-17, why auto was slower than the head: two lookups of the same text took 0.2 ms a step).
OWN = {"own": False}
# Heads in the order in which they are taken where both are there. On a GPU a block head runs its layers once for a
# whole draft, an EAGLE head for every level of it; on a CPU a chain of an EAGLE head is one call of the kernels.
ON_GPU, ON_CPU = (BLOCK, EAGLE), (EAGLE, BLOCK)


class Auto(Combined):
    name = AUTO
    has_weights = some_may_write = True
    parts = (PREDICTION, GRAMMAR, EAGLE, HISTORY, LOOKUP)  # in this order: the first that guessed a node is named

    @dataclass(frozen=True)
    class Options:
        # Folder of an EAGLE or block head; "": the one beside the target or shipped for it, if there is one.
        head: str = ""
        model: str = ""  # a draft model: name, folder, hub id or GGUF file; "": none
        length: int = 0  # of a path of the draft, at most; 0: as each drafter has it

    @classmethod
    def fetch(cls, options: Options, context: BuildContext) -> None:
        for kind in _kinds(options, context):
            try:
                drafters.fetch(_spec(kind, {"head": options.head}), context)
                break
            except OutriderError:
                if options.head:
                    raise
        if options.model:
            drafters.fetch(_spec(DRAFT_MODEL, {"model": options.model}), context)

    def __init__(self, options: Options, context: BuildContext) -> None:
        if options.length < 0:
            raise OutriderError(f"auto:length must be at least 0, not {options.length}")
        given = {"length": options.length} if options.length else {}
        members: list[Drafter] = []
        for name in self.parts:
            members += _head(options, given, context) if name == EAGLE else [_member(name, {**OWN, **given}, context)]
        if options.model:
            members.append(_member(DRAFT_MODEL, {"model": options.model, **given}, context))
        super().__init__(AUTO, members)

    @classmethod
    def share(cls, options: Any, target: str) -> float:
        head = options.head or _there(ON_CPU, target) is not None
        return drafters.find(EAGLE).cache_share if head else 0.0


def _head(options: Auto.Options, given: dict[str, Any], context: BuildContext) -> list[Drafter]:
    """None where no head fits the target, unless one was asked for."""
    tree = TREE_ON_GPU if isinstance(context.target, Paged) else 0
    for kind in _kinds(options, context):
        try:
            return [_member(kind, {"head": options.head, "tree": tree, **given}, context)]
        except OutriderError:
            if options.head:
                raise
    return []


def _kinds(options: Auto.Options, context: BuildContext) -> list[str]:
    """The kinds of head to try, in order: the kind of the given head, or all kinds, with the one that has a head
    first; as `fetch` has found them."""
    order, found = ON_GPU if isinstance(context.target, Paged) else ON_CPU, context.fetched_heads(options.head)
    if options.head:
        return found or [files.kind_in(options.head, context.heads.get(options.head))]
    if found:
        return [*found, *(kind for kind in order if kind not in found)]
    return sorted(order, key=lambda kind: kind != _there(order, context.name))


def _there(kinds: Seq[str], target: str) -> str | None:
    """The first of these kinds that has a head beside the target, or else one that is shipped for it."""
    beside = (kind for kind in kinds if files.beside(kind, target) is not None)
    shipped = (kind for kind in kinds if files.shipped(kind, target) is not None)
    return next(itertools.chain(beside, shipped), None)


def _member(name: str, values: dict[str, Any], context: BuildContext) -> Drafter:
    return drafters.find(name)(_spec(name, values).options, context)


def _spec(name: str, values: dict[str, Any]) -> DrafterSpec:
    """With those of the values that the drafter has as options."""
    known = {field.name for field in dataclasses.fields(drafters.find(name).Options)}
    return drafters.from_values(name, {key: values[key] for key in values if key in known})
