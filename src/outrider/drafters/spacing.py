"""How a JSON text is spaced: which white space follows its brackets, commas and colons, so that the same can be guessed
again."""

from __future__ import annotations

from dataclasses import dataclass, replace

SPACES = b" \n\r\t"
OPENING, CLOSING = b"{[", b"}]"
QUOTE, ESCAPE, COMMA, COLON, LINE = b'"'[0], b"\\"[0], b","[0], b":"[0], b"\n"[0]
INDENT = b"  "  # of a line, where the text has not shown its own
# Why spaces were guessed: nothing before a colon or a comma, or what stood there before; the rest of spaces that have
# begun; as after the comma, colon or bracket before; before the bracket that closes; after the first comma, as after
# the bracket; after the first comma or colon, as most texts have it; after the first bracket, on one line and on
# several; after a bracket inside another, likewise.
TIGHT, BEGUN, SEEN, CLOSED, ALIGNED, FIRST, ONE_LINE, LINES, NESTED_LINE, NESTED_LINES = range(1, 11)
Gap = tuple[bytes, int]  # spaces, and why they were guessed


@dataclass(frozen=True)
class _OpenBracket:
    """An open bracket: the spaces after it, and after the last comma of its own; None: not written yet."""

    bracket: int
    opened: bytes | None = None
    comma: bytes | None = None


class JsonSpacing:
    """What was read of a text. A copy reads ahead."""

    def __init__(self) -> None:
        self._levels: list[_OpenBracket] = []
        self._opened: dict[tuple[int, int], bytes] = {}  # by bracket and depth: the spaces after the last one
        self._after: dict[int, bytes] = {}  # after the last comma and the last colon
        self._before: dict[int, bytes] = {}  # before them
        self._quoted = self._escaped = False
        self._last = 0  # the last byte that is no space; of a string it is the quote
        self._run = b""  # the spaces since then

    def copy(self) -> JsonSpacing:
        other = JsonSpacing()
        other.__dict__.update(self.__dict__)
        other._levels = list(self._levels)
        other._opened, other._after, other._before = dict(self._opened), dict(self._after), dict(self._before)
        return other

    @property
    def inside(self) -> bool:
        """Whether a bracket is open, and no string."""
        return bool(self._levels) and not self._quoted

    def read(self, text: bytes) -> None:
        for byte in text:
            if self._quoted:
                self._read_quoted(byte)
            elif byte in SPACES:
                self._run += bytes([byte])
            else:
                self._settle(byte)
                self._quoted = byte == QUOTE
                if byte in OPENING:
                    self._levels.append(_OpenBracket(byte))
                elif byte in CLOSING and self._levels:
                    self._levels.pop()
                self._last, self._run = byte, b""

    def _read_quoted(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == ESCAPE:
            self._escaped = True
        elif byte in (QUOTE, LINE):  # a line ends outside of strings: what looked like one was none
            self._quoted, self._run = False, b"\n" if byte == LINE else b""

    def _settle(self, byte: int) -> None:
        """The spaces before this byte are all there."""
        if byte in (COMMA, COLON):
            self._before[byte] = self._run
        if self._last in (COMMA, COLON):
            self._after[self._last] = self._run
        if not self._levels:
            return
        if self._last == COMMA:
            self._levels[-1] = replace(self._levels[-1], comma=self._run)
        elif self._last in OPENING and byte not in CLOSING:
            self._levels[-1] = replace(self._levels[-1], opened=self._run)
            self._opened[self._last, len(self._levels)] = self._run

    def gaps(self, value: int | None) -> list[Gap]:
        """The spaces that may come next, before `value` (None: something free); several where it is not known which.
        Only inside brackets."""
        found = self._gaps(value)
        if not self._run:
            return found
        rest = [(gap[len(self._run) :], BEGUN) for gap, _ in found if gap.startswith(self._run)]
        return rest[:1] or [(b"", BEGUN)]

    def _gaps(self, value: int | None) -> list[Gap]:
        level = self._levels[-1]
        if value in (COMMA, COLON):
            return [(self._before.get(value or 0, b""), TIGHT)]
        if value is not None and value in CLOSING:
            return [(self._line(len(self._levels) - 1) if _is_line(level.opened) else b"", CLOSED)]
        if self._last in OPENING:
            return self._after_bracket(level.bracket)
        if self._last == COMMA:
            return [self._after_comma(level)]
        if self._last == COLON:
            return [(self._after[COLON], SEEN) if COLON in self._after else (b" ", FIRST)]
        return [(b"", TIGHT)]

    def _after_bracket(self, bracket: int) -> list[Gap]:
        depth = len(self._levels)
        if (bracket, depth) in self._opened:
            return [(self._opened[bracket, depth], SEEN)]
        if depth == 1:
            return [(b"", ONE_LINE), (b"\n" + INDENT, LINES)]
        outer = self._line(depth - 1)
        if not _is_line(self._levels[-2].opened):
            return [(b"", SEEN)]
        step = outer.removeprefix(self._line(depth - 2))
        return [(b"", NESTED_LINE), (outer + (step if step.isspace() and not _is_line(step) else INDENT), NESTED_LINES)]

    def _after_comma(self, level: _OpenBracket) -> Gap:
        if level.comma is not None:
            return level.comma, SEEN
        if _is_line(level.opened):
            return level.opened or b"", ALIGNED
        known = self._after.get(COMMA)
        return (b" ", FIRST) if known is None or _is_line(known) else (known, SEEN)

    def _line(self, depth: int) -> bytes:
        """A new line at this depth, as the text has it."""
        opened = self._levels[depth - 1].opened if depth else b"\n"
        return opened if opened is not None and _is_line(opened) else b"\n"


def _is_line(gap: bytes | None) -> bool:
    return gap is not None and gap.startswith((b"\n", b"\r"))
