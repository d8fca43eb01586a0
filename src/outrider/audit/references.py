"""Reference texts that several audits of one model share: a file to which each adds what it had to write."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from outrider.audit.compare import Tokens
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams


class ReferenceStore:
    """Texts by what they depend on: model, dtype, device, prompt and sampling. `path`: None for no file.

    A line for each text; processes may add lines at the same time. Texts of other code are taken as well: where that
    code wrote another text, every variant differs from it and the audit fails.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Tokens] = {}
        if path is not None:
            self._read(path)

    def get(self, subject: str, prompt: Tokens, params: SamplingParams) -> Tokens | None:
        return self._known.get(_key(subject, prompt, params))

    def put(self, subject: str, prompt: Tokens, params: SamplingParams, text: Tokens) -> None:
        key = _key(subject, prompt, params)
        self._known[key] = text
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "tokens": text}) + "\n")  # one write: no line within another
            except OSError as error:
                raise OutriderError(f"reference texts cannot be kept in {self._path}: {error.strerror}") from error

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
            self._known = {record["key"]: list(map(int, record["tokens"])) for record in map(json.loads, lines)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutriderError(f"{path} is no file of reference texts ({error}); name another one") from error


def _key(subject: str, prompt: Tokens, params: SamplingParams) -> str:
    record = [subject, prompt, params.temperature, params.seed, params.max_tokens, params.ignore_eos]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()
