"""A Medusa tree from measurements: how often the token of each rank of each head is the right one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.heads import files as heads
from outrider.drafters.medusa.drafter import RANKS, grow_paths
from outrider.drafters.medusa.head import MedusaHead, Paths
from outrider.models.load import Loaded, load
from outrider.models.weights import LoadOptions
from outrider.train.atomic import write_text
from outrider.train.data.batches import BatchOrder
from outrider.train.data.writer import MEAN_TOKENS, CorpusWriter, Show
from outrider.train.job import TrainingJob
from outrider.train.objective import TeacherBatch
from outrider.train.teacher import Teacher

LONGEST, BATCH = 1024, 4096  # tokens of a text, and of a batch: as in training
SEED = 1  # of the conversations: others than a head learns from by default (seed 0)


@dataclass(frozen=True)
class TunedTree:
    rates: list[list[float]]  # [heads][ranks]
    paths: Paths

    @property
    def expected(self) -> float:
        """Tokens per pass, if the heads were right independently of each other."""
        reach = (math.prod(self.rates[depth][rank] for depth, rank in enumerate(path)) for path in self.paths)
        return 1.0 + sum(reach)


def tune(
    model: str, head: Path, where: LoadOptions, nodes: int, tokens: int, prompts: Sequence[str], show: Show
) -> TunedTree:
    """Measure, grow, and write the tree into the head's config."""
    show(f"loading {model}", 0, None)
    loaded = load(model, where)
    longest = min(LONGEST, loaded.model.context)
    teacher = Teacher(loaded.model, (), longest)
    medusa = heads.read(head, teacher.model)
    if not isinstance(medusa, MedusaHead):
        raise OutriderError(f"{head} holds an EAGLE head, which grows its trees as it writes; tune-tree is for medusa")
    found = rates(medusa.to(where.device), _batches(loaded, teacher, where, tokens, prompts, show))
    tuned = TunedTree(found, grow_paths(found, nodes))
    _keep(head, tuned.paths)
    return tuned


def _batches(
    loaded: Loaded, teacher: Teacher, where: LoadOptions, tokens: int, prompts: Sequence[str], show: Show
) -> Iterator[TeacherBatch]:
    """From conversations that the target writes now."""
    kind = where.device.type
    writer = CorpusWriter(loaded, TrainingJob("medusa", tokens=tokens, seed=SEED), kind, prompts)
    done = itertools.count()
    conversations = max(1, tokens // MEAN_TOKENS)
    corpus = writer.wave(0, conversations, lambda count: show("the target writes", next(done) if count else 0, None))
    order = BatchOrder(corpus, BATCH, teacher.longest, 0, where.device)
    return (teacher.read(batch) for batch in itertools.islice(order.batches(0), order.per_epoch))


def _keep(head: Path, paths: Paths) -> None:
    config = json.loads((head / "config.json").read_text())
    write_text(head / "config.json", json.dumps({**config, "medusa_choices": paths}, indent=2) + "\n")


@torch.no_grad()
def rates(head: MedusaHead, batches: Iterable[TeacherBatch]) -> list[list[float]]:
    """[heads][ranks]: against the token that the target finds likeliest, on the tokens of answers."""
    ranks = min(RANKS, len(head.draft_ids))
    found, counted = torch.zeros(head.config.num_heads, ranks), torch.zeros(head.config.num_heads, 1)
    for batch in batches:
        right = (batch.last @ batch.output.to(batch.last.dtype).T).argmax(-1)  # [b, t]: the token after each place
        for index in range(head.config.num_heads):
            hit, counts = _hits(head, index, batch, right, ranks)
            found[index] += hit[counts].sum(0).cpu()
            counted[index] += counts.sum().cpu()
    return [[round(share, 5) for share in row] for row in (found / counted.clamp(min=1)).tolist()]


def _hits(head: MedusaHead, index: int, batch: TeacherBatch, right: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """[b, places, ranks] whether each rank of one head is right, and [b, places] which places count."""
    until = batch.tokens.shape[1] - 2 - index
    state = head.blocks[index](batch.last[:, :until].to(next(head.parameters()).dtype))
    own = head.outputs[index].weight if head.config.own_output else batch.output[head.draft_ids]
    logits = F.linear(state, own.to(state.dtype))
    truth = right[:, 1 + index : 1 + index + until]
    return head.draft_ids[logits.topk(ranks).indices] == truth.unsqueeze(-1), batch.mask[:, 2 + index :]
