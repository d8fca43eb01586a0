"""scripts/gpu_price.py runs two checkouts in turns."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from outrider import build

ROOT = Path(build.__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_price.py"


def test_two_checkouts_run_in_turns(tiny_folder, tmp_path):
    (tmp_path / "turns.jsonl").write_text('{"question_id": 1, "category": "c", "turns": ["fox fox"]}\n')
    done = subprocess.run(
        [sys.executable, SCRIPT, "--before", ROOT, "--model", tiny_folder, "--prompts", tmp_path / "turns.jsonl",
         "--device", "cpu", "--dtype", "float32", "--cache-memory", "0.1", "--parts", "chat", "--batches", "1,3",
         "--drafts", "none,ngram", "--tokens", "4", "--rounds", "2", "--output", tmp_path / "out.jsonl"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    every = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sum(line["what"] == "round" for line in every) == 2 * 4  # a run that is cut off has shown some of them
    lines = [line for line in every if line["what"] == "chat"]
    assert [(line["draft"], line["batch"], line["rounds"]) for line in lines] == [
        ("none", 1, 2), ("none", 3, 2), ("ngram", 1, 2), ("ngram", 3, 2),
    ]  # fmt: skip
    assert all(line["now"] > 0 < line["before"] and line["least"] <= line["ratio"] <= line["most"] for line in lines)
    assert all(line["same_texts"] for line in lines)


def test_a_ratio_is_of_one_round():
    """Not of medians: a host that is slow for a round is slow for both."""
    summary = runpy.run_path(str(SCRIPT))["summary"]
    rounds = [{"before": 100.0, "now": 99.0}, {"before": 10.0, "now": 10.2}, {"before": 200.0, "now": 198.0}]
    said = summary(rounds)
    assert (said["before"], said["now"], said["rounds"]) == (100.0, 99.0, 3)
    assert (said["ratio"], said["least"], said["most"]) == (0.99, 0.99, 1.02)
    assert summary([{"now": 5.0}]) == {"now": 5.0, "rounds": 1}


def test_a_checkout_that_does_not_start_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--before", tmp_path, "--model", "none", "--prompts", "none", "--parts", "bulk"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the process of the checkout now ended")
