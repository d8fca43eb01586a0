"""Prompt lookup: drafts what followed when the last tokens occurred earlier in the text (Saxena 2023; Ou et al. 2024).

`store=recent` copies what came after the most recent earlier occurrence of the longest matching n-gram. On a GPU, where
rows of a pass are nearly free, the draft is a tree of several continuations (`branches.py`).
`store=adaptive` counts what followed every n-gram of prompt and output so far and writes the likeliest continuation
token by token (adaptive n-gram parallel decoding).

How far a guess can be trusted depends on how many tokens match, and on whether the same token also followed the time
before. This is learned from every token that is written, drafted or not: looking costs nothing, so a drafter that was
wrong for a while notices when it is right again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from outrider.core.draft import EMPTY, Draft, judged_tree
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.branches import PRIORS, Branches, Node
from outrider.drafters.confidence import AGREED, ALONE, DIFFERED, LONGEST, MatchCalibration, judged_chain, match_kind
from outrider.drafters.rounds.base import RoundGuesser
from outrider.models.base import Model, Paged

HOPELESS = 0.02  # probability: a node of a chain that is reached less often than this is worth no row, however cheap
# Nodes of a tree on a GPU: with the last token they are 32 rows, which share a tile of its kernels. On a CPU the best
# tree is worth 0.5 % more than a chain, before what it takes to look for one (LOG, 2026-11-18, lookup as a tree).
TREE_ON_GPU = 31
LARGEST_TREE = 64  # nodes: bits of a path on a GPU
FEW = 16  # new tokens up to which n-grams are cut out one by one; for more (a prompt) zipped columns are faster
Guess = list[tuple[int, int]]  # tokens, each with its kind of match (`match_kind`)


class Ngram(Drafter):
    name = "ngram"
    reports_acceptance = is_free = True
    sees_all = False
    variants = ("tree=16",)

    @dataclass(frozen=True)
    class Options:
        max_n: int = 4  # the longest n-gram that is looked up, at most LONGEST; shorter ones follow
        min_n: int = 1
        length: int = 12
        store: Literal["recent", "adaptive"] = "recent"
        tree: int = -1  # nodes; 0: a chain; -1: on a GPU 31, else a chain

    def __init__(self, options: Options, context: BuildContext) -> None:
        if not 1 <= options.min_n <= options.max_n:
            raise OutriderError(f"ngram needs 1 <= min_n <= max_n, not min_n={options.min_n}, max_n={options.max_n}")
        if options.max_n > LONGEST:  # every n-gram of every size is kept, for each sequence
            raise OutriderError(f"ngram:max_n must be at most {LONGEST}, not {options.max_n}")
        if options.length < 1:
            raise OutriderError(f"ngram:length must be at least 1, not {options.length}")
        self._options, self._tree = options, _tree(options, context.target)
        # over all sequences
        self._calibration = MatchCalibration(priors=PRIORS) if self._tree else MatchCalibration()
        self._states: dict[int, _NgramState] = {}
        self._guesser = _on_device(self.name, options, self._tree, context.target)

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        return () if self._guesser is None else (self._guesser,)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = _NgramState(self._store(), MatchCalibration(self._calibration))
        state.store.learn(seq.tokens)
        state.length = len(seq.tokens)
        if isinstance(state.store, Branches):
            state.guess = state.store.guess(seq.tokens, min(self._tree, budget), self._options.length)
            return _as_tree(state.guess, state.calibration)
        copied = state.store.guess(seq.tokens, self._options.length)
        state.guess = [(token, place - 1, kind) for place, (token, kind) in enumerate(copied)]
        return _as_chain(copied[:budget], state.calibration)

    def _store(self) -> Recent | Adaptive | Branches:
        kind = Branches if self._tree else Recent if self._options.store == "recent" else Adaptive
        return kind(self._options.min_n, self._options.max_n)

    def observe(self, step: Step) -> None:
        state = self._states.get(step.seq.id)
        if state is None or step.verdict is None:
            return
        guessed, written = [token for token, _, _ in state.guess], step.seq.tokens[state.length :]
        parents = [parent for _, parent, _ in state.guess] if self._tree else ()
        judged = judged_tree(guessed, parents, written) if self._tree else judged_chain(guessed, written)
        for node, kept in judged:
            state.calibration.learn(state.guess[node][2], kept)
        state.guess = []  # judged: it may not be asked for the next step

    def forget(self, id: int) -> None:
        self._states.pop(id, None)


def _tree(options: Ngram.Options, target: Model) -> int:
    """Nodes of a tree; 0: a chain."""
    if not -1 <= options.tree <= LARGEST_TREE:
        raise OutriderError(f"ngram:tree must be at most {LARGEST_TREE}, 0 or -1, not {options.tree}")
    if options.store == "adaptive":
        if options.tree > 0:
            raise OutriderError("ngram:tree needs store=recent: store=adaptive writes one continuation")
        return 0
    usual = TREE_ON_GPU if isinstance(target, Paged) else 0
    return usual if options.tree < 0 else options.tree


def _as_chain(copied: Guess, calibration: MatchCalibration) -> Draft:
    tokens: list[int] = []
    acceptance: list[float] = []
    reach = 1.0
    for token, kind in copied:
        tokens.append(token)
        acceptance.append(calibration.probability(kind))
        reach *= acceptance[-1]
        if reach < HOPELESS:
            break
    return Draft.chain(tokens, acceptance=acceptance) if tokens else EMPTY


def _as_tree(nodes: Seq[Node], calibration: MatchCalibration) -> Draft:
    if not nodes:
        return EMPTY
    tokens, parents, kinds = zip(*nodes, strict=True)
    return Draft(tokens, parents, acceptance=tuple(map(calibration.probability, kinds)))


def _on_device(name: str, options: Ngram.Options, tree: int, target: Model) -> RoundGuesser | None:
    """Lookup beside a target that writes in rounds."""
    if options.store == "adaptive" or not isinstance(target, Paged):
        return None
    from outrider.drafters.rounds.lookup import LookupGuesser  # needs Triton, as such a target does
    from outrider.models.cuda.model import CudaLlama

    if not isinstance(target, CudaLlama):
        return None
    return LookupGuesser(name, target, (options.min_n, options.max_n), options.length, tree)


@dataclass(eq=False)
class _NgramState:
    """What is known of one sequence."""

    store: Recent | Adaptive | Branches
    calibration: MatchCalibration
    guess: list[Node] = field(default_factory=list)  # the last one, of a chain in full
    length: int = 0  # tokens that were committed then


class Recent:
    """For every n-gram, where its most recent occurrence ended, and the one before."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}
        self._seen = 0  # n-grams that end before this place are known

    def learn(self, tokens: list[int]) -> None:
        """Take in the n-grams that end before the last token: the last one has no continuation yet."""
        ends, older = self._ends, self._older
        last = len(tokens) - 1
        for n in self._sizes:
            for gram, end in _grams(tokens, n, max(self._seen + 1, n), last):
                before = ends.get(gram)
                if before is not None:
                    older[gram] = before
                ends[gram] = end
        self._seen = max(self._seen, last)

    def guess(self, tokens: list[int], length: int) -> Guess:
        """What follows the match; past the end it goes on with what it has copied (a text that repeats itself)."""
        for n in self._sizes:
            gram = tuple(tokens[-n:])
            end = self._ends.get(gram) if n <= len(tokens) else None
            if end is not None:
                return _copied(tokens, end, self._older.get(gram), _matched(tokens, end, n), length)
        return []


