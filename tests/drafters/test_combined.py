"""Several drafters together: one tree, in which each guess has the probability that it holds beside the others."""

import logging

import pytest
import tiny
import torch
from tiny import Markov, drain, outputs, plainly, run

from outrider import drafters
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.combined import AGREED, ALIKE, COPY, MODEL, PRIORS, Combined
from outrider.drafters.confidence import JointCalibration
from outrider.engine.cost import PassCost
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits

TEXT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8]


class Told(Drafter):
    """Drafts what it is told."""

    reports_acceptance = True

    def __init__(self, name, draft=EMPTY, layers=()):
        self.name, self.draft, self.layers = name, draft, layers
        self.steps, self.forgotten = [], []

    def propose(self, seqs, budgets):
        return [self.draft] * len(seqs)

    def observe(self, step):
        self.steps.append(step)

    def forget(self, id):
        self.forgotten.append(id)


def sequence(id=0):
    return Sequence(id, list(TEXT), SamplingParams(max_tokens=50))


def chain(*tokens, acceptance):
    return Draft.chain(tokens, acceptance=acceptance)


def merged(*drafts, combined=None):
    members = [Told(name, draft) for name, draft in zip("abc", drafts, strict=False)]
    made = combined or Combined("a+b", members)
    return made.merge(sequence(), [(member, member.draft) for member in members])


def believed(kind, own, other):
    """Of a guess that stands so to another, before any was seen."""
    return JointCalibration(PRIORS[kind]).probability(own, other)


