"""The feeds of a pass as the kernels read them: a table of integers with one column for each row of the pass.

Only bookkeeping, on the host. A row is a token or a node. Attention works on blocks of consecutive rows of one
sequence, which read the same keys. Each node of a tree has a path of its own: from the chunk of keys in which the draft
begins on, it reads the keys of that path, in the order of the path. So a node's sums are the same as if it were a
committed token, wherever its ancestors lie in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property

import numpy as np

from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.models.base import Feed
from outrider.models.cuda.pages import PageTable

FEW_ROWS = 64  # up to which a pass counts as one of few rows: small tiles, and logits of all rows in one graph
NODES = 64  # of one tree: bits of a row's mask
SMALL_TILE = 16  # rows times heads of a program where rows are few: the smallest that the matrix units take
LARGE_TILE = 128  # where a sequence brings many rows, such as a prompt: they share the keys that are read


class Field(IntEnum):
    """The rows of a pass's table, int32."""

    TOKEN = 0
    POSITION = 1  # in the text; a row sees the keys of all positions up to its own
    PLACE = 2  # where its key lies in its sequence's pages; a node of a tree lies behind its siblings
    SLOT = 3  # its sequence's row of the page table
    BASE = 4  # the position at which the draft begins
    END = 5  # the places that its sequence holds after the pass
    LOW = 6  # the nodes of its path, itself included, as bits; 0: not of a tree
    HIGH = 7
    HELD = 8  # tokens of its sequence whose keys earlier passes have written
    BLOCK_ROW = 9  # of a block of rows, not of a row: the first of them
    BLOCK_COUNT = 10  # how many; 0: none
    BLOCK_TREE = 11  # 1: from the chunk with BASE on, only the block's first row


class Batch:
    def __init__(self, feeds: Sequence[Feed], pages: PageTable, group: int, ahead: int = 0) -> None:
        """Takes the pages that the feeds need, and those for `ahead` more tokens of each. `group`: query heads that
        share a key head."""
        self._parts: list[tuple[Feed, int, int]] = []  # feed, its slot, tokens held before
        self.starts, self.begins = [0], [0]  # of each feed: among the judged rows, among all rows
        self.judged: list[int] = []  # rows whose logits are wanted
        self.longest = widest = 0
        for feed in feeds:
            begin, size = pages.length(feed.id), len(feed.tokens) + len(feed.draft)
            holder = pages.extend(feed.id, size)
            if ahead:
                pages.reserve(holder, ahead)
            self._parts.append((feed, holder.slot, begin))
            row = self.begins[-1]
            self.judged += range(row + len(feed.tokens) - 1, row + size)
            self.begins.append(row + size)
            self.starts.append(len(self.judged))
            self.longest, widest = max(self.longest, begin + size), max(widest, size)
        self.rows = self.begins[-1]
        least = 1 << (group - 1).bit_length()
        few = self.rows <= FEW_ROWS or widest * group <= 4 * SMALL_TILE
        self.tile = max(SMALL_TILE if few else LARGE_TILE, least)
        self._block = self.tile // group
        self._simple = widest <= self._block and all(feed.draft.is_chain for feed in feeds)

    def slot(self, feed: int) -> int:
        """The row of the page table of one feed's sequence."""
        return self._parts[feed][1]

    @cached_property
    def spans(self) -> np.ndarray:
        """[blocks, 3] the blocks of rows: first row, rows, whether of a tree."""
        if not self._simple:
            return np.array(list(self._blocks()), dtype=np.int32)
        spans = np.zeros((len(self._parts), 3), dtype=np.int32)  # a block for each sequence
        spans[:, 0], spans[:, 1] = self.begins[:-1], np.diff(self.begins)
        return spans

    def write(self, table: np.ndarray, padding: int) -> None:
        """Into [len(Field), rows]; rows that belong to nobody have the slot `padding`."""
        table[:, self.rows :] = 0
        table[Field.SLOT, self.rows :] = padding
        table[Field.BLOCK_COUNT : Field.BLOCK_TREE + 1] = 0
        self._write_rows(table[:, : self.rows])
        for (feed, _, held), row in zip(self._parts, self.begins, strict=False):
            if not feed.draft.is_chain:  # a chain is as committed tokens: each sees those before
                self._write_tree(table, feed.draft, row + len(feed.tokens), held + len(feed.tokens))
        table[Field.BLOCK_ROW : Field.BLOCK_TREE + 1, : len(self.spans)] = self.spans.T

    def _write_rows(self, rows: np.ndarray) -> None:
        """As if every draft were a chain; no numpy call for each sequence: there may be thousands of them."""
        rows[Field.TOKEN] = [token for feed, _, _ in self._parts for token in (*feed.tokens, *feed.draft.tokens)]
        each = np.array(  # slot, base, end; tokens held before; from a row's number to its place
            [
                (slot, held + len(feed.tokens), held + end - row, held, held - row)
                for (feed, slot, held), row, end in zip(self._parts, self.begins, self.begins[1:], strict=False)
            ],
            dtype=np.int32,
        )
        if len(each) > 1:
            each = each.repeat(np.diff(self.begins), 0)
        rows[Field.SLOT : Field.LOW] = each.T[:3]
        rows[Field.POSITION : Field.SLOT] = each[:, 4] + np.arange(self.rows, dtype=np.int32)
        rows[Field.LOW : Field.HELD] = 0
        rows[Field.HELD] = each[:, 3]

    def _write_tree(self, table: np.ndarray, draft: Draft, row: int, base: int) -> None:
        if len(draft) > NODES:
            raise OutriderError(f"a tree of {len(draft)} nodes; on a GPU at most {NODES} can be verified at once")
        sees: list[int] = []
        for node, parent in enumerate(draft.parents):
            sees.append((0 if parent < 0 else sees[parent]) | 1 << node)
        nodes = slice(row, row + len(draft))
        table[Field.POSITION, nodes] = [base - 1 + depth for depth in draft.depths()]
        masks = np.array(sees, dtype=np.uint64)
        table[Field.LOW, nodes] = (masks & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
        table[Field.HIGH, nodes] = (masks >> np.uint64(32)).astype(np.uint32).view(np.int32)

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """(first row, rows, whether of a tree). Every row of a tree heads a block, so that it can go its own way."""
        for (feed, _, _), row, end in zip(self._parts, self.begins, self.begins[1:], strict=False):
            tree = end if feed.draft.is_chain else row + len(feed.tokens) - 1
            yield from ((first, min(self._block, tree - first), 0) for first in range(row, tree, self._block))
            for first in range(tree, end):
                leads = (first - tree) % self._block == 0
                yield first, min(self._block, end - first) if leads else 0, 1
