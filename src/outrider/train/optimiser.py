"""Muon for matrices, AdamW for the rest, one schedule for both: up in a few steps, then down along a cosine."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from outrider.train.step import GraphRecorder

LAST = 0.02  # share of the peak rate at the end of the cosine
EAGER = 3  # steps before a graph is recorded: all that is allocated once is there by then


def rate(step: int, warm: int, planned: int) -> float:
    """Share of the peak. While it warms up it does not depend on how many steps are planned."""
    if step < warm:
        return (step + 1) / warm
    if not planned:
        return 1.0
    done = min(1.0, (step - warm) / max(1, planned - warm))
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))


class Optimiser:
    def __init__(self, student: nn.Module, peak: float, norm_peak: float) -> None:
        self._named = {name: weight for name, weight in student.named_parameters() if weight.requires_grad}
        self._grads: list[Tensor] = []
        for weight in self._named.values():  # graphs add to them where they are
            weight.grad = torch.zeros_like(weight)
            self._grads.append(weight.grad)
        self._matrices: list[Tensor] = [weight for weight in self._named.values() if _is_matrix(weight)]
        others = [weight for weight in self._named.values() if not _is_matrix(weight)]
        self._muon = Muon(self._matrices, lr=peak, weight_decay=0.0) if self._matrices else None
        self._adam = AdamW(others, lr=norm_peak, betas=(0.9, 0.99), weight_decay=0.0) if others else None
        self._norm_peak = norm_peak
        self._share = torch.ones((), device=next(iter(self._named.values())).device)
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, share: float) -> None:
        """`share`: of the peak rates."""
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = self._norm_peak * share
            self._adam.step()
        if self._muon is not None:
            self._share.fill_(share)
            self._step_matrices(self._muon)
        torch._foreach_zero_(self._grads)
        self._steps += 1

    def _step_matrices(self, muon: Muon) -> None:
        """Some hundred tiny kernels: on a GPU one graph."""
        if self._graph is None and self._share.is_cuda and self._steps == EAGER:
            self._graph, _ = GraphRecorder().record(lambda: self._move(muon))
        if self._graph is None:
            self._move(muon)
        else:
            self._graph.replay()

    @torch.no_grad()
    def _move(self, muon: Muon) -> None:
        """A step at the peak rate, of which the share is kept: a graph cannot be told another rate."""
        before = [weight.detach().clone() for weight in self._matrices]
        muon.step()
        change = torch._foreach_sub(self._matrices, before)
        torch._foreach_mul_(change, self._share)
        torch._foreach_add_(before, change)
        torch._foreach_copy_(self._matrices, before)

    @property
    def _parts(self) -> list[Optimizer]:
        return [part for part in (self._muon, self._adam) if part is not None]

    def state(self) -> dict[str, Tensor]:
        """Its memory, by the parameter's name."""
        return {
            f"{name}.{key}": value
            for part in self._parts
            for name, weight in self._named.items()
            for key, value in part.state.get(weight, {}).items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Before the first step."""
        for part in self._parts:
            mine = {id(weight) for group in part.param_groups for weight in group["params"]}
            for name, weight in self._named.items():
                if id(weight) in mine:
                    part.state[weight] = {
                        key: _beside(value, key, weight) for key, value in _of(state, name + ".").items()
                    }


def _is_matrix(weight: Tensor) -> bool:
    """A single row is none: Muon would move it by the whole rate in every step, however small its gradient is."""
    return weight.dim() == 2 and min(weight.shape) > 1


def _of(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.rpartition(".")[0] + "." == prefix}


def _beside(value: Tensor, key: str, weight: Tensor) -> Tensor:
    """AdamW counts its steps on the host."""
    return value.clone() if key == "step" else value.to(weight.device, torch.float32, copy=True)
