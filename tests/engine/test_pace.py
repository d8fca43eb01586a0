"""How much to draft: what a pass costs, and the nodes that pay."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from outrider.core.draft import Draft
from outrider.core.verify import Verdict
from outrider.engine.pace import AGAIN, GUESS, PROBE, REST, Cost, Pace, PassSize


def learned(a, b, rows=(1, 2, 4, 8), times=20):
    pace = Pace()
    for _ in range(times):
        for n in rows:
            pace.cost.learn(n, a + b * n)
    return pace


ALONE = PassSize(1, 1)  # one sequence that writes, and nothing else in the pass


def trim(pace, drafts, rows):
    """Of one drafter, for a pass of `rows` sequences."""
    return pace.trim({"x": drafts}, PassSize(rows, rows))["x"]


def chain(*chances):
    return Draft.chain(list(range(len(chances))), acceptance=chances)


class TestCost:
    def test_before_anything_is_measured_a_row_costs_the_guessed_share(self):
        cost = Cost()
        assert cost.more(1) / cost.at(1) == pytest.approx(GUESS)

    def test_a_line_is_found(self):
        cost = learned(0.004, 0.001, times=200).cost
        for rows in (1, 2, 3, 6, 8, 20):
            assert cost.at(rows) == pytest.approx(0.004 + 0.001 * rows, rel=0.02)
            assert cost.more(rows) == pytest.approx(0.001, rel=0.1)

    def test_rows_that_are_nearly_free_until_there_are_four(self):
        cost, truth = Cost(), {1: 3.4, 2: 3.5, 3: 3.9, 4: 4.8, 5: 5.9, 6: 6.6}
        for _ in range(100):
            for rows, ms in truth.items():
                cost.learn(rows, ms)
        assert cost.more(1) == pytest.approx(0.1, abs=0.05)
        assert cost.more(2) == pytest.approx(0.4, abs=0.05)
        assert cost.more(4) == pytest.approx(0.9, abs=0.1)  # 4 to 6 is one straight piece: 5 lies above it
        assert cost.at(8) == pytest.approx(cost.at(6) + 2 * cost.more(5))

    @given(st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 1.0)), min_size=1, max_size=60))
    def test_a_further_row_never_costs_less_than_the_one_before_nor_nothing(self, passes):
        cost = Cost()
        for rows, seconds in passes:
            cost.learn(rows, seconds)
        steps = [cost.more(rows) for rows in range(1, 50)]
        assert steps[0] > 0
        assert all(later >= earlier * (1 - 1e-6) for earlier, later in pairwise(steps))

    def test_a_pause_of_the_machine_hardly_moves_it(self):
        pace = learned(0.004, 0.001)
        before = [pace.cost.at(rows) for rows in (1, 4, 8)]
        pace.cost.learn(1, 5.0)
        assert [pace.cost.at(rows) for rows in (1, 4, 8)] == pytest.approx(before, rel=0.1)

    def test_one_size_alone_keeps_the_guess(self):
        cost = Cost()
        for _ in range(50):
            cost.learn(1, 0.010)
        assert cost.at(1) == pytest.approx(0.010)
        assert cost.more(1) == pytest.approx(GUESS * 0.010)


class TestLengths:
    """Every row of a pass looks at the whole sequence, so long ones make rows dear."""

    def test_each_range_of_lengths_has_its_own_costs(self):
        pace = learned(0.004, 0.001)
        for _ in range(200):
            pace.turn(900)
            for rows in (1, 2, 4, 8):
                pace.cost.learn(rows, 0.006 + 0.003 * rows)
        assert pace.cost.more(2) == pytest.approx(0.003, rel=0.05)
        pace.turn(100)
        assert pace.cost.more(2) == pytest.approx(0.001, rel=0.05)
        pace.turn(700)
        assert pace.cost.more(2) == pytest.approx(0.003, rel=0.05)

    def test_a_new_range_begins_with_what_the_nearest_one_knows_and_soon_knows_better(self):
        pace = learned(0.004, 0.001, times=200)
        pace.turn(300)
        assert pace.cost.at(4) == pytest.approx(0.008, rel=0.05)
        for _ in range(12):
            for rows in (1, 2, 4, 8):
                pace.cost.learn(rows, 0.006 + 0.001 * rows)
        assert pace.cost.at(4) == pytest.approx(0.010, rel=0.05)
        pace.turn(255)
        assert pace.cost.at(4) == pytest.approx(0.008, rel=0.05)


class TestTrim:
    def test_sure_nodes_stay_and_hopeless_ones_go(self):
        pace = learned(0.004, 0.001)
        (kept,) = trim(pace, [chain(0.95, 0.95, 0.05, 0.9)], 1)
        assert kept.tokens == (0, 1)
        assert kept.acceptance == (0.95, 0.95)

    def test_nothing_pays_where_a_row_costs_a_pass(self):
        assert len(trim(learned(0.0001, 0.010), [chain(0.9, 0.9)], 1)[0]) == 0

    def test_everything_pays_where_rows_are_free(self):
        assert len(trim(learned(0.010, 0.0), [chain(*[0.5] * 4)], 1)[0]) == 4

    @pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.9])
    def test_the_length_is_the_best_one(self, p):
        a, b = 0.004, 0.001
        kept = trim(learned(a, b), [chain(*[p] * 12)], 1)[0]

        def rate(k):
            return sum(p**d for d in range(k + 1)) / (a + b * (1 + k))

        assert len(kept) == max(range(13), key=rate)

    def test_a_batch_spends_its_rows_on_the_surest_sequences(self):
        sure, unsure = trim(learned(0.004, 0.001), [chain(0.9, 0.9, 0.9), chain(0.2, 0.2, 0.2)], 2)
        assert len(sure) > len(unsure)

    def test_a_node_never_stays_without_its_parent(self):
        tree = Draft((1, 2, 3, 4), (-1, -1, 1, 2), acceptance=(0.1, 0.9, 0.9, 0.9))
        (kept,) = trim(learned(0.004, 0.001), [tree], 1)
        assert kept.tokens == (2, 3, 4)
        assert kept.parents == (-1, 0, 1)


class TestDraftersThatCannotSay:
    """They are judged by what became of their nodes, and by what drafting took."""

    def lived(self, kept, seconds):
        pace = learned(0.004, 0.001)
        draft = Draft.chain([1, 2, 3])
        for _ in range(40):
            pace.spend("x", 3 * seconds, [draft], ALONE)
            pace.learn("x", draft, Verdict(tuple(range(kept)), 0))
        return pace

    def test_a_good_and_cheap_one_is_asked_for_all(self):
        assert self.lived(3, 0.0001).rooms("x", [3], ALONE) == [3]

    def test_a_bad_one_is_asked_again_only_now_and_then(self):
        pace = self.lived(0, 0.0001)
        asked = [pace.rooms("x", [3], ALONE)[0] for _ in range(2 * (PROBE + 1))]
        assert asked == ([0] * PROBE + [1]) * 2

    def test_a_good_one_that_costs_too_much_is_not_asked(self):
        assert self.lived(3, 0.010).rooms("x", [3], ALONE) == [0]


class TestProfit:
    """A pass of 4 + 1 ms, a draft of two nodes: 2 ms for its rows, and what drafting took."""

    def steps(self, pace, count, kept, seconds, sources=()):
        rested = []
        for _ in range(count):
            rested.append(pace.rests("head"))
            draft = Draft((1, 2), (-1, 0), acceptance=(0.5, 0.5), sources=sources)
            pace.spend("head", seconds, [draft], ALONE)
            pace.learn("head", draft, Verdict(tuple(range(kept)), 7))
        return rested

    def test_a_drafter_that_earns_what_it_costs_never_rests(self):
        assert not any(self.steps(learned(0.004, 0.001), 300, 1, 0.0025))  # 5 ms saved, 4.5 spent

    def test_one_that_does_not_rests_and_is_tried_again(self):
        rested = self.steps(learned(0.004, 0.001), 200, 1, 0.0035)  # 5 ms saved, 5.5 spent
        begin = rested.index(True)
        assert begin < 40
        assert rested[begin : begin + 2 * (REST + AGAIN)] == ([True] * REST + [False] * AGAIN) * 2

    def test_where_drafting_took_long_a_less_likely_node_pays_too(self):
        """A step of 5 ms: a node must hold with more than 1 / 5; one that took 5 ms to draft, with more than 1 / 10."""
        without, with_it = learned(0.004, 0.001), learned(0.004, 0.001)
        with_it.rests("x")
        for _ in range(200):
            with_it.spend("x", 0.005, [chain(0.15)], ALONE)
        assert [len(trim(pace, [chain(0.15)], 1)[0]) for pace in (without, with_it)] == [0, 1]

    def test_it_drafts_again_when_it_pays_again(self):
        pace = learned(0.004, 0.001)
        self.steps(pace, 60, 0, 0.001)
        assert not any(self.steps(pace, 3 * (REST + AGAIN), 2, 0.001)[-REST:])

    def test_what_another_guessed_for_nothing_does_not_count(self):
        pace = learned(0.004, 0.001)
        assert not any(self.steps(pace, 100, 0, 0.5, ("ngram", "ngram")))


class TestTheWholePass:
    """What a row costs depends on all rows of the pass: those of other drafters' sequences, and those of prompts."""

    def free_up_to(self, rows):
        """A pass takes the same up to so many rows; each further row takes as long as a pass."""
        pace = Pace()
        for _ in range(50):
            for n in range(1, 3 * rows):
                pace.cost.learn(n, 0.010 * max(1, n - rows + 1))
        return pace

    def test_two_drafters_share_the_rows_that_are_free(self):
        pace, draft = self.free_up_to(8), chain(0.9, 0.9, 0.9, 0.9, 0.9, 0.9)
        alone = pace.trim({"x": [draft]}, PassSize(2, 2))["x"]
        both = pace.trim({"x": [draft], "y": [draft]}, PassSize(2, 2))
        assert len(alone[0]) == 6
        assert len(both["x"][0]) + len(both["y"][0]) == 6

    def test_the_likeliest_nodes_win_whoever_drafted_them(self):
        sure, unsure = chain(0.9, 0.9, 0.9, 0.9), chain(0.3, 0.3, 0.3, 0.3)
        both = self.free_up_to(6).trim({"x": [unsure], "y": [sure]}, PassSize(2, 2))
        assert [len(both["x"][0]), len(both["y"][0])] == [0, 4]

    def test_prompts_in_the_pass_take_the_free_rows(self):
        pace, draft = self.free_up_to(8), chain(0.9, 0.9, 0.9)
        assert len(pace.trim({"x": [draft]}, PassSize(1, 1))["x"][0]) == 3
        assert len(pace.trim({"x": [draft]}, PassSize(1 + 20, 1))["x"][0]) == 0

    def test_a_drafter_that_cannot_say_is_asked_for_fewer_beside_others(self):
        pace, draft = self.free_up_to(8), Draft.chain([1, 2, 3])
        for _ in range(40):
            pace.learn("x", draft, Verdict((0, 1, 2), 0))
        assert pace.rooms("x", [3], PassSize(1, 1)) == [3]
        assert pace.rooms("x", [3], PassSize(20, 20)) == [0]

    def test_a_head_beside_many_others_earns_less(self):
        """Its rows cost what rows cost in that pass."""
        for size, pays in ((PassSize(1, 1), True), (PassSize(30, 30), False)):
            pace, draft = self.free_up_to(8), chain(0.9, 0.9)
            rested = []
            for _ in range(40):
                rested.append(pace.rests("head"))
                pace.spend("head", 0.001, [draft], size)
                pace.learn("head", draft, Verdict((0,), 7))
            assert any(rested) != pays
