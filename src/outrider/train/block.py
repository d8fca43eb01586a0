"""A block head as it is trained: how it begins, and its loss over all slots of a block after every place of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.block.head import BlockAttention, BlockConfig, BlockHead, BlockLayer, Sequential
from outrider.models.base import Readable
from outrider.train.eagle import attention_values, residual_size, rotations, shifted, turned
from outrider.train.objective import AnswerTokens, Figures, Laws, TeacherBatch, distances
from outrider.train.widths import inner_size, kept_inner

BLOCK, DEPTH, READ, RANK = (
    8,
    3,
    5,
    256,
)  # tokens of a block, layers, blocks of the target that are read, sequential rank
# Of a slot's loss, DSpark's: a tenth cross-entropy and the rest total variation, each slot exp(-1/4) of the one before.
ENTROPY, VARIATION, FADING = 0.1, 0.9, 4.0
SLOT_SIZE = 0.3  # of the numbers that the slots of unknown tokens begin with, beside states of size 1


def fresh(
    target: Readable,
    draft_ids: Tensor | None = None,
    layers: Seq[int] = (),
    depth: int = 0,
    block: int = 0,
    inner: int = 0,
    sequential: Sequential = "rnn",
    public: bool = False,
) -> BlockHead:
    """A head to be trained, begun from the target's last layers. `layers`: blocks to read; (): five, evenly. `inner`:
    numbers inside its layers; 0: what suits. `public`: only what vLLM's DSpark has, too."""
    body, n = target.anatomy, target.num_layers
    layers = tuple(sorted(set(layers) or {max(0, round(n * i / READ) - 1) for i in range(1, READ + 1)}))
    depth = min(depth or DEPTH, n)
    if not all(0 <= layer < n for layer in layers):
        raise OutriderError(f"a head cannot read blocks {layers}: the target has {n} blocks")
    config = BlockConfig(
        body.hidden_size,
        body.num_heads,
        body.num_kv_heads,
        body.head_dim,
        inner_size(body, inner),
        body.norm_eps,
        body.rope_theta,
        target.vocab_size,
        target.vocab_size if draft_ids is None else len(draft_ids),
        layers,
        block or BLOCK,
        depth,
        target.context,
        rank=min(RANK, body.hidden_size),
        sequential=sequential,
        starts=not public,
        causal=not public,
        qk_norm=public,
        mask_token=target.vocab_size - 1,
        attention_bias=body.bias,
    )
    head = BlockHead(config, draft_ids)
    with torch.no_grad():
        _begin(head, target)
    return head


def _begin(head: BlockHead, target: Readable) -> None:
    """The last block's state goes through; the layers are the target's last, and what they add is made as small as the
    state is beside the target's residual. The sequential part adds nothing yet."""
    size, first = head.config.hidden_size, target.num_layers - head.config.depth
    head.fc.weight.zero_()
    head.fc.weight[:, -size:] = torch.eye(size)
    head.norm.weight.copy_(target.tensor("model.norm.weight"))
    residual = residual_size(target, max(first - 1, 0))
    for index, layer in enumerate(head.decoder):
        _copy_layer(layer, target, f"model.layers.{first + index}.", residual)
    if head.config.starts:
        head.embed_proj.weight.copy_(torch.eye(size))
        head.slots.normal_(0.0, SLOT_SIZE)
    if head.config.rank:
        head.markov_head.lift.weight.zero_()


def _copy_layer(layer: BlockLayer, target: Readable, prefix: str, residual: float) -> None:
    kept = kept_inner(target, prefix, layer.mlp.down_proj.in_features)
    for name, weight in layer.named_parameters():
        if "input_layernorm" in name or "q_norm" in name or "k_norm" in name:
            continue  # stay 1: what the target's norm does is in the matrices that read it
        taken = target.tensor(prefix + name).float()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            taken = taken * target.tensor(prefix + "input_layernorm.weight").float()
        if kept is not None and "mlp." in name:
            taken = taken[:, kept] if "down_proj" in name else taken[kept]
        weight.copy_(taken / residual if name.endswith(("o_proj.weight", "down_proj.weight")) else taken)


def loss(head: BlockHead, batch: TeacherBatch, steps: int = 0) -> tuple[Tensor, Figures]:
    """Distillation of every slot (`steps`: of the first few) of the blocks after all places of the text.

    The figures are those of EAGLE, and `sure`: the cross-entropy of the stated confidence."""
    answers, ids = batch.answers(), None if head.writes_all else head.draft_ids
    laws, output = Laws.of(batch, answers, ids), output_matrix(head, batch.output)
    count = max(1, min(steps or head.config.block, head.config.block, batch.tokens.shape[1] - 2))
    slots, embedded = _slots(head, batch, count)
    return _slot_losses(head, batch, answers, laws, output, slots, embedded)


