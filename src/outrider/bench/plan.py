"""What is to be measured. Everything that a user can get wrong is refused here, before anything is loaded."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider import drafters
from outrider.bench import machine, workloads
from outrider.bench.peers import OURS, TABLE, Peer, choose
from outrider.bench.workloads import Prompt
from outrider.core.errors import OutriderError
from outrider.settings import Settings


@dataclass(frozen=True)
class Plan:
    model: str
    peers: tuple[Peer, ...]
    prompts: tuple[Prompt, ...]
    output: Path
    rounds: int
    max_tokens: int
    threads: int
    seed: int
    timeout: float  # seconds for one run
    python: dict[str, str]  # engine -> interpreter
    draft_model: str | None = None
    dtype: str = "auto"  # of our own engine

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("max_tokens", 2), ("threads", 1)):
            if getattr(self, name) < least:
                raise OutriderError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.timeout > 0:
            raise OutriderError(f"timeout must be more than 0 seconds, not {self.timeout:g}")


def make(
    *,
    model: str,
    engines: Sequence[str],
    drafts: Sequence[str],
    prompts: str | None,
    kinds: Sequence[str],
    limit: int | None,
    rounds: int,
    max_tokens: int,
    threads: int,
    seed: int,
    timeout: float,
    python: Sequence[str],
    draft_model: str | None,
    output: Path,
    dtype: str = "auto",
) -> Plan:
    for spec in drafts:
        drafters.parse(spec)
    if not any(spec in (OURS, "all") for spec in engines) and (drafts or dtype != "auto"):
        raise OutriderError(f"--draft and --dtype are for our own engine: add --engine {OURS} or leave them out")
    known = workloads.built_in() if prompts is None else workloads.read_jsonl(prompts)
    plan = Plan(
        model=model,
        peers=tuple(choose(engines, drafts or default_drafts(), draft_model)),
        prompts=tuple(workloads.select(known, kinds, limit)),
        output=output,
        rounds=rounds,
        max_tokens=max_tokens,
        threads=threads or machine.physical_cores(),
        seed=seed,
        timeout=timeout,
        python=_interpreters(python),
        draft_model=draft_model,
        dtype=Settings(dtype=dtype).dtype,
    )
    claim(output)
    return plan


def default_drafts() -> list[str]:
    return [Settings().draft]


def _interpreters(given: Sequence[str]) -> dict[str, str]:
    """ENGINE=PATH, ... -> the interpreter of every engine; ours where none is named."""
    found = dict.fromkeys(TABLE, sys.executable)
    for item in given:
        name, equals, path = item.partition("=")
        if name not in TABLE or not equals:
            raise OutriderError(f"--python takes ENGINE=PATH with one of {', '.join(TABLE)}, not {item!r}")
        place = shutil.which(os.path.expanduser(path))
        if place is None:
            raise OutriderError(f"--python {name}: {path!r} is not a program that can be run")
        found[name] = os.path.abspath(place)
    return found


def claim(folder: Path) -> None:
    """An output that cannot be written is refused before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutriderError(f"cannot write to the output folder {folder}: {error.strerror or error}") from error
