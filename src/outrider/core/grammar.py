"""Grammars: which tokens may follow where the text must be JSON of a schema, match an expression, or be one of a few.

llguidance compiles the grammar and computes the masks. A `Grammar` is compiled once for a vocabulary; each sequence has
a `Matcher` of its own, which stands after the committed tokens and looks ahead along drafts without a trace.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.core.draft import ROOT, Draft
from outrider.core.errors import LONGEST, OutriderError, quoted
from outrider.core.grammar_spec import GrammarSpec
from outrider.core.lark import as_lark, llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled grammars that are kept: those of a server's usual requests. One of a hundred fields has about a megabyte.
KEPT = 32
# Bytes of stack for the thread that compiles, reserved and mostly never touched. The compiler recurses along rules and
# references: the longest grammar that is allowed, all of it one chain, needs about 60 MB.
STACK = 256 << 20
# Tokens that a new grammar is tried with: one that grows out of its limits mostly does so at the second token.
TRIED = 3
SPECIAL = b"\xff"  # where llguidance names a special token among bytes; no text in UTF-8 has this byte
NONE = -1  # in the place of a byte: the token has no text
# Sets of allowed tokens of which it is kept which bytes they begin with: a text is at few kinds of places. A set of a
# vocabulary of 49,152 has 6 kB.
STARTS = 256
MANY = 4096  # tokens: where more than these may follow, as inside a string, nothing is nearly forced


class Vocabulary:
    """The tokens of a model as grammars need them: their bytes, and which of them are no text."""

    def __init__(
        self, tokens: Seq[bytes], special: Iterable[int], ends: Iterable[int], encode: Callable[[str], list[int]]
    ) -> None:
        """`tokens`: by id, one for each logit of the model; b"": a token that is never written. `ends`: the tokens
        after which an answer is over."""
        library = llguidance()
        self.size, self.tokens, self.encode = len(tokens), tokens, encode
        self.special = frozenset(special) | frozenset(ends)
        self.first = np.array([word[0] if word else NONE for word in tokens], np.int16)  # the first byte of each
        self.first[list(self.special)] = NONE
        self.of_byte = {word[0]: id for id, word in enumerate(tokens) if len(word) == 1 and id not in self.special}
        wrapped = library.TokenizerWrapper(_Tokens(tokens, sorted(self.special), sorted(ends), encode))
        self._starts: OrderedDict[bytes, frozenset[int] | None] = OrderedDict()  # by the bits of a mask, last used last
        self.tokenizer: LLTokenizer = library.LLTokenizer(wrapped, eos_token=sorted(ends))

    def starts(self, bits: bytes) -> frozenset[int] | None:
        """The bytes with which the tokens of a mask begin, of which `bits` has a bit each; None: they are many."""
        if bits in self._starts:
            self._starts.move_to_end(bits)
            return self._starts[bits]
        known = np.unpackbits(np.frombuffer(bits, np.uint8), count=min(self.size, 8 * len(bits)), bitorder="little")
        allowed = np.flatnonzero(known)
        found = None if len(allowed) > MANY else frozenset(self.first[allowed].tolist()) - {NONE}
        self._starts[bits] = found
        if len(self._starts) > STARTS:
            self._starts.popitem(last=False)
        return found


class _Tokens:
    """What llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, tokens: Seq[bytes], special: list[int], ends: list[int], encode: Callable[[str], list[int]]):
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), special, ends[0]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class Grammar:
    """A grammar that was compiled for a vocabulary. It never changes; matchers begin as its copies."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """An OutriderError says what in it cannot be used."""
        self.vocabulary = vocabulary
        self._start = _compiled(spec, vocabulary)

    def matcher(self, ends: Collection[int]) -> Matcher:
        """At the beginning. `ends`: the tokens that end this sequence."""
        return Matcher(self._start, self.vocabulary, ends)


class Grammars:
    """The grammars of one vocabulary. Any thread may ask; each is compiled once and kept while it is used."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called once, when the first grammar is asked for."""
        self._make = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()  # the last used last
        self._lock = threading.Lock()

    def get(self, spec: GrammarSpec) -> Grammar:
        with self._lock:
            if spec in self._kept:
                self._kept.move_to_end(spec)
                return self._kept[spec]
            if self._vocabulary is None:
                self._vocabulary = self._make()
            vocabulary = self._vocabulary
        grammar = Grammar(spec, vocabulary)  # a request for another one does not wait for it
        with self._lock:
            self._kept[spec] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar


