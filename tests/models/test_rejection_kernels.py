"""The rule of rejection on a GPU, interpreted: every draw and every verdict is core's own."""

import math
import random

import pytest
import torch
from looped import draft_table
from tiny import assert_follows, assert_rate

from outrider.core.dice import Dice
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.sampling import warp
from outrider.core.sequence import Sequence
from outrider.core.verify import rejection
from outrider.models.cuda.rejection import ChainDraws, verify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu")

NODES, HEADER, SIZES = 12, 2, (40, 9000)  # vocabularies: of one part, and of several


def signed(key):
    return key - (1 << 64) if key >= 1 << 63 else key


def logits_of(rows, size, seed):
    """Laws with a few likely tokens, wherever they stand."""
    made = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=made)
    likely = torch.randint(0, size, (rows, 6), generator=made)
    return logits.scatter_add_(1, likely, math.log(size) + 3 + torch.randn(rows, 6, generator=made))


def tree(nodes, logits, seed):
    """A tree in which siblings differ and some are likely."""
    made, tokens, parents = random.Random(seed), [], []
    for node in range(nodes):
        parent = made.randrange(-1, node)
        taken = {tokens[n] for n in range(node) if parents[n] == parent}
        best = logits[parent + 1].topk(8).indices.tolist()
        tokens.append(next(t for t in [*best[made.randrange(3) :], *range(NODES)] if t not in taken))
        parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))


def walked(draft, chosen):
    """Along the tokens that rows chose: the path and the token after it."""
    node, path = -1, []
    while (child := draft.child(node, int(chosen[node + 1]))) is not None:
        path.append(child)
        node = child
    return tuple(path), int(chosen[node + 1])


