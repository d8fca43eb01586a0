"""What each method guesses, on texts small enough to check by eye."""

import random

import pytest
from hypothesis import given, settings, strategies as st
from tiny import Markov, outputs, run

from outrider import drafters
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Token
from outrider.core.verify import Verdict
from outrider.drafters.base import BuildContext, Step
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


def _followed(tokens, sizes):
    """By the token that followed a match: the longest match, capped, and its most recent place."""
    best = {}
    for place in range(1, len(tokens)):
        same = (tokens[place - 1 - n] == tokens[-1 - n] for n in range(min(place, sizes[1])))
        matched = next((n for n, each in enumerate(same) if not each), min(place, sizes[1]))
        if matched >= sizes[0]:
            best[tokens[place]] = max(best.get(tokens[place], (0, 0)), (matched, place))
    return best


def _tree_by_hand(tokens, nodes, length, sizes=(1, 4)):
    """All branches at their full length, and of their nodes the cheapest."""
    matches = sorted(_followed(tokens, sizes).values(), reverse=True)[:4]
    taken = {tokens[place] for _, place in matches}
    before = {token: {tokens[i - 1] % 32 for i in range(1, len(tokens)) if tokens[i] == token} for token in set(tokens)}
    last = {token: place for place, token in enumerate(tokens)}
    common = [each for each in last if each not in taken and before[each] and last[each] >= len(tokens) - 512]
    common.sort(key=lambda token: (len(before[token]), last[token]), reverse=True)
    branches = [*matches, *((0, last[token]) for token in common)][:24]
    costs = []
    for number, (matched, place) in enumerate(branches):
        cost = (18, 9, 4, 3, 1)[min(matched, 4)] + (3 * number if matched else number // 2)
        for step in range(length):
            cost += (0, 9, 4, 3, 2, 2, 1)[min(matched + step, 6)] if step else 0
            costs.append((cost, number, step, tokens[place + step % (len(tokens) - place)]))
    chosen = {(number, step) for _, number, step, _ in sorted(costs)[:nodes]}
    by_branch = sorted((number, step, token) for _, number, step, token in costs if (number, step) in chosen)
    return [(token, node - 1 if step else -1) for node, (_, step, token) in enumerate(by_branch)]


def drafted(drafter, tokens, budget):
    (draft,) = drafter.propose([Sequence(0, list(tokens))], [budget])
    return list(zip(draft.tokens, draft.parents, strict=True))


class TestNgramTrees:
    def test_several_continuations_stand_side_by_side(self):
        """2 was followed by 3, 4 and 5; 1, 2 by 3 alone. The last tokens that it has room for are common ones."""
        tokens = [8, 2, 4, 6, 2, 5, 1, 2, 3, 9, 1, 2]
        tree = drafted(build("ngram:tree=6,length=2"), tokens, 20)
        assert tree == [(3, -1), (9, 0), (5, -1), (1, 2), (4, -1), (6, 4)]
        begun = [token for token, parent in drafted(build("ngram:tree=20,length=1"), tokens, 20) if parent < 0]
        assert begun == [3, 5, 4, 2, 1, 9, 6]  # 2 stood after three tokens, 1 after two; of the others the latest first

    @settings(max_examples=200)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 6))
    def test_the_cheapest_nodes_of_all_branches(self, tokens, nodes, length):
        drafter = build(f"ngram:tree={nodes},length={length}")
        assert drafted(drafter, tokens, 64) == _tree_by_hand(tokens, nodes, length)

    @pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (3, 16)])
    def test_in_a_long_text(self, sizes):
        dice = random.Random(7)
        tokens = [dice.randrange(dice.choice((20, 400))) for _ in range(900)]
        tokens[:180:2] = [500] * 90  # a common token, but not of late
        drafter = build(f"ngram:tree=31,min_n={sizes[0]},max_n={sizes[1]}")
        for count in (513, 700, 900):
            slowly = build(f"ngram:tree=31,min_n={sizes[0]},max_n={sizes[1]}")
            expected = _tree_by_hand(tokens[:count], 31, 12, sizes)
            assert drafted(drafter, tokens[:count], 64) == drafted(slowly, tokens[:count], 64) == expected
            assert len(expected) == 31

    def test_a_smaller_budget_has_the_cheapest_of_the_same_nodes(self):
        """And a drafter that was asked for less a step before has forgotten nothing."""
        dice = random.Random(3)
        tokens = [dice.randrange(30) for _ in range(200)]
        drafter = build("ngram:tree=31")
        for budget in (*range(32), 50):
            assert drafted(drafter, tokens, budget) == _tree_by_hand(tokens, min(budget, 31), 12)

    def test_its_probabilities_are_learned(self):
        """1, 2 is followed by 3 and 4 in turns, so what followed the time before is never right, and the other is."""
        drafter, seq = build("ngram:tree=4,length=2,max_n=2"), Sequence(0, [1, 2, 3, 1, 2, 4, 1, 2])
        (first,) = drafter.propose([seq], [4])
        for _ in range(40):
            (draft,) = drafter.propose([seq], [4])
            assert [draft.tokens[node] for node in draft.children(-1)][:2] == [seq.tokens[-3], 7 - seq.tokens[-3]]
            seq.append(Token(7 - seq.tokens[-3]))
            drafter.observe(Step(seq, seq.tokens[-2:-1], draft, Verdict((), seq.tokens[-1]), None))
            seq.append(Token(1))
            seq.append(Token(2))
        (last,) = drafter.propose([seq], [4])
        before, after = ([draft.acceptance[node] for node in draft.children(-1)][:2] for draft in (first, last))
        assert before[0] > 0.4 > 0.3 > before[1]
        assert after[0] < 0.3 < 0.7 < after[1]

    @pytest.mark.parametrize(("options", "wrong"), [("tree=65", "at most 64"), ("tree=-2", "0 or -1")])
    def test_options_that_cannot_be(self, options, wrong):
        with pytest.raises(OutriderError, match=wrong):
            build(f"ngram:{options}")
        with pytest.raises(OutriderError, match="tree needs store=recent"):
            build("ngram:store=adaptive,tree=4")

    def test_without_a_gpu_it_is_a_chain(self):
        assert guess(build("ngram"), [1, 2, 3, 1, 4, 1]) == guess(build("ngram:tree=0"), [1, 2, 3, 1, 4, 1])


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
