"""What `outrider profile` measures; without torch, for its options are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from outrider.models.base import Model

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # rows of the passes that are timed on a CPU
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the same on a GPU, where more rows cost little
LENGTHS = range(1, 9)  # tokens of the drafts that are timed: the usual ones
DRAFT_ROUNDS = 8  # drafts of each length that are timed
DECODED = 64  # tokens of plain decoding, and of an answer with the drafter
TURNS = 1 + DRAFT_ROUNDS * len(LENGTHS)  # the first takes in the prompt and does not count
WRITTEN = max(DECODED, TURNS + max(LENGTHS))  # the most tokens that come after the context, rows apart


@dataclass(frozen=True)
class ProfilePlan:
    """What to measure. Passes of one row and of two always are: everything is compared with them."""

    context: int = 256  # tokens already in the cache
    rows: tuple[int, ...] = ROWS
    rounds: int = 20

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("rounds", self.rounds), ("rows", min(self.rows, default=0))):
            if value < 1:
                raise OutriderError(f"{name} must be at least 1, not {value}")
        object.__setattr__(self, "rows", tuple(sorted({1, 2, *self.rows})))

    def check(self, model: Model) -> None:
        """Refuse what the model cannot hold."""
        limit, more = min(model.context, model.capacity), max(*self.rows, WRITTEN)
        if self.context + more > limit:
            advice = f"a context of at most {limit - more}" if limit > more else "fewer rows or a larger model"
            raise OutriderError(
                f"a context of {self.context} and {more} tokens after it are more than the {limit} that the model can "
                f"hold; use {advice}"
            )


DEFAULT = ProfilePlan()


def parse_rows(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OutriderError(f"rows must be whole numbers with commas between them, not {text!r}") from None
