"""What is left of a text that a model wrote, so that it can stand in a user's turn."""

from __future__ import annotations

import re

_SENTENCE_END = re.compile(r"[.?!。？！…][\"'”’»)]*(?=\s|$|[^\x00-\x7f])|\n")
_LABEL = re.compile(r"^\W*(question|task|exercise|prompt|user|sentence|text|answer)\W*:\s*", re.IGNORECASE)


_REFUSALS = (
    "sure, i'd be",
    "i'm sorry",
    "i am sorry",
    "sorry,",
    "as an ai",
    "as a language model",
    "as an artificial",
    "i cannot",
    "i can't",
)


def is_refusal(text: str) -> bool:
    """Whether the model says that it will not write that: nothing that a user would ask about."""
    return text.strip().lower().replace("\u2019", "'").startswith(_REFUSALS)


def whole_sentences(text: str) -> str:
    """Without the sentence in which it was cut; all of it where no sentence ends."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip("\n") if ends else text


def first_line(text: str) -> str:
    """Up to the first line break: what a model writes after a user's question is mostly its answer."""
    return text.partition("\n")[0]


def passage(text: str) -> str:
    """Without a line such as "Sure, here is the text:" before it."""
    head, _, rest = text.strip().partition("\n")
    return rest.strip() if head.rstrip("* ").endswith((":", "：")) and rest.strip() else text.strip()


def question(text: str) -> str:
    """The first paragraph, without quotation marks around it or a word that says what it is."""
    first = passage(text).partition("\n\n")[0].strip()
    return _LABEL.sub("", first).strip(' "“”*')
