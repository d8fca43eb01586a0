"""Both rules give the target's law, whatever the tree; and Stats and Sequence count what they gave."""

import functools
import itertools

import pytest
import torch
from tiny import assert_follows, assert_rate

from outrider.core.dice import DRAFT, Dice
from outrider.core.draft import ROOT, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Token
from outrider.core.stats import Stats
from outrider.core.verify import Verdict, coupled, rejection

VOCAB = 4
DEPTH = 2  # tokens that are compared
COUNT = 2500


def laws(seed):
    """A law for every context."""

    @functools.cache
    def law(context):
        random = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
        return (2 * torch.randn(VOCAB, generator=random)).softmax(-1)

    return law


DRAFTER = laws(77)


def tree(shape, seed, drawn):
    """A tree of that shape, its tokens drawn from the drafter's laws; these come with it if it says so."""
    random = torch.Generator().manual_seed(seed)
    tokens, rows = [], []
    for parent in shape:
        above = Draft(tuple(tokens), shape[: len(tokens)])
        rows.append(q := DRAFTER(tuple(tokens[i] for i in above.path(parent))))
        tokens.append(int(torch.multinomial(q, 1, generator=random)))
    return Draft(tuple(tokens), shape, torch.stack(rows) if drawn else None)


# shapes of trees: a chain, siblings under the root, siblings everywhere, many siblings (so that some are twins)
SHAPES = {
    "chain": (-1, 0, 1),
    "siblings": (-1, -1, -1),
    "branches": (-1, -1, 0, 0, 1, 1, 2),
    "crowd": (-1,) * 6 + (0, 0, 1, 2),
    "late": (-1, 0, -1, 2, 2),
}


def context(draft, node):
    return tuple(draft.tokens[i] for i in draft.path(node))


def written(draft, verdict, p, dice, position):
    """The first tokens that come out, drawn plainly from the law where the verdict gives too few."""
    tokens = [*(draft.tokens[i] for i in verdict.path), verdict.token]
    while len(tokens) < DEPTH:
        tokens.append(dice.choose(p(tuple(tokens)), position + 500 + len(tokens)))
    return tuple(tokens[:DEPTH])


def exact(p):
    return {(a, b): float(p(())[a] * p((a,))[b]) for a, b in itertools.product(range(VOCAB), repeat=2)}


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "guessed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_gives_the_law(shape, drawn):
    """Drawn nodes come anew each time from their law; guessed ones are drawn too, but say nothing of it."""
    p = laws(5)
    samples = []
    for seed in range(COUNT):
        draft = tree(SHAPES[shape], seed, drawn)
        verdict = rejection(draft, lambda node, draft=draft: p(context(draft, node)), Dice(seed), 3)
        samples.append(written(draft, verdict, p, Dice(seed), 3))
    assert_follows(samples, exact(p))


@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_gives_the_law_for_any_one_guess(shape):
    """A guessed draft may depend on anything but the dice, so one and the same draft must do."""
    p = laws(6)
    draft = tree(SHAPES[shape], 3, drawn=False)
    samples = []
    for seed in range(COUNT):
        verdict = rejection(draft, lambda node: p(context(draft, node)), Dice(seed), 3)
        samples.append(written(draft, verdict, p, Dice(seed), 3))
    assert_follows(samples, exact(p))


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_gives_the_same_tokens_as_no_draft(shape):
    p = laws(7)
    samples = []
    for seed in range(COUNT):
        dice, draft = Dice(seed), tree(SHAPES[shape], seed, drawn=False)
        verdict = coupled(draft, lambda node, depth: dice.choose(p(context(draft, node)), 3 + depth))  # noqa: B023
        tokens = [*(draft.tokens[i] for i in verdict.path), verdict.token]
        plain = []
        while len(plain) < len(tokens):
            plain.append(dice.choose(p(tuple(plain)), 3 + len(plain)))
        assert tokens == plain
        samples.append(written(draft, verdict, p, dice, 3))
    assert_follows(samples, exact(p))


def test_what_follows_a_refusal_is_the_rest_of_the_law():
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.2, 0.4, 0.3])
    samples = []
    for seed in range(4000):
        draft = Draft.chain([Dice(seed).draw(q, 3, DRAFT)], q.unsqueeze(0))
        verdict = rejection(draft, lambda node: p, Dice(seed), 3)
        samples.append(draft.tokens[0] if verdict.path else verdict.token)
    assert_follows(samples, {0: 0.5, 1: 0.3, 2: 0.2})


def test_a_drawn_token_is_kept_as_often_as_its_laws_overlap():
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.2, 0.4, 0.3])
    kept = 0
    for seed in range(4000):
        dice = Dice(seed)
        draft = Draft.chain([dice.draw(q, 3, DRAFT)], q.unsqueeze(0))
        kept += len(rejection(draft, lambda node: p, dice, 3).path)
    assert_rate(kept, 4000, float(torch.minimum(p, q).sum()))


def test_a_guessed_token_is_kept_as_often_as_the_target_writes_it():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    for token in range(VOCAB):
        kept = sum(len(rejection(Draft.chain([token]), lambda node: p, Dice(s), 3).path) for s in range(2000))
        assert_rate(kept, 2000, float(p[token]))


