"""Texts that lookup searches on a device, and what it finds in them."""

import random

import torch

from outrider.drafters.branches import MATCHES, NEAR, cost_table
from outrider.drafters.rounds import kernels, lookup_kernels
from outrider.drafters.rounds.kernels import RoundField

PADDING = 99  # the slot of a place without a sequence


def lookups(device="cpu"):
    """Texts of few tokens and of many, longer than one step of a search, with a token that was common long ago, of one
    token again and again, of two tokens and of one; then a place without a sequence."""
    luck = random.Random(4)
    made = [[luck.randrange(most) for _ in range(count)] for most, count in ((3, 30), (40, 1400), (9, 2), (500, 60))]
    made += [[luck.randrange(luck.choice((8, 300))) for _ in range(600)], [7] * 5, [1]]
    made[4][:80:2] = [777] * 40
    table = torch.zeros(len(RoundField), len(made) + 1, dtype=torch.int32)
    table[RoundField.SLOT] = PADDING
    written = torch.full((len(made) + 1, 1500), -3, dtype=torch.int32)
    for place, text in enumerate(made):
        table[RoundField.SLOT, place], table[RoundField.LENGTH, place] = place, len(text) - 1
        written[place, : len(text)] = torch.tensor(text)
    return made, table.to(device), written.to(device)


def looked_up(table, written, sizes, nodes, length, matches=MATCHES, common=True):
    """The drafts of each text: tokens and parents."""
    numbers = {"dtype": torch.int32, "device": written.device}
    kinds = torch.full((len(written), NEAR), -7, **numbers) if common else None
    if kinds is not None:
        lookup_kernels.count_kinds(written, table, kinds)
    out = torch.full((len(written), 1 + 3 * nodes), -7, **numbers)
    costs = torch.tensor(cost_table(kernels.POWER), **numbers)
    lookup_kernels.look_up(written, table, kinds, costs, out, sizes, matches, length, PADDING)
    counts = out[:, 0].tolist()
    tokens, parents, _ = out[:, 1:].view(len(out), 3, nodes).unbind(1)
    return [
        list(zip(own[:count].tolist(), above[:count].tolist(), strict=True))
        for own, above, count in zip(tokens, parents, counts, strict=True)
    ]
