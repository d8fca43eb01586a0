"""A head on a GPU, in the target's own kernels: its keys in pages, and whole drafts as graphs.

A draft takes two graphs: one takes in what was committed, the other runs the stages in which the draft grows. The host
only launches them, and reads the nodes at the end. What a head computes in them is its own (`eagle/device_runner.py`,
`block/device_runner.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core.sequence import Scope
from outrider.drafters.block.head import BlockConfig
from outrider.drafters.eagle.device_kernels import Growth, SequenceField
from outrider.drafters.eagle.head import EagleConfig
from outrider.drafters.eagle.runner import DraftRequest, DraftShape, Grown, HeadOutput, ShownStates
from outrider.drafters.heads.device_weights import DeviceWeights
from outrider.models.base import Feed
from outrider.models.cuda import kernels
from outrider.models.cuda.attention import Attention, PartSums, chunk_keys
from outrider.models.cuda.batch import FEW_ROWS, LARGE_TILE, NODES, SMALL_TILE, Batch, Field
from outrider.models.cuda.compiling import compile_first, is_noting
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import SHORTEST, Capture, Shape, event, pinned, prompt_rows, shape_of
from outrider.models.cuda.model import PAGE, SLOTS, CudaLlama
from outrider.models.cuda.pages import DeviceTable, PageTable
from outrider.models.cuda.product import Around, Workspace, linear, rows_of_largest_tile
from outrider.models.cuda.rejection import ChainDraws
from outrider.models.cuda.rotary import HeadPlaces

TOGETHER = 64  # sequences whose drafts grow at once; more take turns, so that the memory for logits stays small
FEWEST = 4  # rows of a graph that takes in committed tokens: this many cost no more than one
SHORT = 1024  # tokens of a text up to which one program takes all its keys; one graph serves all these texts
SHOWN = 1024  # rows of the target's states that a graph can read
PARTS_BYTES = 16 << 20  # memory for the sums of attention over long texts: the rows of a draft are few
SPARE = 3  # pages a sequence may hold beyond its text: a page that is not full, and its draft


@dataclass(eq=False)
class DraftGroup:
    """A number of sequences that draft together: what the two graphs hand to each other."""

    growth: Growth
    found: Tensor  # the drafts, on the host


G = TypeVar("G", bound=DraftGroup)


class DeviceHeadRunner(ABC, Generic[G]):
    def __init__(self, config: EagleConfig | BlockConfig, weights: DeviceWeights, target: CudaLlama, places: int,
                 shape: DraftShape, ahead: int) -> None:  # fmt: skip
        """`places`: committed rows that it may hold. `ahead`: places after them in which a draft grows."""
        self.sizes, self.weights, self.shape, self.ahead = config, weights, shape, ahead
        self.device, self.dtype, self._context = target.device, target.dtype, target.context
        group = config.num_heads // config.num_kv_heads
        self.tile = max(SMALL_TILE, 1 << (group - 1).bit_length())  # of passes with few rows of each sequence
        self.block = self.tile // group  # rows of one sequence that the attention takes at once
        count = places // PAGE + 2 + SPARE * TOGETHER
        self._pages = PageTable(count, PAGE, SLOTS, target.context + NODES, ahead=1)
        self._table = DeviceTable(self._pages, self.device)
        sizes = (config.depth, 2, count, config.num_kv_heads, PAGE, config.head_dim)
        # zeros: what lies past the end of a sequence is multiplied by 0, and 0 * nan is nan
        self.cache = torch.zeros(sizes, dtype=self.dtype, device=self.device)
        self._parts = PartSums(config.num_heads, config.head_dim, self.device, PARTS_BYTES)
        self._work = self._new_workspace(TOGETHER * shape.width)
        layers = len(config.layers)
        self._shown = torch.zeros(SHOWN, layers, config.hidden_size, dtype=self.dtype, device=self.device)
        fields = len(SequenceField) * TOGETHER + (len(Field) + 1) * FEW_ROWS
        self._sent_table = torch.zeros(fields, dtype=torch.int32, device=self.device)
        self._staging = pinned(fields, self.device)
        self._groups: dict[tuple[int, DraftShape], G] = {}
        self._graphs: dict[Hashable, _Launched] = {}
        self._capture = Capture()
        self._sent, self._done = event(self.device), event(self.device)
        self._drafted: dict[int, int] = {}  # rows after those committed, of drafts that the host looks on
        if self.device.type == "cuda":
            compile_first(self._warm_up, self.device)
            self._warm_up()

    @abstractmethod
    def make_group(self, count: int, shape: DraftShape, growth: Growth, found: Tensor) -> G: ...

    @abstractmethod
    def take_in(self, group: G | None, sequences: Tensor, table: Tensor, shape: Shape, shown: Tensor) -> None:
        """What was committed: the rows of `table` [len(Field) + 1, rows], the last field of which says which row of
        `shown` [any, layers, hidden] each reads. What the head says after each sequence's last row is the group's;
        None: it is not asked."""

    @abstractmethod
    def grow(
        self, group: G, sequences: Tensor, longest: int, chains: ChainDraws | None = None, cuts: Cuts | None = None
    ) -> None:
        """The stages of a draft, from what the head says after the committed text to the nodes. `chains`: the drafts
        that are drawn. `cuts`: what is taken out of the head's laws."""

    @abstractmethod
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput: ...

    @abstractmethod
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput: ...

    @property
    def padding(self) -> int:
        """The slot of rows that belong to no sequence."""
        return self._pages.padding

    def length(self, id: int) -> int:
        """Committed rows."""
        return self._pages.length(id)

    def reserve(self, ids: Seq[int], count: int) -> list[int] | None:
        """Reserve memory for `count` more rows of each sequence; returns their rows of the page table, or None if there
        is too little."""
        slots = self._pages.take_ahead(ids, count)
        self._sent.synchronize()
        self._table.send()
        self._sent.record()
        return slots

    def written(self, id: int, count: int) -> None:
        """The device has taken in `count` rows by itself."""
        self._pages.extend(id, count)
        self._drafted[id] = 0

    def free(self, id: int) -> None:
        self._pages.free(id)
        self._drafted.pop(id, None)

    def begin(self, id: int, tokens: Seq[int], scope: Scope) -> int:
        self._pages.begin(id, tokens, scope)
        return self._pages.length(id)

    def resume(self, id: int, tokens: Seq[int]) -> None:
        self._pages.crop(id, len(tokens) - 1)

    def keep(self, id: int, tokens: Seq[int], scope: Scope) -> None:
        self._pages.name(id, tokens[: self._pages.length(id) + 1], scope)

    @torch.inference_mode()
    def write(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], asked: Seq[DraftRequest]
    ) -> list[Grown]:
        found: list[Grown] = []
        for some in turns(len(ids)):
            found += self._write(ids[some], tokens[some], shown[some], asked[some])
        return found

    @torch.inference_mode()
    def read(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> None:
        """Take in what was committed where nothing is drafted after it."""
        for some, shown in in_turns(tokens, hidden):
            self._commit(None, ids[some], tokens[some], shown, [DraftRequest(0)] * len(shown))

    def drafted_rows(self, ids: Seq[int], count: int) -> tuple[int, list[int], list[int]]:
        """Places for `count` rows of each that the host drafts: how many it had before, and the slots and committed
        rows of each."""
        drafted = self._drafted[ids[0]]
        holders = [self._pages.extend(id, 0) for id in ids]
        for id, holder in zip(ids, holders, strict=True):
            self._drafted[id] = drafted + count
            self._pages.reserve(holder, drafted + count)
        self._sent.synchronize()
        self._table.send()
        self._sent.record()
        return drafted, [holder.slot for holder in holders], [holder.length for holder in holders]

    def _write(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], asked: Seq[DraftRequest]
    ) -> list[Grown]:
        group, longest = self.commit(ids, tokens, shown, asked)
        self.launch((group.growth.sequences, longest), partial(self._grow_and_copy, group, longest))
        self._done.record()
        self._done.synchronize()
        found, most = group.found.numpy()[: len(ids)], self.shape.nodes
        probabilities = found[:, 1 + 2 * most :].view("float32")
        grown = []
        for row, probability in zip(found, probabilities, strict=True):
            count = int(row[0])
            nodes, parents = row[1 : 1 + count].tolist(), row[1 + most : 1 + most + count].tolist()
            grown.append(Grown(nodes, parents, probability[:count].tolist()))
        return grown

    def _grow_and_copy(self, group: G, longest: int) -> None:
        self.grow(group, self._sequences(group.growth.sequences), longest)
        group.found.copy_(group.growth.found, non_blocking=True)

    def run_layers(
        self, x: Tensor, read: Tensor | None, table: Tensor, seen: Tensor, attention: Attention, work: Workspace
    ) -> None:
        """The decoder layers over the rows of `table`, whose residual x is. `read`: what the first one reads; None: the
        workspace's `next`, to be normed. `seen`: the same table, with the last position that each row sees."""
        config, weights, rows = self.sizes, self.weights, len(x)
        q = self.empty(rows, config.num_heads, config.head_dim)
        mixed, normed = torch.empty_like(q), Around(eps=config.norm_eps, again=True)
        for index, layer in enumerate(weights.layers):
            keys, values = self.cache[index]
            places = HeadPlaces(q, keys, values, self.page_table, table, weights.angles)
            own, around = (work.next[:rows], normed) if read is None or index else (read, Around(again=True))
            kernels.qkv(own, layer.qkv.weight, layer.qkv.bias, layer.norms, config.norm_eps, places, work, around)
            attention(q, keys, values, self.page_table, seen, mixed, 0)
            linear(mixed.view(rows, -1), layer.output, None, x, work, Around(gain=layer.mlp_norm, again=True))
            inner = self.empty(rows, layer.down.shape[1])
            linear(
                work.next[:rows], layer.gate_up, None, inner, work, Around(eps=config.norm_eps, gate=True, again=True)
            )
            linear(inner, layer.down, None, x, work, Around(gain=layer.following, again=True))

    def commit(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], asked: Seq[DraftRequest]
    ) -> tuple[G, int]:
        """Take in what was committed; the group in which what follows is found, and for how long texts its pass is
        made."""
        group = self.group(len(ids))
        return group, self._commit(group, ids, tokens, shown, asked)

    def _commit(
        self, group: G | None, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]],
        asked: Seq[DraftRequest],
    ) -> int:  # fmt: skip
        """No group: the head is not asked what follows."""
        count = _places(len(ids))
        feeds = [Feed(id, each) for id, each in zip(ids, tokens, strict=True)]
        batch = Batch(feeds, self._pages, self.sizes.num_heads // self.sizes.num_kv_heads, self.ahead)
        shape = self._shape_of(batch, batch.longest + self.ahead)
        for id in ids:
            self._drafted[id] = 0
        sources, states = _sources(shown)
        few = shape.rows <= FEW_ROWS and sum(map(len, states)) <= SHOWN
        fields = len(SequenceField) * count + (len(Field) + 1) * shape.rows
        self._sent.synchronize()
        device, host = (self._sent_table, self._staging) if few else self._larger(fields)
        begin = len(SequenceField) * count
        staged = host.numpy()[:begin].reshape(-1, count)
        self.stage_sequences(staged, [batch.slot(place) for place in range(len(ids))], asked)
        staged[SequenceField.LENGTH, : len(ids)] = [self._pages.length(id) for id in ids]
        staged[SequenceField.LAST, : len(ids)] = [end - 1 for end in batch.begins[1:]]
        table = host.numpy()[begin:fields].reshape(-1, shape.rows)
        batch.write(table[: len(Field)], self._pages.padding)
        table[len(Field), : len(sources)] = sources
        table[len(Field), len(sources) :] = 0
        device[:fields].copy_(host[:fields], non_blocking=True)
        self._table.send()
        self._sent.record()
        if few:
            torch.cat(states, out=self._shown[: sum(map(len, states))])
            intake = partial(self._intake, group, count, shape, self._sent_table, self._shown)
            self.launch((shape, count, group is None), intake)
        else:
            self._sent_table[:begin].copy_(device[:begin])  # where the stages read them
            self._intake(group, count, shape, device, torch.cat(states))
        return shape.longest

    def stage_sequences(self, table: np.ndarray, slots: Seq[int], asked: Seq[DraftRequest]) -> None:
        """All but how many rows are committed."""
        table[:], some = 0, slice(len(slots))
        table[SequenceField.SLOT] = self.padding
        table[SequenceField.SLOT, some] = slots
        table[SequenceField.SIZE, some] = [each.size for each in asked]
        table[SequenceField.TOKENS, some] = [each.tokens for each in asked]
        table[SequenceField.TEMPERATURE, some] = np.array([each.temperature for each in asked], "float32").view("int32")
        keys = np.array([each.key for each in asked], "uint64")
        table[SequenceField.KEY_LOW : SequenceField.KEY_HIGH + 1, some] = keys.view("int32").reshape(-1, 2).T

    def _shape_of(self, batch: Batch, longest: int) -> Shape:
        """Few shapes, so that few graphs are made."""
        made = shape_of(batch, longest, (), self._context)
        if made.rows > FEW_ROWS:
            return replace(made, longest=self.reach(longest))
        rows = max(FEWEST, 1 << (batch.rows - 1).bit_length())
        return replace(made, rows=rows, blocks=rows, longest=self.reach(longest))

    def reach(self, longest: int) -> int:
        """For how long texts a pass is made: short ones, whose keys one program takes, or any."""
        return SHORTEST if longest <= SHORT else self._context + NODES

    def _intake(self, group: G | None, count: int, shape: Shape, sent: Tensor, shown: Tensor) -> None:
        rows = shape.rows
        begin = len(SequenceField) * count
        sequences = sent[:begin].view(len(SequenceField), count)
        table = sent[begin : begin + (len(Field) + 1) * rows].view(len(Field) + 1, rows)
        self.take_in(group, sequences, table, shape, shown)

    def launch(self, key: Hashable, compute: Callable[[], None]) -> None:
        """Kernel by kernel the first time; then as a graph."""
        if is_noting():
            compute()
            return
        launched = self._graphs.setdefault(key, _Launched())
        if launched.graph is None and launched.before and self.device.type == "cuda":
            launched.graph = self._capture(compute)
        if launched.graph is None:
            compute()
        else:
            launched.graph.replay()
        launched.before = True

    def group(self, sequences: int, shape: DraftShape | None = None) -> G:
        """`shape`: of drafts no larger than the runner's own."""
        count, shape = _places(sequences), shape or self.shape
        if (count, shape) not in self._groups:
            growth = Growth(count, shape.width, shape.depth - 1, shape.nodes, self.weights.ids)
            found = pinned(growth.found.numel(), self.device).view(growth.found.shape)
            self._groups[count, shape] = self.make_group(count, shape, growth, found)
        return self._groups[count, shape]

    def empty(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype, device=self.device)

    def logits(self, rows: int) -> Tensor:
        return torch.empty(rows, len(self.weights.ids), device=self.device)

    @property
    def page_table(self) -> Tensor:
        return self._table.table

    def _sequences(self, count: int) -> Tensor:
        return self._sent_table[: len(SequenceField) * count].view(len(SequenceField), count)

    def attention(self, shape: Shape) -> Attention:
        config = self.sizes
        shared = config.num_kv_heads, config.num_heads // config.num_kv_heads
        chunk = chunk_keys(config.head_dim, self.dtype)
        return Attention(shape.rows, shape.blocks, shape.tile, shape.longest, chunk, shared, self._parts)

    def small(self, rows: int, longest: int) -> Shape:
        """Of a pass with few rows of each sequence, every one of which may head a block."""
        return Shape(rows, rows, longest, self.tile)

    def workspace(self, rows: int) -> Workspace:
        return self._work if rows <= len(self._work.next) else self._new_workspace(rows)

    def _new_workspace(self, rows: int) -> Workspace:
        return Workspace(rows, self.sizes.hidden_size, self.weights.widest, self.dtype, self.device)

    def _larger(self, fields: int) -> tuple[Tensor, Tensor]:
        """Tables of a pass over a prompt."""
        return torch.zeros(fields, dtype=torch.int32, device=self.device), pinned(fields, self.device)

    def _warm_up(self) -> None:
        """A first draft now, so that the first request does not wait for kernels to be compiled and captured."""
        hidden = self._shown[:1].clone()
        for rows in (1, FEWEST + 1, 2 * FEWEST + 1):
            for _ in range(2):
                self.write([-1], [[0] * rows], [[(hidden, [0] * rows)]], [DraftRequest(self.shape.nodes)])
        self.extend([-1], [[0] * (FEW_ROWS + 1)], hidden.expand(FEW_ROWS + 1, -1, -1))
        self.free(-1)
        for rows in prompt_rows(rows_of_largest_tile(self.sizes.hidden_size)):  # those of 64 prompts can be many
            for longest in (SHORTEST, self._context + NODES):
                for tile in (self.tile, LARGE_TILE):
                    self._read_nothing(Shape(rows, rows, longest, tile))

    @torch.inference_mode()
    def _read_nothing(self, shape: Shape) -> None:
        """A pass over a prompt in which no row belongs to a sequence, kernel by kernel."""
        table = torch.zeros(len(Field) + 1, shape.rows, dtype=torch.int32, device=self.device)
        table[Field.SLOT] = self.padding
        self.take_in(None, self._sequences(1), table, shape, self._shown)


@dataclass(eq=False)
class _Launched:
    before: bool = False
    graph: torch.cuda.CUDAGraph | None = None


def _places(sequences: int) -> int:
    """The number of sequences of the graph that serves `sequences`: a power of two."""
    return 1 << (sequences - 1).bit_length()


def _sources(shown: Seq[Seq[ShownStates]]) -> tuple[list[int], list[Tensor]]:
    """Which row of all these states, one after the other, each row of a pass reads."""
    sources: list[int] = []
    states: list[Tensor] = []
    begin = 0
    for each in shown:
        for hidden, rows in each:
            sources += [begin + row for row in rows]
            states.append(hidden)
            begin += len(hidden)
    return sources, states


def turns(sequences: int) -> Iterator[slice]:
    """Groups of sequences that draft together."""
    return (slice(begin, begin + TOGETHER) for begin in range(0, sequences, TOGETHER))


def in_turns(tokens: Seq[Seq[int]], hidden: Tensor) -> Iterator[tuple[slice, list[list[ShownStates]]]]:
    """The same, with the states [rows, layers, hidden] before the tokens of each."""
    parts = hidden.split([len(each) for each in tokens])
    for some in turns(len(parts)):
        yield some, [[(part, range(len(part)))] for part in parts[some]]