class Matcher:
    """Where one sequence stands in its grammar: after the committed tokens; questions about drafts do not move it."""

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary, ends: Collection[int]) -> None:
        """`start`: a state at the beginning, which is copied."""
        self._start, self._state = start, start.deep_copy()
        self._vocabulary, self._size = vocabulary, vocabulary.size
        self._committed: list[int] = []
        self.written = bytearray()  # the bytes of the committed tokens
        self.ends = frozenset(ends) & vocabulary.special  # written where the grammar may end; others are text
        self._ends = np.array(sorted(self.ends), dtype=np.intp)
        self._ahead: list[int] = []  # tokens that the state has taken in beyond the committed ones
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # by the tokens after the committed ones

    def mask(self, guessed: Seq[int] = ()) -> Tensor | None:
        """[vocab] bool: the tokens that may follow the committed ones and `guessed`. None: nothing can be said, since
        the grammar forbids `guessed` or ends within it; no path of a verdict goes on there."""
        path = tuple(guessed)
        if path not in self._masks:
            self._masks[path] = self._computed() if self._go(path) else None
        return self._masks[path]

    def allows(self, guessed: Seq[int], token: int) -> bool:
        """Whether this one token may follow the committed ones and `guessed`: a tenth of the time of a mask."""
        path = tuple(guessed)
        if path not in self._masks and self._go(path):
            if token in self.ends:
                return bool(self._state.is_accepting())
            valid = self._state.validate_tokens([token]) == 1
            if not self._state.is_error():
                return valid
        mask = self.mask(path)
        return mask is not None and bool(mask[token])

    def commit(self, token: int) -> None:
        """The token is written for good. One that ends the sequence is not told."""
        if not self._go((token,)):
            self._begin_anew()  # or it would not tell that it has grown out of its limits
            self._computed()
            raise OutriderError(f"token {token} was written, but the grammar forbids it here")
        del self._ahead[:1]
        self._committed.append(token)
        self.written += self._vocabulary.tokens[token]
        self._masks = {path[1:]: mask for path, mask in self._masks.items() if path and path[0] == token}

    def allowed(self, tokens: Seq[int]) -> int:
        """How many of these tokens, one after the other, may follow the committed ones; an end is the last."""
        count = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        self._go(())
        valid = self._state.validate_tokens(list(tokens[:count])) if count else 0
        if valid < count or count == len(tokens):
            return valid
        mask = self.mask(tokens[:count])
        return count + int(mask is not None and bool(mask[tokens[count]]))

    def forced(self, guessed: Seq[int] = ()) -> bytes:
        """The bytes that must follow the committed tokens and `guessed`, whatever the target thinks; b"" where there is
        a choice, or the grammar forbids `guessed`. They end before a special token."""
        if not self._go(guessed):
            return b""
        text, special, _ = bytes(self._state.compute_ff_bytes()).partition(SPECIAL)
        if special:  # llguidance has gone into the token's name, and could take in nothing but the token itself
            self._begin_anew()
        return text

    def first_bytes(self, guessed: Seq[int] = ()) -> frozenset[int] | None:
        """The bytes with which the text may go on after the committed tokens and `guessed`. None: it is nearly free."""
        return self._vocabulary.starts(self._bits()) if self._go(guessed) else frozenset()

    def spelled(self, text: bytes) -> list[int]:
        """Tokens of one byte each, where there are such: what may follow depends on the bytes alone."""
        found = [self._vocabulary.of_byte.get(byte, NONE) for byte in text]
        return self.encode(text) if NONE in found else found

    def text(self, token: int) -> bytes:
        return self._vocabulary.tokens[token]

    def encode(self, text: bytes) -> list[int]:
        """Whole characters in the tokenizer's own tokens."""
        return self._vocabulary.encode(text.decode("utf-8", "ignore"))

    def _go(self, path: Seq[int]) -> bool:
        """Bring the state to `path` after the committed tokens; False: the grammar forbids it."""
        if self._state.is_error():  # for good, though it may have come of a draft alone
            self._begin_anew()
        same = next((i for i, (a, b) in enumerate(zip(path, self._ahead, strict=False)) if a != b), None)
        same = min(len(path), len(self._ahead)) if same is None else same
        if len(self._ahead) > same:
            self._state.rollback(len(self._ahead) - same)
            del self._ahead[same:]
        for token in path[same:]:
            if token in self.ends or self._state.try_consume_tokens([token]) != 1:
                return False
            self._ahead.append(token)
        return True

    def _begin_anew(self) -> None:
        """A fresh state after the committed tokens."""
        self._state, self._ahead = self._start.deep_copy(), []
        self._state.consume_tokens(self._committed)

    def _refuse_errors(self) -> None:
        """An expression may grow out of its limits where it is matched."""
        if self._state.is_error():
            raise OutriderError(f"the grammar cannot go on: {_reason(self._state.get_error())}")

    def _bits(self) -> bytes:
        """The mask of where the state is, a bit for each token."""
        bits: bytes = self._state.compute_bitmask()
        self._refuse_errors()
        return bits

    def _computed(self) -> Tensor:
        bits = np.frombuffer(self._bits(), np.uint8)
        known = np.unpackbits(bits, count=min(self._size, 8 * len(bits)), bitorder="little").view(np.bool_)
        allowed = known
        if len(known) < self._size:  # a model may have more logits than its tokenizer has tokens
            allowed = np.zeros(self._size, np.bool_)
            allowed[: len(known)] = known
        allowed[self._ends] = self._state.is_accepting()
        return torch.from_numpy(allowed)


