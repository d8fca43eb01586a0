"""`outrider bench --device ... --batches ...`: a real run of a tiny model beside transformers, cut off, and refused."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench import batches, batches_figures, batches_report
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
        single=3, peer_groups=1, rounds=2, max_tokens=4, warm_up=60.0, seconds=0.0, timeout=60.0, load_timeout=60.0,
        load_at_once=0, threads=1, seed=0, own={}, python=dict.fromkeys(TABLE, sys.executable), output=output,
    )  # fmt: skip
    return batches.BatchPlan(**given | changes)


class FakeCalls(batches.BatchRunner):
    """The engines' processes run fake_calls.py: seconds and texts by the mode."""

    def _wanted(self):
        return [wanted._replace(path=FAKE) for wanted in super()._wanted()]


def run_fake(made, told=None):
    saved = []
    tell = (lambda text: None) if told is None else told.append
    runner = FakeCalls(made, made.output, lambda *_: None, lambda lines: saved.append(len(lines)), tell)
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
    assert [(each["mode"], each["calls"]) for each in report["warm_up"]][:2] == [("none", 2), ("ngram", 2)]
    assert all(each["first_batch"] == 1 and each["load_s"] > 0 for each in report["warm_up"])
    assert {"none", "ngram"} < {line["mode"] for line in report["loaded"] if line.get("cache_memory", 0) >= 1}
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
    assert len(set(warm)) == len(warm) == 5 * 1 * 2  # each mode and batch above 1 once, two calls
    for mode in ("none", "ngram", "eagle"):  # what a user would have: nothing before the first request
        first = next(line for line in lines if line["what"] in ("warm-up", "turn") and line["mode"] == mode)
        assert (first["what"], first["batch"], first["round"], first["cold"]) == ("turn", 1, 1, False)


def test_warm_up_is_bounded_and_cold_calls_are_marked(tiny_folder, tmp_path):
    lines, _ = run_fake(plan(tiny_folder, tmp_path, warm_up=0.0))
    assert not [line for line in lines if line["what"] == "warm-up"]
    report = batches_figures.assemble(lines, "command")
    assert all(bool(row["cold"]) == (row["batch"] == 2) for row in report["rows"])
    assert any("without warm-up" in note for note in batches_report.notes(report))


def test_no_turn_begins_after_the_time(tiny_folder, tmp_path):
    lines, _ = run_fake(plan(tiny_folder, tmp_path, seconds=1e-9))
    assert not [line for line in lines if line["what"] == "turn"]
    assert lines[-1] == {"what": "note", "text": "0 of 10 turns: the time was up"}


def test_a_mode_that_dies_or_fails_leaves_the_others(tiny_folder, tmp_path):
    lines, _ = run_fake(plan(tiny_folder, tmp_path, drafts=("ngram", "medusa", "block"), rounds=1))
    report = batches_figures.assemble(lines, "command")
    assert {row["mode"] for row in report["rows"]} == {"none", "ngram"}
    said = " ".join(batches_report.notes(report))
    assert "outrider medusa: ended (exit code 3)" in said
    assert "outrider block, 1 at once: RuntimeError: out of luck (3 times)" in said


def test_plain_decoding_must_load(tiny_folder, tmp_path):
    broken = plan(tiny_folder, tmp_path, own={"cache_memory": 0.25})  # fake_calls.py fails on loading then
    with pytest.raises(OutriderError, match=r"plain decoding, .*no memory"):
        run_fake(broken)


def test_groups_are_spread_over_the_prompts(tiny_folder, tmp_path):
    made = plan(tiny_folder, tmp_path, single=3)
    assert [[p.id for p in group.prompts] for group in batches.groups(made, 1)] == [["p0"], ["p1"], ["p3"]]
    assert [[p.id for p in group.prompts] for group in batches.groups(made, 2)] == [["p0", "p1"], ["p2", "p3"]]
    assert [len(group.prompts) for group in batches.groups(made, 8)] == [8]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process from /proc")
