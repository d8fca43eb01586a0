"""A target with an adapter in its weights: a head for that adapter learns from what the two write together."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from outrider.core.errors import OutriderError
from outrider.models.adapters import files, paths
from outrider.models.adapters.adapter import EMBEDDING, OUTPUT, refuse_whole
from outrider.models.adapters.dense import joined
from outrider.models.base import TakesAdapters
from outrider.models.linear import Dense
from outrider.train.teacher import Target

DIGITS = 12  # hexadecimal digits of the digest that tells an adapter from others of its name


@torch.no_grad()
def fold(target: Target, path: Path) -> None:
    """Add the adapter to the target's dense weights, for as long as the target lives: its passes, with a cache or over
    whole texts, are then those of the adapted model."""
    if not isinstance(target, TakesAdapters):
        raise OutriderError(f"this model takes no adapters here, so none can be trained for with {path}")
    base, what = target.adapter_base, f"the adapter {path}"
    adapter = files.read(path, base)
    refuse_whole(adapter, what)
    if ends := {EMBEDDING, OUTPUT} & adapter.pairs.keys():
        raise OutriderError(
            f"{what} changes {min(ends)}, which heads share with the base; write model and adapter out as one with "
            "outrider merge, and train for that"
        )
    for index, layer in enumerate(target.weights.stack.layers):
        for field, parts in joined(adapter, base, index).items():
            matrix = getattr(layer, field)
            assert isinstance(matrix, Dense)
            for first, pair in parts:
                own = matrix.weight[first : first + pair.b.shape[0]]
                own.copy_(own.float() + pair.delta.to(own.device))  # summed in float32, rounded once
                if not torch.isfinite(own).all():
                    raise OutriderError(f"the weights with {what} do not fit {own.dtype}; choose another --dtype")


def named(path: Path) -> str:
    """The adapter's name and a digest of its files: what texts and provenance know it by."""
    found = [path / name for name in (paths.CONFIG, paths.WEIGHTS)] if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in found:
        try:
            digest.update(file.read_bytes())
        except OSError as error:
            raise OutriderError(f"the adapter {path} cannot be read: {error.strerror or error}") from error
    return f"{path.name} (sha256 {digest.hexdigest()[:DIGITS]})"
