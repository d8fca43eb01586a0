"""A name, folder, hub id or GGUF file -> a model and its tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import OutriderError, one_line, quoted
from outrider.models import sources, tokenizer as tokenizers
from outrider.models.base import Model
from outrider.models.folder_config import plain_llama
from outrider.models.gguf import GGUFFile
from outrider.models.llama import Llama, LlamaConfig, Weights, on_cpu
from outrider.models.memory import return_heap
from outrider.models.rope import FIXED, Rope, rope
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import FolderStore, GGUFStore, LoadOptions, assemble

OWN = ("llama", "mistral", "qwen2", "qwen3")  # families that models/llama.py runs; all others go through transformers


_Made = Callable[[], tuple[Model, tuple[str, ...]]]  # a model, and its notes


@dataclass(frozen=True, eq=False)
class Loaded:
    model: Model
    tokenizer: Tokenizer | None = None  # None: the folder has none, and prompts are token ids
    ends: frozenset[int] = frozenset()  # tokens after which an answer is over
    notes: tuple[str, ...] = ()  # what a user should know about how the weights are kept


def load(name: str, where: LoadOptions) -> Loaded:
    loaded = _opened(name, where, ahead=False)()
    return_heap()
    return loaded


def fetch(name: str, where: LoadOptions) -> Callable[[], Loaded]:
    """What takes no device: the files, downloaded if need be, and opened; for a device that is not the CPU its weights
    are read into memory, too. What it returns does the rest."""
    return _opened(name, where, ahead=where.device.type != "cpu")


def _opened(name: str, where: LoadOptions, ahead: bool) -> Callable[[], Loaded]:
    path = sources.resolve(name)
    made = _open_gguf(path, where, ahead) if path.is_file() else _open_folder(path, where, ahead)

    def loaded() -> Loaded:
        try:
            return made()
        except torch.OutOfMemoryError as error:
            raise OutriderError(
                f"{name} does not fit into the memory of {where.device}; use a smaller model"
            ) from error

    return loaded


def _model(config: LlamaConfig, weights: Weights, where: LoadOptions, notes: list[str]) -> Model:
    """The forward that suits the device."""
    if where.device.type != "cuda":
        return on_cpu(config, weights, where.memory)
    try:
        from outrider.models.cuda.model import CudaLlama
    except ImportError as error:
        lost = "which is slower, and whose texts may differ with the batch and the drafter where two tokens nearly tie"
        notes.append(f"{error.name} is missing, so the GPU runs plain torch, {lost}: install it")
        return Llama(config, weights, where.memory)
    return CudaLlama(config, weights, where.memory)


def _open_gguf(path: Path, where: LoadOptions, ahead: bool) -> Callable[[], Loaded]:
    file = GGUFFile(path)
    metadata = file.config()
    config = LlamaConfig(
        hidden_size=metadata["hidden_size"],
        num_heads=metadata["num_heads"],
        num_kv_heads=metadata["num_kv_heads"],
        head_dim=metadata["head_dim"],
        norm_eps=metadata["norm_eps"],
        sliding_window=metadata["sliding_window"],
        vocab_size=metadata["vocab_size"],
        num_layers=metadata["num_layers"],
        context=metadata["max_context"],
        kv_bits=where.kv_bits,
    )
    factors = None if metadata["rope_factors"] is None else torch.from_numpy(metadata["rope_factors"])

    def make_rope() -> Rope:
        return rope(config.head_dim, metadata["rope_theta"], config.context, metadata["rope_scaling"], factors)

    store = GGUFStore(dict(file.tensors()), where)
    packs = _packs(store, where)
    tokenizer = tokenizers.from_gguf(file.metadata)
    ends = tokenizers.end_ids(tokenizer, file.metadata)
    if ahead:
        store.read_ahead()

    def made() -> Loaded:
        weights = assemble(store, config, make_rope, metadata["tie_embeddings"], packs, where.activations)
        return Loaded(_model(config, weights, where, store.notes), tokenizer, ends, tuple(store.notes))

    return made


def _packs(store: GGUFStore | FolderStore, where: LoadOptions) -> bool:
    """Whether the weights are packed; what only packed ones can do is refused where they are not."""
    packed = store.packs()
    asked = where.only_packed
    if asked and not packed:
        why = f" ({store.notes[-1]})" if store.notes else ""
        raise OutriderError(f"{asked} needs packed weights on a CPU: a quantised GGUF file, or --quantize{why}")
    return packed


def _open_folder(folder: Path, where: LoadOptions, ahead: bool) -> Callable[[], Loaded]:
    content = _read_json(folder / "config.json")
    if content is None:
        raise OutriderError(f"{folder} has no config.json, so it is not a model folder")
    if not any(folder.glob("*.safetensors")):
        raise OutriderError(f"{folder} has no .safetensors weights; pickled weights are not loaded: convert them first")
    config = plain_llama(content) or _read_config(folder)
    open_one = _open_own if _is_own(config) else _open_foreign
    made, words = open_one(folder, config, where, ahead), words_of(folder)

    def loaded() -> Loaded:
        model, notes = made()
        return Loaded(model, *words, notes)

    return loaded


def words_of(folder: Path) -> tuple[Tokenizer | None, frozenset[int]]:
    """The folder's tokenizer, and the tokens after which an answer is over."""
    tokenizer = tokenizers.from_folder(folder)
    files = [folder / name for name in ("config.json", "generation_config.json")]
    return tokenizer, tokenizers.end_ids(tokenizer).union(*map(_ends, files))


