"""The server's log: one JSON object a line on stderr."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger("outrider.server")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
BURST = 10  # equal lines within a window that are written: a fault is seen at once, and seen to repeat
WINDOW = 10.0  # seconds after which equal lines are written again
KINDS = 1000  # different lines whose number is kept; where there are more, counting begins anew


def log(event: str, *, level: str = "info", **fields: Any) -> None:
    """One line; fields that are None or empty are left out."""
    number = logging.getLevelNamesMapping()[level.upper()]
    if _logger.isEnabledFor(number):
        _logger.log(number, event, extra={"fields": {k: v for k, v in fields.items() if v not in (None, "", [], ())}})


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if note := getattr(record, "repeats", ""):
            entry["repeats"] = note
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class RepeatFilter(logging.Filter):
    """Leaves out lines that come again and again: thousands a second are written where descriptors have run out.

    The last line that is written says so, and the next one after the window how many were left out.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # line -> begin of its window, lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, *_kind(record))
        if len(self._seen) >= KINDS:
            self._seen.clear()
        begun, count = self._seen.get(key, (self._now(), 0))
        if self._now() - begun >= WINDOW:
            if count > BURST:
                record.repeats = f"{count - BURST} equal lines were left out"
            begun, count = self._now(), 0
        self._seen[key] = begun, count + 1
        if count + 1 == BURST:
            record.repeats = f"equal lines are left out for {WINDOW:g} s"
        return count < BURST


def _kind(record: logging.LogRecord) -> tuple[str, str]:
    """What makes two lines equal: of ours the event and all its fields; of other libraries the first line, whatever
    numbers (times, addresses, descriptors) are in it."""
    fields = getattr(record, "fields", None)
    if fields is not None:
        return record.getMessage(), repr(fields)
    return _NUMBER.sub("#", record.getMessage().partition("\n")[0]), ""


def configure(level: str = "info") -> None:
    """Every logger of the process writes JSON to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RepeatFilter())
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"  # the app writes a line per request itself, with its id
