"""Text that the request's grammar forces: keys, brackets, the rest of a choice. The target confirms it like any draft.

The text is guessed in the tokenizer's own tokens; the target is free to write it in others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.grammar import Matcher
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter

# Bytes that are looked ahead for each token of a draft: tokens of keys and brackets rarely have more.
BYTES_PER_TOKEN = 8
SPACES = b" \n\r\t"
REMEMBERED = 400  # bytes of the text in which its way of spacing is looked for: a few lines
# What models mostly write after these before they have shown their own way, in JSON.
USUAL = {b":"[0]: b" ", b","[0]: b" "}


class GrammarDrafter(Drafter):
    """Drafts nothing for a sequence without a grammar, or where the grammar leaves a choice."""

    name = "grammar"
    is_free = reads_grammar = True

    @dataclass(frozen=True)
    class Options:
        length: int = 16

    def __init__(self, options: Options, context: BuildContext) -> None:
        if options.length < 1:
            raise OutriderError(f"grammar:length must be at least 1, not {options.length}")
        self._length = options.length

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(seq, min(budget, self._length)) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: int) -> Draft:
        if seq.matcher is None or budget < 1:
            return EMPTY
        text = _forced(seq.matcher, budget * BYTES_PER_TOKEN)
        return Draft.chain(seq.matcher.encode(text)[:budget]) if text else EMPTY


def _forced(matcher: Matcher, most: int) -> bytes:
    """What must follow, and beyond spaces that may: JSON allows them nearly everywhere, and texts keep to one way."""
    text = matcher.forced()
    while len(text) < most:
        only = matcher.first_bytes(matcher.encode(text)) - set(SPACES)
        if len(only) != 1:
            return text
        text += _spaces(bytes(matcher.written[-REMEMBERED:]), text) + bytes(only)
        text += matcher.forced(matcher.encode(text))
    return text


def _spaces(written: bytes, text: bytes) -> bytes:
    """The spaces that came after the last character when it was written before."""
    whole = written + text
    if not whole or whole[-1] in SPACES:
        return b""
    before = whole.rfind(whole[-1:], 0, len(whole) - 1)
    if before == -1:
        return USUAL.get(whole[-1], b"")
    after = whole[before + 1 :]
    return after[: len(after) - len(after.lstrip(SPACES))]
