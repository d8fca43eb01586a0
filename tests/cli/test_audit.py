"""The audit passes what is exact and catches what is not."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import company_breaks as breaks
import pytest
from limits import file_size_limit
from scipy import stats
from tiny import ours, reference

from outrider import LLM, SamplingParams, build
from outrider.audit import audit, checks as audit_checks, chi_square, default_drafts
from outrider.core import verify as rules
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.models.base import RowContract
from outrider.prompts import NamedPrompt

SHORT = (NamedPrompt("fox", "prose", "the red fox and the red"), NamedPrompt("sea", "prose", "one, two, one, two, one"))


@pytest.fixture
def llm(tiny_folder):
    with LLM(str(tiny_folder), draft="none", pace=False) as llm:
        yield llm


def checks(report):
    return {check.name: check for drafter in report.drafters for check in drafter.checks}


def test_every_drafter_passes(llm, tiny_draft):
    drafts = [*default_drafts(llm), "none", f"draft_model:model={tiny_draft}", "ngram:store=adaptive,min_n=1"]
    report = audit(llm, drafts, samples=200)
    assert report.passed, report
    assert [drafter.draft for drafter in report.drafters] == drafts
    for drafter in report.drafters:
        assert [check.name for check in drafter.checks] == ["greedy", "batch", "seed", "law"]
        assert all(check.drafted > 0 for check in drafter.checks) or drafter.draft in ("none", "ngram", "grammar")


def test_the_default_is_every_drafter_that_runs_beside_the_model_without_arguments(llm):
    assert {"ngram", "prediction", "layer_skip"} <= set(default_drafts(llm))
    assert not {"none", "draft_model", "eagle"} & set(default_drafts(llm))  # no head is shipped for a tiny model


def test_the_same_seed_gives_the_same_report(llm):
    one, other = (audit(llm, ["layer_skip"], SHORT, samples=50, seed=3).as_dict() for _ in range(2))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_progress_ends_at_the_total(llm):
    seen = []
    audit(
        llm, ["ngram", "prediction"], SHORT, samples=10, progress=lambda what, done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1] == (len(seen), len(seen))


def accept_one_too_many(monkeypatch):
    honest = rules.coupled

    def coupled(draft, choose):
        verdict = honest(draft, choose)
        following = draft.children(verdict.path[-1] if verdict.path else -1)
        return Verdict((*verdict.path, following[0]), verdict.token) if following else verdict

    monkeypatch.setattr(rules, "coupled", coupled)


def test_it_catches_a_token_too_many(llm, monkeypatch):
    accept_one_too_many(monkeypatch)
    report = audit(llm, ["layer_skip"], SHORT, samples=20)
    found = checks(report)
    assert not report.passed
    assert not found["greedy"].passed
    assert not found["batch"].passed
    assert not found["seed"].passed
    first = found["greedy"].differences[0]
    assert first.prompt in ("fox", "sea")
    assert first.plain != first.drafted
    assert first.margin is None or first.margin > 0


def accept_everything(monkeypatch):
    honest = rules.rejection

    def generous(draft, law, dice, position):
        if not draft:
            return honest(draft, law, dice, position)
        token = int(law(len(draft) - 1).argmax())
        return Verdict(tuple(range(len(draft))), token)

    monkeypatch.setattr(rules, "rejection", generous)


def test_it_catches_a_rule_that_accepts_everything(llm, monkeypatch):
    accept_everything(monkeypatch)
    for draft in default_drafts(llm):
        found = checks(audit(llm, [draft], SHORT, samples=300))
        assert found["greedy"].passed
        assert not found["law"].passed, draft


def test_where_a_copier_guesses_well_the_law_is_cut_by_top_k(llm, monkeypatch):
    """So that a GPU takes the requests of this check without the host, as it takes others."""
    asked, own = set(), audit_checks._support_law

    def noted(logits, params):
        asked.add((params.top_k, params.allowed_token_ids, Sequence(0, [1], params).plain))
        return own(logits, params)

    monkeypatch.setattr(audit_checks, "_support_law", noted)
    monkeypatch.setattr(audit_checks, "MOST_TOP", 20)  # for the tiny model the guess is the 18th
    monkeypatch.setattr(audit_checks.builtin, "LAW", NamedPrompt("law", "list", "a b a b a b"))
    assert audit(llm, ["layer_skip", "ngram"], SHORT, samples=300).passed
    assert asked == {(18, None, True)}
    accept_everything(monkeypatch)
    assert not checks(audit(llm, ["layer_skip"], SHORT, samples=300))["law"].passed


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "name": {"type": "string", "maxLength": 8}},
    "required": ["colour", "name"],
    "additionalProperties": False,
}
LETTERS = SamplingParams(regex="[a-z ]{2,60}")


def test_every_drafter_passes_under_a_grammar(llm):
    for held in (SamplingParams(json_schema=SCHEMA, temperature=0.3), LETTERS):
        drafts = default_drafts(llm, held=True)
        report = audit(llm, drafts, SHORT, samples=300, held=held)
        assert report.passed, report
        assert report.grammar == report.as_dict()["grammar"] == held.constraint.parameter
        drafted = {each.draft: each.checks[0].drafted for each in report.drafters}
        assert drafted["grammar"] > 0 or held is LETTERS  # where nothing is forced there may be nothing to guess
        assert drafted["layer_skip"] > 0


def test_under_a_grammar_it_catches_the_same(llm, monkeypatch):
    accept_everything(monkeypatch)
    found = checks(audit(llm, ["layer_skip"], SHORT, samples=300, held=LETTERS))
    assert found["greedy"].passed
    assert not found["law"].passed
    accept_one_too_many(monkeypatch)
    with pytest.raises(OutriderError, match=r"layer_skip: .* the grammar forbids it here"):
        audit(llm, ["layer_skip"], SHORT, samples=20, held=LETTERS)


def test_the_command_takes_a_schema(outrider, tiny_folder, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    args = ("audit", "-m", tiny_folder, "--prompt", "the fox", "--samples", 40, "--json-schema", schema)
    done = outrider(*args, "-d", "grammar")
    assert (done.code, "1 prompts under json_schema" in done.out) == (0, True), done.err
    done = outrider(*args[:-4], "--json-schema", schema, "--company")
    assert (done.code, "--json-schema is not for --company" in done.err) == (2, True)
    schema.write_text('{"not": {}}')
    done = outrider(*args, "-d", "grammar")
    assert (done.code, '["not"]' in done.err) == (2, True)


def test_it_catches_a_residual_that_is_not_taken(llm, monkeypatch):
    """After a refusal the token must come from what is left of the law; drawing from the whole law is subtly wrong."""
    monkeypatch.setattr("outrider.core.verify._residual", lambda p, q, token: p)
    assert not checks(audit(llm, ["prediction"], SHORT, samples=2000))["law"].passed


def flipping(wrapper, monkeypatch):
    """Models are loaded into the wrapper from now on."""
    honest = build.load

    def load(name, where):
        loaded = honest(name, where)
        return replace(loaded, model=wrapper(loaded.model))

    monkeypatch.setattr(build, "load", load)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_our_own_forward_runs_the_model_a_flip_at_a_near_tie_is_a_failure(tiny_folder, monkeypatch, dtype):
    flipping(breaks.FlipsWhereDrafted, monkeypatch)
    with LLM(str(tiny_folder), draft="none", dtype=dtype, pace=False) as llm:
        report = audit(llm, ["layer_skip"], samples=50)
    flips = [difference for check in checks(report).values() for difference in check.differences]
    assert not report.passed
    assert report.small_margin == 0
    assert flips
    assert all(flip.margin is None or abs(flip.margin) < 0.5 for flip in flips)  # it used to pass


class PromisesNothing(breaks.FlipsWhereDrafted):
    """A model as transformers runs it: it states nothing about its rows."""

    def __init__(self, model):
        super().__init__(model)
        self.rows_alone = False


def test_where_transformers_runs_it_near_ties_are_counted_but_errors_are_failures(tiny_folder, monkeypatch):
    flipping(PromisesNothing, monkeypatch)
    with LLM(str(tiny_folder), draft="none", dtype="bfloat16", pace=False) as llm:
        report = audit(llm, ["layer_skip"], samples=50)
        assert report.small_margin == 0.5
        assert checks(report)["greedy"].differences
        assert checks(report)["greedy"].passed
        accept_one_too_many(monkeypatch)
        assert not audit(llm, ["layer_skip"], SHORT, samples=50).passed


def test_models_of_transformers_promise_nothing():
    """Which models the strictness is for: those of our own forward, and not those of transformers."""
    own = ours(reference("llama"))
    assert isinstance(own, RowContract)
    assert own.rows_alone
    assert not isinstance(ours(reference("gpt2")), RowContract)


@pytest.mark.parametrize("draft", ["ngram", "layer_skip"])
def test_the_command(outrider, tiny_folder, tmp_path, draft):
    args = ("audit", "-m", tiny_folder, "-d", draft, "--prompt", "the fox", "--max-tokens", 8, "--samples", 40)
    done = outrider(*args, "--output", tmp_path / "report.json")
    assert done.code == 0, done.err
    assert "passed" in done.out
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["passed"] is True
    assert json.loads(outrider(*args, "--json").out) == {**said, "seconds": pytest.approx(said["seconds"], abs=60)}


@pytest.mark.parametrize("output", ["nowhere/report.json", "."])
def test_an_output_that_cannot_be_written_is_refused_at_once(outrider, tmp_path, output):
    done = outrider("audit", "-m", "./no-model-is-loaded", "--output", tmp_path / output)
    assert (done.code, done.out) == (2, "")
    assert "name a file in a folder that is there" in done.err


def test_a_full_disk_leaves_the_report_on_the_screen(outrider, tiny_folder, tmp_path):
    args = ("audit", "-m", tiny_folder, "-d", "ngram", "--prompt", "the fox", "--max-tokens", 4, "--samples", 20)
    file = tmp_path / "report.json"
    file.write_text("before")
    with file_size_limit(10):
        done = outrider(*args, "--output", file)
    assert done.code == 2
    assert "passed" in done.out
    assert f"cannot write {file}" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert file.read_text() == "before"


def test_the_output_is_written_where_the_report_cannot_be_shown(tiny_folder, tmp_path):
    args = f"-m {tiny_folder} -d ngram --prompt fox --max-tokens 4 --samples 20 --output {tmp_path}/report.json"
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m outrider audit {args} >/dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert json.loads((tmp_path / "report.json").read_text())["passed"]


def test_an_output_may_be_a_device(outrider, tiny_folder):
    args = ("audit", "-m", tiny_folder, "-d", "ngram", "--prompt", "the fox", "--max-tokens", 4, "--samples", 20)
    assert outrider(*args, "--output", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


def test_the_command_fails_with_1(outrider, tiny_folder, tmp_path, monkeypatch):
    accept_one_too_many(monkeypatch)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the fox and the fox\n\nthe sea\n")
    done = outrider("audit", "-m", tiny_folder, "-d", "layer_skip", "--prompts", prompts, "--samples", 20)
    assert done.code == 1
    assert "FAILED" in done.out
    assert "parts at token" in done.out
    assert "line 1" in done.out


def test_chi_square_agrees_with_scipy():
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    counts = Counter({(0,): 41, (1,): 40, (2,): 19})
    assert chi_square(counts, law) == pytest.approx(stats.chisquare([41, 40, 19], [50, 30, 20]).pvalue)


def test_chi_square_pools_what_is_rare():
    law = {(0,): 0.9, **{(i,): 0.01 for i in range(1, 11)}}
    counts = Counter({(0,): 90, (1,): 10})  # ten outcomes that expect one each: two cells of five, then the rest
    assert chi_square(counts, law) == pytest.approx(stats.chisquare([10, 0, 90], [5, 5, 90]).pvalue)


def test_chi_square_and_the_impossible():
    assert chi_square(Counter({(3,): 1, (0,): 99}), {(0,): 1.0}) == 0.0
    assert chi_square(Counter({(0,): 100}), {(0,): 1.0}) == 1.0
