"""The kernels of prompt lookup: texts are searched on the device, and their continuations become a tree, as
`drafters/branches.py` has it on the host. A program has one sequence, or a part of one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.drafters import branches
from outrider.drafters.rounds.kernels import POWER, RoundField
from outrider.models.cuda.launch import begin_after, early, nearly_done

SEARCHED = 1024  # places of a text that one step of a search looks at
COUNTED, COMPARED = 16, 128  # places of common tokens that a program counts for, and places that it looks at at once
# Longest texts that can be searched: the place of a match and its length are one int32.
_PLACES = tl.constexpr(1 << 25)
_NEVER = tl.constexpr(127)  # more than any node of a draft costs

_SLOT = tl.constexpr(int(RoundField.SLOT))
_LENGTH = tl.constexpr(int(RoundField.LENGTH))
_KINDS = tl.constexpr(branches.KINDS)
_EACH_MATCH = tl.constexpr(branches.EACH_MATCH)
_COMMON_PER_COST = tl.constexpr(branches.COMMON_PER_COST)
_BEGINS = tl.constexpr(branches.LONGEST + 1)


@triton.jit(do_not_specialize=["places", "count"])
def _count_kinds(
    written_ptr, places, texts_ptr, count, kinds_ptr, NEAR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SOON: tl.constexpr,
):  # fmt: skip
    """For the last NEAR places of each text: after how many kinds of tokens the token there stands in the text."""
    begin_after(SOON)
    nearly_done(SOON)
    seq, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    last = tl.load(texts_ptr + _LENGTH * count + seq)
    text = written_ptr + seq.to(tl.int64) * places
    place = tl.maximum(last + 1 - NEAR, 0) + row
    token = tl.load(text + place, mask=place <= last, other=-1)
    kind = tl.arange(0, _KINDS)
    times = tl.zeros([ROWS, _KINDS], tl.float32)  # that the token stands after each kind
    for begin in range(1, last + 1, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        inside = other <= last
        after = tl.load(text + other, mask=inside, other=-2)
        before = tl.load(text + other - 1, mask=inside, other=0) % _KINDS
        same, of_kind = token[:, None] == after[None, :], before[:, None] == kind[None, :]
        times = tl.dot(same.to(tl.float16), of_kind.to(tl.float16), times)
    tl.store(kinds_ptr + seq * NEAR + row, tl.sum((times > 0).to(tl.int32), 1))


@triton.jit
def _longest_match(text, last, taken, MIN_N: tl.constexpr, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """Of the matches of the text's end that no taken token follows the longest, and of these the most recent: its
    length and the place after it as one number; 0: there is none."""
    best = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, last, BLOCK):
        place = begin + 1 + tl.arange(0, BLOCK)  # of the token that follows a match
        matched = tl.zeros([BLOCK], tl.int32)
        for n in tl.static_range(MAX_N):  # no load waits for the one before; counted as far as all before match
            earlier = tl.load(text + place - 1 - n, mask=(place <= last) & (place > n), other=-1)
            wanted = tl.load(text + tl.maximum(last - n, 0))
            matched += tl.where((matched == n) & (earlier == wanted), 1, 0)
        matches = (matched >= MIN_N) & (place <= last)
        token = tl.load(text + place, mask=matches, other=-1)
        best = tl.maximum(best, tl.where(matches & (_among(token, taken) == 0), matched * _PLACES + place, 0))
    return tl.max(best, 0)


@triton.jit
def _among(tokens, taken):
    return tl.max((tokens[:, None] == taken[None, :]).to(tl.int32), 1)


@triton.jit
def _cheapest(costs, nodes):
    """How many nodes of each branch are among the cheapest ones. `costs` [branches, steps]: dearer with each step."""
    limit = 0  # the cost below which all nodes are among them
    for bit in tl.static_range(7):  # of _NEVER
        tried = limit + (64 >> bit)
        limit = tl.where(tl.sum((costs < tried).to(tl.int32)) < nodes, tried, limit)
    own = tl.sum((costs < limit).to(tl.int32), 1)
    # of the nodes with exactly this cost, the first branches take one each
    at = tl.max(((costs == limit) & (costs < _NEVER)).to(tl.int32), 1)
    return own + tl.where(tl.cumsum(at, 0) <= nodes - tl.sum(own, 0), at, 0)


@triton.jit(do_not_specialize=["places", "count", "padding", "nodes", "length", "most"])
def _look_up(
    written_ptr, places, texts_ptr, count, padding, kinds_ptr, costs_ptr, found_ptr, nodes, length, most,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, MATCHES: tl.constexpr, COMMON: tl.constexpr, NEAR: tl.constexpr,
    BRANCHES: tl.constexpr, BLOCK: tl.constexpr, NP: tl.constexpr, SOON: tl.constexpr,
):  # fmt: skip
    """What followed the last tokens of each text where they stood before, then, if COMMON, common tokens: up to `most`
    branches, of which the `nodes` cheapest nodes are the draft."""
    begin_after(SOON)
    nearly_done(SOON)
    seq = tl.program_id(0)
    nobody = tl.load(texts_ptr + _SLOT * count + seq) == padding
    last = tl.load(texts_ptr + _LENGTH * count + seq)  # the place of the last token
    text = written_ptr + seq.to(tl.int64) * places
    branch, match = tl.arange(0, BRANCHES), tl.arange(0, MATCHES)
    firsts = tl.zeros([BRANCHES], tl.int32)  # the place of the first token of each branch
    lengths = tl.zeros([BRANCHES], tl.int32)  # of the match before it
    taken = tl.full([MATCHES], -1, tl.int32)  # tokens that follow the matches
    wanted = tl.where(nobody, 0, most)
    many = 0  # branches so far
    for _ in range(tl.minimum(MATCHES, wanted)):
        value = _longest_match(text, last, taken, MIN_N, MAX_N, BLOCK)
        here, place = (branch == many) & (value > 0), value % _PLACES
        firsts, lengths = tl.where(here, place, firsts), tl.where(here, value // _PLACES, lengths)
        taken = tl.where((match == many) & (value > 0), tl.load(text + place), taken)
        many += tl.where(value > 0, 1, 0)
    if COMMON:
        near = tl.arange(0, NEAR)
        places_near = tl.maximum(last + 1 - NEAR, 0) + near
        tokens = tl.load(text + places_near, mask=places_near <= last, other=-1)
        kinds = tl.load(kinds_ptr + seq * NEAR + near, mask=places_near <= last, other=0)
        values = tl.where((kinds > 0) & (_among(tokens, taken) == 0), kinds * _PLACES + places_near, 0)
        for _ in range(many, wanted):
            value = tl.max(values, 0)
            token = tl.max(tl.where(places_near == value % _PLACES, tokens, -1), 0)  # a load would take longer
            values = tl.where(tokens == token, 0, values)
            firsts = tl.where((branch == many) & (value > 0), value % _PLACES, firsts)
            many += tl.where(value > 0, 1, 0)
    step = tl.arange(0, NP)
    more = tl.where(lengths > 0, branch * _EACH_MATCH, branch // _COMMON_PER_COST)
    sums = costs_ptr + _BEGINS + lengths
    begins = tl.load(costs_ptr + lengths) + more - tl.load(sums)
    costs = begins[:, None] + tl.load(sums[:, None] + step[None, :])
    own = _cheapest(tl.where((branch < many)[:, None] & (step < length)[None, :], costs, _NEVER), nodes)
    node = (tl.cumsum(own, 0) - own)[:, None] + step[None, :]
    inside = step[None, :] < own[:, None]
    copied = firsts[:, None] + step[None, :] % (last + 1 - firsts)[:, None]  # past the end it copies what it copied
    out = found_ptr + seq * (1 + 3 * nodes)
    tl.store(out, tl.sum(own, 0))
    tl.store(out + 1 + node, tl.load(text + copied, mask=inside, other=0), mask=inside)
    tl.store(out + 1 + nodes + node, tl.where(step[None, :] == 0, -1, node - 1), mask=inside)


def count_kinds(written: Tensor, texts: Tensor, kinds: Tensor) -> None:
    """`written` [sequences, places]: the texts. `kinds` [sequences, NEAR] int32."""
    (count, near), soon = kinds.shape, early(kinds.device)
    _count_kinds[(count, near // COUNTED)](
        written, written.stride(0), texts, count, kinds, near, COUNTED, COMPARED, soon, num_warps=4, launch_pdl=soon
    )


def look_up(
    written: Tensor, texts: Tensor, kinds: Tensor | None, costs: Tensor, found: Tensor, sizes: tuple[int, int],
    matches: int, length: int, padding: int,
) -> None:  # fmt: skip
    """`kinds`: as `count_kinds` has them; None: no common tokens. `costs`: `branches.cost_table`. `found` [sequences,
    1 + 3 nodes]; no probability is stated. `sizes`: of the shortest and the longest match. `matches`: branches that
    begin after one, a power of two. `length`: tokens of a branch, at most."""
    count, nodes, soon = len(found), (found.shape[1] - 1) // 3, early(found.device)
    most = min(nodes, matches if kinds is None else branches.BRANCHES)
    _look_up[(count,)](
        written, written.stride(0), texts, count, padding, kinds, costs, found, nodes, length, most, *sizes, matches,
        kinds is not None, branches.NEAR, triton.next_power_of_2(branches.BRANCHES), SEARCHED, POWER, soon,
        num_warps=4, launch_pdl=soon,
    )  # fmt: skip
