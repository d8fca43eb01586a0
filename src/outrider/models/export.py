"""A GGUF file written out as a Hugging Face folder in bfloat16, for engines that cannot read the file itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.errors import OutriderError
from outrider.models import sources, tokenizer as tokenizers
from outrider.models.gguf import GGUFFile
from outrider.models.tokenizer import GGUFTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def as_folder(path: Path) -> Path:
    """A folder as it is; a GGUF file is written out into the cache, once."""
    if path.is_dir():
        return path
    about = path.stat()
    mark = hashlib.sha256(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = sources.cache_dir() / "folders" / f"{path.stem}-{mark}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as scratch:
            export(path, Path(scratch) / "whole")
            with contextlib.suppress(FileExistsError, OSError):  # another process was faster
                (Path(scratch) / "whole").rename(folder)
    return folder


def export(path: Path, folder: Path) -> None:
    """Weights, config and tokenizer of the file. Each weight is the file's own value, rounded to bfloat16."""
    from safetensors.torch import save_file

    file = GGUFFile(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.dequantize(torch.bfloat16).contiguous() for name, tensor in file.tensors()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer = tokenizers.from_gguf(file.metadata)
    ends: list[int] = []
    if tokenizer is not None:
        to_transformers(tokenizer).save_pretrained(folder)
        ends = sorted(tokenizers.end_ids(tokenizer, file.metadata))
    (folder / "config.json").write_text(json.dumps(_config(file, ends), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def to_transformers(tokenizer: GGUFTokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as one of transformers, which can save itself."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        add_bos_token=tokenizer.add_bos_token,
        add_eos_token=tokenizer.add_eos_token,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )


def _config(file: GGUFFile, ends: list[int]) -> dict[str, Any]:
    metadata = file.config()
    if metadata["rope_factors"] is not None:
        raise OutriderError(
            f"{file.path} has rotary factors of its own, which a config.json cannot say; "
            "engines that read folders need the model's original folder"
        )
    return {
        "architectures": [_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": metadata["vocab_size"],
        "hidden_size": metadata["hidden_size"],
        "intermediate_size": metadata["intermediate_size"],
        "num_hidden_layers": metadata["num_layers"],
        "num_attention_heads": metadata["num_heads"],
        "num_key_value_heads": metadata["num_kv_heads"],
        "head_dim": metadata["head_dim"],
        "rms_norm_eps": metadata["norm_eps"],
        "rope_theta": metadata["rope_theta"],
        "rope_scaling": metadata["rope_scaling"],
        "max_position_embeddings": metadata["max_context"],
        "sliding_window": metadata["sliding_window"],
        "tie_word_embeddings": metadata["tie_embeddings"],
        "hidden_act": "silu",
        "attention_bias": metadata["qkv_bias"],
        "eos_token_id": ends,
        "torch_dtype": "bfloat16",
    }