def read_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model, without the weights."""
    path = sources.resolve(name)
    found = tokenizers.from_gguf(GGUFFile(path).metadata) if path.is_file() else tokenizers.from_folder(path)
    if found is None:
        raise OutriderError(f"{name} has no tokenizer; name a folder or GGUF file that has one")
    return found


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder.resolve(), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken file makes transformers raise
        raise OutriderError(f"{folder / 'config.json'} is not a model that can be run: {one_line(error)}") from error


def _is_own(config: Any) -> bool:
    """Whether our own forward computes exactly this model."""
    if config.model_type not in OWN or getattr(config, "quantization_config", None):
        return False
    scaling = config.rope_parameters
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        config.hidden_act == "silu"
        and isinstance(scaling, dict)
        and scaling.get("rope_type", "default") in ("default", *FIXED)
        and scaling.get("partial_rotary_factor", 1.0) == 1.0
        and not getattr(config, "mlp_bias", False)
        and (layer_types == {"full_attention"} or config.model_type == "mistral")
    )


def _open_own(folder: Path, config: Any, where: LoadOptions, ahead: bool) -> _Made:
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
        kv_bits=where.kv_bits,
    )
    _check_sizes(folder / "config.json", own)
    scaling = dict(config.rope_parameters)
    store = FolderStore(folder, where)

    def make_rope() -> Rope:
        return rope(head_dim, scaling.get("rope_theta", 10_000.0), own.context, scaling)

    packs = _packs(store, where)
    if ahead:
        store.read_ahead()

    def made() -> tuple[Model, tuple[str, ...]]:
        weights = assemble(store, own, make_rope, config.tie_word_embeddings, packs, where.activations)
        return _model(own, weights, where, store.notes), tuple(store.notes)

    return made


def _check_sizes(path: Path, config: LlamaConfig) -> None:
    """Each size is a number that a model can have: transformers checks few of them."""
    for field in fields(config):
        value, least = getattr(config, field.name), 0 if field.name == "norm_eps" else 1
        kinds = int | float if field.name == "norm_eps" else int
        absent = value is None and field.name == "sliding_window"
        if not absent and (isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf):
            raise OutriderError(f"{path} is broken: {field.name} is {quoted(value)}; download it again")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise OutriderError(
            f"{path} is broken: {config.num_heads} heads of {config.head_dim} cannot share {config.num_kv_heads} "
            "heads of keys and values; download it again"
        )


def _open_foreign(folder: Path, config: Any, where: LoadOptions, ahead: bool) -> _Made:
    """transformers reads all weights at once, so that they always come ahead."""
    if where.bits:
        raise OutriderError("--quantize works for llama-like models, not for models that transformers runs")
    if where.only_packed:
        raise OutriderError(f"{where.only_packed} works for llama-like models, not for models that transformers runs")
    layers, tensors = getattr(config, "num_hidden_layers", 0), len(FolderStore(folder, where))
    if isinstance(layers, int) and layers > tensors:  # transformers would build them all first, without an end
        path = folder / "config.json"
        raise OutriderError(f"{path} is broken: it says {layers} layers for {tensors} tensors; download it again")
    from transformers import AutoModelForCausalLM

    from outrider.models.transformers import TransformersModel

    with _by_transformers(folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder.resolve(), dtype=where.dense, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )

    def made() -> tuple[Model, tuple[str, ...]]:
        with _by_transformers(folder):
            return TransformersModel(model.to(where.device), where.memory), ()

    return made


@contextmanager
def _by_transformers(folder: Path) -> Iterator[None]:
    """What goes wrong there, in a line."""
    try:
        yield
    except (OutriderError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever transformers raises for a model it cannot build, or the model for a pass
        raise OutriderError(f"{folder} cannot be run by transformers: {one_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise OutriderError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OutriderError(f"{path} is not valid JSON ({one_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise OutriderError(f"{path} is not a JSON object; download it again")
    return content


def _ends(path: Path) -> list[int]:
    """eos_token_id of a JSON file: absent, a number or a list."""
    value = (_read_json(path) or {}).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int for id in ids):
        raise OutriderError(f"{path}: eos_token_id is {quoted(value)}, not the numbers of tokens; download it again")
    return [id for id in ids if id >= 0]
