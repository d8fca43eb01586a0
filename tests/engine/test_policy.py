"""What to draft: the nodes that pay."""

import pytest

from outrider.core.draft import Draft
from outrider.core.verify import Verdict
from outrider.engine.policy import ASK_AGAIN, REST, TRIAL, DraftingPolicy, PassSize


def learned(a, b, rows=(1, 2, 4, 8), times=20):
    policy = DraftingPolicy()
    for _ in range(times):
        for n in rows:
            policy.cost.learn(n, a + b * n)
    return policy


ALONE = PassSize(1, 1)  # one sequence that writes, and nothing else in the pass


def trim(policy, drafts, rows):
    """Of one drafter, for a pass of `rows` sequences."""
    return policy.trim({"x": drafts}, PassSize(rows, rows))["x"]


def chain(*chances):
    return Draft.chain(list(range(len(chances))), acceptance=chances)


class TestLengths:
    """Every row of a pass looks at the whole sequence, so long ones make rows dear."""

    def test_each_range_of_lengths_has_its_own_costs(self):
        policy = learned(0.004, 0.001)
        for _ in range(200):
            policy.use_length(900)
            for rows in (1, 2, 4, 8):
                policy.cost.learn(rows, 0.006 + 0.003 * rows)
        assert policy.cost.next_row(2) == pytest.approx(0.003, rel=0.05)
        policy.use_length(100)
        assert policy.cost.next_row(2) == pytest.approx(0.001, rel=0.05)
        policy.use_length(700)
        assert policy.cost.next_row(2) == pytest.approx(0.003, rel=0.05)

    def test_a_new_range_begins_with_what_the_nearest_one_knows_and_soon_knows_better(self):
        policy = learned(0.004, 0.001, times=200)
        policy.use_length(300)
        assert policy.cost.at(4) == pytest.approx(0.008, rel=0.05)
        for _ in range(12):
            for rows in (1, 2, 4, 8):
                policy.cost.learn(rows, 0.006 + 0.001 * rows)
        assert policy.cost.at(4) == pytest.approx(0.010, rel=0.05)
        policy.use_length(255)
        assert policy.cost.at(4) == pytest.approx(0.008, rel=0.05)

    def test_a_new_range_begins_with_the_nearest_one_not_with_any(self):
        policy = learned(0.004, 0.001, times=200)
        policy.use_length(5000)  # far away: its rows cost three times as much
        for _ in range(200):
            for rows in (1, 2, 4, 8):
                policy.cost.learn(rows, 0.006 + 0.003 * rows)
        policy.use_length(300)
        assert policy.cost.next_row(2) == pytest.approx(0.001, rel=0.1)
        policy.use_length(3000)
        assert policy.cost.next_row(2) == pytest.approx(0.003, rel=0.1)


class TestTrim:
    def test_sure_nodes_stay_and_hopeless_ones_go(self):
        policy = learned(0.004, 0.001)
        (kept,) = trim(policy, [chain(0.95, 0.95, 0.05, 0.9)], 1)
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
        policy = learned(0.004, 0.001)
        draft = Draft.chain([1, 2, 3])
        for _ in range(40):
            policy.learn_cost("x", 3 * seconds, [draft], ALONE)
            policy.learn("x", draft, Verdict(tuple(range(kept)), 0))
        return policy

    def test_a_good_and_cheap_one_is_asked_for_all(self):
        assert self.lived(3, 0.0001).budgets("x", [3], ALONE) == [3]

    def test_one_of_several_guesses_is_enough(self):
        """Two siblings of which the second is always kept: at that depth the drafter is always right."""
        policy, tree = learned(0.004, 0.001), Draft((1, 2), (-1, -1))
        for _ in range(40):
            policy.learn("x", tree, Verdict((1,), 0))
        assert policy.budgets("x", [1], ALONE) == [1]
        assert len(trim(policy, [Draft.chain([1])], 1)[0]) == 1

    def test_a_bad_one_is_asked_again_only_now_and_then(self):
        policy = self.lived(0, 0.0001)
        asked = [policy.budgets("x", [3], ALONE)[0] for _ in range(2 * (ASK_AGAIN + 1))]
        assert asked == ([0] * ASK_AGAIN + [1]) * 2

    def test_a_good_one_that_costs_too_much_is_not_asked(self):
        assert self.lived(3, 0.010).budgets("x", [3], ALONE) == [0]