def verdicts(drafts, logits, dice, heat, position=7, laws=None):
    """Of the kernel; all of a sequence's rows are those of its draft."""
    count, each = len(drafts), 1 + NODES
    positions = torch.zeros(count, each, dtype=torch.int64)
    for row, draft in zip(positions, drafts, strict=True):
        row[: 1 + len(draft)] = position + torch.tensor([0, *draft.depths()])
    out = torch.full((count * each,), -9)
    whose = torch.tensor([int(draft.probs is not None) for draft in drafts], dtype=torch.int32)
    if laws is None:
        laws = torch.zeros(count, NODES, logits.shape[-1])
        for place, draft in enumerate(drafts):
            if draft.probs is not None:
                laws[place, : len(draft)] = draft.probs
    keys = torch.tensor([signed(one.key) for one in dice])
    verify(logits.flatten(0, 1), keys, positions.flatten(), torch.tensor(heat), out, draft_table(drafts, HEADER, NODES),
           HEADER, laws, whose)  # fmt: skip
    return out.view(count, each)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_verdict_on_guesses_is_that_of_the_rule(size, seed):
    count, kept = 24 if size == 40 else 8, set()
    logits = logits_of(count * (1 + NODES), size, seed).view(count, 1 + NODES, size)
    drafts = [tree(NODES - 4 * (n % 4), logits[n], 100 * seed + n) for n in range(count)]
    dice, heat = [Dice(1000 * seed + n) for n in range(count)], [0.5 + 0.1 * (n % 8) for n in range(count)]
    chosen = verdicts(drafts, logits, dice, heat)
    for draft, rows, own, one, t in zip(drafts, logits, chosen, dice, heat, strict=True):
        params = SamplingParams(temperature=t)
        wanted = rejection(draft, lambda node, rows=rows, p=params: warp(rows[node + 1], p), one, 7)
        assert walked(draft, own) == (wanted.path, wanted.token)
        assert (own[1 + len(draft) :] == -9).all(), "a row that no node has"
        kept.add(len(wanted.path))
    assert len(kept) > 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_chain_is_drawn_and_judged_as_the_host_does(size, seed):
    """Its law, its tokens and its verdict; the head writes some of the tokens, in an order of its own."""
    count, depth, kept = 16 if size == 40 else 6, 4, set()
    made = torch.Generator().manual_seed(seed)
    ids = torch.randperm(size, generator=made)[: size * 9 // 10]
    places = torch.full((size,), -1, dtype=torch.int32)
    places[ids] = torch.arange(len(ids), dtype=torch.int32)
    target = logits_of(count * (1 + NODES), size, seed).view(count, 1 + NODES, size)
    said = (target[:, :depth] + 0.5 * torch.randn(count, depth, size, generator=made))[:, :, ids]
    added = 0.5 * torch.randn(count, depth, len(ids), generator=made)
    seqs = [
        Sequence(n, [1] * (5 + n), SamplingParams(temperature=0.7 + 0.05 * n), dice=Dice(n + 99 * seed))
        for n in range(count)
    ]
    keys, lengths = (
        torch.tensor([signed(seq.dice.key) for seq in seqs]),
        torch.tensor([4 + n for n in range(count)], dtype=torch.int32),
    )
    heat, whose = torch.tensor([seq.params.temperature for seq in seqs]), torch.full((count,), 2, dtype=torch.int32)
    whose[3] = 1
    laws, out = torch.full((count, depth, size), -1.0), torch.full((count, depth), -9, dtype=torch.int32)
    stated, chains = torch.zeros(count), ChainDraws(keys, lengths, heat, whose, 2, laws)
    drafts = []
    for step in range(depth):
        chains.draw(step, said[:, step], out[:, step], stated, places, added[:, step])
    for n, seq in enumerate(seqs):
        if n == 3:
            assert (out[n] == -9).all()
            assert (laws[n] == -1).all()
            drafts.append(Draft())
            continue
        for step in range(depth):
            full = torch.full((size,), float("-inf")).index_copy_(0, ids, said[n, step] + added[n, step])
            law = seq.law(full)
            torch.testing.assert_close(laws[n, step], law, rtol=1e-5, atol=1e-8)
            assert int(out[n, step]) == seq.draw(law, step)
        assert float(stated[n]) == pytest.approx(float(law.max()), rel=1e-5)
        drafts.append(Draft.chain(out[n].tolist(), laws[n]))
    for n, (draft, seq) in enumerate(zip(drafts, seqs, strict=True)):
        chosen = verdicts([draft], target[n : n + 1], [seq.dice], [float(heat[n])], len(seq.tokens))
        law = lambda node, n=n, seq=seq: seq.law(target[n, node + 1])  # noqa: E731
        wanted = rejection(draft, law, seq.dice, len(seq.tokens))
        assert walked(draft, chosen[0]) == (wanted.path, wanted.token)
        kept.add(len(wanted.path))
    assert len(kept) > 1


def test_rows_of_other_rules_stay_as_they_are():
    logits = logits_of(3, 40, 1)
    out = torch.full((3,), -9)
    keys = torch.tensor([signed(Dice(n).key) for n in range(3)])
    verify(logits, keys, torch.tensor([4, 5, 6]), torch.tensor([0.0, 0.8, 0.0]), out)
    law = warp(logits[1], SamplingParams(temperature=0.8))
    assert out.tolist() == [-9, rejection(Draft(), lambda node: law, Dice(1), 5).token, -9]


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "guessed"])
def test_what_is_written_follows_the_law(drawn):
    """Of all dice together: the first token has the target's law, and a draw is kept as often as the two laws overlap,
    a guess as often as the target writes it."""
    count, size = 600, 5
    p, q = (torch.tensor(logits) for logits in ([1.0, 0.2, -0.5, 0.9, -3.0], [0.1, 1.2, -0.3, 0.4, -9.0]))
    dice, places = [Dice(n) for n in range(count)], torch.arange(size, dtype=torch.int32)
    keys, ones = torch.tensor([signed(one.key) for one in dice]), torch.ones(count, dtype=torch.int32)
    laws, tokens = torch.zeros(count, 1, size), torch.zeros(count, dtype=torch.int32)
    chains = ChainDraws(keys, 6 * ones, 0.8 * ones.float(), ones, 1, laws)
    chains.draw(0, q.expand(count, size), tokens, torch.zeros(count), places)
    if not drawn:
        tokens = 3 * ones
    table, out = torch.zeros(count, HEADER + 3, dtype=torch.int32), torch.zeros(2 * count, dtype=torch.int64)
    table[:, 0], table[:, HEADER], table[:, HEADER + 1] = 1, tokens, -1
    positions = torch.tensor([7, 8]).repeat(count)
    own = (laws, ones) if drawn else (None, None)
    verify(p.repeat(2 * count, 1), keys, positions, 0.8 * ones.float(), out, table, HEADER, *own)
    first, law, other = out[::2].tolist(), warp(p, SamplingParams(temperature=0.8)), laws[0, 0]
    assert_follows(first, {token: float(law[token]) for token in range(size)})
    kept = sum(a == b for a, b in zip(first, tokens.tolist(), strict=True))
    assert_rate(kept, count, float(torch.minimum(law, other).sum()) if drawn else float(law[3]))
    if drawn:
        assert_follows(tokens.tolist(), {token: float(other[token]) for token in range(size)})
