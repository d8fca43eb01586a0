"""How a sequence ends does not depend on the drafter: in the middle of a kept path or anywhere else."""

import functools

import pytest
from tiny import (
    ALL_SPECS,
    MEMORY,
    VOCAB,
    Scripted,
    drain,
    family,
    new_engine,
    ours,
    outputs,
    parts,
    plainly,
    prompts,
    reference,
    run,
)

from outrider import drafters
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.engine.scheduler import Limits

COUNT = 16
PROMPT = prompts(3)[2]


def target():
    return family("llama")[1]


@functools.cache
def plain():
    """What comes after the prompt when nothing ends it early."""
    (answer,) = outputs([plainly(target(), PROMPT, SamplingParams(max_tokens=2 * COUNT))])
    return answer


def oracle():
    """A drafter that is always right: whatever ends the sequence does so in the middle of a kept path."""
    return drafters.build("draft_model:model=itself,length=7", parts("llama"))


def every_drafter():
    return [*ALL_SPECS, "oracle"]


def decode(spec, params, ends=(), **more):
    drafter = oracle() if spec == "oracle" else drafters.build(spec, parts("llama"))
    seq = Sequence(0, list(PROMPT), params, frozenset(ends), prediction=tuple(plain()), **more)
    engine = run(target(), drafter, [seq])
    assert seq.stats.tokens == len(seq.output) == len(seq.tokens) - seq.prompt
    assert seq.stats.accepted == sum(token.drafter is not None for token in seq.output)  # none beyond the end
    assert_released(engine, [seq])
    return seq


def assert_released(engine, seqs):
    assert engine.scheduler._reserved == 0
    assert not engine.busy
    assert all(engine.model.length(seq.id) == 0 for seq in seqs)


@pytest.mark.parametrize("spec", every_drafter())
class TestEnds:
    @pytest.mark.parametrize("place", range(1, 7))
    def test_at_a_stop_token(self, spec, place):
        end = plain()[place]
        seq = decode(spec, SamplingParams(max_tokens=COUNT), ends={end})
        assert outputs([seq]) == [plain()[: plain().index(end) + 1]]
        assert seq.finish == "stop"

    @pytest.mark.parametrize("count", range(1, 8))
    def test_at_max_tokens(self, spec, count):
        seq = decode(spec, SamplingParams(max_tokens=count))
        assert outputs([seq]) == [plain()[:count]]
        assert seq.finish == "length"
        assert seq.stats.drafted_by_depth[count] == 0  # no node that could never be kept

    def test_not_before_min_tokens(self, spec):
        """Until then the stop token is not even written: another takes its place."""
        params = SamplingParams(max_tokens=COUNT, min_tokens=6)
        ends = frozenset(plain()[:5:2])
        expected = plainly(target(), PROMPT, params, ends=ends)
        assert not ends & {token.id for token in expected.output[:6]}
        seq = decode(spec, params, ends)
        assert (outputs([seq]), seq.finish) == (outputs([expected]), expected.finish)

    @pytest.mark.parametrize("place", [0, 3, 5])
    def test_where_a_stop_string_is_complete(self, spec, place):
        """`watch` is told of each token once, in order, and of none after the end."""
        told = []

        def watch(token):
            told.append(token)
            return len(told) == place + 1

        seq = decode(spec, SamplingParams(max_tokens=COUNT), watch=watch)
        assert outputs([seq]) == [told] == [plain()[: place + 1]]
        assert seq.finish == "stop"

    def test_a_processor_that_raises_ends_only_its_own_sequence(self, spec):
        def fail(tokens, logits):
            if len(tokens) >= len(PROMPT) + 4:
                raise ZeroDivisionError("the caller's own mistake")
            return logits

        seqs = [
            Sequence(i, list(PROMPT), SamplingParams(max_tokens=COUNT, processors=[fail] * (i == 1))) for i in range(3)
        ]
        drafter = oracle() if spec == "oracle" else drafters.build(spec, parts("llama"))
        engine = run(target(), drafter, seqs)
        assert [seq.finish for seq in seqs] == ["length", "error", "length"]
        assert "the caller's own mistake" in seqs[1].error
        assert outputs(seqs)[0] == outputs(seqs)[2] == plain()[:COUNT]
        assert outputs(seqs)[1] == plain()[: len(seqs[1].output)]
        assert_released(engine, seqs)

    def test_by_cancelling_in_the_middle(self, spec):
        drafter = oracle() if spec == "oracle" else drafters.build(spec, parts("llama"))
        engine = new_engine(target(), drafter, Limits(batch=2))
        seqs = [Sequence(i, list(PROMPT), SamplingParams(max_tokens=2 * COUNT)) for i in range(4)]
        for seq in seqs:
            engine.add(seq)
        engine.step()
        engine.step()
        assert engine.cancel(1) == [seqs[1]]  # running
        assert engine.cancel(3) == [seqs[3]]  # waiting
        assert engine.cancel(3) == []
        assert target().length(1) == 0
        drain(engine)
        assert [seq.finish for seq in seqs] == ["length", "cancelled", "length", "cancelled"]
        assert outputs(seqs)[0] == outputs(seqs)[2] == plain()
        assert outputs(seqs)[3] == []
        assert_released(engine, seqs)


