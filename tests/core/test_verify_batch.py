"""The verdicts of a batch equal those of `verify`, case by case, for every rule, tree and parameter."""

import random
from dataclasses import replace

import pytest
import torch
from grammars import constraint

from outrider.core import sampling
from outrider.core.dice import RESIDUAL, Dice
from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import verify
from outrider.core.verify_batch import Case, _draw, choose, verify_batch

VOCAB = 60
PLAIN = {True: SamplingParams(99), False: SamplingParams(99, temperature=0.7)}  # nothing changes the logits


def random_draft(luck, drawn):
    count = luck.randrange(0, 9)
    parents = [luck.randrange(-1, node) for node in range(count)]
    tokens = []
    for node, parent in enumerate(parents):  # siblings differ, as those of a guessed tree do
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        tokens.append(luck.choice([t for t in range(12) if t not in taken]))
    probs = torch.softmax(2 * torch.randn(count, VOCAB), -1) if drawn and count else None
    return Draft(tuple(tokens), tuple(parents), probs) if count else EMPTY


def make_cases(seed, rule):
    luck = random.Random(seed)
    torch.manual_seed(seed)
    cases, rows = [], 0
    for id in range(30):
        params = luck.choice(
            [
                SamplingParams(99),
                SamplingParams(99, temperature=0.7),
                SamplingParams(99, temperature=1.3, top_k=7),
                SamplingParams(99, temperature=0.9, top_p=0.8),
                SamplingParams(99, temperature=1.0, min_p=0.1, top_k=20, top_p=0.95),
                SamplingParams(99, temperature=1.0, typical_p=0.6),
                SamplingParams(99, temperature=0.8, repetition_penalty=1.5, logit_bias={3: 2.0}),
                SamplingParams(99, presence_penalty=1.0, bad_words=[(4,)]),
            ]
        )
        draft = random_draft(luck, rule == "rejection" and not params.greedy and luck.random() < 0.5)
        tokens = [luck.randrange(VOCAB) for _ in range(luck.randrange(1, 9))]
        cases.append(Case(Sequence(id, tokens, params, dice=Dice(seed * 1000 + id), rule=rule), draft, rows))
        rows += 1 + len(draft)
    logits = 2.0 * torch.randn(rows, VOCAB)
    logits[:, :6] += 3.0  # so that guesses are sometimes right
    return cases, logits


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("seed", range(12))
def test_equal_to_verify(seed, rule):
    cases, logits = make_cases(seed, rule)
    expected = [verify(case.seq, case.draft, logits[case.start : case.start + 1 + len(case.draft)]) for case in cases]
    assert verify_batch(cases, logits) == expected
    assert any(verdict.path for verdict in expected)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_equal_to_verify_where_the_pass_has_the_likeliest_already(seed, adjusted, rule):
    """It is that of the unchanged logits: used where nothing changes them, and not where something does."""
    cases, logits = make_cases(seed, rule)
    if not adjusted:
        for case in cases:
            case.seq.params = PLAIN[case.seq.params.greedy]
    expected = [verify(case.seq, case.draft, logits[case.start : case.start + 1 + len(case.draft)]) for case in cases]
    assert len({case.seq.params.greedy for case in cases}) == 2
    asked = []

    def best():
        asked.append(logits)
        return logits.argmax(-1).tolist()

    assert verify_batch(cases, logits, best) == expected
    assert len(asked) == (not adjusted)


WORDS = (*(bytes([65 + id]) for id in range(VOCAB - 1)), b"<end>")
END = VOCAB - 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("seed", range(6))
def test_equal_to_verify_where_some_have_a_grammar(seed, rule):
    """Forbidden nodes and what hangs below them too, cut or not: drawn ones stay in the draft."""
    cases, logits = make_cases(seed, rule)
    given, matcher = constraint("regex", "([A-D]|[E-H][A-L])*", WORDS, (END,))
    for index in range(0, len(cases), 2):
        old = cases[index].seq
        params = replace(old.params, **given)
        seq = Sequence(old.id, old.tokens, params, frozenset([END]), dice=old.dice, rule=rule, matcher=matcher())
        cases[index] = replace(cases[index], seq=seq)
    expected = [verify(case.seq, case.draft, logits[case.start : case.start + 1 + len(case.draft)]) for case in cases]
    assert verify_batch(cases, logits) == expected
    for case, verdict in list(zip(cases, expected, strict=True))[::2]:
        written = [*(case.draft.tokens[node] for node in verdict.path), verdict.token]
        assert case.seq.matcher.allowed(written) == len(written)
    assert any(verdict.path for verdict in expected[::2])


def test_a_residual_is_drawn_with_all_bits_of_the_random_number():
    """Dice.draw compares float64; a number rounded to float32 falls on the other side of some boundaries."""
    for position in range(200):
        dice = Dice(position)
        number = dice.uniform(position, RESIDUAL)
        rounded = float(torch.tensor(number, dtype=torch.float32))
        if not 0.5 < number < rounded < 1.0:
            continue
        law = torch.tensor([rounded, 1.0 - rounded])  # the boundary lies above the number, and on the rounded one
        seq = Sequence(0, [0] * position, SamplingParams(99, temperature=1.0), dice=dice)
        assert _draw(law.unsqueeze(0), [Case(seq, EMPTY, 0)]).tolist() == [dice.draw(law, position, RESIDUAL)] == [0]
        return
    pytest.fail("no random number of these is rounded up")


def test_a_processor_that_fails_ends_only_its_own_sequence():
    def bad(tokens, logits):
        raise ValueError("no")

    cases, logits = make_cases(3, "coupled")
    expected = verify_batch(cases, logits)
    broken = replace(cases[4].seq.params, processors=(bad,))
    cases[4] = replace(cases[4], seq=Sequence(4, [1], broken, dice=Dice(1)))
    verdicts = verify_batch(cases, logits)
    assert isinstance(verdicts[4], ValueError)
    assert [v for i, v in enumerate(verdicts) if i != 4] == [v for i, v in enumerate(expected) if i != 4]


def test_the_company_of_a_row_does_not_show():
    logits = torch.randn(3, VOCAB)
    plain, cut = SamplingParams(9, temperature=0.8), SamplingParams(9, temperature=0.8, top_k=3, top_p=0.5, min_p=0.2)
    alone = sampling.warp_batch(logits[:1], [plain])
    assert torch.equal(sampling.warp_batch(logits, [plain, cut, cut])[:1], alone)


def test_choose_equals_the_dice():
    logits = 3 * torch.randn(20, VOCAB)
    params = [SamplingParams(temperature=0.5 + seed / 20, top_k=seed % 3 * 4) for seed in range(20)]
    laws = sampling.warp_batch(logits, params)
    dice = [Dice(seed) for seed in range(20)]
    assert (laws == 0).any()
    assert choose(logits, params, dice, range(20)).tolist() == [
        d.choose(law, at) for at, (d, law) in enumerate(zip(dice, laws, strict=True))
    ]
