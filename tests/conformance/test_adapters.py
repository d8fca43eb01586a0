"""With adapters the text is PEFT's own, token for token, in float32; and on packed weights it is the same bits with
every drafter, alone and in a batch with other adapters and with none."""

import functools

import packs
import pytest
from loras import ALL, ENDS, THREE, greedy_by_peft, ready, three, with_adapters
from tiny import ALL_SPECS, OWN, VOCAB, Scripted, family, outputs, parts, prompts, run

from outrider import drafters
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.engine.scheduler import Limits

COUNT = 12
NAMES = ("one", "eight", "many", "")  # of the sequences of a batch, in turns: three adapters and none


def plain_drafter(model):
    return Drafter(Drafter.Options(), BuildContext(model, load=None))


def asked():
    texts = prompts(8)
    texts[3] = (texts[3] * 45)[:45]  # longer than any sliding window
    texts[4] = list(texts[0])  # the same prompt with another adapter, and with the same: prefixes are not mixed up
    return texts


@functools.cache
def wanted(kind):
    wrapped, _ = three(family, kind)
    return [greedy_by_peft(wrapped, NAMES[i % 4], tokens, COUNT) for i, tokens in enumerate(asked())]


def sequences(answers, adapters, params, vocab=VOCAB):
    """Eight sequences, each with the adapter of its turn and a prediction that is partly wrong."""
    out = []
    for i, (tokens, answer) in enumerate(zip(asked(), answers, strict=True)):
        guess = (*answer[:5], (answer[5] + 1) % vocab, *answer[6:])
        out.append(Sequence(i, list(tokens), params, prediction=guess, adapter=adapters.get(NAMES[i % 4])))
    return out


class TestPeft:
    @pytest.mark.parametrize("kind", OWN)
    def test_the_adapters_change_the_text(self, kind):
        wrapped, _ = three(family, kind)
        some = asked()[:3]
        texts = {tuple(tuple(greedy_by_peft(wrapped, name, each, COUNT)) for each in some) for name in NAMES}
        assert len(texts) == len(NAMES), "otherwise the tests below prove nothing"

    @pytest.mark.parametrize("spec", ALL_SPECS)
    @pytest.mark.parametrize("kind", OWN)
    def test_every_drafter_in_a_batch_of_three_adapters_and_none(self, kind, spec):
        seqs = sequences(wanted(kind), three(family, kind)[1], SamplingParams(max_tokens=COUNT))
        run(family(kind)[1], drafters.build(spec, parts(kind)), seqs)
        assert outputs(seqs) == wanted(kind)

    @pytest.mark.parametrize("limits", [Limits(batch=3, chunk=4), Limits(batch=1)], ids=str)
    @pytest.mark.parametrize("kind", OWN)
    def test_trees_and_prompts_in_chunks(self, kind, limits):
        answers = wanted(kind)
        seqs = sequences(answers, three(family, kind)[1], SamplingParams(max_tokens=COUNT))

        def oracle(seq, guessed):
            return answers[seq.id][len(seq.output) + len(guessed)]

        engine = run(family(kind)[1], Scripted(oracle, VOCAB), seqs, limits)
        assert outputs(seqs) == answers
        assert 0 < engine.stats.accepted < engine.stats.drafted

    @pytest.mark.parametrize("rank", [1, 8, 64])
    @pytest.mark.parametrize("kind", OWN)
    def test_every_rank_and_every_matrix(self, kind, rank):
        """One adapter for each matrix alone, one for all seven, one for embedding and output."""
        target, own, _ = family(kind)
        # PEFT confuses adapters that are called like a matrix
        targets = {**{f"only_{i}": [name] for i, name in enumerate([*ALL, *ENDS])}, "seven": ALL}
        configs = {n: dict(r=rank, lora_alpha=rank, target_modules=each) for n, each in targets.items()}
        wrapped = with_adapters(target, configs, seed=rank)
        adapters, tokens = ready(own, wrapped), prompts(4)[3]
        params = SamplingParams(max_tokens=COUNT)
        seqs = [Sequence(i, list(tokens), params, adapter=adapters[name]) for i, name in enumerate(targets)]
        run(own, plain_drafter(own), seqs)
        assert outputs(seqs) == [greedy_by_peft(wrapped, name, tokens, COUNT) for name in targets]


