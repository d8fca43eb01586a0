"""Adapters in PEFT's folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.adapter import MOST_RANK
from outrider.core.errors import OutriderError, one_line, quoted
from outrider.models.adapters.adapter import EMBEDDING, OUTPUT, Adapter, LowRank
from outrider.models.adapters.paths import CONFIG, PICKLE, WEIGHTS

LARGEST_CONFIG = 1 << 20  # bytes: PEFT writes about one thousand; a list of patterns for every layer stays far below
MOST_PATTERNS = 4096  # of ranks or alphas: one for every matrix of the deepest models
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "base_model.model."
# What is computed differently from y = W x + scale * B (A x): option -> what to do about it.
_REFUSED = {
    "use_dora": "is DoRA, which scales whole rows of the base; merge it into the model with PEFT and load that",
    "lora_bias": "has biases of its own; train it without lora_bias",
    "use_qalora": "is QALoRA, which Outrider does not run; train a plain LoRA",
    "fan_in_fan_out": "is for transposed matrices (GPT-2's), which llama-like models do not have",
    "layer_replication": "repeats layers of the base; merge it into the model with PEFT and load that",
    "target_parameters": "is for parameters that are no matrices of a llama-like model; use another adapter",
    "trainable_token_indices": "trains single rows of the embedding; merge it into the model with PEFT and load that",
    "alora_invocation_tokens": "begins in the middle of a text (aLoRA), which Outrider does not run; train a LoRA",
    "kasa_config": "is KaSA, which Outrider does not run; train a plain LoRA",
    "use_bdlora": "is BD-LoRA, which Outrider does not run; train a plain LoRA",
    "arrow_config": "chooses between adapters by itself (Arrow), which Outrider does not run; name one of them",
    "velora_config": "is VeLoRA, which Outrider does not run; train a plain LoRA",
    "monteclora_config": "is MonteCLoRA, which Outrider does not run; train a plain LoRA",
}
_MUTATING = ("pissa", "olora", "corda", "loftq", "lora_ga")  # these change the base's own weights before training
_NAME = re.compile(r"(?P<matrix>[\w.]+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.\w+)?(\.weight)?")
# Patterns of names, without groups and with few repetitions: matching one on a name ends soon whatever it is.
_PATTERN = re.compile(r"[\w.\\^$|\[\]*+?-]{1,200}")
_REPEATS = 3  # the most * and + in a pattern


def read(folder: Path, allow_pickle: bool = False) -> Adapter:
    config = read_config(folder)
    tensors = dict(_tensors(folder, allow_pickle))
    parts, replaced = _sorted(folder, tensors)
    pairs = {name: _pair(folder, config, name, own) for name, own in parts.items()}
    if config.get("ensure_weight_tying") and not pairs.keys().isdisjoint((EMBEDDING, OUTPUT)):
        raise OutriderError(f"the adapter {folder} ties what it adds to embedding and output; train it without")
    return Adapter(pairs, _text(config.get("base_model_name_or_path")), replaced)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise OutriderError(f"{path} is larger than {LARGEST_CONFIG} bytes, so it is no adapter's config")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OutriderError(f"{path} is not valid JSON ({one_line(error)}); download it again") from error
    if not isinstance(config, dict):
        raise OutriderError(f"{path} is not a JSON object; download it again")
    _refuse(folder, config)
    return config


def _refuse(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise OutriderError(f"{folder} holds an adapter of type {quoted(kind)}; Outrider runs LORA")
    for option, why in _REFUSED.items():
        if config.get(option):
            raise OutriderError(f"the adapter {folder} {why}")
    if config.get("bias", "none") not in ("none", None):
        raise OutriderError(f"the adapter {folder} has biases (bias={quoted(config['bias'])}); train it with bias none")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_MUTATING):
        raise OutriderError(
            f"the adapter {folder} changes the base's own weights (init_lora_weights={quoted(begun)}); save it with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(folder / CONFIG, name, config.get(name))


def _check_patterns(path: Path, name: str, patterns: Any) -> None:
    if patterns is None:
        return
    if not isinstance(patterns, dict) or len(patterns) > MOST_PATTERNS:
        raise OutriderError(f"{path}: {name} is {quoted(patterns)}, not names with numbers; download it again")
    for pattern in patterns:
        repeats = sum(map(pattern.count, "*+?"))
        try:
            if not _PATTERN.fullmatch(pattern) or repeats > _REPEATS:
                raise ValueError("write plain names of matrices")
            re.compile(pattern)
        except (ValueError, re.error) as error:
            raise OutriderError(f"{path}: {name} has the pattern {quoted(pattern)} ({one_line(error)})") from error


def _tensors(folder: Path, allow_pickle: bool) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = folder / WEIGHTS
    if not path.is_file():
        yield from _unpickled(folder, allow_pickle)
        return
    try:
        # read, not mapped: a file that is overwritten would change what is served, and one that is cut off end us
        yield from load(path.read_bytes()).items()
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise OutriderError(f"{path} cannot be read ({one_line(error)}); download it again") from error


def _unpickled(folder: Path, allowed: bool) -> Iterator[tuple[str, Tensor]]:
    path = folder / PICKLE
    if not path.is_file():
        raise OutriderError(f"{folder} has no {WEIGHTS}; download it again")
    if not allowed:
        raise OutriderError(f"{path} is a pickle, which is not loaded unless allowed; save it as {WEIGHTS}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken pickle raises
        raise OutriderError(f"{path} cannot be read ({one_line(error)}); download it again") from error
    if not isinstance(found, dict):
        raise OutriderError(f"{path} holds no tensors by name; download it again")
    yield from found.items()


def _sorted(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The two parts of each matrix, and matrices that are there as a whole."""
    pairs: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(_PREFIX)
        found = _NAME.fullmatch(bare)
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.dtype not in _FLOATS:
            raise OutriderError(f"{folder}: the tensor {quoted(name)} is no matrix of floats; it is no LoRA of ours")
        if found is not None:
            part = found["part"].removeprefix("lora_").removeprefix("embedding_")
            if part in pairs.setdefault(found["matrix"], {}):
                raise OutriderError(f"{folder} has two tensors for {part} of {found['matrix']}; download it again")
            pairs[found["matrix"]][part] = tensor.float()
        elif (matrix := bare.removesuffix(".weight")) in (EMBEDDING, OUTPUT):
            whole[matrix] = tensor
        elif matrix.removesuffix(".base_layer") in (EMBEDDING, OUTPUT):
            continue  # PEFT saves the model's own matrix beside its LoRA, as it was
        else:
            raise OutriderError(f"{folder} has the tensor {quoted(name)}, which is no part of a LoRA adapter")
    return pairs, whole