class TestOneTree:
    def test_where_they_differ_each_has_its_branch(self):
        tree = merged(chain(1, 2, 3, acceptance=[0.8, 0.5, 0.6]), chain(1, 7, 8, acceptance=[0.9, 0.4, 0.7]))
        assert tree.tokens == (1, 2, 7, 3, 8)
        assert tree.parents == (-1, 0, 0, 1, 2)
        expected = (believed(AGREED, 0.9, 0.8), believed(ALIKE, 0.5, 0.4), believed(ALIKE, 0.4, 0.5), 0.6, 0.7)
        assert tree.acceptance == pytest.approx(expected)
        assert tree.sources == ("a", "a", "b", "a", "b")

    def test_the_likelier_one_leads_whatever_the_order(self):
        one, other = chain(1, acceptance=[0.3]), chain(7, acceptance=[0.9])
        assert merged(one, other).tokens == merged(other, one).tokens == (7, 1)
        assert merged(one, other).acceptance == merged(other, one).acceptance
        assert merged(one, other).acceptance[0] > 0.8 > 0.2 > merged(one, other).acceptance[1]

    def test_what_goes_on_after_the_other_hangs_below_it(self):
        tree = merged(chain(1, acceptance=[0.8]), chain(1, 2, acceptance=[0.5, 0.6]))
        assert tree.is_chain
        assert tree.tokens == (1, 2)
        assert tree.acceptance == pytest.approx((believed(AGREED, 0.8, 0.5), 0.6))
        assert tree.sources == ("a", "b")

    def test_what_both_say_stands_once_and_is_the_first_ones(self):
        tree = merged(chain(1, 2, acceptance=[0.8, 0.1]), chain(1, 2, acceptance=[0.5, 0.6]))
        assert tree.tokens == (1, 2)
        assert tree.acceptance == pytest.approx((believed(AGREED, 0.8, 0.5), believed(AGREED, 0.6, 0.1)))
        assert tree.sources == ("a", "a")

    def test_siblings_of_one_draft_are_each_beside_the_other_drafters(self):
        fork = Draft((1, 2), (-1, -1), acceptance=(0.6, 0.5))
        tree = merged(fork, chain(3, acceptance=[0.3]))
        assert tree.tokens == (1, 2, 3)
        expected = (believed(ALIKE, 0.6, 0.3), believed(ALIKE, 0.5, 0.3), believed(ALIKE, 0.3, 0.6))
        assert tree.acceptance == pytest.approx(expected)
        assert merged(Draft((1, 2, 3), (-1, 0, 0), acceptance=(0.9, 0.6, 0.3)), chain(1, acceptance=[0.9])).acceptance[
            1:
        ] == pytest.approx((0.6, 0.3))  # nobody else is there

    def test_guesses_of_three(self):
        tree = merged(*(chain(token, 9, acceptance=[0.5, 0.5]) for token in (1, 2, 1)))
        assert tree.tokens == (1, 2, 9, 9)
        assert tree.parents == (-1, -1, 0, 1)
        agreed = believed(AGREED, 0.5, 0.5)
        assert tree.acceptance == pytest.approx((agreed, believed(ALIKE, 0.5, 0.5), agreed, 0.5))

    def test_a_lookup_beside_a_model_is_believed_less_and_the_model_as_before(self):
        """Of the head and of lookup where they differ, 0.44 and 0.15 were kept where 0.45 and 0.21 had been said."""
        model, copy = Told("a", chain(1, acceptance=[0.5])), Told("b", chain(7, acceptance=[0.6]))
        copy.is_free = True
        made = Combined("a+b", [model, copy])
        tree = made.merge(sequence(), [(copy, copy.draft), (model, model.draft)])
        found = dict(zip(tree.tokens, tree.acceptance, strict=True))
        assert found == pytest.approx({1: believed(MODEL, 0.5, 0.6), 7: believed(COPY, 0.6, 0.5)})
        assert 0.4 < found[1] < 0.5
        assert 0.1 < found[7] < 0.25

    def test_what_a_grammar_says_is_no_copy(self):
        model, grammar = Told("a", chain(1, acceptance=[0.5])), Told("b", chain(7, acceptance=[0.6]))
        grammar.is_free = grammar.reads_grammar = True
        tree = Combined("a+b", [model, grammar]).merge(sequence(), [(model, model.draft), (grammar, grammar.draft)])
        assert tree.acceptance == pytest.approx((believed(ALIKE, 0.6, 0.5), believed(ALIKE, 0.5, 0.6)))

    def test_where_they_agree_the_models_probability_counts_most(self):
        def tree(model, copied):
            one, other = Told("a", chain(1, acceptance=[model])), Told("b", chain(1, acceptance=[copied]))
            other.is_free = True
            return Combined("a+b", [one, other]).merge(sequence(), [(other, other.draft), (one, one.draft)])

        assert tree(0.8, 0.4).acceptance[0] == pytest.approx(believed(AGREED, 0.8, 0.4))
        assert tree(0.4, 0.8).acceptance[0] == pytest.approx(believed(AGREED, 0.4, 0.8))
        assert tree(0.8, 0.4).acceptance[0] > tree(0.4, 0.8).acceptance[0] > 0.5

    def test_hopeless_nodes_and_what_hangs_below_them_are_left_out(self):
        one, other = chain(1, acceptance=[0.9]), Draft.chain([1, 2, 3], acceptance=[0.9, 0.01, 1.0])
        assert merged(one, other).tokens == (1,)

    def test_twins_of_one_draft_are_one_guess(self):
        twins = Draft((1, 1, 2, 3), (-1, -1, 0, 1), acceptance=(0.3,) * 4)
        tree = merged(twins, chain(1, 4, acceptance=[0.4, 0.2]))
        assert tree.tokens == (1, 2, 3, 4)
        assert tree.parents == (-1, 0, 0, 0)

    def test_one_draft_alone_is_as_it_was_with_its_name(self):
        draft = chain(1, 2, acceptance=[0.1, 0.1])
        tree = merged(EMPTY, draft)
        assert (tree.tokens, tree.acceptance, tree.sources) == (draft.tokens, draft.acceptance, ("b", "b"))
        assert merged(EMPTY, EMPTY) is EMPTY

    def test_a_draft_that_was_drawn_goes_alone(self):
        """Whether a guess stands beside it must not depend on what was drawn, nor its law on the guess."""
        law = torch.full((1, 40), 1 / 40)
        for drafts in ([Draft.chain([3], law), chain(3, 4, acceptance=[0.9, 0.9])], [chain(5, acceptance=[0.9])]):
            drafts = drafts if len(drafts) > 1 else [*drafts, Draft.chain([3], law)]
            tree = merged(*drafts)
            assert tree.tokens == (3,)
            assert tree.probs is law

    def test_of_two_that_draw_one_is_taken_whatever_they_drew(self):
        law = torch.full((1, 40), 1 / 40)
        for token in (3, 4):
            assert merged(Draft.chain([token], law), Draft.chain([3], law)).sources == ("a",)


