"""The tokens that a chain can be written with: the most frequent ones, and the tokens of the text itself.

A rare token that comes next has nearly always come before. So the most frequent 4096 and those of the text keep as much
as all 32768 that a head has learned (docs/LOG.md), and reading their rows of the output matrix takes far less time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq

import torch
from torch import Tensor

from outrider.models.native import structs
from outrider.models.native.packed import TILE, Packed
from outrider.models.quant import quantise

FEW = 48  # rare tokens that came one by one, a multiple of TILE; more join those of the prompt


class Lexicon:
    """The tokens of a head."""

    def __init__(
        self, output: Packed, ids: Tensor, learned: Tensor, common: int, rows: Callable[[Tensor], Tensor], bits: int
    ) -> None:
        """`output`: packed rows of the tokens `ids`, of which the first `common` are always written. `learned`: all
        tokens that the head can write; `rows` are their rows of the output matrix, to be packed in `bits`."""
        self._output = output
        self._common = min(common, len(ids)) // TILE * TILE
        self._ids = ids[: self._common].long()
        rare = learned[torch.isin(learned, self._ids, invert=True)]
        self._quantised = quantise(rows(rare), bits)  # now, for there is no time for it while a text is written
        self.rare = {token: place for place, token in enumerate(rare.tolist())}

    def joint(self, groups: Seq[tuple[Packed, int]]) -> structs.JoinedMatrices:
        """The output matrix of the common tokens and of so many rows of each of these."""
        parts = [(self._output, self._common), *groups]
        joint = structs.JoinedMatrices(
            count=len(parts),
            outputs=sum(outputs for _, outputs in parts),
            activations=self._output.joint.activations,
        )
        for place, (group, outputs) in enumerate(parts):
            joint.parts[place] = group.joint.parts[0]
            joint.parts[place].outputs = outputs
        return joint

    def ids(self, groups: Seq[Seq[int]]) -> Tensor:
        """The token of each of its rows."""
        return torch.cat([self._ids, *(torch.tensor(_full(group)) for group in groups)])

    def pack(self, tokens: Seq[int]) -> Packed:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # waking up torch's own threads, beside those of the kernels, takes longer than this
        try:
            return Packed([self._quantised.rows(torch.tensor([self.rare[token] for token in _full(tokens)]))])
        finally:
            torch.set_num_threads(threads)

    def put(self, packed: Packed, place: int, token: int) -> None:
        """Rows from this one to the end of its tile become that of the token: to pack all anew takes 0.4 ms."""
        row = self.rare[token]
        packed.put(place, self._quantised.rows(slice(row, row + 1)))


class TextVocabulary:
    """The tokens of one sequence's chains."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._seen: set[int] = set()
        self._many: list[int] = []  # rare tokens of long texts
        self._few: list[int] = []  # those of single steps
        self._packed: list[Packed | None] = [None, None]  # the rows of both
        self._rows = 0  # of the few that are packed; the rest of FEW is anything
        self.changed = True  # since `output` was last asked for

    def add(self, tokens: Iterable[int]) -> None:
        """They are in the text."""
        fresh = [token for token in dict.fromkeys(tokens) if token in self._lexicon.rare and token not in self._seen]
        if not fresh:
            return
        self._seen.update(fresh)
        self.changed = True
        if len(self._few) + len(fresh) <= FEW:
            self._few += fresh
        else:
            self._many, self._few, self._packed, self._rows = [*self._many, *self._few, *fresh], [], [None, None], 0

    def output(self) -> tuple[structs.JoinedMatrices, Tensor]:
        """The output matrix, and the token of each of its rows; it lives as long as this does, or until it changes."""
        self.changed = False
        if self._many and self._packed[0] is None:
            self._packed[0] = self._lexicon.pack(self._many)
        if self._few:
            self._pack_few()
        groups = [group for group in (self._many, self._few) if group]
        packed = [(matrix, len(_full(group))) for matrix, group in zip(filter(None, self._packed), groups, strict=True)]
        return self._lexicon.joint(packed), self._lexicon.ids(groups)

    def _pack_few(self) -> None:
        packed = self._packed[1]
        if packed is None:
            filled = [*self._few, *self._few[-1:] * (FEW - len(self._few))]
            packed, self._rows = self._lexicon.pack(filled), len(self._few)
        for place in range(self._rows, len(self._few)):
            self._lexicon.put(packed, place, self._few[place])
        self._packed[1], self._rows = packed, len(self._few)


def _full(tokens: Seq[int]) -> list[int]:
    """Tiles are full: the last token is repeated to fill the last tile."""
    return [*tokens, *[tokens[-1]] * (-len(tokens) % TILE)]
