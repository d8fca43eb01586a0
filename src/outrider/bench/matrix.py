"""The matrix: models x drafters x requests at once x kinds of prompts, each cell against plain decoding in turns.

The whole time of a request counts, its prompt and the first request of a cold engine too. Every drafter has an engine
of its own in this process; all of them and the plain one take turns at every group of prompts, and know nothing of
earlier texts.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import drafters
from outrider.bench import workloads
from outrider.bench.plan import check_writable, checked_draft
from outrider.bench.report import name_of
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import Request, Result
from outrider.drafters import AUTO, DRAFT_MODEL, PLAIN
from outrider.settings import Settings

if TYPE_CHECKING:
    from outrider.backends.local import Local

CONTROL = "none again"  # plain decoding in a second engine: what differs from plain decoding there is noise
TURNS = "turns.jsonl"  # what was measured, a line for each turn: a run that was stopped goes on after them
Show = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass(frozen=True)
class MatrixPlan:
    models: tuple[str, ...]
    drafts: tuple[str, ...]
    draft_model: str | None
    batches: tuple[int, ...]
    prompts: tuple[BenchPrompt, ...]
    limit: int  # groups of prompts of each kind, of one prompt; larger batches have as many prompts, at least one group
    rounds: int
    max_tokens: int
    seed: int
    where: dict[str, Any]  # device, dtype, threads and the like, of every engine
    output: Path
    control: bool = False  # plain decoding is measured twice

    def __post_init__(self) -> None:
        counted = [("rounds", self.rounds), ("limit", self.limit), *(("batch", batch) for batch in self.batches)]
        for name, value in counted:
            if value < 1:
                raise OutriderError(f"{name} must be at least 1, not {value}")
        if self.max_tokens < 2:
            raise OutriderError(f"max_tokens must be at least 2, not {self.max_tokens}")
        if len(set(self.batches)) < len(self.batches):
            raise OutriderError(f"a batch is given twice: {', '.join(map(str, self.batches))}")
        for spec in self.specs:
            checked_draft(spec)
        Settings(**self.where)
        check_writable(self.output)

    @property
    def specs(self) -> tuple[str, ...]:
        """The drafters that are measured."""
        if self.drafts:
            return tuple(dict.fromkeys(spec for spec in self.drafts if spec != PLAIN))
        own = tuple(name for name in drafters.names() if name not in (PLAIN, AUTO, DRAFT_MODEL) and _measurable(name))
        if self.draft_model is None:
            return (*own, AUTO)
        return (*own, f"{DRAFT_MODEL}:model={self.draft_model}", f"{AUTO}:model={self.draft_model}")

    @property
    def engines(self) -> dict[str, str]:
        """The drafter of each engine, by the name under which the engine is measured; plain decoding first."""
        again = {CONTROL: PLAIN} if self.control else {}
        return {PLAIN: PLAIN, **again, **{spec: spec for spec in self.specs}}

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(prompt.kind for prompt in self.prompts))

    def settings(self) -> dict[str, Any]:
        """What two runs must have in common to be one."""
        return {
            "models": list(map(name_of, self.models)),
            "drafts": [shown(spec) for spec in self.specs],
            "batches": list(self.batches),
            "prompts": [prompt.id for prompt in self.prompts],
            "limit": self.limit,
            "rounds": self.rounds,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "control": self.control,
            **self.where,
        }


def _measurable(name: str) -> bool:
    """Whether a drafter can draft for prompts that come with nothing else."""
    kind = drafters.find(name)
    return not (kind.for_measurement or kind.reads_grammar or kind.reads_prediction)


def shown(spec: str) -> str:
    """A drafter as reports name it, without the folders of this machine."""
    name, colon, options = spec.partition(":")
    parts = [part.partition("=") for part in options.split(",")] if colon else []
    return name + colon + ",".join(f"{key}{equals}{name_of(value)}" for key, equals, value in parts)


@dataclass(frozen=True)
class MatrixTurn:
    """What all drafters of a model do in turns: some prompts at once."""

    model: str
    batch: int
    kind: str
    group: int
    round: int
    prompts: tuple[BenchPrompt, ...]

    @property
    def key(self) -> list[Any]:
        return [name_of(self.model), self.batch, self.kind, self.group, self.round]


@dataclass
class MatrixResult:
    turns: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)  # by model and drafter: why it was not measured
    interrupted: bool = False


def turns(plan: MatrixPlan, model: str) -> list[MatrixTurn]:
    """Every group of every kind, all of them in each round."""
    found = []
    for number, batch, kind in ((n, b, k) for n in range(1, plan.rounds + 1) for b in plan.batches for k in plan.kinds):
        own = [prompt for prompt in plan.prompts if prompt.kind == kind]
        for group in range(min(max(1, plan.limit // batch), max(1, len(own) // batch))):
            chosen = tuple(own[(group * batch + place) % len(own)] for place in range(batch))
            found.append(MatrixTurn(model, batch, kind, group, number, chosen))
    return found


class MatrixRunner:
    def __init__(self, plan: MatrixPlan, show: Show) -> None:
        self._plan, self._show = plan, show
        self.outcome = MatrixResult()
        self._order, self._asked = random.Random(plan.seed), 0

    def run(self) -> None:
        path = self._plan.output / TURNS
        self.outcome.turns, known = _resumed(path, self._plan.settings())
        with path.open("a", encoding="utf-8") as file:
            if not known:
                _append(file, {"settings": self._plan.settings()})
            for model in self._plan.models:
                self._run_model(model, file)

    def _run_model(self, model: str, file: Any) -> None:
        done = [turn["key"] for turn in self.outcome.turns]
        left = [turn for turn in turns(self._plan, model) if turn.key not in done]
        if not left:
            return
        with ExitStack() as opened:
            engines = self._open(model, opened)
            for number, turn in enumerate(left):
                self._show(f"{name_of(model)}: {turn.batch} at once, {turn.kind}", number, len(left))
                measured = self._take(turn, engines)
                self.outcome.turns.append(measured)
                _append(file, measured)

    def _open(self, model: str, opened: ExitStack) -> dict[str, Local]:
        """An engine for each drafter that there is for this model, and the plain one, or two."""
        from outrider import build

        engines: dict[str, Local] = {}
        missing = self.outcome.missing.setdefault(name_of(model), {})
        for name, spec in self._plan.engines.items():
            self._show(f"loading {name_of(model)} with {shown(name)}", 0, 0)
            try:
                settings = Settings(model, draft=spec, **self._plan.where)
                engines[name] = build.local(settings, drafters.parse(spec))
            except OutriderError as error:
                if spec == PLAIN or self._plan.drafts:  # the model itself, or what was asked for by name
                    raise
                missing[shown(spec)] = str(error).replace(model, name_of(model))
                continue
            opened.callback(engines[name].close)
        return engines

    def _take(self, turn: MatrixTurn, engines: dict[str, Local]) -> dict[str, Any]:
        """One turn, as a line of the file: for each drafter seconds and what was written."""
        specs = list(engines)
        answers = {spec: self._ask(engines[spec], turn) for spec in self._order.sample(specs, len(specs))}
        plain = [answer.token_ids for answer in answers[PLAIN][1]]
        runs = {shown(spec): _summary(seconds, results, plain) for spec, (seconds, results) in answers.items()}
        return {"key": turn.key, "prompts": [prompt.id for prompt in turn.prompts], "runs": runs}

    def _ask(self, backend: Local, turn: MatrixTurn) -> tuple[float, list[Result]]:
        params = SamplingParams(max_tokens=self._plan.max_tokens)
        chat = backend.tokenizer is not None and bool(backend.tokenizer.chat_template)
        self._asked += 1
        tenant = f"turn {self._asked}"  # tenants share neither prefixes nor histories, so nothing is known beforehand
        asked = [
            Request(messages=[{"role": "user", "content": prompt.text}], params=params, tenant=tenant)
            if chat
            else Request(prompt=prompt.text, params=params, tenant=tenant)
            for prompt in turn.prompts
        ]
        backend.forget_texts()
        begin = time.perf_counter()
        results = [stream.result() for stream in backend.submit_all(asked)]
        seconds = time.perf_counter() - begin
        for result in results:
            if result.error:
                raise OutriderError(f"{turn.kind}, {turn.batch} at once: {result.error}")
        return seconds, results


def _summary(seconds: float, results: Sequence[Result], plain: Sequence[list[int]]) -> dict[str, Any]:
    stats = sum((result.stats for result in results[1:]), results[0].stats)
    return {
        "seconds": round(seconds, 6),
        "writing": round(max(result.stats.writing_seconds for result in results), 6),
        "tokens": stats.tokens,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "by_drafter": stats.by_drafter,
        "phases": {phase: round(spent, 6) for phase, spent in stats.seconds.items()},
        "differ": sum(result.token_ids != other for result, other in zip(results, plain, strict=True)),
    }


def _resumed(path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The turns that an earlier run has measured, and whether there was one. A half-written last line is cut off."""
    if not path.exists():
        return [], False
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    try:
        found = [json.loads(line) for line in lines]
        known = found[0]["settings"] if found else None
        measured = [(turn["key"], turn["runs"]) and turn for turn in found[1:]]
    except (ValueError, KeyError, TypeError) as error:
        raise OutriderError(f"{path} holds no turns of a matrix; choose another folder with --output") from error
    if known is not None and known != settings:
        differ = sorted(key for key in {*known, *settings} if known.get(key) != settings.get(key))
        raise OutriderError(f"{path} was measured with another {', '.join(differ)}; choose another folder")
    return measured, known is not None


def _append(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def chosen_prompts(path: str | None, kinds: Sequence[str]) -> tuple[BenchPrompt, ...]:
    return workloads.chosen(path, kinds, None)


def batch_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OutriderError(f"--batch takes whole numbers with commas between, such as 1,4,16, not {text!r}") from None


def run(plan: MatrixPlan, show: Show) -> MatrixResult:
    """Measure what is left of the plan. Ctrl-C ends it early and keeps what was measured."""
    runner = MatrixRunner(plan, show)
    try:
        runner.run()
    except KeyboardInterrupt:
        runner.outcome.interrupted = True
    return runner.outcome


def measured(turns: Sequence[dict[str, Any]], model: str) -> Iterator[tuple[int, str, dict[str, Any], str]]:
    """Batch, kind, runs and group of every turn of a model."""
    for turn in turns:
        name, batch, kind, group, _ = turn["key"]
        if name == model:
            yield batch, kind, turn["runs"], f"{kind} {group}"
