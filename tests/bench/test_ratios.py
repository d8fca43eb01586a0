"""Speed, speed-up, interval and the void rule, on runs whose answers are known."""

import math

import numpy as np
import pytest

from outrider.bench.ratios import ALL, differing, interval, prompt_speeds, rate, ratio, summarise


def run(mode="none", prompt="a", round=1, speed=10.0, kind="chat", engine="outrider", ids=(1, 2), tokens=21, **more):
    """A run that decodes `speed` tokens per second after its first token."""
    said = {"tokens": tokens, "first": 1, "decode_s": (tokens - 1) / speed, "ids": list(ids), "text": "x", "error": ""}
    return said | {"engine": engine, "mode": mode, "prompt": prompt, "round": round, "kind": kind, "stats": {}} | more


ENGINES = {"outrider": {"plain": "none", "modes": ("ngram",)}, "peer": {"plain": "plain", "modes": ("lookup",)}}


def rows(runs):
    return {(row["engine"], row["mode"], row["kind"]): row for row in summarise(runs, ENGINES, "outrider")["modes"]}


def test_the_first_piece_is_prefill():
    assert rate(run(speed=40.0)) == pytest.approx(40)
    assert rate(run(first=5, decode_s=2.0)) == pytest.approx(8)


@pytest.mark.parametrize("change", [{"error": "broke"}, {"tokens": 8}, {"decode_s": 0.0}, {"tokens": 21, "first": 20}])
def test_a_run_that_says_nothing_about_speed(change):
    assert rate(run() | change) is None


def test_ratio_is_the_geometric_mean_over_prompts():
    base = [run(prompt=p, speed=10) for p in "ab"]
    fast = [run("ngram", "a", speed=20), run("ngram", "b", speed=80)]
    assert ratio(fast, base)["value"] == pytest.approx(4)
    assert ratio(fast, base)["prompts"] == 2


def test_rounds_are_paired_and_prompts_weigh_the_same():
    base = [run(prompt="a", round=1, speed=10), run(prompt="a", round=2, speed=20), run(prompt="b", speed=10)]
    fast = [run("ngram", "a", 1, 20), run("ngram", "a", 2, 40), run("ngram", "b", 1, 10)]
    assert ratio(fast, base)["value"] == pytest.approx(math.sqrt(2))


def test_a_ratio_needs_pairs():
    assert ratio([run("ngram", "a")], [run(prompt="b")]) is None
    assert ratio([run("ngram", "a", error="broke")], [run(prompt="a")]) is None


def test_interval_of_equal_values_is_a_point():
    assert interval([[0.5, 0.5], [0.5]]) == pytest.approx((0.5, 0.5))


def test_interval_agrees_with_the_normal_one():
    values = np.random.default_rng(1).normal(2.0, 0.5, 400)
    low, high = interval([[value] for value in values])
    half = 1.96 * values.std() / math.sqrt(400)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_interval_covers_the_truth_as_often_as_it_says():
    dice = np.random.default_rng(2)
    bounds = [interval([[v] for v in dice.normal(0, 1, 25)], seed) for seed in range(200)]
    assert 0.87 <= np.mean([low <= 0 <= high for low, high in bounds]) <= 0.99


@pytest.mark.parametrize("values", [[], [[0.5]], [[0.4, 0.6]]])
def test_one_prompt_has_no_interval(values):
    assert interval(values) is None


def test_one_different_output_makes_the_speed_up_void():
    runs = [run(prompt=p, round=r) for p in "abc" for r in (1, 2)]
    runs += [run("ngram", p, r, speed=30) for p in "abc" for r in (1, 2)]
    assert not rows(runs)["outrider", "ngram", ALL]["void"]
    runs[-1]["ids"] = [1, 3]
    row = rows(runs)["outrider", "ngram", ALL]
    assert (row["void"], row["differ"], row["compared"]) == (True, 1, 3)


def test_void_by_kind_and_overall():
    runs = [run(prompt=p, kind=k) for p, k in ("ax", "by")] + [run("ngram", p, kind=k) for p, k in ("ax", "by")]
    runs[-1]["ids"] = [9]
    found = rows(runs)
    assert [found["outrider", "ngram", kind]["void"] for kind in ("x", "y", ALL)] == [False, True, True]


