"""What can be trained: how it begins, how it is written, and as which drafter it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from outrider.core.errors import OutriderError
from outrider.drafters.block.head import BlockHead, Sequential
from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.heads import files as heads
from outrider.drafters.medusa.head import MedusaHead
from outrider.models.tokenizer import Tokenizer
from outrider.train import block, eagle, medusa
from outrider.train.draft_model import DraftNet
from outrider.train.grow import grown
from outrider.train.job import SHIPPED, TrainingJob
from outrider.train.objective import Comparison, Figures, TeacherBatch
from outrider.train.teacher import Target

CHAIN, TREE = 5, 16  # nodes of the drafts that are measured, as in docs/benchmarks
# Levels of the EAGLE trees that are measured: what a GPU grows unless `length` says otherwise, and more, which pay
# where a head is good. They decide how much is kept, never what is written.
LEVELS = (5, 8)
BLOCK_CHAIN, LARGE_TREES = 7, (32, 64)  # those of block heads, too: longer drafts cost them little
_HEADS = {"eagle": EagleHead, "block": BlockHead, "medusa": MedusaHead}
_LAYERS = {"eagle": 1, "block": block.DEPTH, "medusa": 1, "draft": 4}  # where none are asked for


@dataclass(frozen=True, eq=False)
class Destination:
    """The target that a trained head belongs to, and how it is written out for it."""

    target: Target
    name: str  # of the target
    source: Path  # the target's folder or file
    tokenizer: Tokenizer | None
    whole: bool  # whether heads are written with the target's output rows, as vLLM needs them


def fresh(job: TrainingJob, target: Target, draft_ids: Tensor | None, longest: int) -> nn.Module:
    layers = min(job.layers or _LAYERS[job.kind], target.num_layers)
    if job.kind == "draft":
        return DraftNet(target, layers, longest)
    if job.kind == "medusa":
        return medusa.fresh(target, draft_ids, job.heads, layers)
    if job.kind == "block":
        sequential = cast(Sequential, job.sequential)  # checked by the job
        return block.fresh(target, draft_ids, job.reads, layers, job.block, job.inner, sequential, job.public)
    return eagle.fresh(target, draft_ids, job.reads, layers, inner=job.inner)


def begun(job: TrainingJob, target: Target) -> nn.Module:
    """The head that goes on learning, larger if the job says so."""
    head = heads.find(job.kind, "" if job.begin == SHIPPED else job.begin, target, job.model)
    if not isinstance(head, _HEADS[job.kind]):
        raise OutriderError(f"{job.begin} holds no head of the kind {job.kind}: begin with one that is, or with none")
    if isinstance(head, EagleHead) and (job.inner or job.reads):
        head = grown(head, job.inner, job.reads, target.num_layers)
    return head.train().float().requires_grad_(True)


def loss(student: nn.Module, batch: TeacherBatch, how: Comparison) -> tuple[Tensor, Figures]:
    steps = how.steps
    if isinstance(student, EagleHead):
        return eagle.loss(student, batch, how)
    if isinstance(student, MedusaHead):
        return medusa.loss(student, batch, steps)
    if isinstance(student, BlockHead):
        return block.loss(student, batch)
    assert isinstance(student, DraftNet)
    return student.loss(batch, steps)


def prepare(student: nn.Module, batch: TeacherBatch) -> None:
    """Once, before the first step, with its batch."""
    if isinstance(student, EagleHead):
        eagle.calibrate(student, batch)


def write(student: nn.Module, out: Path, destination: Destination) -> None:
    if isinstance(student, DraftNet):
        student.write(out, destination.source, destination.tokenizer)
        return
    assert isinstance(student, EagleHead | MedusaHead | BlockHead)
    heads.write(student, out, destination.target, destination.name, destination.whole, file_dtype(destination.target))


def file_dtype(target: Target) -> torch.dtype:
    """Of the weights in a file."""
    return torch.float32 if target.dtype == torch.float32 else torch.bfloat16


def specs(kind: str, out: Path) -> dict[str, str]:
    """The drafters that the result is measured as, by their names in the table."""
    if kind == "draft":
        return {f"chain {CHAIN}": f"draft_model:model={out},length={CHAIN}"}
    if kind == "medusa":
        return {"tree": f"medusa:head={out}"}
    if kind == "eagle":
        chain = {f"chain {CHAIN}": f"eagle:head={out},length={CHAIN}"}
        return chain | {f"tree {TREE}, {n} levels": f"eagle:head={out},tree={TREE},length={n}" for n in LEVELS}
    chains = {f"chain {length}": f"block:head={out},length={length}" for length in (CHAIN, BLOCK_CHAIN)}
    return chains | {f"tree {nodes}": f"block:head={out},tree={nodes}" for nodes in (TREE, *LARGE_TREES)}