def test_modes_load_beside_each_other_and_ready_ones_stand_still(tiny_folder, tmp_path, monkeypatch):
    """`eagle` and `ngram` are loaded only once both have begun to; `none`, loaded before, is stopped by then."""
    monkeypatch.setenv("FAKE_CALLS_LOADING", str(tmp_path))
    states, told = [], []

    class Watched(FakeCalls):
        def _take_in(self, wanted, found, own):
            super()._take_in(wanted, found, own)
            pids = [int((tmp_path / mode.mode).read_text()) for mode in self._modes if mode.mode in loaded(self)]
            states.append([until_stopped(pid) for pid in pids])

    made = plan(tiny_folder, tmp_path, drafts=("ngram", "eagle"), load_at_once=3)
    runner = Watched(made, made.output, lambda *_: None, lambda lines: None, told.append)
    try:
        runner.run()
    finally:
        runner.close()
    assert states == [["T"], ["T"] * 2, ["T"] * 3]
    assert sorted(line.split(":")[0] for line in told) == ["outrider eagle", "outrider ngram", "outrider none"]
    assert all("loaded in" in line for line in told)
    report = batches_figures.assemble(runner.lines, "command")
    assert [row["mode"] for row in report["rows"]] == ["none", "ngram", "eagle"] * 2  # as asked for, not as loaded


def loaded(runner):
    return [line["mode"] for line in runner.lines if line["what"] == "loaded"]


def until_stopped(pid):
    """T: stopped by a signal (man proc)."""
    deadline = time.monotonic() + 20
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return state


def test_one_at_a_time_they_would_wait_for_ever(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CALLS_LOADING", str(tmp_path))
    made = plan(tiny_folder, tmp_path, drafts=("ngram", "eagle"), load_at_once=1, load_timeout=3.0)
    lines, _ = run_fake(made)
    lost = {line["mode"]: line["error"] for line in lines if line["what"] == "lost"}
    assert lost == {"ngram": "not loaded within 3 s; stopped"}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("missing", "not installed: fake_engine"),
        ("broken", "did not load: ValueError: no such model"),
        ("slow", "not loaded within 5 s; stopped"),
    ],
)
def test_a_mode_that_does_not_load_is_told_and_the_rest_goes_on(tiny_folder, tmp_path, how, why):
    told, bad = [], f"draft_model:model={how}"
    made = plan(tiny_folder, tmp_path, drafts=(bad, "ngram"), rounds=1, load_at_once=2, load_timeout=5.0)
    lines, _ = run_fake(made, told)
    report = batches_figures.assemble(lines, "command")
    assert {row["mode"] for row in report["rows"]} == {"none", "ngram"}
    assert f"outrider {bad}: {why}" in told
    assert f"outrider {bad}: {why}" in batches_report.notes(report)


