"""What can be trained: how it begins, how it is written, and as which drafter it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.heads import files as heads
from outrider.drafters.medusa.head import MedusaHead
from outrider.models.tokenizer import Tokenizer
from outrider.train import eagle, medusa
from outrider.train.capture import Target
from outrider.train.job import Job
from outrider.train.net import DraftNet
from outrider.train.objective import Figures, Lesson

CHAIN, TREE = 5, 16  # nodes of the drafts that figures are given for
_LAYERS = {"eagle": 1, "medusa": 1, "draft": 4}


@dataclass(frozen=True, eq=False)
class Home:
    """Where what is trained belongs."""

    target: Target
    name: str  # of the target
    source: Path  # its folder or file
    tokenizer: Tokenizer | None
    whole: bool  # with the target's output rows, as vLLM needs them


def fresh(job: Job, target: Target, draft_ids: Tensor | None, longest: int) -> nn.Module:
    layers = min(job.layers or _LAYERS[job.kind], target.num_layers)
    if job.kind == "draft":
        return DraftNet(target, layers, longest)
    if job.kind == "medusa":
        return medusa.fresh(target, draft_ids, job.heads, layers)
    return eagle.fresh(target, draft_ids, job.reads, layers)


def loss(pupil: nn.Module, lesson: Lesson, steps: int) -> tuple[Tensor, Figures]:
    """The loss of whatever is trained, over `steps` draft steps."""
    if isinstance(pupil, EagleHead):
        return eagle.loss(pupil, lesson, steps)
    if isinstance(pupil, MedusaHead):
        return medusa.loss(pupil, lesson, steps)
    assert isinstance(pupil, DraftNet)
    return pupil.loss(lesson, steps)


@torch.no_grad()
def calibrate(pupil: nn.Module, lesson: Lesson) -> None:
    """What an EAGLE head's layers add is brought to the size of the state they add it to: that is normalised, while the
    target's own layers wrote for residuals many times as large."""
    if isinstance(pupil, EagleHead):
        residuals = lesson.hidden[lesson.mask][:, -1].float()  # [tokens, hidden] after the last block that it reads
        size = residuals.square().mean(-1).sqrt().median()
        for layer in pupil.decoder:
            layer.self_attn.o_proj.weight /= size
            layer.mlp.down_proj.weight /= size


def write(pupil: nn.Module, out: Path, home: Home) -> None:
    if isinstance(pupil, DraftNet):
        pupil.write(out, home.source, home.tokenizer)
        return
    assert isinstance(pupil, EagleHead | MedusaHead)
    dtype = torch.float32 if home.target.dtype == torch.float32 else torch.bfloat16
    heads.write(pupil, out, home.target, home.name, home.whole, dtype)


def specs(kind: str, out: Path) -> dict[str, str]:
    """The drafters that the result is measured as, by what to call them."""
    if kind == "draft":
        return {f"chain {CHAIN}": f"draft_model:model={out},length={CHAIN}"}
    if kind == "medusa":
        return {"tree": f"medusa:head={out}"}
    chain = f"eagle:head={out},length={CHAIN}"
    return {f"chain {CHAIN}": chain, f"tree {TREE}": f"eagle:head={out},tree={TREE}"}
