"""What to draft: the drafters that pay, and the nodes that pay."""

import pytest
from simulated import Guesser, measured, ran, seconds

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.stats import estimated_speedup
from outrider.engine.policy import (
    EXPLORATION,
    FIRST_FREE,
    FULLY_EXPLORED,
    LONG_DECLINED,
    LOOK_AGAIN,
    PROVEN,
    DraftingPolicy,
    DraftOutcome,
    PassPlan,
    PassSize,
)
from outrider.engine.throughput import FIRST_PASSES


def learned(a, b, rows=(1, 2, 4, 8), times=20):
    policy = DraftingPolicy()
    for _ in range(times):
        for n in rows:
            policy.cost.learn(n, a + b * n)
    return policy


def trim(policy, drafts, rows):
    """For a pass of `rows` sequences."""
    return policy.trim(drafts, PassSize(rows, rows))


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


class TestNodes:
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

    def test_where_drafting_took_long_a_less_likely_node_pays_too(self):
        """A step of 5 ms: a node must hold with more than 1 / 5; after 5 ms of drafting, with more than 1 / 10."""
        policy = learned(0.004, 0.001)
        kept = [policy.trim([chain(0.15)], PassSize(1, 1), drafting)[0] for drafting in (0.0, 0.005)]
        assert [len(draft) for draft in kept] == [0, 1]

    def free_up_to(self, rows):
        """A pass takes the same up to so many rows; each further row takes as long as a pass."""
        policy = DraftingPolicy()
        for _ in range(50):
            for n in range(1, 3 * rows):
                policy.cost.learn(n, 0.010 * max(1, n - rows + 1))
        return policy

    def test_two_drafts_share_the_rows_that_are_free(self):
        policy, draft = self.free_up_to(8), chain(0.9, 0.9, 0.9, 0.9, 0.9, 0.9)
        assert len(policy.trim([draft], PassSize(2, 2))[0]) == 6
        assert sum(map(len, policy.trim([draft, draft], PassSize(2, 2)))) == 6

    def test_the_likeliest_nodes_win_whoever_drafted_them(self):
        sure, unsure = chain(0.9, 0.9, 0.9, 0.9), chain(0.3, 0.3, 0.3, 0.3)
        assert [len(kept) for kept in self.free_up_to(6).trim([unsure, sure], PassSize(2, 2))] == [0, 4]

    def test_prompts_in_the_pass_take_the_free_rows(self):
        policy, draft = self.free_up_to(8), chain(0.9, 0.9, 0.9)
        assert len(policy.trim([draft], PassSize(1, 1))[0]) == 3
        assert len(policy.trim([draft], PassSize(1 + 20, 1))[0]) == 0


class TestEstimate:
    """The estimated speed-up is what a race shows, on a clock of which all costs are known."""

    REQUESTS = [(1, 400)] * 3

    @pytest.mark.parametrize("rate", [0.2, 0.6, 0.95])
    @pytest.mark.parametrize("row", [0.0005, 0.004])
    @pytest.mark.parametrize("drafting", [0.0001, 0.004])
    def test_as_in_a_race(self, monkeypatch, rate, row, drafting):
        def cost(rows, step):
            return 0.010 + row * rows

        def guesser(clock):
            return [Guesser(clock, "guesser", lambda place: rate, lambda calls: drafting)]

        plain, _ = seconds(monkeypatch, cost, lambda clock: [], self.REQUESTS, measured())
        engine, drafted, _ = ran(monkeypatch, cost, guesser, self.REQUESTS, learned(0.010, row))
        assert engine.stats.tokens == 1200
        assert estimated_speedup([engine.stats]) == pytest.approx(plain / drafted, rel=0.08)

    def test_a_drafter_that_is_asked_for_nothing_counts(self, monkeypatch):
        def cost(rows, step):
            return 0.010 + 0.001 * rows

        def idle(clock):
            made = Guesser(clock, "idle", lambda place: 0.0, lambda calls: 0.0, free=True)

            def propose(seqs, budgets):
                clock.now += 0.005
                return [Draft()] * len(seqs)

            made.propose = propose
            return [made]

        plain, _ = seconds(monkeypatch, cost, lambda clock: [], self.REQUESTS, measured())
        engine, drafted, _ = ran(monkeypatch, cost, idle, self.REQUESTS, measured())
        assert engine.stats.drafted == 0
        estimate = estimated_speedup([engine.stats])
        assert estimate == pytest.approx(plain / drafted, rel=0.02)
        assert estimate < 0.99

    def test_without_costs_nothing_is_told(self, monkeypatch):
        def right(clock):
            return [Guesser(clock, "right", lambda place: 1.0, lambda calls: 0.0)]

        engine, _, _ = ran(monkeypatch, lambda rows, step: 0.01, right, self.REQUESTS)
        assert estimated_speedup([engine.stats]) is None


