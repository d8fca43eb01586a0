"""Weights out of files: where they are stored, and how they become the layers of a llama-like model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.models import quant
from outrider.models.gguf import GGUFTensor
from outrider.models.linear import join
from outrider.models.llama_weights import LlamaConfig, Weights
from outrider.models.native.library import NoCompiler, library
from outrider.models.native.packed import WORDS, Packed, packable
from outrider.models.native.stack import NativeStack
from outrider.models.paged_cache import FLOATS
from outrider.models.quant import Quantised
from outrider.models.rope import Rope
from outrider.models.stack import Layer, TorchStack


@dataclass(frozen=True)
class LoadOptions:
    """Where a model is loaded to, and in which form."""

    device: torch.device
    dtype: torch.dtype | None  # None: as the file stores it where that can run, else what suits the device
    memory: int  # bytes for keys and values
    bits: int = 0  # 4 or 8: quantise dense weights on loading
    kv_bits: int = FLOATS  # of keys and values of packed models
    activations: int = WORDS  # bits of the inputs of their products

    @property
    def only_packed(self) -> str:
        """What is asked for that only packed weights can do; "": nothing."""
        asked = {"kv int8": self.kv_bits != FLOATS, "activations int8": self.activations != WORDS}
        return next((name for name, given in asked.items() if given), "")

    @property
    def dense(self) -> torch.dtype:
        """The dtype of weights that are not packed."""
        return self.dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)


class Store(Protocol):
    """Weights under Hugging Face names."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dense(self, name: str) -> Tensor:
        """As a tensor: norms, biases, and matrices that are not packed."""
        ...

    def quantised(self, name: str) -> Quantised:
        """As integers and scales."""
        ...


def assemble(
    store: Store,
    config: LlamaConfig,
    make_rope: Callable[[], Rope],
    tied: bool,
    packed: bool,
    activations: int = WORDS,
) -> Weights:
    """The weights of a llama-like model, taken from the store one matrix at a time. `activations`: bits of the inputs
    of packed ones."""
    _check_shapes(store, config, tied)

    def optional(name: str) -> Tensor | None:
        return store.dense(name) if name in store else None

    def linear(*names: str) -> Any:
        biases = [optional(f"{name}.bias") for name in names]
        if packed:
            return Packed([store.quantised(f"{name}.weight") for name in names], biases, activations)
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


def _check_shapes(store: Store, config: LlamaConfig, tied: bool) -> None:
    """Weights of other sizes than the config says would run and give a wrong output."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        inner = store.shape(f"model.layers.{index}.mlp.gate_proj.weight")[:1]
        for name, shape in _layer_shapes(config, *inner).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    for name, shape in shapes.items():
        if name in store and store.shape(name) != shape:
            raise OutriderError(
                f"the tensor {name} has shape {store.shape(name)} but the model's config says {shape}; get it again"
            )


def _layer_shapes(config: LlamaConfig, inner: int = 0) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, outputs in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
        shapes[f"self_attn.{name}_proj.weight"] = (outputs, hidden)
        shapes[f"self_attn.{name}_proj.bias"] = (outputs,)
    return shapes


def _can_pack(where: LoadOptions, shapes: Iterable[tuple[int, ...]], notes: list[str]) -> bool:
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


class _FileStore:
    """What stores of files share."""

    def __init__(self, where: LoadOptions) -> None:
        self._where = where
        self.notes: list[str] = []
        self._ahead: dict[str, Tensor] = {}  # tensors that were read before they are asked for

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def _read(self, name: str) -> Tensor:
        """On the host; it may lie in the file still, and be read when it is used."""
        raise NotImplementedError

    def dense(self, name: str) -> Tensor:
        tensor = self._ahead.pop(name, None)
        return (self._read(name) if tensor is None else tensor).to(self._where.device, self._where.dense)

    def read_ahead(self) -> None:
        """Every tensor into the host's memory: then only what the device does is left."""
        self._ahead = {name: self._read(name).to(self._where.dense, copy=True) for name in self}


class GGUFStore(_FileStore):
    def __init__(self, tensors: dict[str, GGUFTensor], where: LoadOptions) -> None:
        super().__init__(where)
        self._tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def _read(self, name: str) -> Tensor:
        return self._tensors[name].dequantize(self._where.dense)

    def quantised(self, name: str) -> Quantised:
        tensor = self._tensors[name]
        exact = quant.from_gguf(tensor)
        if exact is not None:
            return exact
        bits = self._where.bits or 8
        if not self._where.bits:
            self.notes.append(f"{name} is stored as {tensor.kind}, which cannot be kept; it is rounded to 8 bits")
        return quant.quantise(tensor.dequantize(), bits)

    def packs(self) -> bool:
        """Whether weights are to be packed, with the file's own bits or those asked for, and can be."""
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.shape) == 2}
        if self._where.bits:
            if kinds & set(quant.KINDS):
                raise OutriderError("the file is quantised as it is; --quantize is for dense weights, leave it out")
        elif self._where.dtype is not None or not kinds & set(quant.KINDS):
            return False
        return _can_pack(self._where, (tensor.shape for tensor in self._tensors.values()), self.notes)


class FolderStore(_FileStore):
    """Safetensors files of one folder, opened once and read tensor by tensor."""

    def __init__(self, folder: Path, where: LoadOptions) -> None:
        from safetensors import SafetensorError, safe_open

        super().__init__(where)
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise OutriderError(f"{path} cannot be read ({error}); download it again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def _read(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def quantised(self, name: str) -> Quantised:
        return quant.quantise(self.dense(name), self._where.bits)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise OutriderError(f"the model's folder lacks the tensor {name}; download it again")
        return self._files[name]

    def packs(self) -> bool:
        if not self._where.bits:
            return False
        return _can_pack(self._where, map(self.shape, self._files), self.notes)
