"""Lookup as a tree: several continuations of a text side by side, for targets where rows of a pass are nearly free.

The first branches begin with the tokens that followed earlier matches, longer and more recent matches first. The next
ones begin with common tokens of the text, those that follow the largest number of different tokens. Each branch
continues with the tokens that followed there. The less likely a node is, the more it costs, and a draft consists of the
cheapest nodes. `rounds/lookup_kernels.py` does the same on a device. The costs of tokens were counted on 120 answers
(LOG, 2026-11-18, lookup as a tree).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from heapq import heappop, heappush

from outrider.core.draft import ROOT

MATCHES = 4  # branches that begin after a match; others are right less often than common tokens are
BRANCHES = 24  # of a draft: with 31 nodes more of them keep no more tokens
NEAR = 512  # places before the end in which common tokens are looked for; in all places nothing more was kept
KINDS = 32  # of tokens before a common token that are told apart; if all were, no more would be kept
# Costs, in quarters of a bit: a node with cost c holds in a share 2 ** (-c / 4) of cases, if the node before it does.
# The first token of a branch, after a match of 0 (a common token), 1, 2, 3 and more tokens; each branch before it adds
# EACH_MATCH, or half where it begins with a common token. Each branch begins dearer than the one before.
BEGIN, EACH_MATCH, COMMON_PER_COST = (18, 9, 4, 3, 1), 3, 2
COPIED = (9, 4, 3, 2, 2, 1)  # a further token of a branch, where 1, 2, ... tokens before it match
PER_BIT = 4
LONGEST = 16  # tokens of a match, at most; longer ones are counted with this one
DEAREST = 1 + BEGIN[0] + BRANCHES // COMMON_PER_COST  # above the cost of any first token

Branch = tuple[int, int]  # the place of its first token, and how many tokens match before it
Node = tuple[int, int, int]  # a token, its parent, and its kind: for calibration


def begin_cost(matched: int, branch: int) -> int:
    """Cost of the first token of a branch; `branch`: how many branches come before it."""
    more = branch * EACH_MATCH if matched else branch // COMMON_PER_COST
    return BEGIN[min(matched, len(BEGIN) - 1)] + more


def copy_cost(matched: int) -> int:
    """Cost of a further token of a branch, after `matched` matching tokens."""
    return COPIED[min(matched, len(COPIED)) - 1]


def cost_table(deepest: int) -> list[int]:
    """For the device: what a branch begins with, by the tokens that match; then the sum of all copies up to each number
    of tokens that match."""
    sums = [0]
    for matched in range(1, LONGEST + deepest):
        sums.append(sums[-1] + copy_cost(matched))
    return [begin_cost(matched, 0) for matched in range(LONGEST + 1)] + sums


# By kind of node: how likely it is before any was seen. First the costs of first tokens, then tokens that match.
PRIORS = [2.0 ** (-cost / PER_BIT) for cost in (*range(DEAREST), *(copy_cost(max(n, 1)) for n in range(LONGEST + 1)))]


class Branches:
    """What of a text has to be known to continue it."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._after: dict[int, list[int]] = {}  # by token: the places after it
        self._before: dict[int, int] = {}  # by token: a bit for each kind of token that it stood after
        self._last: dict[int, int] = {}  # by token: its last place
        # by the number of kinds: the tokens that stood after as many, the most recent ones last
        self._common: list[dict[int, None]] = [{} for _ in range(KINDS + 1)]
        self._seen = 0  # tokens that are known

    def learn(self, tokens: Seq[int]) -> None:
        for place in range(self._seen, len(tokens)):
            token, kinds = tokens[place], 0
            if place:
                before = tokens[place - 1]
                self._after.setdefault(before, []).append(place)
                known = self._before.get(token, 0)
                kinds = known | 1 << before % KINDS
                self._common[known.bit_count()].pop(token, None)
                self._before[token] = kinds
            self._common[kinds.bit_count()][token] = None
            self._last[token] = place
        self._seen = max(self._seen, len(tokens))

    def guess(self, tokens: Seq[int], nodes: int, length: int) -> list[Node]:
        """The `nodes` cheapest, branch by branch; `length`: of a branch, at most."""
        found = self._branches(tokens, min(nodes, BRANCHES))
        made: list[Node] = []
        for (place, matched), (branch, count) in zip(found, enumerate(_lengths(found, nodes, length)), strict=True):
            period = len(tokens) - place
            for step in range(count):
                parent = len(made) - 1 if step else ROOT
                kind = DEAREST + min(matched + step, LONGEST) if step else begin_cost(matched, branch)
                made.append((tokens[place + step % period], parent, kind))
        return made

    def _branches(self, tokens: Seq[int], most: int) -> list[Branch]:
        """No two begin with the same token."""
        matches = self._matches(tokens)
        longest = sorted(matches.values(), key=lambda branch: (-branch[1], -branch[0]))[: min(MATCHES, most)]
        taken = {tokens[place] for place, _ in longest}
        near, common = len(tokens) - NEAR, self._tokens()
        while len(longest) < most and (token := next(common, None)) is not None:
            if token not in taken and self._last[token] >= near:
                longest.append((self._last[token], 0))
        return longest

    def _matches(self, tokens: Seq[int]) -> dict[int, Branch]:
        """By the token that followed: the longest match before it, and of these the most recent."""
        found: dict[int, Branch] = {}
        for place in reversed(self._after.get(tokens[-1], ())):
            matched = 1
            while matched < min(self._max_n, place) and tokens[place - 1 - matched] == tokens[-1 - matched]:
                matched += 1
            token = tokens[place]
            if matched >= self._min_n and (token not in found or matched > found[token][1]):
                found[token] = place, matched
        return found

    def _tokens(self) -> Iterator[int]:
        """Common tokens, ordered by how many different tokens they followed; among equals the most recent first."""
        for count in range(KINDS, 0, -1):
            yield from reversed(self._common[count])


def _lengths(branches: Seq[Branch], nodes: int, length: int) -> list[int]:
    """How many tokens of each branch are among the cheapest; of nodes that cost the same, those of earlier branches."""
    lengths = [0] * len(branches)
    cheapest: list[tuple[int, int]] = []
    for branch, (_, matched) in enumerate(branches):
        heappush(cheapest, (begin_cost(matched, branch), branch))
    while cheapest and nodes:
        cost, branch = heappop(cheapest)
        lengths[branch] += 1
        nodes -= 1
        if lengths[branch] < length:
            heappush(cheapest, (cost + copy_cost(branches[branch][1] + lengths[branch]), branch))
    return lengths
