"""Four checks for each drafter, all against plain decoding by the same model:

- greedy: the same tokens, prompt by prompt;
- batch: the same tokens with all prompts in one batch;
- seed: the same tokens at temperature 1 under one seed (the coupled rule), in one batch;
- law: without a seed (the rejection rule) short continuations are distributed as the model's own logits say.

The first three compare token by token and report where the outputs part, with the margin: by how many logits plain
decoding preferred its own token there. Where the model is run by our own forward any difference is a failure, in every
dtype. Where transformers runs it, the shape of a pass decides how sums are rounded: in bfloat16 and float16 a near tie
may flip there, such differences are counted and shown, and are failures only when the margin is not small. The fourth
is a chi-square test, which an exact drafter fails once in ten thousand audits.

Under a grammar all four are the same, with plain decoding under the same grammar as the reference.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outrider import build, drafters, prompts as builtin
from outrider.audit.compare import Difference, Progress, Subject, Ticker, Tokens, altered
from outrider.core.cuts import kept
from outrider.core.errors import OutriderError
from outrider.core.grammar import Matcher
from outrider.core.params import SamplingParams
from outrider.core.request import Result
from outrider.core.stats import Stats
from outrider.llm import LLM
from outrider.prompts import NamedPrompt

ALPHA = 1e-4  # probability that the law test fails an exact drafter
LENGTH = 3  # tokens of a continuation in the law test: drafts of two nodes
TOP = 2  # tokens that a continuation may go on with in the law test under a grammar
# The same without one: at least as many, and at most where a copier's guess is to be among them. They are cut by top_k,
# for which rounds on a GPU need no host; a list of allowed tokens would leave these out of the audit.
LEAST_TOP, MOST_TOP = 4, 8
LEAST = 5.0  # continuations that a cell of the chi-square test must expect
# Logits: a smaller margin counts as a near tie where transformers runs the model. The largest seen on a GPU was 0.08.
SMALL_MARGIN = {torch.float32: 0.0, torch.bfloat16: 0.5, torch.float16: 0.25}

FREE = SamplingParams()  # no grammar
Law = Mapping[tuple[int, ...], float]  # continuation -> probability


@dataclass(frozen=True)
class Check:
    name: str  # greedy, batch, seed or law
    passed: bool
    compared: int  # tokens compared, or continuations sampled
    drafted: int
    accepted: int
    differences: tuple[Difference, ...] = ()
    p_value: float | None = None


@dataclass(frozen=True)
class DrafterReport:
    draft: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Report:
    model: str
    dtype: str  # as it was asked for
    small_margin: float  # differences below it are near ties, not failures; 0: every difference is a failure
    prompts: tuple[str, ...]
    max_tokens: int
    seed: int
    samples: int
    seconds: float
    drafters: tuple[DrafterReport, ...]
    grammar: str = ""  # the sampling parameter that holds the texts, such as json_schema; "": none

    @property
    def passed(self) -> bool:
        return all(drafter.passed for drafter in self.drafters)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {"passed": self.passed, **asdict(self)}
        for own, drafter in zip(values["drafters"], self.drafters, strict=True):
            own["passed"] = drafter.passed
        return values


def default_drafts(llm: LLM, held: bool = False) -> list[str]:
    """Every drafter that runs beside this model without arguments, except those that draft nothing here. `held`: the
    text has a grammar."""
    idle = (drafters.PLAIN,) if held else (drafters.PLAIN, drafters.GRAMMAR)
    return [name for name in drafters.names() if name not in idle and _runs_alone(llm, name)]


def audit(
    llm: LLM,
    drafts: Sequence[str] = (),
    prompts: Sequence[NamedPrompt] = builtin.AUDIT,
    *,
    max_tokens: int = 32,
    seed: int = 0,
    samples: int = 300,
    raw: bool = False,
    progress: Progress | None = None,
    held: SamplingParams = FREE,
) -> Report:
    """Audit each drafter ("NAME" or "NAME:key=value,..."; default: all that run without arguments).

    Prompts go through the model's chat template where it has one, unless `raw`. The same seed gives the same report.
    `held`: its grammar holds every text, of plain decoding too; nothing else of it counts.
    """
    subject = Subject(llm)
    drafts = list(drafts) or default_drafts(llm, held.constraint is not None)
    for draft in drafts:
        drafters.parse(draft)  # a typing error shows before the work begins
    if not prompts or samples < 1:
        raise OutriderError("an audit needs at least one prompt and one sample")
    begin = time.perf_counter()
    small = 0.0 if subject.promised else SMALL_MARGIN[build.load_options(llm.settings).dense]
    bench = _Bench(subject, prompts, raw, small, Ticker(progress))
    held = SamplingParams(**held.constrained_by)
    bench.ticker.total = 2 * len(prompts) + 1 + len(drafts) * (len(prompts) + 3)
    with _seeded(seed):
        greedy = bench.reference(replace(held, max_tokens=max_tokens))
        seeded = bench.reference(replace(held, max_tokens=max_tokens, temperature=1.0, seed=seed))
        short = bench.continuations(samples) if held.constraint is None else bench.held(samples, held)
        reports = tuple(DrafterReport(draft, tuple(bench.checks(draft, greedy, seeded, short))) for draft in drafts)
    names = tuple(prompt.name for prompt in prompts)
    seconds, chosen = round(time.perf_counter() - begin, 3), llm.settings
    grammar = "" if held.constraint is None else held.constraint.parameter
    return Report(chosen.model, chosen.numbers, small, names, max_tokens, seed, samples, seconds, reports, grammar)


@dataclass(frozen=True)
class _Reference:
    """What plain decoding wrote."""

    params: SamplingParams
    outputs: list[Tokens]

    @property
    def predictions(self) -> list[Tokens]:
        return [altered(output) for output in self.outputs]


@dataclass(frozen=True)
class _Continuations:
    """Short continuations of one prompt over a few tokens, with the exact probability of each."""

    prompt: Tokens
    params: SamplingParams
    law: Law

    @property
    def likeliest(self) -> Tokens:
        best, _ = max(self.law.items(), key=lambda item: item[1])
        return list(best)


class _Bench:
    """The model on the bench, and the prompts as tokens."""

    def __init__(
        self, subject: Subject, prompts: Sequence[NamedPrompt], raw: bool, small: float, ticker: Ticker
    ) -> None:
        self._subject, self.ticker, self._small, self._logits = subject, ticker, small, subject.logits
        self._names = [prompt.name for prompt in prompts]
        self._prompts = [subject.tokens(prompt.text, raw) for prompt in prompts]

    def reference(self, params: SamplingParams) -> _Reference:
        """Plain decoding, one prompt at a time."""
        outputs = []
        for prompt in self._prompts:
            outputs.append(self._subject.run([prompt], params, drafters.PLAIN)[0].token_ids)
            self.ticker.tick("plain decoding")
        return _Reference(params, outputs)

    def continuations(self, samples: int) -> _Continuations:
        """The prompt of the law test, and the law from the model's own logits, one context at a time."""
        words = self._subject.backend.encode(builtin.LAW.text)
        prompt = words + words[:-1]  # a drafter that copies will guess words[-1]
        params = SamplingParams(LENGTH, 1.0, n=samples, ignore_eos=True)
        [first] = self._logits([prompt])
        place = int((first > first[words[-1]]).sum())
        if self._subject.promised and place < MOST_TOP:  # else a near tie might let another token in
            params = replace(params, top_k=max(LEAST_TOP, place + 1))
        else:
            params = replace(params, allowed_token_ids=self._support(prompt, words[-1]))
        law = self._law(prompt, params)
        self.ticker.tick("exact law")
        return _Continuations(prompt, params, law)

    def held(self, samples: int, held: SamplingParams) -> _Continuations:
        """The same under a grammar: of the tokens that it allows, the likeliest at each place."""
        prompt = self._subject.backend.encode(builtin.LAW.text)
        law = self._held_law(prompt, self._subject.backend.matcher(held))
        self.ticker.tick("exact law")
        return _Continuations(prompt, replace(held, max_tokens=LENGTH, temperature=1.0, top_k=TOP, n=samples), law)

    def checks(self, draft: str, greedy: _Reference, seeded: _Reference, short: _Continuations) -> Iterator[Check]:
        yield self._compare("greedy", draft, greedy, alone=True)
        yield self._compare("batch", draft, greedy)
        yield self._compare("seed", draft, seeded)
        yield self._sample(draft, short)

    def _compare(self, name: str, draft: str, reference: _Reference, alone: bool = False) -> Check:
        """Run the prompts with the drafter and compare with plain decoding token by token."""
        size = 1 if alone else len(self._prompts)
        results: list[Result] = []
        for begin in range(0, len(self._prompts), size):
            part = slice(begin, begin + size)
            results += self._subject.run(self._prompts[part], reference.params, draft, reference.predictions[part])
            self.ticker.tick(f"{draft}: {name}")
        outputs = [result.token_ids for result in results]
        triples = zip(self._names, self._prompts, reference.outputs, outputs, strict=True)
        found = [self._subject.difference(n, p, reference.params, plain, output) for n, p, plain, output in triples]
        differences = tuple(difference for difference in found if difference is not None)
        passed = all(d.margin is not None and abs(d.margin) < self._small for d in differences)
        stats = sum((result.stats for result in results), Stats())
        return Check(name, passed, sum(map(len, reference.outputs)), stats.drafted, stats.accepted, differences)

    def _sample(self, draft: str, short: _Continuations) -> Check:
        """Sample with the drafter and compare the counts with the law."""
        [result] = self._subject.run([short.prompt], short.params, draft, [short.likeliest])
        self.ticker.tick(f"{draft}: law")
        counts = Counter(tuple(sample.token_ids) for sample in result.samples)
        p_value = chi_square(counts, short.law)
        stats = sum((sample.stats for sample in result.samples), Stats())
        return Check("law", p_value >= ALPHA, counts.total(), stats.drafted, stats.accepted, p_value=p_value)

    def _support(self, prompt: Tokens, guess: int) -> Tokens:
        """What continuations are made of: the two likeliest tokens, those after each of them, and a copier's guess."""
        first = self._logits([prompt])[0].topk(2).indices.tolist()
        second = [logits.topk(2).indices.tolist() for logits in self._logits([[*prompt, token] for token in first])]
        return sorted({guess, *first, *itertools.chain(*second)})

    def _law(self, prompt: Tokens, params: SamplingParams) -> Law:
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(LENGTH):
            pairs = zip(law.items(), self._logits([[*prompt, *each] for each in law]), strict=True)
            law = {(*each, t): p * q for (each, p), row in pairs for t, q in _support_law(row, params)}
        return law

    def _held_law(self, prompt: Tokens, matcher: Matcher) -> Law:
        """A continuation may end before it has all tokens."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(LENGTH):
            going = [each for each in law if not each or each[-1] not in matcher.ends]
            for each, row in zip(going, self._logits([[*prompt, *each] for each in going]), strict=True):
                so_far = law.pop(each)
                law |= {(*each, token): so_far * p for token, p in _likeliest(row, matcher.mask(each))}
        return law


def _support_law(logits: torch.Tensor, params: SamplingParams) -> Iterator[tuple[int, float]]:
    """The tokens that may be written at temperature 1, and how likely each is."""
    support = torch.tensor(params.allowed_token_ids) if params.allowed_token_ids is not None else kept(logits, params)
    yield from zip(support.tolist(), logits[support].double().softmax(-1).tolist(), strict=True)


def _likeliest(logits: torch.Tensor, allowed: torch.Tensor | None) -> Iterator[tuple[int, float]]:
    assert allowed is not None, "only tokens that the grammar allows lead here"
    found = logits.masked_fill(~allowed, -torch.inf).topk(min(TOP, int(allowed.sum())))
    yield from zip(found.indices.tolist(), found.values.double().softmax(-1).tolist(), strict=True)


def chi_square(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """The p-value of the counts under the law; 0 where something came up that cannot."""
    if any(outcome not in law for outcome in counts):
        return 0.0
    cells = list(_cells(counts, law))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    if len(cells) < 2:
        return 1.0
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def _cells(counts: Counter[tuple[int, ...]], law: Law) -> Iterator[tuple[float, int]]:
    """(expected, observed): outcomes from the rarest on, pooled until a cell expects enough and so does the rest."""
    total, left = counts.total(), float(counts.total())
    expected, observed = 0.0, 0
    for outcome in sorted(law, key=law.__getitem__):
        expected += law[outcome] * total
        observed += counts[outcome]
        if expected >= LEAST and left - expected >= LEAST:
            yield expected, observed
            left -= expected
            expected, observed = 0.0, 0
    if expected:
        yield expected, observed


def _runs_alone(llm: LLM, name: str) -> bool:
    """Not where it needs an argument, or a head that is not shipped for the model."""
    try:
        drafters.parse(name)
        llm.backend.prepare(name)
    except OutriderError:
        return False
    return True


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Requests without a seed draw one from `random`: the same audit twice gives the same report."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