def _pair(folder: Path, config: Mapping[str, Any], name: str, parts: Mapping[str, Tensor]) -> LowRank:
    if parts.keys() != {"A", "B"}:
        raise OutriderError(f"{folder} has only one of the two matrices for {name}; download it again")
    a, b = parts["A"], parts["B"]
    rank = _number(folder, config, "r", "rank_pattern", name)
    if a.shape[0] != rank or b.shape[1] != rank or not 1 <= rank <= MOST_RANK:
        raise OutriderError(
            f"{folder}: {name} has rank {a.shape[0]} and {b.shape[1]}, its config says {quoted(rank)}; "
            f"all three must be the same, 1 to {MOST_RANK}"
        )
    alpha = _number(folder, config, "lora_alpha", "alpha_pattern", name)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a.contiguous(), b.contiguous(), scale)


def _number(folder: Path, config: Mapping[str, Any], key: str, patterns: str, name: str) -> float:
    """A number of the config, or what a pattern says for this matrix: the first that matches, as PEFT takes it."""
    table = config.get(patterns) or {}
    value = next((table[each] for each in table if re.match(rf"(.*\.)?({each})$", name)), config.get(key, 8))
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise OutriderError(f"{folder / CONFIG}: {key} of {name} is {quoted(value)}, not a number; download it again")
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
