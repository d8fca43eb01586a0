"""Several drafters together: their guesses form one tree, in which equal guesses are one node.

Where members agree or differ, the probability that each is right is learned from the probabilities that both state: for
a guess that both make, for a model's guess beside a copy, and for a copy beside a model's guess (`JointCalibration`).
Draws are not joined with guesses, because a law must be stated for all nodes or for none: if a tree held a guess beside
a draw only where the two differ, the draw would have decided what is in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from outrider.core.draft import EMPTY, ROOT, Draft, judged_tree
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Step
from outrider.drafters.confidence import JointCalibration
from outrider.drafters.rounds.base import RoundGuesser

# Probability of a node whose drafter does not say: as believed before any was seen (`engine/policy.py`).
ASSUMED = 0.7
HOPELESS = 0.02  # probability: a node that is reached less often than this is worth no row, however cheap
# How a guess stands to those of the other members: the same; another than that of a member alike; a model's beside that
# of a lookup, which hardly matters to it; that of a lookup where a model differs, which is seldom right.
AGREED, ALIKE, MODEL, COPY = range(4)
# What is believed of them before any was seen (`JointCalibration`), as fitted to the EAGLE head and lookup on 46 texts
# (LOG, 2026-11-18, where head and lookup differ); of members that are alike a guess.
PRIORS = ((0.6, 0.8, 0.35), (-0.5, 0.9, -0.3), (-0.2, 1.0, -0.15), (-1.7, 0.6, -0.35))
Note = tuple[int, str, float, float]  # one of these, the member, its own probability and the other's
Places = list[tuple[int, int]]  # nodes of the members' drafts that are one node of the tree: member, node
JudgedGuess = tuple[int, Places, float, Note | None]  # a token, who guesses it, its probability, and how that was found


@dataclass(frozen=True)
class JointGuess:
    """One token after a node of the tree."""

    places: Places
    stated: dict[int, float]  # by member that guesses it: how likely

    @property
    def best(self) -> float:
        return max(self.stated.values())


class Combined(Drafter):
    """The engine asks each member by itself, and those alone that pay; `propose` asks all."""

    reports_acceptance = True

    def __init__(self, name: str, members: Seq[Drafter]) -> None:
        self.name, self._members = name, tuple(members)
        self.layers = tuple(sorted({layer for member in members for layer in member.layers}))
        self.reads_prediction = any(member.reads_prediction for member in members)
        self.reads_grammar = all(member.reads_grammar for member in members)
        self.has_weights = any(member.has_weights for member in members)
        # names of the members that copy text they have seen; the others ask a model or a grammar
        self._copying = frozenset(each.name for each in members if each.is_free and not each.reads_grammar)
        self._calibrations: dict[tuple[int, str], JointCalibration] = {}
        # by sequence: the tree of this step, and the tokens that were committed before it
        self._trees: dict[int, tuple[Draft, list[Note | None], int]] = {}

    @property
    def members(self) -> tuple[Drafter, ...]:
        return self._members

    @property
    def takes_prefixes(self) -> bool:
        return all(member.takes_prefixes for member in self._members)

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        """The guessers of the members, if all members that draft have one; of two members if those may write without
        the others. One guesser, or two whose drafts can be joined; else none."""
        able = [member for member in self._members if member.drafts and member.guessers]
        # a chain that costs passes comes before a copy from the text, which can be joined with any draft
        members = sorted(able, key=lambda member: (member.guessers[0].joins, member.is_free))
        if self.some_may_write:
            members = [*members[:1], *members[1:][-1:]]
        elif len(able) < sum(member.drafts for member in self._members):
            return ()
        guessers = [guesser for member in members for guesser in member.guessers]
        joined = len(guessers) == 1 or (len(guessers) == 2 and guessers[1].joins)
        return tuple(guessers) if joined else ()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        found = [(member, member.propose(seqs, budgets)) for member in self._members]
        return [
            self.merge(seq, [(member, drafts[i]) for member, drafts in found]).cut(budgets[i])
            for i, seq in enumerate(seqs)
        ]

    def merge(self, seq: Sequence, found: Seq[tuple[Drafter, Draft]]) -> Draft:
        drawn = next(((member, draft) for member, draft in found if draft.probs is not None), None)
        found = [(member, draft) for member, draft in ([drawn] if drawn else found) if draft]
        self._trees.pop(seq.id, None)
        if len(found) < 2:
            return _named(*found[0]) if found else EMPTY
        tree, notes = self._merged([member.name for member, _ in found], [draft for _, draft in found])
        self._trees[seq.id] = tree, notes, len(seq.tokens)
        return tree

    def observe(self, step: Step) -> None:
        for member in self._members:
            hidden = None
            if member.layers and step.hidden is not None:
                hidden = step.hidden[:, [self.layers.index(layer) for layer in member.layers]]
            member.observe(replace(step, hidden=hidden))
        self.merged(step)

    def merged(self, step: Step) -> None:
        tree, notes, length = self._trees.pop(step.seq.id, (EMPTY, [], 0))
        if step.verdict is None or not tree:
            return
        for node, kept in judged_tree(tree.tokens, tree.parents, step.seq.tokens[length:]):
            if (note := notes[node]) is not None:
                self._calibration(note).learn(*note[2:], kept)

    def forget(self, id: int) -> None:
        for member in self._members:
            member.forget(id)
        self._trees.pop(id, None)

    def _calibration(self, note: Note) -> JointCalibration:
        found = self._calibrations.get(note[:2])
        if found is None:
            found = self._calibrations[note[:2]] = JointCalibration(PRIORS[note[0]])
        return found

    def _merged(self, names: Seq[str], drafts: Seq[Draft]) -> tuple[Draft, list[Note | None]]:
        """Level by level: a node of the tree stands for the nodes of the drafts that guess the same text."""
        tokens: list[int] = []
        parents: list[int] = []
        reach: list[float] = []
        acceptance: list[float] = []
        sources: list[str] = []
        notes: list[Note | None] = []
        below = [_children(draft) for draft in drafts]
        places: list[Places] = [[(member, ROOT) for member in range(len(drafts))]]
        node = ROOT
        while node < len(tokens):
            before = 1.0 if node == ROOT else reach[node]
            if len(places[node + 1]) == 1:  # nobody else has come here
                judged = _alone(drafts, below, *places[node + 1][0])
            else:
                judged = self._judged(names, _guesses(drafts, below, places[node + 1]))
            for token, own, probability, note in judged:
                if before * probability >= HOPELESS:
                    tokens.append(token)
                    parents.append(node)
                    reach.append(before * probability)
                    acceptance.append(probability)
                    sources.append(names[min(member for member, _ in own)])
                    notes.append(note)
                    places.append(own)
            node += 1
        return Draft(tuple(tokens), tuple(parents), None, tuple(sources), tuple(acceptance)), notes

    def _judged(self, names: Seq[str], guesses: dict[int, JointGuess]) -> list[JudgedGuess]:
        """The guesses after one node, likeliest first, each with its probability beside the others."""
        judged: list[JudgedGuess] = []
        for token, guess in guesses.items():
            note = self._note(names, guess, guesses)
            probability = guess.best if note is None else self._calibration(note).probability(*note[2:])
            judged.append((token, guess.places, probability, note))
        return sorted(judged, key=lambda each: -each[2]) if len(judged) > 1 else judged

    def _note(self, names: Seq[str], guess: JointGuess, guesses: dict[int, JointGuess]) -> Note | None:
        """How it stands to the others; None: nobody else has guessed here."""
        stated = guess.stated
        if len(stated) > 1:  # what a model says of it counts more than how many tokens matched
            first, second = sorted(stated, key=lambda member: (names[member] in self._copying, -stated[member]))[:2]
            return AGREED, names[first], stated[first], stated[second]
        ((member, own),) = stated.items()
        differing = [
            (probability, other)
            for each in guesses.values()
            if each is not guess
            for other, probability in each.stated.items()
            if other != member
        ]
        if not differing:
            return None
        probability, other = max(differing)
        copies, against = names[member] in self._copying, names[other] in self._copying
        return ALIKE if copies == against else COPY if copies else MODEL, names[member], own, probability


def _named(member: Drafter, draft: Draft) -> Draft:
    return replace(draft, sources=draft.named(member.name))


def _children(draft: Draft) -> list[list[int]]:
    """By node, beginning with the root."""
    below: list[list[int]] = [[] for _ in range(1 + len(draft))]
    for node, parent in enumerate(draft.parents):
        below[parent + 1].append(node)
    return below


def _alone(drafts: Seq[Draft], below: Seq[list[list[int]]], member: int, place: int) -> list[JudgedGuess]:
    """What one member alone guesses after a node."""
    draft = drafts[member]
    nodes = below[member][place + 1]
    return [(draft.tokens[n], [(member, n)], draft.acceptance[n] if draft.acceptance else ASSUMED, None) for n in nodes]


def _guesses(drafts: Seq[Draft], below: Seq[list[list[int]]], places: Places) -> dict[int, JointGuess]:
    """What comes after these nodes, by token."""
    found: dict[int, JointGuess] = {}
    for member, place in places:
        draft = drafts[member]
        for node in below[member][place + 1]:
            guess = found.setdefault(draft.tokens[node], JointGuess([], {}))
            stated = draft.acceptance[node] if draft.acceptance else ASSUMED
            guess.places.append((member, node))
            guess.stated[member] = max(stated, guess.stated.get(member, 0.0))
    return found
