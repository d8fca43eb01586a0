"""Between two tokenizers: the target's text in the draft model's tokens, and its drafts in the target's tokens.

Drafts that were converted through text count as guesses, so a loss on the way costs acceptance but never changes the
answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.sequence import Sequence
from outrider.models.tokenizer import Tokenizer

WINDOW = 16  # tokens before new text that are encoded again with it: what lies further back stays as it was
TRIES = 8  # places, one token apart, that are tried as the beginning of the window
SPLIT = 4  # a character has at most four bytes, so it is never split into more tokens
UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are not yet a character


class Words:
    """A tokenizer, without what it puts around a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.begin = self._before_a_text()
        self.special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        joins = self.decode(self.encode("a") + self.encode("b")) == "ab"
        self._line = [] if joins else self.encode("\n")  # what a text can follow where a space comes before each

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Seq[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""

    def first(self, tokens: list[int]) -> int:
        """Where the text begins."""
        return len(self.begin) if tokens[: len(self.begin)] == self.begin else 0

    def tail(self, tokens: list[int], end: int) -> list[int]:
        """The last of the first `end` tokens, from the beginning of a character on."""
        first = self.first(tokens)
        last = max(first, end - WINDOW)
        for start in range(last, max(first, last - SPLIT) - 1, -1):
            if not self.decode(tokens[start:end]).startswith(UNFINISHED):
                break
        return tokens[start:end]

    def added(self, before: Seq[int], ids: Seq[int]) -> str:
        """The text that `ids` add after `before`: spaces and bytes join across tokens."""
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def after(self, before: list[int], text: str) -> list[int]:
        """The tokens of `text` where it follows the text of `before`."""
        both = self.encode(self.decode(before) + text)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self.apart(text)  # the text was cut elsewhere: a token that would span both comes too late

    def append(self, tokens: list[int], text: str) -> int:
        """Put `text` after the text of `tokens`; from where on they may have changed.

        A window that does not begin as it did before was cut where this tokenizer makes no cut.
        """
        first, size = len(self.begin), len(tokens)
        best = max(first, size - WINDOW)
        for start in range(best, max(first, best - TRIES) - 1, -1):
            tail = self._again(tokens[start:], text, start == first)
            if start == first or tail[:1] == tokens[start : start + 1]:
                tokens[start:] = tail
                return start
        tokens += self.apart(text)
        return size

    def apart(self, text: str) -> list[int]:
        """The tokens of a text that does not stand at the beginning."""
        if self._line:
            both = self.encode("\n" + text)
            if both[: len(self._line)] == self._line:
                return both[len(self._line) :]
        return self.encode(text)

    def _again(self, ids: list[int], text: str, begins: bool) -> list[int]:
        if begins:
            return self.encode(self.decode(ids) + text)
        return self.apart(self.decode([*self._line, *ids])[bool(self._line) :] + text)

    def _before_a_text(self) -> list[int]:
        text, full = self.encode("a"), self._tokenizer.encode("a", add_special_tokens=True)
        places = [place for place in range(len(full)) if full[place : place + len(text)] == text]
        return full[: places[0]] if places else []


@dataclass(eq=False)
class Reading:
    """How far a sequence of the target was read."""

    seq: Sequence  # the same text in the draft model's tokens
    read: int  # tokens of the target that are in it; fewer than all where the last ones end inside a character
    ahead: tuple[int, ...] = ()  # what the draft model wrote after them
    same: int = 0  # tokens that are as the draft model has seen them


class Translation:
    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = Words(target), Words(draft)
        known = set(self._target.special.values())
        self._unknown = {id for id, text in self._draft.special.items() if text not in known}
        self._readings: dict[int, Reading] = {}

    def held(self, more: int) -> int:
        """Tokens of the draft model over all sequences, with `more` further tokens in each."""
        return sum(len(reading.seq.tokens) + more for reading in self._readings.values())

    def read(self, seq: Sequence) -> Reading:
        """What the draft model has to see: all committed text, in its own tokens. Special tokens are read as they are
        written; which of them the draft model knows, its tokenizer finds."""
        reading = self._readings.get(seq.id) or self._begin(seq)
        text, reading.read = self._fresh(seq.tokens, reading.read)
        tokens = reading.seq.tokens
        seen = [*tokens[-WINDOW - TRIES :], *reading.ahead]
        offset = max(0, len(tokens) - WINDOW - TRIES)
        start = self._draft.append(tokens, text) if text else len(tokens)
        reading.same = start + _common(tokens[start:], seen[start - offset :])
        return reading

    def write(self, seq: Sequence, ahead: Seq[int]) -> list[int]:
        """What the draft model has written, in the target's tokens."""
        reading = self._readings[seq.id]
        reading.ahead = tuple(ahead)
        text = self._text(reading)
        if not text:
            return []
        before = self._target.tail(seq.tokens, reading.read)
        held = seq.tokens[reading.read :]  # the beginning of a character: the guess must begin with it
        guessed = self._target.after(before, text)
        return guessed[len(held) :] if guessed[: len(held)] == held else []

    def forget(self, id: int) -> None:
        self._readings.pop(id, None)

    def _begin(self, seq: Sequence) -> Reading:
        """Each model has its own way to begin a text, so those tokens are not translated."""
        begun = Reading(Sequence(seq.id, list(self._draft.begin)), self._target.first(seq.tokens))
        self._readings[seq.id] = begun
        return begun

    def _fresh(self, tokens: list[int], read: int) -> tuple[str, int]:
        """The text after the first `read` tokens, up to the last whole character, and how many tokens have it."""
        before = self._target.tail(tokens, read)
        for end in range(len(tokens), max(read, len(tokens) - SPLIT), -1):
            text = self._target.added(before, tokens[read:end])
            broken = end == len(tokens) - SPLIT + 1  # no character will come of these bytes
            if broken or not text.endswith(UNFINISHED):
                return text, end
        return "", read

    def _text(self, reading: Reading) -> str:
        """The whole characters that the draft model has added, before anything that the target has no token for."""
        tokens, ahead = reading.seq.tokens, reading.ahead
        stop = next((place for place, id in enumerate(ahead) if id in self._unknown), len(ahead))
        return self._draft.added(self._draft.tail(tokens, len(tokens)), ahead[:stop]).partition(UNFINISHED)[0]


def _common(a: Seq[int], b: Seq[int]) -> int:
    """How many of the first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
