"""Conversations that the target has with itself: it writes the user's turn and then the answer.

A conversation is a generator: it yields what is to be written next and is sent the tokens; the texts it returns are
trained on. Its random numbers come from its own seed, so it is the same whenever and beside whichever others it runs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from outrider.core.errors import OutriderError
from outrider.models.tokenizer import Tokenizer

OPENED = 2 / 3  # share of the user turns that begin with an opener of ours; the others the target begins itself
OWN_OPENERS = 0.5  # share of the conversations that begin with an opener of the user's own, where there are some
FOLLOWED = 0.25  # share of the answers that a further turn of the user follows
MOST_TURNS = 3  # answers of a conversation, at most: more would be longer than the texts that are learned from
GREEDY = 0.6  # share of the answers written at temperature 0, as most measurements are
ABOUT_DOCUMENTS = 1 / 4  # share of the conversations about a document that the target writes first
PASSAGES = (1, 1, 2, 3, 5)  # lengths of such a document in passages, each equally likely
TURN = (16, 72)  # fewest and most tokens that a user turn may have
ANSWER = (70, 200)  # fewest and most tokens that an answer may have
LONG_ANSWERS, LONG_ANSWER = 1 / 10, 256  # share of the answers that may be longer, and their tokens

# Sections of openers.txt and how often each is taken: much as models are measured, and for coders.
USUAL = {"turns": 0.55, "coding": 0.15, "translation": 0.12, "data": 0.18}
CODERS = {"turns": 0.3, "coding": 0.4, "translation": 0.12, "data": 0.18}

DOCUMENT = "{document}"  # the gap in an opener that a document fills
_CONTENT = "\u241fWORDS\u241f"  # stands for the user's words in a rendered template; no template writes it


@dataclass(frozen=True)
class WriteRequest:
    """Write at most `max_tokens` tokens after these."""

    tokens: Sequence[int]
    max_tokens: int
    temperature: float
    answer: bool = False  # what is written is learned from, however little of it there is


@dataclass(frozen=True)
class WrittenText:
    tokens: Sequence[int]
    answer: int  # index of the answer's first token
    talk: int = 0  # number of its conversation


Conversation = Generator[WriteRequest, list[int], list[WrittenText]]


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """How a turn is wrapped: the text before a user's words, and the tokens between them and the answer."""

    tokenizer: Tokenizer
    before: str  # text up to the user's words
    after: tuple[int, ...]  # tokens from their end to the answer
    gap: tuple[int, ...] = ()  # an empty line, between passages
    next_turn: tuple[int, ...] = ()  # tokens between an answer and the user's next words; (): the template has none

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
        asked = tuple(tokenizer.encode(after, add_special_tokens=False))
        return cls(tokenizer, before, asked, gap, _between_turns(tokenizer))

    def words(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

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


def _between_turns(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the template writes between an answer and the user's next words, the token that ends an answer included."""
    roles = [("user", "."), ("assistant", _CONTENT), ("user", _CONTENT)]
    messages = [{"role": role, "content": words} for role, words in roles]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # whatever a template raises that takes one turn only
        return ()
    parts = text.split(_CONTENT)
    return tuple(tokenizer.encode(parts[1], add_special_tokens=False)) if len(parts) == 3 else ()


def conversation(
    chat: ChatFormat, ends: frozenset[int], random: Random, about: Sequence[str] = (), mix: Mapping[str, float] = USUAL
) -> Conversation:
    """One conversation. `about`: openers of the user's own, which half of them then begin with. `mix`: how often each
    section of openers is taken."""
    if about and random.random() < OWN_OPENERS:
        return _plain(chat, ends, random, random.choice(about))
    section = random.choices(list(mix), list(mix.values()))[0]
    if random.random() < ABOUT_DOCUMENTS:
        return _about_a_document(chat, ends, random, "code_" if section == "coding" else "")
    return _plain(chat, ends, random, pick(section, random) if random.random() < OPENED else "")


def mix_for(model: str) -> Mapping[str, float]:
    """By what a model of that name is for."""
    return CODERS if "cod" in model.lower() else USUAL


def answer_to(chat: ChatFormat, words: str, random: Random) -> Conversation:
    """The answer to a user turn that is given."""
    return (yield from _answer(chat.ask(words), random))


def _plain(chat: ChatFormat, ends: frozenset[int], random: Random, opener: str) -> Conversation:
    turn = yield from _complete_turn(chat.begin(opener.rstrip(" ")), ends, random)
    texts = yield from _answer([*turn, *chat.after], random)
    while chat.next_turn and random.random() < FOLLOWED and len(texts) < MOST_TURNS:
        begun = [*trim(texts[-1].tokens, ends), *chat.next_turn, *chat.words(pick("followups", random))]
        turn = yield from _complete_turn(begun, ends, random)
        texts += yield from _answer([*turn, *chat.after], random)
    return texts


def _about_a_document(chat: ChatFormat, ends: frozenset[int], random: Random, sort: str) -> Conversation:
    """`sort`: "" for prose, "code_" for code, of which one piece is enough."""
    head, tail = chat.split(pick(f"{sort}documents", random), DOCUMENT)
    texts: list[WrittenText] = []
    for passage in range(1 if sort else random.choice(PASSAGES)):
        texts += yield from _answer(chat.ask(pick(f"{sort}sources", random)), random)
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
    written = yield WriteRequest(asked, longest, temperature, answer=True)
    return [WrittenText([*asked, *written], len(asked))]


def trim(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Without the token that ended them."""
    return list(tokens[:-1] if tokens and tokens[-1] in ends else tokens)


@cache
def openers() -> dict[str, tuple[str, ...]]:
    """Hand-written beginnings of user turns by section, and what fills their gaps."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in Path(__file__).with_name("openers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1]
        elif line.strip() and name:
            found.setdefault(name, []).append(line.replace("\\n", "\n"))
    return {name: tuple(lines) for name, lines in found.items()}


def pick(section: str, random: Random) -> str:
    """A line of the section with topic and languages filled in; a document's place stays open."""
    line = random.choice(openers()[section])
    for gap, filling in (("{topic}", "topics"), ("{language}", "languages"), ("{code}", "code")):
        if gap in line:
            line = line.replace(gap, random.choice(openers()[filling]))
    return line
