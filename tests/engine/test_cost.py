"""What a pass costs, learned from passes."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from outrider.engine.cost import ASSUMED_ROW, MEASURED_ROWS, PassCost, measured


def learned(a, b, rows=(1, 2, 4, 8), times=20):
    cost = PassCost()
    for _ in range(times):
        for n in rows:
            cost.learn(n, a + b * n)
    return cost


def test_before_anything_is_measured_a_row_costs_the_guessed_share():
    cost = PassCost()
    assert cost.next_row(1) / cost.at(1) == pytest.approx(ASSUMED_ROW)


def test_a_line_is_found():
    cost = learned(0.004, 0.001, times=200)
    for rows in (1, 2, 3, 6, 8, 20):
        assert cost.at(rows) == pytest.approx(0.004 + 0.001 * rows, rel=0.02)
        assert cost.next_row(rows) == pytest.approx(0.001, rel=0.1)


def test_rows_that_are_nearly_free_until_there_are_four():
    cost, truth = PassCost(), {1: 3.4, 2: 3.5, 3: 3.9, 4: 4.8, 5: 5.9, 6: 6.6}
    for _ in range(100):
        for rows, ms in truth.items():
            cost.learn(rows, ms)
    assert cost.next_row(1) == pytest.approx(0.1, abs=0.05)
    assert cost.next_row(2) == pytest.approx(0.4, abs=0.05)
    assert cost.next_row(4) == pytest.approx(0.9, abs=0.1)  # 4 to 6 is one straight piece: 5 lies above it
    assert cost.at(8) == pytest.approx(cost.at(6) + 2 * cost.next_row(5))


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
def test_a_further_row_never_costs_less_than_the_one_before_nor_nothing(passes):
    cost = PassCost()
    for rows, seconds in passes:
        cost.learn(rows, seconds)
    steps = [cost.next_row(rows) for rows in range(1, 50)]
    assert steps[0] > 0
    assert all(later >= earlier * (1 - 1e-6) for earlier, later in pairwise(steps))


def test_a_pause_of_the_machine_hardly_moves_it():
    cost = learned(0.004, 0.001)
    before = [cost.at(rows) for rows in (1, 4, 8)]
    cost.learn(1, 5.0)
    assert [cost.at(rows) for rows in (1, 4, 8)] == pytest.approx(before, rel=0.1)


def test_one_size_alone_keeps_the_guess():
    cost = PassCost()
    for _ in range(50):
        cost.learn(1, 0.010)
    assert cost.at(1) == pytest.approx(0.010)
    assert cost.next_row(1) == pytest.approx(ASSUMED_ROW * 0.010)


def test_sizes_that_were_not_run_for_a_while_follow_the_machine():
    """It became twice as slow while only passes of two rows were run: the others are as much dearer."""
    cost = learned(0.004, 0.001)
    before = {rows: cost.at(rows) for rows in (1, 2, 4, 8)}
    for _ in range(60):
        cost.learn(2, 2 * 0.006)
    for rows, seconds in before.items():
        assert 1.4 * seconds < cost.at(rows) < 2.1 * seconds


def test_what_the_speed_of_the_machine_explains_is_no_cost_of_rows():
    """Plain and drafted answers by turns, and spells in which all passes take longer: on a CPU the average of one row
    had followed a slow spell, and a second row was believed to cost 2 ms instead of 7 (LOG, 2026-11-17, midnight)."""
    truth, random_, cost = {1: 25.4, 2: 32.4, 3: 41.8, 4: 47.0, 6: 60.0, 8: 75.0}, random.Random(1), PassCost()
    for _ in range(20):
        for rows, ms in truth.items():
            cost.learn(rows, ms)
    errors = []
    for answer in range(40):
        slow = random_.choice([1.0, 1.3])
        for _ in range(64):
            rows = random_.choice([1, 1, 2, 2, 3, 4]) if answer % 2 else 1
            cost.learn(rows, truth[rows] * slow * (1.0 + abs(random_.gauss(0.0, 0.03))))
            errors.append(cost.next_row(1) / cost.at(1) / ((32.4 - 25.4) / 25.4) - 1.0)
    assert max(map(abs, errors)) < 0.18
    assert sum(error**2 for error in errors) / len(errors) < 0.055**2


def test_a_number_of_rows_that_is_first_run_while_the_machine_changes_is_not_taken_for_cheap():
    cost = PassCost()
    for _ in range(40):
        for rows in (1, 2):
            cost.learn(rows, 3 * (0.004 + 0.001 * rows))
    for rows in (2, 3, 4, 2, 3, 4):  # nobody else uses it any more
        cost.learn(rows, 0.004 + 0.001 * rows)
    assert cost.next_row(2) / cost.at(2) > 0.1  # a sixth, in truth
    for _ in range(20):
        for rows in (1, 2, 3, 4):
            cost.learn(rows, 0.004 + 0.001 * rows)
    assert cost.next_row(2) == pytest.approx(0.001, rel=0.15)


def test_rows_that_became_dearer_are_noticed_whatever_was_known():
    cost = learned(0.010, 0.0001, times=100)
    for _ in range(100):
        for rows in (1, 2, 4, 8):
            cost.learn(rows, 0.006 + 0.004 * rows)
    assert cost.next_row(1) == pytest.approx(0.004, rel=0.15)
    assert cost.at(8) == pytest.approx(0.038, rel=0.1)


@pytest.mark.parametrize(("slow", "spell"), [(1.6, 40), (1.6, 200), (2.0, 100)])
def test_numbers_of_rows_that_are_not_run_follow_the_others_through_slow_spells(slow, spell):
    """A server runs for days: what each spell leaves must not add up."""
    dice, times = random.Random(1), {1: 25.4, 2: 32.4, 3: 41.8, 8: 75.0}
    cost = PassCost(times)
    for step in range(20_000):
        rows = dice.choice([1, 1, 2, 2, 3])
        cost.learn(rows, times[rows] * (slow if step // spell % 2 else 1.0) * (1.0 + abs(dice.gauss(0.0, 0.03))))
    assert cost.at(8) / cost.at(1) == pytest.approx(75.0 / 25.4, rel=0.05)


def test_fewer_rows_than_any_that_was_run_cost_something_however_steep_it_is_there():
    cost = PassCost()
    for _ in range(12):
        cost.learn(16, 1.0e-3)
        cost.learn(17, 1.2e-3)
    assert cost.at(4) >= 0.2e-3
    cost.learn(16, 1.5e-3)
    for _ in range(3_100):
        cost.learn(4, 0.9e-3)
    assert 0.0 < cost.added(4, 1) < 1.0


def test_a_model_is_measured_when_it_is_loaded(monkeypatch):
    class Slow:
        context, capacity = 5, 1 << 20

        def __init__(self):
            self.now, self.rows, self.freed = 0.0, [], 0

        def thread_time(self):
            return self.now

        def forward(self, feeds, layers=()):
            [feed] = feeds
            self.rows.append(1 + len(feed.draft))
            self.now += 0.004 + 0.001 * self.rows[-1] + (0.5 if len(self.rows) == 1 else 0.0)

        def free(self, id):
            self.freed += 1

    model = Slow()
    monkeypatch.setattr("outrider.engine.cost.time", model)
    cost = measured(model)
    assert set(model.rows) == {1, 2, 3, 4} < set(MEASURED_ROWS)  # no longer than its context
    assert model.freed == len(model.rows)
    assert cost.at(4) == pytest.approx(0.008)  # the first pass, which took half a second, is not in it
    assert len(model.rows) == 1 + 4  # it was slow: one round is enough