class Silent:
    """Stands for a drafter that does not say how likely its nodes are."""

    reports_acceptance = is_free = False
    layers = ()

    def unread(self, seq):
        return 0


class Head(Silent):
    reports_acceptance = True


class Reader(Silent):
    def unread(self, seq):
        return len(seq.tokens) - 1


ALONE = PassPlan(1.0, 0.005, 1)  # a plain pass of one sequence


def sequence(prompt=3, written=0, seconds=0.0):
    seq = Sequence(0, [1] * prompt, SamplingParams(max_tokens=1000))
    for token in range(written):
        seq.tokens.append(token)
        seq.output.append(token)
    seq.stats.tokens = seq.stats.steps = written
    seq.stats.seconds = {"target": seconds}
    return seq


class TestReading:
    """Where a draft model writes in rounds on a device: whether a prompt that it has not read is worth reading."""

    def tried(self, drafting, plain=1000.0):
        """Both ways were tried at these speeds; the target takes 0.1 ms for a token of a prompt."""
        policy = learned(0.001, 0.0)
        policy.learn_prompt(100, 0.010)
        for drafted, speed in ((True, drafting), (False, plain)):
            for _ in range(FIRST_PASSES):
                policy.trial.learn(1, drafted, 100, 100 / speed, work="chat")
        return policy

    def repays(self, policy, prompt, written=0, drafter=None):
        return policy.reading_repays([drafter or Reader()], [sequence(prompt, written)], "chat")

    def test_a_long_prompt_for_few_tokens_does_not_repay(self):
        """64 tokens are expected, each saves 0.5 ms: as much as 1,067 tokens take to read."""
        policy = self.tried(2000.0)
        assert [self.repays(policy, prompt) for prompt in (500, 1000, 1150, 5000)] == [True, True, False, False]

    def test_a_long_answer_repays_more(self):
        policy = self.tried(2000.0)
        assert self.repays(policy, 1000, written=400)
        assert not self.repays(policy, 1000, written=40)

    def test_what_is_read_already_costs_nothing(self):
        assert self.repays(self.tried(500.0), 5000, drafter=Silent())

    def test_nothing_repays_where_drafts_are_slower(self):
        assert not self.repays(self.tried(500.0), 100)

    def test_before_both_ways_were_tried_a_saving_is_assumed(self):
        policy = learned(0.001, 0.0)
        policy.learn_prompt(100, 0.010)
        assert [self.repays(policy, prompt) for prompt in (500, 1000)] == [True, False]

    def test_nothing_is_read_before_a_pass_was_measured(self):
        assert not self.repays(DraftingPolicy(), 100)

    def test_what_a_prompt_takes_on_a_device_is_assumed_until_it_is_measured(self):
        """64 tokens save 0.3 ms each; a token is read in 0.3 of 0.05 ms."""
        assert [self.repays(learned(0.001, 0.0), prompt) for prompt in (1000, 2000)] == [True, False]


