"""What is measured on a GPU beside batches, here with a tiny model whose kernels are interpreted: that it runs, writes
the same tokens, and says what the report shows. No time is looked at."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from outrider.bench import gpu, gpu_peaks, gpu_report, gpu_shapes, gpu_speeds
from outrider.bench.gpu_shapes import SHAPES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled, and would be timed"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
CPU = torch.device("cpu")
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """As few repetitions as there can be: kernels take seconds here."""
    monkeypatch.setattr(gpu_speeds, "CALLS", 3)
    monkeypatch.setattr(gpu_speeds, "STARTS", 1)
    monkeypatch.setattr(gpu_speeds, "TIMED_STEPS", 2)
    monkeypatch.setattr(gpu_speeds, "SKIPPED_STEPS", 1)
    monkeypatch.setattr(gpu_speeds, "RUNS", 1)
    monkeypatch.setattr(gpu_peaks.device_ms, "__defaults__", (1, 1))


@pytest.fixture(scope="module")
def model():
    return gpu_shapes.random_llama(SHAPES["tiny"], 1 << 22, CPU, torch.float32)


def test_plain_steps_of_one_and_of_many(model):
    one, three = gpu_speeds.plain_steps(model, 1.0, batches=(1, 3), context=12, tokens=4)
    assert (one["batch"], three["batch"]) == (1, 3)
    for step in (one, three):
        assert step["ms_of_a_step"] == pytest.approx(step["device_ms"] + step["host_ms"])
        assert step["device_ms"] > 0
    assert model.free_pages == model.capacity // model.page  # nothing is left behind
    [table] = gpu_report.tables({"8B shape": {"plain": [one, three]}})
    assert [row[0] for row in table.rows] == ["1", "3"]


def test_the_share_of_the_bandwidth_counts_weights_keys_and_values(model, monkeypatch):
    monkeypatch.setattr(gpu_peaks, "pass_ms", lambda model: 2.0)
    one, three = gpu_speeds.plain_steps(model, 0.5, batches=(1, 3), context=12, tokens=4)
    per_text = 12 * model.bytes_per_token / 2.0 / 1e9 / 0.5
    assert one["share"] == pytest.approx(gpu_peaks.pass_bytes(model) / 2.0 / 1e9 / 0.5 + per_text)
    assert three["share"] == pytest.approx(one["share"] + 2 * per_text)


def test_passes_and_oracle_drafts(model):
    assert [each["rows"] for each in gpu_speeds.passes(model, 1.0, rows_of=(1, 3), context=6)] == [1, 3]
    found = gpu_speeds.oracle(model, cases=((2, 14),))  # more tokens than the timed steps can write
    assert found["batch 2"]["same"]
    assert found["batch 2"]["oracle"]["tokens_per_pass"] > 1
    [table] = gpu_report.tables({"8B shape": {"oracle": found}})
    assert table.rows[0][0] == "batch 2"


@pytest.mark.parametrize(("part", "kept"), [("8b", [{"plain"}, {"plain", "passes"}]), ("8b-oracle", [{"oracle"}])])
def test_a_part_runs_alone(model, monkeypatch, part, kept):
    """What was asked for and nothing else, saved as soon as it is there."""
    found, saved = {}, []
    monkeypatch.setattr(gpu_speeds, "plain_steps", lambda *_: ["plain"])
    monkeypatch.setattr(gpu_speeds, "passes", lambda *_: ["passes"])
    monkeypatch.setattr(gpu_speeds, "oracle", lambda *_: ["oracle"])
    save = lambda: saved.append({*found["8B shape"]} - {"bytes"})  # noqa: E731
    gpu.measure_shape(model, 1.0, [part], found, save, lambda *_: None)
    assert saved == kept


def test_the_cost_of_a_head_in_rounds(monkeypatch, capsys):
    """scripts/round_cost.py with the smallest shape."""
    spec = importlib.util.spec_from_file_location("round_cost", SCRIPTS / "round_cost.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "PART", 1)
    monkeypatch.setattr(script.writer, "PREPARED", script.writer.PREPARED)  # the script's own ends with the test
    args = ["--device", "cpu", "--shape", "tiny", "--batches", "1", "--rounds", "1", "--repeats", "1", "--prompt", "9"]
    monkeypatch.setattr(sys, "argv", ["round_cost.py", *args, "--specs", "eagle:length=2"])
    script.main()
    drafted, ready = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (drafted["draft"], ready["draft"]) == ("eagle:length=2", "eagle:length=2 ready")
    assert drafted["draft_ms"] == pytest.approx(drafted["round_ms"] - ready["round_ms"], abs=1e-3)
