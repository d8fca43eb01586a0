"""The kernels between drafts and passes, interpreted: their tables are those of the host, their verdicts core's own."""

import random

import pytest
import torch
from lookups import looked_up, lookups
from looped import draft_table

from outrider.core.draft import Draft
from outrider.core.verify import coupled
from outrider.drafters.branches import MATCHES, Branches
from outrider.drafters.eagle import loop_kernels
from outrider.drafters.eagle.device_kernels import SequenceField
from outrider.drafters.ngram import Recent
from outrider.drafters.rounds import kernels
from outrider.drafters.rounds.kernels import DRAFT_HEADER, RoundField
from outrider.models.base import Feed
from outrider.models.cuda.batch import Batch, Field
from outrider.models.cuda.pages import PageTable

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: tests/gpu")

NODES, DEPTH, GROUP, PAGE = 40, 6, 3, 8
WIDE, BLOCK = DEPTH + 1, 16 // GROUP
LENGTHS = (5, 30, 17)


def tree(nodes, seed):
    """A tree of depth DEPTH at most, parents before their children."""
    made, parents, depths = random.Random(seed), [], []
    for node in range(nodes):
        above = [-1, *(n for n in range(node) if depths[n] < DEPTH)]
        parent = made.choice(above[-6:])
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    siblings = [sum(p == parents[n] for p in parents[:n]) for n in range(nodes)]
    return Draft(tuple(10 + each for each in siblings), tuple(parents))


def found(drafts, header=DRAFT_HEADER, nodes=NODES):
    """As `join` has them; with a header of 1: as guessers have them."""
    return draft_table(drafts, header, nodes)


def pages(sequences):
    made = PageTable(64, PAGE, 8, 128)
    for id, length in enumerate(LENGTHS[:sequences]):
        made.extend(id, length)
    return made


def texts(made, sequences, count):
    table = torch.zeros(len(RoundField), count, dtype=torch.int32)
    table[RoundField.SLOT] = made.padding
    for id in range(sequences):
        table[RoundField.SLOT, id] = made.extend(id, 0).slot
        table[RoundField.LENGTH, id] = LENGTHS[id]
        table[RoundField.LAST, id] = 3 + id
    return table