class TestWhoIsAsked:
    def lived(self, drafter, kept, seconds, drafts=40):
        """After as many drafts of three nodes, of which `kept` were right, each draft or node of which took that."""
        policy, draft = learned(0.004, 0.001), Draft.chain([1, 2, 3])
        for _ in range(drafts):
            policy.learn_cost(drafter, seconds * (1 if drafter.reports_acceptance else 3), [draft], 0)
            policy.learn([DraftOutcome(drafter, draft, 1.0, 3)], [*[1, 2, 3][:kept], 9], kept)
        return policy

    def asked(self, policy, drafter, chance=1.0, seq=None, plan=ALONE):
        return policy.wanted(drafter, [seq or sequence()], [3], [chance], plan)[0]

    def test_a_good_and_cheap_one_is_asked_for_all(self):
        for drafter in (Silent(), Head()):
            assert self.asked(self.lived(drafter, 3, 0.0001), drafter) == 3

    def test_a_good_one_that_costs_too_much_is_not_asked(self):
        for drafter, cost in ((Silent(), 0.010), (Head(), 0.020)):
            assert self.asked(self.lived(drafter, 3, cost), drafter) == 0

    def test_a_bad_one_is_not_asked_however_cheap(self):
        for drafter in (Silent(), Head()):
            assert self.asked(self.lived(drafter, 0, 0.0001), drafter) == 0

    def test_it_is_asked_for_no_more_nodes_than_pay(self):
        drafter = Silent()
        assert self.asked(self.lived(drafter, 1, 0.001), drafter) == 1

    def test_what_nodes_cost_is_told_in_tokens(self):
        """A plain pass of 5 ms, 1 ms a row; drafts of 3 nodes that are all kept, 1 ms each: 4 tokens in 9 ms."""
        drafter = Head()
        policy = self.lived(drafter, 3, 0.001, drafts=200)
        row, guess = policy.prices(drafter, 1, ALONE)
        assert row == pytest.approx(0.001 / (0.009 / 4), rel=0.1)
        assert guess == pytest.approx(0.00025 / (0.009 / 4), rel=0.1)
        assert policy.prices(drafter, 4, PassPlan(4.0, 0.008, 4))[0] > row  # nodes must be worth more in a batch
        assert policy.prices(Head(), 1, ALONE) is None  # never asked
        silent = Silent()  # it is asked for a length, and its seconds are those of a node
        assert self.lived(silent, 3, 0.001).prices(silent, 1, ALONE) is None
        assert DraftingPolicy().prices(drafter, 1, ALONE) is None  # no pass was measured

    def test_one_of_several_guesses_is_enough(self):
        """Two siblings of which the second is always kept: at that depth the drafter is always right."""
        drafter, policy = Silent(), learned(0.004, 0.001)
        for _ in range(40):
            policy.learn([DraftOutcome(drafter, Draft((1, 2), (-1, -1)), 1.0, 2)], [2, 5], 1)
        assert policy.stated(drafter, Draft.chain([1]))[0] > 0.95

    def test_where_others_have_guessed_the_token_already_it_is_not_needed(self):
        drafter = Head()
        policy = self.lived(drafter, 1, 0.001)  # 5 ms saved, 1 + 3 spent
        assert self.asked(policy, drafter, chance=1.0) == 3
        assert self.asked(policy, drafter, chance=0.05) == 0

    def test_where_it_is_doubtful_what_others_have_guessed_it_is_asked_as_if_they_had_not(self):
        drafter = Head()
        policy = self.lived(drafter, 1, 0.001)
        assert self.asked(policy, drafter, chance=0.2) == 3
        assert self.asked(self.lived(drafter, 0, 0.001), drafter, chance=0.2) == 0  # that must pay, too

    def test_in_a_pass_that_writes_more_it_is_worth_less(self):
        drafter = Head()
        policy = self.lived(drafter, 1, 0.001)
        assert self.asked(policy, drafter, plan=PassPlan(3.0, 0.008, 4)) == 0

    def test_beside_many_others_its_rows_cost_more(self):
        drafter, policy = Head(), DraftingPolicy()
        for _ in range(50):
            for n in range(1, 60):
                policy.cost.learn(n, 0.010 * max(1, n - 7))
        for _ in range(40):
            policy.learn_cost(drafter, 0.001, [chain(0.9)], 0)
            policy.learn([DraftOutcome(drafter, chain(0.9), 1.0, 1)], [0, 5], 1)
        assert self.asked(policy, drafter, plan=PassPlan(1.0, 0.010, 1)) == 3
        assert self.asked(policy, drafter, plan=PassPlan(30.0, 0.230, 30)) == 0

    def test_by_two_wrong_guesses_nobody_is_given_up_and_by_many_everybody(self):
        """A node saves 5 ms and takes 2.5: it pays from 0.5 on."""
        drafter, policy, draft = Silent(), learned(0.004, 0.001), Draft.chain([1])
        asked = []
        for _ in range(12):
            policy.learn_cost(drafter, 0.0015, [draft], 0)
            asked.append(self.asked(policy, drafter) > 0)
            policy.learn([DraftOutcome(drafter, draft, 1.0, 1)], [2], 0)
        assert asked[:3] == [True] * 3
        assert not any(asked[6:])

    def test_tokens_that_another_had_guessed_too_are_not_its_merit(self):
        drafter, other, policy = Head(), Head(), learned(0.004, 0.001)
        same, longer = Draft.chain([1, 2]), Draft.chain([1, 2, 3])
        for _ in range(60):
            policy.learn([DraftOutcome(drafter, same, 1.0, 0), DraftOutcome(other, longer, 1.0, 3)], [1, 2, 3, 9], 3)
        assert policy.record(drafter).tokens < 0.1
        assert policy.record(other).tokens == pytest.approx(1.0, abs=0.1)

    def test_the_chance_is_that_nobody_has_the_next_token(self):
        policy, seq = DraftingPolicy(), sequence()
        assert policy.chance(Head(), seq, []) == 1.0
        assert policy.chance(Head(), seq, [chain(0.9, 0.5), chain(0.3)]) == pytest.approx(0.1)
        assert policy.chance(Head(), seq, [Draft((1, 2), (-1, -1), acceptance=(0.5, 0.4))]) == pytest.approx(0.1)

    def test_where_draws_go_alone_it_has_to_bring_more_than_the_guesses_would(self):
        policy, drafter = DraftingPolicy(), Head()
        seq = Sequence(0, [1, 2], SamplingParams(temperature=1.0))
        assert seq.rule == "rejection"
        tokens = policy.record(drafter).tokens
        assert policy.chance(drafter, seq, [chain(0.9, 1.0)]) == pytest.approx(max(0.0, 1.0 - 1.8 / tokens))
        assert policy.chance(drafter, seq, [chain(0.3)]) == pytest.approx(1.0 - 0.3 / tokens)


