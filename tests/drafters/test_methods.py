"""What each method guesses, on texts small enough to check by eye."""

import random

import pytest
from hypothesis import given, settings, strategies as st
from tiny import Markov, outputs, run

from outrider import drafters
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Token
from outrider.drafters.base import BuildContext
from outrider.drafters.confidence import AGREED, ALONE, DIFFERED, LONGEST
from outrider.drafters.ngram import Recent


def build(spec, target=None, **models):
    return drafters.build(spec, BuildContext(target or Markov(), lambda name, quantize: models[name]))


def guess(drafter, tokens, room=20, **more):
    (draft,) = drafter.propose([Sequence(0, list(tokens), **more)], [room])
    assert draft.is_chain
    return list(draft.tokens)


def _by_hand(tokens, length):
    """What followed the most recent occurrence of the longest match."""
    for n in range(min(4, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(length)]
    return []


class TestNgram:
    def test_what_followed_before_follows_again(self):
        assert guess(build("ngram:length=3"), [1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]

    def test_the_most_recent_occurrence_counts(self):
        assert guess(build("ngram:length=1"), [1, 2, 3, 1, 2, 4, 1, 2]) == [4]

    def test_the_longest_match_counts(self):
        assert guess(build("ngram:length=1"), [0, 1, 2, 7, 9, 1, 2, 8, 0, 1, 2]) == [7]
        assert guess(build("ngram:length=1,max_n=2"), [0, 1, 2, 7, 9, 1, 2, 8, 0, 1, 2]) == [8]

    def test_too_short_a_match_does_not_count(self):
        assert guess(build("ngram:min_n=2"), [1, 2, 3, 1]) == []
        assert guess(build("ngram:length=2"), [1, 2, 3, 1]) == [2, 3]

    @pytest.mark.parametrize("size", [15, 16, 17, 18, 20, 60])
    def test_a_prompt_learned_at_once_is_as_one_learned_token_by_token(self, size):
        dice = random.Random(size)
        tokens = [dice.randrange(5) for _ in range(size)]
        slowly, seq = build("ngram"), Sequence(0, tokens[:1])
        for token in tokens[1:]:
            slowly.propose([seq], [20])
            seq.append(Token(token))
        (draft,) = slowly.propose([seq], [20])
        assert list(draft.tokens) == guess(build("ngram"), tokens) == _by_hand(tokens, 12)

    def test_a_text_that_repeats_itself_goes_on_repeating(self):
        assert guess(build("ngram:length=7"), [1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]

    @pytest.mark.parametrize(
        ("text", "others"),
        [
            ([1, 2, 3, 9, 7, 1, 2, 3], [ALONE, ALONE]),
            ([1, 2, 3, 9, 7, 1, 2, 3, 9, 7, 1, 2, 3], [AGREED, AGREED]),
            ([1, 2, 3, 8, 7, 1, 2, 3, 9, 7, 1, 2, 3], [DIFFERED, ALONE]),
            ([1, 2, 3, 9, 8, 1, 2, 3, 9, 7, 1, 2, 3], [AGREED, DIFFERED]),
            ([1, 2, 3, 4, 8, 1, 2, 3, 9, 8, 1, 2, 3, 9, 7, 1, 2, 3], [AGREED, DIFFERED]),  # the last two count
            ([5, 5, 5], [ALONE, ALONE]),
        ],
    )
    @pytest.mark.parametrize("known", [0, 3, 7])
    def test_it_knows_whether_the_same_followed_the_time_before(self, text, others, known):
        store = Recent(2, 3)
        store.learn(text[: min(known, len(text))])
        store.learn(text)
        assert [sort // (LONGEST + 1) for _, sort in store.guess(text, 2)] == others

    def test_it_learns_from_the_output(self):
        drafter, seq = build("ngram:length=2"), Sequence(0, [1, 2])
        assert [d.tokens for d in drafter.propose([seq], [9])] == [()]
        for token in (3, 4, 1, 2):
            seq.append(Token(token))
            drafter.propose([seq], [9])
        assert [d.tokens for d in drafter.propose([seq], [9])] == [(3, 4)]

    def test_adaptive_takes_what_followed_most_often(self):
        tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 0, 1, 2]
        assert guess(build("ngram:store=adaptive,length=1"), tokens) == [3]
        assert guess(build("ngram:length=1"), tokens) == [3]
        assert guess(build("ngram:store=adaptive,length=1"), [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]) == [3]
        assert guess(build("ngram:length=1"), [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]) == [4]

    def test_adaptive_writes_on_from_its_own_guesses(self):
        assert guess(build("ngram:store=adaptive,length=6"), [1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3]

    def test_adaptive_counts_each_place_once(self):
        """However often it is asked in between."""
        drafter, seq = build("ngram:store=adaptive,min_n=1,max_n=1,length=1"), Sequence(0, [1, 2, 1])
        for token in (3, 1, 3, 1):
            drafter.propose([seq], [9])
            drafter.propose([seq], [9])
            seq.append(Token(token))
        assert [d.tokens for d in drafter.propose([seq], [9])] == [(3,)]

    @pytest.mark.parametrize("store", ["recent", "adaptive"])
    def test_sequences_do_not_learn_from_each_other(self, store):
        drafter = build(f"ngram:store={store}")
        seqs = [Sequence(0, [1, 2, 3, 1, 2]), Sequence(1, [1, 2])]
        assert [len(d) > 0 for d in drafter.propose(seqs, [9, 9])] == [True, False]


def _places(text, part):
    """Where the part ends in the text."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


class TestPrediction:
    def follow(self, prediction, output, spec="prediction:length=3"):
        """The draft after the output came in one token at a time."""
        drafter, seq = build(spec), Sequence(0, [9, 9], prediction=tuple(prediction))
        drafter.propose([seq], [20])
        for token in output:
            seq.append(Token(token))
            (draft,) = drafter.propose([seq], [20])
        return list(draft.tokens)

    def test_it_is_drafted_as_it_stands(self):
        assert guess(build("prediction:length=3"), [1], prediction=(4, 5, 6, 7)) == [4, 5, 6]
        assert guess(build("prediction"), [1]) == []

    def test_it_is_followed(self):
        assert self.follow([1, 2, 3, 4, 5], [1, 2]) == [3, 4, 5]
        assert self.follow([1, 2], [1, 2]) == []

    def test_after_a_departure_it_is_found_again(self):
        assert self.follow([1, 2, 3, 4, 5, 6], [1, 8, 3]) == []
        assert self.follow([1, 2, 3, 4, 5, 6], [1, 8, 3, 4]) == [5, 6]  # a token was changed
        assert self.follow([1, 2, 3, 4, 5, 6], [1, 8, 7, 8, 2, 3]) == [4, 5, 6]  # some were put in
        assert self.follow([1, 2, 3, 4, 5, 6], [1, 4, 5]) == [6]  # some were left out

    def test_of_several_places_the_nearest_counts(self):
        prediction = [7, 3, 4, 1, 0, 3, 4, 2]
        assert self.follow(prediction, [7, 3, 4, 1, 0, 9, 3, 4], "prediction:length=1") == [2]
        assert self.follow(prediction, [7, 9, 3, 4], "prediction:length=1") == [1]

    @settings(max_examples=600)
    @given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 3), min_size=1, max_size=24))
    def test_it_is_found_as_by_hand(self, prediction, output):
        """The longest of the output's ends that the prediction has, and of these the nearest."""
        at, matched = 0, 8
        for count in range(1, len(output) + 1):
            written, expected = output[:count], prediction[at : at + 1]
            at += 1
            matched = matched + 1 if matched and expected == written[-1:] else 0
            if not matched:
                sizes = (size for size in range(min(8, count), 1, -1) if _places(prediction, written[-size:]))
                matched = next(sizes, 0)
                at = min(_places(prediction, written[-matched:]), key=lambda end: abs(end - at)) if matched else at
        assert self.follow(prediction, output) == (prediction[at : at + 3] if matched else [])


class TestDraftModel:
    def test_a_perfect_one_is_always_right(self):
        model = Markov()
        drafter = build("draft_model:model=same,length=4", model, same=Markov())
        seq = Sequence(0, [0, 1], SamplingParams(max_tokens=20))
        run(model, drafter, [seq])
        assert seq.stats.accepted == seq.stats.drafted == 16
        assert seq.stats.steps == 4

    def test_it_writes_under_the_rules_of_the_request(self):
        """Bans and penalties hold for guesses too: what the target may not write is not worth a guess."""
        model = Markov()
        params = SamplingParams(max_tokens=12, allowed_token_ids=[1, 3], repetition_penalty=1.4, bad_words=[[1, 1]])
        seq = Sequence(0, [0, 1], params)
        run(model, build("draft_model:model=same,length=3", model, same=Markov()), [seq])
        assert seq.stats.accepted == seq.stats.drafted == 9

    def test_a_long_prompt_comes_in_pieces(self):
        from outrider.drafters.draft_model import CHUNK

        class Long(Markov):
            context = 4 * CHUNK
            longest = 0

            def forward(self, feeds, layers=()):
                Long.longest = max(Long.longest, *(len(feed.tokens) for feed in feeds), 0)
                return super().forward(feeds, layers)

        drafter = build("draft_model:model=long,length=2", long=Long())
        tokens = [0, 1, 2] * CHUNK
        assert len(guess(drafter, tokens)) == 2
        assert Long.longest == CHUNK

    def test_tokens_that_it_lacks_are_no_reason_to_fail(self):
        """In the prompt, in the output and among those that are allowed."""
        model, small = Markov(6), Markov(4)
        for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, allowed_token_ids=[4, 5])):
            seq = Sequence(0, [0, 5, 4], params)
            run(model, build("draft_model:model=small,length=3", model, small=small), [seq])
            assert seq.finish == "length"

    def test_its_law_has_the_size_of_the_target(self):
        for size in (4, 6, 9):
            drafter = build("draft_model:model=other,length=2", Markov(6), other=Markov(size))
            seq = Sequence(0, [0, 1], SamplingParams(temperature=1.0))
            (draft,) = drafter.propose([seq], [2])
            assert draft.probs.shape == (2, 6)
            assert draft.probs.sum(-1).tolist() == pytest.approx([1, 1])

    def test_guesses_say_that_they_are_not_drawn(self):
        drafter = build("draft_model:model=other,greedy=true", Markov(), other=Markov(seed=4))
        (draft,) = drafter.propose([Sequence(0, [0, 1], SamplingParams(temperature=1.0))], [2])
        assert draft.probs is None


class TestLayerSkip:
    def test_all_layers_are_the_target_itself(self):
        model = Markov()
        seqs = [Sequence(0, [0, 1], SamplingParams(max_tokens=9)), Sequence(1, [3, 1], SamplingParams(max_tokens=9))]
        engine = run(model, build("layer_skip:layers=3", model), seqs)
        assert engine.stats.accepted == engine.stats.drafted > 0
        assert all(map(len, outputs(seqs)))
