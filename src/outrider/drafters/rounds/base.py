"""Rounds without the host: what a drafter has to have so that it can draft in them.

In a round the drafters of a batch guess, the target runs their guesses, and the device walks down each draft along the
tokens that the target chose, or that rejection keeps. The host launches a part of the rounds, and reads all its tokens
at once while the device is at the next part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict

if TYPE_CHECKING:  # needs Triton, as a target on a device does
    from outrider.models.cuda.looped import LoopedPass
    from outrider.models.cuda.rejection import ChainDraws

# (sequences up to which, rows of a pass that they and their drafts share). Kernels take 16, 32, 64 or 128 rows at once,
# so a pass costs in steps: SmolLM2 on an H200 takes 0.53 ms for 16 rows, 0.60 for 32, 0.82 for 64 (LOG, 2026-11-18,
# passes of few rows). Chosen with estimates of what a head keeps (3.0, 2.6, 2.1, 1.6 tokens of 15, 7, 3 nodes, 1).
ROW_BUDGETS = ((16, 32), (32, 64), (1 << 30, 128))


def node_budget(sequences: int) -> int:
    """Nodes that the draft of each of some sequences may have."""
    rows = next(rows for most, rows in ROW_BUDGETS if sequences <= most)
    return max(1, rows // sequences - 1)


@dataclass(frozen=True)
class DraftSize:
    """Of the largest draft."""

    nodes: int
    depth: int


@dataclass(eq=False)
class RoundDraws:
    """Of sequences whose drafts are verified by rejection: what their random numbers and laws are."""

    keys: Tensor  # [sequences] int64: of the dice
    heat: Tensor  # [sequences] temperatures; 0: by another rule
    whose: Tensor  # [sequences] int32: the guesser whose draft is drawn and goes alone, from 1 on; 0: all are guessed
    laws: Tensor | None  # [sequences, depth, vocab] that the nodes of these were drawn from; None: all are guessed


@dataclass(eq=False)
class RoundTables:
    """What the kernels of a round share, for a number of sequences."""

    target: LoopedPass
    texts: Tensor  # [len(RoundField), sequences] int32
    kept: Tensor  # [sequences, 1 + 2 wide] int32: how many tokens, the tokens, and the row of each one's state
    written: Tensor  # [sequences, places] int32: the tokens of each text
    longest: int  # tokens of a text, at most
    draws: RoundDraws | None = None  # where some are verified by rejection

    @property
    def sequences(self) -> int:
        return len(self.kept)

    @property
    def wide(self) -> int:
        """Tokens that a round can write."""
        return (self.kept.shape[1] - 1) // 2

    @property
    def nodes(self) -> int:
        return self.target.table.shape[1] // self.sequences - 1

    def chains(self, number: int) -> ChainDraws | None:
        """What guesser `number` draws; None: nobody draws."""
        from outrider.drafters.rounds.kernels import RoundField  # needs Triton
        from outrider.models.cuda.rejection import ChainDraws

        draws = self.draws
        if draws is None or draws.laws is None:
            return None
        return ChainDraws(draws.keys, self.texts[RoundField.LENGTH], draws.heat, draws.whose, number, draws.laws)


class SamplingDrafter(Protocol):
    """How a drafter chooses tokens for sequences (its own books)."""

    def temperature(self, seq: Sequence) -> float:
        """Of its choice under the target's own noise; 0: it guesses the likeliest tokens, or draws."""
        ...

    def draws(self, seq: Sequence) -> bool:
        """Whether it draws from its law, for rejection."""
        ...


def cut_laws(texts: SamplingDrafter, seqs: Seq[Sequence]) -> list[SamplingParams | None]:
    """By what the drafter's own law for each sequence is cut: as the target's; None: it guesses likely tokens."""
    return [seq.params if texts.temperature(seq) > 0.0 or texts.draws(seq) else None for seq in seqs]