class TestManyAtOnce:
    """Where rows are dear a head has nothing to do with several sequences at once."""

    def declined(self, count, seqs=4):
        policy, drafter, draft = learned(0.0001, 0.010, rows=(1, 2, 4, 8, 16)), Head(), Draft.chain([1, 2, 3])
        for _ in range(40):  # what it drafts is half right
            policy.learn_cost(drafter, 0.0001, [draft], 0)
            policy.learn([DraftOutcome(drafter, draft, 1.0, 3)], [1, 9], 1)
        several, plan = [sequence() for _ in range(seqs)], PassPlan(float(seqs), policy.cost.at(seqs), seqs)
        for _ in range(count):
            assert not any(policy.wanted(drafter, several, [3] * seqs, [1.0] * seqs, plan))
        return policy, drafter

    def test_after_many_passes_in_vain_few_are_looked_at(self):
        policy, drafter = self.declined(LONG_DECLINED - 1)
        assert policy.considers(drafter, 4)
        policy, drafter = self.declined(LONG_DECLINED + 1)
        looked = [policy.considers(drafter, 4) for _ in range(LOOK_AGAIN)]
        assert looked == [False] * (LOOK_AGAIN - 1) + [True]
        assert all(policy.considers(drafter, 1) for _ in range(LOOK_AGAIN))
        assert policy.considers(drafter, 8), "with other numbers of sequences nothing is known of it"

    def test_what_others_found_anyway_is_no_decline(self):
        policy, drafter, several = learned(0.010, 0.0), Head(), [sequence() for _ in range(4)]
        plan = PassPlan(4.0, policy.cost.at(4), 4)
        for _ in range(2 * LONG_DECLINED):
            assert not any(policy.wanted(drafter, several, [3] * 4, [0.0] * 4, plan))
        assert all(policy.considers(drafter, 4) for _ in range(LOOK_AGAIN))

    def test_a_node_must_be_worth_more_in_a_batch(self):
        """A row costs a third of a pass of one sequence, and two thirds of what a token of four at once takes."""
        policy = learned(0.002, 0.001, rows=(1, 2, 4, 5, 8, 9))
        alone, beside = 0.001 / 0.003, 0.001 / 0.0015
        for share, count in ((0.95, 0), (1.1, 1), (1.3, 1)):
            assert len(trim(policy, [chain(share * alone)], 1)[0]) == count
        for share, count in ((0.95, 0), (1.1, 0), (1.3, 1)):
            assert len(trim(policy, [chain(share * beside)], 4)[0]) == count

    def test_it_rests_where_nothing_pays_and_not_alone(self):
        policy, drafter = self.declined(0)
        assert policy.rests(drafter, 4)
        assert not policy.rests(drafter, 1)
        cheap = learned(0.010, 0.0, rows=(1, 2, 4, 8))
        assert not cheap.rests(drafter, 4)
        assert not DraftingPolicy().rests(drafter, 4), "what rows cost is not known yet"

    def test_it_rests_where_it_was_not_asked_for_long(self):
        policy, drafter = self.declined(LONG_DECLINED)
        for _ in range(400):
            for rows in (1, 2, 4, 8, 16):
                policy.cost.learn(rows, 0.010)  # rows have become cheap
        assert policy.rests(drafter, 4)
        plan = PassPlan(4.0, policy.cost.at(4), 4)
        assert any(policy.wanted(drafter, [sequence() for _ in range(4)], [3] * 4, [1.0] * 4, plan))
        assert not policy.rests(drafter, 4)

    def test_a_drafter_that_is_gone_is_forgotten(self):
        policy, drafter = self.declined(LONG_DECLINED)
        policy.forget(id(drafter))
        assert not policy._declined


