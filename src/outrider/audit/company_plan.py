"""What the company audit varies, as a value; without torch, for the command's options are made of it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import OutriderError

PROMPTS, BOUNDARIES, LONG = GROUPS = ("prompts", "boundaries", "long")  # kinds of prompts


@dataclass(frozen=True)
class CompanyPlan:
    groups: tuple[str, ...] = GROUPS
    batches: tuple[int, ...] = (1, 4, 16, 64)  # prompts that are handed in together; 1: alone
    chunks: tuple[int, ...] = (128, 512, 2048)  # prompt tokens that one step takes in
    temperatures: tuple[float, ...] = (0.0, 0.8)  # each prompt has a seed of its own
    longest: int | None = None  # tokens of the longest sequence; 0: the context; None: that, on a CPU LONGEST_ON_CPU
    max_tokens: int = 32
    runs: int = 2  # of every variant
    seed: int = 0  # of the texts, and of the order in batches
    share: tuple[int, int] = (0, 1)  # (i, n): of the prompts the i-th, the (i + n)-th and so on; several processes can
    # audit one list of prompts
    margins: int = 16  # prompts of which the smallest margin is told: a few hundred tokens show whether there are ties

    def __post_init__(self) -> None:
        for name, least in (("batches", 1), ("chunks", 2), ("temperatures", 0)):
            if any(value < least for value in getattr(self, name)):
                raise OutriderError(f"{name} of an audit must be at least {least}, not {min(getattr(self, name))}")
        if not (self.groups and self.batches and self.temperatures and self.runs > 0):
            raise OutriderError("an audit needs at least one group of prompts, one batch, one temperature and one run")
        if not 0 <= self.share[0] < self.share[1]:
            raise OutriderError(f"a share of the prompts is (i, n) with 0 <= i < n, not {self.share}")
        unknown = next((name for name in self.groups if name not in GROUPS), None)
        if unknown is not None:
            raise OutriderError(f"unknown group of prompts {unknown!r}; known: {', '.join(GROUPS)}")
        if self.longest and self.longest <= self.max_tokens:
            raise OutriderError(f"the longest sequence must have more than max_tokens ({self.max_tokens}) tokens")
