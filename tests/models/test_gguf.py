"""GGUF files written here by the `gguf` package, read back by ours."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outrider.core.errors import OutriderError
from outrider.models import gguf as ours
from outrider.models.gguf import GGUFFile, GGUFTensor

Kind = gguf.GGMLQuantizationType
Weights = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


def tiny(architecture: str, tied: bool = True, **more: Any) -> tuple[Any, Weights]:
    config_class, model_class, extra = MODELS[architecture]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **extra, **more, tie_word_embeddings=tied))
    weights = {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}  # biases, norms too
    if tied:
        del weights["lm_head.weight"]
    return model.config, weights


def pair_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to query and key rows: row i of a head's first half, then row i of its second half."""
    size = len(weight) // heads
    rows = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[rows]


def stored(name: str, weight: torch.Tensor, config: Any) -> np.ndarray:
    if config.model_type == "llama" and "q_proj" in name:
        weight = pair_rows(weight, config.num_attention_heads)
    if config.model_type == "llama" and "k_proj" in name:
        weight = pair_rows(weight, config.num_key_value_heads)
    return weight.numpy()


def write(
    path: Path,
    config: Any,
    weights: Weights,
    kind: Kind = Kind.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    architecture: str | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50000.0)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_types([1, 3, 4])
    writer.add_add_bos_token(True)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, weight in weights.items():
        values = stored(name, weight, config)
        chosen = kind if values.ndim == 2 else Kind.F32
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), quantize(values, chosen), raw_dtype=chosen)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "llama.gguf", *tiny("llama"))


