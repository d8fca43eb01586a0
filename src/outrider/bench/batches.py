"""Drafters x requests at once on one device, and peers beside them: whole calls, prompts included, in turns.

Every mode has a process of its own that is loaded with its drafter. They load beside each other, and then work one at a
time. One request at a time comes first, without any warm-up: what is measured begins with the first request after
loading. No prompt is in a cache when a call begins. What is measured is written line by line.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from outrider.bench import loading, machine, prepare
from outrider.bench.peers import OURS, TABLE, Peer
from outrider.bench.peers.vllm import DEVICE_SHARE
from outrider.bench.plan import check_writable, checked_draft
from outrider.bench.prepare import ModelFiles
from outrider.bench.process import EngineProcess, WorkerError
from outrider.bench.report import name_of
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.drafters import PLAIN
from outrider.settings import Settings

LINES = "turns.jsonl"
VLLM = "vllm"
WARM_CALLS = 2  # of every mode and batch above 1: a shape that comes a second time is captured as a graph
DIGEST = 16  # characters that stand for a text
Line = dict[str, Any]
Show = Callable[[str, int, int], None]  # (what, done, of how many)
Save = Callable[[Sequence[Line]], None]
Tell = Callable[[str], None]  # a line that is to be seen


class WantedMode(NamedTuple):
    engine: str
    mode: str
    path: Path  # the engine's file
    peer: Peer | None  # None: ours

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"


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
    seconds: float  # no turn begins later, loading included; 0: all do
    timeout: float  # seconds of one call
    load_timeout: float  # seconds after which a mode that has not loaded is left out
    load_at_once: int  # modes; 0: as many as make sense
    threads: int
    seed: int
    own: dict[str, Any]  # settings of our engine
    python: dict[str, str]  # engine -> interpreter
    output: Path

    def __post_init__(self) -> None:
        counted = [(name, getattr(self, name), 1) for name in ("rounds", "single", "peer_groups", "threads")]
        counted += [("max_tokens", self.max_tokens, 2), *(("batch", batch, 1) for batch in self.batches)]
        counted += [(name, getattr(self, name), 0) for name in ("warm_up", "seconds", "load_at_once")]
        for name, value, least in counted:
            if not value >= least:
                raise OutriderError(f"{name} must be at least {least}, not {value:g}")
        for name in ("timeout", "load_timeout"):
            if not getattr(self, name) > 0:
                raise OutriderError(f"{name} must be more than 0 seconds, not {getattr(self, name):g}")
        if len(set(self.batches)) < len(self.batches):
            raise OutriderError(f"a batch is given twice: {', '.join(map(str, self.batches))}")
        for spec in self.drafts:
            checked_draft(spec)
        Settings(**self.own)
        check_writable(self.output)

    def modes(self) -> list[WantedMode]:
        """Plain decoding first."""
        ours = [WantedMode(OURS, spec, TABLE[OURS].path, None) for spec in dict.fromkeys((PLAIN, *self.drafts))]
        theirs = [(peer, mode) for peer in self.peers for mode in (peer.plain, *peer.modes)]
        return [*ours, *(WantedMode(peer.name, mode, peer.path, peer) for peer, mode in theirs)]

    def settings(self) -> Line:
        same = ("device", "batches", "single", "peer_groups", "rounds", "max_tokens", "warm_up", "seconds", "seed")
        return {
            "model": name_of(self.model),
            "prompts": len(self.prompts),
            "modes": [mode.name for mode in self.modes()],
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
    def __init__(self, plan: BatchPlan, scratch: Path, show: Show, save: Save, tell: Tell) -> None:
        self._plan, self._scratch, self._show, self._save, self._tell = plan, scratch, show, save, tell
        self._begin = time.monotonic()
        self._warmed = 0.0
        self._modes: list[RunningMode] = []
        self.lines: list[Line] = []

    def run(self) -> None:
        with (self._plan.output / LINES).open("w", encoding="utf-8") as self._file:
            self._say(**header(self._plan))
            weights = prepare.find(self._plan.model, self._scratch)
            self._chat = prepare.has_chat_template(weights.path)
            self._load(self._wanted(), weights)
            self._measure()

    def close(self) -> None:
        for mode in self._modes:
            mode.worker.close()

    def _wanted(self) -> list[WantedMode]:
        return self._plan.modes()

    def _load(self, wanted: Sequence[WantedMode], weights: ModelFiles) -> None:
        """All but those that must be alone beside each other, then these."""
        plan = self._plan
        own = {**plan.own, **self._own_memory(wanted, weights.path)}
        alone = [mode for mode in wanted if mode.peer is not None and mode.peer.loads_alone]
        together = [mode for mode in wanted if mode not in alone]
        for some, at_once in ((together, loading.at_once(plan.device, plan.load_at_once)), (alone, 1)):
            starts = [partial(self._start, mode, weights, own) for mode in some]
            left = dict(enumerate(some))
            self._show_loading(list(left.values()), len(some))
            for found in loading.load(starts, at_once, plan.load_timeout):
                self._take_in(left.pop(found.place), found, own)
                self._show_loading(list(left.values()), len(some))

    def _own_memory(self, wanted: Sequence[WantedMode], model: Path) -> dict[str, float]:
        """`cache_memory` of each mode of ours, unless it is chosen: all modes are loaded at the same time."""
        if "cache_memory" in self._plan.own:
            return {}
        free, total = loading.free_memory(self._plan.device)
        reserving = sum(mode.engine == VLLM for mode in wanted)
        free -= int(reserving * DEVICE_SHARE * total) if self._plan.device != "cpu" else 0
        workers, weights = len(wanted) - reserving, loading.weight_bytes(model)
        if self._plan.device != "cpu" and not loading.fit(free, workers, weights):
            self._tell(f"{workers} modes may not fit into {free / loading.GIB:.0f} GiB; name fewer with --draft")
        return {"cache_memory": round(loading.cache_bytes(free, workers, weights) / loading.GIB, 3)}

    def _show_loading(self, left: Sequence[WantedMode], total: int) -> None:
        if left:
            self._show(f"loading {', '.join(mode.name for mode in left)}", total - len(left), total)

    def _start(self, wanted: WantedMode, weights: ModelFiles, own: dict[str, Any]) -> EngineProcess:
        plan, (engine, mode, path, peer) = self._plan, wanted
        model = weights.path if peer is None else weights.form(peer)
        config = {
            "model": str(model), "modes": [mode], "chat": self._chat, "device": plan.device, "threads": plan.threads,
            "batch": max(plan.batches), "own": own, "head": plan.head, "dtype": plan.own.get("dtype", "auto"),
        }  # fmt: skip
        log = plan.output / f"{engine}-{hashlib.sha256(mode.encode()).hexdigest()[:6]}.log"
        worker = EngineProcess(plan.python[engine], path, config, plan.threads, log, calls=True)
        self._modes.append(RunningMode(engine, mode, worker))  # from here on `close` ends it
        return worker

    def _take_in(self, wanted: WantedMode, found: loading.LoadedWorker, own: dict[str, Any]) -> None:
        """A mode that has loaded, or that goes missing."""
        took = round(found.seconds, 2)
        if found.ready is not None:
            said = {"versions": found.ready["versions"], "about": found.ready["about"]}
            memory = {} if wanted.peer else {"cache_memory": own["cache_memory"]}
            self._say("loaded", engine=wanted.engine, mode=wanted.mode, seconds=took, **said, **memory)
            self._tell(f"{wanted.name}: loaded in {took:.1f} s")
            return
        self._tell(f"{wanted.name}: {found.why}")
        self._lose(next(mode for mode in self._modes if mode.name == wanted.name), found.why)
        if (wanted.engine, wanted.mode) == (OURS, PLAIN):
            raise OutriderError(f"plain decoding, which all others are compared with: {found.why}")

    def _measure(self) -> None:
        """Round by round, so that a run that is cut off has some of everything."""
        order = random.Random(self._plan.seed)
        turns = [(number, group) for number in range(1, self._plan.rounds + 1) for group in self._all_groups()]
        for done, (number, group) in enumerate(turns):
            if self._plan.seconds and time.monotonic() - self._begin > self._plan.seconds:
                self._say("note", text=f"{done} of {len(turns)} turns: the time was up")
                break
            taking = [mode for mode in self._modes if mode.engine == OURS or group.number < self._plan.peer_groups]
            for mode in order.sample(taking, len(taking)) if group.batch > 1 else ():
                self._warm_up(mode, group)
            for mode in order.sample(taking, len(taking)):
                self._show(f"round {number}, {group.batch} at once: {mode.name}", done, len(turns))
                self._take("turn", mode, group, round=number, cold=group.batch > 1 and group.batch not in mode.warm)
            self._save(self.lines)

    def _all_groups(self) -> list[Group]:
        return [group for batch in self._plan.batches for group in groups(self._plan, batch)]

    def _warm_up(self, mode: RunningMode, group: Group) -> None:
        """Once for each mode and batch, as long as there is time for it; never where one request comes at a time."""
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
    """Ascending, so that one request at a time comes first."""
    try:
        return tuple(sorted(int(part) for part in text.split(",")))
    except ValueError:
        raise OutriderError(f"--batches takes whole numbers with commas between, as in 1,4,16, not {text!r}") from None
