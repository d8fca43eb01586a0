"""What a run writes beside its head: a table of tokens per pass in the running engine, and the head's provenance."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider import drafters
from outrider.build import check_vocabularies
from outrider.core.dice import Dice
from outrider.core.params import SamplingParams
from outrider.core.sequence import Rule, Sequence
from outrider.core.stats import Stats
from outrider.drafters.base import BuildContext, Drafter
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Model
from outrider.models.load import Loaded, load
from outrider.models.weights import LoadOptions
from outrider.train.atomic import write_text
from outrider.train.data.conversations import ChatFormat

TABLE = "tokens_per_pass"  # .json and .md
PROVENANCE = "provenance.json"
ALL = "all"
# Bytes that a head's own keys and values may take while it is measured; they take what the texts need. With a drafter's
# usual 128 MiB each of 240 prompts had 60 tokens of a block head of SmolLM2 (9 kB a token) before it began anew.
HEAD_MEMORY = 1 << 33
Prompts = Seq[tuple[str, str]]  # kind and text of each
Measured = Mapping[str, Mapping[str, Stats]]  # way of drafting -> kind of prompt -> what was kept


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Counts the tokens per pass of a drafter in the running engine.

    Without the policy that chooses draft lengths, all prompts in one batch, each with drafts of the size that is asked
    for; greedy unless a temperature is given.
    """

    target: Loaded
    chat: ChatFormat
    where: LoadOptions  # where a draft model is loaded
    chunk: int  # prompt tokens of a pass
    name: str = ""  # of the target, by which a shipped head is found

    def measure(
        self, spec: str, prompts: Prompts, max_tokens: int, temperature: float = 0.0, rule: Rule = "coupled"
    ) -> dict[str, Stats]:
        """What was drafted and kept, by kind of prompt. Prompts too long for the model are left out."""
        model, params = self.target.model, SamplingParams(max_tokens=max_tokens, temperature=temperature)
        tokens = [(kind, self.chat.ask(text)) for kind, text in prompts]
        fitting = [(kind, ids) for kind, ids in tokens if len(ids) + max_tokens <= model.context]
        engine = Engine(model, self._drafter(spec), Limits(len(fitting), self.chunk), rounds=False)
        seqs = [
            Sequence(id, ids, params, self.target.ends, dice=Dice(0, id), rule=rule)
            for id, (_, ids) in enumerate(fitting)
        ]
        for seq in seqs:
            engine.add(seq)
        while engine.busy:
            engine.step()
        found: dict[str, Stats] = {}
        for (kind, _), seq in zip(fitting, seqs, strict=True):
            found[kind] = found.get(kind, Stats()) + seq.stats
        return found

    def _drafter(self, spec: str) -> Drafter:
        def other(name: str, quantize: str) -> Model:
            found = load(name, self.where)
            check_vocabularies(self.target, found, name)
            return found.model

        return drafters.build(spec, BuildContext(self.target.model, other, self.name, cache_bytes=HEAD_MEMORY))


def total(by_kind: dict[str, Stats]) -> Stats:
    return sum(by_kind.values(), Stats())


def figures(measured: Measured) -> dict[str, Any]:
    """way of drafting -> kind of prompt -> figures, all kinds together last."""
    return {
        way: {kind: _figure(stats) for kind, stats in {**by_kind, ALL: total(dict(by_kind))}.items()}
        for way, by_kind in measured.items()
    }


def write_table(measured: Measured, out: Path, facts: Mapping[str, Any]) -> None:
    content = {**facts, "tokens_per_pass": figures(measured)}
    write_text(out / f"{TABLE}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_text(out / f"{TABLE}.md", markdown(measured, facts))


def markdown(measured: Measured, facts: Mapping[str, Any]) -> str:
    (head, *rows), told = cells(measured), ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:], "", told]) + "\n"


def text(measured: Measured) -> str:
    """For a terminal."""
    rows = cells(measured)
    widths = [2 + max(8, len(name)) for name in rows[0][1:]]
    shown = [[f"{cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True)] for row in rows]
    return "\n".join(f"{row[0]:24}" + "".join(own) for row, own in zip(rows, shown, strict=True))


def cells(measured: Measured) -> list[list[str]]:
    shown = figures(measured)
    kinds = list(next(iter(shown.values())))
    rows = [[kind, *(f"{shown[way][kind]['tokens_per_pass']:.2f}" for way in shown)] for kind in kinds]
    whole = ["all, prompts' passes too", *(f"{shown[way][ALL]['with_prompts']:.2f}" for way in shown)]
    return [["tokens per pass", *shown], *rows, whole]


def _figure(stats: Stats) -> dict[str, Any]:
    return {
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "with_prompts": round(stats.tokens_per_step, 3),
        "tokens": stats.tokens,
        "passes": stats.steps,
        "kept_by_depth": {str(depth): counts for depth, counts in stats.by_depth.items()},
    }


def write_provenance(out: Path, command: Seq[str], machine: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """The command, the code, the machine, the data, the figures. No paths of this machine."""
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(_without_folders(word) for word in command),
        "machine": {**machine, "device": _device()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **facts,
    }
    write_text(out / PROVENANCE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _without_folders(word: str) -> str:
    """A path is given by its last name."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag + equals + (re.split(r"[/\\]", value.rstrip("/\\"))[-1] if re.match(r"[/.~]|\w:", value) else value)


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
