"""Conversations that the target has with itself: it writes the user's turn and then the answer.

A conversation is a generator: it yields what is to be written next and is sent the tokens; the texts it returns are
trained on. Its random numbers come from its own seed, so it is the same whenever and beside whichever others it runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from outrider.core.errors import OutriderError
from outrider.models.tokenizer import Tokenizer

OPENED = 2 / 3  # share of the user turns that begin with an opener of ours; the others the target begins itself
GREEDY = 0.6  # share of the answers written at temperature 0, as most measurements are
ABOUT_DOCUMENTS = 1 / 4  # share of the conversations about a document that the target writes first
PASSAGES = (1, 1, 2, 3, 5)  # lengths of such a document in passages, each equally likely
TURN = (16, 72)  # fewest and most tokens that a user turn may have
ANSWER = (70, 200)  # fewest and most tokens that an answer may have
LONG_ANSWERS, LONG_ANSWER = 1 / 10, 256  # share of the answers that may be longer, and their tokens

DOCUMENT = "{document}"  # the gap in an opener that a document fills
_CONTENT = "\u241fWORDS\u241f"  # stands for the user's words in a rendered template; no template writes it


@dataclass(frozen=True)
class WriteRequest:
    """Write at most `max_tokens` tokens after these."""

    tokens: Sequence[int]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class WrittenText:
    tokens: Sequence[int]
    answer: int  # index of the answer's first token


Conversation = Generator[WriteRequest, list[int], list[WrittenText]]


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """How a turn is wrapped: the text before a user's words, and the tokens between them and the answer."""

    tokenizer: Tokenizer
    before: str  # text up to the user's words
    after: tuple[int, ...]  # tokens from their end to the answer
    gap: tuple[int, ...] = ()  # an empty line, between passages

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ChatFormat:
        """As the model's own template has it; a model without one writes on where the user's words end."""
        if tokenizer is None:
            raise OutriderError("the model has no tokenizer, so it cannot write texts to learn from; add its files")
        gap = tuple(tokenizer.encode("\n\n", add_special_tokens=False))
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", (), gap)
        messages = [{"role": "user", "content": _CONTENT}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, mark, after = text.partition(_CONTENT)
        if not mark:
            raise OutriderError(
                "the model's chat template does not show a user's words as they are; train for a model with another"
            )
        return cls(tokenizer, before, tuple(tokenizer.encode(after, add_special_tokens=False)), gap)

    def begin(self, words: str) -> list[int]:
        """The tokens of a user turn that is still open."""
        tokens = self.tokenizer.encode(self.before + words, add_special_tokens=not self.before)
        return tokens or self._some_token()

    def ask(self, words: str) -> list[int]:
        """The tokens of a whole user turn, ready for the answer."""
        return [*self.begin(words), *self.after]

    def split(self, words: str, gap: str) -> tuple[list[int], list[int]]:
        """An open user turn with a gap that is filled with tokens: the tokens before and those behind the gap."""
        head, _, tail = words.partition(gap)
        return self.begin(head), list(self.tokenizer.encode(tail, add_special_tokens=False)) if tail else []

    def _some_token(self) -> list[int]:
        """Nothing at all cannot be continued."""
        return list(self.tokenizer.encode("\n", add_special_tokens=False))


def conversation(chat: ChatFormat, ends: frozenset[int], random: Random) -> Conversation:
    """One conversation of the usual mixture."""
    if random.random() < ABOUT_DOCUMENTS:
        return _about_a_document(chat, ends, random)
    return _plain(chat, ends, random)


def answer_to(chat: ChatFormat, words: str, random: Random) -> Conversation:
    """The answer to a user turn that is given."""
    return (yield from _answer(chat.ask(words), random))


def _plain(chat: ChatFormat, ends: frozenset[int], random: Random) -> Conversation:
    opener = pick("turns", random) if random.random() < OPENED else ""
    turn = yield from _complete_turn(chat.begin(opener.rstrip(" ")), ends, random)
    return (yield from _answer([*turn, *chat.after], random))


def _about_a_document(chat: ChatFormat, ends: frozenset[int], random: Random) -> Conversation:
    head, tail = chat.split(pick("documents", random), DOCUMENT)
    texts: list[WrittenText] = []
    for passage in range(random.choice(PASSAGES)):
        texts += yield from _answer(chat.ask(pick("sources", random)), random)
        head += [*(chat.gap if passage else ()), *trim(texts[-1].tokens[texts[-1].answer :], ends)]
    turn = yield from _complete_turn([*head, *tail], ends, random)
    return texts + (yield from _answer([*turn, *chat.after], random))


def _complete_turn(
    begun: list[int], ends: frozenset[int], random: Random
) -> Generator[WriteRequest, list[int], list[int]]:
    """A user turn that begins with these tokens, as the target ends it."""
    written = yield WriteRequest(begun, random.randint(*TURN), random.uniform(0.5, 0.9))
    return [*begun, *trim(written, ends)]


def _answer(asked: list[int], random: Random) -> Conversation:
    longest = LONG_ANSWER if random.random() < LONG_ANSWERS else random.randint(*ANSWER)
    temperature = 0.0 if random.random() < GREEDY else random.uniform(0.6, 1.0)
    written = yield WriteRequest(asked, longest, temperature)
    return [WrittenText([*asked, *written], len(asked))]


def trim(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Without the token that ended them."""
    return list(tokens[:-1] if tokens and tokens[-1] in ends else tokens)


@cache
def openers() -> dict[str, tuple[str, ...]]:
    """Hand-written beginnings of user turns, by section: turns, sources, documents, topics, languages."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in Path(__file__).with_name("openers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
        elif line.strip() and name:
            found.setdefault(name, []).append(line.replace("\\n", "\n"))
    return {name: tuple(lines) for name, lines in found.items()}


def pick(section: str, random: Random) -> str:
    """A line of the section with topic and language filled in; a document's place stays open."""
    line = random.choice(openers()[section])
    line = line.replace("{topic}", random.choice(openers()["topics"]))
    return line.replace("{language}", random.choice(openers()["languages"]))
