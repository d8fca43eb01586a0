"""Bulk writing: the target writes several tokens of every sequence of a large batch before the host looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from outrider.core.sequence import Sequence
from outrider.engine.drafting import DrafterPool
from outrider.engine.judge import commit_plain
from outrider.models.base import Model, Paged

# Sequences from which on a batch is written in bulk: the host's work for each of them then takes longer than a pass,
# and several tokens of each are still a short wait for the reader of one (LOG, 2026-11-15: 3 to 5 times as fast).
FEWEST = 64
# Tokens that each sequence writes before the host looks. A stream is delivered that many tokens at a time.
TOKENS = 16
# Sequences from which on it is twice as many: in a batch this large nobody reads along.
LARGEST = 1024


def possible(running: Seq[Sequence], pool: DrafterPool, drafting: bool) -> bool:
    """Whether the target can write all of them by itself: nobody drafts for them now, or only reads their states."""
    if len(running) < FEWEST or any(seq.adapter is not None for seq in running):
        return False
    return all(seq.plain and pool.idle(seq, drafting) for seq in running)


def unread(running: Seq[Sequence], length: Callable[[int], int]) -> list[Sequence]:
    """The sequences of which the cache lacks more than the last token: their prompts come first."""
    return [seq for seq in running if length(seq.id) != len(seq.tokens) - 1]


def write(running: Seq[Sequence], model: Model, paged: Paged, wait: Callable[[], None]) -> None:
    """Write and commit; `wait` is called while the device works. `model` and `paged` are the same one."""
    written = paged.write(
        [seq.id for seq in running],
        [seq.tokens[-1] for seq in running],
        [None if seq.params.greedy else seq.dice for seq in running],
        [seq.params.temperature for seq in running],
        TOKENS * (2 if len(running) >= LARGEST else 1),
    )
    wait()
    for seq, tokens in zip(running, written.T.tolist(), strict=True):
        commit_plain(seq, tokens)
        model.crop(seq.id, len(seq.tokens) - 1)
        paged.seen(seq.id, seq.tokens, seq.scope)
