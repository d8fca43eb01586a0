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
        return torch.cat([self._ids, *(torch.tensor(_full(group)) for group in groups if group)])

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
        # What `output` gave, and with space for more of the few the tokens of its rows; None: to be made anew
        self._joint: structs.JoinedMatrices | None = None
        self._ids = torch.empty(0, dtype=torch.long)
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
            self._joint = None

    def output(self) -> tuple[structs.JoinedMatrices, Tensor]:
        """The output matrix, and the token of each of its rows; both hold until this is asked again."""
        self.changed = False
        if self._joint is not None and self._packed[1] is not None:
            joint = self._with_few(self._joint, self._packed[1])
        else:
            joint = self._joint = self._made()
        return joint, self._ids[: joint.outputs]

    def _made(self) -> structs.JoinedMatrices:
        if self._many and self._packed[0] is None:
            self._packed[0] = self._lexicon.pack(self._many)
        if self._few:
            self._packed[1], self._rows = self._lexicon.pack(_filled(self._few)), len(self._few)
        groups = [group for group in (self._many, self._few) if group]
        packed = [(matrix, len(_full(group))) for matrix, group in zip(filter(None, self._packed), groups, strict=True)]
        self._ids = self._lexicon.ids([self._many, _filled(self._few)] if self._few else groups)
        return self._lexicon.joint(packed)

    def _with_few(self, joint: structs.JoinedMatrices, packed: Packed) -> structs.JoinedMatrices:
        """The same with those of the few that have come since then, put into their places."""
        last, before = joint.parts[joint.count - 1], self._rows
        first = joint.outputs - last.outputs
        for place in range(before, len(self._few)):
            self._lexicon.put(packed, place, self._few[place])
        self._rows = len(self._few)
        full = _full(self._few)
        self._ids.numpy()[first + before : first + len(full)] = full[before:]
        last.outputs, joint.outputs = len(full), first + len(full)
        return joint


def _filled(few: list[int]) -> list[int]:
    """As many as there is space for."""
    return [*few, *few[-1:] * (FEW - len(few))]


def _full(tokens: Seq[int]) -> list[int]:
    """Tiles are full: the last token is repeated to fill the last tile."""
    return [*tokens, *[tokens[-1]] * (-len(tokens) % TILE)]
