"""A drafter that fails costs its own sequences their drafts: no request ends, no text changes, and the log tells."""

import logging

import pytest
import torch
from tiny import Markov, Scripted, drain, outputs, plainly

from outrider import drafters
from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.combined import Combined
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits

PARAMS = SamplingParams(max_tokens=20)
CALLS = ("propose", "observe", "forget")


class Failing(Drafter):
    """It drafts well, and raises at one call of one kind."""

    name, reports_acceptance = "failing", True

    def __init__(self, call, number, model):
        self._call, self._number, self._model = call, number, model
        self.told = dict.fromkeys(CALLS, 0)
        self.asked = []

    def _count(self, call):
        self.told[call] += 1
        if call == self._call and self.told[call] == self._number:
            raise ZeroDivisionError("somebody's own mistake")

    def propose(self, seqs, budgets):
        self.asked.append([seq.id for seq in seqs])
        self._count("propose")
        best = [int(self._model.logits(seq.tokens).argmax()) for seq in seqs]
        return [Draft.chain([token], acceptance=[0.9]).cut(budget) for token, budget in zip(best, budgets, strict=True)]

    def observe(self, step):
        self._count("observe")

    def forget(self, id):
        self._count("forget")


def sequences(drafts):
    return [Sequence(id, [id % 6, 1, 2], PARAMS, draft=draft) for id, draft in enumerate(drafts)]


def run(failing, other, policy=None):
    """Three sequences of the failing drafter, two of another one."""
    model = failing._model
    engine = Engine(model, failing, Limits(), policy)
    engine.drafters["other"] = other
    seqs = sequences(["", "", "other", "", "other"])
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert engine.scheduler.reserved == 0
    assert model.seen == {}
    return seqs


def expected(seqs):
    return outputs(plainly(Markov(seed=3), seq.tokens[: seq.prompt], PARAMS) for seq in seqs)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_at_any_call(call, number, caplog):
    model = Markov(seed=3)
    failing, other = Failing(call, number, model), Failing("", 0, model)
    with caplog.at_level(logging.ERROR, "outrider"):
        seqs = run(failing, other)
    assert failing.told[call] >= number or call == "forget"
    assert [seq.finish for seq in seqs] == ["length"] * 5
    assert outputs(seqs) == expected(seqs)
    assert all(seq.stats.accepted > 0 for seq in seqs[2::2]), "the other drafter's sequences are drafted on"
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == (failing.told[call] >= number)
    assert all("failing" in record.getMessage() or call == "forget" for record in logged)


class Extending(Failing):
    """It guesses nothing by itself, and the best token after others' guesses."""

    name = "extending"

    def propose(self, seqs, budgets):
        return [EMPTY] * len(seqs)

    def extended(self, seq, draft):
        self._count("propose")
        best = int(self._model.logits([*seq.tokens, *draft.tokens]).argmax())
        return Draft.chain([*draft.tokens, best], None, [*draft.sources, self.name], [*draft.acceptance, 0.9])


@pytest.mark.parametrize("number", [0, 1, 3])
def test_guesses_after_others_are_judged_and_end_where_they_fail(number, caplog):
    model = Markov(seed=3)
    member = Extending("propose", number, model)
    engine = Engine(model, Combined("both", [Failing("", 0, model), member]), Limits(), None)
    (seq,) = sequences([""])
    engine.add(seq)
    drain(engine)
    assert outputs([seq]) == expected([seq])
    kept = seq.stats.by_drafter.get("extending", {}).get("accepted", 0)
    assert kept > number if not number else kept == number - 1
    assert ("ZeroDivisionError" in caplog.text) is bool(number)


def test_it_is_not_asked_again_for_those_sequences_and_is_for_later_ones(caplog):
    model = Markov(seed=3)
    failing = Failing("propose", 2, model)
    engine = Engine(model, failing)
    for seq in sequences(["", ""]):
        engine.add(seq)
    drain(engine)
    assert failing.asked == [[0, 1], [0, 1]]
    assert failing.told["forget"] == 2  # when it failed, and not again at the end
    later = Sequence(5, [5, 1, 2], PARAMS)
    engine.add(later)
    drain(engine)
    assert [5] in failing.asked
    assert later.stats.accepted > 0
    assert "2 of its sequences go on without drafts of it" in caplog.text
    assert "ZeroDivisionError: somebody's own mistake" in caplog.text