class TestFree:
    """Lookups cost little each, and for many sequences more than they bring."""

    def asked(self, policy, seqs, saving, seconds, passes):
        """In how many of these passes they were asked, where a draft holds with that probability."""
        count = 0
        for _ in range(passes):
            if policy.asks_free(seqs):
                count += 1
                size = PassSize(seqs, seqs)
                policy.learn_free(seqs, policy.expected([[chain(saving)]] * seqs, size), size, seconds)
        return count

    def test_where_they_pay_they_are_always_asked(self):
        assert self.asked(learned(0.004, 0.001), 1, 0.9, 0.0001, 200) == 200

    def test_where_they_do_not_they_take_a_bounded_share_of_the_time(self):
        policy = learned(0.004, 0.001, rows=(1, 2, 4, 8, 16, 17, 18))
        count = self.asked(policy, 16, 0.05, 0.002, 1000)
        assert 0 < (count - FIRST_FREE) * 0.002 <= 1.1 * EXPLORATION * 1000 * policy.cost.at(16)

    def test_with_many_sequences_the_share_is_smaller(self):
        """There is less to be gained, and with a lookup and a head each may take its share."""
        policy = learned(0.004, 0.001, rows=(1, 2, 4, 8, 16, 17, 18))
        count = self.asked(policy, 16, 0.05, 0.002, 1000)
        assert 0 < (count - FIRST_FREE) * 0.002 <= 1.1 * EXPLORATION * FULLY_EXPLORED / 16 * 1000 * policy.cost.at(16)

    def test_batches_of_another_size_are_another_matter_and_what_pays_again_is_noticed(self):
        policy = learned(0.004, 0.001, rows=(1, 2, 4, 8, 16, 17, 18))
        self.asked(policy, 16, 0.05, 0.002, 300)
        assert self.asked(policy, 1, 0.9, 0.0001, 20) == 20
        assert self.asked(policy, 1, 0.05, 0.0005, 300) < 150
        assert self.asked(policy, 1, 0.9, 0.0005, 100) > 90


