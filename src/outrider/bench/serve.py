"""What speculation does to a server under load: the same prompts with and without it, in several streams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.bench import workloads
from outrider.bench.load import Answer, Load
from outrider.bench.own_server import OwnServer
from outrider.bench.plan import check_writable, checked_draft
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError

PLAIN = "none"
WARM_UP_TOKENS = 16  # enough for every mode to draft at least once
MOST_STREAMS = 1024  # each is a thread of this process
Show = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What a plan has as the user asks for it."""

    model: str  # with a url: the name that requests carry, "" where there is only one
    url: str  # "": a server of our own
    key: str
    rounds: int
    max_tokens: int
    temperature: float
    threads: int
    seed: int
    timeout: float
    output: Path


@dataclass(frozen=True, kw_only=True)
class LoadPlan(LoadSettings):
    drafts: tuple[str, ...]
    streams: tuple[int, ...]
    prompts: tuple[BenchPrompt, ...]

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("max_tokens", 2), ("threads", 0), ("temperature", 0)):
            if not getattr(self, name) >= least:
                raise OutriderError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.timeout > 0:
            raise OutriderError(f"timeout must be more than 0 seconds, not {self.timeout:g}")

    @property
    def modes(self) -> tuple[str, ...]:
        return (PLAIN, *self.drafts)


@dataclass
class StreamMeasurement:
    """One answer to one client. `prompt` and `round` pair it with the same request in another mode."""

    streams: int
    mode: str
    prompt: str  # "edit-1", or "edit-1 #2" where a wave asks it twice
    question: str  # "edit-1" in both cases
    kind: str
    round: int
    tokens: int
    first_s: float
    decode_s: float
    pauses: list[float]
    text: str
    stats: dict[str, Any]
    error: str


@dataclass
class Wave:
    """All prompts once, `streams` at a time."""

    streams: int
    mode: str
    round: int
    tokens: int
    seconds: float
    errors: int


@dataclass
class LoadResult:
    waves: list[Wave] = field(default_factory=list)
    runs: list[StreamMeasurement] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadRequest(LoadSettings):
    """What a user asks for; `plan` refuses mistakes."""

    drafts: Sequence[str]
    streams: str  # "1,4,16"
    prompts: str | None  # a JSONL file; None: our own
    kinds: Sequence[str]
    limit: int | None  # prompts of each kind

    def plan(self) -> LoadPlan:
        for spec in self.drafts:
            checked_draft(spec)
        plan = LoadPlan(
            drafts=tuple(dict.fromkeys(spec for spec in self.drafts if spec != PLAIN)),
            streams=parse_streams(self.streams),
            prompts=workloads.chosen(self.prompts, self.kinds, self.limit),
            **{setting.name: getattr(self, setting.name) for setting in fields(LoadSettings)},
        )
        if self.url:
            Load(self.url)
        check_writable(self.output)
        return plan


def parse_streams(text: str) -> tuple[int, ...]:
    """ "1,4,16" -> (1, 4, 16), ascending."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if not 1 <= counts[0] <= counts[-1] <= MOST_STREAMS:
        raise OutriderError(f"--streams takes whole numbers from 1 to {MOST_STREAMS} with commas between, not {text!r}")
    return tuple(counts)


def speculative(mode: str) -> dict[str, Any]:
    """ "ngram:length=8" as the field that a request carries: numbers are numbers there."""
    if mode == PLAIN:
        return {"off": True}
    name, options = drafters.parse(mode)
    if isinstance(options, drafters.CombinedOptions):
        return {"method": mode}
    return {"method": name, **{key: getattr(options, key) for key in drafters.split(mode)[1]}}


def run(plan: LoadPlan, show: Show) -> LoadResult:
    """Run the plan. Ctrl-C ends it early and keeps the waves that were complete."""
    outcome = LoadResult()
    try:
        if plan.url:
            _measure(plan, plan.url, outcome, show)
        else:
            show(f"starting a server with {plan.model}", 0, 0)
            draft = plan.drafts[0] if plan.drafts else PLAIN
            with OwnServer(plan.model, draft, max(plan.streams), plan.threads, plan.output / "server.log") as server:
                _measure(plan, server.url, outcome, show)
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def _measure(plan: LoadPlan, url: str, outcome: LoadResult, show: Show) -> None:
    load = Load(url, plan.key, plan.timeout)
    load.get("/v1/models")
    _warm_up(plan, load, show)
    order, done = random.Random(plan.seed), itertools.count(1)
    total = plan.rounds * len(plan.modes) * sum(len(asked(plan, streams)) for streams in plan.streams)
    for streams, number in itertools.product(plan.streams, range(1, plan.rounds + 1)):
        for mode in order.sample(plan.modes, len(plan.modes)):
            what = f"{streams} at once, {mode}, round {number}"
            _wave(plan, load, streams, mode, number, outcome, partial(_tick, show, what, done, total))


def _tick(show: Show, what: str, done: Iterator[int], total: int) -> None:
    show(what, next(done), total)


def _warm_up(plan: LoadPlan, load: Load, show: Show) -> None:
    for number, mode in enumerate(plan.modes):
        show(f"warming up {mode}", number, len(plan.modes))
        answer = load.ask({**body(plan, mode, 0), "max_completion_tokens": WARM_UP_TOKENS})
        if answer.error:
            raise OutriderError(f"the server refused a request with the drafter {mode}: {answer.error}")


def asked(plan: LoadPlan, streams: int) -> list[int]:
    """Which prompts a wave asks: each once, and from the first on again until every stream has one."""
    return [index % len(plan.prompts) for index in range(max(len(plan.prompts), streams))]


def body(plan: LoadPlan, mode: str, index: int) -> dict[str, Any]:
    fields = {
        "model": plan.model if plan.url else "",
        "messages": [{"role": "user", "content": plan.prompts[index].text}],
        "max_completion_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "speculative": speculative(mode),
    }
    # with a seed of its own each answer is the same with any drafter
    return {**fields, "seed": plan.seed + index} if plan.temperature > 0 else fields


def _wave(
    plan: LoadPlan, load: Load, streams: int, mode: str, number: int, outcome: LoadResult, done: Callable[[], None]
) -> None:
    places = asked(plan, streams)
    answers, seconds = load.wave([body(plan, mode, place) for place in places], streams, done)
    tokens, errors = sum(a.tokens for a in answers), sum(bool(a.error) for a in answers)
    outcome.waves.append(Wave(streams, mode, number, tokens, seconds, errors))
    seen: dict[int, int] = {}
    for place, answer in zip(places, answers, strict=True):
        copy = seen[place] = seen.get(place, 0) + 1
        outcome.runs.append(_run(plan.prompts[place], copy, streams, mode, number, answer))


def _run(prompt: BenchPrompt, copy: int, streams: int, mode: str, number: int, answer: Answer) -> StreamMeasurement:
    name = prompt.id if copy == 1 else f"{prompt.id} #{copy}"
    return StreamMeasurement(streams, mode, name, prompt.id, prompt.kind, number, **asdict(answer))
