"""A folder on disk becomes a model, or one line says why not."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from ggufs import write_llama
from safetensors.torch import load_file, save_file
from tiny import CPU, OWN, reference

from outrider.core.errors import OutriderError
from outrider.models.base import Feed
from outrider.models.llama import Llama
from outrider.models.load import LoadOptions, _model, _opened, fetch, load
from outrider.models.transformers import TransformersModel
from outrider.models.weights import FolderStore

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture
def folder(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    return tmp_path


def logits(model, text=TEXT):
    (output,) = model.forward([Feed(0, text)])
    model.free(0)
    return output.logits[0]


def expected(model):
    with torch.inference_mode():
        return model(torch.tensor([TEXT])).logits[0, -1]


def test_a_gpu_without_its_kernels_says_what_is_lost(folder, monkeypatch):
    """Plain torch sums in an order that depends on the rows of a pass."""
    made, notes = load(str(folder), CPU).model, []
    monkeypatch.setitem(sys.modules, "outrider.models.cuda.model", None)
    on_gpu = replace(CPU, device=torch.device("cuda"))
    assert isinstance(_model(made.config, made.weights, on_gpu, notes), Llama)
    (note,) = notes
    assert "slower, and whose texts may differ with the batch and the drafter" in note


def change(path, **values):
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(said | values))


@pytest.mark.parametrize("shards", ["5GB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("kind", [*OWN, "gpt2", "opt", "gemma3"])
def test_a_saved_model_gives_its_own_logits(tmp_path, kind, shards):
    model = reference(kind)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards != "5GB")
    loaded = load(str(tmp_path), CPU)
    assert isinstance(loaded.model, Llama if kind in OWN else TransformersModel)
    torch.testing.assert_close(logits(loaded.model), expected(model), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", [dict(mlp_bias=True), dict(hidden_act="gelu")], ids=str)
def test_what_our_forward_does_not_compute_goes_through_transformers(tmp_path, changes):
    model = reference("llama", **changes)
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), CPU).model
    assert isinstance(loaded, TransformersModel)
    torch.testing.assert_close(logits(loaded), expected(model), atol=2e-4, rtol=1e-4)


def test_qwen_with_a_window_in_some_layers_goes_through_transformers(tmp_path):
    changes = dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    model = reference("qwen2", **changes)
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), CPU).model
    torch.testing.assert_close(logits(loaded), expected(model), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype(folder, dtype):
    model = load(str(folder), LoadOptions(CPU.device, dtype, CPU.memory)).model
    assert model.dtype == dtype
    assert model.weights.norm.dtype == dtype
    given = logits(model)
    assert given.dtype == torch.float32
    cosine = torch.nn.functional.cosine_similarity(given, logits(load(str(folder), CPU).model), 0)
    assert cosine > 0.99


def test_a_folder_without_a_tokenizer_loads(folder):
    assert load(str(folder), CPU).tokenizer is None


def test_the_ends_are_those_of_both_configs(folder):
    change(folder / "config.json", eos_token_id=3)
    assert load(str(folder), CPU).ends == {3}
    change(folder / "generation_config.json", eos_token_id=[5, 7])
    assert load(str(folder), CPU).ends == {3, 5, 7}


class TestReadAhead:
    """For a device the weights are in memory before it is needed: what becomes of the file then counts no more."""

    def check(self, path, name):
        usual = logits(load(name, CPU).model)
        ahead, later = _opened(name, CPU, ahead=True), fetch(name, CPU)
        with path.open("r+b") as file:  # in place: the file is mapped
            file.seek(-1000, 2)
            file.write(bytes(1000))
        assert torch.equal(logits(ahead().model), usual)
        assert not torch.equal(logits(later().model), usual), "on a CPU it would take the memory twice"

    def test_of_a_folder(self, folder):
        self.check(folder / "model.safetensors", str(folder))

    def test_of_a_gguf_file(self, tmp_path):
        path = write_llama(tmp_path / "model.gguf")
        self.check(path, str(path))

    def test_only_what_is_fetched_for_a_device(self, folder, monkeypatch):
        read, elsewhere = [], replace(CPU, device=torch.device("meta"))
        monkeypatch.setattr(FolderStore, "read_ahead", lambda store: read.append(store))
        load(str(folder), elsewhere)
        assert not read
        fetch(str(folder), elsewhere)
        assert len(read) == 1


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(OutriderError, match=r"no config\.json"):
        load(str(folder), CPU)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "reason"), [('{"model_type": ', "not valid JSON"), ("[]", "not a JSON object")])
def test_broken_json(folder, name, text, reason):
    (folder / name).write_text(text)
    with pytest.raises(OutriderError, match=reason):
        load(str(folder), CPU)


def test_pickled_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(OutriderError, match="pickled weights are not loaded"):
        load(str(folder), CPU)


def test_a_missing_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(OutriderError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(folder), CPU)


def test_a_truncated_file(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(OutriderError, match="cannot be read"):
        load(str(folder), CPU)


def test_an_unknown_architecture(folder):
    change(folder / "config.json", model_type="teapot", architectures=["TeapotForCausalLM"])
    with pytest.raises(OutriderError, match="not a model that can be run"):
        load(str(folder), CPU)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_depend_on_the_length_are_left_to_transformers(folder, kind):
    from transformers import AutoConfig

    from outrider.models.load import _is_own

    config = AutoConfig.from_pretrained(folder)
    assert _is_own(config)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    assert not _is_own(config)


def test_a_broken_config_value(folder):
    change(folder / "config.json", hidden_size="wide")
    with pytest.raises(OutriderError, match="not a model that can be run"):
        load(str(folder), CPU)


def test_weights_of_other_sizes_than_the_config_says_are_refused(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["num_key_value_heads"] = 1
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(OutriderError, match=r"k_proj.weight has shape \(16, 32\) but .* says \(8, 32\)"):
        load(str(tmp_path), CPU)
