"""Ctrl-C while modules are imported: the process ends at once, for an import that is interrupted could swallow an
exception."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Not where the parent process ignores Ctrl-C or somebody else handles it, nor in a thread, which cannot ask."""
    usual = signal.getsignal(signal.SIGINT)
    ours = usual is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)


def leave(*_: object) -> None:
    """End without closing anything."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)
