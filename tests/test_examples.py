"""The examples run, on models that the test makes."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parents[1]
TEXT = "a good way to learn language is the of and read write it speak every day"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *TEXT.split()]


def save(folder: Path, layers: int) -> Path:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def opt_pair() -> ModuleType:
    spec = spec_from_file_location("opt_pair", ROOT / "examples" / "opt_pair.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("opt")
    return ["--target", str(save(folder / "target", 3)), "--draft", str(save(folder / "draft", 1))]


@pytest.mark.parametrize("luck", [[], ["--temperature", "0.8"], ["--temperature", "0.8", "--seed", "3"]])
def test_opt_pair(opt_pair: ModuleType, pair: list[str], luck: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert opt_pair.main([*pair, *luck, "--prompt", "a good way to learn", "--gamma", "3", "--max-tokens", "20"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a good way to learn")
    for line in ("acceptance", "per step", "plain", "speculative"):
        assert f"\n{line} " in shown
    assert ("same text    yes" in shown) == (luck[:1] == [] or "--seed" in luck)


@pytest.mark.parametrize("name", ["nowhere/at/all", "facebook/opt-350m"])
def test_opt_pair_without_the_model(
    opt_pair: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert opt_pair.main(["--target", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot load {name}: ")


def test_opt_pair_without_a_network(
    opt_pair: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def model_info(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no route to the hub\nand much more")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(opt_pair.HfApi, "model_info", model_info)
    assert opt_pair.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot load facebook/opt-350m: no route to the hub; ")


def test_opt_pair_refuses_a_bad_value(
    opt_pair: ModuleType, pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert opt_pair.main([*pair, "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err
