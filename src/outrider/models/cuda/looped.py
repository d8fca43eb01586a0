"""A pass of the target whose table the device writes itself, so that it can run again and again without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.models.cuda import kernels
from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import DevicePass


@dataclass(eq=False)
class LoopedPass:
    """The rows of a sequence stand one after the other, the same number for each sequence."""

    run: DevicePass
    compute: Callable[[], Tensor]  # the pass; the logits of all its rows
    cache: Tensor
    page_table: Tensor
    chosen: Tensor  # [rows] int64: the token that the target chooses after each row
    positions: Tensor  # [rows] int64: where in its text that token stands
    keys: Tensor  # [rows] int64: of the dice
    temperatures: Tensor  # [rows]; 0: the likeliest token
    sampled: bool  # whether any temperature may be above 0
    cuts: Cuts | None  # what is taken out of the laws of sequences that sample, by any rule; None: of nobody's
    block: int  # rows of one sequence that the attention takes at once
    begins: Tensor  # [sequences + 1] int32: where each sequence's pairs begin
    pairs: Tensor  # [sequences, moves, 2] int32: places of nodes that are kept, and where they go

    def send_adapters(self, adapters: Sequence[ReadyAdapter | None]) -> None:
        """Of the sequences, in their places. The device has read what was sent before."""
        if self.run.adapters is not None:
            each = self.run.rows // (len(self.begins) - 1)
            self.run.adapters.send(adapters, [each] * len(adapters))

    @property
    def table(self) -> Tensor:
        """[len(Field), rows] int32"""
        return self.run.meta

    @property
    def hidden(self) -> Tensor:
        """[rows, layers, hidden] of the pass before."""
        assert self.run.hidden is not None
        return self.run.hidden

    def choose(self) -> Tensor:
        """Run the pass, and choose; its logits, without those that are cut."""
        logits = self.compute()
        if self.cuts is not None:
            self.cuts(logits)
        if self.sampled:
            cut = self.cuts is not None
            kernels.choose(logits, self.keys, self.positions, self.temperatures, self.chosen, cut)
        elif self.run.best is not None:
            self.chosen.copy_(self.run.best)
        else:
            kernels.best(logits, kernels.best_workspace(logits), self.chosen)
        return logits

    def move(self) -> None:
        kernels.move(self.cache, self.begins, self.pairs)