def refusal(path: Path) -> str:
    with pytest.raises(OutriderError) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def assert_same(file: GGUFFile, weights: Weights) -> None:
    tensors = dict(file.tensors())
    assert tensors.keys() == weights.keys()
    for name, weight in weights.items():
        assert tensors[name].shape == tuple(weight.shape)
        torch.testing.assert_close(tensors[name].dequantize(), weight, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", MODELS)
def test_names_shapes_and_values(tmp_path: Path, architecture: str, tied: bool) -> None:
    config, weights = tiny(architecture, tied)
    file = GGUFFile(write(tmp_path / "model.gguf", config, weights))
    assert file.architecture == architecture
    assert_same(file, weights)
    assert file.config() == {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 24 if architecture == "qwen3" else 16,
        "norm_eps": pytest.approx(1e-5),
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "rope_factors": None,
        "max_context": 512,
        "tie_embeddings": tied,
        "sliding_window": None,
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
    }


def test_llama_biases_are_put_back_in_order_too(tmp_path: Path) -> None:
    config, weights = tiny("llama", attention_bias=True)
    weights = {name: weight for name, weight in weights.items() if "o_proj.bias" not in name}
    file = GGUFFile(write(tmp_path / "model.gguf", config, weights))
    assert file.config()["qkv_bias"]
    assert_same(file, weights)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_rows_are_exact(tmp_path: Path, kind: Kind) -> None:
    config, weights = tiny("llama")
    file = GGUFFile(write(tmp_path / "model.gguf", config, weights, kind))
    for name, tensor in file.tensors():
        weight = weights[name].numpy()
        assert tensor.kind == (kind.name if weight.ndim == 2 else "F32")
        # Quantising works row by row, so it commutes with the reordering of rows.
        expected = dequantize(quantize(weight, kind), kind) if weight.ndim == 2 else weight
        np.testing.assert_array_equal(tensor.dequantize().numpy(), expected)


@pytest.mark.parametrize("name", [name for name in ours.QUANTS if "K" in name or name.startswith("IQ")])
def test_kinds_the_package_cannot_write(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[Kind[name]]
    # Without this bit every half-precision scale in the block is finite.
    raw = np.random.default_rng(0).integers(0, 256, (37, 512 // block * size), np.uint8) & 0xBF
    tensor = GGUFTensor(name, (37, 512), raw)
    expected = dequantize(raw, Kind[name])
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    np.testing.assert_array_equal(tensor.dequantize().numpy(), expected)
    monkeypatch.setattr(ours, "_CHUNK", 512 * 5)  # chunks of 5 rows and a last one of 2
    np.testing.assert_array_equal(tensor.dequantize().numpy(), expected)
    torch.testing.assert_close(tensor.dequantize(torch.bfloat16), torch.from_numpy(expected).bfloat16(), rtol=0, atol=0)


def test_a_broken_scale_is_no_warning() -> None:
    raw = np.zeros((1, 34), np.uint8)
    raw[0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert GGUFTensor("Q8_0", (1, 32), raw).dequantize().isnan().all()


def test_raw_is_what_the_file_holds(tmp_path: Path) -> None:
    config, weights = tiny("llama")
    file = GGUFFile(write(tmp_path / "model.gguf", config, weights, Kind.Q4_1))
    tensors = dict(file.tensors())
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    assert down.raw.dtype == np.uint8
    assert down.raw.shape == (64, 128 // 32 * 20)
    np.testing.assert_array_equal(down.raw, quantize(weights["model.layers.1.mlp.down_proj.weight"].numpy(), Kind.Q4_1))
    assert tensors["model.norm.weight"].raw.dtype == np.float32


def test_dequantised_weights_are_nobody_elses(llama_file: Path) -> None:
    before = llama_file.read_bytes()
    file = GGUFFile(llama_file)
    tensors = dict(file.tensors())
    tensors["model.norm.weight"].dequantize().zero_()
    assert tensors["model.norm.weight"].raw.all()
    torch.from_numpy(tensors["model.embed_tokens.weight"].raw).zero_()  # no warning, and private to this process
    assert llama_file.read_bytes() == before


def test_metadata(llama_file: Path) -> None:
    metadata = GGUFFile(llama_file).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert metadata["tokenizer.ggml.token_type"] == [1, 3, 4]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["llama.block_count"] == 2


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    extra = lambda writer: writer.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    config, weights = tiny("llama")
    file = GGUFFile(write(tmp_path / "model.gguf", config, weights, extra=extra))
    np.testing.assert_array_equal(file.config()["rope_factors"], factors)
    assert_same(file, weights)


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def old_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)
    writer.add_rope_scaling_attn_factors(0.5)


def none(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(4.0)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 16.0,
    "attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(4))),
}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (linear, {"rope_type": "linear", "factor": 4.0}),
        (old_linear, {"rope_type": "linear", "factor": 4.0}),
        (yarn, YARN),
        (none, None),
    ],
)
def test_rope_scaling(tmp_path: Path, extra: Callable[[gguf.GGUFWriter], None], expected: object) -> None:
    file = GGUFFile(write(tmp_path / "model.gguf", *tiny("llama"), extra=extra))
    assert file.config()["rope_scaling"] == expected


def test_sliding_window(tmp_path: Path) -> None:
    extra = lambda writer: writer.add_sliding_window(128)  # noqa: E731
    assert GGUFFile(write(tmp_path / "m.gguf", *tiny("llama"), extra=extra)).config()["sliding_window"] == 128


def test_every_cut_is_noticed(tmp_path: Path, llama_file: Path) -> None:
    whole = llama_file.read_bytes()
    cut_file = tmp_path / "cut.gguf"
    for cut in [0, 1, 23, 24, 25, *range(26, len(whole), 997), len(whole) - 1]:
        cut_file.write_bytes(whole[:cut])
        message = refusal(cut_file)
        assert "truncated" in message or cut < 24
        assert "download it again" in message


def test_a_cut_in_the_weights_names_the_tensor(tmp_path: Path, llama_file: Path) -> None:
    whole = llama_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-100])
    message = refusal(tmp_path / "cut.gguf")
    assert f"ends at byte {len(whole)} but the file has {len(whole) - 100}" in message


def test_nonsense_never_escapes(tmp_path: Path, llama_file: Path) -> None:
    """Any byte of the header may be wrong: the file opens or is refused in one line, quickly."""
    whole = llama_file.read_bytes()
    header = whole.index(b"blk.1.")  # into the table of tensors
    rng = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    refusals = []
    for at in rng.integers(0, header, 400):
        path.write_bytes(whole[:at] + bytes(rng.choice([0x00, 0x7F, 0xFF, 0x09], 1).tolist()) + whole[at + 1 :])
        try:
            list(GGUFFile(path).tensors())
        except OutriderError as error:
            refusals.append(str(error))
    assert len(refusals) > 40
    assert not any("\n" in message for message in refusals)


@pytest.mark.parametrize("at", [8, 16, 24])
def test_impossible_counts_cost_nothing(tmp_path: Path, llama_file: Path, at: int) -> None:
    whole = llama_file.read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[:at] + struct.pack("<Q", 2**64 - 1) + whole[at + 8 :])
    assert "download it again" in refusal(path)


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is no GGUF file" in refusal(path)


