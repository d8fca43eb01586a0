"""How well a student does on conversations that it never learns from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.train.data.batches import BatchOrder
from outrider.train.data.corpus import Corpus
from outrider.train.objective import Comparison
from outrider.train.step import autocast, loss_of
from outrider.train.teacher import Teacher

EVERY, FIRST = 40, 7  # conversations number 7, 47, 87 ... are held out: 2.5 % of the text
SMALL, EVERY_OF_SMALL = 200_000, 10  # tokens of a corpus of which more is held out: else it would be too little to tell
MOST = {"cpu": 4_096, "cuda": 32_768}  # tokens that are measured with: a look takes as long as four steps
DEEPEST = 16  # depths that an estimate looks at; heads learn fewer


def choose(corpus: Corpus, most: int) -> Corpus:
    """The texts that are held out: those of whole conversations, as the texts of one share their words."""
    tokens, texts = 0, []
    every = EVERY if len(corpus.tokens) > SMALL else EVERY_OF_SMALL
    for place, (talk, length) in enumerate(zip(corpus.talks.tolist(), corpus.lengths.tolist(), strict=True)):
        if talk % every == FIRST and tokens < most:
            texts.append(place)
            tokens += length
    return corpus.pick(torch.tensor(texts, dtype=torch.long))


def without(corpus: Corpus, held: Corpus) -> Corpus:
    """The texts of all conversations but those that are held out."""
    return corpus.pick(torch.isin(corpus.talks, held.talks, invert=True).nonzero().squeeze(1))


class HeldOut:
    """Measures a student on texts that are held out; the same ones each time."""

    def __init__(self, corpus: Corpus, teacher: Teacher, batch_tokens: int, how: Comparison) -> None:
        self._teacher, self._how, self._device = teacher, how, teacher.model.device
        self._order = BatchOrder(corpus, batch_tokens, teacher.longest, 0, self._device) if len(corpus) else None

    @torch.no_grad()
    def measure(self, student: nn.Module) -> dict[str, float]:
        """The means of the figures of a step; {} where nothing is held out."""
        if self._order is None:
            return {}
        sums: dict[str, Tensor] = {}
        batches, answers = self._order.batches(0), torch.zeros((), device=self._device)
        for _ in range(self._order.per_epoch):
            batch = next(batches)
            with autocast(self._device):
                figures = loss_of(student, self._teacher, batch, self._how)[1]
            count = batch.mask.sum()
            answers = answers + count
            for name, value in figures.items():
                sums[name] = sums.get(name, torch.zeros_like(answers)) + value.float() * count
        return {name: float(total / answers.clamp(min=1)) for name, total in sums.items()}


def tokens_per_pass(figures: dict[str, float], what: str = "hit") -> float:
    """About how many tokens a pass of the target writes with chains as deep as the student learns, from its hits at
    each depth (or from what rejection keeps, `keep`): the target's own token, and each node that is reached and right.
    """
    total = reach = 1.0
    for depth in range(1, DEEPEST + 1):
        reach *= figures.get(f"{what}{depth}", 0.0)
        total += reach
    return total
