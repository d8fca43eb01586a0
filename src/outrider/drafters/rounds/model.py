"""A draft model in rounds: it writes a chain by small passes of its own, one for each token, and its cache follows the
text without the host.

Keys and values depend on the tokens before them alone, so what was not kept is written over: the first pass of a draft
runs the last tokens of the text once more: all tokens that may differ from its own guesses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.sequence import Sequence
from outrider.drafters.rounds import kernels
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables, SamplingDrafter, cut_laws
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import event, pinned
from outrider.models.cuda.looped import LoopedPass
from outrider.models.cuda.model import CudaLlama

# Tokens that the first pass of a chain runs where it drafts alone: if all of the draft before was kept, its last token
# was never run; the target's own token comes after it.
TAIL = 2


class DraftedTexts(SamplingDrafter, Protocol):
    """What the draft model has read of each text (the drafter's own books)."""

    name: str
    takes_adapters: bool  # whether it runs the adapter of a sequence

    def begin_alike(self, seq: Sequence) -> None:
        """A text that is not read yet takes what others have of its beginning."""
        ...

    def read(self, seqs: Seq[Sequence]) -> None:
        """All but the last token of these texts; there is memory for them."""
        ...

    def shares(self, seq: Sequence) -> None:
        """Others may take what the cache has of its committed tokens."""
        ...


class ModelGuesser:
    layers: tuple[int, ...] = ()
    reads_texts = joins = True

    def __init__(self, texts: DraftedTexts, model: CudaLlama, length: int) -> None:
        """`model` has the target's vocabulary. `length`: tokens of a draft, at most."""
        self.name, self.texts, self.model, self._length = texts.name, texts, model, length
        self.slots: list[int] = []  # of the sequences whose rounds begin

    def takes(self, seq: Sequence) -> bool:
        return True

    def draws(self, seq: Sequence) -> bool:
        return self.texts.draws(seq)

    def follows(self, seq: Sequence) -> bool:
        return True

    def begin(self, seqs: Seq[Sequence], ahead: int, wide: int) -> bool:
        slots = self._reserve(seqs, ahead) if self._fits(seqs, ahead) and self._read(seqs) else None
        self.slots = slots or []
        return slots is not None

    def go_on(self, seqs: Seq[Sequence], ahead: int) -> bool:
        return self._fits(seqs, ahead) and self._reserve(seqs, ahead) is not None

    def _fits(self, seqs: Seq[Sequence], ahead: int) -> bool:
        """Into its context, which may be shorter than the target's."""
        return max(len(seq.tokens) for seq in seqs) + ahead <= self.model.context

    def _read(self, seqs: Seq[Sequence]) -> bool:
        """What the first pass does not run; False: there is no memory."""
        behind = [seq for seq in seqs if self._unread(seq) > TAIL]
        for seq in behind:
            self.texts.begin_alike(seq)
            if self.model.reserve([seq.id], self._unread(seq)) is None:
                return False
        self.texts.read(behind)
        for seq in behind:
            self.texts.shares(seq)
        return True

    def _reserve(self, seqs: Seq[Sequence], ahead: int) -> list[int] | None:
        return self.model.reserve([seq.id for seq in seqs], max(map(self._unread, seqs)) + ahead)

    def _unread(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.model.length(seq.id)

    def guesses(self, sequences: int, budget: int, alone: bool) -> ModelGuesses:
        return ModelGuesses(self, sequences, min(self._length, budget), alone)

    def end(self, seqs: Seq[Sequence], rounds: Seq[LoopedRounds]) -> None:
        for seq, own in zip(seqs, rounds, strict=True):
            alone = len(own.drafted_by_source) == 1  # else others' nodes may have been kept, which it has not run
            written = sum(map(len, own.tokens)) - (TAIL if alone else len(own.tokens[-1]))
            self.model.written(seq.id, max(0, self._unread(seq) + written))
            self.texts.shares(seq)


class ModelGuesses:
    def __init__(self, guesser: ModelGuesser, sequences: int, length: int, alone: bool) -> None:
        """`alone`: else others' nodes may be kept, which the model has not run."""
        self._guesser, self._model, device = guesser, guesser.model, guesser.model.device
        self._alone = alone
        self.size = DraftSize(length, length)
        self.found = torch.zeros(sequences, 1 + 3 * length, dtype=torch.int32, device=device)
        self.found[:, 0] = length
        self.found[:, 1 + length : 1 + 2 * length] = torch.arange(-1, length - 1, device=device)
        self._slots = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._stated = torch.zeros(sequences, device=device)
        self._staged = pinned(sequences, device)
        self._passes: dict[Hashable, list[LoopedPass]] = {}
        self._sent = event(device)

    def _passes_of(self, tables: RoundTables) -> list[LoopedPass]:
        """The first one of a draft, and the one for each further token."""
        target = tables.target
        adapted = self._guesser.texts.takes_adapters and target.run.adapters is not None
        tail = TAIL if self._alone else tables.wide
        typical = None if target.cuts is None else target.cuts.typical  # None: no cuts
        key = tail, tables.longest, target.sampled, adapted, typical
        if key not in self._passes:
            count, cuts = tables.sequences, None
            if typical is not None:
                cuts = Cuts.none(count, typical, self._model.device)
            self._passes[key] = [
                self._model.looped(count, rows - 1, 0, tables.longest, (), target.sampled, adapted, cuts)
                for rows in (tail, 1)
            ]
        return self._passes[key]

    def send(self, seqs: Seq[Sequence], tables: RoundTables) -> None:
        staged, texts = self._staged.numpy(), self._guesser.texts
        staged[:] = self._model.padding
        staged[: len(seqs)] = self._guesser.slots[: len(seqs)]
        self._slots.copy_(self._staged, non_blocking=True)
        keys = np.array([seq.dice.key for seq in seqs], "uint64").view("int64")
        heat = np.array([texts.temperature(seq) for seq in seqs], "float32")
        for each in self._passes_of(tables):
            if each.run.adapters is not None:
                self._sent.synchronize()  # all passes of a model have one place on the host for what is sent
                each.send_adapters([seq.adapter for seq in seqs])
                self._sent.record()
            if each.sampled:
                rows = each.run.rows // tables.sequences
                each.keys[: rows * len(seqs)].copy_(torch.from_numpy(keys.repeat(rows)))
                each.temperatures[: rows * len(seqs)].copy_(torch.from_numpy(heat.repeat(rows)))
        if (cuts := self._passes_of(tables)[0].cuts) is not None:  # both passes have the same
            cuts.send(cut_laws(texts, seqs))

    def guess(self, tables: RoundTables, number: int) -> None:
        first, further = self._passes_of(tables)
        for step in range(self.size.nodes):
            one = first if step == 0 else further
            self._write(one, step, tables, number)

    def _write(self, one: LoopedPass, step: int, tables: RoundTables, number: int) -> None:
        """The next token of each chain."""
        kernels.enter_chain(
            self.found, tables.texts, tables.written, self._slots, one.table, one.positions, step, one.block,
            self._model.padding,
        )  # fmt: skip
        logits, chains = one.choose(), tables.chains(number)
        tokens = self.found[:, 1 + step]
        tokens.copy_(last_of(one.chosen, tables.sequences))
        if chains is not None:
            chains.draw(step, last_of(logits, tables.sequences), tokens, self._stated)


def last_of(rows: Tensor, sequences: int) -> Tensor:
    """Of the rows of each sequence."""
    return rows.view(sequences, -1, *rows.shape[1:])[:, -1]
