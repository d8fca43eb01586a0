"""What a drafter is: it proposes drafts, observes what became of them, and forgets sequences that ended.

To add a method, write one file with a class like those beside this one, and one line in the table (`__init__.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.models.base import Model


@dataclass(frozen=True)
class Parts:
    """What a drafter may be built from."""

    target: Model
    load: Callable[[str, str], Model]  # (name, folder or file; none, int8 or int4) -> one of the target's vocabulary


@dataclass(frozen=True, eq=False)
class Step:
    """What happened to one sequence in one pass of the target."""

    seq: Sequence  # with the kept tokens already committed
    tokens: Seq[int]  # committed tokens that were fed
    draft: Draft
    verdict: Verdict | None  # None: a piece of a long prompt, nothing to judge; else the path is cut where it ended
    hidden: Tensor | None  # [len(tokens) + len(draft), layers, hidden] of the layers that the drafter asked for


class Drafter:
    """Drafts nothing: with this one the engine decodes plainly. Every method is a subclass."""

    @dataclass(frozen=True)
    class Options:
        """What can be written after the colon in `--draft NAME:key=value,...`."""

    name = "none"
    layers: tuple[int, ...] = ()  # layers of the target whose hidden states `observe` wants
    expects: bool = False  # it reads the sequence's `prediction`
    free: bool = False  # asking costs next to nothing, and its drafts say their chances

    def __init__(self, options: Options, parts: Parts) -> None:
        """Build the drafter; anything wrong with the options is an OutriderError."""

    def propose(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[Draft]:
        """A draft for each sequence, of at most `rooms[i]` nodes."""
        return [EMPTY] * len(seqs)

    def observe(self, step: Step) -> None:
        """Learn what the target made of a draft."""

    def forget(self, id: int) -> None:
        """The sequence has ended."""
