"""Under a grammar too every drafter writes what plain decoding writes, and samples follow the masked law."""

import functools
import itertools
import math

import pytest
import torch
from grammars import END, SMALL, constraint, fits
from tiny import (
    ALL_SPECS,
    SPECS,
    VOCAB,
    Markov,
    Scripted,
    assert_follows,
    family,
    law_by_hand,
    outputs,
    parts,
    plainly,
    prompts,
    random_heads,
    run,
)

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.grammar_spec import GrammarSpec
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.grammar import GrammarDrafter
from outrider.engine.scheduler import Limits
from outrider.server.tools.reasoning import Thinking

COUNT = 20
FIRST_SPECS = [specs[0] for specs in SPECS.values()]  # one for each drafter
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "array", "items": {"type": "integer"}}, "bc": {"enum": ["a", "true", None]}},
    "required": ["ab", "bc"],
    "additionalProperties": False,
}
THINKING = Thinking("<", "n", True, {})  # free up to the mark, which drafts may have inside
GRAMMARS = [
    ("json_schema", SCHEMA),
    None,
    ("regex", "(a|b|ab|12)*-[0-9]{2,9}"),
    ("choice", ["true", "abba", "abc", "1234567890"]),
    None,
    ("grammar", 'start: "[" x ("," x)* "]"\nx: "a" | "12" | "[" x "]"'),
    ("json_object", True),
    None,
    ("grammar", "\n".join([*THINKING.answer(GrammarSpec("regex", "[0-9]{3,9}")), *THINKING.rules()])),
]
OPTIONS = {
    "greedy": [dict(), dict(repetition_penalty=1.3), dict(min_tokens=6)],
    "seeded": [dict(temperature=0.8), dict(temperature=1.2, top_p=0.9), dict(temperature=1.0, top_k=4, min_tokens=5)],
}


def sequence(i, how, prediction=()):
    """Some with a grammar and some without, each with options of its own."""
    choice = GRAMMARS[i % len(GRAMMARS)]
    given, matcher = ({}, lambda: None) if choice is None else _constraint(*choice)
    own = OPTIONS[how][i % 3] | given | ({} if how == "greedy" else {"seed": i})
    params = SamplingParams(max_tokens=COUNT, logprobs=1 if i % 4 == 0 else None, **own)
    tokens = prompts(len(GRAMMARS), seed=2)[i]
    return Sequence(
        i, list(tokens), params, frozenset([END]), prediction=tuple(prediction), dice=Dice(i), matcher=matcher()
    )


def _constraint(parameter, value):
    if parameter != "json_object":
        return constraint(parameter, value)
    return {parameter: value}, constraint("json_schema", {"type": "object"})[1]


@functools.cache
def plain(how):
    """Each decoded plainly and alone."""
    found = []
    for i in range(len(GRAMMARS)):
        seq = sequence(i, how)
        run(family("llama")[1], drafters.build("none", parts("llama")), [seq])
        found.append(seq)
    return found


def check(how, drafter, order=range(9), limits=Limits()):
    expected = plain(how)
    answers = outputs(expected)
    seqs = [sequence(i, how, [*answers[i][:4], 0, *answers[i][5:]]) for i in order]
    engine = run(family("llama")[1], drafter, seqs, limits)
    assert outputs(seqs) == [answers[i] for i in order]
    assert [seq.finish for seq in seqs] == [expected[i].finish for i in order]
    return engine.stats


@pytest.mark.parametrize("how", OPTIONS)
def test_the_plain_answers_are_worth_comparing(how):
    """They fit, some end by themselves and some at the length, and without the grammar they would be others."""
    for seq, choice in zip(plain(how), GRAMMARS, strict=True):
        assert seq.error == ""
        if choice is None:
            continue
        matcher = _constraint(*choice)[1]()
        written = [token.id for token in seq.output]
        assert matcher.allowed(written) == len(written)
        assert (written[-1] == END) == (seq.finish == "stop")
        free = plainly(family("llama")[1], seq.tokens[: seq.prompt], SamplingParams(max_tokens=COUNT))
        assert outputs([free]) != [written]
    assert {seq.finish for seq in plain(how)} == {"stop", "length"}


@pytest.mark.parametrize("how", OPTIONS)
class TestEveryDrafter:
    @pytest.mark.parametrize("spec", ALL_SPECS)
    def test_a_batch_in_which_some_have_a_grammar(self, spec, how):
        stats = check(how, drafters.build(spec, parts("llama")))
        assert stats.accepted > 0 or spec == "none" or "stranger" in spec

    @pytest.mark.parametrize("spec", FIRST_SPECS)
    def test_alone(self, spec, how):
        check(how, drafters.build(spec, parts("llama")), [5, 2, 7, 0, 3, 8, 6, 1, 4], Limits(batch=1, chunk=4))


CONTINUED = ["prediction+grammar", "prediction+grammar+ngram"]  # the grammar also guesses after others' guesses


