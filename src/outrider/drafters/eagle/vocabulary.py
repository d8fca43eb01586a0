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

FEW = 48  # rare tokens that came one by one; more join those of the prompt


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

    def joint(self, groups: Seq[Packed]) -> structs.JoinedMatrices:
        """The output matrix of the common tokens and of these."""
        first = structs.Matrix.from_buffer_copy(self._output.joint.parts[0])
        first.outputs = self._common
        joint = structs.JoinedMatrices(
            count=1 + len(groups),
            outputs=self._common + sum(group.outputs for group in groups),
            activations=self._output.joint.activations,
        )
        joint.parts[0] = first
        for place, group in enumerate(groups, 1):
            joint.parts[place] = group.joint.parts[0]
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


class TextVocabulary:
    """The tokens of one sequence's chains."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self._seen: set[int] = set()
        self._groups: list[list[int]] = [[], []]  # rare tokens: of long texts, and of single steps
        self._packed: list[Packed | None] = [None, None]
        self.changed = True  # since `output` was last asked for

    def add(self, tokens: Iterable[int]) -> None:
        """They are in the text."""
        fresh = [token for token in dict.fromkeys(tokens) if token in self._lexicon.rare and token not in self._seen]
        if not fresh:
            return
        self._seen.update(fresh)
        self.changed = True
        many, few = self._groups
        if len(few) + len(fresh) <= FEW:
            self._groups, self._packed[1] = [many, few + fresh], None
        else:
            self._groups, self._packed = [many + few + fresh, []], [None, None]

    def output(self) -> tuple[structs.JoinedMatrices, Tensor]:
        """The output matrix, and the token of each of its rows; it lives as long as this does, or until it changes."""
        self.changed = False
        for place, group in enumerate(self._groups):
            if group and self._packed[place] is None:
                self._packed[place] = self._lexicon.pack(group)
        packed = [matrix for matrix in self._packed if matrix is not None]
        return self._lexicon.joint(packed), self._lexicon.ids([group for group in self._groups if group])


def _full(tokens: Seq[int]) -> list[int]:
    """Tiles are full: the last token is repeated to fill the last tile."""
    return [*tokens, *[tokens[-1]] * (-len(tokens) % TILE)]
