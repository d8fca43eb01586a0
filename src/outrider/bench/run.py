"""The benchmark itself: load every engine in a process of its own, then let all modes take turns at every prompt."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.bench import prepare
from outrider.bench.peers import Peer
from outrider.bench.plan import Plan
from outrider.bench.process import Missing, Worker, WorkerError
from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.models.export import as_folder

LOAD_TIMEOUT = 900.0  # vLLM compiles for minutes
WARM_UP_TOKENS = 16
_UNSAFE = re.compile(r"[^\w.=-]")  # in the name of a file
Show = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass
class Run:
    """One answer of one mode."""

    engine: str
    mode: str
    prompt: str
    kind: str
    round: int
    tokens: int = 0
    first: int = 0  # tokens that came with the first piece: they belong to the prefill
    prefill_s: float = 0.0
    decode_s: float = 0.0
    timing: str = ""  # "stream": our clock, "engine": its own
    ids: list[int] | None = None
    text: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, eq=False)
class Seat:
    """A mode of an engine, ready to run."""

    peer: Peer
    mode: str
    worker: Worker


@dataclass
class Outcome:
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: per mode how it went
    runs: list[Run] = field(default_factory=list)
    interrupted: bool = False


class Bench:
    def __init__(self, plan: Plan, scratch: Path, show: Show) -> None:
        self._plan, self._scratch, self._show = plan, scratch, show
        self._seats: list[Seat] = []
        self.outcome = Outcome()

    def run(self) -> None:
        plan = self._plan
        weights = prepare.find(plan.model, self._scratch)
        draft = None if plan.draft_model is None else prepare.find(plan.draft_model, self._scratch)
        self._text = prepare.read_text(weights.path)
        tasks = self._text.render(plan.prompts)
        longest = max(len(task.ids) for task in tasks) + plan.max_tokens
        for peer in plan.peers:
            self._open(peer, weights, draft, context=-(-(longest + 64) // 256) * 256)
        self._warm_up(tasks[0])
        self._measure(tasks)

    def close(self) -> None:
        for worker in {seat.worker for seat in self._seats}:
            worker.close()

    def _open(self, peer: Peer, weights: prepare.Weights, draft: prepare.Weights | None, context: int) -> None:
        """Start the engine's processes and wait until they have loaded, one after the other."""
        self.outcome.engines[peer.name] = {"modes": {}}
        all_modes = (peer.plain, *peer.modes)
        for modes in [all_modes] if peer.one_process else [(mode,) for mode in all_modes]:
            self._show(f"loading {peer.name} {'' if peer.one_process else modes[0]}", 0, 0)
            why = self._load(peer, modes, weights, draft, context)
            self.outcome.engines[peer.name]["modes"].update(dict.fromkeys(modes, why))
            if why != "ok" and modes[0] == peer.plain:  # without its plain nothing of it can be compared
                self.outcome.engines[peer.name]["modes"] = dict.fromkeys(all_modes, why)
                break

    def _load(
        self,
        peer: Peer,
        modes: Sequence[str],
        weights: prepare.Weights,
        draft: prepare.Weights | None,
        context: int,
    ) -> str:
        """ "ok", or why not."""
        drafts = draft is not None and (peer.one_process or bool(set(modes) & set(peer.with_draft_model)))
        try:
            model, draft_model = weights.form(peer), draft.form(peer) if draft is not None and drafts else None
        except (OutriderError, OSError) as error:  # it cannot be written out in the form that this engine reads
            return f"failed: {error}"
        if model is None or (drafts and draft_model is None):
            return "skipped: it reads GGUF files only"
        config = {
            "model": str(model),
            "draft_model": None if draft_model is None else str(draft_model),
            "modes": list(modes),
            "ends": self._text.ends,
            "threads": self._plan.threads,
            "own": self._plan.own,
            "context": context,
            "speculation": self._speculation(modes) if peer.name == "vllm" else {},
        }
        worker = Worker(self._plan.python[peer.name], peer.path, config, self._plan.threads, self._log(peer, modes[0]))
        self._seats += [Seat(peer, mode, worker) for mode in modes]
        try:
            self.outcome.engines[peer.name].update(worker.ready(LOAD_TIMEOUT))
        except (Missing, WorkerError) as error:
            self._retire(worker)
            return f"missing: {peer.install}" if isinstance(error, Missing) else f"failed: {error}"
        return "ok"

    def _speculation(self, modes: Sequence[str]) -> dict[str, Any]:
        """What vLLM is told; a draft model is named by the folder that it can read."""
        told = {mode: dict(config) for mode, config in self._plan.speculation.items() if mode in modes}
        for config in told.values():
            if "model" in config:
                config["model"] = str(as_folder(sources.resolve(config["model"])))
        return told

    def _log(self, peer: Peer, mode: str) -> Path:
        folder = self._plan.output / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{peer.name}{'' if peer.one_process else '-' + _UNSAFE.sub('_', mode)}.log"

    def _warm_up(self, task: prepare.Task) -> None:
        for number, seat in enumerate(list(self._seats)):
            self._show(f"warming up {seat.peer.name} {seat.mode}", number, len(self._seats))
            if seat in self._seats:
                self._ask(seat, task, 0, WARM_UP_TOKENS)

    def _measure(self, tasks: Sequence[prepare.Task]) -> None:
        order = random.Random(self._plan.seed)
        total, done = len(tasks) * self._plan.rounds * len(self._seats), 0
        for task in tasks:
            for number in range(1, self._plan.rounds + 1):
                for seat in order.sample(self._seats, len(self._seats)):
                    self._show(f"{task.id}: {seat.peer.name} {seat.mode}", done, total)
                    if seat in self._seats:
                        self.outcome.runs.append(self._ask(seat, task, number, self._plan.max_tokens))
                    done += 1

    def _ask(self, seat: Seat, task: prepare.Task, number: int, max_tokens: int) -> Run:
        run = Run(seat.peer.name, seat.mode, task.id, task.kind, number)
        job = {"mode": seat.mode, "ids": task.ids, "max_tokens": max_tokens}
        try:
            _take_in(run, seat.worker.ask(job, self._plan.timeout))
        except WorkerError as error:
            run.error = str(error)
            self._retire(seat.worker)
        if run.error:
            self.outcome.engines[run.engine]["modes"][run.mode] = f"failed at {task.id}: {run.error}"
        if run.ids is not None:
            run.text = self._text.decode(run.ids)
        return run

    def _retire(self, worker: Worker) -> None:
        """A worker that is gone takes its modes with it; the others go on."""
        lost = [seat for seat in self._seats if seat.worker is worker]
        self._seats = [seat for seat in self._seats if seat.worker is not worker]
        for seat in lost:
            self.outcome.engines[seat.peer.name]["modes"][seat.mode] = "stopped with its process"
        worker.close()


def _take_in(run: Run, answer: dict[str, Any]) -> None:
    if "error" in answer:
        run.error = str(answer["error"])
        return
    try:
        run.tokens, run.first = int(answer["tokens"]), int(answer["first"])
        run.prefill_s, run.decode_s = float(answer["prefill_s"]), float(answer["decode_s"])
        run.timing, run.ids, run.text = str(answer["timing"]), answer.get("ids"), answer.get("text", "")
        run.stats = dict(answer.get("stats", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise WorkerError(f"answered without what was asked for: {error!r}") from error


def run(plan: Plan, show: Show) -> Outcome:
    """Run the plan. Ctrl-C ends it early and keeps what was measured."""
    with TemporaryDirectory(prefix="outrider-bench-") as scratch:
        bench = Bench(plan, Path(scratch), show)
        try:
            bench.run()
        except KeyboardInterrupt:
            bench.outcome.interrupted = True
        finally:
            bench.close()
    return bench.outcome
