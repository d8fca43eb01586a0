"""The kernel between the target's verdicts and the head where the host does not look: what was kept becomes the table
of the head's next pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.drafters.eagle.device_kernels import SequenceField
from outrider.drafters.rounds.kernels import POWER, RoundField
from outrider.models.cuda.batch import Field
from outrider.models.cuda.launch import begin_after, early, nearly_done

_TOKEN = tl.constexpr(int(Field.TOKEN))
_POSITION = tl.constexpr(int(Field.POSITION))
_PLACE = tl.constexpr(int(Field.PLACE))
_ROW_SLOT = tl.constexpr(int(Field.SLOT))
_BASE = tl.constexpr(int(Field.BASE))
_END = tl.constexpr(int(Field.END))
_LOW = tl.constexpr(int(Field.LOW))
_HIGH = tl.constexpr(int(Field.HIGH))
_HELD = tl.constexpr(int(Field.HELD))
_BLOCK_ROW = tl.constexpr(int(Field.BLOCK_ROW))
_BLOCK_COUNT = tl.constexpr(int(Field.BLOCK_COUNT))
_BLOCK_TREE = tl.constexpr(int(Field.BLOCK_TREE))
_SOURCE = tl.constexpr(len(Field))
_HEAD_SLOT = tl.constexpr(int(SequenceField.SLOT))
_HEAD_LENGTH = tl.constexpr(int(SequenceField.LENGTH))
_HEAD_LAST = tl.constexpr(int(SequenceField.LAST))
_TOKENS = tl.constexpr(int(SequenceField.TOKENS))
_TEXT_LENGTH = tl.constexpr(int(RoundField.LENGTH))


@triton.jit(do_not_specialize=["count", "padding", "wide", "nodes"])
def _enter_kept(
    kept_ptr, texts_ptr, sequences_ptr, table_ptr, count, padding, wide, nodes,
    BLOCK: tl.constexpr, WP: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """The head's table, `wide` rows of each sequence: the tokens that were kept, each with the row of the target's pass
    whose state it follows."""
    begin_after(SOON)
    nearly_done(SOON)
    seq, place = tl.program_id(0), tl.arange(0, WP)
    stride = count * wide
    record = kept_ptr + seq * (1 + 2 * wide)
    taken = tl.load(record)
    held = tl.load(sequences_ptr + _HEAD_LENGTH * count + seq)
    slot = tl.load(sequences_ptr + _HEAD_SLOT * count + seq)
    inside, live = place < wide, place < taken
    to = table_ptr + seq * wide + place
    tl.store(to + _TOKEN * stride, tl.load(record + 1 + place, mask=live, other=0), mask=inside)
    tl.store(to + _POSITION * stride, tl.where(live, held + place, 0), mask=inside)
    tl.store(to + _PLACE * stride, tl.where(live, held + place, 0), mask=inside)
    tl.store(to + _ROW_SLOT * stride, tl.where(live, slot, padding), mask=inside)
    tl.store(to + _BASE * stride, tl.where(live, held + taken, 0), mask=inside)
    tl.store(to + _END * stride, tl.where(live, held + taken, 0), mask=inside)
    tl.store(to + _HELD * stride, tl.where(live, held, 0), mask=inside)
    tl.store(to + _LOW * stride, tl.zeros([WP], tl.int32), mask=inside)
    tl.store(to + _HIGH * stride, tl.zeros([WP], tl.int32), mask=inside)
    leads = live & (place % BLOCK == 0)
    tl.store(to + _BLOCK_ROW * stride, tl.where(leads, seq * wide + place, 0), mask=inside)
    tl.store(to + _BLOCK_COUNT * stride, tl.where(leads, tl.minimum(taken - place, BLOCK), 0), mask=inside)
    tl.store(to + _BLOCK_TREE * stride, tl.zeros([WP], tl.int32), mask=inside)
    source = seq * (1 + nodes) + tl.load(record + 1 + wide + place, mask=live, other=0)
    tl.store(to + _SOURCE * stride, tl.where(live, source, 0), mask=inside)
    tl.store(sequences_ptr + _HEAD_LENGTH * count + seq, held + taken)
    tl.store(sequences_ptr + _HEAD_LAST * count + seq, seq * wide + tl.maximum(taken - 1, 0))
    tl.store(sequences_ptr + _TOKENS * count + seq, tl.load(texts_ptr + _TEXT_LENGTH * count + seq) + 1)


def enter_kept(
    kept: Tensor, texts: Tensor, sequences: Tensor, table: Tensor, nodes: int, block: int, padding: int
) -> None:
    """`kept` [sequences, 1 + 2 wide]: how many tokens, the tokens, and of each the row of its sequence whose state it
    follows. `table` [len(Field) + 1, sequences * wide]. Afterwards the head holds them."""
    count, wide, soon = len(kept), (kept.shape[1] - 1) // 2, early(kept.device)
    _enter_kept[(count,)](
        kept, texts, sequences, table, count, padding, wide, nodes, block, POWER, soon, num_warps=1, launch_pdl=soon
    )
