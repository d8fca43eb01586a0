"""What a pass looks like to the kernels of a GPU: rows, paths of trees, blocks. Bookkeeping: no GPU needed."""

import numpy as np

from outrider.core.draft import Draft
from outrider.models.base import Feed
from outrider.models.cuda.batch import LARGE_TILE, SMALL_TILE, Batch, Field
from outrider.models.cuda.pages import PageTable

TREE = Draft((5, 6, 7, 8, 9), (-1, -1, 0, 0, 3))


def written(feeds, held=(), group=3, rows=None):
    pages = PageTable(50, 4, 8, 200)
    for id, count in held:
        pages.extend(id, count)
    batch = Batch(feeds, pages, group)
    table = np.full((len(Field), rows or batch.rows), -7, dtype=np.int32)
    batch.write(table, pages.padding)
    return batch, table, pages


def test_rows_of_tokens_and_chains_see_all_that_came_before():
    _, table, pages = written([Feed(1, [10, 11], Draft.chain((12,))), Feed(2, [20])], held=[(1, 5)])
    assert table[Field.TOKEN].tolist() == [10, 11, 12, 20]
    assert table[Field.POSITION].tolist() == table[Field.PLACE].tolist() == [5, 6, 7, 0]
    assert table[Field.BASE].tolist() == [7, 7, 7, 1]
    assert table[Field.END].tolist() == [8, 8, 8, 1]
    assert table[Field.HELD].tolist() == [5, 5, 5, 0]
    assert not table[Field.LOW].any()
    assert len(set(table[Field.SLOT].tolist())) == 2
    assert pages.length(1) == 8


def test_a_node_of_a_tree_knows_its_path():
    _, table, _ = written([Feed(1, [4], TREE)], held=[(1, 9)])
    assert table[Field.PLACE].tolist() == [9, 10, 11, 12, 13, 14]
    assert table[Field.POSITION].tolist() == [9, 10, 10, 11, 11, 12]
    assert table[Field.LOW].tolist() == [0, 0b1, 0b10, 0b101, 0b1001, 0b11001]
    assert not table[Field.HIGH].any()


def test_a_path_may_have_nodes_past_the_32nd():
    _, table, _ = written([Feed(1, [4], Draft(tuple(range(40)), (-1, -1, *range(38))))])
    last = table[:, -1]
    path = np.array([last[Field.LOW], last[Field.HIGH]], dtype=np.int32).view(np.uint64)[0]
    assert [node for node in range(64) if int(path) >> node & 1] == list(range(1, 40, 2))


def blocks(table):
    count = table[Field.BLOCK_COUNT] + table[Field.BLOCK_TREE]
    return table[Field.BLOCK_ROW : Field.BLOCK_TREE + 1, count > 0].T.tolist()


def test_blocks_cover_every_row_once_and_stay_within_a_sequence():
    batch, table, _ = written([Feed(1, list(range(7))), Feed(2, [1])], group=4)
    assert batch.tile == SMALL_TILE
    assert blocks(table) == [[0, 4, 0], [4, 3, 0], [7, 1, 0]]


def test_every_row_of_a_tree_heads_a_block_and_some_lead_the_others():
    """The first token of the feed is as committed ones; with the last one the tree's group begins."""
    _, table, _ = written([Feed(1, [3, 4], TREE)], group=4)
    assert blocks(table) == [[0, 1, 0], [1, 4, 1], [2, 0, 1], [3, 0, 1], [4, 0, 1], [5, 2, 1], [6, 0, 1]]


def test_many_rows_of_one_sequence_share_a_large_tile():
    assert written([Feed(1, list(range(80)))])[0].tile == LARGE_TILE
    assert written([Feed(1, list(range(40)))])[0].tile == SMALL_TILE  # few rows in all
    assert written([Feed(id, [id]) for id in range(8)])[0].tile == SMALL_TILE


def test_padding_belongs_to_nobody():
    batch, table, pages = written([Feed(1, [1, 2])], rows=6)
    assert (table[Field.SLOT, 2:] == pages.padding).all()
    assert not table[Field.BLOCK_COUNT, len(blocks(table)) :].any()
    assert not table[Field.BLOCK_TREE, len(blocks(table)) :].any()
    assert batch.judged == [1]
