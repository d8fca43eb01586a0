"""Models that think before they answer: the marks around their reasoning, the grammar of an answer that begins after
it, and text as it comes, split into the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.grammar_spec import GrammarSpec
from outrider.core.lark import lark_rule
from outrider.server.tools.base import escaped, literal, special_tokens, template_of

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # Qwen, DeepSeek, SmolLM and most others; Mistral
GAP = "\n\n"  # what models write between reasoning and answer; it belongs to neither
ANYTHING = "/(?s:.*)/"


@dataclass(frozen=True)
class Thinking:
    """How a model's reasoning is marked."""

    begin: str
    end: str
    begun: bool  # the prompt has the first mark already; otherwise the model writes it, or answers at once
    special: Mapping[str, int]  # the marks that are special tokens

    def rules(self) -> list[str]:
        """Rules of a grammar: `start` is the reasoning and then the rule `answer`."""
        begin = "" if self.begun else f"{self._mark(self.begin)} "
        start = f"start: {begin}thought GAP? answer" + ("" if self.begun else " | answer")
        return [start, *self._thought(), rf"GAP: /\n{{1,{len(GAP)}}}/"]

    def answer(self, spec: GrammarSpec) -> list[str]:
        """The rule `answer`."""
        if spec.parameter == "grammar":
            return [f"answer: %lark {{\n{spec.text}\n}}"]
        if spec.parameter == "regex":
            return ["answer: ANSWER", lark_rule(spec, "ANSWER") + self.not_thought()]
        return [lark_rule(spec, "answer")]

    def not_thought(self) -> str:
        """For the expression of an answer in words: such a text does not begin as reasoning does."""
        return "" if self.begun or self.begin in self.special else f" & ~/(?s:{escaped(self.begin)}.*)/"

    def _mark(self, text: str) -> str:
        return f"<[{self.special[text]}]>" if text in self.special else literal(text)

    def _thought(self) -> list[str]:
        """Reasoning up to its end, wherever in a draft that is. It is lazy: the first mark ends it."""
        if self.end in self.special:
            return [f"thought: THOUGHT {self._mark(self.end)}", f"THOUGHT: {ANYTHING}"]
        return [rf"thought[lazy]: /(?s:.*){escaped(self.end)}/"]


def describe_thinking(tokenizer: Any) -> dict[str, Any] | None:
    """What the server is told of a model that thinks, as plain values; None where its template knows no reasoning."""
    template = template_of(tokenizer)
    begin, end = next((marks for marks in MARKS if marks[1] in template), ("", ""))
    asked = _asked(tokenizer) if end else ""
    if not end or end in asked[asked.rfind(begin) :]:  # the last: an empty thought is in every prompt
        return None
    special = special_tokens(tokenizer)
    found = {mark: special[mark] for mark in (begin, end) if mark in special}
    return {"begin": begin, "end": end, "begun": asked.rstrip().endswith(begin), "special": found}


def _asked(tokenizer: Any) -> str:
    """A prompt of that template."""
    try:
        asked = [{"role": "user", "content": "?"}]
        return str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    except Exception:  # the template is the model's own code
        return ""


class ReasoningParser:
    """An answer as it comes, as reasoning and the rest. Chunks may have any length; the whole at once gives the same
    text."""

    def __init__(self, thinking: Thinking) -> None:
        self._begin, self._end = thinking.begin, thinking.end
        self._step = self._within if thinking.begun else self._before
        self._rest = ""  # text that is not read yet
        self._thought = self._answered = ""
        self._gap = len(GAP)  # characters that may still be left out before the answer

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """New reasoning, and new text of the answer. `last`: no text follows."""
        self._rest += text
        before = len(self._thought), len(self._answered)
        while self._step(last):
            pass
        return self._thought[before[0] :], self._answered[before[1] :]

    def _before(self, last: bool) -> bool:
        """Whether there is reasoning at all. True: go on with the next step."""
        if self._rest.startswith(self._begin):
            self._rest, self._step = self._rest[len(self._begin) :], self._within
            return True
        if not last and self._begin.startswith(self._rest):
            return False
        self._gap, self._step = 0, self._after
        return True

    def _within(self, last: bool) -> bool:
        """Up to the mark, without the space around. What may be the beginning of either waits."""
        if not self._thought:
            self._rest = self._rest.lstrip()
        place = self._rest.find(self._end)
        if place >= 0:
            self._thought += self._rest[:place].rstrip()
            self._rest, self._step = self._rest[place + len(self._end) :], self._after
            return True
        size = len(self._rest) if last else len(self._rest) - held(self._rest, self._end)
        self._thought, self._rest = self._thought + self._rest[:size], self._rest[size:]
        return False

    def _after(self, last: bool) -> bool:
        while self._gap and self._rest.startswith("\n"):
            self._rest, self._gap = self._rest[1:], self._gap - 1
        if self._rest:
            self._answered, self._rest, self._gap = self._answered + self._rest, "", 0
        return False


def held(text: str, mark: str) -> int:
    """How many of the last characters may belong to a mark, or to the space before it."""
    begun = next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip())
