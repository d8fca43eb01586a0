"""How much is drafted, and when, is decided by a clock; what is written is not."""

import itertools

import pytest
from tiny import (
    ALL_SPECS,
    COMBINED,
    Markov,
    Scripted,
    assert_follows,
    continuations,
    drain,
    outputs,
    plainly,
    random_heads,
)

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.engine.cost import PassCost
from outrider.engine.engine import Engine
from outrider.engine.policy import DraftingPolicy
from outrider.engine.scheduler import Limits

MODEL = Markov(seed=1)
OTHERS = {
    "itself": MODEL,
    "noisy": Markov(tables=MODEL.tables + 0.5 * Markov(seed=2).tables),
    "stranger": Markov(seed=7),
    "longer": Markov(8, seed=3),
    "shorter": Markov(5, seed=4),
}
PROMPT = [0, 1, 2, 0, 1, 2, 0, 1]
SPECS = [spec for spec in ALL_SPECS if spec != "none"]


class Fickle(PassCost):
    """Costs that change with every look, so that drafts are cut at ever other places."""

    def __init__(self):
        super().__init__()
        self.slopes = itertools.cycle([1e-5, 1e-3, 0.3, 1e-4, 3e-3])
        self.slope, self.last = next(self.slopes), 0

    def at(self, rows):
        if rows < self.last:  # another look: within one, rows are added
            self.slope = next(self.slopes)
        self.last = rows
        return 1.0 + self.slope * rows


def fickle_policy():
    return DraftingPolicy(Fickle())


def build(spec):
    if spec.startswith("scripted"):
        best = MODEL.tables.argmax(-1)
        return Scripted(
            lambda seq, guessed: int(best[tuple([*seq.tokens, *guessed][-2:])]), 6, spec == "scripted:drawn", 6
        )
    return drafters.build(spec, BuildContext(MODEL, lambda name, quantize: OTHERS[name], heads=random_heads(MODEL)))


def run(spec, seqs, policy, batch=10_000):
    # a copy of the model: some drafters use the target itself, and ids must not clash
    engine = Engine(Markov(tables=MODEL.tables), build(spec), Limits(batch, chunk=10**6), policy)
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert not engine._pool._failed
    return engine


@pytest.mark.parametrize("spec", [*SPECS, "scripted:guessed"])
def test_the_same_seed_gives_the_same_tokens(spec):
    params = [SamplingParams(max_tokens=20, seed=i, temperature=0.6 * (i % 3)) for i in range(9)]
    expected = [outputs([plainly(MODEL, PROMPT, own, dice=Dice(own.seed))])[0] for own in params]
    for policy in (DraftingPolicy(), fickle_policy()):
        seqs = [
            Sequence(i, list(PROMPT), own, prediction=tuple(expected[i][:9]), dice=Dice(own.seed))
            for i, own in enumerate(params)
        ]
        run(spec, seqs, policy)
        assert outputs(seqs) == expected


@pytest.mark.parametrize(
    "spec",
    [
        "ngram:min_n=1,length=5",
        "draft_model:model=noisy,length=3",
        "eagle:head=eagle,length=3",
        "scripted:guessed",
        "scripted:drawn",
        "auto:head=eagle,model=noisy",
        *COMBINED,
    ],
)
def test_the_law_holds_under_rejection(spec):
    """Nodes are dropped without a look at what was drawn."""
    params = SamplingParams(max_tokens=3, temperature=1.1)
    seqs = [Sequence(i, list(PROMPT), params, dice=Dice(50 + i), rule="rejection") for i in range(1500)]
    engine = run(spec, seqs, fickle_policy(), batch=100)  # so that there are many steps
    assert engine.stats.accepted > 0
    assert_follows(list(map(tuple, outputs(seqs))), continuations(MODEL.logits, PROMPT, params, 3))
