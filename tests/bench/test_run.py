"""The whole benchmark with a fake engine: turns, failures that do not stop the others, Ctrl-C."""

import pytest

from outrider.bench import report
from outrider.bench.run import run


def quiet(what, done, total):
    pass


def spoken(outcome, plan):
    said = report.assemble(plan, outcome, "outrider bench")
    return said, report.markdown(said)


def modes(outcome):
    return outcome.engines["fake"]["modes"]


@pytest.mark.parametrize("one_process", [False, True])
def test_every_mode_takes_its_turn_at_every_prompt(make_plan, one_process):
    plan = make_plan("fast", "other", rounds=2, one_process=one_process)
    outcome = run(plan, quiet)
    turns = [(run.prompt, run.round) for run in outcome.runs]
    assert turns == [turn for p in ("chat-1", "chat-2") for turn in [(p, 1)] * 3 + [(p, 2)] * 3]
    orders = [tuple(r.mode for r in outcome.runs[n : n + 3]) for n in range(0, 12, 3)]
    assert all(sorted(order) == ["fast", "other", "plain"] for order in orders)
    assert len(set(orders)) > 1
    assert modes(outcome) == {"plain": "ok", "fast": "ok", "other": "ok"}


def test_the_seed_decides_the_order(make_plan):
    orders = [[r.mode for r in run(make_plan("a", "b", seed=seed), quiet).runs] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_numbers_come_out(make_plan):
    plan = make_plan("fast", "wrong")
    said, text = spoken(run(plan, quiet), plan)
    found = {row["mode"]: row for row in said["summary"]["modes"] if row["kind"] == "all"}
    assert found["plain"]["tokens_per_second"] == pytest.approx(15)
    assert found["fast"]["ratio"]["value"] == pytest.approx(2)
    assert found["wrong"]["void"]
    assert "| fake | wrong | 30.0 | ~~2.00×~~ void (2 of 2 differ) |" in text


def test_settings_of_an_engine_of_ours_reach_it(make_plan):
    """Dense weights have no activations to round: so this engine refuses the tiny model, and ours runs it."""
    outcome = run(make_plan(engines=("outrider", "outrider-int8"), limit=1), quiet)
    assert outcome.engines["outrider"]["modes"]["none"] == "ok"
    assert "activations" in outcome.engines["outrider-int8"]["modes"]["none"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("crash", "ended (exit code 3)"),
        ("raise", "RuntimeError: not today"),
        ("nothing", "answered without what was asked for"),
        ("bad-load", "failed: did not load: ValueError"),
        ("no-package", "missing: pip install fake"),
    ],
)
def test_a_bad_mode_is_reported_and_the_rest_goes_on(make_plan, bad, why):
    plan = make_plan(bad, "fast")
    outcome = run(plan, quiet)
    said, text = spoken(outcome, plan)
    assert why in modes(outcome)[bad]
    assert why in text
    assert len([r for r in outcome.runs if r.mode in ("plain", "fast") and not r.error]) == 4
    assert [row["mode"] for row in said["summary"]["modes"] if row["kind"] == "all" and row["ratio"]] == ["fast"]


def test_a_hang_is_timed_out_and_the_rest_goes_on(make_plan):
    outcome = run(make_plan("hang", "fast", timeout=1.0), quiet)
    assert "no answer within 1 s" in modes(outcome)["hang"]
    assert [r.mode for r in outcome.runs if r.mode == "hang"] == []
    assert len(outcome.runs) == 4


def test_a_shared_process_takes_all_its_modes_with_it(make_plan):
    outcome = run(make_plan("crash", one_process=True), quiet)
    assert "exit code 3" in modes(outcome)["crash"]
    assert modes(outcome)["plain"] == "stopped with its process"


def test_without_its_plain_an_engine_is_left_out(make_plan):
    outcome = run(make_plan("bad-load", one_process=True), quiet)
    assert set(modes(outcome)) == {"plain", "bad-load"}
    assert outcome.runs == []


@pytest.mark.parametrize("moment", ["loading", "warming", "chat-2"])
def test_ctrl_c_keeps_what_was_measured(make_plan, moment):
    plan = make_plan("fast")

    def interrupt(what, done, total):
        if what.startswith(moment):
            raise KeyboardInterrupt

    outcome = run(plan, interrupt)
    said, text = spoken(outcome, plan)
    assert outcome.interrupted
    assert [r.prompt for r in outcome.runs] == (["chat-1", "chat-1"] if moment == "chat-2" else [])
    assert "partial report" in text
    report.write(said, plan.output)
    assert (plan.output / "report.md").read_text() == text


def test_gguf_readers_are_skipped_for_a_folder(make_plan):
    outcome = run(make_plan(engines=["fake", "llama.cpp:plain"]), quiet)
    assert outcome.engines["llama.cpp"]["modes"] == {"plain": "skipped: it reads GGUF files only"}
    assert len(outcome.runs) == 2
