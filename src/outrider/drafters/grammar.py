"""Drafts text that the request's grammar forces, or nearly forces: keys, brackets, spaces between them, the rest of a
choice, and two or three possible values as branches. The target verifies it like any draft.

The text is guessed as the tokenizer would split it; the target may write it in other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace

from outrider.core.draft import EMPTY, ROOT, Draft, judged_tree
from outrider.core.errors import OutriderError
from outrider.core.grammar import Matcher
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step, likely_ends
from outrider.drafters.confidence import FADE, PRIOR_WEIGHT, Calibration
from outrider.drafters.spacing import CLOSING, NESTED_LINES, SPACES, Gap, JsonSpacing

# Bytes that are looked ahead for each token of a draft: tokens of keys and brackets rarely have more.
BYTES_PER_TOKEN = 8
REMEMBERED = 4096  # bytes of a text that is no JSON in which its way of spacing is looked for: some pages
OPTIONS = 3  # values that are guessed side by side, at most: the right one of more is seldom worth the others' rows
# Why a token of the draft was guessed, beside the kinds of spaces (`spacing.py`), least sure last: nothing else fits
# (but the target may write it in other tokens); outside of JSON, spaces as the text had them before, or as texts mostly
# have them; spaces where what comes after them is free; brackets with nothing in them; one of two or three values.
FORCED = 0
SPACED, USUAL, TRAILING, NOTHING, HALF, THIRD = range(NESTED_LINES + 1, NESTED_LINES + 7)
# The probability that is believed of each kind before any was seen. Chosen by hand; counts soon outvote it.
PRIOR = (0.95, 0.95, 0.9, 0.9, 0.9, 0.8, 0.6, 0.5, 0.5, 0.5, 0.4, 0.9, 0.6, 0.5, 0.1, 0.5, 0.33)
# What texts mostly have after these.
USUALLY = {b":"[0]: b" ", b","[0]: b" "}


class GrammarDrafter(Drafter):
    """Drafts nothing for a sequence without a grammar, or where the grammar leaves more than a few continuations."""

    name = "grammar"
    is_free = reads_grammar = reports_acceptance = True
    sees_all = False

    @dataclass(frozen=True)
    class Options:
        length: int = 16

    def __init__(self, options: Options, context: BuildContext) -> None:
        if options.length < 1:
            raise OutriderError(f"grammar:length must be at least 1, not {options.length}")
        self._length = options.length
        self._calibration = Calibration(len(PRIOR), FADE, PRIOR_WEIGHT)
        self._guesses: dict[int, list[_Guess]] = {}  # by sequence: those of the last step
        self._spacings: dict[int, tuple[JsonSpacing, int]] = {}  # by sequence: how it is spaced, and the bytes read

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(budget, self._length)) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        self._guesses.pop(seq.id, None)
        if seq.matcher is None or budget < 1:
            return EMPTY
        guess = self._guess(seq, seq.matcher, (), budget)
        return Draft(tuple(guess.tokens), tuple(guess.parents), acceptance=self._stated(guess))

    def extended(self, seq: Sequence, draft: Draft) -> Draft:
        """What others guessed goes on with what the grammar then forces: a copied value with the next key. A draw goes
        alone."""
        if seq.matcher is None or draft.probs is not None:
            return draft
        tokens, parents, acceptance = list(draft.tokens), list(draft.parents), list(draft.acceptance)
        for end in likely_ends(draft, self.name):
            path = tuple(draft.tokens[node] for node in draft.path(end))
            guess, before = self._guess(seq, seq.matcher, path, self._length), len(tokens)
            tokens += guess.tokens
            parents += [end if parent == ROOT else before + parent for parent in guess.parents]
            acceptance += self._stated(guess)
        sources = (*draft.sources, *[self.name] * (len(tokens) - len(draft)))
        return replace(
            draft, tokens=tuple(tokens), parents=tuple(parents), sources=sources, acceptance=tuple(acceptance)
        )

    def _guess(self, seq: Sequence, matcher: Matcher, before: tuple[int, ...], budget: int) -> _Guess:
        """What follows the committed tokens and those `before`."""
        guess = _Guess(len(seq.tokens), before)
        start = _Text(b"", self._spacing(seq.id, matcher).copy())
        for token in before:
            start.spacing.read(matcher.text(token))
        texts = _continued(matcher, before, start, budget * BYTES_PER_TOKEN)
        for path in _told_apart([_path(matcher, text, budget) for text in texts]):
            guess.add(path)
        if guess.tokens:
            self._guesses.setdefault(seq.id, []).append(guess)
        return guess

    def _spacing(self, id: int, matcher: Matcher) -> JsonSpacing:
        """Of the committed text."""
        spacing, read = self._spacings.get(id, (None, 0))
        if spacing is None or read > len(matcher.written):
            spacing, read = JsonSpacing(), 0
        spacing.read(bytes(matcher.written[read:]))
        self._spacings[id] = spacing, len(matcher.written)
        return spacing

    def _stated(self, guess: _Guess) -> tuple[float, ...]:
        return tuple(self._calibration.frequency(kind, PRIOR[kind]) for kind in guess.kinds)

    def observe(self, step: Step) -> None:
        """Learn how often guesses of each kind hold."""
        guesses = self._guesses.pop(step.seq.id, [])
        if step.verdict is None:
            return
        for guess in guesses:
            written = step.seq.tokens[guess.length :]
            if tuple(written[: len(guess.before)]) == guess.before:
                for node, kept in judged_tree(guess.tokens, guess.parents, written[len(guess.before) :]):
                    self._calibration.count(guess.kinds[node], kept)

    def forget(self, id: int) -> None:
        self._guesses.pop(id, None)
        self._spacings.pop(id, None)


@dataclass(eq=False)
class _Guess:
    """A draft in full, with the kind of each node."""

    length: int  # tokens that were committed then
    before: tuple[int, ...]  # others' guesses that it continues
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, path: _Path) -> None:
        """One more path; what it shares with others stands there once."""
        parent = ROOT
        for token, kind in zip(path.tokens, path.kinds, strict=True):
            known = (n for n in range(parent + 1, len(self.tokens)) if self.parents[n] == parent)
            node = next((n for n in known if self.tokens[n] == token), None)
            if node is None:
                node = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.kinds.append(kind)
            parent = node


@dataclass(frozen=True)
class _Text:
    """What may follow: bytes, and the places where something was guessed, each with its kind."""

    text: bytes
    spacing: JsonSpacing  # of the whole text up to here
    marks: tuple[tuple[int, int], ...] = ()
    choice: int = FORCED  # one of several texts: the kind of this choice

    def and_then(self, more: bytes, kind: int = FORCED) -> _Text:
        marks = self.marks if kind == FORCED else (*self.marks, (len(self.text), kind))
        spacing = self.spacing.copy()
        spacing.read(more)
        return _Text(self.text + more, spacing, marks, self.choice)


@dataclass(frozen=True)
class _Path:
    """The text in the tokenizer's own tokens, and the kind of each."""

    tokens: list[int]
    kinds: list[int]
    choice: int


