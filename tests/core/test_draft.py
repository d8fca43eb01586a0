"""A draft is a tree, whatever is done to it."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from outrider.core.draft import EMPTY, ROOT, Draft, followed_nodes, judged_tree


@st.composite
def drafts(draw, most=12):
    count = draw(st.integers(0, most))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    tokens = tuple(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    names = tuple(f"drafter {node}" for node in range(count))
    chances = tuple(1 / (2 + node) for node in range(count))
    return (
        Draft(tokens, parents, torch.rand(count, 4), names, chances) if draw(st.booleans()) else Draft(tokens, parents)
    )


def ancestors(draft, node):
    """The node and all above it."""
    return {node} | (set() if draft.parents[node] == ROOT else ancestors(draft, draft.parents[node]))


@given(drafts())
def test_a_node_hangs_one_below_its_parent(draft):
    depths = draft.depths()
    for node, parent in enumerate(draft.parents):
        assert depths[node] == (1 if parent == ROOT else depths[parent] + 1)


@given(drafts())
def test_a_path_leads_from_the_root_to_the_node(draft):
    for node in range(len(draft)):
        path = draft.path(node)
        assert path[-1] == node
        assert draft.parents[path[0]] == ROOT
        assert all(draft.parents[below] == above for above, below in itertools.pairwise(path))
        assert len(path) == draft.depths()[node]
    assert draft.path(ROOT) == ()


@given(drafts())
def test_a_node_sees_its_ancestors_and_itself(draft):
    mask = draft.mask()
    assert mask.shape == (len(draft), len(draft))
    for node in range(len(draft)):
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors(draft, node)


@given(drafts())
def test_children(draft):
    for node in range(ROOT, len(draft)):
        children = draft.children(node)
        assert children == [i for i in range(len(draft)) if draft.parents[i] == node]
        for token in range(4):
            of_token = [i for i in children if draft.tokens[i] == token]
            assert draft.child(node, token) == (of_token[0] if of_token else None)  # the first of twins


@given(drafts(), st.integers(0, 14))
def test_what_is_cut_is_a_tree(draft, room):
    cut = draft.cut(room)
    assert len(cut) == min(room, len(draft))
    assert cut.tokens == draft.tokens[:room]
    assert cut.depths() == draft.depths()[:room]
    assert torch.equal(cut.mask(), draft.mask()[:room, :room])
    assert (cut.sources, cut.acceptance) == (draft.sources[:room], draft.acceptance[:room])
    assert (cut.probs is None) == (draft.probs is None)
    if draft.probs is not None:
        assert torch.equal(cut.probs, draft.probs[:room])


@given(drafts(), st.data())
def test_nodes_that_stay_keep_what_they_are(draft, data):
    """Any set of nodes whose parents are in it."""
    kept = []
    for node, parent in enumerate(draft.parents):
        if (parent == ROOT or parent in kept) and data.draw(st.booleans()):
            kept.append(node)
    rest = draft.keep(kept)
    for new, old in enumerate(kept):
        assert [rest.tokens[i] for i in rest.path(new)] == [draft.tokens[i] for i in draft.path(old)]
        assert rest.sources[new : new + 1] == draft.sources[old : old + 1]
        assert rest.acceptance[new : new + 1] == draft.acceptance[old : old + 1]
        assert draft.probs is None or torch.equal(rest.probs[new], draft.probs[old])
    assert len(rest) == len(kept)


@given(st.lists(st.integers(0, 9), max_size=8))
def test_a_chain_is_a_tree(tokens):
    chain = Draft.chain(tokens)
    assert chain.is_chain
    assert chain.depths() == list(range(1, len(tokens) + 1))
    assert torch.equal(chain.mask(), torch.ones(len(tokens), len(tokens)).tril().bool())


@given(drafts())
def test_only_a_chain_is_a_chain(draft):
    assert draft.is_chain == (draft.parents == tuple(range(-1, len(draft) - 1)))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(tokens=(1, 2), parents=(-1,)), "2 tokens but 1 parents"),
        (dict(tokens=(1,), parents=(0,)), "parent must come before"),
        (dict(tokens=(1, 2), parents=(-1, -2)), "parent must come before"),
        (dict(tokens=(1, 2), parents=(1, -1)), "parent must come before"),
        (dict(tokens=(1,), parents=(-1,), probs=torch.ones(2, 3)), "1 tokens but 2 laws"),
        (dict(tokens=(1,), parents=(-1,), sources=("a", "b")), "1 tokens but 2 sources"),
        (dict(tokens=(1,), parents=(-1,), acceptance=(0.5, 0.5)), "1 tokens but 2 acceptances"),
    ],
)
def test_what_is_not_a_tree_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Draft(**fields)


def test_a_draft_does_not_change():
    with pytest.raises(AttributeError):
        EMPTY.tokens = (1,)
    assert not EMPTY
    assert EMPTY.is_chain


def test_judged_are_the_nodes_after_what_was_written():
    draft = Draft((5, 6, 7, 5, 8), (-1, -1, 0, 0, 3))
    assert judged_tree(draft.tokens, draft.parents, [5, 5, 9, 8]) == [
        (0, True),
        (1, False),
        (2, False),
        (3, True),
        (4, False),
    ]
    assert judged_tree(draft.tokens, draft.parents, [6, 1]) == [(0, False), (1, True)]
    assert judged_tree(draft.tokens, draft.parents, []) == []
    assert [followed_nodes(draft, written) for written in ([5, 5, 8, 1], [5, 7], [5, 9, 8], [1], [])] == [3, 2, 1, 0, 0]


@given(drafts(), st.lists(st.integers(0, 9), max_size=8))
def test_followed_are_the_first_judged_nodes_that_held(draft, written):
    """Of guesses that are the same one counts."""
    held = [node for node, kept in judged_tree(draft.tokens, draft.parents, written) if kept]
    assert followed_nodes(draft, written) == len({draft.parents[node] for node in held})


def test_nodes_are_counted_by_their_drafter():
    assert [Draft((1, 2, 3), (-1, 0, 1), sources=("a", "b", "")).count(name) for name in "abc"] == [2, 2, 1]
    assert Draft((1, 2), (-1, 0)).count("any") == 2