def test_an_id_that_comes_again_is_drafted_for_again():
    """The failure was of another sequence."""
    model = Markov(seed=3)
    failing = Failing("propose", 1, model)
    engine = Engine(model, failing)
    for _ in range(2):
        seq = Sequence(0, [1, 2], PARAMS)
        engine.add(seq)
        drain(engine)
    assert seq.stats.accepted > 0


def test_a_failure_to_observe_costs_one_sequence_its_drafts():
    model = Markov(seed=3)
    failing = Failing("observe", 2, model)
    engine = Engine(model, failing)
    seqs = sequences(["", "", ""])
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert failing.asked[0] == [0, 1, 2]
    assert all(asked == [0, 2] for asked in failing.asked[1:])
    assert outputs(seqs) == expected(seqs)


def test_the_trace_is_logged_once_for_each_drafter(caplog):
    class Always(Failing):
        def _count(self, call):
            raise ZeroDivisionError(call)

    model = Markov(seed=3)
    engine = Engine(model, Always("", 0, model))
    for seq in sequences([""] * 3):
        engine.add(seq)
        drain(engine)
    failures = [record for record in caplog.records if "go on without drafts" in record.getMessage()]
    assert [bool(record.exc_info) for record in failures] == [True, False, False]


def test_sequences_of_a_drafter_that_is_gone_leave_no_other_unfreed(caplog):
    model = Markov(seed=3)
    engine = Engine(model, Failing("", 0, model))
    engine.drafters["other"] = Failing("", 0, model)
    for seq in sequences(["other", ""]):
        engine.add(seq)
    engine.step()
    engine.drop("other")
    for seq in engine.scheduler.running:
        seq.finish = "cancelled"
    assert len(engine.sweep()) == 2
    assert model.seen == {}
    assert "drafter other could not forget a sequence" in caplog.text


class Wrong(Drafter):
    """It returns something that the engine or the target cannot use."""

    name, reports_acceptance = "wrong", True

    def __init__(self, found):
        self._found = found

    def propose(self, seqs, budgets):
        return self._found


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        [EMPTY] * 3,
        ["ab", "cd"],
        [Draft.chain([6])] * 2,
        [Draft.chain([1, -1])] * 2,
        [Draft.chain([1], torch.full((1, 5), 0.2))] * 2,
        [Draft((1, 2), (-1, 0), acceptance=(0.9, float("nan")))] * 2,
    ],
    ids=["none", "too few", "too many", "text", "unknown token", "negative token", "short law", "not a number"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_nobody_can_use_costs_only_the_draft(found, temperature, measured, caplog):
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=4)
    model = Markov(seed=3)
    engine = Engine(model, Wrong(found), Limits(), DraftingPolicy() if measured else None)
    seqs = [Sequence(id, [id, 1], params) for id in range(2)]
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert [seq.finish for seq in seqs] == ["length"] * 2
    alone = [plainly(Markov(seed=3), [id, 1], params, dice=seqs[id].dice) for id in range(2)]
    assert outputs(seqs) == outputs(alone)
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_one_object_under_two_names_is_asked_once_and_has_one_record():
    model = Markov(seed=3)
    drafter, policy = Scripted(lambda seq, guessed: 0, 6), DraftingPolicy()
    asked = []
    propose = drafter.propose
    drafter.propose = lambda seqs, budgets: asked.append([seq.id for seq in seqs]) or propose(seqs, budgets)
    engine = Engine(model, drafter, Limits(), policy)
    engine.drafters["scripted"] = drafter
    seqs = sequences(["", "scripted", ""])
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert asked[0] == [0, 1, 2]
    assert len(policy._records) == 1
    assert outputs(seqs) == expected(seqs)
    engine.drop("scripted")
    assert len(policy._records) == 1, "the other name still has it"


