"""An EAGLE head run by torch: the keys and values of each sequence, and steps for many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.eagle.runner import HeadOutput
from outrider.drafters.heads.output import OutputMatrix
from outrider.models.base import Readable
from outrider.models.rope import rotate

FEW = 16  # new rows of a sequence up to which it is padded to share a pass; more cost less in a pass of their own
_SIZE = 256  # tokens that a slot holds to begin with: most chats fit after one doubling
_POSITIONS = 1024  # positions of the rotary tables to begin with


class Slots:
    """Keys and values of all sequences in one tensor each, [layers, slots, kv_heads, size, head_dim].

    Slots and their size double when there are too few or too short ones, and are cut when sequences have ended, as soon
    as a quarter of the memory would do. How long sequences get in all is the drafter's to bound.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._free = shape, [0]
        self._of: dict[int, int] = {}
        self.lengths: dict[int, int] = {}  # committed rows
        self.drafted: dict[int, int] = {}  # rows after them
        self.keys, self.values = (self._new(1, _SIZE, dtype, device) for _ in range(2))

    def reserve(self, ids: Seq[int], places: int) -> list[int]:
        """The sequences' slots, each of at least this many places."""
        for id in ids:
            if id not in self._of:
                self._of[id], self.lengths[id], self.drafted[id] = self._take(), 0, 0
        if places > self.keys.shape[3]:
            self._grow(self.keys.shape[1], max(places, 2 * self.keys.shape[3]))
        return [self._of[id] for id in ids]

    def free(self, id: int) -> None:
        if id in self._of:
            self._free.append(self._of.pop(id))
            del self.lengths[id], self.drafted[id]
            self._shrink()

    def _take(self) -> int:
        if not self._free:
            slots = self.keys.shape[1]
            self._free = list(range(2 * slots - 1, slots - 1, -1))
            self._grow(2 * slots, self.keys.shape[3])
        slot = self._free.pop()
        for each in (self.keys, self.values):  # a NaN of the sequence before must not be multiplied by 0
            each[:, slot] = 0
        return slot

    def _shrink(self) -> None:
        longest = max((self.lengths[id] + self.drafted[id] for id in self._of), default=0)
        slots, size = max(2 * len(self._of), 1), max(2 * longest, _SIZE)
        if self.keys.shape[1] * self.keys.shape[3] <= 4 * slots * size:
            return
        old, held, kept = (self.keys, self.values), list(self._of.values()), min(size, self.keys.shape[3])
        self.keys, self.values = (self._new(slots, size, was.dtype, was.device) for was in old)
        for new, was in zip((self.keys, self.values), old, strict=True):
            new[:, : len(held), :, :kept] = was[:, held][..., :kept, :]
        self._of = {id: slot for slot, id in enumerate(self._of)}
        self._free = list(range(slots - 1, len(held) - 1, -1))

    def _grow(self, slots: int, size: int) -> None:
        old = self.keys, self.values
        self.keys, self.values = (self._new(slots, size, was.dtype, was.device) for was in old)
        for new, was in zip((self.keys, self.values), old, strict=True):
            new[:, : was.shape[1], :, : was.shape[3]] = was

    def _new(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        layers, kv_heads, head_dim = self._shape
        # zeros: masked attention multiplies what lies past the end by 0, and 0 * nan is nan
        return torch.zeros(layers, slots, kv_heads, size, head_dim, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a pass, n for each of b sequences."""

    slots: list[int]
    tokens: Tensor  # [b * n]
    states: Tensor  # [b * n, hidden]
    positions: Tensor  # [b, n]
    places: Tensor  # [b, n]
    longest: int  # places that any row sees
    mask: Tensor | None  # [b, 1, n, longest] what each sees; None: all


class DenseRunner:
    """In torch, on any device, in the target's own dtype."""

    def __init__(self, head: EagleHead, target: Readable) -> None:
        config = self.config = head.config
        self._device = target.device
        self._dtype = target.embed(torch.zeros(1, dtype=torch.long, device=self._device)).dtype
        self._head, self._final = head.to(self._device, self._dtype), target.normed
        output = head.lm_head.weight if config.own_output else target.output_rows(head.draft_ids)
        self._output = OutputMatrix(output, 0, self._dtype)
        self._embed = head.embed_tokens if config.own_embedding else target.embed
        self._qkv = [_joined(a.q_proj, a.k_proj, a.v_proj) for a in (layer.self_attn for layer in head.decoder)]
        self._gate_up = [_joined(layer.mlp.gate_proj, layer.mlp.up_proj)[0] for layer in head.decoder]
        self._slots = Slots((config.depth, config.num_kv_heads, config.head_dim), self._dtype, self._device)
        self._turns = torch.empty(2, 0, config.head_dim)

    def free(self, id: int) -> None:
        self._slots.free(id)

    @torch.inference_mode()
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        states = self._states(hidden).split([len(each) for each in tokens])
        groups = _groups([len(each) for each in tokens])
        if len(groups) == 1:
            return self._ahead(self._extend(list(ids), list(tokens), list(states)))
        last = torch.empty(len(ids), self.config.hidden_size, dtype=self._dtype, device=self._device)
        for group in groups:
            x = self._extend([ids[i] for i in group], [tokens[i] for i in group], [states[i] for i in group])
            last[torch.tensor(group, device=self._device)] = x
        return self._ahead(last)

    @torch.inference_mode()
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        count, depth = len(tokens) // len(ids), trails.shape[1]
        lengths, drafted = [self._slots.lengths[id] for id in ids], self._slots.drafted[ids[0]]
        longest = max(lengths) + drafted + count
        slots = self._slots.reserve(ids, longest)
        for id in ids:
            self._slots.drafted[id] = drafted + count
        starts = torch.tensor(lengths, device=self._device).unsqueeze(1)  # [b, 1]
        places = starts + torch.arange(drafted, drafted + count, device=self._device)
        mask = None
        if len(ids) > 1 or count > 1 or drafted > depth:
            mask = (torch.arange(longest, device=self._device) < starts).unsqueeze(1).repeat(1, count, 1)
            seen = torch.cat([starts.unsqueeze(2) + trails.view(len(ids), count, depth), places.unsqueeze(2)], 2)
            mask = mask.scatter_(2, seen, True).unsqueeze(1)
        positions = (starts + depth).expand(-1, count)
        return self._ahead(self._run(_Rows(slots, tokens, states, positions, places, longest, mask)))

    def _states(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] the states that a step reads, of the target's own."""
        hidden = hidden.to(self._device, self._dtype)
        states = self._final(hidden[:, 0]) if self.config.first else self._head.combine(hidden)
        return states.to(self._dtype)

    def _extend(self, ids: list[int], tokens: list[Seq[int]], states: list[Tensor]) -> Tensor:
        """[b, hidden] after the last row of each; shorter ones are padded, with rows that nothing sees."""
        counts = [len(each) for each in tokens]
        n = max(counts)
        self._slots.reserve(ids, 1)
        lengths = [self._slots.lengths[id] for id in ids]
        longest = max(lengths) + n
        slots = self._slots.reserve(ids, longest)
        padded = torch.tensor([[*each, *[0] * (n - len(each))] for each in tokens], device=self._device)
        starts = torch.tensor(lengths, device=self._device).unsqueeze(1)
        places = starts + torch.arange(n, device=self._device)
        mask = None
        if len(ids) > 1 or n > 1:
            mask = (torch.arange(longest, device=self._device) <= places.unsqueeze(2)).unsqueeze(1)
        state = torch.nn.utils.rnn.pad_sequence(states, True).flatten(0, 1)
        x = self._run(_Rows(slots, padded.flatten(), state, places, places, longest, mask)).view(len(ids), n, -1)
        for id, count in zip(ids, counts, strict=True):
            self._slots.lengths[id] += count
            self._slots.drafted[id] = 0
        ends = torch.tensor(counts, device=self._device) - 1
        return x[torch.arange(len(ids), device=self._device), ends]

    def _run(self, rows: _Rows) -> Tensor:
        """[b * n, hidden] after the layers."""
        config, head = self.config, self._head
        embedded = self._embed(rows.tokens).to(self._dtype)
        x = rows.states
        if config.first:
            x = head.fc(torch.cat([embedded, x], -1))
        for index, layer in enumerate(head.decoder):
            if layer.joins:
                normed = layer.hidden_norm.in_dtype(x)
                read = torch.cat([layer.input_layernorm.in_dtype(embedded), normed], -1)
                x = normed if config.norm_residual else x
            else:
                read = x if layer.bare else layer.input_layernorm.in_dtype(x)
            x = x + layer.self_attn.o_proj(self._attend(index, read, rows))
            gate, up = F.linear(layer.post_attention_layernorm.in_dtype(x), self._gate_up[index]).chunk(2, -1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
        return x

    def _attend(self, index: int, x: Tensor, rows: _Rows) -> Tensor:
        """[b * n, inputs] -> [b * n, heads * head_dim]"""
        config, (b, n) = self.config, rows.places.shape
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = F.linear(x, *self._qkv[index]).view(b, n, heads + 2 * kv_heads, config.head_dim)
        cos, sin = self._turned(rows.positions, rows.longest)
        qk, v = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        qk = rotate(qk, cos, sin)
        keys, values = self._store(index, rows, qk[:, :, heads:], v)
        q = qk[:, :, :heads].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, keys, values, rows.mask, enable_gqa=heads > kv_heads)
        return mixed.transpose(1, 2).reshape(b * n, heads * config.head_dim)

    def _store(self, index: int, rows: _Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new keys and values [b, n, kv_heads, head_dim] in their places; all that the rows may see."""
        keys, values = self._slots.keys[index], self._slots.values[index]  # [slots, kv_heads, size, head_dim]
        first, b = rows.slots[0], len(rows.slots)
        if rows.slots == list(range(first, first + b)):  # side by side: no copy
            keys, values = keys[first : first + b], values[first : first + b]
            where = torch.arange(b, device=self._device).unsqueeze(1)
            keys.transpose(1, 2)[where, rows.places], values.transpose(1, 2)[where, rows.places] = k, v
            return keys[:, :, : rows.longest], values[:, :, : rows.longest]
        slots = torch.tensor(rows.slots, device=self._device)
        where = slots.unsqueeze(1)
        keys.transpose(1, 2)[where, rows.places], values.transpose(1, 2)[where, rows.places] = k, v
        return keys[slots, :, : rows.longest], values[slots, :, : rows.longest]

    def _turned(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [b, n, 1, head_dim]; no position is past `longest`."""
        if longest >= self._turns.shape[1]:
            tables = self._head.rope.tables(2 * longest + _POSITIONS)
            self._turns = torch.stack(tables).to(self._device, self._dtype)
        cos, sin = self._turns[:, positions].unsqueeze(3)
        return cos, sin

    def _ahead(self, x: Tensor) -> HeadOutput:
        normed = x if self.config.first else self._head.norm.in_dtype(x)
        return HeadOutput(normed if self.config.norm_output else x, self._output(normed))


def _joined(*layers: torch.nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Matrices that read the same input as one."""
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return torch.cat([layer.weight for layer in layers]), bias


def _groups(counts: Seq[int]) -> list[list[int]]:
    """Which sequences share a pass: all sequences with few new rows; a sequence with many has a pass of its own."""
    few = [i for i, count in enumerate(counts) if count <= FEW]
    many = [[i] for i, count in enumerate(counts) if count > FEW]
    return [few, *many] if few else many
