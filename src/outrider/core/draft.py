"""A draft: guessed tokens hanging as a tree under the last committed token. A chain is a tree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1  # the last committed token, seen as a node


@functools.lru_cache(256)
def _chain(length: int) -> tuple[int, ...]:
    """The parents of a chain: the same object every time, so that chains are soon known to be some."""
    return tuple(range(ROOT, length - 1))


@dataclass(frozen=True, eq=False)
class Draft:
    """Immutable. `parents[i] < i`; a parent of -1 is the last committed token."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None  # [n, vocab] the law tokens[i] was drawn from; None: guessed, not drawn
    sources: tuple[str, ...] = ()  # the drafter of each node; "", or empty for all: the drafter that was asked
    acceptance: tuple[float, ...] = ()  # probability that each node is kept if its parent is; empty: not known
    # Nodes are dropped by their acceptance, so a drawn node's must not depend on the token that was drawn: a law of
    # which only the likely draws are shown is another law, and rejection would no longer be exact.

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if not self.is_chain and any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a node's parent must come before it")
        if self.probs is not None and self.probs.shape[0] != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {self.probs.shape[0]} laws")
        if self.sources and len(self.sources) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.sources)} sources")
        if self.acceptance and len(self.acceptance) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.acceptance)} acceptances")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        probs: Tensor | None = None,
        sources: Sequence[str] = (),
        acceptance: Sequence[float] = (),
    ) -> Draft:
        return cls(tuple(tokens), _chain(len(tokens)), probs, tuple(sources), tuple(acceptance))

    def __len__(self) -> int:
        return len(self.tokens)

    def named(self, drafter: str) -> tuple[str, ...]:
        """The drafter of each node, by name; `drafter` was asked."""
        return tuple(source or drafter for source in self.sources) if self.sources else (drafter,) * len(self)

    def count(self, drafter: str) -> int:
        """How many nodes are of this drafter, if it was asked."""
        return sum(source in ("", drafter) for source in self.sources) if self.sources else len(self.tokens)

    @property
    def is_chain(self) -> bool:
        chain = _chain(len(self.parents))
        return self.parents is chain or self.parents == chain

    def depths(self) -> list[int]:
        """How far below the last committed token each node hangs; its children have depth 1."""
        if self.is_chain:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def reach(self) -> list[float]:
        """The probability that each node is kept; never more than its parent's."""
        reach: list[float] = []
        for parent, probability in zip(self.parents, self.acceptance, strict=True):
            reach.append(probability * (1.0 if parent == ROOT else reach[parent]))
        return reach

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that guesses `token`."""
        tokens, parents = self.tokens, self.parents
        for i in range(node + 1, len(tokens)):
            if parents[i] == node and tokens[i] == token:
                return i
        return None

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root down to `node`, which comes last."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def mask(self) -> Tensor:
        """[n, n] bool: row i sees its ancestors and itself."""
        n = len(self.tokens)
        mask = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                mask[node] |= mask[parent]
        return mask

    def cut(self, count: int) -> Draft:
        """The first `count` nodes. Parents come first, so what is left is a tree."""
        if len(self) <= count:
            return self
        probs = None if self.probs is None else self.probs[:count]
        return Draft(self.tokens[:count], self.parents[:count], probs, self.sources[:count], self.acceptance[:count])

    def keep(self, nodes: Sequence[int]) -> Draft:
        """Only these nodes, in order; a node may stay only with its parent."""
        place = {ROOT: ROOT, **{node: i for i, node in enumerate(nodes)}}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            None if self.probs is None else self.probs[list(nodes)],
            tuple(self.sources[node] for node in nodes) if self.sources else (),
            tuple(self.acceptance[node] for node in nodes) if self.acceptance else (),
        )


EMPTY = Draft()


def judged_tree(tokens: Sequence[int], parents: Sequence[int], written: Sequence[int]) -> Sequence[tuple[int, bool]]:
    """The nodes of a tree that what was written has judged: those after each token of it, and whether each held."""
    node = ROOT
    judged: list[tuple[int, bool]] = []
    for token in written:
        kept = None
        for child in range(node + 1, len(tokens)):
            if parents[child] == node:
                held = tokens[child] == token
                judged.append((child, held))
                if held and kept is None:
                    kept = child
        if kept is None:
            break
        node = kept
    return judged


def followed_nodes(draft: Draft, written: Sequence[int]) -> int:
    """How many of the tokens that were written stand in the draft, one after the other."""
    node, count = ROOT, 0
    for token in written:
        child = draft.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count
