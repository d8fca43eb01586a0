"""A file that one process keeps up to date: locked while it is used, replaced as a whole, readable by its owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from io import BufferedWriter
from pathlib import Path
from typing import IO

from outrider.core.errors import OutriderError, one_line


class KeptFile:
    """An OutriderError says why it cannot be."""

    def __init__(self, path: Path, what: str, option: str) -> None:
        """`what` it is, and the `option` that names it: for messages."""
        self._path, self._what, self._option = path, what, option
        self._locked = self._lock()

    def opened(self) -> IO[bytes]:
        """What it holds, from the beginning; nothing where it was made just now."""
        self._locked.seek(0)
        return self._locked

    def replace(self, parts: Iterable[bytes]) -> None:
        """What was there before stays whole until the new content is safe on the disk."""
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            with contextlib.ExitStack() as failed:
                file = failed.enter_context(_private(new))
                failed.callback(new.unlink, missing_ok=True)
                fcntl.flock(file, fcntl.LOCK_EX)  # before anybody can find it
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                os.replace(new, self._path)
                failed.pop_all()
        except OSError as error:
            raise OutriderError(
                f"cannot write the {self._what} {self._path} ({one_line(error)}); what was there before is untouched"
            ) from error
        self._locked.close()
        self._locked = file

    def close(self) -> None:
        """Another process may have it."""
        self._locked.close()

    def refusal(self, why: str) -> OutriderError:
        return OutriderError(f"the {self._what} {self._path} {why}; it is untouched: name another with {self._option}")

    def _lock(self) -> IO[bytes]:
        """The file, opened and ours alone; a new one is empty."""
        while True:
            try:
                file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb")
            except OSError as error:
                raise self.refusal(f"cannot be opened ({error.strerror})") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.close()
                raise self.refusal("is in use by another process") from error
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    return file
            file.close()  # it was replaced before it was locked


def _private(path: Path) -> BufferedWriter:
    """A new file that only its owner can read."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
