import json
import subprocess
import sys

import pytest

from outrider.cli.options import read_config
from outrider.core.errors import OutriderError
from outrider.settings import Settings, from_mapping


def write(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_says_settings_sampling_and_prefix(tmp_path):
    said = read_config(
        write(
            tmp_path,
            "model: ./m\ndraft: ngram:length=3\nmax_batch: 4\n"
            "sampling: {max_tokens: 9, temperature: 0.5, stop: [a]}\nquery_prefix: 'Short: '\n",
        )
    )
    assert said.settings == Settings(model="./m", draft="ngram:length=3", max_batch=4)
    assert (said.params.max_tokens, said.params.temperature, said.params.stop) == (9, 0.5, ("a",))
    assert said.query_prefix == "Short: "


def test_json_is_yaml_too(tmp_path):
    assert read_config(write(tmp_path, json.dumps({"model": "x", "threads": 2}))).settings.threads == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("modell: x", "unknown setting 'modell'; did you mean 'model'? known: model, draft, backend"),
        ("zebra: x", "unknown setting 'zebra'; known: model, draft, backend"),
        ("max_tokens: 9", "unknown setting 'max_tokens'; write it below sampling, as `sampling: {max_tokens: ...}`"),
        ("sampling: {heat: 1}", "unknown sampling option 'heat'; known: max_tokens"),
        ("sampling: {processors: []}", "unknown sampling option 'processors'"),
        ("sampling: 3", "sampling must hold keys and values"),
        ("sampling: {temperature: -1}", "temperature must be"),
        ("query_prefix: 3", "query_prefix must be text"),
        ("model: 3", "model must be text, not 3"),
        ("threads: many", "threads must be a whole number"),
        ("threads: true", "threads must be a whole number"),
        ("pace: 1", "pace must be true or false"),
        ("cache_memory: a lot", "cache_memory must be a number"),
        ("cache_memory: .inf", "cache_memory must be at most 65536, not inf"),
        ("cache_memory: 1.0e+300", "cache_memory must be at most 65536"),
        ("backend: cluster", "unknown backend 'cluster'; known: local, vllm"),
        ("tensor_parallel_size: 2", "tensor_parallel_size is for the backend vllm"),
        ("engine_args: {max_model_len: 3}", "engine_args is for the backend vllm"),
        ("backend: vllm\ntensor_parallel_size: 0", "tensor_parallel_size must be at least 1"),
        ("backend: vllm\nengine_args: [1]", "engine_args must be keys and values"),
        ("draft: none\nspeculative_config: {method: ngram}", "leave out one of them"),
        ("speculative_config: '{'", "speculative_config is not JSON"),
        ("- 1", "must hold keys and values"),
        ("1: 2", "must hold keys and values"),
        ("", "must hold keys and values"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, reason):
    with pytest.raises(OutriderError) as refused:
        read_config(write(tmp_path, text))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(OutriderError, match="No such file"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff")
    with pytest.raises(OutriderError, match="not UTF-8"):
        read_config(tmp_path / "latin.yaml")


def test_vllms_words_are_our_drafter_on_our_engine_and_stay_as_they_are_on_vllm():
    words = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 5}
    assert from_mapping({"speculative_config": json.dumps(words)}) == Settings(draft="ngram:length=7,max_n=5")
    there = from_mapping({"backend": "vllm", "speculative_config": json.dumps({"method": "mtp", "x": 1})})
    assert there.speculative_config == {"method": "mtp", "x": 1}


def test_settings_are_read_without_torch():
    code = "import sys, outrider.settings as s; s.from_mapping({'speculative_config': {'method': 'ngram'}})"
    done = subprocess.run([sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True)
    assert done.stdout == b"False\n", done.stderr
