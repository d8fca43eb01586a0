"""Tokens per pass of the running engine: greedy, no pace, all prompts in one batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.stats import Stats
from outrider.drafters.base import Drafter
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Model


@dataclass(frozen=True)
class Question:
    kind: str
    tokens: tuple[int, ...]


def measure(
    model: Model, drafter: Drafter, questions: Seq[Question], ends: frozenset[int], max_tokens: int, piece: int = 512
) -> dict[str, Stats]:
    """What was drafted and kept, by kind of question."""
    engine = Engine(model, drafter, Limits(len(questions), piece))
    params = SamplingParams(max_tokens=max_tokens)
    seqs = [Sequence(id, list(question.tokens), params, ends) for id, question in enumerate(questions)]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        engine.step()
    found: dict[str, Stats] = {}
    for question, seq in zip(questions, seqs, strict=True):
        found[question.kind] = found.get(question.kind, Stats()) + seq.stats
    return found


def total(by_kind: dict[str, Stats]) -> Stats:
    return sum(by_kind.values(), Stats())
