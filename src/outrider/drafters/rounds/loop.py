"""Rounds on a GPU: drafters guess, the target runs the guesses and judges them, round after round, without the host.

A round is one graph. The host launches a part of the rounds and reads all its tokens at once, while the device is at
the next part. So a text may be written past its end: what comes after the end is never committed, and its memory is the
sequence's own until the last part is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle

import numpy as np
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import decision
from outrider.drafters.rounds import kernels
from outrider.drafters.rounds.base import (
    Guesses,
    LoopedRounds,
    RoundDraft,
    RoundDraws,
    RoundGuesser,
    RoundTables,
    node_budget,
)
from outrider.drafters.rounds.kernels import DRAFT_HEADER, RoundField
from outrider.models.cuda import rejection
from outrider.models.cuda.compiling import compile_first, is_noting
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import Capture, NoEvent, event, pinned, reach
from outrider.models.cuda.model import PAGE, CudaLlama

# Nodes from which on a draft that is joined with another has a third of them, else a quarter: it repeats what the other
# guesses more often than not, but goes deeper (LOG, 2026-11-18, lookup as a tree).
MANY = 16
MOST_ROWS = 1024  # of a pass: the memory for all their logits stays small
MOST_ROUNDS = 16  # of a part
IN_FLIGHT = 2  # parts: the host looks at one while the device is at the other
WARM_ROUNDS = 2  # rounds after which a graph is captured
# Length of texts, in tokens, for which graphs exist from the start; they serve shorter texts too.
PREPARED = (512, 1024, 2048)


@dataclass(frozen=True)
class _Kind:
    """What the kernels of a round have to do."""

    sampled: bool = False  # some choose under their noise
    adapted: bool = False  # some have adapters
    rejects: bool = False  # some are verified by rejection
    draws: bool = False  # and of these some have drafts that are drawn
    cuts: bool = False  # of some laws tokens are cut
    typical: bool = False  # and of these some by typical_p


@dataclass(eq=False)
class _Looped:
    """A number of sequences, and how long they may be."""

    guesses: list[Guesses]
    tables: RoundTables
    depth: int
    found: Tensor  # [sequences, HEADER + 3 nodes] the drafts
    sent: Tensor  # what the host writes before the first round: texts, kept
    staging: Tensor
    out: Tensor  # [rounds, sequences, 1 + 2 wide + HEADER + 3 nodes], a ring
    read: list[Tensor]  # the same on the host, of each part in flight
    resident: list[tuple[int, int]] = field(default_factory=list)  # whose tokens the tables have: id, how many
    retired: set[int] = field(default_factory=set)  # places of sequences that have ended since the first round
    launched: int = 0
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True, eq=False)
class _Part:
    """Rounds that are under way."""

    rounds: int
    rows: list[int]  # of the ring
    read: Tensor
    states: Tensor | None  # after the last of them
    done: torch.cuda.Event | NoEvent


class DeviceLoop:
    def __init__(self, target: CudaLlama, guessers: Seq[RoundGuesser]) -> None:
        """At most two guessers: the drafts of the second one are joined with those of the first."""
        self.guessers, self._target = tuple(guessers), target
        self.layers = next((guesser.layers for guesser in guessers if guesser.layers), ())
        self._made: dict[Hashable, _Looped] = {}
        self._guesses: dict[int, list[Guesses]] = {}  # by the number of sequences
        self._draws: dict[tuple[int, bool], RoundDraws] = {}  # by that, and whether some draw
        self._capture, self._done = Capture(), [event(target.device) for _ in range(IN_FLIGHT)]

    @property
    def nodes(self) -> int:
        """Of the largest draft of one sequence."""
        return _nodes(self._of(1), 1)

    def rounds(self, seqs: Seq[Sequence], wanted: int, unread: int = 0) -> int:
        """How many rounds of these sequences fit into the context after those that are not read yet, at most `wanted`;
        0: they are too many."""
        count = _places(len(seqs))
        if self._rows(count) > MOST_ROWS:
            return 0
        left = self._target.context - _longest(_going(seqs)) - self._ahead(self._of(count), unread)
        return max(0, min(wanted, MOST_ROUNDS, left // _wide(self._of(count))))

    def shrinks(self, seqs: Seq[Sequence]) -> bool:
        """Whether so many of them have ended that the others have rounds with larger drafts, or cheaper ones."""
        return _places(max(1, len(_going(seqs)))) < _places(len(seqs))

    def run(
        self, seqs: Seq[Sequence], plan: Callable[[int], int], wait: Callable[[], None]
    ) -> Iterator[list[LoopedRounds]]:
        """Rounds of each, part after part; no part: there is too little memory. `plan` says how many the next part has
        where some are not read yet; 0: no more now. `wait` is called while the device works. A sequence that has ended
        is no longer looked at, and the rows of its next rounds are nobody's."""
        parts: deque[_Part] = deque()
        loop, begun, places = None, 0, cycle(range(IN_FLIGHT))
        while True:
            while len(parts) < IN_FLIGHT:
                unread = sum(part.rounds for part in parts)
                rounds = plan(unread)
                if not rounds:
                    break
                if loop is None:
                    loop = self._begin(seqs, rounds)
                elif not self._goes_on(loop, seqs, unread + rounds):
                    break
                if loop is None:
                    return
                parts.append(self._launch_part(loop, begun, rounds, next(places)))
                begun += rounds
            if loop is None or not parts:
                return
            wait()
            yield self._read_part(loop, seqs, parts.popleft())

    @torch.inference_mode()
    def _begin(self, seqs: Seq[Sequence], rounds: int) -> _Looped | None:
        """Make ready; None: there is no memory."""
        count = _places(len(seqs))
        of = self._of(count)
        ids, ahead, wide = [seq.id for seq in seqs], self._ahead(of, rounds), _wide(of)
        slots = self._target.reserve(ids, ahead)
        if slots is None or not all(guesser.begin(seqs, ahead, wide) for guesser in self.guessers):
            return None
        loop = self._looped(count, _longest(seqs) + ahead, self._kind(seqs, of))
        self._send(loop, seqs, slots)
        return loop

    @torch.inference_mode()
    def _goes_on(self, loop: _Looped, seqs: Seq[Sequence], rounds: int) -> bool:
        """Make ready for more rounds, `rounds` of them after those that are read; False: they do not fit."""
        ahead, going = self._ahead(loop.guesses, rounds), _going(seqs)
        if _longest(going) + ahead > loop.tables.longest:
            return False
        slots = self._target.reserve([seq.id for seq in going], ahead)
        if slots is None or not all(guesser.go_on(going, ahead) for guesser in self.guessers):
            return False
        for place in {place for place, seq in enumerate(seqs) if seq.finish is not None} - loop.retired:
            loop.tables.texts[RoundField.SLOT, place] = self._target.padding
            loop.retired.add(place)
        return True

    @torch.inference_mode()
    def _launch_part(self, loop: _Looped, begun: int, rounds: int, place: int) -> _Part:
        for _ in range(rounds):
            self._launch(loop)
        read, done = loop.read[place], self._done[place]
        read.copy_(loop.out, non_blocking=True)
        states = loop.tables.target.hidden.clone() if self.layers else None
        done.record()
        return _Part(rounds, [turn % MOST_ROUNDS for turn in range(begun, begun + rounds)], read, states, done)

    @torch.inference_mode()
    def _read_part(self, loop: _Looped, seqs: Seq[Sequence], part: _Part) -> list[LoopedRounds]:
        part.done.synchronize()
        read = self._read(loop, seqs, part)
        going = [(seq, own) for seq, own in zip(seqs, read, strict=True) if seq.finish is None]
        for guesser in self.guessers if going else ():
            guesser.end([seq for seq, _ in going], [own for _, own in going])
        return read

    def prepare(self, counts: Seq[int]) -> None:
        """Compile the kernels for as many sequences now, and capture the graphs for texts of usual length, so that no
        request waits for them."""
        if self._target.device.type == "cuda":
            fitting = [count for count in counts if self._rows(count) <= MOST_ROWS]
            compile_first(partial(self._warm_up, fitting, 1), self._target.device)
            self._warm_up(fitting, WARM_ROUNDS)

    @torch.inference_mode()
    def _warm_up(self, counts: Seq[int], rounds: int) -> None:
        for loop in chain.from_iterable(map(self._prepared, counts)):
            self._send(loop, (), ())
            for _ in range(rounds):
                self._launch(loop)
            torch.cuda.synchronize()

    def _prepared(self, count: int) -> Iterator[_Looped]:
        for longest in PREPARED:
            yield self._looped(count, longest, _Kind())
        if count == 1:  # what requests that sample need beside it; for more sequences their kernels are there then
            for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
                yield self._looped(count, PREPARED[0], self._kind([Sequence(-1, [0], params)], self._of(count)))

    def _of(self, count: int) -> list[Guesses]:
        """The guesses of each guesser that can guess for this many sequences."""
        if count not in self._guesses:
            budget, found = node_budget(count), list[Guesses]()
            alone = len(self.guessers) == 1
            second = 0 if alone else budget // (3 if budget >= MANY else 4)
            for guesser, own in zip(self.guessers, (budget, second), strict=False):
                guesses = guesser.guesses(count, own, alone) if own else None
                found += [] if guesses is None else [guesses]
            self._guesses[count] = found
        return self._guesses[count]

    def _rows(self, count: int) -> int:
        """Of a pass."""
        return count * (1 + _nodes(self._of(count), count))

    def _ahead(self, of: Seq[Guesses], rounds: int) -> int:
        """Places of the target's cache that the rounds of a sequence may take."""
        return rounds * _wide(of) + sum(each.size.nodes for each in of) + 1

    def _kind(self, seqs: Seq[Sequence], of: Seq[Guesses]) -> _Kind:
        rules = {decision(seq) for seq in seqs}
        draws = any(self._whose(seq, of) for seq in seqs)
        cut = [seq.params for seq in seqs if seq.params.cuts and not seq.params.greedy]
        typical = any(params.typical_p < 1.0 for params in cut)
        adapted = any(seq.adapter for seq in seqs)
        return _Kind("coupled" in rules, adapted, "rejection" in rules, draws, bool(cut), typical)

    def _whose(self, seq: Sequence, of: Seq[Guesses]) -> int:
        """The guesser that draws for it, from 1 on; 0: all guess."""
        able = self.guessers[: len(of)]
        return next((number for number, guesser in enumerate(able, 1) if guesser.draws(seq)), 0)

    def _looped(self, count: int, longest: int, kind: _Kind) -> _Looped:
        key = count, reach(max(longest, PREPARED[0]), self._target.context), kind
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, count: int, longest: int, kind: _Kind) -> _Looped:
        of, device = self._of(count), self._target.device
        nodes, depth, wide = _nodes(of, count), max(each.size.depth for each in of), _wide(of)
        sizes = [len(RoundField) * count, (1 + 2 * wide) * count]
        sent = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        texts, kept = sent.split(sizes)
        size = DRAFT_HEADER + 3 * nodes
        out = torch.zeros(MOST_ROUNDS, count, 1 + 2 * wide + size, dtype=torch.int32, device=device)
        cuts = Cuts.none(count, kind.typical, device) if kind.cuts else None
        tables = RoundTables(
            self._target.looped(count, nodes, wide - 1, longest, self.layers, kind.sampled, kind.adapted, cuts),
            texts.view(len(RoundField), count),
            kept.view(count, 1 + 2 * wide),
            torch.zeros(count, longest + wide, dtype=torch.int32, device=device),
            longest,
            self._draws_of(count, wide - 1, kind.draws) if kind.rejects else None,
        )
        found = torch.zeros(count, size, dtype=torch.int32, device=device)
        staging = pinned(sum(sizes), device)
        read = [pinned(out.numel(), device).view(out.shape) for _ in range(IN_FLIGHT)]
        return _Looped(of, tables, depth, found, sent, staging, out, read)

    def _draws_of(self, count: int, depth: int, laws: bool) -> RoundDraws:
        """All rounds of this many sequences share the memory: laws are large."""
        if (count, laws) not in self._draws:
            device, vocab = self._target.device, self._target.vocab_size
            keys, heat = torch.zeros(count, dtype=torch.int64, device=device), torch.zeros(count, device=device)
            whose = torch.zeros(count, dtype=torch.int32, device=device)
            drawn = torch.zeros(count, depth, vocab, device=device) if laws else None
            self._draws[count, laws] = RoundDraws(keys, heat, whose, drawn)
        return self._draws[count, laws]

    def _send(self, loop: _Looped, seqs: Seq[Sequence], slots: Seq[int]) -> None:
        """What the first round reads; the rounds before it are over."""
        host, count, some = loop.staging.numpy(), loop.tables.sequences, slice(len(seqs))
        host[:] = 0
        loop.retired.clear()
        table = host[: len(RoundField) * count].reshape(-1, count)
        table[RoundField.SLOT] = self._target.padding
        table[RoundField.SLOT, some] = slots
        table[RoundField.LENGTH, some] = [len(seq.tokens) - 1 for seq in seqs]
        table[RoundField.LAST, some] = [seq.tokens[-1] for seq in seqs]
        loop.sent.copy_(loop.staging, non_blocking=True)
        loop.tables.target.send_adapters([seq.adapter for seq in seqs])
        if any(guesser.reads_texts for guesser in self.guessers):
            self._send_texts(loop, seqs)
        for guesses in loop.guesses:
            guesses.send(seqs, loop.tables)
        if loop.tables.target.sampled:
            self._heat(loop, seqs)
        if loop.tables.target.cuts is not None:
            loop.tables.target.cuts.send([seq.params for seq in seqs])
        if loop.tables.draws is not None:
            self._send_draws(loop.tables.draws, seqs, loop.guesses)

    def _send_texts(self, loop: _Looped, seqs: Seq[Sequence]) -> None:
        """The tokens of the texts that are not there yet, in one copy: those of the rounds before the device wrote
        itself."""
        there, written = [(seq.id, len(seq.tokens)) for seq in seqs], loop.tables.written
        held = dict(enumerate(loop.resident))
        lacking = [place for place, own in enumerate(there) if held.get(place) != own]
        if lacking:
            texts = np.zeros((len(lacking), max(there[place][1] for place in lacking)), "int32")
            for row, place in zip(texts, lacking, strict=True):
                row[: there[place][1]] = seqs[place].tokens
            places = torch.tensor(lacking, device=written.device)
            written[places, : texts.shape[1]] = torch.from_numpy(texts).to(written.device)
        loop.resident = there

    def _heat(self, loop: _Looped, seqs: Seq[Sequence]) -> None:
        each, target = 1 + loop.tables.nodes, loop.tables.target
        keys = np.array([seq.dice.key for seq in seqs], "uint64").view("int64").repeat(each)
        heat = [seq.params.temperature if decision(seq) == "coupled" else 0.0 for seq in seqs]
        target.keys[: len(keys)].copy_(torch.from_numpy(keys))
        target.temperatures[: len(keys)].copy_(torch.from_numpy(np.array(heat, "float32").repeat(each)))

    def _send_draws(self, draws: RoundDraws, seqs: Seq[Sequence], of: Seq[Guesses]) -> None:
        none = [0] * (len(draws.keys) - len(seqs))
        keys = np.array([*(seq.dice.key for seq in seqs), *none], "uint64").view("int64")
        heat = [seq.params.temperature if decision(seq) == "rejection" else 0.0 for seq in seqs]
        draws.keys.copy_(torch.from_numpy(keys))
        draws.heat.copy_(torch.tensor([*heat, *none], dtype=torch.float32))
        draws.whose.copy_(torch.tensor([*(self._whose(seq, of) for seq in seqs), *none], dtype=torch.int32))

    def _launch(self, loop: _Looped) -> None:
        """Kernel by kernel the first time; then as a graph."""
        if is_noting():
            self._round(loop)
            return
        if loop.graph is None and loop.launched and self._target.device.type == "cuda":
            loop.graph = self._capture(partial(self._round, loop))
        if loop.graph is None:
            self._round(loop)
        else:
            loop.graph.replay()
        loop.launched += 1

    def _round(self, loop: _Looped) -> None:
        tables, target, padding = loop.tables, loop.tables.target, self._target.padding
        draws = tables.draws
        for number, guesses in enumerate(loop.guesses, 1):
            guesses.guess(tables, number)
        first, *others = [guesses.found for guesses in loop.guesses]
        kernels.join(first, others[0] if others else None, loop.found, None if draws is None else draws.whose)
        kernels.enter_draft(loop.found, tables.texts, target.table, target.positions, loop.depth, target.block, padding)
        logits = target.choose()
        if draws is not None:
            rejection.verify(
                logits, draws.keys, target.positions, draws.heat, target.chosen, loop.found, DRAFT_HEADER, draws.laws,
                draws.whose,
            )  # fmt: skip
        kernels.judge(
            target.chosen, loop.found, tables.texts, tables.kept, tables.written, target.page_table, target.pairs,
            loop.out, PAGE, padding,
        )  # fmt: skip
        target.move()

    def _read(self, loop: _Looped, seqs: Seq[Sequence], part: _Part) -> list[LoopedRounds]:
        wide, nodes = loop.tables.wide, loop.tables.nodes
        found = part.read.numpy()[part.rows, : len(seqs)]  # a copy: the device writes into the memory again
        drafts = found[:, :, 1 + 2 * wide :]
        depths = by_depth(drafts, nodes, loop.depth)
        counts, firsts = drafts[:, :, 0].sum(0).tolist(), drafts[:, :, 1].sum(0).tolist()
        every, names = [], [guesser.name for guesser in self.guessers]
        for place, seq in enumerate(seqs):
            own = found[:, place]
            tokens = [row[1 : 1 + row[0]] for row in own[:, : 1 + wide].tolist()]
            rows, first = own[:, 1 + wide : 1 + 2 * wide].tolist(), own[:, 2 + 2 * wide].tolist()
            sources = [
                [names[row > limit] for row in path[1 : len(kept)]]
                for path, kept, limit in zip(rows, tokens, first, strict=True)
            ]
            total = sum(map(len, tokens))
            if seq.finish is None:
                self._target.written(seq.id, total)
            if loop.resident:
                loop.resident[place] = seq.id, len(seq.tokens) + total
            by_source = dict(zip(names, (firsts[place], counts[place] - firsts[place]), strict=False))
            begin = place * (1 + nodes)
            last = [begin + row for row in rows[-1][: len(tokens[-1])]]
            one, drafted = partial(_one, own, wide, nodes, names), int(np.count_nonzero(own[:, 1 + 2 * wide]))
            every.append(LoopedRounds(tokens, sources, drafted, depths[place], by_source, part.states, last, one))
        return every