class TestStart:
    """A draft model that must read the prompt first is asked only where its drafts will repay that."""

    def test_before_anything_is_measured_nothing_is_read_and_then_a_first_request_counts_as_one_of_usual_length(self):
        drafter, policy = Reader(), DraftingPolicy()
        assert policy.wanted(drafter, [sequence(prompt=50)], [3], [1.0], PassPlan(1.0, policy.cost.at(1), 1)) == [0]
        policy = learned(0.004, 0.001)
        policy.learn_prompt(100, 0.05)
        assert policy.wanted(drafter, [sequence(prompt=50)], [3], [1.0], ALONE)[0] > 0
        assert policy.wanted(drafter, [sequence(prompt=5000)], [3], [1.0], ALONE) == [0]

    def policy(self, drafter):
        policy, draft = learned(0.004, 0.001), Draft.chain([1, 2, 3])
        for _ in range(40):
            policy.learn_cost(drafter, 0.003, [draft], 0)
            policy.learn([DraftOutcome(drafter, draft, 1.0, 3)], [1, 2, 3, 9], 3)
        policy.learn_cost(drafter, 0.003 + 0.5, [draft], 500)
        return policy

    def test_what_a_token_takes_to_read_is_measured(self):
        drafter = Reader()
        assert self.policy(drafter).record(drafter).read == pytest.approx(0.001)

    def test_a_short_prompt_is_read_a_long_one_is_not(self):
        drafter = Reader()
        policy = self.policy(drafter)
        asked = [policy.wanted(drafter, [sequence(n, 20)], [3], [1.0], ALONE)[0] for n in (10, 5000)]
        assert asked == [3, 0]

    def test_a_long_prompt_is_read_where_much_was_written_already(self):
        drafter = Reader()
        policy = self.policy(drafter)
        assert policy.wanted(drafter, [sequence(500, 20)], [3], [1.0], ALONE) == [0]
        assert policy.wanted(drafter, [sequence(500, 400)], [3], [1.0], ALONE) == [3]

    def test_or_where_sequences_write_much_as_a_rule(self):
        drafter = Reader()
        policy = self.policy(drafter)
        for _ in range(3):
            policy.end(sequence(3, 500))
        assert policy.wanted(drafter, [sequence(500, 20)], [3], [1.0], ALONE) == [3]


class TestFirstTexts:
    """What a drafter reads before it is known what it is worth stays a small share of the time of all requests."""

    def policy(self, outcomes):
        drafter, policy, draft = Reader(), learned(0.004, 0.001), Draft.chain([1, 2, 3])
        policy.learn_prompt(100, 0.1)  # 1 ms a token; the drafter is assumed to take 0.3
        for _ in range(outcomes):
            policy.learn([DraftOutcome(drafter, draft, 1.0, 3)], [1, 2, 3, 9], 3)
        return policy, drafter

    def asked(self, policy, drafter, prompt):
        return policy.wanted(drafter, [sequence(prompt)], [3], [1.0], ALONE)[0] > 0

    def test_an_unknown_drafter_waits_until_there_was_enough_time(self):
        """64 tokens of 5 ms: 43 tokens may be read, at first."""
        policy, drafter = self.policy(0)
        assert not self.asked(policy, drafter, 60)
        policy.end(sequence(written=64, seconds=0.5))
        assert self.asked(policy, drafter, 60)

    def test_what_was_read_is_charged(self):
        policy, drafter = self.policy(0)
        assert [self.asked(policy, drafter, 40) for _ in range(3)] == [True, False, False]

    def test_a_head_does_not_wait(self):
        """It takes in states that are there; without that the first request of a process was half over before it."""
        policy, drafter = self.policy(0)
        drafter.layers = (1,)
        assert [self.asked(policy, drafter, 60) for _ in range(3)] == [True] * 3
        assert self.asked(policy, Reader(), 40), "what heads take in is not charged to models that read"

    def test_a_known_one_reads_what_repays(self):
        policy, drafter = self.policy(PROVEN)
        assert [self.asked(policy, drafter, 60) for _ in range(3)] == [True] * 3
        assert not self.asked(policy, drafter, 5000)

    def test_while_it_is_not_known_what_a_prompt_takes_nothing_is_read(self):
        policy, drafter = learned(0.004, 0.001), Reader()
        assert not self.asked(policy, drafter, 30)
        policy.learn_prompt(100, 0.1)
        assert self.asked(policy, drafter, 30)


