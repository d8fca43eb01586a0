"""A head in rounds on a GPU: it takes in what was kept of the round before, and drafts grow from there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.eagle import loop_kernels
from outrider.drafters.eagle.device_kernels import SequenceField
from outrider.drafters.eagle.runner import DraftRequest, DraftShape, ShownStates
from outrider.drafters.heads.device_runner import DeviceHeadRunner
from outrider.drafters.rounds.base import DraftSize, LoopedRounds, RoundTables, SamplingDrafter, cut_laws
from outrider.models.cuda.batch import Field
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import pinned


class ShownTexts(SamplingDrafter, Protocol):
    """What the target has shown of each text, and what of it the head has taken in (the drafter's own books)."""

    name: str
    layers: tuple[int, ...]

    def follows(self, seq: Sequence) -> bool:
        """Whether the target has shown all up to the last token."""
        ...

    def catch_up(self, seqs: Seq[Sequence], most: int) -> bool:
        """Take in what was shown, until no more than `most` rows wait; False: some text begins anew."""
        ...

    def waiting(self, seq: Sequence) -> tuple[list[int], list[ShownStates]]:
        """The tokens that the head has not taken in, and the states before them."""
        ...

    def took(self, seq: Sequence, rounds: LoopedRounds) -> None:
        """The head has taken in all but the tokens of the last round."""
        ...

    def calibrate(self, seq: Sequence, rounds: LoopedRounds) -> None:
        """Learn how sure the head was, and what was kept."""
        ...


class HeadGuesser:
    reads_texts = joins = False

    def __init__(self, texts: ShownTexts, runner: DeviceHeadRunner[Any]) -> None:
        self.name, self.layers, self._texts, self._runner = texts.name, texts.layers, texts, runner
        self._slots: list[int] = []  # of the sequences whose rounds begin

    def takes(self, seq: Sequence) -> bool:
        return True

    def draws(self, seq: Sequence) -> bool:
        return self._texts.draws(seq)

    def follows(self, seq: Sequence) -> bool:
        return self._texts.follows(seq)

    def begin(self, seqs: Seq[Sequence], ahead: int, wide: int) -> bool:
        if not self._texts.catch_up(seqs, wide):
            return False
        slots = self._runner.reserve([seq.id for seq in seqs], ahead + self._runner.ahead)
        self._slots = slots or []
        return slots is not None

    def go_on(self, seqs: Seq[Sequence], ahead: int) -> bool:
        return self._runner.reserve([seq.id for seq in seqs], ahead + self._runner.ahead) is not None

    def guesses(self, sequences: int, budget: int, alone: bool) -> HeadGuesses:
        return HeadGuesses(self._runner, sequences, fitting(self._runner.shape, budget), self)

    def asked(self, seqs: Seq[Sequence]) -> tuple[list[int], list[DraftRequest]]:
        """The head's slots of these sequences, and how their tokens are drawn."""
        asked = [DraftRequest(0, len(seq.tokens), self._texts.temperature(seq), seq.dice.key) for seq in seqs]
        return self._slots[: len(seqs)], asked

    def cut_laws(self, seqs: Seq[Sequence]) -> list[SamplingParams | None]:
        return cut_laws(self._texts, seqs)

    def waiting(self, seq: Sequence) -> tuple[list[int], list[ShownStates]]:
        return self._texts.waiting(seq)

    def end(self, seqs: Seq[Sequence], rounds: Seq[LoopedRounds]) -> None:
        for seq, own in zip(seqs, rounds, strict=True):
            tokens, _ = self._texts.waiting(seq)
            self._runner.written(seq.id, len(tokens) + sum(map(len, own.tokens[:-1])))
            self._texts.took(seq, own)
        self._texts.calibrate(seqs[0], rounds[0])  # one sequence tells enough


class HeadGuesses:
    def __init__(self, runner: DeviceHeadRunner[Any], sequences: int, shape: DraftShape, guesser: HeadGuesser) -> None:
        self._runner, self._guesser = runner, guesser
        self._group = runner.group(sequences, shape)
        self.size, self.found = DraftSize(shape.nodes, shape.depth), self._group.growth.found
        fields = len(SequenceField), sequences
        self._sequences = torch.zeros(fields, dtype=torch.int32, device=runner.device)
        self._staged = pinned(self._sequences.numel(), runner.device).view(fields)
        self._table: Tensor | None = None  # [len(Field) + 1, sequences * wide] of the rows that the head takes in
        self._kept: Tensor | None = None  # on the host
        self._cuts: dict[bool, Cuts] = {}  # with typical_p and without

    def send(self, seqs: Seq[Sequence], tables: RoundTables) -> None:
        staged, some = self._staged.numpy(), slice(len(seqs))
        slots, asked = self._guesser.asked(seqs)
        self._runner.stage_sequences(staged, slots, [replace(each, size=self.size.nodes) for each in asked])
        staged[SequenceField.LENGTH, some] = [self._runner.length(seq.id) for seq in seqs]
        self._sequences.copy_(self._staged, non_blocking=True)
        if (cuts := self._cuts_of(tables)) is not None:
            cuts.send(self._guesser.cut_laws(seqs))
        waiting = [self._guesser.waiting(seq) for seq in seqs]
        self._send_kept([tokens for tokens, _ in waiting], tables)
        self._show([shown for _, shown in waiting], tables)

    def _cuts_of(self, tables: RoundTables) -> Cuts | None:
        """Of the head's own laws; None: nobody has any."""
        if tables.target.cuts is None:
            return None
        typical = tables.target.cuts.typical
        if typical not in self._cuts:
            self._cuts[typical] = Cuts.none(tables.sequences, typical, self._runner.device)
        return self._cuts[typical]

    def _send_kept(self, tokens: Seq[Seq[int]], tables: RoundTables) -> None:
        """The tokens that wait stand where those kept by a round will stand."""
        if self._kept is None:
            self._kept = pinned(tables.kept.numel(), self._runner.device).view(tables.kept.shape)
        kept, wide = self._kept.numpy(), tables.wide
        kept[:] = 0
        for row, each in zip(kept, tokens, strict=False):
            row[0], row[1 : 1 + len(each)] = len(each), each
        kept[:, 1 + wide :] = np.arange(wide)
        tables.kept.copy_(self._kept, non_blocking=True)

    def _show(self, shown: Seq[Seq[ShownStates]], tables: RoundTables) -> None:
        """The states before them stand where the states of a pass will stand. One copy for all of them: a copy each
        kept the device waiting for the host where there are many."""
        hidden, each = tables.target.hidden, 1 + tables.nodes
        by: dict[int, tuple[Tensor, list[int], list[int]]] = {}  # states; their rows; where these go
        for place, own in enumerate(shown):
            to = place * each
            for states, rows in own:
                _, some, places = by.setdefault(id(states), (states, [], []))
                some += rows
                places += range(to, to + len(rows))
                to += len(rows)
        if not by:
            return
        sources, goals, begin = list[int](), list[int](), 0
        for states, rows, to_rows in by.values():
            sources += [begin + row for row in rows]
            goals += to_rows
            begin += len(states)
        moved = torch.tensor([sources, goals], device=hidden.device)
        hidden[moved[1]] = torch.cat([states for states, _, _ in by.values()])[moved[0]]

    def guess(self, tables: RoundTables, number: int) -> None:
        runner, rows = self._runner, tables.sequences * tables.wide
        if self._table is None:
            self._table = torch.zeros(len(Field) + 1, rows, dtype=torch.int32, device=runner.device)
        longest = runner.reach(tables.longest + runner.ahead)
        loop_kernels.enter_kept(
            tables.kept, tables.texts, self._sequences, self._table, tables.nodes, runner.block, runner.padding
        )
        shape = runner.small(rows, longest)
        runner.take_in(self._group, self._sequences, self._table, shape, tables.target.hidden)
        runner.grow(self._group, self._sequences, longest, tables.chains(number), self._cuts_of(tables))


def fitting(shape: DraftShape, nodes: int) -> DraftShape:
    """A draft of at most `nodes` nodes. Small trees are seldom deep, and every level costs a step of the head."""
    nodes = min(nodes, shape.nodes)
    depth = min(shape.depth, nodes) if shape.width == 1 else min(shape.depth, nodes, 3 + nodes // 3)
    return replace(shape, nodes=nodes, depth=depth, width=min(shape.width, nodes))