def _continued(matcher: Matcher, before: tuple[int, ...], so_far: _Text, most: int) -> Iterator[_Text]:
    """What must follow, and beyond spaces that may: JSON allows them nearly everywhere, and texts keep to one way.
    At the first choice between a few values there is a text for each."""
    while len(so_far.text) < most:
        path = (*before, *matcher.spelled(so_far.text))
        if forced := matcher.forced(path):
            so_far = so_far.and_then(forced)
            path = (*before, *matcher.spelled(so_far.text))
        starts = matcher.first_bytes(path)
        if not starts:
            break
        values, spaced = sorted(starts - set(SPACES)), not starts.isdisjoint(SPACES)
        if not 0 < len(values) <= OPTIONS:
            if spaced and values and (gap := _gaps(matcher, so_far, None)):
                so_far = so_far.and_then(gap[0][0], TRAILING)
            break
        gaps = _gaps(matcher, so_far, values[0]) if spaced else [(b"", FORCED)]
        if len(values) * len(gaps) == 1:
            so_far = so_far.and_then(gaps[0][0] + bytes(values), gaps[0][1])
            continue
        if so_far.choice != FORCED:
            break
        for text in _choices(so_far, gaps, values):
            yield from _continued(matcher, before, text, most)
        return
    if so_far.text:
        yield so_far


def _choices(so_far: _Text, gaps: Seq[Gap], values: Seq[int]) -> Iterator[_Text]:
    """One text for each value, and for each way of spacing before it."""
    several = HALF if len(values) == 2 else THIRD
    for gap, kind in gaps:
        for value in values:
            if len(gaps) > 1 and value in CLOSING:
                continue
            text = so_far.and_then(gap + bytes([value]), kind if gap and len(gaps) == 1 else FORCED)
            yield replace(text, choice=several if len(gaps) == 1 else kind)
    for value in values if len(gaps) > 1 else ():
        if value in CLOSING:
            yield replace(so_far.and_then(bytes([value])), choice=NOTHING)


def _path(matcher: Matcher, guessed: _Text, most: int) -> _Path:
    tokens = matcher.encode(guessed.text)[:most]
    kinds, end, marks = [], 0, list(guessed.marks)
    for token in tokens:
        end += len(matcher.text(token))
        inside = [kind for place, kind in marks if place < end]
        marks = marks[len(inside) :]
        kinds.append(max(inside, default=FORCED))
    return _Path(tokens, kinds, guessed.choice)


def _told_apart(paths: Seq[_Path]) -> Seq[_Path]:
    """The choice between several is made by the first token in which one differs from all others."""
    for path in paths:
        shared = [_shared(path.tokens, other.tokens) for other in paths if other is not path]
        if shared and max(shared) < len(path.tokens):
            path.kinds[max(shared)] = path.choice
    return paths


def _shared(one: Seq[int], other: Seq[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _gaps(matcher: Matcher, so_far: _Text, value: int | None) -> list[Gap]:
    """The spaces that may come after the text and before `value` (None: something free), each with its kind."""
    if so_far.spacing.inside:
        return so_far.spacing.gaps(value)
    whole = bytes(matcher.written[-REMEMBERED:]) + so_far.text
    if not whole or whole[-1] in SPACES:
        return [] if value is None else [(b"", SPACED)]
    before = _earlier(whole)
    if before == -1:
        return [(USUALLY.get(whole[-1], b""), USUAL)]
    rest = whole[before + 1 :]
    return [(rest[: len(rest) - len(rest.lstrip(SPACES))], SPACED)]


def _earlier(whole: bytes) -> int:
    """Where the last character stood before: after the same one if it did, as a colon may also stand in a string."""
    pair = whole.rfind(whole[-2:], 0, len(whole) - 1)
    return pair + 1 if pair != -1 and len(whole) > 1 else whole.rfind(whole[-1:], 0, len(whole) - 1)
