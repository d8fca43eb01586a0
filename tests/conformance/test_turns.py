"""A sequence that pauses for another request goes on where it was: no drafter lets it show."""

import pytest
from tiny import ALL_SPECS, drain, family, new_engine, outputs, parts, plainly, prompts

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.scheduler import Limits

PROMPTS = prompts(4)
SEEDED = SamplingParams(24, temperature=0.9, seed=3)


def sequence(id, request, params):
    return Sequence(id, list(PROMPTS[id]), params, dice=Dice(id), request=request)


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize(
    "params", [SamplingParams(24), SamplingParams(24, temperature=0.9, seed=3)], ids=["greedy", "seeded"]
)
def test_a_pause_does_not_show(spec, params):
    model = family("llama")[1]
    engine = new_engine(model, drafters.build(spec, parts("llama")), Limits(batch=3, chunk=7))
    many, other = [sequence(id, 0, params) for id in range(3)], sequence(3, 3, params)
    for seq in many:
        engine.add(seq)
    for _ in range(4):
        engine.step()
    engine.add(other)
    engine.step()
    assert other in engine.scheduler.running
    assert many[2] in engine.scheduler.waiting
    assert model.length(2) > 0  # it keeps its cache
    drain(engine)
    every = [*many, other]
    assert outputs(every) == outputs(plainly(model, PROMPTS[seq.id], params, dice=Dice(seq.id)) for seq in every)
