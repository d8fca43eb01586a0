"""Every entry of a model's metadata with a wrong value: the model opens and answers, or one line says why not."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ggufs import byte_metadata, llama_metadata, write_unchecked
from tiny import CPU, reference

from outrider.core.errors import OutriderError
from outrider.models.base import Feed
from outrider.models.export import to_transformers
from outrider.models.load import Loaded, load
from outrider.models.tokenizer import from_gguf

NAN, INF = math.nan, math.inf
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**62, -(2**62), 0.0, -1.5, 0.5, 1e300, NAN, INF, -INF),
    *("", "text", "1", "yarn", "\ud800".encode("utf-8", "replace").decode(), "x" * 5000),
    *([], [1], [-1, 2], [NAN], ["a"], ["a", "a"], ["", " "], [True], [0.5, 1.5]),
)
FEW: tuple[Any, ...] = (None, True, 0, -1, 2**31, NAN, "text", ["a"])
NESTED: tuple[Any, ...] = ({}, {"a": 1}, [[1]], [{}], [None], [["a", "b"]], {"rope_type": 3}, {"rope_type": ["yarn"]})
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.yarn_beta_fast": 16.0,
    "llama.rope.scaling.yarn_beta_slow": 2.0,
    "llama.rope.scaling.attn_factor": 0.5,
}
SIZES = {
    "llama.attention.key_length": 8,
    "llama.rope.dimension_count": 8,
    "llama.attention.sliding_window": 16,
    "llama.expert_count": 0,
    "split.count": 1,
    "general.alignment": 32,
}
BYTES = byte_metadata(
    padding_token_id=2,
    eot_token_id=1,
    eom_token_id=1,
    add_bos_token=True,
    add_eos_token=False,
)
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "hi"],
    "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0],
    "tokenizer.ggml.token_type": [2, 3, *[6] * 256, 1, 1, 1, 1, 1],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_space_prefix": True,
}
KINDS = {
    "bytes": {**SIZES, **YARN, **BYTES, "tokenizer.chat_template": TEMPLATE},
    "pieces": {"llama.rope.scale_linear": 2.0, **PIECES},
}
VOCAB = 263


def opened(path: Path) -> Loaded | str:
    """A model that answers, or one line that says why it cannot be had; any other exception ends the test."""
    reason = ""
    try:
        return used(load(str(path), CPU))
    except OutriderError as error:
        reason = str(error)
    assert "\n" not in reason
    assert 10 < len(reason) < 1000
    return reason


def used(loaded: Loaded) -> Loaded:
    """What a user does first: a pass, a text, a conversation."""
    (output,) = loaded.model.forward([Feed(0, [1, 2, 3])])
    assert output.logits.isfinite().all()
    assert all(type(id) is int and id >= 0 for id in loaded.ends)
    if loaded.tokenizer is not None:
        loaded.tokenizer.decode(loaded.tokenizer.encode("hi there"))
        if loaded.tokenizer.chat_template:
            loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    return loaded


# GGUF


def cases(kind: str) -> Iterator[Any]:
    return (pytest.param(kind, key, id=f"{kind}-{key}") for key in llama_metadata() | KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_itself_opens(tmp_path: Path, kind: str) -> None:
    loaded = opened(write_unchecked(tmp_path / "model.gguf", llama_metadata() | KINDS[kind], VOCAB))
    assert isinstance(loaded, Loaded)
    assert loaded.tokenizer is not None


@pytest.mark.parametrize(("kind", "key"), [*cases("bytes"), *cases("pieces")])
def test_gguf(tmp_path: Path, kind: str, key: str) -> None:
    metadata = llama_metadata() | KINDS[kind]
    for value in WRONG:
        opened(write_unchecked(tmp_path / "model.gguf", metadata | {key: value}, VOCAB))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split.count": "two"}, "split.count"),
        ({"tokenizer.ggml.eos_token_id": "1"}, "eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id"),
        ({"tokenizer.ggml.eot_token_id": [1]}, "eot_token_id"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.token_type": 3}, "token_type"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.chat_template": 5}, "chat_template"),
        ({"llama.rope.scaling.original_context_length": 0}, "original_context_length"),
        ({"llama.rope.scaling.original_context_length": NAN}, "original_context_length"),
        ({"llama.rope.scaling.yarn_beta_fast": -1.5}, "rotary positions"),
        ({"llama.rope.scaling.attn_factor": 1e300}, "rotary positions"),
        ({"llama.rope.scaling.factor": NAN}, "rope.scaling.factor"),
        ({"llama.context_length": 0}, "context_length"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv"),
        ({"llama.attention.layer_norm_rms_epsilon": NAN}, "epsilon"),
        ({"llama.rope.freq_base": -1.5}, "freq_base"),
    ],
    ids=str,
)
def test_the_wrong_entry_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    reason = opened(write_unchecked(tmp_path / "model.gguf", llama_metadata() | KINDS["bytes"] | changes, VOCAB))
    assert isinstance(reason, str)
    assert words in reason


# Folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that our own forward runs and one that transformers runs, both with a tokenizer."""
    out = {}
    for kind, more in {"llama": {"rope_parameters": ROPE}, "gpt2": {}}.items():
        out[kind] = tmp_path_factory.mktemp(kind)
        reference(kind, vocab_size=VOCAB, **more).save_pretrained(out[kind])
        tokenizer = from_gguf(BYTES | {"tokenizer.chat_template": TEMPLATE})
        assert tokenizer is not None
        to_transformers(tokenizer).save_pretrained(out[kind])
        (out[kind] / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "bos_token_id": 0}))
    return out


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "config.json"), *(("llama", name) for name in FILES)], ids=lambda each: each
)
def test_folder(folders: dict[str, Path], tmp_path: Path, kind: str, name: str) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    assert isinstance(opened(folder), Loaded)
    told = json.loads((folder / name).read_text())
    values = (*WRONG, *NESTED) if kind == "llama" else FEW  # transformers builds its models slowly
    for key, value in [(key, value) for key in told for value in values]:
        (folder / name).write_text(json.dumps(told | {key: value}))
        opened(folder)