def bench(*args):
    """As a user starts it, in a process of its own."""
    command = [sys.executable, "-m", "outrider", "bench", "--batches", "1", "--rounds", "1", "--max-tokens", "4"]
    return subprocess.Popen(
        [*command, "--threads", "1", "--single", "1", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def test_the_exit_code_says_that_a_mode_did_not_load(tiny_folder, tiny_stranger, prompts, tmp_path):
    head = f"eagle:head={tmp_path / 'nowhere'}"
    drafts = ("--draft", head, "--draft", "ngram", "--load-at-once", 3)
    process = bench("--model", tiny_folder, "--prompts", prompts, *drafts, "-o", tmp_path / "o")
    shown, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "outrider ngram: loaded in" in said
    assert "there is no folder" in said
    assert "there is no folder" in shown
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert [row["mode"] for row in report["rows"]] == ["none", "ngram"]
    assert [line["mode"] for line in report["lost"]] == [head]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process groups from /proc")
@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [("loading", signal.SIGINT, 130), ("measuring", signal.SIGINT, 130), ("measuring", signal.SIGKILL, -9)],
)
def test_no_worker_outlives_the_benchmark(tiny_folder, prompts, tmp_path, moment, number, code):
    """Ctrl-C keeps what was measured; where it is killed, those that stand still get the signal of an orphan."""
    out = tmp_path / "o"
    args = ("--draft", "ngram", "--draft", "layer_skip:layers=2", "--load-at-once", 3, "--rounds", 100_000, "-o", out)
    process = bench("--model", tiny_folder, "--prompts", prompts, *args)
    try:
        wait_for(lambda: len(workers(process.pid)) == 3 and (moment == "loading" or measured(out)))
        pids = workers(process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
    assert number == signal.SIGKILL or (out / "report.md").exists()


def measured(out):
    return (out / "turns.jsonl").exists() and '"what": "turn"' in (out / "turns.jsonl").read_text()


def workers(parent):
    """Processes that it has started."""
    found = [Path(f"/proc/{parent}/task/{parent}/children")]
    return [int(pid) for file in found if file.exists() for pid in file.read_text().split()]


def wait_for(what):
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


HEADER = {"what": "settings", "machine": {}, "gpu": None}


def turn(mode, seconds, text="a", round=1, group=0, batch=1, engine="outrider", **more):
    return {
        "what": "turn", "engine": engine, "mode": mode, "batch": batch, "group": group, "round": round, "cold": False,
        "tokens": 10 * batch, "seconds": seconds, "prompts": [f"p{group}"] * batch, "texts": [text] * batch, **more,
    }  # fmt: skip


def rows_of(*turns):
    loaded = dict.fromkeys((each["engine"], each["mode"]) for each in turns)
    lines = [{"what": "loaded", "engine": engine, "mode": mode, "seconds": 1.0} for engine, mode in loaded]
    header = {**HEADER, "modes": [" ".join(mode) for mode in loaded]}
    report = batches_figures.assemble([header, *lines, *turns], "command")
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


def test_the_first_request_and_the_least_prompt_are_told():
    """Rounds have medians, but a single slow request, the first one above all, is not hidden by them."""
    seconds = {("p0", 1): 5.0, ("p0", 2): 0.5, ("p0", 3): 0.5, ("p1", 1): 0.9, ("p1", 2): 0.9, ("p1", 3): 0.9}
    made = []
    for (prompt, number), took in seconds.items():
        group = int(prompt[1])
        made += [turn("none", 1.0, round=number, group=group), turn("auto", took, round=number, group=group)]
    found = rows_of(*made)["outrider", "auto", 1]["one_at_a_time"]
    assert found["first_request"] == {"seconds": 5.0, "plain_seconds": 1.0, "ratio": 0.2}
    assert found["least_prompt"] == {"ratio": pytest.approx(1 / 0.9), "prompt": "p1"}
    assert found["least_request"] == {"ratio": 0.2, "prompt": "p0", "round": 1}
    assert (found["slower_prompts"], found["prompts"], found["slower_requests"], found["requests"]) == (0, 2, 1, 6)


def test_what_a_call_takes_beside_writing_is_its_prompts():
    made = [turn("none", took, round=n, batch=4, writing_s=0.5) for n, took in enumerate((0.6, 0.7, 0.9))]
    assert rows_of(*made)["outrider", "none", 4]["reading_ms"] == pytest.approx(200.0)
    assert rows_of(turn("none", 1.0))["outrider", "none", 1]["reading_ms"] is None


def test_batches_have_no_least_prompt():
    row = rows_of(turn("none", 1.0, batch=4), turn("auto", 0.5, batch=4))["outrider", "auto", 4]
    assert row["one_at_a_time"] is None


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
        (("--batches", "1", "--load-timeout", "0"), "load_timeout must be more than 0 seconds"),
        (("--batches", "1", "--load-at-once", "-1"), "load_at_once must be at least 0"),
        (("--load-timeout", "5"), "--load-timeout is for a GPU and for batches"),
        (("--warm-up", "5"), "--warm-up is for a GPU and for batches"),
        (("--parts", "8b"), "--parts is for a GPU and for batches"),
    ],
)
def test_refused(args, why, tiny_folder, tmp_path, capsys):
    assert main(["bench", "--model", str(tiny_folder), "--output", str(tmp_path / "o"), *args]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
