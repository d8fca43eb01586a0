"""`outrider bench` as a user runs it: a real run of a tiny model, and everything that is refused."""

import io
import json
import sys

import pytest

from outrider.bench.peers import TABLE, choose
from outrider.cli import main
from outrider.core.errors import OutriderError


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ["the red fox and the blue fox", "count the stars, one, two, three"]
    lines = [{"question_id": n, "category": "copy", "turns": [text]} for n, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.fixture
def outrider(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


def test_a_real_run(outrider, tiny_folder, prompts, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {tiny_folder}\npace: false\n")  # what is drafted does not depend on the clock
    args = ("--prompts", prompts, "--rounds", 2, "--max-tokens", 24, "--threads", 1, "--output", tmp_path / "out")
    drafts = ("--draft", "ngram:min_n=1", "--draft", "layer_skip:layers=2")
    code, out, _ = outrider("bench", "--config", file, *args, *drafts)
    assert code == 0
    assert "Decoding speed over all prompts" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["runs"]) == 2 * 2 * 3
    assert not any(run["error"] for run in report["runs"])
    assert report["engines"]["outrider"]["modes"] == {"none": "ok", "ngram:min_n=1": "ok", "layer_skip:layers=2": "ok"}
    by_mode = {row["mode"]: row for row in report["summary"]["modes"] if row["kind"] == "all"}
    assert not any(row["void"] for row in by_mode.values())  # float32: the text is the same
    assert by_mode["layer_skip:layers=2"]["acceptance_rate"] is not None
    assert by_mode["none"]["tokens_per_step"] == 1
    assert "## Our drafters by kind" in (tmp_path / "out" / "report.md").read_text()


def test_a_missing_peer_is_listed_and_the_rest_goes_on(outrider, tiny_folder, prompts, tmp_path):
    nothing = tmp_path / "python"
    nothing.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # an interpreter without packages
    nothing.chmod(0o755)
    args = ("--prompts", prompts, "--limit", 1, "--rounds", 1, "--max-tokens", 12, "--threads", 1)
    engines = ("--engine", "outrider", "--engine", "vllm", "--python", f"vllm={nothing}", "--output", tmp_path / "out")
    code, out, _ = outrider("bench", "--model", tiny_folder, *args, *engines)
    assert code == 0
    assert "vllm: missing: pip install vllm" in out
    assert "auto" in out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            ["--engine", "gpt"],
            "unknown engine 'gpt'; known: outrider, outrider-int8, transformers, llama.cpp, llama.cpp-native, "
            "ik_llama.cpp, openvino, vllm, all",
        ),
        (["--engine", "vllm:medusa"], "vllm has no mode 'medusa'; it has: plain, ngram, draft-model"),
        (["--engine", "vllm:draft-model"], "needs a draft model"),
        (["--engine", "outrider:ngram"], "named with --draft"),
        (["--kind", "poems"], "unknown kind 'poems'"),
        (["--draft", "magic"], "unknown drafter 'magic'"),
        (["--prompts", "no-such-file.jsonl"], "cannot be read"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--max-tokens", "1"], "max_tokens must be at least 2"),
        (["--threads", "-1"], "threads must be at least 0"),
        (["--engine", "transformers", "--draft", "ngram"], "draft: only for our own engine; add --engine outrider"),
        (["--engine", "transformers", "--dtype", "float32"], "dtype: only for our own engine"),
        (["--timeout", "0"], "timeout must be more than 0"),
        (["--python", "vllm"], "ENGINE=PATH"),
        (["--python", "vllm=/no/such/python"], "not a program"),
        (["--output", "/proc/nowhere"], "cannot write to the output folder"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(outrider, tmp_path, monkeypatch, args, why):
    monkeypatch.chdir(tmp_path)
    code, out, err = outrider("bench", *args)
    assert (code, out) == (2, "")
    assert why in err
    assert err.count("\n") == 1


def test_all_engines_are_chosen_with_what_they_can_do():
    chosen = {peer.name: peer.modes for peer in choose(["all"], ["ngram", "none"], None)}
    assert list(chosen) == [name for name in TABLE if name != "outrider-int8"]  # ours is among them once
    assert chosen["outrider"] == ("ngram",)
    assert chosen["transformers"] == ("prompt-lookup",)
    assert chosen["vllm"] == ("ngram",)
    assert {p.name: p.modes for p in choose(["all"], [], "small")}["vllm"] == ("ngram", "draft-model")


def test_our_engine_with_8_bits_is_chosen_by_its_name():
    ours, int8 = choose(["outrider", "outrider-int8"], ["ngram"], None)
    assert (ours.modes, ours.own) == (("ngram",), {})
    assert (int8.plain, int8.modes, int8.own) == ("none", (), {"activations": "int8"})


def test_modes_of_one_engine_add_up():
    (peer,) = choose(["llama.cpp:ngram-mod", "llama.cpp:plain,ngram-simple"], [], None)
    assert peer.modes == ("ngram-mod", "ngram-simple")


def test_an_unknown_mode_among_known_ones():
    with pytest.raises(OutriderError, match="has no mode ''"):
        choose(["llama.cpp:"], [], None)
