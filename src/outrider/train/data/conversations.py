"""Conversations that the target has with itself: it writes the user's turn and then the answer.

A conversation is a generator: it yields what is to be written next and is sent the tokens; the texts it returns are
trained on. Its random numbers come from its own seed, so it is the same whenever and beside whichever others it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from outrider.core.errors import OutriderError
from outrider.models.tokenizer import Tokenizer
from outrider.train.data import wording
from outrider.train.data.openers import DOCUMENT, is_whole, pick, two_languages, with_wish

UNOPENED = 0.1  # share of the plain conversations whose first turn the target begins itself: coders begin with raw code
OWN_OPENERS = 0.5  # share of the conversations that begin with an opener of the user's own, where there are some
FOLLOWED = 0.25  # share of the answers that a further turn of the user follows
MOST_TURNS = 3  # answers of a conversation, at most: more would be longer than the texts that are learned from
GREEDY = 0.7  # share of the answers written at temperature 0, as most measurements are
# Temperatures of the others: in texts that Qwen2.5-Coder-0.5B wrote at 1, languages and letters were mixed up.
WARM = (0.4, 0.9)
TURN = (16, 72)  # fewest and most tokens that the rest of a user turn may have
ANSWER = (70, 200)  # fewest and most tokens that an answer may have
LONG_ANSWERS, LONG_ANSWER = 1 / 10, 256  # share of the answers that may be longer, and their tokens


@dataclass(frozen=True)
class SourceForm:
    """What the target writes first where a user's turn is about a text."""

    section: str  # of the requests for it
    passages: Sequence[int] = (1,)  # how many of them, each equally likely
    tokens: tuple[int, int] | None = None  # fewest and most that each may have; None: as an answer
    greedy: float = 0.5  # share of them that are written at temperature 0: they are to differ from each other
    wishes: str = ""  # section of what is added to the requests
    cleaned: Callable[[str], str] = wording.passage


