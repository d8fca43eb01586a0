"""An EAGLE head on a GPU, in the target's own kernels: its keys in pages, and whole drafts as graphs.

A draft takes two graphs: one runs the head over the committed tokens, the other runs the stages in which the draft
grows. The host only launches them, and reads the nodes at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.core.sequence import Scope
from outrider.drafters.eagle import device_kernels
from outrider.drafters.eagle.device_head import DeviceHead
from outrider.drafters.eagle.device_kernels import STAGE_FIELDS, Growth, SequenceField, StageField
from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.eagle.runner import DraftRequest, DraftShape, Grown, HeadOutput, ShownStates
from outrider.models.base import Feed
from outrider.models.cuda import kernels
from outrider.models.cuda.attention import Attention, PartSums, chunk_keys
from outrider.models.cuda.batch import FEW_ROWS, NODES, SMALL_TILE, Batch, Field
from outrider.models.cuda.graphs import SHORTEST, Capture, Shape, event, pinned, shape_of
from outrider.models.cuda.model import PAGE, SLOTS, CudaLlama
from outrider.models.cuda.pages import DeviceTable, PageTable
from outrider.models.cuda.product import Around, Workspace, linear

TOGETHER = 64  # sequences whose drafts grow at once; more take turns, so that the memory for logits stays small
FEWEST = 4  # rows of a graph that takes in what was committed: as many cost as little as one
SHORT = 1024  # tokens of a text up to which one program takes all its keys; one graph serves all these texts
SHOWN = 1024  # rows of the target's states that a graph can read
PARTS_BYTES = 16 << 20  # memory for the sums of attention over long texts: the rows of a draft are few
SPARE = 3  # pages a sequence may hold beyond its text: a page that is not full, and its draft


@dataclass(eq=False)
class DraftGroup:
    """A number of sequences that draft together: what the two graphs hand to each other."""

    growth: Growth
    state: Tensor  # [sequences, hidden] after what was committed
    normed: Tensor
    logits: Tensor  # [sequences, draft vocabulary]
    found: Tensor  # the drafts, on the host


class DeviceRunner:
    def __init__(self, head: EagleHead, target: CudaLlama, places: int, shape: DraftShape) -> None:
        """`places`: committed rows that it may hold."""
        config = self.config = head.config
        self.device, self._dtype, self._context = target.device, target.dtype, target.context
        self.shape = shape
        group = config.num_heads // config.num_kv_heads
        self.tile = max(SMALL_TILE, 1 << (group - 1).bit_length())  # of passes with few rows of each sequence
        self.block = self.tile // group  # rows of one sequence that the attention takes at once
        self.ahead = (shape.depth - 1) * shape.width  # places after the committed rows in which a draft grows
        head.to(self.device, self._dtype)
        self._weights = DeviceHead(head, target)
        count = places // PAGE + 2 + SPARE * TOGETHER
        self._pages = PageTable(count, PAGE, SLOTS, target.context + NODES, ahead=1)
        self._table = DeviceTable(self._pages, self.device)
        sizes = (config.depth, 2, count, config.num_kv_heads, PAGE, config.head_dim)
        # zeros: what lies past the end of a sequence is multiplied by 0, and 0 * nan is nan
        self._cache = torch.zeros(sizes, dtype=self._dtype, device=self.device)
        self._parts = PartSums(config.num_heads, config.head_dim, self.device, PARTS_BYTES)
        self._work = Workspace(
            TOGETHER * shape.width, config.hidden_size, self._weights.widest, self._dtype, self.device
        )
        layers = len(config.layers)
        self._shown = torch.zeros(SHOWN, layers, config.hidden_size, dtype=self._dtype, device=self.device)
        fields = len(SequenceField) * TOGETHER + (len(Field) + 1) * FEW_ROWS
        self._sent_table = torch.zeros(fields, dtype=torch.int32, device=self.device)
        self._staging = pinned(fields, self.device)
        self._itself = torch.arange(max(TOGETHER * shape.width, FEW_ROWS), dtype=torch.int32, device=self.device)
        self._groups: dict[tuple[int, DraftShape], DraftGroup] = {}
        self._graphs: dict[tuple[Hashable, int], _Launched] = {}
        self._capture = Capture()
        self._sent, self._done = event(self.device), event(self.device)
        self._drafted: dict[int, int] = {}  # rows after those committed, of drafts that the host looks on
        if self.device.type == "cuda":
            self._warm_up()

    @property
    def padding(self) -> int:
        """The slot of rows that belong to no sequence."""
        return self._pages.padding

    def length(self, id: int) -> int:
        """Committed rows."""
        return self._pages.length(id)

    def reserve(self, ids: Seq[int], count: int) -> list[int] | None:
        """Memory for `count` more rows of each; the rows of the page table. None: there is not as much."""
        slots = self._pages.take_ahead(ids, count)
        self._sent.synchronize()
        self._table.send()
        self._sent.record()
        return slots

    def written(self, id: int, count: int) -> None:
        """The device has taken in as many rows by itself."""
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
        for begin in range(0, len(ids), TOGETHER):
            some = slice(begin, begin + TOGETHER)
            found += self._write(ids[some], tokens[some], shown[some], asked[some])
        return found

    @torch.inference_mode()
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        parts = hidden.split([len(each) for each in tokens])
        states, logits = [], []
        for begin in range(0, len(ids), TOGETHER):
            some = slice(begin, begin + TOGETHER)
            shown = [[(part, range(len(part)))] for part in parts[some]]
            group, _ = self._take_in(ids[some], tokens[some], shown, [DraftRequest(0)] * len(ids[some]))
            states.append(group.state[: len(shown)].clone())
            logits.append(group.logits[: len(shown)].clone())
        return HeadOutput(torch.cat(states), torch.cat(logits))

    @torch.inference_mode()
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        """Kernel by kernel: for drafts whose tokens the host chooses."""
        count, rows = len(tokens) // len(ids), len(tokens)
        drafted = self._drafted[ids[0]]
        holders = [self._pages.extend(id, 0) for id in ids]
        for id, holder in zip(ids, holders, strict=True):
            self._drafted[id] = drafted + count
            self._pages.reserve(holder, drafted + count)
        self._sent.synchronize()
        self._table.send()
        self._sent.record()
        lengths = [holder.length for holder in holders]
        table = self._drawn_table(tokens, trails, [holder.slot for holder in holders], lengths, drafted)
        logits, longest = self._logits(rows), max(lengths) + drafted + count
        work = self._workspace(rows)
        state = self._stage(table, states.to(self._dtype), logits, self._attention(rows, self.reach(longest)), work)
        return HeadOutput(state, logits)

    def _drawn_table(
        self, tokens: Tensor, trails: Tensor, slots: list[int], lengths: list[int], drafted: int
    ) -> Tensor:
        """The table of rows whose ancestors among the drafted rows are `trails`."""
        device, rows, count = self.device, len(tokens), len(tokens) // len(slots)
        slot, base = (torch.tensor(each, device=device).repeat_interleave(count) for each in (slots, lengths))
        node = torch.arange(drafted, drafted + count, device=device).repeat(len(slots))
        one = torch.ones(1, dtype=torch.int64, device=device)
        path, every = (one << trails).sum(1) | one << node, torch.arange(rows, device=device)
        named = {
            Field.TOKEN: tokens, Field.POSITION: base + trails.shape[1], Field.PLACE: base + node, Field.SLOT: slot,
            Field.BASE: base, Field.END: base + drafted + count, Field.LOW: path, Field.HIGH: path >> 32,
            Field.BLOCK_ROW: every, StageField.SOURCE: every,
        }  # fmt: skip
        table = torch.zeros(STAGE_FIELDS, rows, dtype=torch.int32, device=device)
        for field, values in named.items():
            table[field] = values.to(torch.int32)  # of a path its lower 32 bits
        table[[Field.BLOCK_COUNT, Field.BLOCK_TREE]] = 1
        return table

    def _write(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], asked: Seq[DraftRequest]
    ) -> list[Grown]:
        group, longest = self._take_in(ids, tokens, shown, asked)
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

    def _grow_and_copy(self, group: DraftGroup, longest: int) -> None:
        self.grow(group, self._sequences(group.growth.sequences), longest)
        group.found.copy_(group.growth.found, non_blocking=True)

    def grow(self, group: DraftGroup, sequences: Tensor, longest: int) -> None:
        """The stages of a draft, from what the head says after the committed text to the nodes."""
        growth, shape = group.growth, self.shape
        rows = growth.sequences * growth.width
        attention = self._attention(rows, longest)
        growth.choose(0, group.logits, sequences, shape.sharpness)
        state = group.state
        logits = self._logits(rows)
        for stage in range(growth.stages):
            state = self._stage(growth.tables[stage], state, logits, attention, self._work)
            growth.choose(stage + 1, logits, sequences, shape.sharpness)
        growth.collect(sequences, shape.stop)

    def _stage(self, table: Tensor, state: Tensor, logits: Tensor, attention: Attention, work: Workspace) -> Tensor:
        """Drafted rows; the states that their children read."""
        x = self._run(table, table[StageField.SOURCE], state, attention, work)
        weights, eps = self._weights, self.config.norm_eps
        linear(work.next[: len(x)], weights.output, None, logits, work, Around(eps=eps))
        if not self.config.norm_output:
            return x
        normed = torch.empty_like(x)
        device_kernels.finish(x, weights.norm, torch.empty_like(x), normed, eps, output=True)
        return normed

    def _run(self, table: Tensor, source: Tensor, state: Tensor, attention: Attention, work: Workspace) -> Tensor:
        """[rows, hidden] after the layers, of rows that each read a token and a state of their source."""
        config, weights, rows = self.config, self._weights, table.shape[1]
        x, entered = self._empty(rows, config.hidden_size), self._empty(rows, 2 * config.hidden_size)
        device_kernels.enter(
            table[Field.TOKEN], weights.embedding, state, source, weights.entering, x, entered, config.norm_eps,
            config.norm_residual,
        )  # fmt: skip
        q = self._empty(rows, config.num_heads, config.head_dim)
        mixed = torch.empty_like(q)
        for index, layer in enumerate(weights.layers):
            joined = self._empty(rows, len(layer.qkv.weight))
            read, around = (entered, Around()) if index == 0 else (work.next[:rows], Around(eps=config.norm_eps))
            linear(read, layer.qkv.weight, layer.qkv.bias, joined, work, around)
            keys, values = self._cache[index]
            kernels.place_qkv(
                joined, None, config.norm_eps, q, keys, values, self._table.table, table, weights.angles, rows
            )
            attention(q, keys, values, self._table.table, table, mixed, 0)
            linear(mixed.view(rows, -1), layer.output, None, x, work, Around(gain=layer.mlp_norm))
            inner = self._empty(rows, layer.down.shape[1])
            linear(work.next[:rows], layer.gate_up, None, inner, work, Around(eps=config.norm_eps, gate=True))
            linear(inner, layer.down, None, x, work, Around(gain=layer.following))
        return x

    def _take_in(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], asked: Seq[DraftRequest]
    ) -> tuple[DraftGroup, int]:
        """What was committed; the group in which what follows is found, and for how long texts its pass is made."""
        group = self.group(len(ids))
        count = group.growth.sequences
        feeds = [Feed(id, each) for id, each in zip(ids, tokens, strict=True)]
        batch = Batch(feeds, self._pages, self.config.num_heads // self.config.num_kv_heads, self.ahead)
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
            self.launch((shape, count), partial(self._intake, group, shape, self._sent_table, self._shown))
        else:
            self._sent_table[:begin].copy_(device[:begin])  # where the stages read them
            self._intake(group, shape, device, torch.cat(states))
        return group, shape.longest

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

    def _intake(self, group: DraftGroup, shape: Shape, sent: Tensor, shown: Tensor) -> None:
        rows, count = shape.rows, group.growth.sequences
        begin = len(SequenceField) * count
        sequences = sent[:begin].view(len(SequenceField), count)
        table = sent[begin : begin + (len(Field) + 1) * rows].view(len(Field) + 1, rows)
        self.take_in(group, sequences, table, shape, shown)

    def take_in(self, group: DraftGroup, sequences: Tensor, table: Tensor, shape: Shape, shown: Tensor) -> None:
        """What was committed: the rows of `table` [len(Field) + 1, rows], the last field of which says which row of
        `shown` [any, layers, hidden] each reads. What the head says after each sequence's last row is the group's."""
        config, weights, rows = self.config, self._weights, shape.rows
        joined = self._empty(rows, len(config.layers) * config.hidden_size)
        device_kernels.states(shown, table[len(Field)], weights.input_norms, joined, config.norm_eps)
        if weights.joined_norm is not None:
            kernels.norm(joined, weights.joined_norm, joined, config.norm_eps, rows)
        work = self._workspace(rows)
        state = self._empty(rows, config.hidden_size)
        linear(joined, weights.fc.weight, weights.fc.bias, state, work)
        chunk = chunk_keys(config.head_dim, self._dtype)
        shared = config.num_kv_heads, config.num_heads // config.num_kv_heads
        attention = Attention(rows, shape.blocks, shape.tile, shape.longest, chunk, shared, self._parts)
        itself = self._itself if rows <= len(self._itself) else torch.arange(rows, device=self.device)
        x = self._run(table, itself, state, attention, work)
        device_kernels.finish(
            x, weights.norm, group.state, group.normed, config.norm_eps, config.norm_output, sequences
        )
        linear(group.normed, weights.output, None, group.logits, work)

    def launch(self, key: tuple[Hashable, int], compute: Callable[[], None]) -> None:
        """Kernel by kernel the first time, which also compiles what is new; then as a graph."""
        launched = self._graphs.setdefault(key, _Launched())
        if launched.graph is None and launched.before and self.device.type == "cuda":
            launched.graph = self._capture(compute)
        if launched.graph is None:
            compute()
        else:
            launched.graph.replay()
        launched.before = True

    def group(self, sequences: int, shape: DraftShape | None = None) -> DraftGroup:
        """`shape`: of drafts no larger than the runner's own."""
        count, shape = 1 << (sequences - 1).bit_length(), shape or self.shape
        if (count, shape) not in self._groups:
            hidden = self.config.hidden_size
            growth = Growth(count, shape.width, shape.depth - 1, shape.nodes, self._weights.ids)
            state, normed = torch.zeros(2, count, hidden, dtype=self._dtype, device=self.device)
            found = pinned(growth.found.numel(), self.device).view(growth.found.shape)
            self._groups[count, shape] = DraftGroup(growth, state, normed, self._logits(count), found)
        return self._groups[count, shape]

    def _empty(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self._dtype, device=self.device)

    def _logits(self, rows: int) -> Tensor:
        return torch.empty(rows, len(self._weights.ids), device=self.device)

    def _sequences(self, count: int) -> Tensor:
        return self._sent_table[: len(SequenceField) * count].view(len(SequenceField), count)

    def _attention(self, rows: int, longest: int) -> Attention:
        """Of drafted rows, each by itself."""
        config = self.config
        shared = config.num_kv_heads, config.num_heads // config.num_kv_heads
        return Attention(rows, rows, self.tile, longest, chunk_keys(config.head_dim, self._dtype), shared, self._parts)

    def _workspace(self, rows: int) -> Workspace:
        return self._work if rows <= len(self._work.next) else self._new_workspace(rows)

    def _new_workspace(self, rows: int) -> Workspace:
        return Workspace(rows, self.config.hidden_size, self._weights.widest, self._dtype, self.device)

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


@dataclass(eq=False)
class _Launched:
    before: bool = False
    graph: torch.cuda.CUDAGraph | None = None


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
