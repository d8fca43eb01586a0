"""A name, folder, hub id or GGUF file -> a model and its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models import sources, tokenizer as tokenizers
from outrider.models.base import Model
from outrider.models.gguf import GGUFFile, GGUFTensor
from outrider.models.linear import Dense, join
from outrider.models.llama import Layer, Llama, LlamaConfig, Weights
from outrider.models.rope import FIXED, rope

OWN = ("llama", "mistral", "qwen2", "qwen3")  # families that models/llama.py runs; all others go through transformers


@dataclass(frozen=True, eq=False)
class Loaded:
    model: Model
    tokenizer: Any = None  # None: the folder has none, and prompts are token ids
    ends: frozenset[int] = frozenset()  # tokens after which an answer is over


@dataclass(frozen=True)
class Target:
    """Where a model is to live."""

    device: torch.device
    dtype: torch.dtype
    memory: int  # bytes for keys and values


def load(name: str, where: Target) -> Loaded:
    path = sources.resolve(name)
    try:
        if path.is_file():
            return _load_gguf(path, where)
        return _load_folder(path, where)
    except torch.OutOfMemoryError as error:
        raise OutriderError(f"{name} does not fit into the memory of {where.device}; use a smaller model") from error


def available_memory() -> int:
    """Bytes that can be taken on this machine without pushing others out."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Store(Protocol):
    """Weights under Hugging Face names."""

    def __contains__(self, name: str) -> bool: ...

    def dense(self, name: str) -> Tensor: ...


def assemble(store: Store, config: LlamaConfig, make_rope: Callable[[], Any], tied: bool) -> Weights:
    """The weights of a llama-like model, taken from the store one layer at a time."""

    def optional(name: str) -> Tensor | None:
        return store.dense(name) if name in store else None

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."

        def joined(*names: str) -> Dense:
            weights = [store.dense(f"{prefix}{name}.weight") for name in names]
            return join(weights, [optional(f"{prefix}{name}.bias") for name in names])

        return Layer(
            attention_norm=store.dense(prefix + "input_layernorm.weight"),
            qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output=joined("self_attn.o_proj"),
            mlp_norm=store.dense(prefix + "post_attention_layernorm.weight"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
            query_norm=optional(prefix + "self_attn.q_norm.weight"),
            key_norm=optional(prefix + "self_attn.k_norm.weight"),
        )

    embedding = store.dense("model.embed_tokens.weight")
    head = Dense(embedding if tied else store.dense("lm_head.weight"))
    layers = tuple(layer(index) for index in range(config.num_layers))
    return Weights(embedding, layers, store.dense("model.norm.weight"), head, make_rope())


class _GGUFStore:
    def __init__(self, tensors: dict[str, GGUFTensor], where: Target) -> None:
        self._tensors, self._where = tensors, where

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dense(self, name: str) -> Tensor:
        return self._tensors[name].dequantize(self._where.dtype).to(self._where.device)


def _load_gguf(path: Path, where: Target) -> Loaded:
    file = GGUFFile(path)
    said = file.config()
    config = LlamaConfig(
        said["vocab_size"],
        said["hidden_size"],
        said["num_layers"],
        said["num_heads"],
        said["num_kv_heads"],
        said["head_dim"],
        said["norm_eps"],
        said["max_context"],
        said["sliding_window"],
    )
    factors = None if said["rope_factors"] is None else torch.from_numpy(said["rope_factors"])

    def make_rope() -> Any:
        return rope(config.head_dim, said["rope_theta"], config.context, said["rope_scaling"], factors)

    weights = assemble(_GGUFStore(dict(file.tensors()), where), config, make_rope, said["tie_embeddings"])
    tokenizer = tokenizers.from_gguf(file.metadata)
    ends = tokenizers.end_ids(tokenizer, file.metadata) if tokenizer is not None else _ids(said.get("eos_token_id"))
    return Loaded(Llama(config, weights, where.memory), tokenizer, ends)


class _FolderStore:
    """Safetensors files of one folder, opened once and read tensor by tensor."""

    def __init__(self, folder: Path, where: Target) -> None:
        from safetensors import SafetensorError, safe_open

        self._where = where
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise OutriderError(f"{path} cannot be read ({error}); download it again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def dense(self, name: str) -> Tensor:
        if name not in self._files:
            raise OutriderError(f"the model's folder lacks the tensor {name}; download it again")
        return self._files[name].get_tensor(name).to(self._where.device, self._where.dtype)


def _load_folder(folder: Path, where: Target) -> Loaded:
    said = _read_json(folder / "config.json")
    if said is None:
        raise OutriderError(f"{folder} has no config.json, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise OutriderError(f"{folder} has no .safetensors weights; pickled weights are not loaded: convert them first")
    config = _read_config(folder)
    model = _load_own(folder, config, where) if _is_own(config) else _load_foreign(folder, where)
    tokenizer = tokenizers.from_folder(folder)
    generation = _read_json(folder / "generation_config.json") or {}
    ends = _ids(said.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    return Loaded(model, tokenizer, ends | (tokenizers.end_ids(tokenizer) if tokenizer is not None else frozenset()))


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder.resolve(), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes transformers raise
        raise OutriderError(f"{folder / 'config.json'} is not a model that can be run: {_line(error)}") from error


def _is_own(config: Any) -> bool:
    """Whether our own forward computes exactly this model."""
    if config.model_type not in OWN or getattr(config, "quantization_config", None):
        return False
    scaling = config.rope_parameters
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.hidden_act == "silu"
        and scaling.get("rope_type", "default") in ("default", *FIXED)
        and scaling.get("partial_rotary_factor", 1.0) == 1.0
        and not getattr(config, "mlp_bias", False)
        and (layer_types == {"full_attention"} or config.model_type == "mistral")
    )


def _load_own(folder: Path, config: Any, where: Target) -> Llama:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = LlamaConfig(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.rms_norm_eps,
        config.max_position_embeddings,
        config.sliding_window if config.model_type == "mistral" else None,
    )
    scaling = dict(config.rope_parameters)

    def make_rope() -> Any:
        return rope(head_dim, scaling["rope_theta"], own.context, scaling)

    return Llama(own, assemble(_FolderStore(folder, where), own, make_rope, config.tie_word_embeddings), where.memory)


def _load_foreign(folder: Path, where: Target) -> Model:
    from transformers import AutoModelForCausalLM

    from outrider.models.transformers import TransformersModel

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder.resolve(), dtype=where.dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers raises for a model it cannot build
        raise OutriderError(f"{folder} cannot be loaded by transformers: {_line(error)}") from error
    return TransformersModel(model.to(where.device), where.memory)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise OutriderError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(said, dict):
        raise OutriderError(f"{path} is not a JSON object; download it again")
    return said


def _ids(value: Any) -> frozenset[int]:
    """eos_token_id is absent, a number or a list."""
    return frozenset(value if isinstance(value, list) else [] if value is None else [value])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