# Sections of openers whose gap is filled by what the target writes first.
SOURCED = {
    "documents": SourceForm("sources", passages=(1, 1, 2, 3, 5), wishes="manners"),
    "code_documents": SourceForm("code_sources", wishes="code_manners"),
    "asking": SourceForm("asking_sources", tokens=(24, 72), greedy=0.0, cleaned=wording.question),
    "translating": SourceForm("translating_sources", tokens=(16, 90)),
}
# Sections and how often a conversation begins with each: much as models are measured, and for coders.
USUAL = {
    "turns": 0.26, "data": 0.12, "coding": 0.1, "translation": 0.14,
    "documents": 0.18, "code_documents": 0.04, "asking": 0.12, "translating": 0.04,
}  # fmt: skip
CODERS = {
    "turns": 0.19, "data": 0.12, "coding": 0.17, "translation": 0.14,
    "documents": 0.15, "code_documents": 0.08, "asking": 0.11, "translating": 0.04,
}  # fmt: skip

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
    next_turn: tuple[int, ...] = ()  # tokens between an answer and the user's next words; (): the template has none

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ChatFormat:
        """As the model's own template has it; a model without one writes on where the user's words end."""
        if tokenizer is None:
            raise OutriderError("the model has no tokenizer, so it cannot write texts to learn from; add its files")
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", ())
        messages = [{"role": "user", "content": _CONTENT}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, mark, after = text.partition(_CONTENT)
        if not mark:
            raise OutriderError(
                "the model's chat template does not show a user's words as they are; train for a model with another"
            )
        asked = tuple(tokenizer.encode(after, add_special_tokens=False))
        return cls(tokenizer, before, asked, _between_turns(tokenizer))

    def words(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def begin(self, words: str) -> list[int]:
        """The tokens of a user turn that is still open."""
        tokens = self.tokenizer.encode(self.before + words, add_special_tokens=not self.before)
        return tokens or self._some_token()

    def ask(self, words: str) -> list[int]:
        """The tokens of a whole user turn, ready for the answer."""
        return [*self.begin(words), *self.after]

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

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
        return _plain(chat, ends, random, random.choice(about), whole=False)
    section = random.choices(list(mix), list(mix.values()))[0]
    if section in SOURCED:
        return _about_a_source(chat, ends, random, section)
    opener = "" if random.random() < UNOPENED else pick(section, random)
    wishes = "code_manners" if section == "coding" else "manners"
    return _plain(chat, ends, random, with_wish(opener, wishes, random), is_whole(opener))


def mix_for(model: str) -> Mapping[str, float]:
    """By what a model of that name is for."""
    return CODERS if "cod" in model.lower() else USUAL


def answer_to(chat: ChatFormat, words: str, random: Random) -> Conversation:
    """The answer to a user turn that is given."""
    return (yield from _answer(chat.ask(words), random))


def _plain(chat: ChatFormat, ends: frozenset[int], random: Random, opener: str, whole: bool) -> Conversation:
    """`whole`: the opener is the first turn as it is."""
    begun = chat.begin(opener.rstrip(" "))
    turn = begun if whole else (yield from _complete_turn(chat, begun, opener, ends, random))
    texts = yield from _answer([*turn, *chat.after], random)
    while chat.next_turn and random.random() < FOLLOWED and len(texts) < MOST_TURNS:
        further = pick("followups", random)
        turn = [*trim(texts[-1].tokens, ends), *chat.next_turn, *chat.words(further)]
        if not is_whole(further):
            turn = yield from _complete_turn(chat, turn, further, ends, random)
        texts += yield from _answer([*turn, *chat.after], random)
    return texts


def _about_a_source(chat: ChatFormat, ends: frozenset[int], random: Random, section: str) -> Conversation:
    """The target first writes what the user's turn is about: passages, code, a question, a text in some language."""
    form, gaps = SOURCED[section], two_languages(random)
    texts: list[WrittenText] = []
    passages: list[str] = []
    for _ in range(random.choice(form.passages)):
        asked = with_wish(pick(form.section, random, gaps), form.wishes, random)
        texts += yield from _answer(chat.ask(asked), random, form.tokens, form.greedy)
        written = _whole(chat, texts[-1].tokens[texts[-1].answer :], ends)
        if not wording.is_refusal(written):
            passages.append(form.cleaned(written))
    if not any(passages):
        return texts
    opener = pick(section, random, gaps)
    turn = chat.begin(opener.replace(DOCUMENT, "\n\n".join(passages)))
    if not is_whole(opener):
        turn = yield from _complete_turn(chat, turn, opener, ends, random)
    return texts + (yield from _answer([*turn, *chat.after], random))


def _complete_turn(
    chat: ChatFormat, begun: list[int], opener: str, ends: frozenset[int], random: Random
) -> Generator[WriteRequest, list[int], list[int]]:
    """A user turn that begins with these tokens, as the target ends it; `opener` is the text at their end.

    A line that the opener leaves open is all that the target adds: after it, it would go on with the answer.
    """
    written = yield WriteRequest(begun, random.randint(*TURN), random.uniform(0.5, 0.9))
    text = _whole(chat, written, ends)
    if opener and "\n" not in opener.rpartition(DOCUMENT)[2].removeprefix("\n\n"):
        text = wording.first_line(text)
    return [*begun, *chat.words(text)] if text else begun


def _whole(chat: ChatFormat, tokens: Sequence[int], ends: frozenset[int]) -> str:
    """What was written, without the sentence that it was cut in."""
    text = chat.text(trim(tokens, ends))
    return text if tokens and tokens[-1] in ends else wording.whole_sentences(text)


def _answer(
    asked: list[int], random: Random, tokens: tuple[int, int] | None = None, greedy: float = GREEDY
) -> Conversation:
    """`tokens`: fewest and most that it may have, if they are not the usual ones. `greedy`: how likely it is written at
    temperature 0."""
    longer = tokens is None and random.random() < LONG_ANSWERS
    longest = LONG_ANSWER if longer else random.randint(*(tokens or ANSWER))
    temperature = 0.0 if random.random() < greedy else random.uniform(*WARM)
    written = yield WriteRequest(asked, longest, temperature, answer=True)
    return [WrittenText([*asked, *written], len(asked))]


def trim(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Without the token that ended them."""
    return list(tokens[:-1] if tokens and tokens[-1] in ends else tokens)
