"""Tiny GGUF files of models that can run."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2


def write_llama(path: Path, vocab: int = 40, metadata: dict[str, Any] | None = None, context: int = 128) -> Path:
    """A llama of two layers in bfloat16 values, so that a conversion rounds nothing."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (llama_metadata(context) | (metadata or {})).items():
        if key == "general.architecture":
            continue  # the writer has it
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in llama_weights(vocab).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_metadata(context: int = 128) -> dict[str, Any]:
    sizes = {
        "block_count": LAYERS,
        "context_length": context,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50000.0,
    }
    return {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in sizes.items()}


def llama_weights(vocab: int) -> dict[str, np.ndarray]:
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> np.ndarray:
        return torch.randn(shape, generator=random).mul(0.3).bfloat16().float().numpy()

    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    weights = {"token_embd.weight": matrix(vocab, HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        weights |= {f"{at}{name}.weight": np.ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
        weights |= {f"{at}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    return weights


def byte_metadata(**more: Any) -> dict[str, Any]:
    """A tokenizer with one token per byte, one merge and two control tokens; `more` as in add_bos_token=True."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "th"]
    said = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "merges": ["t h"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (said | more).items()}


def _encoded(value: Any) -> bytes:
    """A value as GGUF stores it: its type, then the value; whole numbers in 64 bits."""
    if isinstance(value, list):
        parts = [_encoded(item) for item in value]
        kind = parts[0][:4] if parts else struct.pack("<I", gguf.GGUFValueType.STRING)
        return (
            struct.pack("<I", gguf.GGUFValueType.ARRAY)
            + kind
            + struct.pack("<Q", len(parts))
            + b"".join(part[4:] for part in parts)
        )
    kind, data = _scalar(value)
    return struct.pack("<I", kind) + data


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return gguf.GGUFValueType.INT64, struct.pack("<q", value)
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT64, struct.pack("<d", value)
    text = str(value).encode()
    return gguf.GGUFValueType.STRING, struct.pack("<Q", len(text)) + text


def write_unchecked(path: Path, metadata: dict[str, Any], vocab: int) -> Path:
    """The same with any metadata; the gguf package would refuse to write most wrong values."""
    table, data = b"", b""
    for name, weight in llama_weights(vocab).items():
        shape = struct.pack(f"<I{weight.ndim}Q", weight.ndim, *reversed(weight.shape))
        table += _encoded(name)[4:] + shape + struct.pack("<IQ", gguf.GGMLQuantizationType.F32, len(data))
        data += weight.tobytes() + b"\0" * (-weight.nbytes % 32)
    given = {key: value for key, value in metadata.items() if value is not None}
    entries = b"".join(_encoded(key)[4:] + _encoded(value) for key, value in given.items())
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(llama_weights(vocab)), len(given)) + entries + table
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path
