"""A name, folder, hub id or GGUF file -> a model and its tokenizer."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models import quant, sources, tokenizer as tokenizers
from outrider.models.base import Model
from outrider.models.gguf import GGUFFile, GGUFTensor
from outrider.models.linear import join
from outrider.models.llama import Llama, LlamaConfig, Rope, Weights
from outrider.models.native.library import NoCompiler, library
from outrider.models.native.packed import Packed, packable
from outrider.models.native.stack import NativeStack
from outrider.models.quant import Quantised
from outrider.models.rope import FIXED, rope
from outrider.models.stack import Layer, TorchStack
from outrider.models.tokenizer import Tokenizer

OWN = ("llama", "mistral", "qwen2", "qwen3")  # families that models/llama.py runs; all others go through transformers


@dataclass(frozen=True, eq=False)
class Loaded:
    model: Model
    tokenizer: Tokenizer | None = None  # None: the folder has none, and prompts are token ids
    ends: frozenset[int] = frozenset()  # tokens after which an answer is over
    notes: tuple[str, ...] = ()  # what a user should know about how the weights are kept


@dataclass(frozen=True)
class Target:
    """Where a model is to live."""

    device: torch.device
    dtype: torch.dtype | None  # None: as the file stores it where that can run, else what suits the device
    memory: int  # bytes for keys and values
    bits: int = 0  # 4 or 8: quantise dense weights on loading

    @property
    def dense(self) -> torch.dtype:
        """The dtype of weights that are not packed."""
        return self.dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)


def load(name: str, where: Target) -> Loaded:
    path = sources.resolve(name)
    try:
        loaded = _load_gguf(path, where) if path.is_file() else _load_folder(path, where)
    except torch.OutOfMemoryError as error:
        raise OutriderError(f"{name} does not fit into the memory of {where.device}; use a smaller model") from error
    _give_back()
    return loaded


def _give_back() -> None:
    """Heap that loading has freed goes back to the system: the C library keeps it, and it would stay resident."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc has the call
        ctypes.CDLL(None).malloc_trim(0)


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

    def dense(self, name: str) -> Tensor:
        """As a tensor: norms, biases, and matrices that are not packed."""
        ...

    def quantised(self, name: str) -> Quantised:
        """As integers and scales."""
        ...


def assemble(store: Store, config: LlamaConfig, make_rope: Callable[[], Rope], tied: bool, packed: bool) -> Weights:
    """The weights of a llama-like model, taken from the store one matrix at a time."""

    def optional(name: str) -> Tensor | None:
        return store.dense(name) if name in store else None

    def linear(*names: str) -> Any:
        biases = [optional(f"{name}.bias") for name in names]
        if packed:
            return Packed([store.quantised(f"{name}.weight") for name in names], biases)
        return join([store.dense(f"{name}.weight") for name in names], biases)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        return Layer(
            attention_norm=store.dense(prefix + "input_layernorm.weight"),
            qkv=linear(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            output=linear(attention + "o_proj"),
            mlp_norm=store.dense(prefix + "post_attention_layernorm.weight"),
            gate_up=linear(prefix + "mlp.gate_proj", prefix + "mlp.up_proj"),
            down=linear(prefix + "mlp.down_proj"),
            query_norm=optional(attention + "q_norm.weight"),
            key_norm=optional(attention + "k_norm.weight"),
        )

    embedding = linear("model.embed_tokens")
    head = embedding if tied else linear("lm_head")
    layers = [layer(index) for index in range(config.num_layers)]
    stack = NativeStack(config, layers) if packed else TorchStack(config, layers)
    return Weights(embedding, stack, store.dense("model.norm.weight"), head, make_rope())


def _can_pack(where: Target, shapes: Iterable[tuple[int, ...]], notes: list[str]) -> bool:
    """Whether packed weights can run here; if not, why."""
    if where.device.type != "cpu":
        notes.append(f"packed weights run on a CPU only; on {where.device} they are expanded to {where.dense}")
        return False
    odd = next((shape for shape in shapes if len(shape) == 2 and not packable(*shape)), None)
    if odd is not None:
        notes.append(f"a matrix of shape {odd} cannot be packed; the weights are expanded to {where.dense}")
        return False
    try:
        library()
    except NoCompiler as reason:
        notes.append(f"{reason}; the weights are expanded to {where.dense}, which is slower: install g++")
        return False
    return True


class _GGUFStore:
    def __init__(self, tensors: dict[str, GGUFTensor], where: Target) -> None:
        self._tensors, self._where = tensors, where
        self.notes: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dense(self, name: str) -> Tensor:
        return self._tensors[name].dequantize(self._where.dense).to(self._where.device)

    def quantised(self, name: str) -> Quantised:
        tensor = self._tensors[name]
        exact = quant.from_gguf(tensor)
        if exact is not None:
            return exact
        self.notes.append(f"{name} is stored as {tensor.kind}, which is not packed as it is; it is rounded to 8 bits")
        return quant.quantise(tensor.dequantize(), 8)

    def packs(self) -> bool:
        """Whether the file's own bits are to be kept, and can be."""
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.shape) == 2}
        if self._where.dtype is not None or not kinds & set(quant.KINDS):
            return False
        return _can_pack(self._where, (tensor.shape for tensor in self._tensors.values()), self.notes)