def told(made, drafts, written, times=100):
    """After as many steps in which the target wrote this."""
    for _ in range(times):
        seq = sequence()
        tree = made.merge(seq, [(member, draft) for member, draft in zip(made.members, drafts, strict=True)])
        seq.tokens += written
        made.merged(Step(seq, [8], tree, Verdict((), written[-1]), None))


UNSEEN = {1: believed(ALIKE, 0.5, 0.4), 7: believed(ALIKE, 0.4, 0.5)}


class TestWhatIsLearned:
    DRAFTS = (chain(1, acceptance=[0.5]), chain(7, acceptance=[0.4]))

    def tree(self, made):
        return made.merge(sequence(), list(zip(made.members, self.DRAFTS, strict=True)))

    def probabilities(self, made):
        tree = self.tree(made)
        return dict(zip(tree.tokens, tree.acceptance, strict=True))

    def combined(self):
        return Combined("a+b", [Told("a"), Told("b")])

    def test_who_is_right_where_they_differ(self):
        made = self.combined()
        assert self.probabilities(made) == pytest.approx(UNSEEN)
        told(made, self.DRAFTS, [7, 5])
        assert self.probabilities(made)[7] > 0.75
        assert self.probabilities(made)[1] < 0.15

    def test_that_they_are_surer_where_they_agree(self):
        made, agreeing = self.combined(), (chain(1, acceptance=[0.5]), chain(1, acceptance=[0.4]))
        told(made, agreeing, [1, 5])
        tree = made.merge(sequence(), list(zip(made.members, agreeing, strict=True)))
        assert tree.acceptance[0] > 0.85
        assert self.probabilities(made) == pytest.approx(UNSEEN)  # of another kind

    def test_what_was_never_reached_teaches_nothing(self):
        made = self.combined()
        told(made, (chain(1, 2, acceptance=[0.9, 0.5]), chain(1, 7, acceptance=[0.9, 0.4])), [3])
        assert self.probabilities(made) == pytest.approx(UNSEEN)

    def test_nothing_is_left_of_a_sequence_that_ended(self):
        made = self.combined()
        self.tree(made)
        assert made._trees
        made.forget(0)
        assert not made._trees


class Generous(PassCost):
    """A pass that takes so long that every draft pays, whatever the clock says."""

    def at(self, rows):
        return 1000.0 + 1e-6 * rows

    def learn(self, rows, seconds):
        pass


def parts(model):
    return BuildContext(model, lambda name, quantize: Markov(seed=3))


