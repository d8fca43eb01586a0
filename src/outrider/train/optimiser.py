"""Muon for matrices, AdamW for the rest, one schedule for both: up in a few steps, then down along a cosine."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

LAST = 0.02  # of the peak, at the end


def rate(step: int, warm: int, planned: int) -> float:
    """Share of the peak. While it warms up it does not depend on how many steps are planned."""
    if step < warm:
        return (step + 1) / warm
    if not planned:
        return 1.0
    done = min(1.0, (step - warm) / max(1, planned - warm))
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))


class Optimiser:
    def __init__(self, pupil: nn.Module, peak: float, norm_peak: float) -> None:
        self._named = {name: weight for name, weight in pupil.named_parameters() if weight.requires_grad}
        matrices = [weight for weight in self._named.values() if weight.dim() == 2]
        others = [weight for weight in self._named.values() if weight.dim() != 2]
        self._grads: list[Tensor] = []
        for weight in self._named.values():  # graphs add to them where they are
            weight.grad = torch.zeros_like(weight)
            self._grads.append(weight.grad)
        self._parts: list[tuple[Optimizer, float]] = []
        if matrices:
            self._parts.append((Muon(matrices, lr=peak, weight_decay=0.0), peak))
        if others:
            self._parts.append((AdamW(others, lr=norm_peak, betas=(0.9, 0.99), weight_decay=0.0), norm_peak))

    def step(self, share: float) -> None:
        for part, peak in self._parts:
            for group in part.param_groups:
                group["lr"] = peak * share
            part.step()
        torch._foreach_zero_(self._grads)

    def state(self) -> dict[str, Tensor]:
        """Its memory, by the parameter's name."""
        return {
            f"{name}.{key}": value
            for part, _ in self._parts
            for name, weight in self._named.items()
            for key, value in part.state.get(weight, {}).items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for part, _ in self._parts:
            mine = {id(weight) for group in part.param_groups for weight in group["params"]}
            for name, weight in self._named.items():
                if id(weight) in mine:
                    part.state[weight] = {
                        key: _beside(value, key, weight) for key, value in _of(state, name + ".").items()
                    }


def _of(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.rpartition(".")[0] + "." == prefix}


def _beside(value: Tensor, key: str, weight: Tensor) -> Tensor:
    """AdamW counts its steps on the host."""
    return value.clone() if key == "step" else value.to(weight.device, torch.float32, copy=True)