def entered(drafts, depth):
    """The table of a pass with three drafts of NODES nodes, its positions, the table that the host writes, and the rows
    of a block."""
    ours, theirs = pages(3), pages(3)
    rows = 3 * (1 + NODES)
    batch = Batch([Feed(id, [3 + id], draft) for id, draft in enumerate(drafts)], theirs, GROUP)
    wanted = torch.zeros(len(Field), rows, dtype=torch.int32)
    batch.write(wanted.numpy(), theirs.padding)
    table, positions = torch.full((len(Field), rows), -7, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    kernels.enter_draft(found(drafts), texts(ours, 3, 3), table, positions, depth, batch.tile // GROUP, ours.padding)
    return table, positions, wanted, batch.tile // GROUP


def test_the_table_of_a_pass_is_the_one_that_the_host_writes():
    drafts = [tree(NODES, seed) for seed in (1, 2, 3)]
    assert not any(draft.is_chain for draft in drafts)
    table, positions, wanted, _ = entered(drafts, DEPTH)
    for field in Field:
        assert table[field].tolist() == wanted[field].tolist(), field.name
    assert positions.tolist() == (wanted[Field.POSITION] + 1).tolist()


def test_a_chain_is_as_committed_tokens():
    """Its rows are read in blocks, beside a tree each of whose rows heads a block."""
    drafts = [Draft.chain(range(4, 4 + NODES)), tree(NODES, 1), Draft.chain(range(9, 9 + NODES))]
    table, _, wanted, block = entered(drafts, NODES)
    for field in list(Field)[: Field.BLOCK_ROW]:
        assert table[field].tolist() == wanted[field].tolist(), field.name
    by_sequence = table.view(len(Field), 3, 1 + NODES)
    assert by_sequence[Field.BLOCK_TREE].tolist() == [[0] * (1 + NODES), [1] * (1 + NODES), [0] * (1 + NODES)]
    for place in range(3):
        counts = by_sequence[Field.BLOCK_COUNT, place].tolist()
        assert sum(counts) == 1 + NODES
        assert max(counts) == min(block, 1 + NODES)


def test_rows_that_no_node_has_belong_to_nobody():
    """A draft of three nodes, an empty one, and a place in the table without a sequence."""
    made = pages(2)
    drafts = [tree(3, 5), Draft(), Draft()]
    table, positions = torch.full((len(Field), 3 * (1 + NODES)), -7, dtype=torch.int32), torch.zeros(3 * (1 + NODES))
    kernels.enter_draft(found(drafts), texts(made, 2, 3), table, positions.long(), DEPTH, BLOCK, made.padding)
    by_sequence = table.view(len(Field), 3, 1 + NODES)
    for place, live in enumerate((4, 1, 0)):
        assert (by_sequence[Field.SLOT, place, live:] == made.padding).all()
        assert not by_sequence[Field.BLOCK_COUNT, place, live:].any()
        counts = by_sequence[Field.BLOCK_COUNT, place, :live]
        assert int(counts.sum()) == live
        assert by_sequence[Field.END, place, :live].tolist() == [LENGTHS[place] + live] * live if live else True


@pytest.mark.parametrize("seed", range(4))
def test_a_verdict_is_that_of_the_coupled_rule(seed):
    made, luck = pages(3), random.Random(seed)
    made.take_ahead(range(3), 1 + NODES)
    drafts = [tree(NODES, 10 * seed + n) for n in range(3)]
    chosen = torch.tensor([luck.choice((10, 10, 11, 12)) for _ in range(4 * (1 + NODES))])
    table, pairs = texts(made, 3, 4), torch.zeros(4, DEPTH, 2, dtype=torch.int32)
    kept, written = torch.zeros(4, 1 + 2 * WIDE, dtype=torch.int32), torch.zeros(4, 128, dtype=torch.int32)
    out = torch.zeros(2, 4, 1 + 2 * WIDE + DRAFT_HEADER + 3 * NODES, dtype=torch.int32)
    table[RoundField.ROUND] = 1
    where = torch.from_numpy(made.table)
    kernels.judge(chosen, found([*drafts, Draft()]), table, kept, written, where, pairs, out, PAGE, made.padding)
    paths = []
    for place, draft in enumerate(drafts):
        base = place * (1 + NODES)
        verdict = coupled(draft, lambda node, depth, base=base: int(chosen[base + 1 + node]))
        path, taken, length = verdict.path, len(verdict.path) + 1, LENGTHS[place]
        paths.append(path)
        tokens = [*(draft.tokens[node] for node in path), verdict.token]
        rows = [0, *(1 + node for node in path)]
        for record in (kept[place], out[1, place]):
            assert record[: 1 + taken].tolist() == [taken, *tokens]
            assert record[1 + WIDE : 1 + WIDE + taken].tolist() == rows
        assert table[:, place].tolist() == [int(table[0, place]), length + taken, verdict.token, 2]
        assert written[place, length + 1 : length + 2 + taken].tolist() == [*tokens, 0]
        moves = [(made.flat(place, length + 1 + n), made.flat(place, length + 1 + k)) for k, n in enumerate(path)]
        assert [tuple(pair) for pair in pairs[place].tolist()] == moves + [(0, 0)] * (DEPTH - len(path))
        assert out[1, place, 1 + 2 * WIDE :].tolist() == found([draft])[0].tolist()
    assert kept[3, 0] == out[1, 3, 0] == 0
    assert not out[0].any()
    assert max(map(len, paths)) > 1


def test_the_head_takes_in_what_was_kept():
    made = pages(2)
    kept = torch.zeros(2, 1 + 2 * WIDE, dtype=torch.int32)
    kept[0, :4], kept[0, 1 + WIDE : 4 + WIDE] = torch.tensor([3, 20, 21, 22]), torch.tensor([0, 1, 5])
    sequences = torch.zeros(len(SequenceField), 2, dtype=torch.int32)
    sequences[SequenceField.SLOT] = torch.tensor([made.extend(0, 0).slot, made.padding])
    sequences[SequenceField.LENGTH, 0] = 9
    table = torch.full((len(Field) + 1, 2 * WIDE), -7, dtype=torch.int32)
    theirs = PageTable(64, PAGE, 8, 128)
    theirs.extend(0, 9)
    batch = Batch([Feed(0, [20, 21, 22])], theirs, GROUP)
    wanted = torch.zeros(len(Field), 2 * WIDE, dtype=torch.int32)
    batch.write(wanted.numpy(), theirs.padding)
    loop_kernels.enter_kept(kept, texts(made, 1, 2), sequences, table, NODES, BLOCK, made.padding)
    assert table[: len(Field)].tolist() == wanted.tolist()
    assert table[len(Field)].tolist() == [0, 1, 5] + [0] * (2 * WIDE - 3)
    assert sequences[[SequenceField.LENGTH, SequenceField.LAST]].tolist() == [[12, 0], [2, WIDE]]
    assert sequences[SequenceField.TOKENS, 0] == LENGTHS[0] + 1


def paths(draft):
    return {tuple(draft.tokens[node] for node in draft.path(node)) for node in range(len(draft))}


def joined(table, place):
    count, own = table[place, :DRAFT_HEADER].tolist()
    tokens, parents, _ = table[place, DRAFT_HEADER:].view(3, -1)[:, :count].tolist()
    return Draft(tuple(tokens), tuple(parents)), own


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_joins_a_tree_where_they_part(seed):
    """One that the tree has, one that follows it for a while, one of its own, an empty one, and no tree at all."""
    trees = [tree(20, seed), tree(20, seed + 50), tree(20, seed + 70), tree(20, seed + 90), Draft()]
    deepest = max(range(20), key=lambda node: len(trees[0].path(node)))
    inside = [trees[0].tokens[node] for node in trees[0].path(deepest)]
    chains = [inside, [10, 10, 99, 98], [77, 76], [], [5, 6, 7]]
    made = found([Draft.chain(chain) for chain in chains], 1, 8)
    table = torch.full((5, DRAFT_HEADER + 3 * NODES), -7, dtype=torch.int32)
    kernels.join(found(trees, 1, 20), made, table)
    for place, (own, chain) in enumerate(zip(trees, chains, strict=True)):
        draft, first = joined(table, place)
        assert first == len(own)
        assert draft.tokens[:first] == own.tokens
        assert paths(draft) == paths(own) | {tuple(chain[: n + 1]) for n in range(len(chain))}
        assert len(paths(draft)) == len(draft)


def test_where_two_drafts_do_not_fit_the_last_nodes_of_the_first_are_left_out():
    """Eight nodes in all: beside a chain of three the tree has five, beside none all eight."""
    own, chains = tree(8, 1), [[70, 71, 72], []]
    table = torch.full((2, DRAFT_HEADER + 3 * 8), -7, dtype=torch.int32)
    kernels.join(found([own, own], 1, 8), found([Draft.chain(chain) for chain in chains], 1, 4), table)
    for place, (chain, kept) in enumerate(zip(chains, (5, 8), strict=True)):
        draft, first = joined(table, place)
        assert (first, len(draft)) == (kept, 8)
        assert draft.tokens == (*own.tokens[:kept], *chain)
        assert draft.parents[:kept] == own.parents[:kept]


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_joins_a_tree_where_they_part(seed):
    """One with branches of its own and some that the first has, the first itself, and one beside an empty draft."""
    trees = [tree(20, seed), tree(12, seed + 50), Draft()]
    luck = random.Random(seed)
    parting = Draft(tuple(luck.choice((token, 90 + token)) for token in tree(12, seed).tokens), tree(12, seed).parents)
    others = [parting, trees[1], tree(12, seed + 70)]
    table = torch.full((3, DRAFT_HEADER + 3 * NODES), -7, dtype=torch.int32)
    kernels.join(found(trees, 1, 20), found(others, 1, 12), table)
    for place, (own, other) in enumerate(zip(trees, others, strict=True)):
        draft, first = joined(table, place)
        assert first == len(own)
        assert (draft.tokens[:first], draft.parents[:first]) == (own.tokens, own.parents)
        assert paths(draft) == paths(own) | paths(other)
        assert len(paths(draft)) == len(draft)
    assert not paths(parting) <= paths(trees[0])
    assert paths(parting) & paths(trees[0])


def test_a_draft_alone_stays_as_it_is():
    trees = [tree(NODES, 3), Draft()]
    table = torch.full((2, DRAFT_HEADER + 3 * NODES), -7, dtype=torch.int32)
    kernels.join(found(trees, 1), None, table)
    assert table.tolist() == found(trees).tolist()


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (1, 16)])
@pytest.mark.parametrize(("nodes", "length"), [(31, 12), (31, 31), (15, 3), (7, 12), (1, 12), (64, 40)])
def test_lookup_makes_the_tree_that_the_host_makes(sizes, nodes, length):
    made, table, written = lookups()
    *trees, nobody = looked_up(table, written, sizes, nodes, length)
    for text, tree_of in zip(made, trees, strict=True):
        store = Branches(*sizes)
        store.learn(text)
        assert tree_of == [(token, parent) for token, parent, _ in store.guess(text, nodes, length)]
    assert nobody == []
    assert sum(map(bool, trees)) == len(made) - 1, "the text of one token has nothing to copy"
    assert max(map(len, trees)) == nodes


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3)])
def test_lookup_copies_the_chain_that_the_host_copies(sizes):
    made, table, written = lookups()
    *chains, nobody = looked_up(table, written, sizes, 6, 6, matches=1, common=False)
    for text, chain in zip(made, chains, strict=True):
        store = Recent(*sizes)
        store.learn(text)
        assert chain == [(token, place - 1) for place, (token, _) in enumerate(store.guess(text, 6))]
    assert nobody == []
    assert sum(map(bool, chains)) >= 2