class TestExploration:
    def test_it_never_costs_more_than_its_share_of_the_request(self):
        drafter = Head()
        policy = TestWhoIsAsked().lived(drafter, 0, 0.001)
        seq, spent, asked = sequence(), 0.0, 0
        for step in range(2000):
            seq.stats.seconds["target"] = 0.005 * step
            if policy.wanted(drafter, [seq], [3], [1.0], ALONE) != [0]:
                spent, asked = spent + 0.001 + 0.001, asked + 1
            assert spent <= EXPLORATION * 0.005 * step + 1e-9
        assert asked > 50
        policy.end(seq)
        assert policy._explored == {}

    @pytest.mark.parametrize("count", [4, 16])
    def test_beside_many_a_drafter_is_tried_again_by_what_short_requests_leave_over(self, count):
        """None of them lives long enough for a try; together they pay for some, and for no more than their share."""
        drafter, plan = Head(), PassPlan(float(count), 0.005 * count, count)
        policy = TestWhoIsAsked().lived(drafter, 0, 0.001)
        tries, lived, price = 0, 0.0, 0.0
        for _ in range(400):
            batch = [sequence() for _ in range(count)]
            for step in range(1, 20):
                for seq in batch:
                    seq.stats.seconds["target"] = 0.005 * step / count
                asked = policy.wanted(drafter, batch, [3] * count, [1.0] * count, plan)
                tries += sum(budget > 0 for budget in asked)
            price = policy._seconds(drafter, count) + policy._rows(plan.rows, count, 1.0)
            lived += 0.005 * 19
            for seq in batch:
                policy.end(seq)
        assert tries > 0
        assert tries * price <= EXPLORATION * FULLY_EXPLORED / count * lived + price
        assert policy._explored == {}

    def test_a_drafter_that_pays_again_is_soon_asked_for_all(self):
        drafter = Head()
        policy, draft = TestWhoIsAsked().lived(drafter, 0, 0.001), Draft.chain([1, 2, 3])
        seq, tries = sequence(), 0
        while not policy.wanted(drafter, [seq], [3], [1.0], ALONE)[0] or policy.record(drafter).trial:
            seq.stats.seconds["target"] += 0.005
            if policy.record(drafter).trial:
                tries += 1
                policy.learn([DraftOutcome(drafter, draft, 1.0, 3)], [1, 2, 3, 9], 3)
        assert tries <= 5


# The simulator: what the policy takes against the best of what could have been chosen beforehand.


def cpu(rows, step):
    """Rows cost a fifth of a pass; those of a prompt a tenth of one, together."""
    return 0.004 + 0.001 * rows if rows < 100 else 0.0005 * rows


def gpu(rows, step):
    return 0.001 + 0.00001 * rows


