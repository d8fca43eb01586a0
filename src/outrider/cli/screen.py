"""Output of the commands: colours and bars on a terminal, plain text elsewhere."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from outrider.backends.text import Writer
from outrider.core.request import Chunk

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_STYLES = {"red": "31", "drafted": "32", "dim": "2"}


def coloured(file: TextIO) -> bool:
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, file: TextIO) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if text and coloured(file) else text


def note(text: str) -> None:
    """Something beside the point, on stderr."""
    print(paint(text, "dim", sys.stderr), file=sys.stderr, flush=True)


def json_text(value: Any, encoding: str = "utf-8") -> str:
    """One line of JSON, readable where the encoding has all its characters; else with JSON's escapes."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def print_json(value: Any) -> None:
    """To stdout, in the encoding that it has."""
    print(json_text(value, getattr(sys.stdout, "encoding", None) or "utf-8"))


class Painter:
    """Writes an answer to stdout as it comes; what a drafter guessed is coloured."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._writer = Writer(tokenizer, stop)

    def write(self, chunk: Chunk) -> None:
        for token in chunk.tokens:
            self._writer.push(token.id)
            self._put(self._writer.take(), token.drafter is not None)
        if chunk.finish_reason is not None:
            self._put(self._writer.take(last=True), False)
        sys.stdout.flush()

    def _put(self, text: str, drafted: bool) -> None:
        sys.stdout.write(paint(text, "drafted", sys.stdout) if drafted else text)


@contextmanager
def bar(*columns: str | ProgressColumn, plain: float = 0.0) -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress bar on stderr, gone when done. Yields show(what, done, total). Without a terminal there is no bar;
    with `plain`, a line every `plain` seconds instead."""
    if plain and not sys.stderr.isatty():
        lines = PlainLines(plain)
        with lines.ticking():
            yield lines.show
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*shown, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None, visible=False)  # until there is something to show

        def show(what: str, done: int, total: int | None) -> None:
            progress.update(task, description=what, completed=done, total=total, visible=True)

        yield show


class PlainLines:
    """Shows the first message at once, then the newest one every `every` seconds, also where nothing new came: what
    compiles or loads says nothing for a while."""

    def __init__(self, every: float) -> None:
        self._every, self._last, self._lock = every, -math.inf, threading.Lock()
        self._what, self._since = "", 0.0  # the newest thing, and since when it is the newest

    def show(self, what: str, done: int, total: int | None) -> None:
        with self._lock:
            if what != self._what:
                self._what, self._since = what, time.monotonic()
            self._say(what)

    def tick(self) -> None:
        """Called from time to time."""
        with self._lock:
            if self._what:
                self._say(f"{self._what} (for {time.monotonic() - self._since:.0f} s)")

    def _say(self, line: str) -> None:
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            note(line)

    @contextmanager
    def ticking(self) -> Iterator[None]:
        over = threading.Event()

        def tick() -> None:
            while not over.wait(self._every / 4):
                self.tick()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
