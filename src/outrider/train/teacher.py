"""The target reads texts; its states and laws are what a step learns from. Nothing is stored between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models.base import Model, Readable
from outrider.models.linear import Dense
from outrider.models.llama import LlamaConfig, Weights
from outrider.train.data.batches import TextBatch
from outrider.train.forward import block, can_fuse, fused_blocks, norm
from outrider.train.objective import TeacherBatch


class Target(Model, Readable, Protocol):
    """A llama-like model whose dense weights lie open."""

    config: LlamaConfig
    weights: Weights
    dtype: torch.dtype


class Teacher:
    """A dense llama-like target over whole texts; `layers` are those whose residuals a head reads."""

    def __init__(self, model: Model, layers: Sequence[int], longest: int) -> None:
        weights = getattr(model, "weights", None)
        if not isinstance(weights, Weights) or not isinstance(weights.embedding, Dense):
            raise OutriderError(
                "drafters are trained for llama-like models (Llama, Mistral, Qwen, SmolLM2) with dense weights; "
                "this model is none: choose another --model"
            )
        self.model, self.layers, self.longest = cast(Target, model), tuple(layers), longest
        self._weights, self._config = weights, self.model.config
        self.embedding, self.output = _matrix(weights.embedding), _matrix(weights.head)
        cos, sin = weights.rope.tables(longest)
        self._cos, self._sin = (part.to(self.model.device, self.model.dtype) for part in (cos, sin))

    def read(self, batch: TextBatch) -> TeacherBatch:
        hidden, last = self._states(batch.tokens)
        return TeacherBatch(batch.tokens, hidden, last, batch.mask, self.output, self.embedding, batch.known)

    @torch.no_grad()
    def _states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[b, t] -> residuals [b, t, layers, hidden] and the final normalised state [b, t, hidden]."""
        kept = {}
        for index, x in enumerate(self._blocks(self._weights.embedding.rows(tokens))):
            if index in self.layers:
                kept[index] = x.clone()
        hidden = torch.stack([kept[index] for index in self.layers], 2) if self.layers else x[:, :, None][:, :, :0]
        return hidden, norm(x, self._weights.norm, self._config.norm_eps)

    def _blocks(self, x: Tensor) -> Iterator[Tensor]:
        """[b, t, hidden] after each block; the next one may overwrite it."""
        layers, config = self._weights.stack.layers, self._config
        if can_fuse(layers, config, x):
            yield from fused_blocks(x, layers, config, self._cos, self._sin)
            return
        cos, sin = self._cos[: x.shape[1]], self._sin[: x.shape[1]]
        for layer in layers:
            x = block(x, layer, config, cos, sin)
            yield x


def _matrix(place: object) -> Tensor:
    assert isinstance(place, Dense)
    return place.weight
