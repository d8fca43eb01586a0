"""Rounds without the host on a GPU: the head drafts, the target runs the drafts and judges them, round after round.

A round is one graph: the head takes in what was kept, drafts grow, they become the rows of a pass of the target, the
device walks down each draft along the tokens that the target chose, and what was kept moves to where the text goes on.
The host launches some rounds and reads all their tokens at once. So a text may be written past its end: what comes
after the end is never committed, and its memory is the sequence's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.eagle import loop_kernels
from outrider.drafters.eagle.device_kernels import SequenceField
from outrider.drafters.eagle.device_runner import DeviceRunner, DraftGroup
from outrider.drafters.eagle.loop_kernels import LoopField
from outrider.drafters.eagle.runner import DraftRequest, Grown, LoopedRounds, LoopedText
from outrider.models.cuda.batch import Field
from outrider.models.cuda.graphs import Shape, event, pinned, reach
from outrider.models.cuda.looped import LoopedPass
from outrider.models.cuda.model import PAGE, CudaLlama

MOST_ROWS = 1024  # of a pass: the memory for all their logits stays small
MOST_ROUNDS = 16  # that the host may wait for
# Tokens of a sequence up to which its rounds have a graph from the beginning; rounds after which they have one.
PREPARED, WARM_ROUNDS = (256, 512, 1024), 2


@dataclass(eq=False)
class _Looped:
    """A number of sequences, and how long they may be."""

    group: DraftGroup
    target: LoopedPass
    sent: Tensor  # what the host writes before the first round: sequences, texts, kept
    staging: Tensor
    sequences: Tensor  # views of it
    texts: Tensor
    kept: Tensor
    table: Tensor  # [len(Field) + 1, sequences * wide] of the rows that the head takes in
    out: Tensor  # [rounds, sequences, 2 + 2 wide + 3 nodes]
    found: Tensor  # the same on the host


class DeviceLoop:
    def __init__(self, runner: DeviceRunner, target: CudaLlama, layers: Seq[int]) -> None:
        shape = runner.shape
        self._runner, self._target, self._layers, self._nodes = runner, target, tuple(layers), shape.nodes
        self.wide = min(shape.depth, shape.nodes) + 1
        self._made: dict[tuple[int, int, bool], _Looped] = {}
        self._done = event(target.device)
        if target.device.type == "cuda":
            for longest in (size for size in PREPARED if size <= target.context):
                self._warm_up(longest)

    def can(self, lengths: Seq[int], rounds: int) -> bool:
        count = 1 << (len(lengths) - 1).bit_length()
        return count * (1 + self._nodes) <= MOST_ROWS and max(lengths) + self._ahead(rounds) <= self._target.context

    @torch.inference_mode()
    def run(self, texts: Seq[LoopedText], rounds: int, wait: Callable[[], None]) -> list[LoopedRounds] | None:
        ids, ahead = [text.id for text in texts], self._ahead(rounds)
        slots = self._target.reserve(ids, ahead)
        own_slots = None if slots is None else self._runner.reserve(ids, ahead + self._runner.ahead)
        if slots is None or own_slots is None:
            return None
        sampled = any(text.asked.temperature > 0 for text in texts)
        longest = max(text.length for text in texts) + ahead
        key = 1 << (len(texts) - 1).bit_length(), reach(longest, self._target.context), sampled
        if key not in self._made:
            self._made[key] = self._make(*key)
        loop = self._made[key]
        self._send(loop, texts, slots, own_slots)
        own_reach = self._runner.reach(longest + self._runner.ahead)
        for _ in range(rounds):
            self._runner.launch((key, own_reach), partial(self._round, loop, own_reach))
        loop.found[:rounds].copy_(loop.out[:rounds], non_blocking=True)
        hidden = loop.target.hidden.clone()
        self._done.record()
        wait()
        self._done.synchronize()
        return self._read(loop, texts, rounds, hidden)

    def _warm_up(self, longest: int) -> None:
        """Rounds of one sequence now, so that the first request does not wait for kernels and graphs."""
        length, id = longest - self._ahead(WARM_ROUNDS), -1
        if length <= 0 or self._target.reserve([id], longest) is None:
            return
        self._target.written(id, length)
        states = torch.zeros_like(self._target.looped(1, self._nodes, 1, longest, self._layers, False).hidden)
        text = LoopedText(id, length, 0, [0], [(states, [0])], DraftRequest(self._nodes))
        self.run([text], WARM_ROUNDS, lambda: None)
        self._target.free(id)
        self._runner.free(id)

    def _ahead(self, rounds: int) -> int:
        """Places of the target's cache that the rounds of a sequence may take."""
        return rounds * self.wide + self._nodes + 1

    def _make(self, count: int, longest: int, sampled: bool) -> _Looped:
        wide, nodes, device = self.wide, self._nodes, self._target.device
        sizes = [len(SequenceField) * count, len(LoopField) * count, (1 + 2 * wide) * count]
        sent = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        sequences, texts, kept = sent.split(sizes)
        out = torch.zeros(MOST_ROUNDS, count, 2 + 2 * wide + 3 * nodes, dtype=torch.int32, device=device)
        return _Looped(
            self._runner.group(count),
            self._target.looped(count, nodes, wide - 1, longest, self._layers, sampled),
            sent,
            pinned(sum(sizes), device),
            sequences.view(len(SequenceField), count),
            texts.view(len(LoopField), count),
            kept.view(count, 1 + 2 * wide),
            torch.zeros(len(Field) + 1, count * wide, dtype=torch.int32, device=device),
            out,
            pinned(out.numel(), device).view(out.shape),
        )

    def _send(self, loop: _Looped, texts: Seq[LoopedText], slots: Seq[int], own_slots: Seq[int]) -> None:
        """What the first round reads; the rounds before it are over."""
        host, count, some = loop.staging.numpy(), loop.sequences.shape[1], slice(len(texts))
        host[:] = 0
        begin = len(SequenceField) * count
        sequences = host[:begin].reshape(-1, count)
        end = begin + len(LoopField) * count
        self._runner.stage_sequences(sequences, own_slots, [text.asked for text in texts])
        sequences[SequenceField.LENGTH, some] = [self._runner.length(text.id) for text in texts]
        table = host[begin:end].reshape(-1, count)
        table[LoopField.SLOT] = self._target.padding
        table[LoopField.SLOT, some] = slots
        table[LoopField.LENGTH, some] = [text.length for text in texts]
        table[LoopField.LAST, some] = [text.last for text in texts]
        kept = host[end:].reshape(count, -1)
        kept[some, 0] = [len(text.tokens) for text in texts]
        for row, text in zip(kept, texts, strict=False):
            row[1 : 1 + len(text.tokens)] = text.tokens
        kept[:, 1 + self.wide :] = np.arange(self.wide)
        loop.sent.copy_(loop.staging, non_blocking=True)
        self._show(loop, texts)
        if loop.target.sampled:
            self._heat(loop, texts)

    def _show(self, loop: _Looped, texts: Seq[LoopedText]) -> None:
        """The states that the head takes in first stand where the states of a pass will stand."""
        hidden, device, each = loop.target.hidden, self._target.device, 1 + self._nodes
        by: dict[int, tuple[Tensor, list[int], list[int]]] = {}  # states; their rows; where these go
        for place, text in enumerate(texts):
            to = place * each
            for states, rows in text.shown:
                _, sources, goals = by.setdefault(id(states), (states, [], []))
                sources += rows
                goals += range(to, to + len(rows))
                to += len(rows)
        for states, sources, goals in by.values():
            moved = torch.tensor([sources, goals], device=device)
            hidden[moved[1]] = states[moved[0]]

    def _heat(self, loop: _Looped, texts: Seq[LoopedText]) -> None:
        each = 1 + self._nodes
        keys = np.array([text.asked.key for text in texts], "uint64").view("int64").repeat(each)
        heat = np.array([text.asked.temperature for text in texts], "float32").repeat(each)
        loop.target.keys[: len(keys)].copy_(torch.from_numpy(keys))
        loop.target.temperatures[: len(heat)].copy_(torch.from_numpy(heat))

    def _round(self, loop: _Looped, longest: int) -> None:
        """`longest`: for how long texts the head's passes are made."""
        runner, target, growth = self._runner, loop.target, loop.group.growth
        padding = self._target.padding
        rows = loop.table.shape[1]
        loop_kernels.enter_kept(loop.kept, loop.sequences, loop.table, self._nodes, runner.block, runner.padding)
        shape = Shape(rows, rows, longest, runner.tile)
        runner.take_in(loop.group, loop.sequences, loop.table, shape, target.hidden)
        runner.grow(loop.group, loop.sequences, longest)
        loop_kernels.enter_draft(
            growth.found, loop.texts, target.table, target.positions, growth.stages + 1, target.block, padding
        )
        target.choose()
        loop_kernels.judge(
            target.chosen, growth.found, loop.texts, loop.sequences, loop.kept, target.page_table, target.pairs,
            loop.out, PAGE, padding,
        )  # fmt: skip
        target.move()

    def _read(self, loop: _Looped, texts: Seq[LoopedText], rounds: int, hidden: Tensor) -> list[LoopedRounds]:
        found = loop.found[:rounds, : len(texts)].numpy().copy()  # the device writes into the memory again
        depths = _by_depth(found[:, :, 1 + 2 * self.wide :], self._nodes, loop.group.growth.stages + 1)
        every = []
        for place, text in enumerate(texts):
            own = found[:, place]
            tokens = [row[1 : 1 + row[0]] for row in own[:, : 1 + self.wide].tolist()]
            self._target.written(text.id, sum(map(len, tokens)))
            self._runner.written(text.id, len(text.tokens) + sum(map(len, tokens[:-1])))
            begin = place * (1 + self._nodes)
            rows = own[-1, 1 + self.wide : 1 + self.wide + len(tokens[-1])]
            drafts = int(np.count_nonzero(own[:, 1 + 2 * self.wide]))
            shown = hidden, (begin + rows).tolist()
            every.append(LoopedRounds(tokens, depths[place], drafts, shown, partial(self._one, own, self._nodes)))
        return every

    def _one(self, rounds: np.ndarray, nodes: int, number: int) -> tuple[Grown, tuple[int, ...]]:
        row, wide = rounds[number], self.wide
        draft = row[1 + 2 * wide :]
        count = int(draft[0])
        grown = Grown(
            draft[1 : 1 + count].tolist(),
            draft[1 + nodes : 1 + nodes + count].tolist(),
            draft[1 + 2 * nodes : 1 + 2 * nodes + count].view("float32").tolist(),
        )
        return grown, tuple((row[2 + wide : 1 + wide + int(row[0])] - 1).tolist())


def _by_depth(drafts: np.ndarray, nodes: int, deepest: int) -> list[list[int]]:
    """Of each sequence, over all rounds: how many nodes its drafts had at each depth, from 1 on. `drafts` [rounds,
    sequences, 1 + 3 nodes]."""
    count, parents = drafts[:, :, 0], drafts[:, :, 1 + nodes : 1 + 2 * nodes]
    depths = np.zeros(parents.shape, dtype=np.int32)
    for node in range(nodes):
        parent = parents[:, :, node]
        above = np.take_along_axis(depths, np.maximum(parent, 0)[:, :, None], 2)[:, :, 0]
        depths[:, :, node] = np.where(node < count, np.where(parent < 0, 1, above + 1), 0)
    return [[int(n) for n in row] for row in np.stack([(depths == d).sum((0, 2)) for d in range(1, deepest + 1)], 1)]
