"""`outrider bench matrix`: a real run of a tiny model, resumed, and everything that is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bench import matrix, matrix_report
from outrider.cli import main
from outrider.core.errors import OutriderError
from outrider.core.request import Result
from outrider.core.stats import Stats


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ["the red fox and the blue fox", "count the stars, one, two, three", "the end of the story is the end"]
    lines = [{"question_id": n, "category": f"kind{n % 2}", "turns": [text]} for n, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def plan(folder, prompts, output, **changes):
    given = dict(
        models=(str(folder),), drafts=("ngram", "layer_skip:layers=2"), draft_model=None, batches=(1, 2),
        prompts=matrix.chosen_prompts(prompts, ()), limit=2, rounds=2, max_tokens=8, seed=0,
        where={"device": "cpu", "threads": 1}, output=output,
    )  # fmt: skip
    return matrix.MatrixPlan(**given | changes)


def silent(*_):
    pass


def test_a_real_run_by_the_command(tiny_folder, prompts, tmp_path, capsys):
    args = ["bench", "matrix", "--model", str(tiny_folder), "--prompts", prompts, "--batch", "1,2", "--limit", "1"]
    more = ["--rounds", "2", "--max-tokens", "8", "--threads", "1", "--device", "cpu", "--output", str(tmp_path / "o")]
    assert main([*args, *more]) == 0
    out = capsys.readouterr().out
    assert f"{tiny_folder.name}, over all" in out
    assert "eagle not measured" in out  # no head is shipped for this model
    report = json.loads((tmp_path / "o" / "matrix.json").read_text())
    cells = report["models"][tiny_folder.name]["cells"]
    assert {cell["draft"] for cell in cells} == {"ngram", "history", "layer_skip", "auto"}
    assert {(cell["batch"], cell["kind"]) for cell in cells if cell["draft"] == "auto"} == {
        (1, "kind0"), (1, "kind1"), (1, "all"), (2, "kind0"), (2, "kind1"), (2, "all"), (0, "all"),
    }  # fmt: skip
    assert not any(cell["differ"] for cell in cells)
    assert str(tiny_folder.parent) not in (tmp_path / "o" / "matrix.md").read_text().split("\n\n", 2)[2]
    assert (tmp_path / "o" / "matrix.png").stat().st_size > 1000


def test_with_a_draft_model_it_drafts_alone_and_in_auto(tiny_folder, tiny_draft, prompts, tmp_path):
    asked = plan(tiny_folder, prompts, tmp_path, drafts=(), draft_model=str(tiny_draft))
    assert asked.specs[-2:] == (f"draft_model:model={tiny_draft}", f"auto:model={tiny_draft}")
    assert [matrix.shown(spec) for spec in asked.specs[-2:]] == [
        f"draft_model:model={tiny_draft.name}", f"auto:model={tiny_draft.name}",
    ]  # fmt: skip


def test_groups_have_as_many_prompts_as_run_at_once(tiny_folder, prompts, tmp_path):
    found = matrix.turns(plan(tiny_folder, prompts, tmp_path, batches=(1, 2, 4), limit=4, rounds=1), str(tiny_folder))
    assert [(turn.batch, turn.kind, [p.id for p in turn.prompts]) for turn in found] == [
        (1, "kind0", ["0"]), (1, "kind0", ["2"]), (1, "kind1", ["1"]),
        (2, "kind0", ["0", "2"]), (2, "kind1", ["1", "1"]),
        (4, "kind0", ["0", "2", "0", "2"]), (4, "kind1", ["1", "1", "1", "1"]),
    ]  # fmt: skip


def test_plain_decoding_is_measured_twice_where_that_is_asked_for(tiny_folder, prompts, tmp_path):
    asked = plan(tiny_folder, prompts, tmp_path, drafts=("ngram",), batches=(2,), rounds=1, control=True)
    outcome = matrix.run(asked, silent)
    assert {name for turn in outcome.turns for name in turn["runs"]} == {"none", matrix.CONTROL, "ngram"}
    report = matrix_report.assemble(asked, outcome, "")
    assert any("noise of one turn" in line and "with 2 at once" in line for line in matrix_report.notes(report))


def test_a_run_that_was_stopped_goes_on(tiny_folder, prompts, tmp_path):
    class Stopped(matrix.MatrixRunner):
        def _take(self, turn, engines):
            if len(self.outcome.turns) == 3:
                raise KeyboardInterrupt
            return super()._take(turn, engines)

    asked = plan(tiny_folder, prompts, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Stopped(asked, silent).run()
    file = tmp_path / matrix.TURNS
    file.write_text(file.read_text() + '{"key": ["half')  # the process was killed while it wrote
    first = file.read_text().splitlines()[1:4]
    outcome = matrix.run(asked, silent)
    lines = file.read_text().splitlines()
    assert lines[1:4] == first
    assert [json.loads(line)["key"] for line in lines[1:]] == [
        turn.key for turn in matrix.turns(asked, str(tiny_folder))
    ]
    assert len(outcome.turns) == len(lines) - 1
    again = matrix.run(asked, silent)
    assert again.turns == outcome.turns


def test_other_settings_need_another_folder(tiny_folder, prompts, tmp_path):
    matrix.run(plan(tiny_folder, prompts, tmp_path, rounds=1, batches=(1,)), silent)
    with pytest.raises(OutriderError, match="another max_tokens"):
        matrix.run(plan(tiny_folder, prompts, tmp_path, rounds=1, batches=(1,), max_tokens=9), silent)


@pytest.mark.parametrize("content", ["nonsense\n", "[1]\n", '{"settings": 1}\n{"a": 2}\n'])
def test_a_file_of_something_else_is_refused_and_kept(tiny_folder, prompts, tmp_path, content):
    (tmp_path / matrix.TURNS).write_text(content)
    with pytest.raises(OutriderError, match=r"holds no turns|another"):
        matrix.run(plan(tiny_folder, prompts, tmp_path), silent)
    assert (tmp_path / matrix.TURNS).read_text() == content


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batches": (0,)}, "batch must be at least 1"),
        ({"batches": (1, 1)}, "twice"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"max_tokens": 1}, "max_tokens must be at least 2"),
        ({"drafts": ("nothing",)}, "unknown drafter"),
        ({"drafts": ("grammar",)}, "no prompt has one"),
        ({"where": {"device": "toaster"}}, "unknown device"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(tiny_folder, prompts, tmp_path, changes, why):
    with pytest.raises(OutriderError, match=why):
        plan(tiny_folder, prompts, tmp_path, **changes)


def test_batches_that_are_no_numbers(capsys):
    assert main(["bench", "matrix", "--batch", "1,many"]) == 2
    assert "--batch takes whole numbers" in capsys.readouterr().err


def turn(batch, group, seconds, differ=0, number=1, kind="code"):
    runs = {spec: {"seconds": each, "writing": each / 2, "differ": 0} for spec, each in seconds.items()}
    runs["auto"]["differ"] = differ
    return {"key": ["m", batch, kind, group, number], "runs": runs}


class TestReport:
    def cells(self, turns):
        summary = matrix_report.summarise(turns, "m")
        return summary, {(cell["draft"], cell["batch"], cell["kind"]): cell for cell in summary["cells"]}

    def test_ratios_are_of_the_same_turn(self):
        _, cells = self.cells(
            [turn(1, 0, {"none": 2.0, "ngram": 1.0, "auto": 1.0}), turn(1, 1, {"none": 8.0, "ngram": 8.0, "auto": 4.0})]
        )
        assert cells["auto", 1, "code"]["value"] == pytest.approx(2.0)
        assert cells["ngram", 1, "code"]["value"] == pytest.approx(2**0.5)
        assert cells["ngram", 0, "all"]["value"] == pytest.approx(2**0.5)

    def test_what_is_below_is_marked(self):
        seconds = {"none": 1.0, "ngram": 1.1, "auto": 1.0}
        _, cells = self.cells([turn(1, group, seconds) for group in range(3)])
        assert cells["ngram", 1, "code"]["below"] == "clearly"
        assert cells["auto", 1, "code"]["below"] == ""
        wide = [turn(1, 0, {**seconds, "ngram": 0.8}), turn(1, 1, {**seconds, "ngram": 1.5})]
        assert self.cells(wide)[1]["ngram", 1, "code"]["below"] == "within its interval"

    def test_one_group_has_the_interval_of_its_rounds(self):
        turns = [turn(4, 0, {"none": 1.0, "ngram": s, "auto": 1.0}, number=n) for n, s in enumerate((0.5, 0.6))]
        cell = self.cells(turns)[1]["ngram", 4, "code"]
        assert cell["low"] < cell["value"] < cell["high"]
        assert self.cells(turns[:1])[1]["ngram", 4, "code"]["low"] is None

    def test_no_interval_is_narrower_than_the_noise_of_plain_decoding_against_itself(self):
        seconds = {"none": 1.0, "ngram": 1.1, "auto": 1.0}
        steady = [turn(4, group, {**seconds, matrix.CONTROL: 1.0}) for group in range(2)]
        assert self.cells(steady)[1]["ngram", 4, "code"]["below"] == "clearly"
        noisy = [turn(4, group, {**seconds, matrix.CONTROL: 0.8 + 0.4 * group}) for group in range(2)]
        summary, cells = self.cells(noisy)
        assert summary["noise"][4] == pytest.approx(0.204, abs=0.001)
        assert cells["ngram", 4, "code"]["below"] == "within its interval"
        assert cells["ngram", 4, "code"]["low"] == pytest.approx(
            math.exp(-math.log(1.1) - 1.96 * 0.2042 / 2**0.5), 1e-3
        )
        assert "none again" not in {row["best"] for row in summary["auto"]}

    def test_auto_is_set_against_the_best_of_each_column(self):
        summary, _ = self.cells(
            [
                turn(1, 0, {"none": 1.0, "ngram": 0.5, "eagle": 0.8, "auto": 0.4}),
                turn(1, 0, {"none": 1.0, "ngram": 0.9, "eagle": 0.6, "auto": 0.75}, kind="chat"),
            ]
        )
        against = {(row["batch"], row["kind"]): row for row in summary["auto"]}
        assert (against[1, "code"]["best"], against[1, "chat"]["best"]) == ("ngram", "eagle")
        assert against[1, "code"]["value"] == pytest.approx(1.25)
        assert against[1, "chat"]["value"] == pytest.approx(0.8)

    def test_texts_that_differ_are_counted(self):
        _, cells = self.cells([turn(1, 0, {"none": 1.0, "auto": 0.5}, differ=1)])
        assert cells["auto", 1, "code"]["differ"] == 1


def test_the_script_needs_no_package_that_a_bare_gpu_machine_lacks(tiny_folder, prompts, tmp_path):
    lacking = ("typer", "rich", "pydantic", "fastapi", "gguf", "uvicorn", "llguidance", "matplotlib", "ray")
    script = Path(__file__).parents[2] / "scripts" / "draft_matrix.py"
    args = ["--model", tiny_folder, "--prompts", prompts, "--batch", "1", "--limit", 1, "--rounds", 1, "--threads", 1]
    argv = list(map(str, [script, *args, "--max-tokens", 4, "-d", "auto", "--device", "cpu", "-o", tmp_path / "o"]))
    code = f"import runpy, sys\nfor name in {lacking}:\n    sys.modules[name] = None\nsys.argv = {argv}\n"
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "0 texts differ" in run.stdout
    assert "no matrix.png" in run.stderr


def test_a_text_that_is_not_plain_decodings_is_counted():
    def result(*ids):
        return Result("", list(ids), "length", None, Stats(tokens=len(ids)), [])

    told = matrix._summary(1.0, [result(1, 2), result(3, 4), result(5)], [[1, 2], [3, 9], [5]])
    assert (told["differ"], told["tokens"]) == (1, 5)
