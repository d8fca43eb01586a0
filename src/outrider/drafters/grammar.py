"""Text that the request's grammar forces, or nearly forces: keys, brackets, spaces between them, the rest of a choice,
two or three values as branches. The target confirms it like any draft.

The text is guessed in the tokenizer's own tokens; the target is free to write it in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace

from outrider.core.draft import EMPTY, ROOT, Draft, judged_tree
from outrider.core.errors import OutriderError
from outrider.core.grammar import Matcher
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.confidence import FADE, PRIOR_WEIGHT, Calibration

# Bytes that are looked ahead for each token of a draft: tokens of keys and brackets rarely have more.
BYTES_PER_TOKEN = 8
SPACES = b" \n\r\t"
OPENING, CLOSING = b"{[", b"}]"
REMEMBERED = 4096  # bytes of the text in which its way of spacing is looked for: some pages
OPTIONS = 3  # values that are guessed side by side, at most: the right one of more is seldom worth the others' rows
# Why a token of the draft was guessed, with the probability that is believed before any was seen: nothing else fits
# (but the target may write it in other tokens); it begins with spaces as the text had them before, or as texts mostly
# have them; spaces where what comes after them is free; the first line of JSON, and a first line break in it; one of
# two or three values.
FORCED, SPACED, USUAL, TRAILING, ONE_LINE, LINES, HALF, THIRD = range(8)
PRIOR = (0.95, 0.9, 0.6, 0.5, 0.5, 0.5, 0.5, 0.33)
# What models mostly write after these before they have shown their own way, in JSON.
USUALLY = {b":"[0]: b" ", b","[0]: b" "}
LINE = b"\n  "  # after the first bracket, where JSON is written on several lines


class GrammarDrafter(Drafter):
    """Drafts nothing for a sequence without a grammar, or where the grammar leaves more than a few continuations."""

    name = "grammar"
    is_free = reads_grammar = reports_acceptance = True

    @dataclass(frozen=True)
    class Options:
        length: int = 16

    def __init__(self, options: Options, context: BuildContext) -> None:
        if options.length < 1:
            raise OutriderError(f"grammar:length must be at least 1, not {options.length}")
        self._length = options.length
        self._calibration = Calibration(len(PRIOR), FADE, PRIOR_WEIGHT)
        self._guesses: dict[int, _Guess] = {}  # by sequence: the last one

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(budget, self._length)) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        self._guesses.pop(seq.id, None)
        if seq.matcher is None or budget < 1:
            return EMPTY
        texts = _continued(seq.matcher, _Text(), budget * BYTES_PER_TOKEN)
        guess = _Guess(len(seq.tokens))
        for path in _told_apart([_path(seq.matcher, text, budget) for text in texts]):
            guess.add(path)
        if not guess.tokens:
            return EMPTY
        self._guesses[seq.id] = guess
        acceptance = tuple(self._calibration.frequency(kind, PRIOR[kind]) for kind in guess.kinds)
        return Draft(tuple(guess.tokens), tuple(guess.parents), acceptance=acceptance)

    def observe(self, step: Step) -> None:
        """Learn how often guesses of each kind hold."""
        guess = self._guesses.pop(step.seq.id, None)
        if guess is None or step.verdict is None:
            return
        for node, kept in judged_tree(guess.tokens, guess.parents, step.seq.tokens[guess.length :]):
            self._calibration.count(guess.kinds[node], kept)

    def forget(self, id: int) -> None:
        self._guesses.pop(id, None)


@dataclass(eq=False)
class _Guess:
    """A draft in full, with the kind of each node."""

    length: int  # tokens that were committed then
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

    text: bytes = b""
    marks: tuple[tuple[int, int], ...] = ()
    choice: int = FORCED  # one of several texts: the kind of this choice

    def and_then(self, more: bytes, kind: int = FORCED) -> _Text:
        marks = self.marks if kind == FORCED else (*self.marks, (len(self.text), kind))
        return _Text(self.text + more, marks, self.choice)


@dataclass(frozen=True)
class _Path:
    """The text in the tokenizer's own tokens, and the kind of each."""

    tokens: list[int]
    kinds: list[int]
    choice: int


