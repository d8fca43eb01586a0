"""What is to be measured. Everything that a user can get wrong is refused here, before anything is loaded."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider import drafters
from outrider.backends import speculation
from outrider.bench import build_peers, formats, machine, workloads
from outrider.bench.build_peers import BuiltPeer, Show
from outrider.bench.peers import OURS, TABLE, Peer, choose
from outrider.bench.workloads import BenchPrompt
from outrider.core.errors import OutriderError
from outrider.drafters import DrafterSpec
from outrider.settings import BACKENDS, Settings

LONGEST = 8192  # tokens of a prompt whose reading is measured: some engines reserve memory for all of them


@dataclass(frozen=True)
class BenchPlan:
    model: str
    peers: tuple[Peer, ...]
    prompts: tuple[BenchPrompt, ...]
    output: Path
    rounds: int
    max_tokens: int
    threads: int
    seed: int
    timeout: float  # seconds for one run
    python: dict[str, str]  # engine -> interpreter
    draft_model: str | None = None
    own: dict[str, Any] = field(default_factory=dict)  # settings of our own engine
    speculation: dict[str, dict[str, Any]] = field(default_factory=dict)  # mode of vLLM -> its speculative_config
    prompt_tokens: int = 0  # of the prompts whose reading is measured; 0: it is not
    instructions: str = "native"  # what our kernels and the peers that are built here may use
    formats: tuple[str, ...] = ()  # in which the model is measured, one after the other; none: as it is
    programs: dict[str, BuiltPeer] = field(default_factory=dict)  # engine -> what was built of it

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("max_tokens", 2), ("threads", 1)):
            if getattr(self, name) < least:
                raise OutriderError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.prompt_tokens <= LONGEST:
            raise OutriderError(f"prompt_tokens must be at most {LONGEST}, not {self.prompt_tokens}; 0 leaves it out")
        if not self.timeout > 0:
            raise OutriderError(f"timeout must be more than 0 seconds, not {self.timeout:g}")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What a user asks for; `plan` refuses mistakes."""

    model: str
    engines: Sequence[str]
    drafts: Sequence[str]
    prompts: str | None  # a JSONL file; None: our own
    kinds: Sequence[str]
    limit: int | None  # prompts of each kind
    rounds: int
    max_tokens: int
    threads: int  # 0: one per core
    seed: int
    timeout: float
    python: Sequence[str]  # ENGINE=PATH
    draft_model: str | None
    output: Path
    own: Mapping[str, Any] = field(default_factory=dict)  # settings of our own engine
    backends: Sequence[str] = ()
    prompt_tokens: int = 0
    instructions: str = "native"
    formats: str = ""  # with commas between them
    build_peers: bool = False
    llama_source: str | None = None  # a source tree

    def plan(self) -> BenchPlan:
        for spec in self.drafts:
            checked_draft(spec)
        self._check_builds()
        plan = BenchPlan(
            model=self.model,
            peers=tuple(self._peers()),
            prompts=workloads.chosen(self.prompts, self.kinds, self.limit),
            output=self.output,
            rounds=self.rounds,
            max_tokens=self.max_tokens,
            threads=self.threads or machine.physical_cores(),
            seed=self.seed,
            timeout=self.timeout,
            python=interpreters(self.python),
            draft_model=self.draft_model,
            own=dict(self.own),
            speculation=_speculation(self._wanted()) if "vllm" in self.backends else {},
            prompt_tokens=self.prompt_tokens,
            instructions=self.instructions,
            formats=formats.parse(self.formats),
        )
        check_writable(self.output)
        return plan

    def built(self, plan: BenchPlan, show: Show) -> BenchPlan:
        """The plan with the programs of peers that are built here, built now where that was asked for."""
        programs = build_peers.kept_builds(self.instructions)
        if self.build_peers:
            made = build_peers.build(self._source(), self.instructions, show)
            programs[made.peer] = made
        return replace(plan, programs=programs)

    def _source(self) -> Path | None:
        return None if self.llama_source is None else Path(self.llama_source).expanduser()

    def _check_builds(self) -> None:
        if self.instructions not in build_peers.INSTRUCTIONS:
            known = ", ".join(build_peers.INSTRUCTIONS)
            raise OutriderError(f"unknown instructions {self.instructions!r}; known: {known}")
        source = self._source()
        if source is not None and not self.build_peers:
            raise OutriderError("--llama-source names what --build-peers builds; add --build-peers or leave it out")
        if source is not None:
            build_peers.check_source(source)
        quantizes = self.build_peers or bool(build_peers.kept_builds(self.instructions))
        formats.check(formats.parse(self.formats), quantizes)

    def _wanted(self) -> Sequence[str]:
        return self.drafts or default_drafts()

    def _peers(self) -> list[Peer]:
        engines = [*self.engines, *(name for name in map(_engine, self.backends) if name not in self.engines)]
        if self.build_peers and not any(spec.partition(":")[0] in (self._built_peer(), "all") for spec in engines):
            engines.append(f"{self._built_peer()}:plain")
        unused = [*(["draft"] if self.drafts and "vllm" not in self.backends else []), *self.own]
        if unused and not any(spec in (OURS, "all") for spec in engines):
            raise OutriderError(f"{', '.join(unused)}: only for our own engine; add --engine {OURS} or leave it out")
        wanted = self._wanted()
        return _as_drafted(choose(engines, wanted, self.draft_model), wanted if "vllm" in self.backends else ())

    def _built_peer(self) -> str:
        return build_peers.peer_of(self._source())


def checked_draft(spec: str) -> DrafterSpec:
    """The drafter that is to be measured, unless it would draft nothing: prompts come without grammars."""
    parsed = drafters.parse(spec)
    if drafters.needs_grammar(parsed):
        raise OutriderError(f"the drafter {spec} drafts what a grammar forces, and no prompt has one; choose another")
    return parsed


def default_drafts() -> list[str]:
    return [Settings().draft]


def _engine(backend: str) -> str:
    if backend not in BACKENDS:
        raise OutriderError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    return OURS if backend == "local" else backend


def _speculation(drafts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Our drafters as vLLM has them."""
    configs = {spec: speculation.to_vllm(spec) for spec in drafts}
    return {spec: config for spec, config in configs.items() if config is not None}


def _as_drafted(peers: Sequence[Peer], drafts: Sequence[str]) -> list[Peer]:
    """As a backend of ours, vLLM has the drafters that are asked for as its modes."""
    modes = tuple(dict.fromkeys(spec for spec in drafts if spec != "none"))
    return [replace(peer, modes=modes) if drafts and peer.name == "vllm" else peer for peer in peers]


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """ENGINE=PATH, ... -> the interpreter of every engine; ours where none is named."""
    found = dict.fromkeys(TABLE, sys.executable)
    own = Path(os.environ.get("OUTRIDER_VLLM_PYTHON") or ".venv-vllm/bin/python")  # as `make vllm` sets it up
    if own.is_file():
        found["vllm"] = os.path.abspath(own)
    for item in given:
        name, equals, path = item.partition("=")
        if name not in TABLE or not equals:
            raise OutriderError(f"--python takes ENGINE=PATH with one of {', '.join(TABLE)}, not {item!r}")
        place = shutil.which(os.path.expanduser(path))
        if place is None:
            raise OutriderError(f"--python {name}: {path!r} is not a program that can be run")
        found[name] = os.path.abspath(place)
    return found


def check_writable(folder: Path) -> None:
    """An output that cannot be written is refused before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutriderError(f"cannot write to the output folder {folder}: {error.strerror or error}") from error
