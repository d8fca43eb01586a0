"""A block head on a GPU: one pass over the slots of a block, then a small step for every stage of a draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.block import device_kernels
from outrider.drafters.block.device_head import BlockWeights
from outrider.drafters.block.head import BlockHead
from outrider.drafters.eagle.device_kernels import Growth, StageField, states
from outrider.drafters.eagle.runner import DraftRequest, DraftShape, HeadOutput
from outrider.drafters.heads.device_runner import DeviceHeadRunner, DraftGroup, in_turns
from outrider.models.cuda import kernels
from outrider.models.cuda.batch import Field
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import Shape
from outrider.models.cuda.model import CudaLlama
from outrider.models.cuda.product import Around, linear
from outrider.models.cuda.rejection import ChainDraws


@dataclass(eq=False)
class BlockGroup(DraftGroup):
    table: Tensor  # [len(Field), sequences * slots]
    seen: Tensor  # as the attention reads it
    embedded: Tensor  # [sequences, hidden] the last tokens, normed
    said: Tensor  # [sequences, slots, draft vocabulary + sums] float32: what the slots say by themselves

    @property
    def slots(self) -> int:
        return self.said.shape[1]


class BlockDeviceRunner(DeviceHeadRunner[BlockGroup]):
    def __init__(self, head: BlockHead, target: CudaLlama, places: int, shape: DraftShape) -> None:
        """`places`: committed rows that it may hold. One slot is run for each level of a draft."""
        self.config = head.config
        head.to(target.device, target.dtype)
        self._weights = BlockWeights(head, target)
        self._vocab = len(self._weights.ids)
        self._rows: dict[int, int] = {}  # of each sequence of the last `extend`
        self._said = torch.empty(0)  # what its slots said
        super().__init__(head.config, self._weights, target, places, shape, shape.depth)

    def make_group(self, count: int, shape: DraftShape, growth: Growth, found: Tensor) -> BlockGroup:
        # a slot's output depends on later slots only where it attends to them
        slots = shape.depth if self.config.causal else self.shape.depth
        fields = len(Field), count * slots
        table = torch.zeros(fields, dtype=torch.int32, device=self.device)
        seen = table if self.config.causal else torch.zeros_like(table)
        said = torch.empty(count, slots, len(self._weights.saying.weight), device=self.device)
        return BlockGroup(growth, found, table, seen, self.empty(count, self.config.hidden_size), said)

    @torch.inference_mode()
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        said = []
        for some, shown in in_turns(tokens, hidden):
            group, _ = self.commit(ids[some], tokens[some], shown, [DraftRequest(0)] * len(shown))
            said.append(group.said[: len(shown)].clone())
        self._rows, self._said = {id: row for row, id in enumerate(ids)}, torch.cat(said)
        last = torch.tensor([each[-1] for each in tokens], dtype=torch.int32, device=self.device)
        return self._ahead(last, None, self._said, 0)

    @torch.inference_mode()
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        """Kernel by kernel: for drafts whose tokens the host chooses."""
        rows = torch.tensor([self._rows[id] for id in ids], device=self.device)
        said = self._said[rows]
        return self._ahead(tokens.to(torch.int32), states.to(self.dtype), said, trails.shape[1] + 1)

    def _ahead(self, tokens: Tensor, state: Tensor | None, said: Tensor, stage: int) -> HeadOutput:
        """What follows these tokens, which stand before that slot; each sequence of `said` has the same number of
        them."""
        itself = None if state is None else torch.arange(len(tokens), dtype=torch.int32, device=self.device)
        following, logits = self._follow(tokens, itself, state, said, stage)
        each = len(tokens) // len(said)
        return HeadOutput(following, logits + said[:, stage, : self._vocab].repeat_interleave(each, 0))

    def _follow(
        self, tokens: Tensor, source: Tensor | None, state: Tensor | None, said: Tensor, stage: int
    ) -> tuple[Tensor, Tensor]:
        """A step of the sequential part: the next states, and what it adds to the logits of the slot."""
        part, rows = self._weights.sequential, len(tokens)
        if part is None:
            return self.empty(rows, 0), torch.zeros(rows, self._vocab, device=self.device)
        rank = self.config.rank
        g, logits = self.empty(rows, rank), self.logits(rows)
        following = torch.zeros_like(g) if part.joint is None else torch.empty_like(g)
        device_kernels.step(
            part.kind, tokens, source, following if state is None else state, part.before, part.joint,
            said[:, :, self._vocab :], stage, following, g,
        )  # fmt: skip
        linear(g, part.output, None, logits, self.workspace(rows))
        return following, logits

    def grow(
        self, group: BlockGroup, sequences: Tensor, longest: int, chains: ChainDraws | None = None,
        cuts: Cuts | None = None,
    ) -> None:  # fmt: skip
        growth, said = group.growth, group.said
        sharpness, slots = self.shape.sharpness, said[:, :, : self._vocab]
        tokens = group.table[Field.TOKEN].view(-1, group.slots)[:, 0]
        state, logits = self._follow(tokens, None, None, said, 0)
        growth.choose(0, logits, sequences, sharpness, slots, chains, cuts)
        for stage in range(growth.stages):
            table = growth.tables[stage]
            state, logits = self._follow(table[Field.TOKEN], table[StageField.SOURCE], state, said, stage + 1)
            growth.choose(stage + 1, logits, sequences, sharpness, slots, chains, cuts)
        growth.collect(sequences, self.shape.stop)

    def take_in(self, group: BlockGroup | None, sequences: Tensor, table: Tensor, shape: Shape, shown: Tensor) -> None:
        config, weights, rows = self.config, self._weights, shape.rows
        read = self.empty(rows, len(config.layers) * config.hidden_size)
        states(shown, table[len(Field)], weights.input_norms, read, config.norm_eps)
        work, joined = self.workspace(rows), self.empty(rows, config.hidden_size)
        linear(read, weights.fc.weight, weights.fc.bias, joined, work)
        kernels.norm(joined, weights.joined_norm, joined, config.norm_eps, rows)
        kv = self.empty(rows, len(weights.kv.weight))
        linear(joined, weights.kv.weight, weights.kv.bias, kv, work)
        device_kernels.place_kv(
            kv, weights.key_norms, self.cache, self.page_table, table, weights.angles, config.norm_eps
        )
        if group is not None:
            self._guess(group, sequences, table[Field.TOKEN], joined, shape.longest)

    def _guess(self, group: BlockGroup, sequences: Tensor, tokens: Tensor, joined: Tensor, longest: int) -> None:
        """The block after each sequence's last row; `tokens` and `joined`: of the rows that were taken in."""
        config, weights, table = self.config, self._weights, group.table
        rows = table.shape[1]
        work, x = self.workspace(rows), self.empty(rows, config.hidden_size)
        device_kernels.enter_block(
            sequences, tokens, weights.embedding, (table, group.seen), group.embedded, self.block, self.padding,
            config.mask_token, config.starts,
        )  # fmt: skip
        embedded = torch.empty_like(group.embedded)
        if weights.embed_proj is not None:
            linear(group.embedded, weights.embed_proj, None, embedded, work)
        device_kernels.begin(
            sequences, joined, embedded, weights.starts, table[Field.TOKEN], weights.embedding, weights.entering, x,
            work,
        )  # fmt: skip
        self.run_layers(x, None, table, group.seen, self.attention(self.small(rows, longest)), work)
        said = group.said.view(rows, -1)
        linear(work.next[:rows], weights.saying.weight, weights.saying.bias, said, work, Around(eps=config.norm_eps))
