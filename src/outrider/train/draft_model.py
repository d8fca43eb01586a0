"""A tiny draft model to be trained: some of the target's own layers between its embedding and its output matrix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.errors import OutriderError
from outrider.models.export import to_transformers
from outrider.models.llama_weights import MATRICES, NORMS
from outrider.models.stack import Layer
from outrider.models.tokenizer import GGUFTokenizer, Tokenizer
from outrider.train.atomic import write_tensors, write_text
from outrider.train.forward import block, norm
from outrider.train.objective import Figures, Laws, TeacherBatch, distance
from outrider.train.teacher import Target

_COPIED = ("tokenizer", "special_tokens", "vocab", "merges", "generation_config", "chat_template")


class _Joined:
    """Matrices that read the same input; each is a parameter of its own, for that is how Muon sees them."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self._weights, self._biases = tuple(weights), tuple(biases)

    def __call__(self, x: Tensor) -> Tensor:
        bias = torch.cat(self._biases) if self._biases else None
        return F.linear(x, torch.cat(self._weights).to(x.dtype), None if bias is None else bias.to(x.dtype))


class DraftNet(nn.Module):
    """Embedding and output matrix are the target's and stay as they are."""

    reads: tuple[int, ...] = ()

    def __init__(self, target: Target, layers: int, longest: int) -> None:
        super().__init__()
        if not 1 <= layers <= target.num_layers:
            raise OutriderError(f"a draft model has 1 to {target.num_layers} of the target's layers, not {layers}")
        self._target, self._config = target, target.config
        self.norm = nn.Parameter(target.tensor("model.norm.weight").float())
        self._layers = [self._copy(index, place) for index, place in enumerate(spread(layers, target.num_layers))]
        cos, sin = target.weights.rope.tables(longest)
        self.register_buffer("cos", cos.to(target.device), persistent=False)
        self.register_buffer("sin", sin.to(target.device), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def _copy(self, index: int, place: int) -> Layer:
        """Parameters that begin as the target's layer `place`."""

        def take(name: str) -> list[Tensor]:
            try:
                weight = nn.Parameter(self._target.tensor(f"model.layers.{place}.{name}").float())
            except (KeyError, AttributeError):  # the target has none
                return []
            self.register_parameter(_local(index, name), weight)
            return [weight]

        def linear(names: Sequence[str]) -> _Joined:
            biases = [bias for name in names for bias in take(f"{name}.bias")]
            return _Joined([weight for name in names for weight in take(f"{name}.weight")], biases)

        norms = {field: next(iter(take(f"{name}.weight")), None) for field, name in NORMS.items()}
        return Layer(**norms, **{field: linear(names) for field, names in MATRICES.items()})  # type: ignore[arg-type]

    def loss(self, batch: TeacherBatch, steps: int = 0) -> tuple[Tensor, Figures]:
        """Distillation of the target's law at every place."""
        answers, rows = batch.answers(), batch.tokens.shape[1]
        x = F.embedding(batch.tokens, batch.embedding)
        for layer in self._layers:
            x = block(x, layer, self._config, self.cos[:rows], self.sin[:rows])
        places, counts = answers.before(1)
        x = norm(x, self.norm, self._config.norm_eps).flatten(0, 1).index_select(0, places)
        total, kept, hit = distance(x, batch.output, Laws.of(batch, answers), counts)
        return total, {"keep1": kept, "hit1": hit, "loss": total.detach()}

    def write(self, folder: Path, source: Path, tokenizer: Tokenizer | None) -> None:
        """As a model folder. `source`: the target's folder or file."""
        write_tensors(folder / "model.safetensors", self._tensors(), {"format": "pt"})
        write_text(folder / "config.json", json.dumps(self._model_config(source), indent=1) + "\n")
        if isinstance(tokenizer, GGUFTokenizer):
            to_transformers(tokenizer).save_pretrained(folder)
        for path in source.iterdir() if source.is_dir() else ():
            if path.name.startswith(_COPIED):
                shutil.copy(path, folder / path.name)

    def _tensors(self) -> dict[str, Tensor]:
        weights = {"model.embed_tokens.weight": self._target.tensor("model.embed_tokens.weight")}
        if not self._tied:
            weights["lm_head.weight"] = self._target.tensor("lm_head.weight")
        weights |= {_foreign(name): weight for name, weight in self.named_parameters()}
        return {name: weight.detach().to("cpu", self._target.dtype) for name, weight in weights.items()}

    @property
    def _tied(self) -> bool:
        return self._target.weights.head is self._target.weights.embedding

    def _model_config(self, source: Path) -> dict[str, Any]:
        """The target's config with fewer layers."""
        config = json.loads((source / "config.json").read_text()) if source.is_dir() else self._config_of_file()
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][: len(self._layers)]
        return {**config, "num_hidden_layers": len(self._layers)}

    def _config_of_file(self) -> dict[str, Any]:
        """A GGUF file has no config.json."""
        config, body = self._target.config, self._target.anatomy
        if self._target.weights.rope.scale != 1.0:
            raise OutriderError("the target's file scales rotary positions; train the draft from its original folder")
        family = "qwen3" if self._layers[0].query_norm is not None else "qwen2" if body.bias else "llama"
        return {
            "model_type": family,
            "architectures": [f"{family.capitalize()}ForCausalLM"],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": body.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": body.rope_theta,
            "max_position_embeddings": config.context,
            "tie_word_embeddings": self._tied,
            "hidden_act": "silu",
        }


def spread(count: int, total: int) -> list[int]:
    """`count` of `total` layers, the first and the last among them."""
    if count == 1:
        return [total - 1]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def _local(index: int, name: str) -> str:
    """A parameter's name may hold no dots."""
    return f"layers:{index}:{name.replace('.', ':')}"


def _foreign(name: str) -> str:
    return "model." + (name.replace(":", ".") if ":" in name else f"{name}.weight")
