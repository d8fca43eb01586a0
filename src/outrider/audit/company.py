"""The company audit: a text must not depend on what it shares the engine with.

The reference is every prompt alone, decoded plainly, with nothing in the cache. Against it, token by token: the same
call again, prompts in batches and in chunks of other sizes, prompts from the cache, lengths around the boundaries of
pages and chunks, long neighbours, every drafter; greedy, and sampled with seeds. Every variant runs twice from the same
state of the engine, and the second time must also draft and keep what the first did. One differing token fails it, in
any dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from typing import Any, NamedTuple

from outrider import build, drafters, prompts as builtin
from outrider.audit.checks import default_drafts
from outrider.audit.company_plan import GROUPS, PROMPTS, CompanyPlan
from outrider.audit.company_prompts import Layout, PromptGroup, PromptPlanner
from outrider.audit.compare import Difference, Progress, Subject, Ticker, Tokens, altered, parting
from outrider.audit.references import ReferenceStore
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.llm import LLM
from outrider.models.base import SharesPrefixes
from outrider.prompts import NamedPrompt

USUAL = CompanyPlan()
DETAILS = 8  # differences of one variant that are described, each with its margin, which takes a pass over its context
UNTRIED = (
    "sampling options other than temperature and seed; sampling without a seed (`outrider audit` tests its law)",
    "requests that come while others are under way, that are cancelled, or that pause for others",
    "drafts that stop where they do not pay: an audit drafts always",
    "another device, another number of threads, other versions of torch and of the kernels",
)


@dataclass(frozen=True)
class Variant:
    """One way to run a group of prompts, once."""

    draft: str
    group: str  # of prompts: prompts, boundaries or long
    temperature: float
    batch: int  # prompts at once; 1: alone
    chunk: int  # prompt tokens that one step takes in
    cached: bool  # whether the prompts came from the cache
    run: int  # 1: the first
    texts: int
    tokens: int  # compared
    differing: int  # texts that differ from the reference
    first: Difference | None  # the one that parts first
    differences: tuple[Difference, ...]  # some of them
    drafted: int
    accepted: int
    other_statistics: int  # texts of which something else was drafted or kept than in the first run
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.differing and not self.other_statistics

    @property
    def name(self) -> str:
        size = "alone" if self.batch == 1 else f"batch of {self.batch}"
        how = "greedy" if not self.temperature else f"temperature {self.temperature:g}"
        cache = ", cached" if self.cached else ""
        return f"{self.draft}, {how}: {self.group}, {size}, chunks of {self.chunk}{cache}"

    @property
    def line(self) -> str:
        """For a log."""
        first = "" if self.first is None else f" ({self.first.description})"
        result = f"{self.differing} of {self.texts} texts differ{first}, {self.other_statistics} have other statistics"
        return f"{self.name}, run {self.run}: {result}; {self.tokens / max(self.seconds, 0.001):,.0f} tokens/s"


@dataclass(frozen=True)
class CompanyReport:
    model: str
    dtype: str  # as it was asked for
    device: str
    promised: bool  # whether the engine promises what is tested here
    plan: CompanyPlan
    drafts: tuple[str, ...]
    groups: dict[str, int]  # group of prompts -> how many
    boundaries: tuple[int, ...]  # tokens: lengths around which prompts were made
    longest: int  # tokens of the longest sequence
    closest: float | None  # smallest margin of the greedy reference, in logits; None: it has no greedy text
    variants: tuple[Variant, ...]
    not_covered: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(variant.passed for variant in self.variants)

    @property
    def lines(self) -> Iterator[str]:
        """What was not tried, and the result."""
        yield from (f"not covered: {missing}" for missing in self.not_covered)
        if not self.promised:
            yield "note: Outrider does not promise this for the way in which this model runs here"
        busy = {drafters.PLAIN, *(variant.draft for variant in self.variants if variant.drafted)}
        if idle := [draft for draft in self.drafts if draft not in busy]:
            yield f"note: {', '.join(idle)} drafted nothing, so little is proved of it"
        if self.closest is not None:
            yield f"closest call of the greedy reference: {self.closest:.4g} logits between the two likeliest tokens"
        names = ("texts", "tokens", "differing", "other_statistics")
        texts, tokens, differing, other = (sum(getattr(each, name) for each in self.variants) for name in names)
        yield (
            f"{self.model}, dtype {self.dtype}, {self.device}, {self.seconds:.0f} s: {len(self.variants)} runs, "
            f"{texts:,} texts, {tokens:,} tokens; {differing} texts differ, {other} have other draft statistics: "
            f"{'passed' if self.passed else 'FAILED'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {"passed": self.passed, **asdict(self)}
        for own, variant in zip(values["variants"], self.variants, strict=True):
            own["passed"] = variant.passed
        return values


def every_draft(llm: LLM) -> list[str]:
    """Plain decoding and every drafter that runs beside the model without arguments, in each of its variants."""
    names = [name for name in default_drafts(llm) if not drafters.find(name).for_measurement]
    return [drafters.PLAIN, *(draft for name in names for draft in (name, *_variants(name)))]


def audit_company(
    llm: LLM,
    drafts: Sequence[str] = (),
    prompts: Sequence[NamedPrompt] = builtin.AUDIT,
    plan: CompanyPlan = USUAL,
    *,
    raw: bool = False,
    progress: Progress | None = None,
    found: Callable[[Variant], None] = lambda variant: None,
    store: ReferenceStore | None = None,
) -> CompanyReport:
    """Compare every prompt alone with the same prompt in all kinds of company, with each drafter.

    Drafters are "NAME" or "NAME:key=value,..."; default: plain decoding and all that run without arguments. Prompts go
    through the model's chat template where it has one, unless `raw`. `found` is called with each variant when it is
    done. `store`: reference texts of earlier audits of the same model; what it lacks is written and added.
    """
    begin, subject = time.perf_counter(), Subject(llm)
    drafts = list(dict.fromkeys(drafts)) or every_draft(llm)
    for draft in drafts:
        drafters.parse(draft)  # a typing error shows before the work begins
    where, chosen = build.device(llm.settings.device), llm.settings
    planner, texts = _planner(subject, plan), [subject.tokens(each.text, raw) for each in prompts]
    groups = planner.groups([each.name for each in prompts], texts)
    company = _Company(subject, plan, groups, Ticker(progress), store or ReferenceStore())
    company.ticker.total = company.steps(len(drafts))
    company.write_references()
    variants = []
    for variant in chain.from_iterable(map(company.variants, drafts)):
        found(variant)
        variants.append(variant)
    return CompanyReport(
        chosen.model,
        chosen.numbers,
        str(where),
        subject.promised,
        plan,
        tuple(drafts),
        {group.name: len(group.prompts) for group in groups},
        planner.boundaries,
        planner.longest,
        company.closest(),
        tuple(variants),
        tuple(_not_covered(llm, drafts, planner, groups, texts, plan)),
        round(time.perf_counter() - begin, 3),
    )


def write_references(
    llm: LLM, prompts: Sequence[NamedPrompt], plan: CompanyPlan, store: ReferenceStore, *, raw: bool = False
) -> None:
    """Add to the store the reference texts that it lacks for this plan, and compare nothing yet."""
    subject = Subject(llm)
    texts = [subject.tokens(each.text, raw) for each in prompts]
    groups = _planner(subject, plan).groups([each.name for each in prompts], texts)
    _Company(subject, plan, groups, Ticker(None), store).write_references()


def _planner(subject: Subject, plan: CompanyPlan) -> PromptPlanner:
    on_gpu = build.device(subject.llm.settings.device).type != "cpu"
    return PromptPlanner(plan, subject.engine.model, subject.engine.scheduler.limits, on_gpu)


class _CompanyCase(NamedTuple):
    """What is run in one go: a group of prompts in one layout."""

    group: PromptGroup
    temperature: float
    layout: Layout


class _Written(NamedTuple):
    prompt: int  # its place in the group
    tokens: Tokens
    stats: Stats


@dataclass
class _Outcome:
    """All that one case wrote, fresh or from the cache."""

    case: _CompanyCase
    cached: bool
    texts: list[_Written] = field(default_factory=list)
    seconds: float = 0.0


class _Company:
    """The model among others."""

    def __init__(
        self,
        subject: Subject,
        plan: CompanyPlan,
        groups: Sequence[PromptGroup],
        ticker: Ticker,
        store: ReferenceStore,
    ) -> None:
        self._subject, self._plan, self._groups, self.ticker, self._store = subject, plan, groups, ticker, store
        self._references: dict[tuple[str, float], list[Tokens]] = {}
        self._cases = [
            _CompanyCase(group, temperature, layout)
            for group, temperature in product(groups, plan.temperatures)
            for layout in group.layouts
        ]

    def steps(self, drafts: int) -> int:
        """Calls of the engine in all."""
        alone = sum(len(group.prompts) for group in self._groups) * len(self._plan.temperatures)
        once = sum(
            len(case.group.calls(case.layout, self._plan.seed)) * (1 + case.layout.again) for case in self._cases
        )
        return alone + drafts * self._plan.runs * once

    def write_references(self) -> None:
        """Every prompt alone, decoded plainly, with nothing in the cache."""
        for group, temperature in product(self._groups, self._plan.temperatures):
            outputs = self._references[group.name, temperature] = []
            for index in range(len(group.prompts)):
                outputs.append(self._reference(group, temperature, index))
                self.ticker.tick("the reference: alone, plain, fresh")

    def _reference(self, group: PromptGroup, temperature: float, index: int) -> Tokens:
        settings, engine = self._subject.llm.settings, self._subject.engine
        what = (
            " ".join((settings.model, settings.numbers, str(build.device(settings.device)))),
            group.prompts[index],
            group.params(index, temperature, self._plan.seed),
        )
        text = self._store.get(*what)
        if text is None:
            self._forget()
            case = _CompanyCase(group, temperature, Layout(1, engine.scheduler.limits.chunk))
            text = self._call(case, [index], drafters.PLAIN)[0].tokens
            self._store.put(*what, text)
        return text

    def variants(self, draft: str) -> Iterator[Variant]:
        """Every case with this drafter, `runs` times from the same state."""
        first: list[_Outcome] = []
        for run in range(1, self._plan.runs + 1):
            for place, outcome in enumerate(self._sweep(draft)):
                if run == 1:
                    first.append(outcome)
                yield self._variant(draft, run, outcome, first[place])

    def closest(self) -> float | None:
        """The smallest margin between the two likeliest tokens in greedy texts of the first prompts, written again."""
        if 0.0 not in self._plan.temperatures or not self._groups:
            return None
        group = self._groups[0]
        params = replace(group.params(0, 0.0, 0), logprobs=2)
        rows = [row for prompt in group.prompts[: self._plan.margins] for row in self._logprobs(prompt, params)]
        gaps = [max(row) - sorted(row)[-2] for row in rows if len(row) > 1]
        return min(gaps, default=None)

    def _logprobs(self, prompt: Tokens, params: SamplingParams) -> list[list[float]]:
        [result] = self._subject.run([prompt], params, drafters.PLAIN)
        return [list(row.values()) for row in result.logprobs or ()]

    def _sweep(self, draft: str) -> Iterator[_Outcome]:
        """All cases in order, with a drafter that has learned nothing yet."""
        self._subject.backend.renew(draft)
        for case in self._cases:
            yield from self._outcomes(case, draft)

    def _outcomes(self, case: _CompanyCase, draft: str) -> list[_Outcome]:
        """Fresh, and where the layout says so each call once more, from the cache."""
        kinds = [_Outcome(case, cached) for cached in ((False, True) if case.layout.again else (False,))]
        for indices in case.group.calls(case.layout, self._plan.seed):
            self._forget()
            for outcome in kinds:
                begin = time.perf_counter()
                outcome.texts.extend(self._call(case, indices, draft))
                outcome.seconds += time.perf_counter() - begin
                self.ticker.tick(f"{draft}: {case.group.name}, batch of {case.layout.batch}")
        return kinds

    def _call(self, case: _CompanyCase, indices: Sequence[int], draft: str) -> list[_Written]:
        group, temperature = case.group, case.temperature
        params = [group.params(index, temperature, self._plan.seed) for index in indices]
        known = self._references[group.name, temperature]
        expected = None if draft == drafters.PLAIN else [altered(known[index]) for index in indices]
        with self._limits(case.layout):
            results = self._subject.run([group.prompts[index] for index in indices], params, draft, expected)
        return [_Written(index, each.token_ids, each.stats) for index, each in zip(indices, results, strict=True)]

    @contextmanager
    def _limits(self, layout: Layout) -> Iterator[None]:
        """The engine with these limits. It is idle now, and when the call is over."""
        scheduler = self._subject.engine.scheduler
        usual = scheduler.limits
        scheduler.limits = replace(usual, chunk=layout.chunk, batch=max(usual.batch, layout.batch))
        try:
            yield
        finally:
            scheduler.limits = usual

    def _forget(self) -> None:
        model = self._subject.engine.model
        if isinstance(model, SharesPrefixes):
            model.forget_prefixes()

    def _variant(self, draft: str, run: int, outcome: _Outcome, before: _Outcome) -> Variant:
        case, texts = outcome.case, outcome.texts
        known = self._references[case.group.name, case.temperature]
        differing = [text for text in texts if parting(known[text.prompt], text.tokens) is not None]
        differing.sort(key=lambda text: parting(known[text.prompt], text.tokens) or 0)
        details = tuple(filter(None, (self._difference(case, text) for text in differing[:DETAILS])))
        pairs = zip(texts, before.texts, strict=True)
        return Variant(
            draft,
            case.group.name,
            case.temperature,
            case.layout.batch,
            case.layout.chunk,
            outcome.cached,
            run,
            len(texts),
            sum(len(known[text.prompt]) for text in texts),
            len(differing),
            details[0] if details else None,
            details,
            sum(text.stats.drafted for text in texts),
            sum(text.stats.accepted for text in texts),
            sum(own.stats.untimed() != other.stats.untimed() for own, other in pairs),
            round(outcome.seconds, 3),
        )

    def _difference(self, case: _CompanyCase, text: _Written) -> Difference | None:
        group, index = case.group, text.prompt
        params = group.params(index, case.temperature, self._plan.seed)
        plain = self._references[group.name, case.temperature][index]
        return self._subject.difference(group.names[index], group.prompts[index], params, plain, text.tokens)


def _variants(name: str) -> list[str]:
    return [f"{name}:{options}" for options in drafters.find(name).variants]


def _not_covered(
    llm: LLM,
    drafts: Sequence[str],
    planner: PromptPlanner,
    groups: Sequence[PromptGroup],
    prompts: Sequence[Tokens],
    plan: CompanyPlan,
) -> Iterator[str]:
    tried = {draft.partition(":")[0] for draft in drafts}
    missing = [name for name in drafters.names() if name not in tried and not drafters.find(name).for_measurement]
    if missing:
        yield f"drafters that were not tried: {', '.join(missing)}"
    if not isinstance(llm.engine.model, SharesPrefixes):
        yield "prompts from a cache: this model shares no prefixes between requests"
    if planner.longest < llm.engine.model.context:
        yield f"sequences of more than {planner.longest} tokens; the context has {llm.engine.model.context}"
    counts = {group.name: len(group.prompts) for group in groups}
    if absent := [name for name in GROUPS if name not in counts]:
        yield f"groups of prompts: {', '.join(absent)}"
    if PROMPTS in counts and (left := sum(len(prompt) > planner.longest - plan.max_tokens for prompt in prompts)):
        yield f"{left} prompts that are longer than that"
    if plan.share[1] > 1:
        yield f"prompts of the other shares: this is share {plan.share[0]} of {plan.share[1]}"
    if untried := [size for size in planner.boundaries if size + 1 > planner.longest]:
        yield f"lengths around {', '.join(map(str, untried))} tokens"
    yield from UNTRIED
