"""Conversations that the target has with itself: it writes the user's turn and then the answer.

A talk is a generator: it yields what is to be written next and is sent the tokens; what it returns is learned from.
Everything random in it comes from its own seed, so that a talk is the same whenever and beside whatever it runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from random import Random

from outrider.train.chat import Chat, trim
from outrider.train.openers import DOCUMENT, pick

OPENED = 2 / 3  # of the user turns begin with an opener
GREEDY = 0.6  # of the answers
DOCUMENTS = 1 / 4  # of the talks are about a text that the target writes first
PASSAGES = (1, 1, 2, 3, 5)  # of such a text, each as likely
TURN = (16, 72)  # tokens of a user turn, at most
ANSWER = (70, 200)  # and of an answer
LONG, LONGEST = 1 / 10, 256  # a tenth of the answers may be longer


@dataclass(frozen=True)
class Ask:
    """Write at most `most` tokens after these."""

    tokens: Sequence[int]
    most: int
    temperature: float


@dataclass(frozen=True)
class Text:
    tokens: Sequence[int]
    answer: int  # where the answer begins


Talk = Generator[Ask, list[int], list[Text]]


def talk(chat: Chat, ends: frozenset[int], random: Random) -> Talk:
    """One conversation of the usual mixture."""
    if random.random() < DOCUMENTS:
        return _about_a_document(chat, ends, random)
    return _plain(chat, ends, random)


def answer_to(chat: Chat, words: str, random: Random) -> Talk:
    """The answer to a user turn that is given."""
    return (yield from _answer(chat.ask(words), random))


def _plain(chat: Chat, ends: frozenset[int], random: Random) -> Talk:
    opener = pick("turns", random) if random.random() < OPENED else ""
    turn = yield from _write_on(chat.begin(opener.rstrip(" ")), ends, random)
    return (yield from _answer([*turn, *chat.after], random))


def _about_a_document(chat: Chat, ends: frozenset[int], random: Random) -> Talk:
    head, tail = chat.split(pick("documents", random), DOCUMENT)
    texts: list[Text] = []
    for passage in range(random.choice(PASSAGES)):
        texts += yield from _answer(chat.ask(pick("sources", random)), random)
        head += [*(chat.gap if passage else ()), *trim(texts[-1].tokens[texts[-1].answer :], ends)]
    turn = yield from _write_on([*head, *tail], ends, random)
    return texts + (yield from _answer([*turn, *chat.after], random))


def _write_on(begun: list[int], ends: frozenset[int], random: Random) -> Generator[Ask, list[int], list[int]]:
    """The user's turn, begun so, as the target ends it."""
    written = yield Ask(begun, random.randint(*TURN), random.uniform(0.5, 0.9))
    return [*begun, *trim(written, ends)]


def _answer(asked: list[int], random: Random) -> Talk:
    most = LONGEST if random.random() < LONG else random.randint(*ANSWER)
    temperature = 0.0 if random.random() < GREEDY else random.uniform(0.6, 1.0)
    written = yield Ask(asked, most, temperature)
    return [Text([*asked, *written], len(asked))]
