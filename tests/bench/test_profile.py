"""What the profile concludes from known costs, and what it measures on a tiny model."""

import pytest
from tiny import Markov

from outrider import LLM
from outrider.bench import profile
from outrider.bench.costs import Costs, Point
from outrider.bench.profile import ACCEPTANCES
from outrider.bench.profile_plan import DEFAULT, WRITTEN, ProfilePlan, parse_rows
from outrider.cli.profile import draw, shares, tables
from outrider.core.errors import OutriderError

QUICK = ProfilePlan(context=32, rows=(1, 2, 4), rounds=2)


def costs(curve, draft_ms=0.0):
    return Costs(tuple(Point(rows, ms, ms, ms) for rows, ms in curve.items()), draft_ms)


def straight(base, slope, draft_ms=0.0):
    return costs({rows: base + slope * rows for rows in DEFAULT.rows}, draft_ms)


FREE_ROWS = straight(10.0, 0.0)  # as on a GPU: a pass costs the same whatever it holds
DEAR_ROWS = straight(0.0, 10.0)  # two rows cost two passes


def test_the_speed_up_is_the_formula():
    found = costs({1: 8.0, 2: 10.0, 4: 14.0}, draft_ms=0.5)
    p = 0.7
    assert found.speed_up(p, 3) == pytest.approx((1 - p**4) / (1 - p) * 8.0 / (14.0 + 3 * 0.5))
    assert found.speed_up(p, 2) == pytest.approx((1 - p**3) / (1 - p) * 8.0 / (12.0 + 2 * 0.5))  # 3 rows: between
    assert found.speed_up(1.0, 3) == pytest.approx(4 * 8.0 / 15.5)
    assert found.speed_up(0.0, 1) == pytest.approx(8.0 / 10.5)


def test_where_rows_are_free_the_longest_draft_is_the_best():
    best = FREE_ROWS.best(0.9)
    assert best.length == FREE_ROWS.longest == 31
    assert best.speed_up == pytest.approx((1 - 0.9**32) / 0.1)
    assert FREE_ROWS.break_even == pytest.approx(0.0)


def test_where_rows_cost_a_pass_nothing_pays():
    assert [DEAR_ROWS.best(p).length for p in ACCEPTANCES] == [0] * len(ACCEPTANCES)
    assert DEAR_ROWS.best(0.95).speed_up == 1.0
    assert DEAR_ROWS.break_even is None


def test_the_best_length_grows_with_the_acceptance():
    found = straight(8.0, 1.0)
    lengths = [found.best(p).length for p in ACCEPTANCES]
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] < lengths[-1]
    for p in ACCEPTANCES:
        best = found.best(p)
        assert best.speed_up == max(found.speed_up(p, k) for k in range(1, found.longest + 1))


def test_at_the_break_even_a_draft_of_one_brings_nothing():
    found = straight(8.0, 1.0, draft_ms=2.0)
    assert found.break_even == pytest.approx(3.0 / 9.0)
    assert found.speed_up(found.break_even, 1) == pytest.approx(1.0)


def test_a_drafter_that_costs_makes_drafts_shorter():
    assert straight(8.0, 1.0, draft_ms=1.0).best(0.8).length < straight(8.0, 1.0).best(0.8).length


def test_the_line_goes_through_a_straight_curve():
    line = straight(5.0, 1.5).line
    assert (line.base, line.slope) == pytest.approx((5.0, 1.5))


def test_the_line_is_least_squares():
    line = costs({1: 1.0, 2: 3.0, 3: 2.0}).line
    assert (line.base, line.slope) == pytest.approx((1.0, 0.5))


def test_the_spread_is_that_of_the_typical_size():
    found = Costs((Point(1, 10.0, 9.0, 11.0), Point(2, 10.0, 5.0, 25.0), Point(3, 10.0, 10.0, 10.0)))
    assert found.spread == pytest.approx(0.2)


def test_percentiles():
    samples = profile._Samples()
    for ms in range(11):
        samples.add(3, float(ms))
    assert samples.points() == (Point(3, 5.0, 1.0, 9.0),)


def test_rows_are_sorted_and_begin_with_one_and_two():
    assert ProfilePlan(rows=(8, 4, 8)).rows == (1, 2, 4, 8)
    assert parse_rows("1, 2,16") == (1, 2, 16)


@pytest.mark.parametrize("text", ["", "1,,2", "many", "1;2", "1.5"])
def test_rows_that_are_no_numbers(text):
    with pytest.raises(OutriderError, match="rows must be whole numbers"):
        parse_rows(text)


