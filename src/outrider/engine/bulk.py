"""Bulk writing: the target writes several tokens of every sequence by itself before the host looks at them, and goes on
writing while the host does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq

from outrider.core.sequence import Sequence
from outrider.core.verify import decision
from outrider.engine.drafting import DrafterPool
from outrider.engine.judge import commit_plain
from outrider.models.base import Model, Paged, WrittenTokens

# (sequences from which on, tokens of a part): two parts are under way at a time, so a sequence that ends is written on
# for up to twice as many tokens, for nothing; and while the host looks at a part, the next one keeps the device busy. A
# stream is delivered as many tokens at a time (LOG, 2026-11-15 and 2026-11-17).
TOKENS = ((1024, 16), (64, 8), (1, 4))


def possible(running: Seq[Sequence], pool: DrafterPool, drafting: bool) -> bool:
    """Whether the target can write all of them by itself: nobody drafts for them now."""
    return all(seq.plain and not (drafting and pool.drafts(seq)) for seq in running)


def unread(running: Seq[Sequence], length: Callable[[int], int]) -> list[Sequence]:
    """The sequences of which the cache lacks more than the last token: their prompts come first."""
    return [seq for seq in running if length(seq.id) != len(seq.tokens) - 1]


def write(
    running: Seq[Sequence],
    model: Model,
    paged: Paged,
    layers: Seq[int],
    wait: Callable[[], None],
    going: Callable[[int], bool],
) -> Iterator[WrittenTokens]:
    """Write and commit, part after part; `wait` is called while the device works, `going` before another part is begun:
    whether there may be one after as many tokens. `model` and `paged` are the same one. `layers`: whose states are
    wanted. A sequence that ends is written on for nobody until half of them have ended: to begin anew without it takes
    the host longer than its row takes the device."""
    tokens_each, begun = next(tokens for least, tokens in TOKENS if len(running) >= least), 0

    def plan(unread: int) -> int:
        nonlocal begun
        left = [seq.left for seq in running if seq.finish is None]
        if begun and (2 * len(left) <= len(running) or not going(begun)):
            return 0
        steps = max(0, min(tokens_each, max(left) - unread))
        begun += steps
        return steps

    for written in paged.write(
        [seq.id for seq in running],
        [seq.tokens[-1] for seq in running],
        [None if seq.params.greedy else seq.dice for seq in running],
        [seq.params for seq in running],
        plan,
        wait,
        layers,
        [seq.adapter for seq in running] if any(seq.adapter for seq in running) else (),
        [decision(seq) == "rejection" for seq in running],
    ):
        for seq, tokens in zip(running, written.tokens.T.tolist(), strict=True):
            if seq.finish is None:
                commit_plain(seq, tokens)
                if seq.finish is None:  # else the cache goes on with what is written past its end, which nobody sees
                    model.crop(seq.id, len(seq.tokens) - 1)
                paged.seen(seq.id, seq.tokens, seq.scope)
        yield written
