"""`outrider profile` as a user runs it, and everything that is refused."""

import json
import sys

import pytest

from outrider.bench.costs import Costs, Point
from outrider.bench.profile import Profile
from outrider.bench.profile_plan import DEFAULT, ProfilePlan
from outrider.cli import profile as cli

QUICK = ("--context", 16, "--rows", "1,2,4", "--rounds", 2, "--threads", 1)
WHERE = {"cpu": "a cpu", "cores": 2, "outrider": "0", "commit": None}


def known(base=8.0, slope=1.0, spread=0.0, draft_ms=2.0, **changes):
    passes = tuple(Point(r, base + slope * r, base + slope * r, base + slope * r + spread) for r in DEFAULT.rows)
    drafts = tuple(Point(k, k * draft_ms, k * draft_ms, k * draft_ms) for k in (1, 2))
    values = dict(
        model="m.gguf",
        draft="layer_skip",
        dtype="auto",
        quantize="int4",
        threads=2,
        plan=ProfilePlan(),
        costs=Costs(passes, draft_ms),
        drafts=drafts,
        plain_tokens_per_second=100.0,
        prefill_tokens_per_second=900.4,
        prefill_piece=512,
        weight_bytes=98_400_000,
        kv_bytes_per_token=46_080,
        seconds=12.3,
        machine=WHERE,
    )
    return Profile(**values | changes)


def test_markdown():
    text = cli.markdown(known())
    assert text.startswith(
        "# m.gguf: outrider profile\n\nm.gguf, layer_skip, dtype auto, int4, 2 threads, context 256, "
    )
    assert "| 8 | 16.00 | 16.00–16.00 | 1.78× | 2.00 |" in text
    assert "## The drafter layer_skip" in text
    assert "| 2 | 4.00 | 4.00–4.00 | 2.00 |" in text
    assert "| 0.30 | none | 1.00× |" in text
    assert "- A pass takes about 8.00 + 1.00 × rows ms: one more row costs 1.00 ms, 11 % of a pass of one row." in text
    assert "- A draft of one token pays from an acceptance of 0.33 on." in text
    assert "- The weights take 98.4 MB as stored." in text
    assert "- Keys and values take 46.1 kB per token." in text
    assert "Careful" not in text


def test_what_is_not_known_is_not_said():
    facts = " ".join(cli.facts(known(weight_bytes=None, kv_bytes_per_token=None)))
    assert "weights" not in facts
    assert "Keys" not in facts


def test_the_share_of_the_arithmetic_peak():
    assert any("at 900 tokens/s in chunks of 512." in fact for fact in cli.facts(known()))
    text = "at 900 tokens/s in chunks of 512 (arithmetic 71 % of peak)."
    assert any(text in fact for fact in cli.facts(known(arithmetic=0.7123)))


def test_a_busy_machine_is_told():
    assert any("so the machine was busy" in fact for fact in cli.facts(known(spread=20.0)))


def test_a_cheap_drafter_needs_no_table_and_a_silent_one_is_named():
    assert [table.title for table in cli.tables(known(draft_ms=0.001))] == ["The target", "What pays"]
    silent = known(drafts=(), costs=Costs(known().costs.passes))
    assert "The drafter layer_skip drafted nothing here; drafting is taken to be free." in cli.facts(silent)


def test_the_longest_measured_draft_may_not_be_the_best():
    (table,) = [table for table in cli.tables(known(slope=0.0, draft_ms=0.0)) if table.title == "What pays"]
    assert table.rows[-1] == ("0.95", "31 or more", "16.13×")


def test_when_a_draft_never_pays():
    assert "A draft of one token never pays here." in cli.facts(known(base=0.0, slope=9.0))


def test_draw(tmp_path):
    cli.draw(known(), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_the_command(outrider, tiny_folder, tmp_path):
    done = outrider("profile", "-m", tiny_folder, "-d", "layer_skip", *QUICK, "--output", tmp_path / "a" / "b")
    assert done.code == 0, done.err
    assert "ms per pass" in done.out
    assert "best draft length" in done.out
    assert "written to" in done.err
    assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {"profile.json", "profile.md", "profile.png"}
    said = json.loads((tmp_path / "a" / "b" / "profile.json").read_text())
    assert [point["size"] for point in said["costs"]["passes"]] == [1, 2, 4]
    assert {"line", "break_even", "spread", "draft_ms"} <= said["costs"].keys()
    assert [choice["acceptance"] for choice in said["best"]] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]


def test_json_is_one_object(outrider, tiny_folder):
    done = outrider("profile", "-m", tiny_folder, *QUICK, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["model"] == tiny_folder.name
    assert said["plan"] == {"context": 16, "rows": [1, 2, 4], "rounds": 2}


def test_without_matplotlib_the_rest_is_written(outrider, tiny_folder, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = outrider("profile", "-m", tiny_folder, *QUICK, "--output", tmp_path)
    assert done.code == 0
    assert "pip install '.[plot]' in a checkout" in done.err
    assert {file.name for file in tmp_path.iterdir()} == {"profile.json", "profile.md"}


def test_ctrl_c(outrider, tiny_folder, monkeypatch):
    def interrupted(llm, plan, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.bench.profile.profile", interrupted)
    done = outrider("profile", "-m", tiny_folder, *QUICK)
    assert (done.code, done.out, done.err) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--rows", "1,two"], "rows must be whole numbers with commas between them, not '1,two'"),
        (["--rows", "0,1"], "rows must be at least 1, not 0"),
        (["--rows", "-3"], "rows must be at least 1, not -3"),
        (["--context", "0"], "context must be at least 1, not 0"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--context", "many"], "valid integer"),
        (["--draft", "magic"], "unknown drafter 'magic'"),
        (["--quantize", "int3"], "unknown quantize 'int3'"),
        (["--threads", "-1"], "threads must be at least 0"),
        (["--output", "/proc/nowhere"], "cannot write to the output folder"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_loaded(outrider, args, why):
    done = outrider("profile", *args)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("args", [("--context", 1020), ("--rows", "1,2000")])
def test_more_than_the_model_holds(outrider, tiny_folder, args):
    done = outrider("profile", "-m", tiny_folder, *args)
    assert (done.code, done.out) == (2, "")
    assert "more than the 1024 that the model can hold" in done.err
