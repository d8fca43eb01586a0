"""A block head run by torch: keys and values of each sequence, one call for a block, and steps along its paths."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.block.head import BlockAttention, BlockHead
from outrider.drafters.eagle.runner import HeadOutput
from outrider.drafters.eagle.torch_runner import Slots
from outrider.drafters.heads.output import OutputMatrix, bits, pack
from outrider.models.base import Readable
from outrider.models.native.packed import packable
from outrider.models.rope import rotate

_POSITIONS = 1024  # positions of the rotary tables to begin with


class BlockRunner:
    """In torch, on any device, in the target's own dtype; beside a packed target its matrices are packed, too.

    `extend` runs the block; `step` goes one slot further along some paths of it, for which only the sequential part is
    run."""

    def __init__(self, head: BlockHead, target: Readable, length: int, quantize: str = "none") -> None:
        """`length`: slots that are run, at most those of the head."""
        config, count = head.config, bits(quantize, target)
        self.config, self._device, self._count = config, target.device, length
        self._dtype = target.embed(torch.zeros(1, dtype=torch.long, device=self._device)).dtype
        self._head = head.to(self._device, self._dtype)
        self._embed = head.embed_tokens if config.own_embedding else target.embed
        rows = head.lm_head.weight if config.own_output else target.output_rows(head.draft_ids)
        self._output = OutputMatrix(rows, count, self._dtype)
        self._bias = self._sequential_rows(rows, count) if config.rank else None
        if count:
            pack_linears(self._head, count)
        self._slots = Slots((config.depth, config.num_kv_heads, config.head_dim), self._dtype, self._device)
        self._turns = torch.empty(2, 0, config.head_dim)
        self._rows: dict[int, int] = {}  # of each sequence of the last call
        self._states = self._logits = torch.empty(0)  # [b, slots, hidden] and [b, slots, draft vocabulary] of that call
        self.sure: Tensor | None = None  # [rows] of the last call or step: how likely its guesses are kept

    def _sequential_rows(self, output: Tensor, count: int) -> OutputMatrix:
        """W2, [draft vocabulary, rank]"""
        part = self._head.markov_head
        if self.config.own_sequential:
            return OutputMatrix(part.markov_w2.weight, 0, self._dtype)
        return OutputMatrix(output.to(self._dtype) @ part.lift.weight.to(self._dtype), count, self._dtype)

    def free(self, id: int) -> None:
        self._slots.free(id)

    def read(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> None:
        """Take in what was committed where nothing is drafted after it."""
        self._take_in(ids, [len(each) for each in tokens], hidden)

    @torch.inference_mode()
    def _take_in(self, ids: Seq[int], counts: Seq[int], hidden: Tensor) -> Tensor:
        """Keep the keys and values of the target's states [rows, layers, hidden], `counts[i]` rows for sequence
        `ids[i]`; returns the joined states, [rows, hidden]."""
        joined = self._head.joined(hidden.to(self._dtype))
        lengths = [self._slots.lengths.get(id, 0) for id in ids]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        slots = self._slots.reserve(ids, max(ends) + self._count)
        where = _repeated(slots, counts, self._device)
        places = torch.cat([torch.arange(a, b) for a, b in zip(lengths, ends, strict=True)]).to(self._device)
        cos, sin = self._turned(places, max(ends) + self._count)
        for index, layer in enumerate(self._head.decoder):
            k, v = layer.self_attn.keys_values(joined)  # [rows, kv_heads, head_dim]
            self._slots.keys[index][where, :, places] = rotate(k, cos.unsqueeze(1), sin.unsqueeze(1))
            self._slots.values[index][where, :, places] = v
        for id, end in zip(ids, ends, strict=True):
            self._slots.lengths[id] = end
        return joined

    @torch.inference_mode()
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        """Take in the target's states before these tokens, and run the block after the last token of each sequence."""
        counts = [len(each) for each in tokens]
        joined = self._take_in(ids, counts, hidden)
        ends = torch.tensor(counts, device=self._device).cumsum(0) - 1
        last = torch.tensor([each[-1] for each in tokens], device=self._device)
        unknown = self._embed(torch.full_like(last[:1], self.config.mask_token))
        x = self._head.begin(joined[ends], self._embed(last).to(self._dtype), unknown.to(self._dtype), self._count)
        self._rows = {id: row for row, id in enumerate(ids)}
        self._states = self._block(ids, x.transpose(0, 1))
        self._logits = self._output(self._states.flatten(0, 1)).view(len(ids), self._count, -1)
        state = torch.zeros(len(ids), self.config.rank, dtype=self._dtype, device=self._device)
        return self._ahead(last, state, torch.arange(len(ids), device=self._device), 0)

    @torch.inference_mode()
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        """Drafted tokens, the same number for each sequence and all of one depth, and the states that they follow."""
        rows = torch.tensor([self._rows[id] for id in ids], device=self._device)
        return self._ahead(tokens, states, rows.repeat_interleave(len(tokens) // len(ids)), trails.shape[1] + 1)

    def _block(self, ids: Seq[int], x: Tensor) -> Tensor:
        """[b, slots, hidden] through the layers and the last norm."""
        n, config = x.shape[1], self.config
        lengths = [self._slots.lengths[id] for id in ids]
        slots, longest = self._slots.reserve(ids, max(lengths) + n), max(lengths) + n
        where = torch.tensor(slots, device=self._device).unsqueeze(1)
        places = torch.tensor(lengths, device=self._device).unsqueeze(1) + torch.arange(n, device=self._device)
        cos, sin = (part.unsqueeze(2) for part in self._turned(places, longest))
        seen = places if config.causal else places[:, -1:].expand(-1, n)
        mask = (torch.arange(longest, device=self._device) <= seen.unsqueeze(2)).unsqueeze(1)  # [b, 1, n, longest]
        for index, layer in enumerate(self._head.decoder):
            read = layer.input_layernorm.in_dtype(x)
            q = rotate(layer.self_attn.queries(read), cos, sin).transpose(1, 2)
            k, v = layer.self_attn.keys_values(read)
            keys, values = self._slots.keys[index], self._slots.values[index]
            keys.transpose(1, 2)[where, places], values.transpose(1, 2)[where, places] = rotate(k, cos, sin), v
            keys, values = (each[where.squeeze(1), :, :longest] for each in (keys, values))
            mixed = _attention(layer.self_attn, q, keys, values, mask)
            x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm.in_dtype(x))
        return self._head.norm.in_dtype(x)

    def _ahead(self, tokens: Tensor, states: Tensor, rows: Tensor, slot: int) -> HeadOutput:
        """What follows these tokens, which stand before that slot of the rows' blocks."""
        own, logits = self._states[rows, slot], self._logits[rows, slot]
        before: Tensor | None = None
        if self._bias is not None:
            part = self._head.markov_head
            before = (part.markov_w1(tokens) if self.config.own_sequential else part.reduced(self._embed(tokens))).to(
                self._dtype
            )
            g, states = part.step(states, before, own)
            logits = logits + self._bias(g)
        self.sure = torch.sigmoid(self._head.confidence_head(own, before).float()) if self.config.confidence else None
        return HeadOutput(states, logits)

    def _turned(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [*positions, head_dim]; no position is past `longest`."""
        if longest >= self._turns.shape[1]:
            tables = self._head.rope.tables(2 * longest + _POSITIONS)
            self._turns = torch.stack(tables).to(self._device, self._dtype)
        cos, sin = self._turns[:, positions]
        return cos, sin


class PackedLinear(nn.Module):
    """A matrix of the head, run by the CPU kernels."""

    def __init__(self, linear: nn.Linear, count: int) -> None:
        super().__init__()
        self._packed = pack(linear.weight, count, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._packed(x.flatten(0, -2).contiguous()).view(*x.shape[:-1], -1)


def pack_linears(module: nn.Module, count: int) -> None:
    """Pack all matrices in `count` bits that the kernels can run; the others stay as they are."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and packable(*child.weight.shape):
            setattr(module, name, PackedLinear(child, count))
        else:
            pack_linears(child, count)


def _attention(attention: BlockAttention, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [b, heads, n, head_dim] over keys [b, kv_heads, places, head_dim] -> [b, n, hidden]"""
    grouped = q.shape[1] > keys.shape[1]
    mixed = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=grouped)
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def _repeated(slots: Seq[int], counts: Seq[int], device: torch.device) -> Tensor:
    return torch.tensor(slots).repeat_interleave(torch.tensor(counts)).to(device)
