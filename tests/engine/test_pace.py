"""How much to draft: the cost line, and the nodes that pay."""

import pytest

from outrider.core.draft import Draft
from outrider.core.verify import Verdict
from outrider.engine.pace import GUESS, PROBE, Cost, Pace


def learned(a, b, rows=(1, 2, 4, 8), times=20):
    pace = Pace()
    for _ in range(times):
        for n in rows:
            pace.cost.learn(n, a + b * n)
    return pace


def chain(*chances):
    return Draft.chain(list(range(len(chances))), chances=chances)


class TestCost:
    def test_before_anything_is_measured_a_row_costs_the_guessed_share(self):
        a, b = Cost().line()
        assert b / (a + b) == pytest.approx(GUESS)

    def test_the_line_is_found(self):
        a, b = learned(0.004, 0.001).cost.line()
        assert a == pytest.approx(0.004, rel=0.05)
        assert b == pytest.approx(0.001, rel=0.05)

    def test_a_pause_of_the_machine_hardly_moves_it(self):
        pace = learned(0.004, 0.001)
        before = pace.cost.line()
        pace.cost.learn(1, 5.0)
        assert pace.cost.line() == pytest.approx(before, rel=0.1)

    def test_one_size_alone_keeps_the_guess(self):
        cost = Cost()
        for _ in range(50):
            cost.learn(1, 0.010)
        a, b = cost.line()
        assert b == pytest.approx(GUESS * 0.010)
        assert a + b == pytest.approx(0.010)


class TestTrim:
    def test_sure_nodes_stay_and_hopeless_ones_go(self):
        pace = learned(0.004, 0.001)
        (kept,) = pace.trim("x", [chain(0.95, 0.95, 0.05, 0.9)], 1)
        assert kept.tokens == (0, 1)
        assert kept.chances == (0.95, 0.95)

    def test_nothing_pays_where_a_row_costs_a_pass(self):
        assert len(learned(0.0001, 0.010).trim("x", [chain(0.9, 0.9)], 1)[0]) == 0

    def test_everything_pays_where_rows_are_free(self):
        assert len(learned(0.010, 0.0).trim("x", [chain(*[0.5] * 4)], 1)[0]) == 4

    @pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.9])
    def test_the_length_is_the_best_one(self, p):
        a, b = 0.004, 0.001
        kept = learned(a, b).trim("x", [chain(*[p] * 12)], 1)[0]

        def rate(k):
            return sum(p**d for d in range(k + 1)) / (a + b * (1 + k))

        assert len(kept) == max(range(13), key=rate)

    def test_a_batch_spends_its_rows_on_the_surest_sequences(self):
        sure, unsure = learned(0.004, 0.001).trim("x", [chain(0.9, 0.9, 0.9), chain(0.2, 0.2, 0.2)], 2)
        assert len(sure) > len(unsure)

    def test_a_node_never_stays_without_its_parent(self):
        tree = Draft((1, 2, 3, 4), (-1, -1, 1, 2), chances=(0.1, 0.9, 0.9, 0.9))
        (kept,) = learned(0.004, 0.001).trim("x", [tree], 1)
        assert kept.tokens == (2, 3, 4)
        assert kept.parents == (-1, 0, 1)


class TestDraftersThatCannotSay:
    """They are judged by what became of their nodes, and by what drafting took."""

    def lived(self, kept, seconds):
        pace = learned(0.004, 0.001)
        draft = Draft.chain([1, 2, 3])
        for _ in range(40):
            pace.spend("x", 3 * seconds, [draft])
            pace.learn("x", draft, Verdict(tuple(range(kept)), 0))
        return pace

    def test_a_good_and_cheap_one_is_asked_for_all(self):
        assert self.lived(3, 0.0001).rooms("x", [3]) == [3]

    def test_a_bad_one_is_asked_again_only_now_and_then(self):
        pace = self.lived(0, 0.0001)
        asked = [pace.rooms("x", [3])[0] for _ in range(2 * (PROBE + 1))]
        assert asked == ([0] * PROBE + [1]) * 2

    def test_a_good_one_that_costs_too_much_is_not_asked(self):
        assert self.lived(3, 0.010).rooms("x", [3]) == [0]
