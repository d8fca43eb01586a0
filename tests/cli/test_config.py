"""`--config FILE` and `outrider config check FILE`."""

import json

import pytest

from outrider.settings import Settings


@pytest.fixture
def file(tmp_path, tiny_folder, tiny_draft):
    path = tmp_path / "c.yaml"
    path.write_text(
        f"model: {tiny_folder}\ndraft: draft_model:model={tiny_draft},length=3\npace: false\n"
        "sampling: {max_tokens: 12, ignore_eos: true}\nquery_prefix: 'the '\n"
    )
    return path


def test_generate_does_what_the_file_says(outrider, file, tiny_folder):
    said = json.loads(outrider("generate", "fox", "--config", file, "--json").out)
    assert said["model"] == str(tiny_folder)
    assert len(said["token_ids"]) == 12
    assert said["stats"]["by_drafter"].keys() == {"draft_model"}
    plain = outrider(
        "generate", "the fox", "-m", tiny_folder, "--max-tokens", 12, "--ignore-eos", "--json", "-d", "none"
    )
    assert said["token_ids"] == json.loads(plain.out)["token_ids"]


def test_options_go_over_the_file(outrider, file):
    said = json.loads(outrider("generate", "fox", "-c", file, "--json", "-d", "none", "--max-tokens", 5).out)
    assert (said["draft"], len(said["token_ids"]), said["stats"]["drafted"]) == ("none", 5, 0)
    words = '{"method": "ngram", "num_speculative_tokens": 2}'
    said = json.loads(outrider("generate", "fox", "-c", file, "--json", "--speculative-config", words).out)
    assert said["draft"] == "ngram:length=2"


def test_a_draft_and_vllms_words_at_once(outrider, tiny_folder):
    done = outrider("generate", "fox", "-m", tiny_folder, "-d", "none", "--speculative-config", '{"method": "ngram"}')
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_chat(outrider, file):
    done = outrider("chat", "--config", file, stdin="fox\n/draft\n/stats\n")
    assert done.code == 0, done.err
    assert "draft: draft_model:model=" in done.out
    assert "12 tokens in" in done.out


def test_a_model_that_cannot_chat_continues_the_query(outrider, tmp_path, tiny_mute):
    path = tmp_path / "c.yaml"
    path.write_text(f"generator_model_name: {tiny_mute}\n")
    said = json.loads(outrider("generate", "the sea", "-c", path, "--max-tokens", 6, "--json").out)
    raw = outrider("generate", "the sea", "-m", tiny_mute, "--max-tokens", 6, "--json", "--raw")
    assert said["token_ids"] == json.loads(raw.out)["token_ids"]


def test_check_explains(outrider, file, tiny_folder, tiny_draft):
    done = outrider("config", "check", file)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        f"model:     {tiny_folder} (a folder)",
        "runs on:   our own engine, on cpu, dtype auto",
        f"drafter:   draft_model:model={tiny_draft},length=3 (a folder)",
        "sampling:  greedy, at most 12 tokens, ignore_eos True",
        "prefix:    'the ' before each query",
    ]


def test_check_tells_new_names(outrider, tmp_path, tiny_folder):
    path = tmp_path / "c.yaml"
    path.write_text(f"model_name: {tiny_folder}\nmodel_platform: huggingface\n")
    assert "note: model_name is now generator_model_name" in outrider("config", "check", path).out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model: ./nowhere", "check the path"),
        ("model: nobody-knows-it", "unknown model"),
        ("draft: ouija", "unknown drafter"),
        ("draft: draft_model:model=./nowhere", "check the path"),
        ("colour: red", "unknown setting 'colour'"),
        ("backend: vllm\nquantize: int8", "cannot be chosen on the backend vllm"),
        ("generator_model_name: m\ngenerator_model_platform: openai", "remote service"),
        (
            "generator_model_name: org/m\ngenerator_model_platform_args: {hf_generate_params: {assistant_model: ./no}}",
            "no",
        ),
    ],
)
def test_check_refuses(outrider, tmp_path, text, reason):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    done = outrider("config", "check", path)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert reason in done.err


def test_check_downloads_nothing(outrider, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {Settings().model}\n")
    assert "not here yet" in outrider("config", "check", path).out
    for name in ("meta-llama/Llama-3.1-8B", "hub:meta-llama/Llama-3.1-8B"):
        path.write_text(f"model: {name}\n")
        assert "a hub id" in outrider("config", "check", path).out
