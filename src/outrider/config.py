"""`--config FILE`: our own settings file, or the generator block of AutoGluon-RAG's."""

from __future__ import annotations

from pathlib import Path

from outrider.compat import autogluon
from outrider.settings import Config, config_from, read_file


def read(path: str | Path) -> Config:
    values = read_file(path)
    return autogluon.parse(values) if autogluon.recognises(values) else config_from(values)
