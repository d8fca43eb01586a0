"""The composition root: settings -> model, drafter, engine, backend. Only it sees all settings."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider import drafters
from outrider.backends.local import Local
from outrider.core.errors import OutriderError
from outrider.drafters.base import Drafter, Parts
from outrider.engine.engine import Engine
from outrider.engine.pace import Pace
from outrider.engine.scheduler import Limits
from outrider.models.base import Model
from outrider.models.load import Loaded, available_memory, load
from outrider.models.weights import Place
from outrider.settings import Settings

GIB = 1 << 30
BITS = {"none": 0, "int8": 8, "int4": 4}


def local(settings: Settings) -> Local:
    """Our own engine for these settings."""
    drafters.parse(settings.draft)  # a typing error shows before a model is loaded
    if settings.threads:
        torch.set_num_threads(settings.threads)
    where = place(settings)
    loaded = load(settings.model, where)

    def draft_model(name: str, quantize: str) -> Model:
        other = load(name, replace(where, bits=BITS[quantize]))
        check_vocabularies(loaded, other, name)
        return other.model

    def drafter(spec: str) -> Drafter:
        return drafters.build(spec, Parts(loaded.model, draft_model))

    engine = Engine(
        loaded.model,
        drafter(settings.draft),
        Limits(settings.max_batch, settings.piece),
        Pace() if settings.pace else None,
    )
    engine.drafters[settings.draft] = engine.drafters[""]  # a request that names it gets the same one
    return Local(engine, drafter, loaded.tokenizer, loaded.ends, settings.rule, loaded.notes)  # type: ignore[arg-type]


def place(settings: Settings) -> Place:
    device = _device(settings.device)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return Place(device, dtype, _memory(settings, device), BITS[settings.quantize])


def check_vocabularies(target: Loaded, draft: Loaded, name: str) -> None:
    """A draft model must mean the same by every token id; sizes may differ by padding."""
    if target.tokenizer is not None and draft.tokenizer is not None:
        words, others = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        differ = sum(others.get(word) != id for word, id in words.items())
        if differ:
            raise OutriderError(
                f"the draft model {name} has another vocabulary than the target ({differ} of {len(words)} tokens "
                "differ); use a draft model of the target's own family"
            )
    elif target.model.vocab_size != draft.model.vocab_size:
        raise OutriderError(
            f"the draft model {name} has {draft.model.vocab_size} tokens and the target {target.model.vocab_size}, and "
            "without tokenizers they cannot be compared; save the tokenizer in both folders"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OutriderError("device cuda was asked for, but torch sees no GPU here; use device cpu or auto")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise OutriderError(f"unknown device {name!r}; write cpu, cuda or cuda:NUMBER") from error


def _memory(settings: Settings, device: torch.device) -> int:
    """Bytes for keys and values."""
    if settings.cache_memory:
        return int(settings.cache_memory * GIB)
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return free // 4
