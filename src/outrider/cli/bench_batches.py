"""`outrider bench --device cuda`: drafters x requests at once on a GPU, and what else is claimed of one."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.bench import (
    batches,
    batches_figures as figures,
    batches_report as reports,
    machine,
    plan as plans,
    workloads,
)
from outrider.bench.peers import OURS, Peer, choose
from outrider.bench.plan import interpreters
from outrider.cli import options
from outrider.cli.options import DEFAULT
from outrider.cli.screen import bar, note
from outrider.core.errors import OutriderError
from outrider.core.option import option
from outrider.drafters import DRAFT_MODEL
from outrider.settings import Settings

DEVICE = "On a GPU, or with --batches"
BATCHES, PARTS = "1,4,16,64,256", ("batches", "passes", "bulk", "8b", "8b-oracle")
WHOLE_CALLS = ("transformers", "vllm")  # peers that answer many prompts in one call
SINGLE, QUICK_SINGLE = 24, 4
# Options of the benchmark of single prompts.
ELSEWHERE = ("prompt_tokens", "formats", "build_peers", "llama_source", "backend", DRAFT_MODEL)


@dataclass(frozen=True)
class BatchOptions:
    """What only a benchmark of batches has."""

    batches: str | None = option(None, "Numbers of requests at once, separated by commas.", shown=BATCHES, panel=DEVICE)
    parts: str | None = option(
        None, f"What is measured, with commas between: {', '.join(PARTS)}.", shown=PARTS[0], panel=DEVICE
    )
    single: int | None = option(None, "Least number of prompts for each batch size.", shown="24", panel=DEVICE)
    warm_up: float = option(
        60.0,
        "Total seconds for warm-up calls (batches above 1 only); modes without one are marked.",
        panel=DEVICE,
    )
    seconds: float = option(0.0, "Start no turn after this many seconds, loading included; 0: no limit.", panel=DEVICE)
    load_timeout: float = option(600.0, "Seconds after which a mode that has not loaded is left out.", panel=DEVICE)
    load_at_once: int = option(
        0, "Modes that load at the same time.", shown="one for each core on a GPU, one on a CPU", panel=DEVICE
    )
    peer_groups: int = option(2, "Calls of each batch size and round that peers take part in.", panel=DEVICE)
    peer_head: str | None = option(None, "An EAGLE head that vLLM loads: its mode eagle3.", panel=DEVICE)
    cache_memory: float = option(
        0.0, "GiB for keys and values of each mode of ours.", shown="an equal share: all are loaded", panel=DEVICE
    )


def asked_for(own: BatchOptions, settings: Settings) -> bool:
    """Whether whole calls of batches are measured, as always on a GPU."""
    return settings.device not in ("auto", "cpu") or own.batches is not None


def refuse(own: BatchOptions) -> None:
    """Options that a benchmark of single prompts would ignore."""
    for each in BatchOptions.__dataclass_fields__.values():
        if getattr(own, each.name) != each.default:
            flag = "--" + each.name.replace("_", "-")
            raise OutriderError(f"{flag} is for a GPU and for batches; add --device cuda or --batches {BATCHES}")


def measure(own: Any, settings: Settings, changed: Mapping[str, Any], output: Path) -> int:
    """The exit code: 130 where it was interrupted, 1 where a mode is missing or a call failed. `own`: the options of
    the command; `changed`: settings of our engine that are not the default's."""
    parts = _parts(own.parts, settings)
    plan = _plan(own, settings, changed, output)
    options.pull_known(plan.model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers end, what was measured is kept
    runner, interrupted = _Run(plan, parts), False
    with bar("{task.completed:.0f}/{task.total:.0f}", plain=5.0) as show:
        try:
            runner.run(show)
        except KeyboardInterrupt:
            interrupted = True
    runner.save(runner.lines)
    report = runner.report()
    reports.show(report)
    note(f"written to {plan.output}")
    return 130 if interrupted else 1 if report["lost"] else 0


class _Run:
    """The parts of a plan, one after the other; the report is written as it grows."""

    def __init__(self, plan: batches.BatchPlan, parts: Sequence[str]) -> None:
        self._plan, self._parts = plan, parts
        self.lines: Sequence[batches.Line] = [batches.header(plan)]
        self._found: dict[str, Any] = {}

    def run(self, show: batches.Show) -> None:
        if "batches" in self._parts:
            self._run_batches(show)
        rest = [part for part in self._parts if part != "batches"]
        if rest:
            from outrider.bench import gpu

            gpu.measure(self._plan.model, self._plan.own, rest, self._found, lambda: self.save(self.lines), show)

    def report(self) -> dict[str, Any]:
        return figures.assemble(self.lines, shlex.join(["outrider", *sys.argv[1:]]), self._found)

    def save(self, lines: Sequence[batches.Line]) -> None:
        self.lines = lines
        reports.write(self.report(), self._plan.output)

    def _run_batches(self, show: batches.Show) -> None:
        with TemporaryDirectory(prefix="outrider-bench-") as scratch:
            runner = batches.BatchRunner(self._plan, Path(scratch), show, self.save, note)
            try:
                runner.run()
            finally:
                runner.close()
                self.lines = runner.lines or self.lines


def _parts(given: str | None, settings: Settings) -> list[str]:
    parts = list(dict.fromkeys(part.strip() for part in (given or PARTS[0]).split(",")))
    for part in parts:
        if part not in PARTS:
            raise OutriderError(f"unknown part {part!r}; known: {', '.join(PARTS)}")
        if part != PARTS[0] and settings.device != "cuda":
            raise OutriderError(f"the part {part} measures a GPU; add --device cuda")
    if settings.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise OutriderError("torch sees no GPU here; leave --device cuda out, or run it where one is")
    return parts


def _plan(own: Any, settings: Settings, changed: Mapping[str, Any], output: Path) -> batches.BatchPlan:
    for name in ELSEWHERE:
        given = getattr(own, name)
        if given and given != (DEFAULT.backend,):  # which a config file always names
            flag = "--" + name.replace("_", "-")
            raise OutriderError(f"{flag} is not for whole calls of batches (--device cuda, --batches); leave it out")
    device = "cpu" if settings.device == "auto" else settings.device
    memory = {"cache_memory": own.cache_memory} if own.cache_memory else {}
    return batches.BatchPlan(
        model=settings.model,
        device=device,
        drafts=tuple(own.draft) or tuple(plans.default_drafts()),
        peers=_peers(own),
        head=own.peer_head,
        batches=batches.batch_sizes(own.batches or BATCHES),
        prompts=workloads.chosen(own.prompts, own.kind, own.limit),
        single=own.single or (QUICK_SINGLE if own.quick else SINGLE),
        peer_groups=own.peer_groups,
        rounds=own.sized("rounds"),
        max_tokens=own.sized("max_tokens"),
        warm_up=own.warm_up,
        seconds=own.seconds,
        timeout=own.timeout,
        load_timeout=own.load_timeout,
        load_at_once=own.load_at_once,
        threads=settings.threads or machine.physical_cores(),
        seed=own.seed,
        own={**changed, **memory},
        python=interpreters(own.python),
        output=output,
    )


def _peers(own: Any) -> tuple[Peer, ...]:
    wanted = [spec for spec in own.engine if spec != OURS]
    names = [name for spec in wanted for name in (WHOLE_CALLS if spec == "all" else [spec])]
    for name in names:
        if name.partition(":")[0] not in WHOLE_CALLS:
            raise OutriderError(f"{name} answers no batches here; peers that do: {', '.join(WHOLE_CALLS)}")
    found = []
    for peer in choose(names, (), None):
        explicit = any(spec.startswith(f"{peer.name}:") for spec in names)
        modes = peer.modes if explicit or peer.name == "vllm" else ()  # transformers' lookup knows no batches
        head = ("eagle3",) if peer.name == "vllm" and own.peer_head else ()
        found.append(replace(peer, modes=(*modes, *head)))
    if own.peer_head and not any(peer.name == "vllm" for peer in found):
        raise OutriderError("--peer-head is for vLLM; add --engine vllm or leave it out")
    return tuple(found)
