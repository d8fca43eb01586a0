"""What the training of an adapter is asked to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from outrider.core.adapter import MOST_RANK
from outrider.core.errors import OutriderError
from outrider.core.option import option


@dataclass(frozen=True)
class LoraJob:
    chats: Path = option(help="JSONL with messages, or with prompt and answer, in each line.", flags=("--chats", "-c"))
    model: str = option("smollm2-135m", "The base: known name, folder, hub id or GGUF file.", flags=("--model", "-m"))
    rank: int = option(16, "Rank of the adapter's matrices.")
    alpha: float = option(32.0, "The adapter's scale is alpha / rank.")
    epochs: float = option(3.0, "How often each chat is learned from.")
    batch: int = option(8, "Chats in one training step.")
    rate: float = option(1e-3, "Peak learning rate of AdamW.")
    longest: int = option(1024, "Chats with more tokens than this are left out.")
    seed: int = option(0, "Decides the initial values and the order.")

    def __post_init__(self) -> None:
        for name, least in {"rank": 1, "batch": 1, "longest": 8, "seed": 0}.items():
            if getattr(self, name) < least:
                raise OutriderError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("alpha", "epochs", "rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise OutriderError(f"--{name} must be above 0, not {getattr(self, name)}")
        if self.rank > MOST_RANK:
            raise OutriderError(f"--rank must be at most {MOST_RANK}, not {self.rank}")
