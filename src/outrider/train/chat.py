"""How a turn is wrapped: the tokens before a user's words, and those between them and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.errors import OutriderError
from outrider.models.tokenizer import Tokenizer

_MARK = "\u241fWORDS\u241f"  # stands for the user's words; no template writes it


@dataclass(frozen=True, eq=False)
class Chat:
    tokenizer: Tokenizer
    before: str  # text up to the user's words
    after: tuple[int, ...]  # tokens from their end to the answer
    gap: tuple[int, ...] = ()  # an empty line, between passages

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Chat:
        """As the model's own template has it; a model without one writes on where the user's words end."""
        if tokenizer is None:
            raise OutriderError("the model has no tokenizer, so it cannot write texts to learn from; add its files")
        gap = tuple(tokenizer.encode("\n\n", add_special_tokens=False))
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", (), gap)
        messages = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, mark, after = text.partition(_MARK)
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
        """An open user turn with a gap in it that is filled with tokens: those before and those behind the gap."""
        head, _, tail = words.partition(gap)
        return self.begin(head), list(self.tokenizer.encode(tail, add_special_tokens=False)) if tail else []

    def _some_token(self) -> list[int]:
        """Nothing at all cannot be continued."""
        return list(self.tokenizer.encode("\n", add_special_tokens=False))


def trim(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Without the token that ended them."""
    return list(tokens[:-1] if tokens and tokens[-1] in ends else tokens)
