"""CallParser: an answer as it comes, as words and calls. Chunks may have any length; all of it at once gives the same.

The grammar has seen to it that what follows a trigger is a call, unless the answer is cut off.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.server.tools.base import ToolFormat
from outrider.server.tools.reasoning import held


@dataclass(frozen=True)
class CallDelta:
    """What is new of a call."""

    index: int
    name: str = ""  # given once, where the call begins
    arguments: str = ""


class CallParser:
    def __init__(self, format: ToolFormat, only_first: bool) -> None:
        """`only_first`: a call can begin only where the answer does."""
        self._trigger, self._only_first = format.trigger, only_first
        self._head = re.compile(rf'\{{"name": "([^"]+)", "{format.key}": ')
        self._step = self._words
        self._rest = ""  # text that is not read yet
        self._said = ""  # words so far
        self._arguments = ObjectScanner()
        self.calls = 0

    def feed(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """New words, and what is new of calls. `last`: no text follows."""
        self._rest += text
        before, deltas = len(self._said), []
        while (found := self._step(last)) is not None:
            deltas += found
        return self._said[before:], _merged(deltas)

    @property
    def called(self) -> bool:
        """Whether there are calls, and the arguments of the last one are complete: a stop string may cut them off."""
        return self.calls > 0 and self._arguments.over

    def _words(self, last: bool) -> list[CallDelta] | None:
        """Up to the trigger, without the space before it. What may be the beginning of either waits."""
        rest = self._rest
        place = rest.find(self._trigger)
        if place >= 0 and (not self._only_first or (place == 0 and not self._said)):
            self._said += rest[:place].rstrip()
            self._rest, self._step = rest[place:], self._before_arguments
            return []
        held = 0 if last else self._held(rest)
        self._said, self._rest = self._said + rest[: len(rest) - held], rest[len(rest) - held :]
        return None

    def _held(self, text: str) -> int:
        """How many of the last characters may belong to the beginning of a call."""
        trigger = self._trigger
        if self._only_first:
            return len(text) if not self._said and trigger.startswith(text) else 0
        return held(text, trigger)

    def _before_arguments(self, last: bool) -> list[CallDelta] | None:
        match = self._head.search(self._rest)
        if match is None:
            return None
        self._rest, self._step, self._arguments = self._rest[match.end() :], self._within_arguments, ObjectScanner()
        self.calls += 1
        return [CallDelta(self.calls - 1, match[1])]

    def _within_arguments(self, last: bool) -> list[CallDelta] | None:
        if not self._rest:
            return None
        size = self._arguments.scan(self._rest)
        text, self._rest = self._rest[:size], self._rest[size:]
        if self._arguments.over:
            self._step = self._before_arguments
        return [CallDelta(self.calls - 1, arguments=text)]


class ObjectScanner:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self.over = False
        self._depth, self._in_text, self._escaped = 0, False, False

    def scan(self, text: str) -> int:
        """How many of these characters belong to it."""
        for place, character in enumerate(text, 1):
            self._see(character)
            if self.over:
                return place
        return len(text)

    def _see(self, character: str) -> None:
        if self._in_text:
            ends = character == '"' and not self._escaped
            self._in_text, self._escaped = not ends, character == "\\" and not self._escaped
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.over = self._depth == 0


def _merged(deltas: list[CallDelta]) -> list[CallDelta]:
    """One for each call."""
    whole: dict[int, CallDelta] = {}
    for delta in deltas:
        before = whole.get(delta.index, CallDelta(delta.index))
        whole[delta.index] = CallDelta(delta.index, before.name or delta.name, before.arguments + delta.arguments)
    return list(whole.values())
