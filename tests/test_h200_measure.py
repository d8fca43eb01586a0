"""scripts/h200_measure.sh on a CPU with a tiny model: stages in turn, what is kept, bad input."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "h200_measure.sh"
LINE = {"question_id": 1, "category": "copy", "turns": ["the red fox and the blue fox"]}


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(LINE))
    return file


def start(*args, **settings):
    own = {"PYTHON": sys.executable, "DEVICE": "cpu", "DRAFTS": "ngram", "SITE": "", **settings}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **own},
    )  # fmt: skip


def reports(out):
    with tarfile.open(out / "results.tgz") as kept:
        return {name for name in kept.getnames() if name.endswith("report.json")}


def test_a_stage_that_fails_leaves_the_others(tiny_folder, prompts, tmp_path):
    """An 8B shape needs a GPU."""
    out = tmp_path / "out"
    options = "--single 1 --max-tokens 4 --rounds 1 --threads 1"
    process = start("run", tiny_folder, prompts, out, "shape8b", "speed", BENCH_OPTIONS=options)
    shown, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "shape8b: exit 2" in shown
    assert "speed: exit 0" in shown
    assert "--parts is for a GPU" in (out / "shape8b.log").read_text()
    assert "texts equal to plain" in " ".join((out / "speed.log").read_text().split())
    assert reports(out) == {"./speed/report.json"}
    assert {file.name for file in out.iterdir()} == {"shape8b.log", "speed.log", "results.tgz"}


def test_a_run_that_is_ended_keeps_what_it_had(tiny_folder, prompts, tmp_path):
    out = tmp_path / "out"
    options = "--single 1 --max-tokens 4 --rounds 1000000 --seconds 0 --threads 1"
    process = start("run", tiny_folder, prompts, out, "speed", "serve", BENCH_OPTIONS=options)
    try:
        deadline = time.monotonic() + 120
        while not (out / "speed.log").exists() or "ngram: loaded" not in (out / "speed.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "== speed: exit" in shown
    assert "== serve" not in shown  # no stage begins after that
    assert reports(out) == {"./speed/report.json"}


def test_a_file_in_parts(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"0123456789" * 4_000_000)
    process = start("parts", tmp_path / "m.gguf", tmp_path / "p")
    process.communicate(timeout=60)
    assert process.returncode == 0
    parts = sorted((tmp_path / "p").iterdir())
    assert [part.stat().st_size for part in parts] == [33_000_000, 7_000_000]
    assert b"".join(part.read_bytes() for part in parts) == (tmp_path / "m.gguf").read_bytes()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["run"], "run needs MODEL, PROMPTS and OUT"),
        (["run", "{tmp}/none", "{prompts}", "{tmp}/o"], "no model at"),
        (["run", "{model}", "{tmp}/none", "{tmp}/o"], "no prompts at"),
        (["run", "{model}", "{prompts}", "{tmp}/o", "speed", "sped"], "no stage is called sped; known: speed batches"),
        (["run", "{prompts}", "{prompts}", "{tmp}/o"], "is no GGUF file"),
        (["run", "{model}", "{prompts}", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["parts", "{tmp}/none", "{tmp}/p"], "parts needs a FILE"),
    ],
)
def test_bad_input_is_one_line(args, why, tiny_folder, prompts, tmp_path):
    known = {"tmp": tmp_path, "prompts": prompts, "model": tiny_folder}
    process = start(*(arg.format(**known) for arg in args))
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert why in said
    assert said.count("\n") == 1
    assert "== speed" not in shown


def test_without_arguments_it_tells_how_it_is_used():
    process = start()
    shown, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    for stage in ("speed", "batches", "serve", "shape8b", "oracle8b", "eagle8b"):
        assert f"\n  {stage} " in shown