@pytest.mark.parametrize("wrong", [{"rows": (0, 1)}, {"rows": ()}, {"context": 0}, {"rounds": 0}])
def test_numbers_below_one(wrong):
    with pytest.raises(OutriderError, match=f"{next(iter(wrong))} must be at least 1, not 0"):
        ProfilePlan(**wrong)


def test_a_context_that_the_model_cannot_hold():
    model = Markov()
    model.context = 200
    ProfilePlan(context=200 - WRITTEN).check(model)
    with pytest.raises(OutriderError, match=f"use a context of at most {200 - WRITTEN}"):
        ProfilePlan(context=201 - WRITTEN).check(model)
    with pytest.raises(OutriderError, match="use fewer rows"):
        ProfilePlan(context=1, rows=(300,)).check(model)


@pytest.fixture(scope="module")
def draft_specs(tiny_draft):
    return {
        "ngram": "ngram",
        "layer_skip": "layer_skip:layers=1,length=5",
        "draft_model": f"draft_model:model={tiny_draft}",
    }


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("ngram", range(1, 9)), ("layer_skip", range(1, 6)), ("draft_model", range(1, 6))],
)
def test_a_tiny_model(tiny_folder, draft_specs, name, lengths):
    seen = []
    with LLM(str(tiny_folder), draft=draft_specs[name]) as llm:
        model = llm.backend.engine.model
        found = profile.profile(llm, QUICK, lambda what, done, total: seen.append((done, total)))
        assert [model.length(id) for id in (profile.PASSES, profile.DRAFTS, profile.PROMPT)] == [0, 0, 0]
    assert [point.size for point in found.costs.passes] == [1, 2, 4]
    assert all(0 < point.low <= point.ms <= point.high for point in found.costs.passes)
    assert [point.size for point in found.drafts] == list(lengths)
    assert found.costs.draft_ms > 0
    assert found.plain_tokens_per_second > 0
    assert found.prefill_tokens_per_second > 0
    assert found.arithmetic is None  # no packed weights
    assert found.weight_bytes == (tiny_folder / "model.safetensors").stat().st_size
    assert found.kv_bytes_per_token == 2 * 3 * 2 * 8 * 4
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_without_a_drafter(tiny_folder):
    with LLM(str(tiny_folder), draft="none") as llm:
        found = profile.profile(llm, QUICK)
    assert (found.drafts, found.costs.draft_ms) == ((), 0.0)


def test_a_context_of_one_token_and_one_of_several_chunks(tiny_folder, monkeypatch):
    monkeypatch.setattr(profile, "CHUNK", 16)
    with LLM(str(tiny_folder), draft="layer_skip") as llm:
        for context in (1, 40):
            found = profile.profile(llm, ProfilePlan(context=context, rows=(1,), rounds=1))
            assert [point.size for point in found.drafts] == [1, 2, 3]


def test_a_pass_judges_every_row(tiny_folder, monkeypatch):
    """A verifying pass computes logits for each row; a prompt's last row alone would look too cheap."""
    with LLM(str(tiny_folder), draft="none") as llm:
        model, judged = llm.backend.engine.model, []
        forward = model.forward

        def watched(feeds, layers=()):
            outputs = forward(feeds, layers)
            judged.extend(len(output.logits) for feed, output in zip(feeds, outputs, strict=True) if feed.draft)
            return outputs

        monkeypatch.setattr(model, "forward", watched)
        profile.profile(llm, QUICK)
    assert set(judged) == {2, 4}


def test_an_answer_tells_who_was_asked_what_it_took_and_brought(tiny_folder, tmp_path):
    with LLM(str(tiny_folder), draft="layer_skip:layers=2+ngram", pace=False, threads=1) as llm:
        found = profile.profile(llm, QUICK)
    stats = found.request
    assert stats.tokens == profile.DECODED
    assert stats.asked["ngram"]["steps"] == stats.steps
    shown = {share.name: share for share in shares(found)}
    skip = shown["layer_skip"]
    assert (skip.drafted, skip.kept) == tuple(stats.by_drafter["layer_skip"].values())
    assert skip.asking == pytest.approx(1000 * stats.seconds_by_drafter["layer_skip"])
    assert skip.saved == pytest.approx(1000 * skip.kept / found.plain_tokens_per_second)
    assert skip.gained == pytest.approx(skip.saved - skip.asking - skip.rows)
    [table] = [table for table in tables(found) if table.title.startswith("An answer")]
    assert [row[0] for row in table.rows] == list(shown)
    assert found.as_dict()["request"]["asked"].keys() == shown.keys()
    draw(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
