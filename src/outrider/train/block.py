"""A block head as it is trained: how it begins, and its loss over all slots of blocks after the tokens of answers."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.drafters.block.head import BlockAttention, BlockConfig, BlockHead, BlockLayer, Sequential
from outrider.models.base import Readable
from outrider.models.rope import swap_halves
from outrider.train.eagle import attention_values, residual_size, rotations, turned
from outrider.train.forward import placed
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
    state is beside the target's residual. The sequential part adds nothing yet.

    The last token's embedding is turned at random: where a model ties its matrices, the embedding as it is would make
    every slot say the last token once more, and to unlearn that takes most of the first thousand steps."""
    size, first = head.config.hidden_size, target.num_layers - head.config.depth
    head.fc.weight.zero_()
    head.fc.weight[:, -size:] = torch.eye(size)
    head.norm.weight.copy_(target.tensor("model.norm.weight"))
    residual = residual_size(target, max(first - 1, 0))
    for index, layer in enumerate(head.decoder):
        _copy_layer(layer, target, f"model.layers.{first + index}.", residual)
    if head.config.starts:
        torch.nn.init.orthogonal_(head.embed_proj.weight)
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
    """Distillation of every slot (`steps`: of the first few) of the blocks after all tokens of answers, which are where
    drafts begin.

    The figures are those of EAGLE, and `sure`: the cross-entropy of the stated confidence."""
    answers, ids = batch.answers(), None if head.writes_all else head.draft_ids
    laws, output = Laws.of(batch, answers, ids), output_matrix(head, batch.output)
    count = max(1, min(steps or head.config.block, head.config.block, batch.tokens.shape[1] - 2))
    slots, embedded = _slots(head, batch, answers, count)
    return _slot_losses(head, batch, answers, laws, output, slots, embedded)


def output_matrix(head: BlockHead, target: Tensor) -> Tensor:
    """[draft vocabulary, hidden]; `target`: the target's own, [vocab, hidden]."""
    return target if head.writes_all else target[head.draft_ids]


def _slots(head: BlockHead, batch: TeacherBatch, last: AnswerTokens, count: int) -> tuple[Tensor, Tensor]:
    """[slots, n, hidden]: after the layers and the norm, of the blocks after the tokens `last`; and the embeddings of
    all tokens [b * t, hidden]. The first token of a text has no state before it, and no block that means anything."""
    joined, (texts, rows) = head.joined(batch.hidden), batch.tokens.shape
    embedded = F.embedding(batch.tokens, batch.embedding).flatten(0, 1)
    newest = (last.places - 1).clamp(min=0)
    x = head.begin(
        joined.flatten(0, 1).index_select(0, newest),
        embedded.index_select(0, last.places),
        batch.embedding[head.config.mask_token],
        count,
    )
    where = newest.where(last.within > 0, texts * rows)
    turns = rotations(head, rows + count + 1, joined.device)
    slots = torch.arange(count, device=joined.device).unsqueeze(1)
    own = turns[:, last.within + slots]  # [2, slots, n, head_dim]
    for layer in head.decoder:
        x = x + _attend(head.config, layer.self_attn, layer.input_layernorm(x), joined, where, turns[:, :rows], own)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return head.norm(x), embedded


def _attend(
    config: BlockConfig, attention: BlockAttention, x: Tensor, joined: Tensor, where: Tensor, turns: Tensor, own: Tensor
) -> Tensor:
    """x [slots, n, hidden]. Slot j of the block at `where` sees the text's states up to there, and the slots of its own
    block: all, or those up to itself. turns, own: of the text's places and of the slots."""
    groups = config.num_heads // config.num_kv_heads
    q, (k, v) = attention.queries(x), attention.keys_values(x)  # [slots, n, heads, head_dim]
    cos, sin = own.to(q.dtype).unsqueeze(3)
    q, k = (each * cos + swap_halves(each) * sin for each in (q, k))
    k, v = (each.repeat_interleave(groups, 2) for each in (k, v))
    text, values = attention.keys_values(joined)
    text, values = turned(text.transpose(1, 2), turns), values.transpose(1, 2)
    text, values = (each.repeat_interleave(groups, 1) for each in (text, values))
    mixed = block_attention(q, k, v, text, values, where, config.head_dim**-0.5, config.causal)
    return attention.o_proj(mixed.flatten(2))


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, text: Tensor, values: Tensor, where: Tensor, scale: float, causal: bool
) -> Tensor:
    """Values [slots, n, heads, head_dim] of the queries q with keys k and values v of their own blocks, and the keys
    and values of the texts, [b, heads, t, head_dim]. where [n]: the newest place that a block sees, b * t: none."""
    if q.is_cuda and q.dtype != torch.float32:
        from outrider.train.kernels import attend_blocks  # needs triton

        return attend_blocks(q, k, v, text, values, where, scale, causal)
    context, kept = (text, values), where.clamp(max=text.shape[0] * text.shape[2] - 1)
    own = [(placed(key, where, text), placed(value, where, text)) for key, value in zip(k, v, strict=True)]
    mixed = []
    for j, slot in enumerate(q):
        past = [context, *(own[: j + 1] if causal else own)]
        found = attention_values(placed(slot, where, text), past, scale)
        mixed.append(found.transpose(1, 2).flatten(0, 1).index_select(0, kept))
    return torch.stack(mixed)


def _slot_losses(
    head: BlockHead, batch: TeacherBatch, answers: AnswerTokens, laws: Laws, output: Tensor, slots: Tensor,
    embedded: Tensor,
) -> tuple[Tensor, Figures]:  # fmt: skip
    """The sequential part goes along the text; each slot is compared with the target's law of its token."""
    before = head.markov_head.reduced(embedded) if head.config.rank else None
    state = slots.new_zeros(slots.shape[1], head.config.rank)
    total, unsure = slots.new_zeros(()), slots.new_zeros(())
    figures: Figures = {}
    for j, slot in enumerate(slots):
        own, token = slot, None
        if before is not None:
            token = before.index_select(0, (answers.places + j).clamp(max=len(before) - 1))
            g, state = head.markov_head.step(state, token, slot)
            own = slot + head.markov_head.lift(g)
        rows, counts = answers.blocks_before(1 + j)
        part, kept, hit = distances(own.index_select(0, rows), output, laws, counts, VARIATION / ENTROPY)
        weight = counts / counts.sum().clamp(min=1)
        figures[f"keep{j + 1}"], figures[f"hit{j + 1}"] = (kept * weight).sum(), (hit * weight).sum()
        total = total + ENTROPY * math.exp(-j / FADING) * part
        unsure = unsure + _unsure(head, slot, token, rows, kept, weight)
    figures["sure"] = unsure.detach() / len(slots)
    figures["loss"] = total.detach()
    return total + unsure / len(slots), figures


def _unsure(head: BlockHead, slot: Tensor, token: Tensor | None, rows: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
    """The cross-entropy of the stated confidence with what rejection keeps. It changes nothing but the confidence."""
    if not head.config.confidence:
        return weight.new_zeros(())
    states = slot.detach().index_select(0, rows)
    tokens = None if token is None else token.detach().index_select(0, rows).to(states.dtype)
    logits = head.confidence_head(states, tokens).float()
    each = F.binary_cross_entropy_with_logits(logits, kept.clamp(0.0, 1.0), reduction="none")
    return (each * weight).sum()