def _grams(tokens: list[int], n: int, first: int, last: int) -> Iterable[tuple[tuple[int, ...], int]]:
    """The n-grams of n tokens that end at `first` to `last`, each with its end."""
    if last - first < FEW:
        return [(tuple(tokens[end - n : end]), end) for end in range(first, last + 1)]
    columns = (tokens[first - n + i : last - n + 1 + i] for i in range(n))
    return zip(zip(*columns, strict=True), range(first, last + 1), strict=True)


def _copied(tokens: list[int], end: int, older: int | None, matched: int, length: int) -> Guess:
    period, others = len(tokens) - end, ALONE if older is None else AGREED
    guessed: Guess = []
    for i in range(length):
        token = tokens[end + i % period]
        if older is not None and older + i < len(tokens) and tokens[older + i] != token:
            guessed.append((token, match_kind(matched + i, DIFFERED)))
            older, others = None, ALONE
        else:
            guessed.append((token, match_kind(matched + i, others)))
    return guessed


def _matched(tokens: list[int], end: int, n: int) -> int:
    """How many tokens before `end` are the last tokens; n of them are known to be."""
    while n < min(end, LONGEST) and tokens[end - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


class Adaptive:
    """For every n-gram, how often each token followed it."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._next: dict[tuple[int, ...], Counter[int]] = {}
        self._seen = 0  # continuations before this place are counted

    def learn(self, tokens: list[int]) -> None:
        for place in range(self._seen, len(tokens)):
            for n in self._sizes:
                if n <= place:
                    self._next.setdefault(tuple(tokens[place - n : place]), Counter())[tokens[place]] += 1
        self._seen = max(self._seen, len(tokens))

    def guess(self, tokens: list[int], length: int) -> Guess:
        tail = list(tokens[-self._sizes.start :])
        guessed: Guess = []
        while len(guessed) < length:
            found = self._follow(tail)
            if found is None:
                break
            guessed.append(found)
            tail.append(found[0])
        return guessed

    def _follow(self, tail: list[int]) -> tuple[int, int] | None:
        for n in self._sizes:
            counts = self._next.get(tuple(tail[-n:])) if n <= len(tail) else None
            if counts:
                return counts.most_common(1)[0][0], match_kind(n)
        return None
