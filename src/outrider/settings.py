"""Settings: what a user can choose. Frozen; unknown keys are refused with the known ones listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import OutriderError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZE = ("none", "int8", "int4")
RULES = ("rejection", "coupled")


@dataclass(frozen=True)
class Settings:
    model: str = "smollm2-135m"  # name, folder, hub id or GGUF file
    draft: str = "ngram"  # NAME or NAME:key=value,...
    device: str = "auto"
    dtype: str = "auto"  # auto: on a CPU a file's own 4 or 8 bits, or float32; on a GPU bfloat16
    quantize: str = "none"  # dense weights, rounded on loading
    rule: str = "rejection"  # how drafts are verified when a request samples without a seed
    pace: bool = True  # draft as much as pays here and now; False: always as much as the drafter can
    max_batch: int = 64  # sequences that run at once
    piece: int = 512  # prompt tokens that one step takes in
    cache_memory: float = 0.0  # GiB for keys and values; 0: a quarter of what is free
    threads: int = 0  # 0: as many as the machine has cores

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("quantize", self.quantize, QUANTIZE)
        _one_of("rule", self.rule, RULES)
        if self.quantize != "none" and self.dtype not in ("auto", "float32"):
            raise OutriderError(
                f"quantised weights are computed in float32, not {self.dtype}; leave out dtype or quantize"
            )
        if self.device.partition(":")[0] not in DEVICES:
            raise OutriderError(f"unknown device {self.device!r}; known: {', '.join(DEVICES)}")
        for name, least in (("max_batch", 1), ("piece", 2), ("cache_memory", 0), ("threads", 0)):
            if not getattr(self, name) >= least:
                raise OutriderError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.threads > 1024:
            raise OutriderError(f"threads must be at most 1024, not {self.threads}")


def from_mapping(values: Mapping[str, Any]) -> Settings:
    known = [field.name for field in dataclasses.fields(Settings)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise OutriderError(f"unknown setting {unknown[0]!r}; known: {', '.join(known)}")
    return Settings(**values)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OutriderError(f"unknown {name} {value!r}; known: {', '.join(known)}")