@pytest.mark.parametrize("drawn", [True, False])
def test_a_perfect_draft_is_always_kept(drawn):
    p = laws(8)
    for seed in range(200):
        tokens, rows = [], []
        for depth in range(4):
            rows.append(p(tuple(tokens)))
            tokens.append(Dice(seed).draw(rows[-1], depth, DRAFT) if drawn else int(rows[-1].argmax()))
        draft = Draft.chain(tokens, torch.stack(rows) if drawn else None)

        def law(node, draft=draft):
            row = p(context(draft, node))
            return row if drawn else torch.zeros(VOCAB).index_fill(0, row.argmax(), 1.0)

        assert rejection(draft, law, Dice(seed), 0).path == (0, 1, 2, 3)


def test_an_impossible_token_is_never_kept_nor_drawn():
    p = torch.tensor([0.0, 1.0, 0.0, 0.0])
    for seed in range(50):
        assert rejection(Draft((0, 2, 0), (-1, -1, 0)), lambda node: p, Dice(seed), 0) == Verdict((), 1)


def test_no_draft_is_plain_decoding():
    assert_follows(
        [rejection(Draft(), lambda n: P, Dice(s), 0).token for s in range(2000)], dict(enumerate(P.tolist()))
    )
    assert coupled(Draft(), lambda node, depth: 3) == Verdict((), 3)


P = torch.tensor([0.4, 0.3, 0.2, 0.1])


def test_laws_off_the_path_are_never_computed():
    """A caller's processor must not run in a context that never comes about."""
    draft = Draft((0, 1, 2, 3), (-1, 0, -1, 2))
    asked = []

    def choose(node, depth):
        asked.append((node, depth))
        return 2 if node == ROOT else 0

    assert coupled(draft, choose) == Verdict((2,), 0)
    assert asked == [(ROOT, 0), (2, 1)]


class TestStats:
    def test_a_step_is_recorded(self):
        stats = Stats()
        stats.record(Draft((1, 2, 3), (-1, 0, -1), sources=("a", "b", "a")), (0, 1), 3, "both")
        stats.record(Draft.chain([4, 5]), (), 1, "both")
        stats.record(Draft(), (), 1, "both")
        assert (stats.steps, stats.tokens, stats.drafted, stats.accepted) == (3, 5, 5, 2)
        assert stats.by_depth == {1: {"drafted": 3, "accepted": 1}, 2: {"drafted": 2, "accepted": 1}}
        assert stats.by_drafter == {
            "a": {"drafted": 2, "accepted": 1},
            "b": {"drafted": 1, "accepted": 1},
            "both": {"drafted": 2, "accepted": 0},
        }
        assert stats.acceptance_rate == 0.4
        assert stats.tokens_per_step == pytest.approx(5 / 3)

    def test_they_add_up(self):
        ours, theirs = Stats(), Stats()
        ours.record(Draft.chain([1, 2]), (0,), 2, "a")
        theirs.record(Draft.chain([1]), (0,), 2, "b")
        ours.seconds["draft"], theirs.seconds["draft"], theirs.seconds["target"] = 0.5, 0.25, 1.0
        both = (ours + theirs).as_dict()
        assert both["drafted"] == 3
        assert both["accepted"] == 2
        assert both["by_depth"] == {"1": {"drafted": 2, "accepted": 2}, "2": {"drafted": 1, "accepted": 0}}
        assert both["by_drafter"] == {"a": {"drafted": 2, "accepted": 1}, "b": {"drafted": 1, "accepted": 1}}
        assert both["seconds"] == {"draft": 0.75, "target": 1.0}
        assert (ours.drafted, theirs.drafted) == (2, 1)

    def test_nothing_is_no_division_by_zero(self):
        assert (Stats().acceptance_rate, Stats().tokens_per_step) == (0.0, 0.0)
        assert "0 tokens in 0 steps" in str(Stats())


class TestSequence:
    def test_it_ends_at_its_length(self):
        seq = Sequence(0, [7, 8], SamplingParams(max_tokens=2))
        assert (seq.prompt, seq.left, seq.limit) == (2, 2, 4)
        assert seq.append(Token(1))
        assert not seq.append(Token(2))
        assert (seq.tokens, seq.finish, seq.left) == ([7, 8, 1, 2], "length", 0)

    def test_it_ends_at_an_end(self):
        seq = Sequence(0, [5], ends=frozenset({5}))
        assert seq.append(Token(4))
        assert not seq.append(Token(5))
        assert seq.finish == "stop"

    def test_an_end_as_the_last_token_counts_as_an_end(self):
        seq = Sequence(0, [1], SamplingParams(max_tokens=1), ends=frozenset({5}))
        assert not seq.append(Token(5))
        assert seq.finish == "stop"

    def test_it_ends_where_its_watcher_says(self):
        seq = Sequence(0, [1], watch=[2, 3].__contains__)
        assert seq.append(Token(4))
        assert not seq.append(Token(3))
        assert seq.finish == "stop"

    def test_a_seed_means_the_coupled_rule(self):
        assert Sequence(0, [1], SamplingParams(seed=0), rule="rejection").rule == "coupled"
        assert Sequence(0, [1], rule="rejection").rule == "rejection"

    def test_a_drafter_draws_with_the_noise_of_the_target_under_the_coupled_rule_alone(self):
        law = torch.full((64,), 1 / 64)
        for seed in range(20):
            seq = Sequence(0, [1, 2], dice=Dice(seed), rule="coupled")
            assert [seq.draw(law, depth) for depth in range(3)] == [Dice(seed).choose(law, 2 + d) for d in range(3)]
        agree = 0
        for seed in range(300):
            seq = Sequence(0, [1, 2], dice=Dice(seed), rule="rejection")
            agree += seq.draw(law, 0) == Dice(seed).choose(law, 2)
        assert agree < 30
