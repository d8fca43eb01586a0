"""The server's log: one JSON object a line on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_logger = logging.getLogger("outrider.server")


def log(event: str, *, level: str = "info", **fields: Any) -> None:
    """One line; fields that are None or empty are left out."""
    number = logging.getLevelNamesMapping()[level.upper()]
    if _logger.isEnabledFor(number):
        _logger.log(number, event, extra={"fields": {k: v for k, v in fields.items() if v not in (None, "", [], ())}})


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


def configure(level: str = "info") -> None:
    """Every logger of the process writes JSON to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"  # the app writes a line per request itself, with its id
