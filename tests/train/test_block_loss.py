"""The loss of a block head: blocks begin at tokens of answers, and the GPU's attention is that of plain torch."""

from types import SimpleNamespace

import pytest
import torch
from tiny import VOCAB, block_head, family

from outrider.train import block
from outrider.train.data.batches import TextBatch
from outrider.train.objective import AnswerTokens
from outrider.train.teacher import Teacher


def flash(q, k, v, dropout, causal, _, scale):
    """A CPU's flash attention in the words of a GPU's."""
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    return out, total, *[None] * 7


def flash_backward(above, q, k, v, out, total, a, b, c, d, dropout, causal, e, f, scale):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(above, q, k, v, out, total, dropout, causal, scale=scale)


class FlashOfCPU:
    """torch, but for these two operators."""

    ops = SimpleNamespace(
        aten=SimpleNamespace(
            _scaled_dot_product_flash_attention=flash, _scaled_dot_product_flash_attention_backward=flash_backward
        )
    )

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("causal", [True, False])
def test_a_gpu_attends_as_plain_torch_does(causal, monkeypatch):
    """Two texts of 9 tokens, 5 blocks of 3 slots, of which the last two belong nowhere: values and all gradients."""
    kernels = pytest.importorskip("outrider.train.kernels")
    monkeypatch.setattr(kernels, "torch", FlashOfCPU())
    made = torch.Generator().manual_seed(0)
    own = [torch.randn(3, 5, 2, 8, generator=made, requires_grad=True) for _ in range(3)]
    texts = [torch.randn(2, 2, 9, 8, generator=made, requires_grad=True) for _ in range(2)]
    where, above = torch.tensor([3, 4, 16, 18, 18]), torch.randn(3, 5, 2, 8, generator=made)
    above[:, 3:] = 0.0
    found = []
    for attend in (block.block_attention, kernels.attend_blocks):
        mixed = attend(*own, *texts, where, 0.3, causal)
        found.append([mixed[:, :3], *torch.autograd.grad((mixed * above).sum(), [*own, *texts])])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_blocks_begin_at_tokens_of_answers():
    """Texts of 6 tokens: answers from place 3 of the first and from place 0 of the second, padded with 0."""
    answers = AnswerTokens(known := torch.tensor([3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0]), known % 6)
    rows, counts = answers.blocks_before(1)
    assert known[rows][counts].tolist() == [3, 4, 7, 8, 9, 10]
    rows, counts = answers.blocks_before(2)
    assert known[rows][counts].tolist() == [3, 7, 8, 9]


def test_what_is_padded_changes_nothing():
    """A GPU's batches have some places more than tokens of answers."""
    torch.manual_seed(0)
    _, model, _ = family("llama")
    head = block_head(model)
    tokens, mask = torch.randint(VOCAB, (2, 20)), torch.arange(20).expand(2, -1) >= torch.tensor([[5], [11]])
    known = mask.flatten().nonzero().squeeze(1)
    teacher, found = Teacher(model, head.reads, 32), []
    for places in (known, torch.nn.functional.pad(known, (0, 7))):
        loss, figures = block.loss(head, teacher.read(TextBatch(tokens, mask, places)))
        found.append([loss, *figures.values(), *torch.autograd.grad(loss, list(head.parameters()))])
    for bare, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, bare, rtol=1e-5, atol=1e-7)


def test_a_fresh_head_does_not_say_the_last_token_once_more():
    """Where the output matrix is the embedding, an embedding that stands in a slot as it is says its own token."""
    head = block.fresh(family("llama")[1])
    embedding = torch.nn.functional.normalize(
        torch.randn(200, head.config.hidden_size, generator=torch.Generator().manual_seed(3)), dim=1
    )
    with torch.no_grad():
        said = (head.embed_proj(embedding) @ embedding.T).argmax(1)
        assert torch.allclose(head.embed_proj(embedding).norm(dim=1), torch.ones(200), atol=1e-5)  # none is lost
    assert float((said == torch.arange(200)).float().mean()) < 0.1
