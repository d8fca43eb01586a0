"""The bytes of single tokens, also for grammars: a token may be a part of a character, so text alone cannot say what
it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from outrider.core.errors import OutriderError
from outrider.core.grammar import Vocabulary
from outrider.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Token id -> the bytes that it stands for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._words = _words(tokenizer)
        self._byte_level = tokenizer is not None and "Ġ" in tokenizer.get_vocab()
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._added = {id: str(token.content) for id, token in added.items()}
        self._special = {id for id, token in added.items() if token.special}

    def special(self, token: int) -> bool:
        return token in self._special

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        word = self._words(token)
        if word is None:
            return b"" if self._tokenizer is None else str(self._tokenizer.decode([token])).encode()
        if self._byte_level:
            table = _byte_level_alphabet()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in word)
        if match := _BYTE.fullmatch(word):
            return bytes([int(match[1], 16)])
        return str(word).replace("▁", " ").encode()


def _words(tokenizer: Any) -> Callable[[int], str | None]:
    """Token id -> the word that the vocabulary has for it; None: there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    named: Callable[[int], str | None] = (
        getattr(tokenizer, "convert_ids_to_tokens", lambda token: None) if backend is None else backend.id_to_token
    )
    return named


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """How GPT-2's tokenizer writes bytes as characters: printable ones as they are, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# Encoded and put together again from the bytes of its tokens, to see that these are right.
_SAMPLE = 'a {"key": [1, "b c"]}'


def vocabulary_of(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> Vocabulary:
    """The tokenizer's tokens for grammars. `size`: how many the model has logits for, which may be more."""
    if not ends:
        raise OutriderError("the model names no token that ends an answer, and a grammar must be able to end")
    spell = TokenBytes(tokenizer)
    known = set(tokenizer.get_vocab().values())
    tokens = [spell(id) if id in known else b"" for id in range(size)]
    ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    if b"".join(spell(id) for id in ids).strip().decode("utf-8", "replace") != _SAMPLE:
        raise OutriderError("the tokenizer does not tell the bytes of its tokens, so that no grammar can be followed")
    return Vocabulary(tokens, filter(spell.special, known), ends, following(tokenizer))


def following(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Encodes a text as it is in the middle of another: some tokenizers put a space before each."""

    def plainly(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    line = plainly("\n")
    if tokenizer.decode(plainly("a") + plainly("b")) == "ab":
        return plainly

    def after_a_line(text: str) -> list[int]:
        both = plainly("\n" + text)
        return both[len(line) :] if both[: len(line)] == line else plainly(text)

    return after_a_line
