"""EAGLE on a GPU without the host: rounds of drafts, passes and verdicts write what plain decoding writes.

The kernels are interpreted on a CPU."""

import functools

import pytest
import torch
from eagle_forms import FORMS
from tiny import VOCAB, eagle_head, family, outputs, plainly, prompts

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.eagle.device_loop import DeviceLoop
from outrider.engine.engine import Engine
from outrider.models.cuda.model import CudaLlama

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu"),
    # rows of padding hold whatever was in memory
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


@functools.cache
def target():
    model = family("llama")[1]
    return CudaLlama(model.config, model.weights, 1 << 22)


@functools.cache
def head(form):
    torch.manual_seed(7)
    return eagle_head(target(), **FORMS[form]).requires_grad_(False)


def sequences(params, ends=frozenset()):
    asked = prompts(len(params), vocab=VOCAB)
    return [Sequence(i, list(asked[i]), each, ends=ends, dice=Dice(i)) for i, each in enumerate(params)]


def plain(params, ends=frozenset()):
    return [
        plainly(family("llama")[1], seq.tokens, seq.params, ends=ends, dice=Dice(seq.id)) for seq in sequences(params)
    ]


@pytest.fixture
def loops(monkeypatch):
    """How many sequences each call of the device's loop has, and for how many rounds."""
    calls, run = [], DeviceLoop.run

    def counted(self, texts, rounds, wait):
        calls.append((len(texts), rounds))
        return run(self, texts, rounds, wait)

    monkeypatch.setattr(DeviceLoop, "run", counted)
    return calls


def engine(options="tree=6,width=3,length=3", form="eagle-3"):
    context = BuildContext(target(), load=None, heads={"it": head(form)})
    return Engine(target(), drafters.build(f"eagle:head=it,{options}", context))


def drain(made, seqs):
    for seq in seqs:
        made.add(seq)
    while made.busy:
        made.step()
    return seqs


def test_rounds_write_what_plain_decoding_writes(loops):
    """A tree, greedy and under a seed's own noise, of different lengths."""
    params = [SamplingParams(8), SamplingParams(5, 0.9, seed=3)]
    seqs = drain(engine(), sequences(params))
    assert outputs(seqs) == outputs(plain(params))
    assert loops[0] == (2, 3)
    assert all(seq.stats.drafted > 0 for seq in seqs)


def test_a_chain_that_a_loop_wrote_goes_on_outside_of_it(loops):
    """Half of the text in rounds, then another request asks for log-probabilities, which the host must see."""
    params = [SamplingParams(9), SamplingParams(2, logprobs=1)]
    first, other = sequences(params)
    made = engine("length=2")
    made.add(first)
    while not loops:
        made.step()
    made.add(other)
    while made.busy:
        made.step()
    assert outputs([first, other]) == outputs(plain(params))


def test_what_comes_after_the_end_is_not_committed(loops):
    (reference,) = plain([SamplingParams(8)])
    end = reference.tokens[-3]
    cut = reference.tokens[reference.prompt :].index(end) + 1
    (seq,) = drain(engine("length=2"), sequences([SamplingParams(8)], ends=frozenset({end})))
    assert loops
    assert seq.finish == "stop"
    assert seq.tokens[seq.prompt :] == reference.tokens[reference.prompt :][:cut]
    assert target().length(seq.id) == 0


@pytest.mark.parametrize(
    ("spec", "prediction", "looped"),
    [("auto:head=it,length=2", (), True), ("auto:head=it,length=2", (1, 2), False), ("eagle:head=it+ngram", (), False)],
)
def test_one_of_several_writes_alone_where_the_others_were_not_asked_for(spec, prediction, looped):
    context = BuildContext(target(), load=None, heads={"it": head("eagle-3")})
    made = Engine(target(), drafters.build(spec, context))
    (seq,) = sequences([SamplingParams(6)])
    seq.prediction = prediction
    made.add(seq)
    made.step()  # the prompt
    assert not made.stats.steps
    writing = made._pool.writing([seq], made.scheduler.widest)
    assert (writing is not None) == looped
    made.cancel(seq.id)