class TestEarnings:
    """A pass of 4 + 1 ms, a draft of two nodes: 2 ms for its rows, and what drafting took."""

    def steps(self, policy, count, kept, seconds, sources=()):
        rested = []
        for _ in range(count):
            rested.append(policy.rests("head"))
            draft = Draft((1, 2), (-1, 0), acceptance=(0.5, 0.5), sources=sources)
            policy.learn_cost("head", seconds, [draft], ALONE)
            policy.learn("head", draft, Verdict(tuple(range(kept)), 7))
        return rested

    def test_a_drafter_that_earns_what_it_costs_never_rests(self):
        assert not any(self.steps(learned(0.004, 0.001), 300, 1, 0.0025))  # 5 ms saved, 4.5 spent

    def test_one_that_does_not_rests_and_is_tried_again(self):
        rested = self.steps(learned(0.004, 0.001), 200, 1, 0.0035)  # 5 ms saved, 5.5 spent
        begin = rested.index(True)
        assert begin < 40
        assert rested[begin : begin + 2 * (REST + TRIAL)] == ([True] * REST + [False] * TRIAL) * 2

    def test_where_drafting_took_long_a_less_likely_node_pays_too(self):
        """A step of 5 ms: a node must hold with more than 1 / 5; one that took 5 ms to draft, with more than 1 / 10."""
        without, with_it = learned(0.004, 0.001), learned(0.004, 0.001)
        with_it.rests("x")
        for _ in range(200):
            with_it.learn_cost("x", 0.005, [chain(0.15)], ALONE)
        assert [len(trim(policy, [chain(0.15)], 1)[0]) for policy in (without, with_it)] == [0, 1]

    def test_it_drafts_again_when_it_pays_again(self):
        policy = learned(0.004, 0.001)
        self.steps(policy, 60, 0, 0.001)
        assert not any(self.steps(policy, 3 * (REST + TRIAL), 2, 0.001)[-REST:])

    def test_what_another_guessed_for_nothing_does_not_count(self):
        policy = learned(0.004, 0.001)
        assert not any(self.steps(policy, 100, 0, 0.5, ("ngram", "ngram")))


class TestTheWholePass:
    """What a row costs depends on all rows of the pass: those of other drafters' sequences, and those of prompts."""

    def free_up_to(self, rows):
        """A pass takes the same up to so many rows; each further row takes as long as a pass."""
        policy = DraftingPolicy()
        for _ in range(50):
            for n in range(1, 3 * rows):
                policy.cost.learn(n, 0.010 * max(1, n - rows + 1))
        return policy

    def test_two_drafters_share_the_rows_that_are_free(self):
        policy, draft = self.free_up_to(8), chain(0.9, 0.9, 0.9, 0.9, 0.9, 0.9)
        alone = policy.trim({"x": [draft]}, PassSize(2, 2))["x"]
        both = policy.trim({"x": [draft], "y": [draft]}, PassSize(2, 2))
        assert len(alone[0]) == 6
        assert len(both["x"][0]) + len(both["y"][0]) == 6

    def test_the_likeliest_nodes_win_whoever_drafted_them(self):
        sure, unsure = chain(0.9, 0.9, 0.9, 0.9), chain(0.3, 0.3, 0.3, 0.3)
        both = self.free_up_to(6).trim({"x": [unsure], "y": [sure]}, PassSize(2, 2))
        assert [len(both["x"][0]), len(both["y"][0])] == [0, 4]

    def test_prompts_in_the_pass_take_the_free_rows(self):
        policy, draft = self.free_up_to(8), chain(0.9, 0.9, 0.9)
        assert len(policy.trim({"x": [draft]}, PassSize(1, 1))["x"][0]) == 3
        assert len(policy.trim({"x": [draft]}, PassSize(1 + 20, 1))["x"][0]) == 0

    def test_a_drafter_that_cannot_say_is_asked_for_fewer_beside_others(self):
        policy, draft = self.free_up_to(8), Draft.chain([1, 2, 3])
        for _ in range(40):
            policy.learn("x", draft, Verdict((0, 1, 2), 0))
        assert policy.budgets("x", [3], PassSize(1, 1)) == [3]
        assert policy.budgets("x", [3], PassSize(20, 20)) == [0]

    def test_a_head_beside_many_others_earns_less(self):
        """Its rows cost what rows cost in that pass."""
        for size, pays in ((PassSize(1, 1), True), (PassSize(30, 30), False)):
            policy, draft = self.free_up_to(8), chain(0.9, 0.9)
            rested = []
            for _ in range(40):
                rested.append(policy.rests("head"))
                policy.learn_cost("head", 0.001, [draft], size)
                policy.learn("head", draft, Verdict((0,), 7))
            assert any(rested) != pays
