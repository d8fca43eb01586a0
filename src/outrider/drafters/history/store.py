"""The histories of a process, one for each tenant, and the file that they are kept in.

The file is a line of JSON (format, vocabulary, tokens by tenant, a digest of the rest) and the tokens themselves. It is
replaced as a whole, and locked while a process uses it: a second one would undo what the first has written. Tenants are
named by a digest of their key, so the file holds texts but no keys; only its owner can read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import OutriderError
from outrider.drafters.confidence import MatchCalibration
from outrider.drafters.history import CAPACITY
from outrider.drafters.history.suffixes import GAP, SuffixIndex
from outrider.models.kept_file import KeptFile

FORMAT = "outrider history 1"  # a file of another format is refused
LONGEST_HEADER = 1 << 20  # bytes: enough for some ten thousand tenants; a file without it is none of ours
SAVE = 30.0  # seconds between two writings while requests end: what a process that is killed may lose
# Places of a history at first, 0.8 MB: to touch all of its memory for the first text of a tenant takes 5 ms, and a
# server may have many tenants with few texts (LOG, 2026-11-17, why auto was slower than the head).
FIRST = 1 << 14
log = logging.getLogger("outrider")


class TenantHistory:
    """The texts of one tenant, and how far guesses from them can be trusted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.index, self.calibration = SuffixIndex(min(capacity, FIRST)), MatchCalibration()

    def add(self, text: list[int], kept: int) -> None:
        self._reserve(len(text) + 1)
        self.index.add(text, kept)

    def write(self, tokens: NDArray[np.int32]) -> None:
        self._reserve(len(tokens) + 1)
        self.index.write(_latest(tokens, self._capacity))

    def _reserve(self, places: int) -> None:
        """Allocate its full capacity once the first allocation cannot hold `places` more."""
        old = self.index
        if old.capacity < self._capacity and len(old) + places > old.capacity:
            self.index = SuffixIndex(self._capacity)
            self.index.write(old.tokens())


class HistoryStore:
    """A history for each tenant. The engine's thread uses it; when that has ended, the thread that closes it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity`: tokens of each history."""
        self._capacity = capacity
        self._tenants: dict[str, TenantHistory] = {}
        self._file: HistoryFile | None = None
        self._saved, self._writer = time.monotonic(), threading.Thread()

    @classmethod
    def opened(cls, path: Path, vocabulary: str, vocab_size: int, capacity: int = CAPACITY) -> HistoryStore:
        """With what the file holds, and kept in it from now on. `vocabulary`: what token ids mean, as a digest."""
        store = cls(capacity)
        store._file = HistoryFile(path, vocabulary)
        try:
            for tenant, tokens in store._file.read(vocab_size).items():
                store.of(tenant).write(tokens)
            store._file.write(store._texts())  # a place that cannot be written to shows now
        except BaseException:
            store._file.close()
            raise
        return store

    def of(self, tenant: str) -> TenantHistory:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = TenantHistory(self._capacity)
        return found

    def add(self, tenant: str, text: list[int], kept: int) -> None:
        """A text that was written; what stands there already of its first `kept` tokens is not stored again."""
        self.of(tenant).add(text, kept)
        if self._file is not None and time.monotonic() - self._saved > SAVE and not self._writer.is_alive():
            self._saved = time.monotonic()
            self._writer = threading.Thread(target=self._save, args=(self._texts(),), name="outrider-history")
            self._writer.start()

    def forget(self) -> None:
        """Begin anew where nothing is kept in a file: an audit compares runs that must not help each other."""
        if self._file is None:
            self._tenants.clear()

    def close(self) -> None:
        """Write the file for the last time, and let another process have it."""
        if self._file is None:
            return
        if self._writer.is_alive():
            self._writer.join()
        self._save(self._texts())
        self._file.close()
        self._file = None

    def _texts(self) -> dict[str, NDArray[np.int32]]:
        return {tenant: each.index.tokens() for tenant, each in self._tenants.items()}

    def _save(self, texts: Mapping[str, NDArray[np.int32]]) -> None:
        """Nobody waits for it, so a failure is told in the log; the file is then as it was."""
        try:
            if self._file is not None:
                self._file.write(texts)
        except OutriderError as error:
            log.error("%s", error)


def _latest(tokens: NDArray[np.int32], capacity: int) -> NDArray[np.int32]:
    """As much as a history holds, with a gap at its end."""
    return np.append(tokens, np.int32(GAP))[-capacity:] if len(tokens) else tokens


class HistoryFile:
    """The file of one process; an OutriderError says why it cannot be."""

    def __init__(self, path: Path, vocabulary: str) -> None:
        self._vocabulary = vocabulary
        self._file = KeptFile(path, "history file", "--history")

    def read(self, vocab_size: int) -> dict[str, NDArray[np.int32]]:
        """The tokens of each tenant."""
        file = self._file.opened()
        try:
            line, body = file.readline(LONGEST_HEADER), file.read()
        except OSError as error:
            raise self._file.refusal(f"cannot be read ({error.strerror})") from error
        if not line and not body:
            return {}  # it was made just now
        counts = self._counts(line, body)
        tokens = np.frombuffer(body, "<i4").astype(np.int32)
        if len(tokens) and not GAP <= tokens.min() <= tokens.max() < vocab_size:
            raise self._file.refusal("has tokens that this model does not know")
        ends = np.cumsum([*counts.values()])[:-1]
        return dict(zip(counts, np.split(tokens, ends), strict=True)) if counts else {}

    def _counts(self, line: bytes, body: bytes) -> dict[str, int]:
        """Tokens by tenant, if the file is ours, whole, and of this vocabulary."""
        try:
            header = json.loads(line)
            counts: dict[str, int] = {str(tenant): int(count) for tenant, count in header["tokens"].items()}
            known, vocabulary, digest = header["format"] == FORMAT, header["vocabulary"], header["sha256"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._file.refusal("is not a history file, or only the beginning of one") from error
        if not known:
            raise self._file.refusal("was written by another version of Outrider")
        if vocabulary != self._vocabulary:
            raise self._file.refusal("is of a model with another vocabulary")
        whole = 4 * sum(counts.values()) == len(body) and min(counts.values(), default=0) >= 0
        if not whole or digest != hashlib.sha256(body).hexdigest():
            raise self._file.refusal("is damaged, or was only written in part")
        return counts

    def write(self, texts: Mapping[str, NDArray[np.int32]]) -> None:
        """What was there before stays whole until the new content is safe on the disk."""
        body = b"".join(each.astype("<i4").tobytes() for each in texts.values())
        header: dict[str, Any] = {"format": FORMAT, "vocabulary": self._vocabulary}
        header |= {"tokens": {tenant: len(each) for tenant, each in texts.items()}}
        header |= {"sha256": hashlib.sha256(body).hexdigest()}
        self._file.replace([json.dumps(header).encode() + b"\n", body])

    def close(self) -> None:
        self._file.close()