def permitted(draft: Draft, matcher: Matcher) -> Draft:
    """The draft without the nodes that the grammar forbids.

    A drawn node stays: that it was drawn and refused is a part of the law under rejection. What hangs below it, or
    below an end, can never be reached.
    """
    if draft.is_chain and draft.probs is None:
        return draft.cut(matcher.allowed(draft.tokens))
    kept, alive = [], {ROOT}
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent not in alive:
            continue
        *before, last = (draft.tokens[i] for i in draft.path(node))
        fits = matcher.allows(before, last)
        if fits or draft.probs is not None:
            kept.append(node)
        if fits and token not in matcher.ends:
            alive.add(node)
    return draft if len(kept) == len(draft) else draft.keep(kept)


def _compiled(spec: GrammarSpec, vocabulary: Vocabulary) -> LLMatcher:
    found: list[LLMatcher | Exception] = []

    def compile() -> None:
        try:
            found.append(_tried(spec, vocabulary))
        except Exception as error:
            found.append(error)

    _on_a_large_stack(compile)
    (made,) = found
    if isinstance(made, Exception):
        raise made
    return made


_starting = threading.Lock()  # the size of stacks is set for the whole process


def _on_a_large_stack(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, name="outrider-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()


def _tried(spec: GrammarSpec, vocabulary: Vocabulary) -> LLMatcher:
    """Compiled, and a few steps tried: some grammars are found to be too large only then."""
    library = llguidance()
    limits = library.LLParserLimits(verbose_errors=False)
    start: LLMatcher = library.LLMatcher(vocabulary.tokenizer, as_lark(spec), log_level=0, limits=limits)
    if not start.is_error():
        start.compute_bitmask()
    trial = start.deep_copy()
    for _ in range(TRIED):
        bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
        if trial.is_error() or trial.is_stopped() or not trial.consume_token(int(bits.argmax())):
            break
    for state in (start, trial):
        if state.is_error():
            raise _refused(spec, state.get_error())
    return start


# The position that llguidance names first. In a grammar that we have generated it would tell a user nothing.
_PLACE = re.compile(r"^at 1\(8\): (failed to compile JSON schema: |invalid regex .* \(in regex\): )?")
_STOPS = {"NoExtensionBias": "no text fits it", "NoExtension": "no text fits it"}


def _reason(message: str) -> str:
    """llguidance's message in one line: without the picture of the place, which takes several."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    words = [line for line in lines if line and set(line) != {"^"} and not line.split(" ")[0].isdigit()]
    reason = " ".join(" ".join(words).split())
    return _STOPS.get(reason, reason)[:LONGEST] or quoted(message)


def _refused(spec: GrammarSpec, message: str) -> OutriderError:
    reason = _reason(message)
    return OutriderError(
        f"{spec.parameter} cannot be used: {reason if spec.parameter == 'grammar' else _PLACE.sub('', reason)}"
    )
