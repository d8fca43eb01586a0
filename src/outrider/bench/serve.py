"""What speculation does to a server under load: the same prompts with and without it, in several streams."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.bench import loading, machine, workloads
from outrider.bench.library import LibraryCalls
from outrider.bench.load import Answer, Load
from outrider.bench.own_server import OwnServer
from outrider.bench.plan import check_writable, checked_draft
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.settings import Settings

PLAIN = "none"
WARM_UP_TOKENS = 16  # enough for every mode to draft at least once
MOST_STREAMS = 1024  # each is a thread of this process
Show = Callable[[str, int, int], None]  # (what, done, of how many)
Save = Callable[["LoadResult"], None]


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
    own: dict[str, Any] = field(default_factory=dict)  # settings of our own server, such as its device
    ignore_eos: bool = False  # every answer has max_tokens tokens
    warm_up: bool = False  # a first round of everything that does not count
    library: bool = False  # the same calls without a server, in turns with it
    seconds: float = 0.0  # no wave begins later, loading included; 0: all do


@dataclass(frozen=True, kw_only=True)
class LoadPlan(LoadSettings):
    drafts: tuple[str, ...]
    streams: tuple[int, ...]
    prompts: tuple[BenchPrompt, ...]

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("max_tokens", 2), ("threads", 0), ("temperature", 0), ("seconds", 0)):
            if not getattr(self, name) >= least:
                raise OutriderError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.timeout > 0:
            raise OutriderError(f"timeout must be more than 0 seconds, not {self.timeout:g}")
        if self.library and (self.url or not self.ignore_eos or self.temperature):
            raise OutriderError("--library is for a server of our own, greedy, with --ignore-eos")

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
    library: list[Wave] = field(default_factory=list)  # the same without a server
    interrupted: bool = False
    cut: str = ""  # how much there is of it, where the time was up


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


def run(plan: LoadPlan, show: Show, save: Save = lambda outcome: None) -> LoadResult:
    """Run the plan; `save` is called after every round of a number of streams. Ctrl-C ends it early and keeps the waves
    that were complete."""
    outcome, until = LoadResult(), time.monotonic() + plan.seconds
    try:
        if plan.url:
            _measure(plan, Load(plan.url, plan.key, plan.timeout), {}, until, outcome, show, save)
        else:
            _measure_own(plan, until, outcome, show, save)
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def _measure_own(plan: LoadPlan, until: float, outcome: LoadResult, show: Show, save: Save) -> None:
    with ExitStack() as opened:
        server, calls = open_all(plan, opened, show, together=_device(plan) != "cpu")
        _measure(plan, Load(server.url, plan.key, plan.timeout), calls, until, outcome, show, save)


def open_all(
    plan: LoadPlan, opened: ExitStack, show: Show, together: bool
) -> tuple[OwnServer, dict[str, LibraryCalls]]:
    """The server, and the library with each mode where it is asked for. `together`: they load beside each other, as on
    a GPU; on a CPU engines measure what their passes cost while they load."""
    modes, most, log = plan.modes if plan.library else (), max(plan.streams), plan.output / "server.log"
    path = sources.resolve(plan.model)  # a name that nobody knows is told before anything starts
    own, threads = _own_settings(plan, 1 + len(modes), path), plan.threads or machine.physical_cores()
    draft = plan.drafts[0] if plan.drafts else PLAIN
    starts: list[tuple[str, Callable[[], OwnServer | LibraryCalls]]] = [
        ("a server", partial(OwnServer, plan.model, draft, most, plan.threads, log, own))
    ]
    for mode in modes:
        library = partial(LibraryCalls, plan.model, mode, most, plan.output, threads=threads, own=own)
        starts.append((f"the library with {mode}", library))
    made: list[OwnServer | LibraryCalls] = []
    for group in [starts] if together else [[start] for start in starts]:
        show(f"loading {plan.model}: {', '.join(name for name, _ in group)}", 0, 0)
        for _, start in group:
            made.append(start())
            opened.callback(made[-1].close)
        for each in made[-len(group) :]:
            each.wait()
    servers = [each for each in made if isinstance(each, OwnServer)]
    libraries = [each for each in made if isinstance(each, LibraryCalls)]
    return servers[0], dict(zip(modes, libraries, strict=True))


def _device(plan: LoadPlan) -> str:
    from outrider import build

    return build.device(plan.own.get("device", Settings().device)).type


def _own_settings(plan: LoadPlan, workers: int, path: Path) -> dict[str, Any]:
    """With each one's share of the memory, unless it is chosen or one has it to itself."""
    if workers == 1 or "cache_memory" in plan.own:
        return plan.own
    free, _ = loading.free_memory(_device(plan))
    share = loading.cache_bytes(free, workers, loading.weight_bytes(path))
    return {**plan.own, "cache_memory": round(share / loading.GIB, 3)}


def _measure(
    plan: LoadPlan,
    load: Load,
    calls: Mapping[str, LibraryCalls],
    until: float,
    outcome: LoadResult,
    show: Show,
    save: Save,
) -> None:
    """Round by round, so that a run that is cut off has some of everything."""
    load.get("/v1/models")
    _warm_up(plan, load, show)
    order, done = random.Random(plan.seed), itertools.count(1)
    rounds = range(0 if plan.warm_up else 1, plan.rounds + 1)
    total = len(rounds) * len(plan.modes) * sum(len(asked(plan, streams)) for streams in plan.streams)
    turns = list(itertools.product(rounds, plan.streams))
    for place, (number, streams) in enumerate(turns):
        if plan.seconds and time.monotonic() > until:
            outcome.cut = f"{place} of {len(turns)} rounds of a number of streams: the time was up"
            break
        counted = outcome if number else LoadResult()
        for mode in order.sample(plan.modes, len(plan.modes)):
            what = f"{streams} at once, {mode}, round {number}"
            _wave(plan, load, streams, mode, number, counted, partial(_tick, show, what, done, total))
            if mode in calls:
                texts = [plan.prompts[place].text for place in asked(plan, streams)]
                tokens, seconds = calls[mode].wave(texts, streams, plan.max_tokens, plan.timeout)
                counted.library.append(Wave(streams, mode, number, tokens, seconds, 0))
        save(outcome)


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
        **({"ignore_eos": True} if plan.ignore_eos else {}),
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
