"""Drafters x requests at once on one device, and peers beside them: whole calls, prompts included, in turns.

Every mode has a process of its own that is loaded with its drafter, so that its first call is the first one of a cold
engine. No prompt is in a cache when a call begins. What is measured is written line by line.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench import machine, prepare
from outrider.bench.peers import OURS, Peer
from outrider.bench.plan import check_writable, checked_draft
from outrider.bench.process import EngineProcess, Missing, WorkerError
from outrider.bench.report import name_of
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.drafters import PLAIN
from outrider.settings import Settings

LINES = "turns.jsonl"
LOAD_TIMEOUT = 600.0  # seconds: Triton compiles on loading, and vLLM for minutes
WARM_CALLS = 2  # of every mode and batch: a shape that comes a second time is captured as a graph
DIGEST = 16  # characters that stand for a text
Line = dict[str, Any]
Show = Callable[[str, int, int], None]  # (what, done, of how many)
Save = Callable[[Sequence[Line]], None]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    model: str
    device: str
    drafts: tuple[str, ...]
    peers: tuple[Peer, ...]  # with the modes that are wanted of them; ours is not among them
    head: str | None  # an EAGLE head that vLLM loads
    batches: tuple[int, ...]
    prompts: tuple[BenchPrompt, ...]
    single: int  # prompts that every batch size answers, at least
    peer_groups: int  # calls of a round that peers take part in
    rounds: int
    max_tokens: int
    warm_up: float  # seconds of all warm-up; what has had none then is measured cold, and marked
    seconds: float  # no turn begins later; 0: all do
    timeout: float  # seconds of one call
    threads: int
    seed: int
    own: dict[str, Any]  # settings of our engine
    python: dict[str, str]  # engine -> interpreter
    output: Path

    def __post_init__(self) -> None:
        counted = [(name, getattr(self, name), 1) for name in ("rounds", "single", "peer_groups", "threads")]
        counted += [("max_tokens", self.max_tokens, 2), *(("batch", batch, 1) for batch in self.batches)]
        for name, value, least in [*counted, ("warm_up", self.warm_up, 0), ("seconds", self.seconds, 0)]:
            if not value >= least:
                raise OutriderError(f"{name} must be at least {least}, not {value:g}")
        if not self.timeout > 0:
            raise OutriderError(f"timeout must be more than 0 seconds, not {self.timeout:g}")
        if len(set(self.batches)) < len(self.batches):
            raise OutriderError(f"a batch is given twice: {', '.join(map(str, self.batches))}")
        for spec in self.drafts:
            checked_draft(spec)
        Settings(**self.own)
        check_writable(self.output)

    def settings(self) -> Line:
        same = ("device", "batches", "single", "peer_groups", "rounds", "max_tokens", "warm_up", "seconds", "seed")
        return {
            "model": name_of(self.model),
            "prompts": len(self.prompts),
            **{name: getattr(self, name) for name in same},
            **self.own,
        }


@dataclass(frozen=True)
class Group:
    """Prompts that are asked at once."""

    batch: int
    number: int
    prompts: tuple[BenchPrompt, ...]


def groups(plan: BatchPlan, batch: int) -> list[Group]:
    """Prompts from all over the workload, in as many calls of this size as they need."""
    calls = -(-plan.single // batch)
    total, known = calls * batch, len(plan.prompts)
    chosen = [plan.prompts[place * known // total % known] for place in range(total)]
    return [Group(batch, call, tuple(chosen[call * batch : (call + 1) * batch])) for call in range(calls)]


@dataclass(eq=False)
class RunningMode:
    """A mode of an engine in its process."""

    engine: str
    mode: str
    worker: EngineProcess
    warm: set[int] = field(default_factory=set)  # batches

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"


class BatchRunner:
    def __init__(self, plan: BatchPlan, scratch: Path, show: Show, save: Save) -> None:
        self._plan, self._scratch, self._show, self._save = plan, scratch, show, save
        self._begin = time.monotonic()
        self._warmed = 0.0
        self._modes: list[RunningMode] = []
        self.lines: list[Line] = []

    def run(self) -> None:
        with (self._plan.output / LINES).open("w", encoding="utf-8") as self._file:
            self._say(**header(self._plan))
            weights = prepare.find(self._plan.model, self._scratch)
            self._chat = prepare.has_chat_template(weights.path)
            for engine, mode, path, peer in self._wanted():
                self._load(engine, mode, path, weights.path if peer is None else weights.form(peer))
            self._measure()

    def close(self) -> None:
        for mode in self._modes:
            mode.worker.close()

    def _wanted(self) -> Iterator[tuple[str, str, Path, Peer | None]]:
        """Engine, mode, the engine's file, and which peer it is: plain decoding first."""
        from outrider.bench.peers import TABLE

        for spec in dict.fromkeys((PLAIN, *self._plan.drafts)):
            yield OURS, spec, TABLE[OURS].path, None
        for peer in self._plan.peers:
            for mode in (peer.plain, *peer.modes):
                yield peer.name, mode, peer.path, peer

    def _load(self, engine: str, mode: str, path: Path, model: Path | None) -> None:
        """One after the other: what an engine measures while it loads is then its own."""
        self._show(f"loading {engine} {mode}", 0, 0)
        plan, begin = self._plan, time.monotonic()
        config = {
            "model": str(model), "modes": [mode], "chat": self._chat, "device": plan.device, "threads": plan.threads,
            "batch": max(plan.batches), "own": plan.own, "head": plan.head, "dtype": plan.own.get("dtype", "auto"),
        }  # fmt: skip
        log = plan.output / f"{engine}-{hashlib.sha256(mode.encode()).hexdigest()[:6]}.log"
        worker = EngineProcess(plan.python[engine], path, config, plan.threads, log, calls=True)
        started = RunningMode(engine, mode, worker)
        self._modes.append(started)  # from here on `close` ends it
        try:
            ready = worker.ready(LOAD_TIMEOUT)
        except (Missing, WorkerError) as error:
            why = f"not installed: {error}" if isinstance(error, Missing) else str(error)
            self._lose(started, why)
            if engine == OURS and mode == PLAIN:
                raise OutriderError(f"plain decoding, which all others are compared with: {why}") from None
            return
        took = round(time.monotonic() - begin, 2)
        self._say("loaded", engine=engine, mode=mode, seconds=took, versions=ready["versions"], about=ready["about"])

    def _measure(self) -> None:
        """Round by round, so that a run that is cut off has some of everything."""
        order = random.Random(self._plan.seed)
        turns = [(number, group) for number in range(1, self._plan.rounds + 1) for group in self._all_groups()]
        for done, (number, group) in enumerate(turns):
            if self._plan.seconds and time.monotonic() - self._begin > self._plan.seconds:
                self._say("note", text=f"{done} of {len(turns)} turns: the time was up")
                break
            taking = [mode for mode in self._modes if mode.engine == OURS or group.number < self._plan.peer_groups]
            for mode in order.sample(taking, len(taking)):
                self._warm_up(mode, group)
            for mode in order.sample(taking, len(taking)):
                self._show(f"round {number}, {group.batch} at once: {mode.name}", done, len(turns))
                self._take("turn", mode, group, round=number, cold=group.batch not in mode.warm)
            self._save(self.lines)

    def _all_groups(self) -> list[Group]:
        return [group for batch in self._plan.batches for group in groups(self._plan, batch)]

    def _warm_up(self, mode: RunningMode, group: Group) -> None:
        """Once for each mode and batch, as long as there is time for it."""
        if group.batch in mode.warm or mode not in self._modes:
            return
        if self._warmed >= self._plan.warm_up:
            return
        begin = time.monotonic()
        for call in range(WARM_CALLS):
            self._show(f"warming up {mode.name}, {group.batch} at once", call, WARM_CALLS)
            self._take("warm-up", mode, group, call=call)
        self._warmed += time.monotonic() - begin
        mode.warm.add(group.batch)

    def _take(self, what: str, mode: RunningMode, group: Group, **more: Any) -> None:
        if mode not in self._modes:
            return
        job = {"mode": mode.mode, "ids": [prompt.text for prompt in group.prompts], "max_tokens": self._plan.max_tokens}
        try:
            answer = mode.worker.ask(job, self._plan.timeout)
        except WorkerError as error:
            self._lose(mode, str(error))
            return
        key = {"engine": mode.engine, "mode": mode.mode, "batch": group.batch, "group": group.number, **more}
        if "error" in answer:
            self._say("failed", **key, error=answer["error"])
            return
        written = answer.pop("ids")
        texts = [hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:DIGEST] for ids in written]
        tokens = sum(map(len, written))
        self._say(what, **key, tokens=tokens, **answer, prompts=[prompt.id for prompt in group.prompts], texts=texts)

    def _lose(self, mode: RunningMode, why: str) -> None:
        """The others go on without it."""
        self._modes.remove(mode)
        mode.worker.close()
        self._say("lost", engine=mode.engine, mode=mode.mode, error=why)

    def _say(self, what: str, **line: Any) -> None:
        self.lines.append({"what": what, **line})
        self._file.write(json.dumps(self.lines[-1], ensure_ascii=False) + "\n")
        self._file.flush()


def header(plan: BatchPlan) -> Line:
    """The first line: what is measured, where."""
    return {"what": "settings", **plan.settings(), "machine": machine.describe(), "gpu": machine.gpu(plan.device)}


def batch_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OutriderError(f"--batches takes whole numbers with commas between, as in 1,4,16, not {text!r}") from None