def output_matrix(head: BlockHead, target: Tensor) -> Tensor:
    """[draft vocabulary, hidden]; `target`: the target's own, [vocab, hidden]."""
    return target if head.writes_all else target[head.draft_ids]


def _slots(head: BlockHead, batch: TeacherBatch, count: int) -> tuple[Tensor, Tensor]:
    """[slots, b, t, hidden]: after the layers and the norm, of the block whose last token stands at place t + 1; and
    the embeddings of the tokens [b, t, hidden]."""
    joined, rows = head.joined(batch.hidden), batch.tokens.shape[1]
    embedded = F.embedding(batch.tokens, batch.embedding)
    last = torch.cat([embedded[:, 1:], torch.zeros_like(embedded[:, :1])], 1)
    x = head.begin(joined, last, batch.embedding[head.config.mask_token], count)
    turns = rotations(head, rows + count + 1, joined.device)
    for layer in head.decoder:
        x = x + _attend(head.config, layer.self_attn, layer.input_layernorm(x), joined, turns)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return head.norm(x), embedded


def _attend(config: BlockConfig, attention: BlockAttention, x: Tensor, joined: Tensor, turns: Tensor) -> Tensor:
    """Slot j of place s sees the states up to s, and the slots of its own block: all, or those up to itself."""
    n, rows = x.shape[0], x.shape[2]
    q, (k, v) = attention.queries(x), attention.keys_values(x)
    context = _spread(config, *attention.keys_values(joined), turns[:, :rows])
    own = [_spread(config, k[j], v[j], turns[:, 1 + j : 1 + j + rows]) for j in range(n)]
    values = []
    for j in range(n):
        query = turned(q[j].transpose(1, 2), turns[:, 1 + j : 1 + j + rows])
        past = [context, *own[: j + 1 if config.causal else n]]
        values.append(attention_values(query, past, config.head_dim**-0.5).transpose(1, 2).flatten(2))
    return attention.o_proj(torch.stack(values))


def _spread(config: BlockConfig, k: Tensor, v: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """[b, t, kv_heads, head_dim] -> [b, heads, t, head_dim], keys rotated."""
    groups = config.num_heads // config.num_kv_heads
    k, v = turned(k.transpose(1, 2), turns), v.transpose(1, 2)
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _slot_losses(
    head: BlockHead, batch: TeacherBatch, answers: AnswerTokens, laws: Laws, output: Tensor, slots: Tensor,
    embedded: Tensor,
) -> tuple[Tensor, Figures]:  # fmt: skip
    """The sequential part goes along the text; each slot is compared with the target's law of its token."""
    before = head.markov_head.reduced(embedded) if head.config.rank else None
    state = slots.new_zeros(*slots.shape[1:3], head.config.rank)
    total, unsure = slots.new_zeros(()), slots.new_zeros(())
    figures: Figures = {}
    for j, slot in enumerate(slots):
        own, token = slot, None if before is None else shifted(before, 1 + j)
        if token is not None:
            g, state = head.markov_head.step(state, token, slot)
            own = slot + head.markov_head.lift(g)
        places, counts = answers.before(2 + j)
        rows = own.flatten(0, 1).index_select(0, places)
        part, kept, hit = distances(rows, output, laws, counts, VARIATION / ENTROPY)
        weight = counts / counts.sum().clamp(min=1)
        figures[f"keep{j + 1}"], figures[f"hit{j + 1}"] = (kept * weight).sum(), (hit * weight).sum()
        total = total + ENTROPY * math.exp(-j / FADING) * part
        unsure = unsure + _unsure(head, slot, token, places, kept, weight)
    figures["sure"] = unsure.detach() / len(slots)
    figures["loss"] = total.detach()
    return total + unsure / len(slots), figures


def _unsure(
    head: BlockHead, slot: Tensor, token: Tensor | None, places: Tensor, kept: Tensor, weight: Tensor
) -> Tensor:
    """The cross-entropy of the stated confidence with what rejection keeps. It changes nothing but the confidence."""
    if not head.config.confidence:
        return weight.new_zeros(())
    rows = slot.detach().flatten(0, 1).index_select(0, places)
    tokens = None if token is None else token.detach().flatten(0, 1).index_select(0, places)
    logits = head.confidence_head(rows, None if tokens is None else tokens.to(rows.dtype)).float()
    each = F.binary_cross_entropy_with_logits(logits, kept.clamp(0.0, 1.0), reduction="none")
    return (each * weight).sum()
