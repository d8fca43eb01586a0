"""How often a guess held, by how many tokens matched before it."""

from outrider.drafters.odds import AGREED, DIFFERED, MOST, Odds, kind


def test_longer_matches_are_believed_more_from_the_start():
    chances = [Odds().chance(n) for n in range(1, MOST + 1)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < 0.5 < chances[-1] < 1


def test_what_is_seen_wins_over_what_was_believed():
    odds = Odds()
    for _ in range(200):
        odds.learn(3, held=False)
        odds.learn(1, held=True)
    assert odds.chance(3) < 0.15
    assert odds.chance(1) > 0.85


def test_one_sequence_starts_from_what_all_have_shown_and_adds_to_it():
    shared = Odds()
    first = Odds(shared)
    for _ in range(200):
        first.learn(4, held=False)
    assert Odds(shared).chance(4) < Odds().chance(4)


def test_old_news_fade():
    odds = Odds()
    for held in [False] * 200 + [True] * 200:
        odds.learn(2, held)
    assert odds.chance(2) > 0.8


def test_matches_longer_than_the_most_count_as_the_most():
    assert Odds().chance(kind(MOST + 50)) == Odds().chance(kind(MOST))


def test_matches_of_one_length_are_counted_by_what_else_followed():
    odds = Odds()
    for _ in range(200):
        odds.learn(kind(3, AGREED), held=True)
        odds.learn(kind(3, DIFFERED), held=False)
    assert odds.chance(kind(3, DIFFERED)) < 0.15 < 0.85 < odds.chance(kind(3, AGREED))
    assert odds.chance(kind(3)) == Odds().chance(kind(3))