class TestInTheEngine:
    def test_each_member_is_told_all_that_happened_and_shown_its_own_layers(self):
        members = [Told("a", layers=(0, 2)), Told("b"), Told("c", layers=(1,))]
        seq = Sequence(4, [0, 1, 2], SamplingParams(max_tokens=5))
        run(Markov(seed=3), Combined("a+b+c", members), [seq])
        for member in members:
            assert len(member.steps) == seq.stats.steps
            assert member.forgotten == [4]
            assert {None if s.hidden is None else s.hidden.shape[1] for s in member.steps} == {
                len(member.layers) or None
            }

    def test_nodes_are_attributed_to_the_member_that_guessed_them(self):
        model = Markov(seed=3)
        seq = Sequence(0, [0, 1, 2, 0, 1, 2], SamplingParams(max_tokens=40))
        engine = run(model, drafters.build("ngram:min_n=1+draft_model:model=same,length=3", parts(model)), [seq])
        drafted, kept = engine.stats.drafted_by_drafter, engine.stats.accepted_by_drafter
        assert set(drafted) == {"ngram", "draft_model"}
        assert kept["draft_model"] == drafted["draft_model"] > 0
        assert {token.drafter for token in seq.output} == {None, "ngram", "draft_model"}
        assert sum(kept.values()) == sum(token.drafter is not None for token in seq.output)

    @pytest.mark.parametrize("call", ["propose", "observe", "forget", "merge"])
    @pytest.mark.parametrize("measured", [False, True])
    def test_a_member_that_raises_is_left_out_alone(self, call, measured, caplog):
        model = Markov(seed=3)
        made = drafters.build("draft_model:model=same,length=2+ngram:min_n=1,length=3", parts(model))
        broken, calls = made if call == "merge" else made.members[0], []
        usual = getattr(broken, call)

        def failing(*args):
            calls.append(call)
            if len(calls) == 2:
                raise ZeroDivisionError("somebody's own mistake")
            return usual(*args)

        setattr(broken, call, failing)
        policy = DraftingPolicy(Generous())
        policy.record(made.members[0]).learn_cost(3, 1e-6, 1e-6)
        engine = Engine(model, made, Limits(), policy if measured else None)
        seqs = [Sequence(i, [i, 1, 2, i, 1, 2], SamplingParams(max_tokens=30)) for i in range(3)]
        for seq in seqs:
            engine.add(seq)
        with caplog.at_level(logging.ERROR, "outrider"):
            drain(engine)
        assert len(calls) >= 2
        alone = [plainly(Markov(seed=3), [i, 1, 2, i, 1, 2], SamplingParams(max_tokens=30)) for i in range(3)]
        assert outputs(seqs) == outputs(alone)
        assert model.seen == {}
        traces = [record for record in caplog.records if record.exc_info]
        assert len(traces) == (2 if call == "merge" else 1)
        if call == "propose":
            assert len(calls) == 2, "it is not asked again"
            assert engine.stats.drafted_by_drafter["ngram"] > 0
            assert sum(token.drafter == "ngram" for seq in seqs for token in seq.output[5:]) > 0

    def test_two_sequences_share_a_member_that_is_asked_once(self):
        model = Markov(seed=3)
        made = Combined("a+b", [Told("a"), Told("b")])
        asked = []
        made.members[0].propose = lambda seqs, budgets: asked.append(len(seqs)) or [EMPTY] * len(seqs)
        run(model, made, [Sequence(i, [0, 1], SamplingParams(max_tokens=3)) for i in range(2)])
        assert set(asked) == {2}


class TestLookupBesideAHead:
    """`eagle:lookup=N` is both together."""

    def test_it_is_the_combination(self):
        made = drafters.build("eagle:head=eagle,lookup=3", tiny.parts("llama"))
        assert [member.name for member in made.members] == ["eagle", "ngram"]
        assert made.name == "eagle"
        assert made.has_weights

    def test_as_many_tokens_have_to_match_as_were_asked_for(self):
        made = drafters.build("eagle:head=eagle,lookup=4", tiny.parts("llama"))
        assert made.propose([sequence()], [6])[0].tokens[:3] == (9, 10, 11)
        made = drafters.build("eagle:head=eagle,lookup=5", tiny.parts("llama"))
        assert not made.propose([sequence()], [6])[0]

    def test_only_as_many_as_can_be_counted(self):
        drafters.build("eagle:head=eagle,lookup=16", tiny.parts("llama"))
        with pytest.raises(OutriderError, match="eagle:lookup must be at most 16, not 17"):
            drafters.build("eagle:head=eagle,lookup=17", tiny.parts("llama"))


class TestAuto:
    def names(self, spec, kind="llama"):
        return [member.name for member in drafters.build(spec, tiny.parts(kind)).members]

    def test_whatever_is_there_takes_part(self):
        assert self.names("auto") == ["prediction", "grammar", "history", "ngram"]
        assert self.names("auto:head=eagle") == ["prediction", "grammar", "eagle", "history", "ngram"]
        assert self.names("auto:model=noisy")[-1] == "draft_model"

    def test_a_target_that_no_head_can_read_is_no_reason_to_fail(self):
        assert self.names("auto", "gpt2") == ["prediction", "grammar", "history", "ngram"]

    def test_a_head_that_was_asked_for_has_to_be_there(self):
        with pytest.raises(OutriderError, match="there is no folder nowhere"):
            self.names("auto:head=nowhere")

    def test_its_length_is_that_of_every_member(self):
        made = drafters.build("auto:length=2", tiny.parts("llama"))
        (draft,) = made.propose([sequence()], [20])
        assert max(draft.depths()) == 2
        with pytest.raises(OutriderError, match="auto:length must be at least 0"):
            self.names("auto:length=-1")
