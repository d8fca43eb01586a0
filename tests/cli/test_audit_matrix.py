"""scripts/audit_matrix.py divides the company audit among processes, and says what was compared and what was not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import build

ROOT = Path(build.__file__).parents[2]
SCRIPT = ROOT / "scripts" / "audit_matrix.py"


def script(*args):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_two_processes_compare_everything_once(tiny_folder, tmp_path):
    lines = [{"question_id": n, "category": "c", "turns": [f"fox {'fox ' * n}and"]} for n in range(5)]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = script(
        "run", tmp_path / "out", "--model", tiny_folder, "--raw", "--device", "cpu", "--dtype", "float32",
        "--prompts", tmp_path / "turns.jsonl", "--processes", 2, "--seconds", 250, "--cache-memory", 0.1,
        "--batches", "64,1", "--chunks", "24", "--longest", 40, "--max-tokens", 3, "--runs", 2,
        "--temperatures", "0.8", "-d", "none", "-d", "ngram",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of which 0 were not begun: none" in done.stdout
    paths = (tmp_path / "out").glob("variants.*")
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    alone = [each for each in found if each["group"] == "prompts" and each["batch"] == 1]
    for draft in ("none", "ngram"):
        for run in (1, 2):
            assert sum(v["texts"] for v in alone if v["draft"] == draft and v["run"] == run) == 5
    assert {each["group"] for each in found} == {"prompts", "boundaries", "long"}
    assert {each["chunk"] for each in found if each["batch"] == 64} == {24, 512}
    texts = [json.loads(line)["key"] for line in (tmp_path / "out" / "references.jsonl").read_text().splitlines()]
    assert len(texts) == len(set(texts)) > 5  # each was written by one process, once


def test_some_shares_of_the_prompts():
    spec = importlib.util.spec_from_file_location("audit_matrix", ROOT / "scripts" / "audit_matrix.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "audit_matrix", module)  # dataclasses look there
        spec.loader.exec_module(module)
        jobs = list(module.comparisons(["none", "ngram"], [4, 1], [24], {"temperatures": [0.0]}, shares=[1, 3]))
    assert [(job.draft, job.plan["batches"], job.plan["share"]) for job in jobs] == [
        (draft, [batch], share)
        for batch, share in ((4, [1, 2]), (1, [1, 4]), (1, [3, 4]))
        for draft in ("none", "ngram")
    ]


def test_status_fails_on_one_text_and_on_a_job_that_failed(tmp_path):
    variant = dict(draft="ngram", group="prompts", temperature=0.0, batch=4, chunk=512, cached=False, run=1, texts=9,
                   tokens=90, differing=0, other_statistics=0, drafted=8, accepted=7)  # fmt: skip
    path, jobs = tmp_path / "variants.00.jsonl", tmp_path / "jobs.jsonl"
    path.write_text(json.dumps(variant) + "\n" + '{"cut": ')
    jobs.write_text("".join(json.dumps({"job": f"job {state}", "state": state}) + "\n" for state in ("begun", "done")))
    done = script("status", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 variants, 9 texts, 90 tokens" in done.stdout
    assert "job begun: not finished" in done.stdout
    path.write_text(json.dumps({**variant, "differing": 1}) + "\n")
    assert script("status", tmp_path).returncode == 1
    path.write_text(json.dumps(variant) + "\n")
    jobs.write_text(json.dumps({"job": "some", "state": "failed: no memory"}) + "\n")
    done = script("status", tmp_path)
    assert done.returncode == 1
    assert "some: failed: no memory" in done.stdout