def test_beside_another_draft_lookup_has_no_common_tokens():
    """The same branches but for these, which may be longer for it."""
    made, table, written = lookups()
    both, matches = (looked_up(table, written, (1, 4), 10, 12, common=common) for common in (True, False))
    for text, whole, own in zip(made, both, matches, strict=False):
        followed = {text[place] for place in range(1, len(text)) if text[place - 1] == text[-1]}
        begun = [token for token, parent in own if parent < 0]
        assert begun == [token for token, parent in whole if parent < 0][: len(begun)]
        assert set(begun) <= followed
        assert len(begun) <= MATCHES
        assert len(own) == (10 if followed else 0)


@pytest.mark.parametrize(("rows", "step"), [(1, 0), (2, 0), (7, 0), (1, 1), (1, 3)])
def test_the_table_of_a_chain_is_the_one_that_the_host_writes(rows, step):
    """Texts shorter than the rows, one of a single token, and a place without a sequence."""
    lengths, size = (5, 30, 0), 4
    luck, theirs = random.Random(rows), PageTable(64, PAGE, 8, 128)
    chains = [[luck.randrange(90) for _ in range(size)] for _ in lengths]
    written = torch.full((4, 128), -3, dtype=torch.int32)
    table = torch.zeros(len(RoundField), 4, dtype=torch.int32)
    slots = torch.full((4,), theirs.padding, dtype=torch.int32)
    feeds, places = [], []
    for id, (length, chain) in enumerate(zip(lengths, chains, strict=True)):
        text = [luck.randrange(90) for _ in range(length + 1)]
        written[id, : len(text)] = torch.tensor(text)
        table[RoundField.LENGTH, id] = length
        fed = [*text, *chain[:step]][-rows:]
        theirs.extend(id, length + 1 + step - len(fed))
        slots[id] = theirs.extend(id, 0).slot
        feeds.append(Feed(id, fed))
        places += range((id + 1) * rows - len(fed), (id + 1) * rows)
    batch = Batch(feeds, theirs, GROUP)
    wanted = torch.zeros(len(Field), batch.rows, dtype=torch.int32)
    batch.write(wanted.numpy(), theirs.padding)
    ours = torch.full((len(Field), 4 * rows), -7, dtype=torch.int32)
    positions = torch.full((4 * rows,), -7)
    drafts = found([*map(Draft.chain, chains), Draft()], 1, size)
    kernels.enter_chain(drafts, table, written, slots, ours, positions, step, BLOCK, theirs.padding)
    for field in list(Field)[: Field.BLOCK_ROW]:
        assert ours[field, places].tolist() == wanted[field].tolist(), field.name
    assert positions[places].tolist() == (wanted[Field.POSITION] + 1).tolist()
    nobody = [row for row in range(4 * rows) if row not in places]
    assert (ours[Field.SLOT, nobody] == theirs.padding).all()
    led = [row for row in range(4 * rows) if ours[Field.BLOCK_COUNT, row]]
    blocks = [range(first, first + int(ours[Field.BLOCK_COUNT, first])) for first in led]
    assert [row for block in blocks for row in block] == places
    assert ours[Field.BLOCK_ROW, led].tolist() == led
    assert all(len(block) <= BLOCK and ours[Field.SLOT, block].unique().numel() == 1 for block in blocks)
    assert not ours[Field.BLOCK_TREE].any()
