"""The target's own first layers as its draft model (LayerSkip, Elhoushi et al. 2024): nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import OutriderError
from outrider.drafters.base import BuildContext
from outrider.drafters.draft_model import ModelDrafter


class LayerSkip(ModelDrafter):
    name = "layer_skip"
    takes_adapters = True

    @dataclass(frozen=True)
    class Options:
        layers: int = 0  # layers of the target to run; 0: a third of them
        length: int = 3
        greedy: bool = False

    def __init__(self, options: Options, context: BuildContext) -> None:
        total = context.target.num_layers
        layers = options.layers or max(1, total // 3)
        if not 1 <= layers <= total:
            raise OutriderError(
                f"layer_skip:layers must be between 1 and {total}, the target's own, not {options.layers}"
            )
        super().__init__(context.target.first(layers), context.target.vocab_size, options.length, options.greedy)
