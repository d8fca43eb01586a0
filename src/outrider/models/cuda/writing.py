"""Tokens that the target writes by itself on a GPU, in parts: while the host reads one the device is at the next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from outrider.models.cuda.cuts import Cuts
from outrider.models.cuda.graphs import DevicePass, NoEvent, event, pinned

IN_FLIGHT = 2  # parts


@dataclass(eq=False)
class Writing:
    """Some sequences, and where they stand on the device."""

    ids: tuple[int, ...]
    run: DevicePass
    longest: int  # tokens of a text that the pass is made for
    keys: Tensor | None  # [sequences] int64: of the dice; None: all take the likeliest token
    heat: Tensor  # [sequences] temperatures; 0: the likeliest token
    drawn: Tensor | None  # [sequences] temperatures of those that draw as rejection does, 0: of others; None: nobody
    cuts: Cuts | None  # what is taken out of their laws; None: of nobody's
    positions: Tensor  # [sequences] int64: of the token to be written


@dataclass(frozen=True, eq=False)
class WrittenPart:
    tokens: Tensor  # [steps, sequences] on the host, once it is `done`
    hidden: Tensor | None
    first: bool
    done: torch.cuda.Event | NoEvent

    @property
    def steps(self) -> int:
        return len(self.tokens)


class HostCopies:
    """Places on the host for the parts in flight, by turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places = cycle([_HostPlace(torch.empty(0, dtype=torch.int64), event(device)) for _ in range(IN_FLIGHT)])

    def next(self, written: Tensor) -> tuple[Tensor, torch.cuda.Event | NoEvent]:
        """A copy that is there when the event is over."""
        place = next(self._places)
        if len(place.memory) < written.numel():
            place.memory = pinned(written.numel(), self._device, torch.int64)
        copy = place.memory[: written.numel()].view(written.shape)
        copy.copy_(written, non_blocking=True)
        place.done.record()
        return copy, place.done


@dataclass(eq=False)
class _HostPlace:
    memory: Tensor
    done: torch.cuda.Event | NoEvent
