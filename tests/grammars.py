"""Small vocabularies for grammars, and the masks of finite languages by brute force."""

from __future__ import annotations

import functools
import json

from outrider.core.grammar import Grammar, Vocabulary
from outrider.core.grammar_spec import GrammarSpec

# 40 tokens, as many as the tiny models have: JSON's characters, some letters, and tokens of several of them.
WORDS = [
    *(bytes([byte]) for byte in b'{}[]":, -.0123456789abcdentrus'),
    *(b'{"', b'":', b'",', b"true", b"null", b"ab", b"12", b' "', b"bc"),
]
END = len(WORDS)
SMALL = [*WORDS, b"<end>"]


def greedily(words):
    """An encoder that takes the longest token each time."""

    def encode(text):
        rest, ids = text.encode(), []
        while rest:
            fitting = [(len(word), -id) for id, word in enumerate(words) if word and rest.startswith(word)]
            if not fitting:
                return ids
            size, id = max(fitting)
            ids.append(-id)
            rest = rest[size:]
        return ids

    return encode


@functools.cache
def vocabulary(words=tuple(SMALL), ends=(END,)):
    return Vocabulary(words, ends, ends, greedily(words))


@functools.cache
def grammar(parameter, text, words=tuple(SMALL), ends=(END,)):
    return Grammar(GrammarSpec(parameter, text), vocabulary(words, ends))


def constraint(parameter, value, words=tuple(SMALL), ends=(END,)):
    """The sampling parameters of a grammar, and a function that makes the matcher of a sequence."""
    text = value if isinstance(value, str) else json.dumps(value)
    return {parameter: value}, lambda: grammar(parameter, text, words, ends).matcher(ends)


def fits(language, words, ends, written):
    """The token ids that may follow, where the language is a set of byte strings."""
    before = b"".join(words[id] for id in written)
    allowed = {
        id
        for id, word in enumerate(words)
        if word and id not in ends and any(text.startswith(before + word) for text in language)
    }
    return allowed | (set(ends) if before in language else set())
