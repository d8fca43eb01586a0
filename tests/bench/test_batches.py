"""`outrider bench --device ... --batches ...`: a real run of a tiny model beside transformers, cut off, and refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench import batches, batches_report
from outrider.bench.peers import TABLE
from outrider.bench.workloads import BenchPrompt
from outrider.cli import main
from outrider.core.errors import OutriderError

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_calls.py")
# not pydantic, which newer versions of typer need
LACKING = ("fastapi", "gguf", "uvicorn", "llguidance", "matplotlib", "ray", "httpx", "prometheus_client")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ["the red fox and the blue fox", "count the stars, one, two, three", "the end of the story is the end"]
    lines = [{"question_id": n, "category": "kind", "turns": [text]} for n, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def plan(folder, output, **changes):
    prompts = tuple(BenchPrompt(f"p{n}", "kind", f"text {n}") for n in range(5))
    given = dict(
        model=str(folder), device="cpu", drafts=("ngram",), peers=(), head=None, batches=(1, 2), prompts=prompts,
        single=3, peer_groups=1, rounds=2, max_tokens=4, warm_up=60.0, seconds=0.0, timeout=60.0, threads=1, seed=0,
        own={}, python=dict.fromkeys(TABLE, sys.executable), output=output,
    )  # fmt: skip
    return batches.BatchPlan(**given | changes)


class FakeCalls(batches.BatchRunner):
    """The engines' processes run fake_calls.py: seconds and texts by the mode."""

    def _wanted(self):
        for engine, mode, _, peer in super()._wanted():
            yield engine, mode, FAKE, peer


def run_fake(made):
    saved = []
    runner = FakeCalls(made, made.output, lambda *_: None, lambda lines: saved.append(len(lines)))
    try:
        runner.run()
    finally:
        runner.close()
    return runner.lines, saved


