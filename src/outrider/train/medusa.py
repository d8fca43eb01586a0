"""Medusa heads as they are trained: how they begin, and their loss."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.drafters.medusa.head import MedusaConfig, MedusaHead
from outrider.models.base import Readable
from outrider.train.objective import STEP_DECAY, Figures, Laws, TeacherBatch, distance


def fresh(target: Readable, draft_ids: Tensor | None = None, num_heads: int = 4, depth: int = 1) -> MedusaHead:
    """Heads to be trained. They begin as the target's own: blocks of zeros let the state through."""
    count = target.vocab_size if draft_ids is None else len(draft_ids)
    config = MedusaConfig(target.anatomy.hidden_size, target.vocab_size, count, num_heads, depth)
    head = MedusaHead(config, draft_ids)
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
    return head


def loss(head: MedusaHead, batch: TeacherBatch, steps: int = 0) -> tuple[Tensor, Figures]:
    """Distillation of every head (`steps`: of the first few); figures as those of EAGLE. Head j at place s guesses
    token s + 2 + j."""
    answers, ids = batch.answers(), None if head.writes_all else head.draft_ids
    laws, last, figures = Laws.of(batch, answers, ids), batch.last.flatten(0, 1), {}
    total = torch.zeros((), device=batch.last.device)
    for step, block in enumerate(head.blocks[: min(steps or len(head.blocks), batch.tokens.shape[1] - 2)]):
        places, counts = answers.before(2 + step)
        state, output = block(last[places]), _output_matrix(head, step, batch.output)
        part, figures[f"keep{step + 1}"], figures[f"hit{step + 1}"] = distance(state, output, laws, counts)
        total = total + STEP_DECAY**step * part
    figures["loss"] = total.detach()
    return total, figures


def _output_matrix(head: MedusaHead, index: int, target: Tensor) -> Tensor:
    """[draft vocabulary, hidden]; `target`: the target's own, [vocab, hidden]."""
    if head.config.own_output:
        return head.outputs[index].weight
    return target if head.writes_all else target[head.draft_ids]