def test_engines_that_give_text_are_compared_by_text():
    base, same, other = run(ids=(), text="yes"), run("m", text="yes"), run("m", text="no")
    base["ids"] = same["ids"] = other["ids"] = None
    assert differing([same], [base]) == (0, 1)
    assert differing([other], [base]) == (1, 1)


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_a_prompt_that_differs_in_any_round_differs(wrong):
    base = [run(round=number) for number in (1, 2, 3)]
    runs = [run("m", round=number, ids=(9,) if number == wrong else (1, 2)) for number in (1, 2, 3)]
    assert differing(runs, base) == (1, 1)


def test_a_short_run_still_counts_for_equality():
    assert differing([run("m", tokens=2, ids=[1])], [run(tokens=2, ids=[2])]) == (1, 1)


def test_failed_runs_are_not_compared():
    assert differing([run("m", error="x")], [run()]) == (0, 0)
    assert rows([run(), run("ngram", error="x")])["outrider", "ngram", ALL]["errors"] == 1


def test_our_plain_against_a_peer():
    runs = [run(speed=30), run("plain", engine="peer", speed=10, text="x"), run("lookup", engine="peer", speed=5)]
    against = summarise(runs, ENGINES, "outrider")["against"]
    assert [(row["peer"], row["kind"]) for row in against] == [("peer", "chat"), ("peer", ALL)]
    assert against[1]["ratio"]["value"] == pytest.approx(3)
    assert (against[1]["same_text"], against[1]["compared"]) == (1, 1)


def test_acceptance_adds_up():
    stats = [
        {"drafted": 10, "accepted": 9, "tokens": 12, "steps": 3},
        {"drafted": 30, "accepted": 1, "tokens": 4, "steps": 5},
    ]
    row = rows([run(), *(run("ngram", round=n, stats=said) for n, said in enumerate(stats))])["outrider", "ngram", ALL]
    assert (row["acceptance_rate"], row["tokens_per_step"]) == (0.25, 2.0)


def test_no_runs_no_rows():
    assert summarise([], ENGINES, "outrider") == {"modes": [], "against": [], "best": []}


def test_our_fastest_mode_is_compared_with_the_peers_fastest():
    """A mode of ours whose text differs is none; a peer's counts all the same."""
    peers = [run("plain", speed=5, engine="peer"), run("lookup", speed=8, engine="peer", ids=(3,))]
    exact = [run(), run("ngram", speed=40), *peers]
    wrong = [run(), run("ngram", speed=40, ids=(9,)), *peers]
    (best,) = summarise(exact, ENGINES, "outrider")["best"]
    assert (best["mode"], best["its_mode"], best["ratio"]["value"]) == ("ngram", "lookup", pytest.approx(5))
    (best,) = summarise(wrong, ENGINES, "outrider")["best"]
    assert (best["mode"], best["its_mode"], best["ratio"]["value"]) == ("none", "lookup", pytest.approx(10 / 8))


def test_the_speed_of_prompts():
    read = [run(engine=name, prompt_tokens=100, prefill_s=took) for name, took in (("outrider", 0.1), ("peer", 0.3))]
    ours, peer = prompt_speeds(read, "outrider")
    assert (ours["tokens_per_second"], ours["ratio"]) == (pytest.approx(1000), None)
    assert peer["ratio"]["value"] == pytest.approx(3)
    assert prompt_speeds([read[0] | {"error": "broke"}], "outrider") == []


def test_the_speed_of_prompts_with_another_engine_of_ours():
    took = {"outrider": 0.2, "outrider-int8": 0.1, "peer": 0.3}
    read = [run(engine=name, prompt_tokens=100, prefill_s=seconds) for name, seconds in took.items()]
    ours, int8, peer = prompt_speeds(read, "outrider", ["outrider-int8"])
    assert ours["also"]["outrider-int8"]["value"] == pytest.approx(2)
    assert int8["also"] == {"outrider-int8": None}
    assert (peer["ratio"]["value"], peer["also"]["outrider-int8"]["value"]) == (pytest.approx(1.5), pytest.approx(3))