@pytest.fixture
def continued(monkeypatch):
    """The nodes that were guessed so, step by step."""
    counts = []
    real = GrammarDrafter.extended

    def counted(self, seq, draft):
        found = real(self, seq, draft)
        counts.append(len(found) - len(draft))
        return found

    monkeypatch.setattr(GrammarDrafter, "extended", counted)
    return counts


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("spec", CONTINUED)
def test_guesses_that_the_grammar_continues(spec, how, continued):
    check(how, drafters.build(spec, parts("llama")))
    assert any(continued)


@pytest.mark.parametrize("how", OPTIONS)
def test_trees_of_right_wrong_and_forbidden_branches(how):
    answers = outputs(plain(how))

    def oracle(seq, guessed):
        place = len(seq.output) + len(guessed)
        return answers[seq.id][place] if place < len(answers[seq.id]) else 0

    stats = check(how, Scripted(oracle, VOCAB))
    assert 0 < stats.accepted < stats.drafted
    assert len(stats.accepted_by_depth) >= 3


def test_forbidden_nodes_are_cut_before_the_pass():
    """The pass then has no row for them."""
    given, matcher = constraint("regex", "a{12}")
    a, wrong = SMALL.index(b"a"), SMALL.index(b"c")
    model = family("llama")[1]
    seq = Sequence(0, [1, 2], SamplingParams(max_tokens=15, **given), frozenset([END]), matcher=matcher())
    engine = run(model, Scripted(lambda seq, guessed: wrong, VOCAB), [seq])
    assert outputs([seq]) == [[a] * 12 + [END]]
    assert engine.stats.drafted == engine.stats.accepted


# The law: a small vocabulary whose tokens are spelled in several ways, and a language that can be written down.
WORDS = (b"a", b"b", b"ab", b"ba", b"<end>", b"c")
STOP = 4
LANGUAGE = {"".join(text).encode() for n in range(1, 6) for text in itertools.product("ab", repeat=n)} - {b"aaa", b"b"}
PATTERN = "|".join(sorted(text.decode() for text in LANGUAGE))
PROMPT = [0, 1, 2, 0, 1, 2, 0, 1]
LENGTH = 3
LAWS = {
    "temperature": dict(temperature=0.9),
    "options": dict(temperature=1.2, top_k=3, repetition_penalty=1.3, min_tokens=2),
}


@functools.cache
def target():
    return Markov(len(WORDS), seed=1)


def exact(params):
    """Every continuation and its probability: at each step what the language allows, renormalised."""
    found, open_ = {}, {(): 1.0}
    for place in range(LENGTH):
        grown = {}
        for path, probability in open_.items():
            allowed = fits(LANGUAGE, WORDS, (STOP,), path)
            only_end = allowed == {STOP}
            logits = target().logits([*PROMPT, *path])
            masked = [float(x) if token in allowed else -math.inf for token, x in enumerate(logits)]
            ends = () if only_end else (STOP,)
            law = law_by_hand(masked, [*PROMPT, *path], len(PROMPT), params, ends)
            for token, p in enumerate(law):
                if p:
                    done = token == STOP or place == LENGTH - 1
                    (found if done else grown)[(*path, token)] = probability * p
        open_ = grown
    return found


def build(spec):
    tables = target().tables
    noise = torch.randn(tables.shape, generator=torch.Generator().manual_seed(2))
    models = {
        "itself": Markov(len(WORDS), tables=tables),
        "noisy": Markov(len(WORDS), tables=tables + 0.8 * noise),
        "stranger": Markov(len(WORDS), seed=7),
    }
    if spec.startswith("scripted"):
        best = tables.argmax(-1)
        return Scripted(
            lambda seq, guessed: int(best[tuple([*seq.tokens, *guessed][-2:])]),
            len(WORDS),
            drawn=spec == "scripted:drawn",
            nodes=5,
        )
    context = BuildContext(target(), lambda name, quantize: models[name], heads=random_heads(target()))
    return drafters.build(spec, context)


SCRIPTED = ["scripted:guessed", "scripted:drawn"]
LAW_CASES = [("options", spec) for spec in [*FIRST_SPECS, *CONTINUED, *SCRIPTED]] + [
    ("temperature", spec) for spec in SCRIPTED
]


@pytest.mark.parametrize(("law", "spec"), LAW_CASES)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_every_continuation_has_its_exact_probability(law, rule, spec, continued):
    """`scripted:drawn` draws without a look at the grammar: its forbidden draws must be refused, not left out."""
    given, matcher = constraint("regex", PATTERN, WORDS, (STOP,))
    params = SamplingParams(max_tokens=LENGTH, **LAWS[law], **given)
    seqs = [
        Sequence(
            i,
            list(PROMPT),
            params,
            frozenset([STOP]),
            prediction=(2, 0, 1),
            dice=Dice(1000 + i),
            rule=rule,
            matcher=matcher(),
        )
        for i in range(600)
    ]
    run(target(), build(spec), seqs, Limits(batch=10_000, chunk=1_000_000))
    assert_follows([tuple(answer) for answer in outputs(seqs)], exact(params))
    assert any(continued) or spec not in CONTINUED