def _load_gguf(path: Path, where: Target) -> Loaded:
    file = GGUFFile(path)
    said = file.config()
    config = LlamaConfig(
        hidden_size=said["hidden_size"],
        num_heads=said["num_heads"],
        num_kv_heads=said["num_kv_heads"],
        head_dim=said["head_dim"],
        norm_eps=said["norm_eps"],
        sliding_window=said["sliding_window"],
        vocab_size=said["vocab_size"],
        num_layers=said["num_layers"],
        context=said["max_context"],
    )
    factors = None if said["rope_factors"] is None else torch.from_numpy(said["rope_factors"])

    def make_rope() -> Rope:
        return rope(config.head_dim, said["rope_theta"], config.context, said["rope_scaling"], factors)

    if where.bits:
        raise OutriderError(f"{path} is quantised as it is; --quantize is for dense weights, leave it out")
    store = _GGUFStore(dict(file.tensors()), where)
    weights = assemble(store, config, make_rope, said["tie_embeddings"], store.packs())
    tokenizer = tokenizers.from_gguf(file.metadata)
    ends = _ids(file.metadata.get("tokenizer.ggml.eos_token_id"))
    if tokenizer is not None:
        ends |= tokenizers.end_ids(tokenizer, file.metadata)
    return Loaded(Llama(config, weights, where.memory), tokenizer, ends, tuple(store.notes))


class _FolderStore:
    """Safetensors files of one folder, opened once and read tensor by tensor."""

    def __init__(self, folder: Path, where: Target) -> None:
        from safetensors import SafetensorError, safe_open

        self._where = where
        self._files = {}
        self.notes: list[str] = []
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
        return self._files[name].get_tensor(name).to(self._where.device, self._where.dense)

    def quantised(self, name: str) -> Quantised:
        return quant.quantise(self.dense(name), self._where.bits)

    def packs(self) -> bool:
        if not self._where.bits:
            return False
        shapes = (tuple(file.get_slice(name).get_shape()) for name, file in self._files.items())
        return _can_pack(self._where, shapes, self.notes)


def _load_folder(folder: Path, where: Target) -> Loaded:
    said = _read_json(folder / "config.json")
    if said is None:
        raise OutriderError(f"{folder} has no config.json, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise OutriderError(f"{folder} has no .safetensors weights; pickled weights are not loaded: convert them first")
    config = _read_config(folder)
    own = _is_own(config)
    model, notes = _load_own(folder, config, where) if own else _load_foreign(folder, where)
    tokenizer = tokenizers.from_folder(folder)
    generation = _read_json(folder / "generation_config.json") or {}
    ends = _ids(said.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
    if tokenizer is not None:
        ends |= tokenizers.end_ids(tokenizer)
    return Loaded(model, tokenizer, ends, notes)


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


def _load_own(folder: Path, config: Any, where: Target) -> tuple[Model, tuple[str, ...]]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = LlamaConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        sliding_window=config.sliding_window if config.model_type == "mistral" else None,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        context=config.max_position_embeddings,
    )
    scaling = dict(config.rope_parameters)
    store = _FolderStore(folder, where)

    def make_rope() -> Rope:
        return rope(head_dim, scaling["rope_theta"], own.context, scaling)

    weights = assemble(store, own, make_rope, config.tie_word_embeddings, store.packs())
    return Llama(own, weights, where.memory), tuple(store.notes)


def _load_foreign(folder: Path, where: Target) -> tuple[Model, tuple[str, ...]]:
    if where.bits:
        raise OutriderError("--quantize works for llama-like models, not for those that run through transformers")
    from transformers import AutoModelForCausalLM

    from outrider.models.transformers import TransformersModel

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder.resolve(), dtype=where.dense, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers raises for a model it cannot build
        raise OutriderError(f"{folder} cannot be loaded by transformers: {_line(error)}") from error
    return TransformersModel(model.to(where.device), where.memory), ()


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