def test_a_real_run_without_packages_that_a_bare_gpu_machine_lacks(tiny_folder, prompts, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(f"import sys\nfor name in {LACKING}:\n    sys.modules[name] = None\n")
    args = ["--model", tiny_folder, "--prompts", prompts, "--batches", "1,2", "--single", "2", "--rounds", "2"]
    args += ["--max-tokens", "6", "--threads", "1", "--draft", "ngram", "--draft", "layer_skip:layers=2"]
    args += ["--engine", "transformers", "--device", "cpu", "-o", tmp_path / "o"]
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "bench", *map(str, args)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{bare}{os.pathsep}{ROOT / 'src'}"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Whole calls, prompts included" in done.stdout
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert [(row["batch"], row["engine"], row["mode"]) for row in report["rows"]] == [
        (batch, *mode)
        for batch in (1, 2)
        for mode in (
            ("outrider", "none"), ("outrider", "ngram"), ("outrider", "layer_skip:layers=2"), ("transformers", "plain"),
        )
    ]  # fmt: skip
    ours = [row for row in report["rows"] if row["engine"] == "outrider"]
    assert all(row["equal"] == row["compared"] == 4 and row["as_alone"] == row["known_alone"] == 4 for row in ours)
    assert all(row["ratio"]["least"] <= row["ratio"]["value"] <= row["ratio"]["most"] for row in report["rows"])
    assert all(row["rounds"] == 2 and not row["cold"] for row in report["rows"])
    same = {(t["prompts"][0], t["texts"][0]) for t in report["turns"] if t["batch"] == 1}
    assert len(same) == 2  # transformers in float32 writes the same tokens
    assert [(each["mode"], each["calls"]) for each in report["warm_up"]][:2] == [("none", 4), ("ngram", 4)]
    lines = [json.loads(line) for line in (tmp_path / "o" / "turns.jsonl").read_text().splitlines()]
    assert sum(line["what"] == "turn" for line in lines) == len(report["turns"]) == 2 * (3 * 3 + 3)


def test_modes_take_turns_and_what_was_measured_is_saved_after_each(tiny_folder, tmp_path):
    peer = replace(TABLE["transformers"], modes=("prompt-lookup",))
    lines, saved = run_fake(plan(tiny_folder, tmp_path, drafts=("ngram", "eagle"), peers=(peer,)))
    turns = [line for line in lines if line["what"] == "turn"]
    keys = [(turn["round"], turn["batch"], turn["group"]) for turn in turns]
    assert keys == sorted(keys)
    assert len(saved) == len(set(keys)) == 2 * (3 + 2)
    for key in set(keys):
        own = [turn["mode"] for turn, each in zip(turns, keys, strict=True) if each == key]
        peers = ["plain", "prompt-lookup"] if key[2] == 0 else []  # of each batch one call of a round
        assert sorted(own) == sorted(["none", "ngram", "eagle", *peers])
    warm = [(line["mode"], line["batch"], line["call"]) for line in lines if line["what"] == "warm-up"]
    assert len(set(warm)) == len(warm) == 5 * 2 * 2  # each mode and batch once, two calls


def test_warm_up_is_bounded_and_cold_calls_are_marked(tiny_folder, tmp_path):
    lines, _ = run_fake(plan(tiny_folder, tmp_path, warm_up=0.0))
    assert not [line for line in lines if line["what"] == "warm-up"]
    report = batches_report.assemble(lines, "command")
    assert all(row["cold"] for row in report["rows"])
    assert any("without warm-up" in note for note in batches_report.notes(report))


def test_no_turn_begins_after_the_time(tiny_folder, tmp_path):
    lines, _ = run_fake(plan(tiny_folder, tmp_path, seconds=1e-9))
    assert not [line for line in lines if line["what"] == "turn"]
    assert lines[-1] == {"what": "note", "text": "0 of 10 turns: the time was up"}


def test_a_mode_that_dies_or_fails_leaves_the_others(tiny_folder, tmp_path):
    lines, _ = run_fake(plan(tiny_folder, tmp_path, drafts=("ngram", "medusa", "block"), rounds=1))
    report = batches_report.assemble(lines, "command")
    assert {row["mode"] for row in report["rows"]} == {"none", "ngram"}
    said = " ".join(batches_report.notes(report))
    assert "outrider medusa: ended (exit code 3)" in said
    assert "outrider block, 1 at once: RuntimeError: out of luck" in said


def test_plain_decoding_must_load(tiny_folder, tmp_path):
    broken = plan(tiny_folder, tmp_path, own={"cache_memory": 0.25})  # fake_calls.py fails on loading then
    with pytest.raises(OutriderError, match=r"plain decoding, .*no memory"):
        run_fake(broken)


def test_groups_are_spread_over_the_prompts(tiny_folder, tmp_path):
    made = plan(tiny_folder, tmp_path, single=3)
    assert [[p.id for p in group.prompts] for group in batches.groups(made, 1)] == [["p0"], ["p1"], ["p3"]]
    assert [[p.id for p in group.prompts] for group in batches.groups(made, 2)] == [["p0", "p1"], ["p2", "p3"]]
    assert [len(group.prompts) for group in batches.groups(made, 8)] == [8]


HEADER = {"what": "settings", "machine": {}, "gpu": None}


def turn(mode, seconds, text="a", round=1, group=0, batch=1, engine="outrider", **more):
    return {
        "what": "turn", "engine": engine, "mode": mode, "batch": batch, "group": group, "round": round, "cold": False,
        "tokens": 10 * batch, "seconds": seconds, "prompts": [f"p{group}"] * batch, "texts": [text] * batch, **more,
    }  # fmt: skip


def rows_of(*turns):
    loaded = dict.fromkeys((each["engine"], each["mode"]) for each in turns)
    lines = [{"what": "loaded", "engine": engine, "mode": mode, "seconds": 1.0} for engine, mode in loaded]
    report = batches_report.assemble([HEADER, *lines, *turns], "command")
    return {(row["engine"], row["mode"], row["batch"]): row for row in report["rows"]}


def test_a_ratio_is_of_one_round_with_its_spread():
    """Not of medians: a host that is slow for a round is slow for both."""
    rounds = [(1.0, 0.5), (10.0, 9.0), (2.0, 1.0)]
    made = [turn(m, s, round=n) for n, pair in enumerate(rounds) for m, s in zip(("none", "auto"), pair, strict=True)]
    row = rows_of(*made)["outrider", "auto", 1]
    assert row["ratio"] == {"value": 2.0, "least": pytest.approx(10 / 9), "most": 2.0}
    assert row["tokens_per_second"] == 10.0


def test_slow_calls_are_counted():
    made = [turn("none", 1.0, group=0), turn("none", 1.0, group=1)]
    row = rows_of(*made, turn("auto", 0.5, group=0), turn("auto", 1.1, group=1))["outrider", "auto", 1]
    assert (row["least_call"], row["slower_calls"], row["calls"]) == (pytest.approx(1 / 1.1), 1, 2)


def test_texts_that_differ_are_counted():
    made = [turn("none", 1.0, "a"), turn("auto", 1.0, "b"), turn("none", 1.0, "c", batch=2)]
    found = rows_of(*made, turn("auto", 1.0, "c", batch=2))
    assert (found["outrider", "auto", 1]["equal"], found["outrider", "auto", 1]["compared"]) == (0, 1)
    assert (found["outrider", "auto", 2]["equal"], found["outrider", "auto", 2]["compared"]) == (2, 2)
    assert (found["outrider", "none", 2]["as_alone"], found["outrider", "none", 2]["known_alone"]) == (0, 2)


def test_a_peer_is_compared_with_our_speed_and_with_its_own_texts():
    theirs = [turn("plain", 4.0, "x", engine="vllm"), turn("ngram", 1.0, "x", engine="vllm")]
    row = rows_of(turn("none", 2.0, "a"), *theirs)["vllm", "ngram", 1]
    assert (row["ratio"]["value"], row["equal"], row["as_alone"]) == (2.0, 1, 1)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--device", "cuda"), "torch sees no GPU here"),
        (("--batches", "1,x"), "--batches takes whole numbers"),
        (("--batches", "0"), "batch must be at least 1"),
        (("--batches", "1,1"), "a batch is given twice"),
        (("--batches", "1", "--parts", "bulk"), "the part bulk measures a GPU"),
        (("--batches", "1", "--parts", "speed"), "unknown part 'speed'"),
        (("--batches", "1", "--engine", "openvino"), "answers no batches"),
        (("--batches", "1", "--peer-head", "x"), "add --engine vllm"),
        (("--batches", "1", "--prompt-tokens", "64"), "--prompt-tokens is not for whole calls"),
        (("--batches", "1", "--draft", "nobody"), "nobody"),
        (("--warm-up", "5"), "--warm-up is for a GPU and for batches"),
        (("--parts", "8b"), "--parts is for a GPU and for batches"),
    ],
)
def test_refused(args, why, tiny_folder, tmp_path, capsys):
    assert main(["bench", "--model", str(tiny_folder), "--output", str(tmp_path / "o"), *args]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
