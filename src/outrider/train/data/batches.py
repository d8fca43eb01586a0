"""The batch of texts of each step: decided by the seed and the step alone, so that a run can resume exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.data.corpus import Corpus

WIDTH_MULTIPLE = 64  # tokens: texts are padded to a multiple of this, for few shapes and little waste
ANSWER_MULTIPLE = 1024  # tokens: on a GPU a batch's answer tokens are padded to a multiple of this, for few graphs


@dataclass(frozen=True, eq=False)
class TextBatch:
    tokens: Tensor  # [b, t] int64, padded on the right
    mask: Tensor  # [b, t] bool: tokens of answers
    known: Tensor | None = None  # [n] where the mask is true, as TeacherBatch has it


class GrowingOrder:
    """The batch of each step while texts are added: from the step on at which some came, one batch of these and one of
    the earlier texts by turns, until each new one was seen; then all, again and again. So new texts are learned beside
    old ones, and never as a block. Decided by the texts, the steps at which they came, and the seed."""

    def __init__(self, batch_tokens: int, longest: int, seed: int, device: torch.device) -> None:
        self._make = partial(BatchOrder, batch_tokens=batch_tokens, longest=longest, seed=seed, device=device)
        self._old: BatchOrder | None = None  # None: all texts are new
        self._new: BatchOrder | None = None
        self._first = 0  # step from which on the newest texts are learned from
        self._batches: tuple[int, Iterator[TextBatch]] | None = None  # from a step on

    def add(self, step: int, old: Corpus, new: Corpus) -> None:
        """From that step on `new`, too; `old` are all that were there before."""
        self._first, self._batches = step, None
        self._old, self._new = (self._make(some) if len(old) and len(new) else None for some in (old, new))
        self._all = self._make(Corpus.join([old, new]))

    @property
    def per_epoch(self) -> int:
        """Steps in which all texts are seen once."""
        return self._all.per_epoch

    def batch(self, step: int) -> TextBatch:
        if self._batches is None or self._batches[0] != step:
            self._batches = step, self._from(step)
        batches = self._batches[1]
        self._batches = step + 1, batches
        return next(batches)

    def _from(self, step: int) -> Iterator[TextBatch]:
        place = step - self._first
        if self._new is not None and self._old is not None:
            turns = self._new.per_epoch
            new, old = self._new.batches((place + 1) // 2), self._old.batches(place // 2)
            while place < 2 * turns:
                yield next(old if place % 2 else new)
                place += 1
            place -= 2 * turns
        yield from self._all.batches(place)


class BatchOrder:
    """An endless series of batches of about `batch_tokens` tokens; each epoch sees every text once, shuffled."""

    def __init__(self, corpus: Corpus, batch_tokens: int, longest: int, seed: int, device: torch.device) -> None:
        """Texts are cut after `longest` tokens."""
        self._batch_tokens, self._seed, self._device = batch_tokens, seed, device
        self._corpus = corpus
        self._widths = ((corpus.lengths + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE).clamp(max=longest)
        # on the device, so that a step waits for nothing
        self._tokens, self._starts = corpus.tokens.to(device), corpus.starts.to(device)
        self._lengths, self._answers = corpus.lengths.to(device), corpus.answers.to(device)
        self.per_epoch = len(self._epoch(0))

    def batches(self, step: int) -> Iterator[TextBatch]:
        """From that step on."""
        while True:
            epoch, first = divmod(step, self.per_epoch)
            for rows, width in self._epoch(epoch)[first:]:
                yield self._batch(rows, width)
                step += 1

    def _epoch(self, epoch: int) -> list[tuple[Tensor, int]]:
        """(texts, width) of each of its batches."""
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._widths), generator=random)
        found = []
        for width in self._widths.unique().tolist():
            rows = order[self._widths[order] == width]
            found += [(part, width) for part in rows.split(max(1, self._batch_tokens // width))]
        return [found[i] for i in torch.randperm(len(found), generator=random).tolist()]

    def _batch(self, rows: Tensor, width: int) -> TextBatch:
        known = self._known(rows, width).to(self._device, non_blocking=True)
        rows, place = rows.to(self._device), torch.arange(width, device=self._device)
        inside = place < self._lengths[rows, None]
        index = torch.where(inside, self._starts[rows, None] + place, 0)
        tokens = torch.where(inside, self._tokens[index], 0).long()
        return TextBatch(tokens, inside & (place >= self._answers[rows, None]), known)

    def _known(self, rows: Tensor, width: int) -> Tensor:
        """Where the tokens of answers are, counted on the host: a step must not wait for the device."""
        begins, ends = self._corpus.answers[rows].long(), self._corpus.lengths[rows].long().clamp(max=width)
        counts = (ends - begins).clamp(min=0)
        firsts = torch.arange(len(rows)) * width + begins - (counts.cumsum(0) - counts)
        known = torch.arange(int(counts.sum())) + firsts.repeat_interleave(counts)
        if self._device.type == "cpu":
            return known
        return F.pad(known, (0, -len(known) % ANSWER_MULTIPLE)).pin_memory()
