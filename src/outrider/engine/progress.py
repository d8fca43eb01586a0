"""How fast a batch that drafts comes to its end. Its texts get ahead of each other, and a call ends with the last of
them: what a round is worth is what it brings to that one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.sequence import Sequence
from outrider.drafters.base import JudgedSteps

# Rounds for which the average of all texts counts in the rate of one, while little is known of it. Chosen on simulated
# batches, some of which have a text that is drafted badly (tests/engine/test_finding_out.py).
ALIKE = 8


@dataclass
class _TextProgress:
    rounds: int = 0
    written: int = 0  # tokens, in these rounds


class BatchProgress:
    """Over all sequences that run; each is known by its id until it ends."""

    def __init__(self) -> None:
        self._texts: dict[int, _TextProgress] = {}

    def __call__(self, seqs: Seq[Sequence], part: Seq[JudgedSteps], together: bool) -> float:
        """The tokens that plain decoding would have to write in the time of these rounds, so that the batch comes as
        far; before they are committed. `together`: the batch is one call, which ends with its last text; else all
        tokens count alike."""
        going = [seq for seq in seqs if seq.finish is None]
        if not going:
            return 0.0
        written = 0
        for seq, steps in zip(seqs, part, strict=True):
            if seq.finish is None:
                text, tokens = self._texts.setdefault(seq.id, _TextProgress()), sum(map(len, steps.tokens))
                text.rounds, text.written = text.rounds + len(steps.tokens), text.written + tokens
                written += tokens
        return len(seqs) / len(going) * written * (self._slowest(going) if together else 1.0)

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)

    def _slowest(self, going: Seq[Sequence]) -> float:
        """The rate at which the last text comes to its end, as a share of the average rate."""
        texts = [self._texts[seq.id] for seq in going]
        average = sum(text.written / text.rounds for text in texts) / len(texts)
        rates = [(ALIKE * average + text.written) / (ALIKE + text.rounds) for text in texts]
        left = [max(1, seq.left) for seq in going]
        return max(left) / max(own / rate for own, rate in zip(left, rates, strict=True)) / average
