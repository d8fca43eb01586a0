"""`outrider bench --backend local --backend vllm`: the same drafters on both."""

import json
import sys

import pytest

from outrider.bench import plan as plans
from outrider.cli import main
from outrider.core.errors import OutriderError


def make(tmp_path, **given):
    usual = dict(
        model="m",
        engines=[],
        drafts=[],
        prompts=None,
        kinds=[],
        limit=1,
        rounds=1,
        max_tokens=4,
        threads=1,
        seed=0,
        timeout=9.0,
        python=[],
        draft_model=None,
        output=tmp_path / "out",
    )
    return plans.BenchRequest(**{**usual, **given}).plan()


def test_both_have_the_drafters_that_are_asked_for(tmp_path):
    plan = make(tmp_path, backends=["local", "vllm"], drafts=["none", "ngram:length=7"])
    assert {peer.name: peer.modes for peer in plan.peers} == {
        "outrider": ("ngram:length=7",),
        "vllm": ("ngram:length=7",),
    }
    assert plan.speculation["ngram:length=7"]["num_speculative_tokens"] == 7


def test_vllm_alone_and_by_default_with_ngrams(tmp_path):
    plan = make(tmp_path, backends=["vllm"])
    assert [(peer.name, peer.modes) for peer in plan.peers] == [("vllm", ("auto",))]
    assert plan.speculation["auto"]["method"] == "ngram"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"backends": ["cluster"]}, "unknown backend 'cluster'; known: local, vllm"),
        ({"backends": ["local", "vllm"], "drafts": ["layer_skip"]}, "vLLM has no drafter 'layer_skip'"),
        ({"backends": ["vllm"], "own": {"quantize": "int8"}}, "quantize: only for our own engine"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, given, reason):
    with pytest.raises(OutriderError, match=reason):
        make(tmp_path, **given)


def test_vllms_interpreter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTRIDER_VLLM_PYTHON", raising=False)
    assert make(tmp_path).python["vllm"] == sys.executable
    own = tmp_path / ".venv-vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert make(tmp_path).python["vllm"] == str(own)
    assert make(tmp_path, python=[f"vllm={sys.executable}"]).python["vllm"] == sys.executable


def test_a_config_file_says_model_and_drafter(tmp_path, capsys, tiny_folder):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {tiny_folder}\ndraft: ngram:min_n=1\nthreads: 1\n")
    args = ("--kind", "edit", "--limit", 1, "--rounds", 1, "--max-tokens", 4, "--output", tmp_path / "out")
    assert main(["bench", "--config", *map(str, (file, *args))]) == 0
    said = capsys.readouterr().out
    assert "ngram:min_n=1" in said


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("device: cuda", "torch sees no GPU here"),
        ("backend: vllm\nengine_args: {block_size: 16}", "leave engine_args out of the file"),
        ("backend: vllm\ndtype: float32", "leave dtype out of the file"),
    ],
)
def test_what_a_benchmark_cannot_honour_of_a_file_is_refused(tmp_path, capsys, tiny_folder, said, why):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {tiny_folder}\n{said}\n")
    assert main(["bench", "--config", str(file), "--output", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert why in " ".join(told.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("said", "why"),
    [("", "load_timeout must be more than 0"), ("backend: vllm", "--backend is not for whole calls of batches")],
)
def test_a_config_file_goes_with_batches(tmp_path, capsys, tiny_folder, said, why):
    """Our own engine is what batches are measured of; only another backend is refused."""
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {tiny_folder}\n{said}\n")
    args = ("--batches", "1", "--load-timeout", "0", "--output", str(tmp_path / "out"))
    assert main(["bench", "--config", str(file), *args]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_our_own_engine_is_measured_as_the_file_says(tmp_path, capsys, tiny_folder):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {tiny_folder}\nquantize: int8\npace: false\nthreads: 1\nsampling: {{temperature: 0.7}}\n")
    args = ("--kind", "edit", "--limit", 1, "--rounds", 1, "--max-tokens", 8, "--output", tmp_path / "out")
    drafts = ("--draft", "layer_skip:layers=2")
    assert main(["bench", "--config", *map(str, (file, *args, *drafts))]) == 0
    assert "sampling and query_prefix of the file play no part" in " ".join(capsys.readouterr().err.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["settings"]["quantize"], report["settings"]["pace"]) == ("int8", False)
    [drafted] = [run for run in report["runs"] if run["mode"] != "none"]
    assert drafted["stats"]["drafted"] > 0
