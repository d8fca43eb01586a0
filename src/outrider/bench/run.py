"""The benchmark itself: load every engine in a process of its own, then let all modes take turns at every prompt."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.bench import build_peers, prepare
from outrider.bench.peers import Peer
from outrider.bench.plan import BenchPlan
from outrider.bench.process import EngineProcess, Missing, WorkerError
from outrider.core.errors import OutriderError
from outrider.models import sources

LOAD_TIMEOUT = 900.0  # seconds: vLLM compiles for minutes
LEAST_TOKENS = 2  # after a prompt whose reading is measured: some engines answer only from two on
WARM_UP_TOKENS = 16  # enough for every mode to draft at least once
_UNSAFE = re.compile(r"[^\w.=-]")  # in the name of a file
Show = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass
class Measurement:
    """One answer of one mode."""

    engine: str
    mode: str
    prompt: str
    kind: str
    round: int
    prompt_tokens: int = 0
    tokens: int = 0
    first: int = 0  # tokens that came with the first chunk: they belong to the prefill
    prefill_s: float = 0.0
    decode_s: float = 0.0
    timing: str = ""  # whose clock: "stream" ours, "engine" its own
    ids: list[int] | None = None
    text: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, eq=False)
class ReadyMode:
    """A mode of an engine, ready to run."""

    peer: Peer
    mode: str
    worker: EngineProcess


@dataclass
class BenchResult:
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: per mode how it went
    runs: list[Measurement] = field(default_factory=list)
    prompts: list[Measurement] = field(default_factory=list)  # how fast long prompts are read, by plain modes
    interrupted: bool = False


class BenchRunner:
    def __init__(self, plan: BenchPlan, scratch: Path, show: Show) -> None:
        self._plan, self._scratch, self._show = plan, scratch, show
        self._ready: list[ReadyMode] = []
        self.outcome = BenchResult()

    def run(self) -> None:
        plan = self._plan
        weights = prepare.find(plan.model, self._scratch)
        draft = None if plan.draft_model is None else prepare.find(plan.draft_model, self._scratch)
        self._tokenizer = prepare.read_tokenizer(weights.path)
        tasks = self._tokenizer.render(plan.prompts)
        longest = max(*(len(task.ids) for task in tasks), plan.prompt_tokens) + plan.max_tokens
        for peer in plan.peers:
            self._open(peer, weights, draft, context=-(-(longest + 64) // 256) * 256)
        self._warm_up(tasks[0])
        self._measure(tasks)
        self._measure_prompts(prepare.long_prompts(tasks, plan.prompt_tokens))

    def close(self) -> None:
        for worker in {ready.worker for ready in self._ready}:
            worker.close()

    def _open(self, peer: Peer, weights: prepare.ModelFiles, draft: prepare.ModelFiles | None, context: int) -> None:
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
        weights: prepare.ModelFiles,
        draft: prepare.ModelFiles | None,
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
            "ends": self._tokenizer.ends,
            "threads": self._plan.threads,
            "own": self._plan.own | peer.own,
            "context": context,
            "speculation": self._speculation(modes) if peer.name == "vllm" else {},
            "kernels": build_peers.INSTRUCTIONS[self._plan.instructions][1],
        }
        if peer.built:
            if peer.name not in self._plan.programs:
                return f"missing: {peer.install}"
            built = self._plan.programs[peer.name]
            config["program"] = built.server
            config["build"] = {"source": built.source, "flags": " ".join(built.flags), "compiler": built.compiler}
        return self._start(peer, modes, config)

    def _start(self, peer: Peer, modes: Sequence[str], config: dict[str, Any]) -> str:
        """ "ok", or why not."""
        python, log = self._plan.python[peer.name], self._log(peer, modes[0])
        worker = EngineProcess(python, peer.path, config, self._plan.threads, log)
        self._ready += [ReadyMode(peer, mode, worker) for mode in modes]
        try:
            self.outcome.engines[peer.name].update(worker.ready(LOAD_TIMEOUT))
        except (Missing, WorkerError) as error:
            self._retire(worker)
            return f"missing: {peer.install}" if isinstance(error, Missing) else f"failed: {error}"
        return "ok"

    def _speculation(self, modes: Sequence[str]) -> dict[str, Any]:
        """The configs for vLLM; a draft model is named by the folder that it can read."""
        from outrider.models.export import as_folder

        configs = {mode: dict(config) for mode, config in self._plan.speculation.items() if mode in modes}
        for config in configs.values():
            if "model" in config:
                config["model"] = str(as_folder(sources.resolve(config["model"])))
        return configs

    def _log(self, peer: Peer, mode: str) -> Path:
        folder = self._plan.output / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{peer.name}{'' if peer.one_process else '-' + _UNSAFE.sub('_', mode)}.log"

    def _warm_up(self, task: prepare.TokenizedPrompt) -> None:
        for number, ready in enumerate(list(self._ready)):
            self._show(f"warming up {ready.peer.name} {ready.mode}", number, len(self._ready))
            if ready in self._ready:
                self._ask(ready, task, 0, WARM_UP_TOKENS)

    def _measure(self, tasks: Sequence[prepare.TokenizedPrompt]) -> None:
        total = len(tasks) * self._plan.rounds * len(self._ready)
        for done, (task, number, ready) in enumerate(self._turns(tasks, self._ready)):
            self._show(f"{task.id}: {ready.peer.name} {ready.mode}", done, total)
            if ready in self._ready:
                self.outcome.runs.append(self._ask(ready, task, number, self._plan.max_tokens))

    def _measure_prompts(self, tasks: Sequence[prepare.TokenizedPrompt]) -> None:
        plain = [ready for ready in self._ready if ready.mode == ready.peer.plain]
        total = len(tasks) * self._plan.rounds * len(plain)
        for done, (task, number, ready) in enumerate(self._turns(tasks, plain)):
            self._show(f"{task.id}: {ready.peer.name}", done, total)
            if ready in self._ready:
                self.outcome.prompts.append(self._ask(ready, task.turned(number), number, LEAST_TOKENS))

    def _turns(
        self, tasks: Sequence[prepare.TokenizedPrompt], modes: Sequence[ReadyMode]
    ) -> Iterator[tuple[prepare.TokenizedPrompt, int, ReadyMode]]:
        """Prompt, round and mode: the modes in another order in every round."""
        order = random.Random(self._plan.seed)
        for task, number in itertools.product(tasks, range(1, self._plan.rounds + 1)):
            for ready in order.sample(modes, len(modes)):
                yield task, number, ready

    def _ask(self, ready: ReadyMode, task: prepare.TokenizedPrompt, number: int, max_tokens: int) -> Measurement:
        run = Measurement(ready.peer.name, ready.mode, task.id, task.kind, number, len(task.ids))
        job = {"mode": ready.mode, "ids": task.ids, "max_tokens": max_tokens}
        try:
            _take_in(run, ready.worker.ask(job, self._plan.timeout))
        except WorkerError as error:
            run.error = str(error)
            self._retire(ready.worker)
        if run.error:
            self.outcome.engines[run.engine]["modes"][run.mode] = f"failed at {task.id}: {run.error}"
        if run.ids is not None:
            run.text = self._tokenizer.decode(run.ids)
        return run

    def _retire(self, worker: EngineProcess) -> None:
        """A worker that is gone takes its modes with it; the others go on."""
        lost = [ready for ready in self._ready if ready.worker is worker]
        self._ready = [ready for ready in self._ready if ready.worker is not worker]
        for ready in lost:
            self.outcome.engines[ready.peer.name]["modes"][ready.mode] = "stopped with its process"
        worker.close()


def _take_in(run: Measurement, answer: dict[str, Any]) -> None:
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


def run(plan: BenchPlan, show: Show) -> BenchResult:
    """Run the plan. Ctrl-C ends it early and keeps what was measured."""
    with TemporaryDirectory(prefix="outrider-bench-") as scratch:
        bench = BenchRunner(plan, Path(scratch), show)
        try:
            bench.run()
        except KeyboardInterrupt:
            bench.outcome.interrupted = True
        finally:
            bench.close()
    return bench.outcome
