"""Queries, keys and values on their way from a product to the attention: rotation, and the places where they go.

A head of D numbers is rotated in pairs, the numbers d and d + D / 2 by the angle of their position. Queries go to
q [rows, heads, D], keys and values to their sequences' pages. Few rows are rotated in the product itself, many in a
kernel of their own (`kernels.place_qkv`); each number is rounded alike in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.batch import Field

_POSITION = tl.constexpr(int(Field.POSITION))
_PLACE = tl.constexpr(int(Field.PLACE))
_SLOT = tl.constexpr(int(Field.SLOT))


@dataclass(frozen=True, eq=False)
class HeadPlaces:
    """Where the rows of a pass have their queries, keys and values in one layer."""

    q: Tensor  # [rows, heads, D]
    keys: Tensor  # [pages, key heads, tokens of a page, D]
    values: Tensor
    pages: Tensor  # the page table
    meta: Tensor  # the pass's table
    angles: tuple[Tensor, Tensor]  # cosines and sines, [positions, D / 2]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Heads, key heads, numbers of a head, tokens of a page."""
        return self.q.shape[1], self.keys.shape[1], self.keys.shape[3], self.keys.shape[2]


@triton.jit
def rotated(first, second, cos, sin):
    """Halves of heads; rounded as written here, in every pass alike."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def first_output(strip, BN: tl.constexpr, D: tl.constexpr):
    """The first of the BN outputs of a strip; D // BN strips have a head, and each strip as many of both halves."""
    EACH: tl.constexpr = D // BN
    return strip // EACH * D + strip % EACH * (BN // 2)


@triton.jit
def paired_outputs(BN: tl.constexpr, D: tl.constexpr):
    """Its outputs, counted from the first one: outputs that are rotated together stand side by side."""
    lane = tl.arange(0, BN)
    return lane // 2 + lane % 2 * (D // 2)


@triton.jit
def destination(
    head, part, rows, slot, key, live, q_ptr, keys_ptr, values_ptr, pages_ptr, pages_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """[parts, rows] where the numbers `part` of a head go; queries come first, then keys, then values."""
    page = tl.load(pages_ptr + slot.to(tl.int64) * pages_stride + key // PAGED, mask=live, other=0).to(tl.int64)
    if head < HEADS:
        to = q_ptr + rows[None, :].to(tl.int64) * (HEADS * D) + head * D + part[:, None]
    elif head < HEADS + KV:
        to = keys_ptr + (((page * KV + head - HEADS) * PAGED + key % PAGED) * D)[None, :] + part[:, None]
    else:
        to = values_ptr + (((page * KV + head - HEADS - KV) * PAGED + key % PAGED) * D)[None, :] + part[:, None]
    return to


@triton.jit
def head_places(
    strip, rows, count, q_ptr, keys_ptr, values_ptr, pages_ptr, pages_stride, meta_ptr, meta_stride, cos_ptr, sin_ptr,
    BN: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Of the pairs of a strip, [BN // 2, rows]: cosines, sines, and where the first of each pair goes."""
    EACH: tl.constexpr = D // BN
    part = strip % EACH * (BN // 2) + tl.arange(0, BN // 2)
    live = rows < count
    position = tl.load(meta_ptr + _POSITION * meta_stride + rows, mask=live, other=0)
    slot = tl.load(meta_ptr + _SLOT * meta_stride + rows, mask=live, other=0)
    key = tl.load(meta_ptr + _PLACE * meta_stride + rows, mask=live, other=0)
    angle = position[None, :] * (D // 2) + part[:, None]
    cos = tl.load(cos_ptr + angle, mask=live[None, :], other=0.0)
    sin = tl.load(sin_ptr + angle, mask=live[None, :], other=0.0)
    to = destination(
        strip // EACH, part, rows, slot, key, live, q_ptr, keys_ptr, values_ptr, pages_ptr, pages_stride, HEADS, KV, D,
        PAGED,
    )  # fmt: skip
    return cos, sin, to


@triton.jit
def store_pairs(
    x, cos, sin, to, strip, in_rows, BN: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """x [BN, ROWS]: the outputs of a strip, rounded as a product rounds them, to where `head_places` says."""
    x = x.to(to.dtype.element_ty).to(tl.float32)
    first, second = tl.split(tl.permute(tl.reshape(x, [BN // 2, 2, ROWS]), (0, 2, 1)))
    if strip // (D // BN) < HEADS + KV:
        first, second = rotated(first, second, cos, sin)
    tl.store(to, first.to(to.dtype.element_ty), mask=in_rows)
    tl.store(to + D // 2, second.to(to.dtype.element_ty), mask=in_rows)
