"""With packed weights no tie can flip: every drafter writes the tokens of plain decoding, with the same logprobs."""

import functools

import pytest
from packs import VOCAB, family, parts
from tiny import ALL_SPECS, IDLE, Scripted, outputs, plainly, prompts, run

from outrider import drafters
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.scheduler import Limits
from outrider.models.native.stack import NativeStack

pytestmark = pytest.mark.native

COUNT = 24
KINDS = {
    "llama, 4 bits": ("llama", 4),
    "mistral, 8 bits": ("mistral", 8),
    "qwen2, 4 bits": ("qwen2", 4),
    "llama, kv int8": ("llama", 4, 8),
    "qwen2, kv and activations int8": ("qwen2", 8, 8, 8),
}
PARAMS = SamplingParams(max_tokens=COUNT, logprobs=3)


@functools.cache
def plain(kind):
    """Eight ragged prompts, one of them long, each decoded plainly and alone."""
    asked = prompts(8, vocab=VOCAB)
    asked[3] = (asked[3] * 45)[:45]
    return [plainly(family(*KINDS[kind])[0], tokens, PARAMS) for tokens in asked]


def check(kind, drafter, chosen=slice(None), limits=Limits()):
    expected = plain(kind)[chosen]
    seqs = []
    for i, seq in enumerate(expected):
        (answer,) = outputs([seq])
        prediction = (*answer[:5], (answer[5] + 1) % VOCAB, *answer[6:11], *answer[12:])
        seqs.append(Sequence(i, seq.tokens[: seq.prompt], PARAMS, prediction=prediction))
    engine = run(family(*KINDS[kind])[0], drafter, seqs, limits)
    assert outputs(seqs) == outputs(expected)
    for ours, theirs in zip(seqs, expected, strict=True):
        assert [(token.logprob, token.top) for token in ours.output] == [(t.logprob, t.top) for t in theirs.output]
    return engine.stats


def test_the_models_run_in_the_kernels():
    assert all(isinstance(family(*kind)[0].weights.stack, NativeStack) for kind in KINDS.values())


def test_every_drafter_of_the_table_is_here():
    assert {each.name for spec in ALL_SPECS for each in drafters.parse(spec).members} == drafters.TABLE.keys()


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("kind", KINDS)
class TestSameBits:
    def test_alone(self, kind, spec):
        check(kind, drafters.build(spec, parts(*KINDS[kind])), slice(3, 4))

    def test_a_ragged_batch(self, kind, spec):
        stats = check(kind, drafters.build(spec, parts(*KINDS[kind])))
        if spec in IDLE:
            assert stats.drafted == 0
        elif "itself" in spec:
            assert stats.accepted == stats.drafted > 0
        else:  # otherwise the test would prove nothing
            assert stats.accepted < stats.drafted
            assert stats.accepted > 0 or "stranger" in spec

    def test_prompts_in_pieces(self, kind, spec):
        check(kind, drafters.build(spec, parts(*KINDS[kind])), limits=Limits(batch=5, chunk=3))


@pytest.mark.parametrize("limits", [Limits(), Limits(batch=1), Limits(batch=3, chunk=4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_right_and_wrong_branches(kind, limits):
    answers = outputs(plain(kind))

    def oracle(seq, guessed):
        return answers[seq.id][len(seq.output) + len(guessed)]

    stats = check(kind, Scripted(oracle, VOCAB), limits=limits)
    assert 0 < stats.accepted < stats.drafted
    assert len(stats.accepted_by_depth) >= 3