def _going(seqs: Seq[Sequence]) -> list[Sequence]:
    return [seq for seq in seqs if seq.finish is None]


def _longest(seqs: Seq[Sequence]) -> int:
    """Tokens of the longest text."""
    return max(len(seq.tokens) for seq in seqs)


def _places(count: int) -> int:
    """The number of sequences of the loop that serves `sequences`."""
    return 1 << (count - 1).bit_length()


def _nodes(of: Seq[Guesses], count: int) -> int:
    """Nodes of the largest draft of each of `count` sequences: those of all guessers, as far as they fit."""
    return min(node_budget(count), sum(each.size.nodes for each in of))


def _wide(of: Seq[Guesses]) -> int:
    """Tokens that a round can write."""
    return 1 + max((min(each.size.depth, each.size.nodes) for each in of), default=0)


def _one(rounds: np.ndarray, wide: int, nodes: int, names: Seq[str], number: int) -> RoundDraft:
    row = rounds[number]
    draft = row[1 + 2 * wide :]
    count, first = int(draft[0]), int(draft[1])
    tokens, parents, stated = draft[DRAFT_HEADER:].reshape(3, nodes)[:, :count]
    sources = [names[0]] * first + [names[-1]] * (count - first)
    path = tuple((row[2 + wide : 1 + wide + int(row[0])] - 1).tolist())
    return RoundDraft(tokens.tolist(), parents.tolist(), stated.view("float32").tolist(), sources, path)


def by_depth(drafts: np.ndarray, nodes: int, deepest: int) -> list[list[int]]:
    """Of each sequence, over all rounds: how many nodes its drafts had at each depth, from 1 on. `drafts` [rounds,
    sequences, HEADER + 3 nodes]."""
    count, parents = drafts[:, :, 0], drafts[:, :, DRAFT_HEADER + nodes : DRAFT_HEADER + 2 * nodes]
    above = np.maximum(parents, 0)
    depths = np.where(parents < 0, 1, 0)
    for _ in range(deepest - 1):  # each time what is known reaches one level further down
        known = np.take_along_axis(depths, above, 2)
        depths = np.where((parents >= 0) & (known > 0), known + 1, depths)
    depths = np.where(np.arange(nodes) < count[:, :, None], depths, 0)
    return [[int(n) for n in row] for row in np.stack([(depths == d).sum((0, 2)) for d in range(1, deepest + 1)], 1)]
