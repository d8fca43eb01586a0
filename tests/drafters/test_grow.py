"""Trees: of all nodes that a head could guess, the likeliest are kept. And what confidence is worth."""

import itertools
import math

import pytest
import torch
from tiny import eagle_head, family

from outrider.drafters.eagle.torch_runner import DenseRunner
from outrider.drafters.eagle.tree import grow
from outrider.models.base import Feed

TEXT = [3, 17, 5, 22, 9, 31, 2]
WORDS = 4  # tokens that the head can write
DEPTH = 3


@pytest.fixture(scope="module")
def work():
    """A head that knows four tokens, its states after a text, and what it says after every path, one path at a time."""
    model = family("llama")[1]
    torch.manual_seed(3)
    head = eagle_head(model, torch.tensor([1, 8, 20, 33])).requires_grad_(False)
    runner = DenseRunner(head, model)
    (output,) = model.forward([Feed(-1, TEXT)], head.reads)
    model.free(-1)

    def root(ids=(0,)):
        return runner.extend(ids, [TEXT[1:]] * len(ids), torch.cat([output.hidden[:-1]] * len(ids)))

    return head, runner, root


def reach_of_every_path(head, runner, root):
    reach = {(): 0.0}
    for depth in range(1, DEPTH + 1):
        for path in itertools.product(range(WORDS), repeat=depth):
            runner.free(0)
            rows = root()
            for level, word in enumerate(path[:-1]):
                token = head.draft_ids[word : word + 1]
                rows = runner.step([0], token, rows.states, torch.arange(level).unsqueeze(0))
            reach[path] = reach[path[:-1]] + float(torch.log_softmax(rows.logits[0], 0)[path[-1]])
    runner.free(0)
    return reach


def offers(head, width):
    def likeliest(logits, paths, depth):
        best = torch.log_softmax(logits, -1).topk(width)
        return head.draft_ids[best.indices], best.values

    return likeliest


def paths_of(grown, head):
    words = {int(token): word for word, token in enumerate(head.draft_ids)}
    paths = []
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), words[token]))
    return paths


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_likeliest_nodes_are_kept(work, size):
    head, runner, root = work
    reach = reach_of_every_path(*work)
    best = sorted((path for path in reach if path), key=lambda path: -reach[path])[:size]
    (grown,) = grow(runner, [0], root(), offers(head, WORDS), DEPTH, [size], 0.0)
    runner.free(0)
    assert set(paths_of(grown, head)) == set(best)
    for path, chance in zip(paths_of(grown, head), grown.acceptance, strict=True):
        assert chance == pytest.approx(math.exp(reach[path] - reach[path[:-1]]), rel=1e-3)


def test_every_node_has_the_chance_that_it_has_on_its_own_path(work):
    head, runner, root = work
    reach = reach_of_every_path(*work)
    (grown,) = grow(runner, [0], root(), offers(head, WORDS), DEPTH, [100], 0.0)
    runner.free(0)
    paths = paths_of(grown, head)
    assert len(paths) == len(set(paths)) == WORDS + 2 * WORDS * WORDS
    for path, chance in zip(paths, grown.acceptance, strict=True):
        assert chance == pytest.approx(math.exp(reach[path] - reach[path[:-1]]), rel=1e-3)


def test_each_sequence_has_its_own_size_and_every_parent_comes_first(work):
    head, runner, root = work
    sizes = [9, 1, 5]
    trees = grow(runner, [0, 1, 2], root((0, 1, 2)), offers(head, 3), DEPTH, sizes, 0.0)
    for id in range(3):
        runner.free(id)
    assert [len(tree.tokens) for tree in trees] == sizes
    for tree in trees:
        assert all(parent < node for node, parent in enumerate(tree.parents))
        paths = paths_of(tree, head)
        assert len(set(paths)) == len(paths)
    assert set(paths_of(trees[2], head)) <= set(paths_of(trees[0], head))


def test_a_node_that_is_unlikely_to_be_reached_is_left_out(work):
    head, runner, root = work
    reach = reach_of_every_path(*work)
    (grown,) = grow(runner, [0], root(), offers(head, WORDS), DEPTH, [50], 0.2)
    runner.free(0)
    assert set(paths_of(grown, head)) == {path for path in reach if path and reach[path] >= math.log(0.2)}


def test_it_ends_where_no_deeper_node_can_be_among_the_best(work):
    """And is the same tree as one that went on."""
    head, runner, root = work
    steps = []

    class Counting:
        def step(self, *rows):
            steps.append(rows)
            return runner.step(*rows)

    reach = reach_of_every_path(*work)
    best = max((path for path in reach if path), key=lambda path: reach[path])
    (grown,) = grow(Counting(), [0], root(), offers(head, WORDS), DEPTH, [1], 0.0)
    runner.free(0)
    assert paths_of(grown, head) == [best]
    assert len(best) == 1
    assert not steps, "one node, and the likeliest is known at once"


def test_a_tree_that_is_not_full_grows_to_the_end(work):
    """One node at each depth: none is ever likelier than the last that is there."""
    head, runner, root = work
    (grown,) = grow(runner, [0], root(), offers(head, 1), DEPTH, [10], 0.0)
    runner.free(0)
    assert grown.parents == list(range(-1, DEPTH - 1))
