"""What a pass costs, learned from passes."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from outrider.engine.cost import ASSUMED_ROW, PassCost


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