class Guesses(Protocol):
    """The drafts of a number of sequences, made by kernels alone."""

    found: Tensor  # [sequences, 1 + 3 nodes] int32: how many nodes; tokens, parents, probabilities (as bits)
    size: DraftSize

    def send(self, seqs: Seq[Sequence], tables: RoundTables) -> None:
        """What the first round reads; the rounds before it are over."""
        ...

    def guess(self, tables: RoundTables, number: int) -> None:
        """Launch the kernels of one round. `number`: of the guesser, from 1 on; it draws where `tables.draws` say that
        the draft is its own."""
        ...


class RoundGuesser(Protocol):
    """A drafter that can guess in rounds."""

    name: str
    layers: tuple[int, ...]  # of the target whose states it reads
    reads_texts: bool  # whether its kernels read the tokens of the texts
    joins: bool  # whether its drafts are joined with those of another guesser that comes first

    def takes(self, seq: Sequence) -> bool:
        """Whether it can guess for such a sequence at all."""
        ...

    def draws(self, seq: Sequence) -> bool:
        """Whether it draws from its law for such a sequence, so that its draft goes alone (`combined.py`)."""
        ...

    def follows(self, seq: Sequence) -> bool:
        """Whether it can guess for the sequence as it stands."""
        ...

    def begin(self, seqs: Seq[Sequence], ahead: int, wide: int) -> bool:
        """Make ready for rounds that write up to `ahead` tokens, `wide` at a time; False: there is no memory."""
        ...

    def go_on(self, seqs: Seq[Sequence], ahead: int) -> bool:
        """Make ready for more rounds while some are under way: up to `ahead` tokens in all, counted from the last part
        that the host has read; False: there is no memory."""
        ...

    def guesses(self, sequences: int, budget: int, alone: bool) -> Guesses | None:
        """Its drafts of up to `budget` nodes for a number of sequences; None: it cannot guess for this many. `alone`:
        they are joined with nobody's."""
        ...

    def end(self, seqs: Seq[Sequence], rounds: Seq[LoopedRounds]) -> None:
        """A part of the rounds is over."""
        ...


@dataclass(frozen=True, eq=False)
class JudgedSteps:
    """Steps of one sequence that a drafter and the target took without the host."""

    tokens: list[list[int]]  # that each step wrote: the nodes that were kept, and the target's own token
    sources: list[list[str]]  # of each step: the drafters of the nodes that were kept
    drafts: int  # steps with a draft
    drafted_by_depth: Seq[int]  # nodes of all steps; the first number is of depth 1
    drafted_by_source: Mapping[str, int]  # by drafter
    step: Callable[[int], tuple[Draft, Verdict]]  # the draft of one of them, and what the target made of it


class WritesRounds(Protocol):
    """What writes several steps of a batch without the host (`writer.py`)."""

    def serves(self, seqs: Seq[Sequence], budget: int) -> bool: ...

    def can(self, seqs: Seq[Sequence]) -> bool: ...

    def write(
        self, seqs: Seq[Sequence], wait: Callable[[], None], going: Callable[[int], bool]
    ) -> Iterator[list[JudgedSteps]]: ...


@dataclass(frozen=True, eq=False)
class RoundDraft:
    """The draft of one round and what was kept of it."""

    tokens: list[int]
    parents: list[int]
    acceptance: list[float]  # as its guesser states it
    sources: list[str]
    path: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LoopedRounds:
    """Drafts of one sequence that the device wrote and judged by itself."""

    tokens: list[list[int]]  # of each round: the nodes that were kept, and the target's own token
    sources: list[list[str]]  # of each round: who guessed the nodes that were kept
    drafts: int  # rounds with a draft
    drafted_by_depth: list[int]  # nodes of all rounds, from depth 1 on
    drafted_by_source: dict[str, int]
    states: Tensor | None  # [rows, layers, hidden] of the pass of the last round
    rows: list[int]  # of these, after which the tokens of the last round come
    round: Callable[[int], RoundDraft]