def _continued(matcher: Matcher, so_far: _Text, most: int) -> Iterator[_Text]:
    """What must follow, and beyond spaces that may: JSON allows them nearly everywhere, and texts keep to one way.
    At the first choice between a few values there is a text for each."""
    while len(so_far.text) < most:
        path = matcher.spelled(so_far.text)
        if forced := matcher.forced(path):
            so_far = so_far.and_then(forced)
            path = matcher.spelled(so_far.text)
        starts = matcher.first_bytes(path)
        if not starts:
            break
        values, spaced = sorted(starts - set(SPACES)), not starts.isdisjoint(SPACES)
        if not 0 < len(values) <= OPTIONS:
            if spaced and values and (gap := _gap(matcher, so_far.text, None)):
                so_far = so_far.and_then(gap[0][0], TRAILING)
            break
        gaps = _gap(matcher, so_far.text, values[0]) if spaced else [(b"", FORCED)]
        if len(values) * len(gaps) == 1:
            so_far = so_far.and_then(gaps[0][0] + bytes(values), gaps[0][1])
            continue
        if so_far.choice != FORCED:
            break
        for text in _choices(so_far, gaps, values):
            yield from _continued(matcher, text, most)
        return
    if so_far.text:
        yield so_far


def _choices(so_far: _Text, gaps: Seq[tuple[bytes, int]], values: Seq[int]) -> Iterator[_Text]:
    """One text for each value, or for each way of spacing before the only one."""
    if len(values) == 1:
        for gap, kind in gaps:
            yield replace(so_far.and_then(gap + bytes(values)), choice=kind)
        return
    gap, kind = gaps[0]
    for value in values:
        text = so_far.and_then(gap + bytes([value]), kind if gap else FORCED)
        yield replace(text, choice=HALF if len(values) == 2 else THIRD)


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


def _gap(matcher: Matcher, text: bytes, value: int | None) -> list[tuple[bytes, int]]:
    """The spaces that may come after the text and before `value` (None: something free), each with its kind."""
    whole = bytes(matcher.written[-REMEMBERED:]) + text
    if not whole or whole[-1] in SPACES:
        return [] if value is None else [(b"", SPACED)]
    if value is not None and value in CLOSING:
        return [(_closing(whole), SPACED)]
    before = _earlier(whole)
    if before == -1 and whole[-1] in OPENING and value is not None:
        return [(b"", ONE_LINE), (LINE, LINES)]
    if before == -1 and whole[-1:] == b"," and (line := _after(whole, whole.find(b"{"))).startswith(b"\n"):
        return [(line, SPACED)]
    if before == -1:
        return [(USUALLY.get(whole[-1], b""), USUAL)]
    return [(_after(whole, before), SPACED)]


def _earlier(whole: bytes) -> int:
    """Where the last character stood before: after the same one if it did, as a colon may also stand in a string."""
    pair = whole.rfind(whole[-2:], 0, len(whole) - 1)
    return pair + 1 if pair != -1 and len(whole) > 1 else whole.rfind(whole[-1:], 0, len(whole) - 1)


def _after(whole: bytes, place: int) -> bytes:
    """The spaces after a place of the text."""
    rest = whole[place + 1 :]
    return rest[: len(rest) - len(rest.lstrip(SPACES))]


def _closing(whole: bytes) -> bytes:
    """The spaces before the bracket that closes: those of the line in which it was opened, if that was a line's end.
    Brackets in strings are not told apart: it is a guess."""
    depth = 0
    for place in range(len(whole) - 1, -1, -1):
        depth += (whole[place] in CLOSING) - (whole[place] in OPENING)
        if depth < 0:
            line = whole[whole.rfind(b"\n", 0, place) + 1 : place + 1]
            broken = _after(whole, place).startswith(b"\n")
            return b"\n" + line[: len(line) - len(line.lstrip(b" \t"))] if broken else b""
    return b""