def test_bans_that_leave_nothing_end_the_sequence_with_the_reason():
    params = SamplingParams(max_tokens=4, allowed_token_ids=[3], bad_words=[[3, 3]])
    seq = plainly(target(), PROMPT, params)
    assert (outputs([seq]), seq.finish) == ([[3]], "error")
    assert "loosen" in seq.error


@functools.cache
def small():
    """A model with memory for 300 tokens."""
    per_token = 2 * 3 * 2 * 8 * 4
    return ours(reference("llama", seed=3), memory=2 * per_token * 300)


class TestMemory:
    def test_a_sequence_that_never_fits_is_refused(self):
        model = small()
        engine = new_engine(model, Drafter(Drafter.Options(), BuildContext(model, None)), Limits(budget=64))
        assert model.capacity == 300
        for prompt, count, reason in [
            (0, 1, "empty"),
            (256, 1, "context"),
            (10, 250, "at most 246"),
            (200, 50, "cache"),
        ]:
            with pytest.raises(OutriderError, match=reason):
                engine.add(Sequence(0, [1] * prompt, SamplingParams(max_tokens=count)))
        engine.add(Sequence(0, [1] * 200, SamplingParams(max_tokens=36)))

    @pytest.mark.parametrize("spec", ["none", "ngram:min_n=1", "layer_skip", "scripted"])
    def test_a_queue_larger_than_memory_drains(self, spec):
        model = small()
        drafter = (
            Scripted(lambda seq, guessed: 0, VOCAB)
            if spec == "scripted"
            else drafters.build(spec, BuildContext(model, None))
        )
        engine = new_engine(model, drafter, Limits(budget=10))
        seqs = [Sequence(i, list(PROMPT), SamplingParams(max_tokens=20 + i % 60)) for i in range(30)]
        for seq in seqs:
            engine.add(seq)
        while engine.busy:
            engine.step()
            assert engine.scheduler._reserved <= model.capacity
            assert sum(model.length(seq.id) for seq in seqs) <= model.capacity
        assert [len(seq.output) for seq in seqs] == [20 + i % 60 for i in range(30)]
        assert all(seq.tokens[: len(PROMPT) + 20] == seqs[0].tokens[: len(PROMPT) + 20] for seq in seqs)
        assert_released(engine, seqs)


def test_drafters_are_told_to_forget_every_sequence_that_ran():
    forgotten = []

    class Remembering(Drafter):
        def forget(self, id):
            forgotten.append(id)

    seqs = [Sequence(i, list(PROMPT), SamplingParams(max_tokens=2 + i)) for i in range(4)]
    run(target(), Remembering(Drafter.Options(), None), seqs, Limits(batch=2))
    assert sorted(forgotten) == [0, 1, 2, 3]


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_drafters_keep_nothing_of_a_sequence_that_ended(spec):
    """Whatever a drafter remembers by id is gone, its model's cache too."""
    drafter = drafters.build(spec, parts("llama"))
    run(target(), drafter, [Sequence(i, list(p), SamplingParams(max_tokens=9)) for i, p in enumerate(prompts(4))])
    for each in (drafter, *drafter.members):
        remembered = [v for name, v in vars(each).items() if isinstance(v, dict) and "calibrations" not in name]
        assert not any(remembered)
        assert all(each._model.length(i) == 0 for i in range(4)) if hasattr(each, "_model") else True


def test_a_draft_model_with_a_shorter_context_stops_drafting_there():
    model = ours(reference("llama", seed=3))
    short = ours(reference("llama", seed=3, max_position_embeddings=32))
    drafter = drafters.build("draft_model:model=short,length=4", BuildContext(model, lambda name, quantize: short))
    seq = Sequence(0, list(PROMPT), SamplingParams(max_tokens=24))
    run(model, drafter, [seq])
    assert outputs([seq]) == [plain()[:24]]
    assert 0 < seq.stats.accepted < 20


def test_memory_is_a_budget_in_bytes():
    assert target().capacity == MEMORY // (2 * 2 * 3 * 2 * 8 * 4)  # half of it may lie idle in buffers that doubled
