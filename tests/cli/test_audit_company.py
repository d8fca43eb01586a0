"""`outrider audit --company`: the command around the company audit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import company_breaks as breaks
import pytest

from outrider import build

ARGUMENTS = "--company --batch 1,3 --chunk 24 --longest 80 --max-tokens 4 --raw -d none -d ngram"
WORDS = ("fox and fox and fox", "one two one two", "the sea", "a star")
PROMPTS = [part for words in WORDS for part in ("--prompt", words)]


def test_the_command(outrider, tiny_folder, tmp_path):
    done = outrider("audit", "-m", tiny_folder, *ARGUMENTS.split(), *PROMPTS, "--output", tmp_path / "report.json")
    assert done.code == 0, done.err
    assert "ngram, temperature 0.8: prompts, batch of 3, chunks of 512" in done.out
    assert "not covered: " in done.out
    assert "0 texts differ" in done.out
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["passed"] is True
    assert said["plan"]["batches"] == [1, 3]
    assert said["groups"]["prompts"] == 4
    assert said["machine"]["python"]
    assert {"texts", "tokens", "differing", "first", "other_statistics"} <= said["variants"][0].keys()


def test_the_command_fails_with_1(outrider, tiny_folder, monkeypatch):
    honest = build.load

    def load(name, where):
        loaded = honest(name, where)
        return replace(loaded, model=breaks.CountsItsNeighbours(loaded.model))

    monkeypatch.setattr(build, "load", load)
    done = outrider("audit", "-m", tiny_folder, *ARGUMENTS.split(), *PROMPTS)
    assert done.code == 1
    assert "FAILED" in done.out
    assert "parts at token" in done.out
    said = json.loads(outrider("audit", "-m", tiny_folder, *ARGUMENTS.split(), *PROMPTS, "--json").out)
    assert said["passed"] is False


def test_spec_bench_files_are_read(outrider, tiny_folder, tmp_path):
    lines = [json.dumps({"question_id": n, "category": "c", "turns": [f"fox\n{n}", "more"]}) for n in range(8)]
    (tmp_path / "half.jsonl").write_text("\n".join(lines))
    args = (*ARGUMENTS.split(), "--prompts", tmp_path / "half.jsonl", "--runs", 1, "--limit", 2)
    said = json.loads(outrider("audit", "-m", tiny_folder, *args, "--json").out)
    assert said["groups"]["prompts"] == 2
    assert said["plan"]["runs"] == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--quick"], "--company"),
        (["--batch", "4"], "--company"),
        (["--longest", "0"], "--company"),
        (["--company", "--samples", "5"], "law"),
        (["--company", "--batch", "4;16"], "commas"),
        (["--company", "--batch", "0"], "batches"),
        (["--company", "--group", "short"], "boundaries"),
        (["--company", "--max-tokens", "0"], "at least 1"),
        (["--company", "--limit", "0"], "--limit"),
    ],
)
def test_what_would_have_no_effect_is_refused(outrider, args, says):
    done = outrider("audit", "-m", "no/such/model", *args)
    assert done.code == 2
    assert says in done.err


def test_the_script_needs_neither_the_packages_of_the_command_line_nor_those_of_the_server(tiny_folder, tmp_path):
    """As on a GPU machine that has torch, triton and transformers."""
    root = Path(build.__file__).parents[2]
    code = (
        "import runpy, sys\n"
        "for name in ('typer', 'rich', 'pydantic', 'fastapi', 'gguf', 'uvicorn'): sys.modules[name] = None\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    (tmp_path / "half.jsonl").write_text('{"question_id": 1, "category": "c", "turns": ["fox fox fox"]}')
    args = "--raw --batches 1,2 --chunks 24 --longest 40 --max-tokens 3 --runs 1 --temperatures 0,0.8 -d none -d ngram"
    done = subprocess.run(
        [sys.executable, "-c", code, root / "scripts" / "audit_company.py", "--model", tiny_folder, *args.split(),
         "--prompts", tmp_path / "half.jsonl", "--references", tmp_path / "texts", "--output", tmp_path / "out.json"],
        env={"PYTHONPATH": str(root / "src"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ngram, temperature 0.8: prompts, batch of 2, chunks of 512, run 1: 0 of 2 texts differ" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is True
    assert (tmp_path / "texts").read_text().count("\n") >= 2
