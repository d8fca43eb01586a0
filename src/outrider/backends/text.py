"""Turns tokens into text as they arrive, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.tokenizer import Tokenizer, decoder_of

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are not yet a character, or never will be
CHARACTER = 4  # tokens that one character may take at most: it has up to four bytes in UTF-8, a token at least one
# Tokens whose text is held back at most, because it does not end with a whole character: twice what a character
# takes. Bytes that never become one are then written as U+FFFD, as a decoder of the whole text writes them.
HELD = 2 * CHARACTER


class Writer:
    """The text of one sample as it grows. `push` takes a token; `take` gives the text that is certain by now.

    Without stop strings nothing is decoded before somebody takes it: between two passes there is no time for it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), least: int = 0, visible: Sequence[int] = ()
    ) -> None:
        """Stop strings that are complete before `least` tokens are written do not count. `visible`: the special tokens
        that are written as text."""
        self._tokenizer, self._stop, self._least, self._visible = tokenizer, stop, least, frozenset(visible)
        self._plain_text = decoder_of(tokenizer)
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here: a few tokens back, since spaces and bytes join across tokens
        self._decoded = 0  # tokens whose text is in `text`
        self._taken = 0  # characters that were taken
        self.text = ""

    def push(self, token: int) -> bool:
        """True when a stop string is complete; the text is then cut before it."""
        self._tokens.append(token)
        if not self._stop:
            return False
        fresh = self._read()
        return fresh > 0 and len(self._tokens) >= self._least and self._cut(fresh)

    def take(self, last: bool = False) -> str:
        """New text that no stop string can take back; with `last`, all that is left."""
        if not self._stop:
            self._read()
        if last and self._decoded < len(self._tokens) and not self._ended:
            before = self._decode(self._context, self._decoded)
            self.text += self._decode(self._context, len(self._tokens))[len(before) :]
            self._decoded = len(self._tokens)
        end = len(self.text) if last else len(self.text) - self._held()
        taken, self._taken = self.text[self._taken : end], max(self._taken, end)
        return taken

    _ended = False

    def _read(self) -> int:
        """Decode up to the last token that ends a character; how many characters that gives."""
        before, last = self._decode(self._context, self._decoded), len(self._tokens)
        for end in range(last, max(self._decoded, last - HELD), -1):
            after = self._decode(self._context, end)
            if len(after) > len(before) and not after.endswith(UNFINISHED):
                return self._keep(before, after, end)
        if last - self._decoded <= HELD:
            return 0
        end = self._split(last)
        return self._keep(before, self._decode(self._context, end), end)

    def _keep(self, before: str, after: str, end: int) -> int:
        fresh = after[len(before) :]
        self.text += fresh
        self._context, self._decoded = self._decoded, end
        return len(fresh)

    def _split(self, last: int) -> int:
        """A place between two characters, and so far back that no token still to come can change what is before it."""
        whole = self._decode(self._context, last)
        for end in range(last - CHARACTER, self._decoded, -1):
            if self._decode(self._context, end) + self._decode(end, last) == whole:
                return end
        return last - CHARACTER

    def _cut(self, fresh: int) -> bool:
        """Look for stop strings that end in the last `fresh` characters; the text ends before the first of them."""
        size = len(self.text)
        places = [self.text.find(stop, max(0, size - fresh - len(stop) + 1)) for stop in self._stop]
        found = [place for place in places if place >= 0]
        if found:
            self.text, self._ended = self.text[: min(found)], True
        return self._ended

    def _held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        if self._ended:
            return 0
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0

    def _decode(self, begin: int, end: int) -> str:
        tokens = self._tokens[begin:end]
        if not self._visible:
            return self._plain_text(tokens)
        text = ""
        while not self._visible.isdisjoint(tokens):
            place = next(place for place, token in enumerate(tokens) if token in self._visible)
            shown = self._tokenizer.decode([tokens[place]], skip_special_tokens=False)
            text += self._plain_text(tokens[:place]) + shown
            tokens = tokens[place + 1 :]
        return text + self._plain_text(tokens)
