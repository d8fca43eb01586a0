"""Adapters as torch runs them, in the dtype of the model: a pair of small products beside each large one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.adapters.adapter import EMBEDDING, OUTPUT, Adapter, AdapterBase, LowRank

# Matrix of a layer -> the field of `models.stack.Layer` that it is joined in with those beside it.
FIELDS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}


@dataclass(frozen=True, eq=False)
class PlacedPair:
    """A pair of one matrix, and which outputs of the joined one are that matrix's."""

    first: int
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], with the scale in it


@dataclass(frozen=True, eq=False)
class EndPairs:
    """What an adapter adds to the embedding and to the output matrix. Row by row: no row's sums depend on others."""

    embedding: tuple[Tensor, Tensor] | None  # [vocab, rank], [hidden, rank]
    output: tuple[Tensor, Tensor] | None  # [rank, hidden], [vocab, rank]

    def embed(self, x: Tensor, tokens: Sequence[int]) -> None:
        """x [rows, hidden] are the embeddings of these tokens."""
        if self.embedding is not None:
            table, b = self.embedding
            for row, token in enumerate(tokens):
                x[row : row + 1] += F.linear(table[token : token + 1], b)

    def judge(self, logits: Tensor, normed: Tensor) -> None:
        """logits [rows, vocab] of these normed states."""
        if self.output is not None:
            a, b = self.output
            for row in range(len(logits)):
                logits[row : row + 1] += F.linear(F.linear(normed[row : row + 1], a), b)

    @property
    def nbytes(self) -> int:
        pairs = [pair for pair in (self.embedding, self.output) if pair is not None]
        return sum(tensor.nbytes for pair in pairs for tensor in pair)


@dataclass(frozen=True, eq=False)
class DenseAdapter:
    layers: tuple[Mapping[str, tuple[PlacedPair, ...]], ...]  # by the field of the layer
    ends: EndPairs

    def add(self, index: int, field: str, x: Tensor, y: Tensor) -> None:
        """y [rows, outputs] += what it adds to this matrix's product with x [rows, inputs]."""
        for pair in self.layers[index].get(field, ()):
            y[:, pair.first : pair.first + pair.b.shape[0]] += F.linear(F.linear(x, pair.a), pair.b)

    @property
    def nbytes(self) -> int:
        pairs = (pair for layer in self.layers for own in layer.values() for pair in own)
        return self.ends.nbytes + sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)


def joined(adapter: Adapter, base: AdapterBase, layer: int) -> dict[str, list[tuple[int, LowRank]]]:
    """Of one layer: the pairs of each joined matrix, each with the first of its outputs."""
    found: dict[str, list[tuple[int, LowRank]]] = {}
    offsets: dict[str, int] = {}
    for name, field in FIELDS.items():
        full = f"model.layers.{layer}.{name}"
        first = offsets.get(field, 0)
        offsets[field] = first + base.shapes[full][0]
        if full in adapter.pairs:
            found.setdefault(field, []).append((first, adapter.pairs[full]))
    return found


def end_pairs(adapter: Adapter, dtype: torch.dtype, device: torch.device) -> EndPairs:
    def placed(name: str, transposed: bool) -> tuple[Tensor, Tensor] | None:
        pair = adapter.pairs.get(name)
        if pair is None:
            return None
        a = pair.a.T.contiguous() if transposed else pair.a
        return a.to(device, dtype), pair.scaled.to(device, dtype)

    return EndPairs(placed(EMBEDDING, True), placed(OUTPUT, False))


def place(adapter: Adapter, base: AdapterBase, layers: int, dtype: torch.dtype, device: torch.device) -> DenseAdapter:
    def pair(first: int, each: LowRank) -> PlacedPair:
        return PlacedPair(first, each.a.to(device, dtype), each.scaled.to(device, dtype))

    found = (joined(adapter, base, layer) for layer in range(layers))
    placed = tuple({field: tuple(pair(*each) for each in own) for field, own in layer.items()} for layer in found)
    return DenseAdapter(placed, end_pairs(adapter, dtype, device))
