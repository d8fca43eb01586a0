"""What was drafted and what was kept: by depth, by drafter, with the time of each phase. Adds up and prints itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # statistics need no torch
    from outrider.core.draft import Draft


@dataclass
class Stats:
    tokens: int = 0  # written
    steps: int = 0  # passes of the target that wrote something
    cached: int = 0  # tokens of the prompt that were not run, because the cache had them from other sequences
    drafts: int = 0  # steps that verified a draft
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by_drafter: Counter[str] = field(default_factory=Counter)
    accepted_by_drafter: Counter[str] = field(default_factory=Counter)
    asked_by_drafter: Counter[str] = field(default_factory=Counter)  # steps in which a drafter was asked for a draft
    # this sequence's share of the time that asking took, a prompt that was read for it included
    seconds_by_drafter: dict[str, float] = field(default_factory=dict)
    # This sequence's share of the engine's time; the shares of a batch add up to the time that passed.
    seconds: dict[str, float] = field(default_factory=dict)
    first_seconds: float = 0.0  # the part of them until the end of the first step that wrote something: the prompt's
    # After the first step: the time of asking the drafters (with or without a draft), of showing them what was written,
    # and of the rows that drafts added to passes, by the measured cost of rows.
    drafting_seconds: float = 0.0
    unmeasured: int = 0  # steps with drafts of which it is not known what they cost
    writing_seconds: float = 0.0  # from its first token to its last, also while other requests were served

    def record(self, draft: Draft, path: tuple[int, ...], written: int, drafter: str) -> None:
        """One step: the draft, the kept nodes that were committed, and the tokens written in all."""
        self.steps += 1
        self.tokens += written
        nodes = len(draft.tokens)
        if not nodes:
            return
        depths = draft.depths()
        self.drafts += 1
        self.drafted += nodes
        self.accepted += len(path)
        for depth in depths:
            self.drafted_by_depth[depth] += 1
        for node in path:
            self.accepted_by_depth[depths[node]] += 1
        if not draft.sources:
            self.drafted_by_drafter[drafter] += nodes
            if path:
                self.accepted_by_drafter[drafter] += len(path)
            return
        sources = draft.named(drafter)
        for source in sources:
            self.drafted_by_drafter[source] += 1
        for node in path:
            self.accepted_by_drafter[sources[node]] += 1

    def record_steps(
        self,
        kept: Sequence[Sequence[str]],
        drafts: int,
        drafted_by_depth: Sequence[int],
        drafted_by_drafter: Mapping[str, int],
    ) -> None:
        """Several steps: the drafters of the nodes that each kept, which one token of the target's own follows; how
        many had a draft; the nodes of all by depth, from 1, and by drafter."""
        depths = list(map(len, kept))
        self.steps += len(kept)
        self.tokens += sum(depths) + len(kept)
        self.drafts += drafts
        self.drafted += sum(drafted_by_depth)
        self.accepted += sum(depths)
        for drafter, nodes in drafted_by_drafter.items():
            if nodes:
                self.drafted_by_drafter[drafter] += nodes
        for sources in kept:
            for source in sources:
                self.accepted_by_drafter[source] += 1
        reached = len(kept)
        for depth, count in enumerate(drafted_by_depth, 1):
            if count:
                self.drafted_by_depth[depth] += count
            reached -= depths.count(depth - 1)
            if reached:
                self.accepted_by_depth[depth] += reached

    def untimed(self) -> Stats:
        """Only what was counted: the same, run after run."""
        same = replace(self, seconds={}, seconds_by_drafter={}, first_seconds=0.0, drafting_seconds=0.0)
        return replace(same, unmeasured=0, writing_seconds=0.0)

    def ask(self, drafter: str, seconds: float) -> None:
        """A drafter was asked, and took this long for this sequence."""
        self.asked_by_drafter[drafter] += 1
        self.seconds_by_drafter[drafter] = self.seconds_by_drafter.get(drafter, 0.0) + seconds

    def spend(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        if self.steps <= 1:
            self.first_seconds += seconds
        elif phase == "draft":
            self.drafting_seconds += seconds

    def __add__(self, other: Stats) -> Stats:
        timed = ("seconds", "seconds_by_drafter")
        counted = [name for name in self.__dataclass_fields__ if name not in timed]
        total = Stats(**{name: getattr(self, name) + getattr(other, name) for name in counted})
        total.seconds = _summed(self.seconds, other.seconds)
        total.seconds_by_drafter = _summed(self.seconds_by_drafter, other.seconds_by_drafter)
        return total

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Of the passes that judged a draft: what was kept and the target's own token."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def by_depth(self) -> dict[int, dict[str, int]]:
        return _pairs(self.drafted_by_depth, self.accepted_by_depth)

    @property
    def by_drafter(self) -> dict[str, dict[str, int]]:
        return _pairs(self.drafted_by_drafter, self.accepted_by_drafter)

    @property
    def asked(self) -> dict[str, dict[str, float]]:
        """By drafter: how often it was asked, and the seconds that took. Steps that a device took by itself are not
        in it."""
        took = self.seconds_by_drafter
        return {
            name: {"steps": count, "seconds": round(took.get(name, 0.0), 6)}
            for name, count in sorted(self.asked_by_drafter.items())
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "cached": self.cached,
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "tokens_per_step": round(self.tokens_per_step, 4),
            "by_depth": {str(depth): counts for depth, counts in self.by_depth.items()},
            "by_drafter": self.by_drafter,
            "asked": self.asked,
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
        }

    def __str__(self) -> str:
        time = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
        return (
            f"{self.tokens} tokens in {self.steps} steps ({self.tokens_per_step:.2f} per step), "
            f"{self.accepted} of {self.drafted} drafted tokens kept ({self.acceptance_rate:.0%})"
            + (f"; {time}" if time else "")
        )


def _summed(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {
        name: one.get(name, 0.0) + other.get(name, 0.0) for name in (*one, *(key for key in other if key not in one))
    }


def _pairs(drafted: Counter[Any], accepted: Counter[Any]) -> dict[Any, dict[str, int]]:
    return {key: {"drafted": drafted[key], "accepted": accepted[key]} for key in sorted(drafted)}


def estimated_speedup(samples: Sequence[Stats]) -> float | None:
    """Over plain decoding: the time that the same tokens would have taken without drafts, over the time that they took.

    Time after the first step counts. Without drafts there would be a pass for each token, of what the passes took less
    what drafts added to them; the tokens would be judged in about the same time. None where nothing came after the
    first step, and where it is not known what drafting cost (on a GPU that drafts by itself, and by vLLM).
    """
    total = sum(samples, Stats())
    decode = sum(total.seconds.values()) - total.first_seconds
    if (
        total.steps <= len(samples)
        or decode <= 0
        or total.unmeasured
        or (total.drafted and "draft" not in total.seconds)
    ):
        return None
    later = (total.steps - len(samples)) / total.steps  # of the steps, so also of the time in which tokens are judged
    judging = later * total.seconds.get("verify", 0.0)
    passes = max(0.0, decode - total.drafting_seconds - judging)
    return round((total.tokens_per_step * passes + judging) / decode, 3)