@pytest.mark.parametrize("version", [b"\x01\0\0\0", b"\0\0\0\x03"])
def test_old_and_big_endian_versions(tmp_path: Path, llama_file: Path, version: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + version + llama_file.read_bytes()[8:])
    assert "convert it again" in refusal(path)


def test_no_file_and_no_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.gguf")
    assert "directory" in refusal(tmp_path)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "model.gguf", *tiny("llama"), architecture="mamba"))
    assert "'mamba'" in message
    assert "llama, qwen2, qwen3" in message


def test_missing_metadata(tmp_path: Path, llama_file: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_file.read_bytes().replace(b"llama.block_count", b"llama.black_count"))
    assert "lacks llama.block_count" in refusal(path)


def test_missing_tensor(tmp_path: Path) -> None:
    config, weights = tiny("llama")
    del weights["model.layers.1.mlp.up_proj.weight"]
    assert "lacks the tensor blk.1.ffn_up.weight" in refusal(write(tmp_path / "model.gguf", config, weights))


def test_surplus_tensor(tmp_path: Path) -> None:
    config, weights = tiny("llama", attention_bias=True)
    assert "blk.0.attn_output.bias" in refusal(write(tmp_path / "model.gguf", config, weights))


def test_wrong_shape(tmp_path: Path) -> None:
    config, weights = tiny("llama")
    weights["model.norm.weight"] = torch.ones(32)
    assert "output_norm.weight has shape (32,)" in refusal(write(tmp_path / "model.gguf", config, weights))


def test_unsupported_kind(tmp_path: Path) -> None:
    extra = lambda writer: writer.add_tensor("blk.0.extra", np.ones(8, np.float64))  # noqa: E731
    message = refusal(write(tmp_path / "model.gguf", *tiny("llama"), extra=extra))
    assert "stores blk.0.extra as F64" in message
    assert "Q4_K" in message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.expert_count", 8, "mixture of experts"),
        ("split.count", 2, "join the parts"),
        ("llama.rope.dimension_count", 8, "part of each head"),
    ],
)
def test_models_we_do_not_run(tmp_path: Path, key: str, value: int, words: str) -> None:
    extra = lambda writer: writer.add_uint32(key, value)  # noqa: E731
    assert words in refusal(write(tmp_path / "model.gguf", *tiny("llama"), extra=extra))


@pytest.mark.real
def test_smollm2() -> None:
    from outrider.models.sources import pull

    path = pull("smollm2-135m")
    start = time.process_time()  # what others do on the machine does not count
    file = GGUFFile(path)
    assert time.process_time() - start < 0.7
    tensors = dict(file.tensors())
    assert len(tensors) == 272
    assert tensors["model.embed_tokens.weight"].kind == "Q8_0"
    assert tensors["model.layers.29.mlp.down_proj.weight"].kind == "Q4_1"
    assert file.config()["num_kv_heads"] == 3
