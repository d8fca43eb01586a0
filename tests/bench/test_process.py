"""The protocol between runner and worker, with a worker that misbehaves."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from outrider.bench import process
from outrider.bench.process import EngineProcess, Missing, WorkerError

FAKE = Path(__file__).with_name("fake.py")


@pytest.fixture
def start(tmp_path):
    workers = []

    def start(*modes, engine=FAKE):
        worker = EngineProcess(sys.executable, engine, {"modes": modes}, 1, tmp_path / "worker.log")
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()


def job(mode="plain", max_tokens=4):
    return {"mode": mode, "ids": [5], "max_tokens": max_tokens}


def test_a_worker_loads_and_answers(start, tmp_path):
    worker = start("plain")
    said = worker.ready(20)
    assert said["versions"] == {"fake_engine": "unknown"}
    assert said["load_s"] >= 0
    for tokens in (3, 5):
        assert worker.ask(job(max_tokens=tokens), 20)["ids"] == list(range(5, 5 + tokens))
    assert "talks too" in (tmp_path / "worker.log").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process from /proc")
def test_between_jobs_it_is_stopped_so_that_it_takes_no_time_from_others(start):
    worker = start("plain")
    worker.ready(20)
    for _ in range(2):
        (pid,) = worker.ask(job("who"), 20)["ids"]
        deadline = time.monotonic() + 20
        while state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(pid) == "T"


def state(pid):
    """T: stopped by a signal (man proc)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_error_leaves_it_usable(start):
    worker = start("plain")
    worker.ready(20)
    assert worker.ask(job("raise"), 20) == {"error": "RuntimeError: not today"}
    assert "ids" in worker.ask(job(), 20)


def test_a_crash_is_told_with_its_last_words(start):
    worker = start("plain")
    worker.ready(20)
    with pytest.raises(WorkerError, match=r"ended \(exit code 3\): terrible things happened"):
        worker.ask(job("crash"), 20)
    with pytest.raises(WorkerError, match="has ended"):
        worker.ask(job(), 20)


def test_a_hang_is_ended(start):
    worker = start("plain")
    worker.ready(20)
    with pytest.raises(WorkerError, match=r"no answer within 0\.2 s"):
        worker.ask(job("hang"), 0.2)
    assert worker._process.returncode is not None


@pytest.mark.parametrize(
    ("mode", "error", "why"),
    [
        ("no-package", Missing, "fake_engine"),
        ("bad-load", WorkerError, "did not load: ValueError: no such model"),
        ("dead-load", WorkerError, r"ended \(exit code 7\)"),
    ],
)
def test_one_that_does_not_load(start, mode, error, why):
    with pytest.raises(error, match=why):
        start(mode).ready(20)


def test_an_engine_that_cannot_be_read(start, tmp_path):
    with pytest.raises(WorkerError, match="No such file"):
        start("plain", engine=tmp_path / "none.py").ready(20)


@pytest.mark.parametrize("nonsense", ["hello", "[1]", "{"])
def test_garbage_on_stdout(start, tmp_path, monkeypatch, nonsense):
    script = tmp_path / "garbage.py"
    script.write_text(f"print({nonsense!r}, flush=True)\nimport time\ntime.sleep(60)")
    monkeypatch.setattr(process, "WORKER", script)
    with pytest.raises(WorkerError, match="not a JSON object"):
        start("plain").ready(20)


def test_it_stands_still_between_jobs(start, tmp_path):
    """Some engines wait in a loop; that must not be measured with the others."""
    engine = tmp_path / "spinning.py"
    spin = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"
    engine.write_text(FAKE.read_text() + spin)
    worker = start("plain", engine=engine)
    worker.ready(20)
    used = cpu_seconds(worker._process.pid)
    time.sleep(0.3)
    assert cpu_seconds(worker._process.pid) - used < 0.05
    assert "ids" in worker.ask(job(), 20)


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_closing_twice_is_fine(start):
    worker = start("plain")
    worker.close()
    worker.close()


def test_worker_needs_nothing_of_ours():
    """A peer's interpreter has no outrider."""
    for path in (process.WORKER, *(process.WORKER.parent / "peers").glob("*.py")):
        if path.name not in ("outrider.py", "__init__.py"):
            assert "import outrider" not in path.read_text()
            assert "from outrider" not in path.read_text()


def test_threads_are_told_to_every_library():
    said = process._environment(3, calls=False)
    assert {said[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"3"}
    assert json.dumps(said)


def test_texts_become_tokens_on_all_cores_where_that_is_measured():
    assert process._environment(1, calls=True)["TOKENIZERS_PARALLELISM"] == "true"
    assert process._environment(1, calls=False)["TOKENIZERS_PARALLELISM"] == "false"