def test_a_drafter_is_told_what_nodes_cost_once_that_was_measured():
    """And if it cannot take that, it costs its drafts alone."""

    class Weighed(Failing):
        told_prices = ()

        def weigh(self, row, guess):
            self.told_prices = [*self.told_prices, (row, guess, self.told["propose"])]
            if len(self.told_prices) == self._number:
                raise ZeroDivisionError("somebody's own mistake")

    class Always(DraftingPolicy):
        def wanted(self, drafter, seqs, budgets, *given):
            return list(budgets)

    for number in (0, 2):
        model = Markov(seed=1)
        weighed = Weighed("", number, model)
        seqs = run(weighed, Drafter(Drafter.Options(), None), Always())
        assert outputs(seqs) == outputs(plainly(Markov(seed=1), seq.tokens[: seq.prompt], PARAMS) for seq in seqs)
        assert weighed.told_prices
        assert all(row > 0.0 and guess > 0.0 and asked > 0 for row, guess, asked in weighed.told_prices)
        assert (weighed.told["propose"] > 3) == (number == 0)


def test_statistics_tell_who_was_asked_for_which_sequence():
    model = Markov(seed=1)
    good = Failing("propose", 10**9, model)
    seqs = run(good, Drafter(Drafter.Options(), None))
    assert seqs[0].stats.asked_by_drafter == {"failing": sum(0 in ids for ids in good.asked)}
    assert seqs[0].stats.seconds_by_drafter["failing"] > 0.0
    assert not seqs[2].stats.asked  # its drafter drafts nothing


def test_lookups_that_do_not_pay_are_not_asked_and_learn_each_token_once():
    """A policy that asks every other step: what was guessed is judged once, and the text is the same."""

    class EveryOther(DraftingPolicy):
        steps = 0

        def asks_free(self, seqs):
            self.steps += 1
            super().asks_free(seqs)
            return self.steps % 2 == 0

    model, learned = Markov(seed=3), []
    lookup = drafters.build("ngram", BuildContext(model, None))
    lookup._calibration.learn = lambda kind, kept: learned.append(kept)
    engine, seq = Engine(model, lookup, Limits(), EveryOther()), Sequence(0, [1, 2, 1, 2, 1], PARAMS)
    engine.add(seq)
    drain(engine)
    assert seq.tokens[5:] == outputs([plainly(model, [1, 2, 1, 2, 1], PARAMS)])[0]
    assert seq.stats.asked["ngram"]["steps"] == engine.policy.steps // 2
    assert 0 < len(learned) <= len(seq.output)


def test_lookups_beside_sequences_without_a_drafter_count_as_one_batch():
    """Three of five sequences have a lookup: whether it pays is learned for batches of five."""
    model, policy = Markov(seed=3), DraftingPolicy()
    lookup = Failing("never", 0, model)
    lookup.is_free = True
    seqs = run(lookup, Drafter(Drafter.Options(), None), policy)
    assert outputs(seqs) == expected(seqs)
    assert (5).bit_length() in policy._free
    assert lookup.asked


@pytest.mark.parametrize("sees_all", [True, False])
def test_who_learns_from_its_own_guesses_alone_is_shown_the_steps_in_which_it_was_asked(sees_all):
    class EveryThird(DraftingPolicy):
        steps = 0

        def asks_free(self, seqs):
            self.steps += 1
            super().asks_free(seqs)
            return self.steps % 3 == 0

    model = Markov(seed=3)
    lookup = Failing("never", 0, model)
    lookup.is_free, lookup.sees_all = True, sees_all
    engine, seq = Engine(model, lookup, Limits(), EveryThird()), Sequence(0, [1, 2, 1], PARAMS)
    engine.add(seq)
    drain(engine)
    assert seq.tokens[3:] == outputs([plainly(model, [1, 2, 1], PARAMS)])[0]
    assert len(lookup.asked) == engine.policy.steps // 3
    assert lookup.told["observe"] == (engine.policy.steps if sees_all else len(lookup.asked))


def test_what_was_declined_for_long_is_worked_out_in_few_passes(monkeypatch):
    """And the others are written as ever."""
    model, policy, worked_out = Markov(seed=3), DraftingPolicy(), []
    monkeypatch.setattr(policy, "considers", lambda drafter, seqs: len(worked_out) < 2)
    monkeypatch.setattr(
        policy, "wanted", lambda drafter, seqs, *more: (worked_out.append(len(seqs)), [0] * len(seqs))[1]
    )
    failing = Failing("never", 0, model)
    seqs = run(failing, Failing("never", 0, model), policy)
    assert outputs(seqs) == expected(seqs)
    assert len(worked_out) == 2
    assert not failing.asked
