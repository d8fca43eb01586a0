"""An EAGLE head on a GPU: a step of the head for every stage of a draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.eagle import device_kernels
from outrider.drafters.eagle.device_head import DeviceHead
from outrider.drafters.eagle.device_kernels import STAGE_FIELDS, Growth, StageField
from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.eagle.runner import DraftRequest, DraftShape, HeadOutput
from outrider.drafters.heads.device_runner import TOGETHER, DeviceHeadRunner, DraftGroup, in_turns
from outrider.models.cuda import kernels
from outrider.models.cuda.attention import Attention
from outrider.models.cuda.batch import FEW_ROWS, Field
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import Shape
from outrider.models.cuda.model import CudaLlama
from outrider.models.cuda.product import Around, Workspace, linear
from outrider.models.cuda.rejection import ChainDraws


@dataclass(eq=False)
class EagleGroup(DraftGroup):
    state: Tensor  # [sequences, hidden] after what was committed
    normed: Tensor
    logits: Tensor  # [sequences, draft vocabulary]


class DeviceRunner(DeviceHeadRunner[EagleGroup]):
    def __init__(self, head: EagleHead, target: CudaLlama, places: int, shape: DraftShape) -> None:
        """`places`: committed rows that it may hold."""
        self.config = head.config
        head.to(target.device, target.dtype)
        self._weights = DeviceHead(head, target)
        rows = max(TOGETHER * shape.width, FEW_ROWS)
        self._itself = torch.arange(rows, dtype=torch.int32, device=target.device)
        super().__init__(head.config, self._weights, target, places, shape, (shape.depth - 1) * shape.width)

    def make_group(self, count: int, shape: DraftShape, growth: Growth, found: Tensor) -> EagleGroup:
        state, normed = torch.zeros(2, count, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return EagleGroup(growth, found, state, normed, self.logits(count))

    @torch.inference_mode()
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        states, logits = [], []
        for some, shown in in_turns(tokens, hidden):
            group, _ = self.commit(ids[some], tokens[some], shown, [DraftRequest(0)] * len(shown))
            states.append(group.state[: len(shown)].clone())
            logits.append(group.logits[: len(shown)].clone())
        return HeadOutput(torch.cat(states), torch.cat(logits))

    @torch.inference_mode()
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        """Kernel by kernel: for drafts whose tokens the host chooses."""
        count, rows = len(tokens) // len(ids), len(tokens)
        drafted, slots, lengths = self.drafted_rows(ids, count)
        table = self._drawn_table(tokens, trails, slots, lengths, drafted)
        logits, longest = self.logits(rows), max(lengths) + drafted + count
        attention = self.attention(self.small(rows, self.reach(longest)))
        state = self._stage(table, states.to(self.dtype), logits, attention, self.workspace(rows))
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
            Field.HELD: base + trails.shape[1], Field.BLOCK_ROW: every, StageField.SOURCE: every,
        }  # fmt: skip
        table = torch.zeros(STAGE_FIELDS, rows, dtype=torch.int32, device=device)
        for field, values in named.items():
            table[field] = values.to(torch.int32)  # of a path its lower 32 bits
        table[[Field.BLOCK_COUNT, Field.BLOCK_TREE]] = 1
        return table

    def grow(
        self, group: EagleGroup, sequences: Tensor, longest: int, chains: ChainDraws | None = None,
        cuts: Cuts | None = None,
    ) -> None:  # fmt: skip
        growth, shape = group.growth, self.shape
        rows = growth.sequences * growth.width
        attention, work = self.attention(self.small(rows, longest)), self.workspace(rows)
        growth.choose(0, group.logits, sequences, shape.sharpness, chains=chains, cuts=cuts)
        state = group.state
        logits = self.logits(rows)
        for stage in range(growth.stages):
            state = self._stage(growth.tables[stage], state, logits, attention, work)
            growth.choose(stage + 1, logits, sequences, shape.sharpness, chains=chains, cuts=cuts)
        growth.collect(sequences, shape.stop)

    def _stage(self, table: Tensor, state: Tensor, logits: Tensor, attention: Attention, work: Workspace) -> Tensor:
        """Drafted rows; the states that their children read."""
        x = self._run(table, table[StageField.SOURCE], state, attention, work)
        weights, eps = self._weights, self.config.norm_eps
        linear(work.next[: len(x)], weights.output, None, logits, work, Around(eps=eps, again=True))
        if not self.config.norm_output:
            return x
        normed = torch.empty_like(x)
        device_kernels.finish(x, weights.norm, torch.empty_like(x), normed, eps, output=True)
        return normed

    def _run(self, table: Tensor, source: Tensor, state: Tensor, attention: Attention, work: Workspace) -> Tensor:
        """[rows, hidden] after the layers, of rows that each read a token and a state of their source."""
        config, weights, rows = self.config, self._weights, table.shape[1]
        x, entered = self.empty(rows, config.hidden_size), self.empty(rows, 2 * config.hidden_size)
        device_kernels.enter(
            table[Field.TOKEN], weights.embedding, state, source, weights.entering, x, entered, config.norm_eps,
            config.norm_residual,
        )  # fmt: skip
        self.run_layers(x, entered, table, table, attention, work)
        return x

    def take_in(self, group: EagleGroup | None, sequences: Tensor, table: Tensor, shape: Shape, shown: Tensor) -> None:
        config, weights, rows = self.config, self._weights, shape.rows
        joined = self.empty(rows, len(config.layers) * config.hidden_size)
        device_kernels.states(shown, table[len(Field)], weights.input_norms, joined, config.norm_eps)
        if weights.joined_norm is not None:
            kernels.norm(joined, weights.joined_norm, joined, config.norm_eps, rows)
        work = self.workspace(rows)
        state = self.empty(rows, config.hidden_size)
        linear(joined, weights.fc.weight, weights.fc.bias, state, work)
        itself = self._itself
        if rows > len(itself):
            itself = torch.arange(rows, dtype=itself.dtype, device=self.device)
        x = self._run(table, itself, state, self.attention(shape), work)
        if group is None:
            return
        device_kernels.finish(
            x, weights.norm, group.state, group.normed, config.norm_eps, config.norm_output, sequences
        )
        linear(group.normed, weights.output, None, group.logits, work, Around(again=True))
