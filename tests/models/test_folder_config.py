"""A plain Llama's folder is opened without the slow half of transformers, and is what transformers makes of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoTokenizer

from outrider.models import tokenizer as tokenizers
from outrider.models.folder_config import plain_llama

SLOW = (
    "transformers.activations",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "torch._dynamo",
)
OPEN = f"""
import sys
from outrider import LLM, SamplingParams
with LLM(sys.argv[1], draft="none", threads=1, cache_memory=0.05) as llm:
    llm.chat([{{"role": "user", "content": "hello"}}], SamplingParams(max_tokens=2))
print([name for name in {SLOW} if name in sys.modules])
"""


@pytest.fixture
def said(tiny_folder):
    return json.loads((tiny_folder / "config.json").read_text())


def test_it_is_what_transformers_reads(said, tiny_folder):
    theirs = AutoConfig.from_pretrained(tiny_folder, local_files_only=True)
    found = plain_llama(said)
    assert found is not None
    assert {key: getattr(theirs, key) for key in said if key not in ("dtype", "transformers_version")} == {
        key: value for key, value in said.items() if key not in ("dtype", "transformers_version")
    }
    assert vars(found) == said


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
        {"rope_parameters": None},
        {"hidden_size": "32"},
        {"hidden_size": 34},
        {"num_attention_heads": True},
        {"num_hidden_layers": -1},
        {"rms_norm_eps": float("nan")},
        {"quantization_config": {"quant_method": "awq"}},
        {"auto_map": {"AutoConfig": "mine.Config"}},
        {"sliding_window": 4},
        {"eos_token_id": [1, 2]},
        {"attention_dropout": "0"},
        {"initializer_range": 2.0},
        {"architectures": ["LlamaForSequenceClassification"]},
    ],
    ids=str,
)
def test_anything_else_is_transformers_to_read(said, change):
    assert plain_llama({**said, **change}) is None


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rms_norm_eps", "model_type"])
def test_what_is_to_be_filled_in_is_transformers_to_fill_in(said, key):
    assert plain_llama({name: value for name, value in said.items() if name != key}) is None


def test_the_tokenizer_is_the_one_that_transformers_chooses(tiny_folder):
    ours = tokenizers.from_folder(tiny_folder)
    theirs = AutoTokenizer.from_pretrained(tiny_folder, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.init_kwargs == theirs.init_kwargs
    text = "the red fox <|im_end|> and žlutý kůň\n\t 123"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_start_imports_no_more_than_it_needs(tiny_folder):
    done = subprocess.run([sys.executable, "-c", OPEN, str(tiny_folder)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
