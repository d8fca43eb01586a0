"""The bytes of single tokens: a token may be a part of a character, so text alone cannot say what it is."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """Token id -> the bytes that it stands for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = self._backend is not None and self._backend.token_to_id("Ġ") is not None
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._added = {id: str(token.content) for id, token in added.items()}
        self._special = {id for id, token in added.items() if token.special}

    def special(self, token: int) -> bool:
        return token in self._special

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        word = None if self._backend is None else self._backend.id_to_token(token)
        if word is None:
            return b"" if self._tokenizer is None else str(self._tokenizer.decode([token])).encode()
        if self._byte_level:
            table = _byte_level_alphabet()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in word)
        if match := _BYTE.fullmatch(word):
            return bytes([int(match[1], 16)])
        return str(word).replace("▁", " ").encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """How GPT-2's tokenizer writes bytes as characters: printable ones as they are, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