def busy(rows, step):
    """A machine on which others work now and then."""
    return cpu(rows, step) * (1 if step // 50 % 2 else 3)


def cold(rows, step):
    return cpu(rows, step) * (20 if step < 4 else 1)


def head(rate, took=lambda calls: 0.001, length=5):
    return lambda clock: [Guesser(clock, "head", rate, took, length)]


def large(rows, step):
    """A model of 1.5 billion weights in 4 bits on two cores (LOG, 2026-11-17, midnight)."""
    return 0.0254 + 0.008 * (rows - 1) if rows < 16 else 0.007 * rows


def model(rate, took=0.0015, read=0.0002):
    return lambda clock: [Guesser(clock, "model", rate, lambda calls: took, 5, read, reports=False)]


def head_and_copy(clock):
    copied = Guesser(clock, "copy", lambda p: 0.95 if p // 60 % 2 else 0.05, lambda calls: 1e-5, 12, free=True)
    return [Guesser(clock, "head", lambda p: 0.6, lambda calls: 0.001), copied]


SHORT, LONG = [(50, 200)] * 3, [(50, 600)]
BRIEF = [(20, 200)] * 3  # prompts that an unknown draft model may read at once
# name: cost of a pass, drafters, requests, and the most that the policy may take against the best fixed choice
TRACES = {
    "a good head": (cpu, head(lambda p: 0.8), SHORT, 1.02),
    "a head that just pays": (cpu, head(lambda p: 0.5), SHORT, 1.05),
    "a bad head": (cpu, head(lambda p: 0.1), SHORT, 1.02),
    "a head that is never right": (cpu, head(lambda p: 0.0), SHORT, 1.02),
    "a head that collapses": (cpu, head(lambda p: 0.85 if p < 350 else 0.02), LONG, 0.9),
    "a head that recovers": (cpu, head(lambda p: 0.85 if p > 350 else 0.02), LONG, 0.9),
    "a head by turns good and bad": (cpu, head(lambda p: 0.85 if p // 100 % 2 else 0.02), LONG, 0.95),
    "passes by turns slow and fast": (busy, head(lambda p: 0.5), LONG, 1.07),
    "a head that gets slow": (cpu, head(lambda p: 0.6, lambda calls: 0.001 if calls < 100 else 0.006), LONG, 1.02),
    "a cold machine": (cold, head(lambda p: 0.7, lambda calls: 0.05 if calls < 2 else 0.001), [(50, 100)], 1.05),
    "a draft model": (cpu, model(lambda p: 0.8), BRIEF, 1.02),
    "a cheap draft model": (cpu, model(lambda p: 0.9, 0.0005), BRIEF, 1.02),
    "a bad draft model": (cpu, model(lambda p: 0.3), BRIEF, 1.02),
    "a draft model and a long prompt": (cpu, model(lambda p: 0.8), [(3000, 60)] * 3, 1.005),
    "one short request and a draft model that does not pay": (
        large,
        model(lambda p: 0.57, 0.008, 0.002),
        [(40, 64)],
        1.01,
    ),
    "several such requests": (large, model(lambda p: 0.57, 0.008, 0.002), [(40, 64)] * 4, 1.025),
    "the first prompt is long": (large, model(lambda p: 0.9, 0.008, 0.002), [(300, 64)], 1.005),
    "a draft model that pays in the end": (large, model(lambda p: 0.9, 0.005, 0.002), [(40, 64)] * 8, 1.07),
    "a head and a copy": (cpu, head_and_copy, [(50, 400)] * 2, 0.95),
    "a GPU": (gpu, head(lambda p: 0.7, lambda calls: 0.0004), [(50, 400)] * 2, 1.02),
    "a GPU and a bad head": (gpu, head(lambda p: 0.05, lambda calls: 0.0004), [(50, 400)] * 2, 1.02),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_regret_against_the_best_fixed_choice_is_small(name, monkeypatch):
    """Fixed choices: not to draft, or always to ask all drafters for so many nodes."""
    cost, drafters, requests, most = TRACES[name]

    def of_length(length):
        def made(clock):
            drafts = drafters(clock)
            for drafter in drafts:
                drafter._length = min(drafter._length, length)
            return drafts

        return made

    fixed = [seconds(monkeypatch, cost, of_length(length), requests)[0] for length in (1, 2, 3, 5, 12)]
    plain, _ = seconds(monkeypatch, cost, lambda clock: [], requests)
    taken, _ = seconds(monkeypatch, cost, drafters, requests, measured())
    assert taken <= most * min(plain, *fixed)


def test_a_draft_model_that_never_pays_is_never_started(monkeypatch):
    _, (drafter,) = seconds(monkeypatch, cpu, model(lambda p: 0.8), [(3000, 60)] * 3, measured())
    assert drafter.calls == 0