PACKED = {"llama, 4 bits": ("llama", 4), "mistral, 8 bits": ("mistral", 8)}
PARAMS = SamplingParams(max_tokens=COUNT, logprobs=3)


@functools.cache
def packed_adapters(kind):
    own, _ = packs.family(*PACKED[kind])
    return ready(own, with_adapters(packs.reference(PACKED[kind][0], seed=3), THREE))


@functools.cache
def alone(kind):
    """Each sequence by itself, decoded plainly, with nothing of another in the cache."""
    own, _ = packs.family(*PACKED[kind])
    out = []
    for i, tokens in enumerate(asked()):
        own.forget_prefixes()
        seq = Sequence(i, list(tokens), PARAMS, adapter=packed_adapters(kind).get(NAMES[i % 4]))
        run(own, plain_drafter(own), [seq])
        out.append(seq)
    return out


def same_bits(kind, drafter, limits=Limits()):
    own, _ = packs.family(*PACKED[kind])
    expected = alone(kind)
    seqs = sequences(outputs(expected), packed_adapters(kind), PARAMS, packs.VOCAB)
    engine = run(own, drafter, seqs, limits)
    assert outputs(seqs) == outputs(expected)
    for ours, theirs in zip(seqs, expected, strict=True):
        assert [(token.logprob, token.top) for token in ours.output] == [(t.logprob, t.top) for t in theirs.output]
    return engine


@pytest.mark.native
class TestPacked:
    @pytest.mark.parametrize("kind", PACKED)
    def test_the_adapters_change_the_text(self, kind):
        own, _ = packs.family(*PACKED[kind])
        texts = set()
        for i, name in enumerate(NAMES):
            seq = Sequence(i, list(asked()[0]), PARAMS, adapter=packed_adapters(kind).get(name))
            run(own, plain_drafter(own), [seq])
            texts.add(tuple(outputs([seq])[0]))
        assert len(texts) == len(NAMES)

    @pytest.mark.parametrize("spec", ALL_SPECS)
    @pytest.mark.parametrize("kind", PACKED)
    def test_the_same_bits_alone_and_in_company(self, kind, spec):
        same_bits(kind, drafters.build(spec, packs.parts(*PACKED[kind])))

    @pytest.mark.parametrize("limits", [Limits(batch=3, chunk=4), Limits(batch=1)], ids=str)
    @pytest.mark.parametrize("kind", PACKED)
    def test_trees_and_prompts_in_chunks(self, kind, limits):
        answers = outputs(alone(kind))

        def oracle(seq, guessed):
            return answers[seq.id][len(seq.output) + len(guessed)]

        engine = same_bits(kind, Scripted(oracle, packs.VOCAB), limits)
        assert 0 < engine.stats.accepted < engine.stats.drafted


def test_prefixes_are_shared_within_an_adapter_only():
    own, _ = packs.family("llama", 4)
    adapters = packed_adapters("llama, 4 bits")
    text, params = (prompts(4, vocab=packs.VOCAB)[3] * 20)[:100], SamplingParams(max_tokens=2)
    own.forget_prefixes()
    cached = []
    for i, name in enumerate(("", "one", "eight", "one", "")):
        seq = Sequence(i, list(text), params, adapter=adapters.get(name))
        run(own, plain_drafter(own), [seq])
        cached.append(seq.stats.cached)
    assert cached == [0, 0, 0, 96, 96]


def test_layer_skip_drafts_with_the_adapter():
    """With all layers its drafts are the target's own text: kept to the last one, which they are not without."""
    own, _ = packs.family("llama", 4)
    seq = Sequence(0, list(asked()[0]), PARAMS, adapter=packed_adapters("llama, 4 bits")["eight"])
    drafter = drafters.build(f"layer_skip:layers={own.num_layers},length=3", packs.parts("llama", 4))
    stats = run(own, drafter, [seq]).stats
    assert stats.accepted == stats.drafted > 0
