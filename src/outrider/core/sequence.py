"""A sequence: its tokens, its rules, its random numbers, and how it ended. Only the engine appends to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.core import sampling
from outrider.core.adapter import ReadyAdapter
from outrider.core.dice import DRAFT, Dice
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.grammar import Matcher
from outrider.core.params import SamplingParams
from outrider.core.request import Finish, Token
from outrider.core.stats import Stats

Rule = Literal["coupled", "rejection"]
Scope = str | tuple[str, str]  # sequences of the same scope may share prefixes: a tenant, or a tenant and an adapter

# Tokens that are kept as shared objects, for all models of a process. About 300 bytes each with their key, so at most
# 20 MB; more than the tokens that texts of several models use at a time. To make one takes ten times as long as to
# find one, and a batch on a GPU writes many thousands in a step (LOG, 2026-11-15: the host's time of a step).
SHARED_TOKENS = 1 << 16


@functools.lru_cache(SHARED_TOKENS)
def plain_token(id: int, drafter: str | None = None, depth: int = 0) -> Token:
    """A token without log-probabilities: the same object every time, for there are many."""
    return Token(id, drafter, depth)


@dataclass(eq=False)
class Sequence:
    id: int
    tokens: list[int]  # the prompt, then what was committed
    params: SamplingParams = SamplingParams()
    ends: frozenset[int] = frozenset()  # tokens that end it: eos and stop_token_ids
    draft: str = ""  # which of the engine's drafters serves it; "": the engine's own
    prediction: tuple[int, ...] = ()  # the output that the caller expects
    dice: Dice = field(default_factory=Dice)
    rule: Rule = "rejection"
    watch: Callable[[int], bool] | None = None  # told of every committed token; True: stop here (a stop string)
    output: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    stats: Stats = field(default_factory=Stats)
    request: int | str = -1  # the same for all sequences of a request, or of a group; -1: it is a request of its own
    call: int | None = None  # the same for all sequences that were handed in by one call, which waits for all of them
    matcher: Matcher | None = None  # where it stands in its grammar, if it has one
    tenant: str = ""  # whose text it is: drafters learn nothing of it that would reach another tenant
    adapter: ReadyAdapter | None = None  # of the target, for all of its tokens

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        if self.request == -1:
            self.request = self.id
        if self.params.seed is not None:
            self.rule = "coupled"  # the same seed gives the same text with any drafter or none
        if (self.matcher is None) != (self.params.constraint is None):
            raise OutriderError("a grammar must be compiled for the model's tokens before a sequence can follow it")

    @property
    def left(self) -> int:
        """How many tokens it may still write."""
        return self.params.max_tokens - len(self.output)

    @property
    def scope(self) -> Scope:
        """Sequences of one scope may share keys and values: these depend on the adapter, and tenants are kept apart."""
        return self.tenant if self.adapter is None else (self.tenant, self.adapter.key)

    @property
    def limit(self) -> int:
        """The most tokens it can ever have."""
        return self.prompt + self.params.max_tokens

    def append(self, token: Token) -> bool:
        """Commit one token; False when it was the last."""
        self.tokens.append(token.id)
        self.output.append(token)
        if token.id in self.ends or (self.watch is not None and self.watch(token.id)):
            self.finish = "stop"
            return False
        if self.matcher is not None:
            self.matcher.commit(token.id)
        if self.left == 0:
            self.finish = "length"
        return self.finish is None

    def extend(self, ids: Seq[int]) -> int:
        """Commit tokens that the target wrote by itself, up to the end of the sequence; how many there were."""
        ids = ids[: self.left]
        if self.watch is None and self.matcher is None and self.ends.isdisjoint(ids):
            self.tokens += ids
            self.output += map(plain_token, ids)
            if self.left == 0:
                self.finish = "length"
            return len(ids)
        for count, id in enumerate(ids, 1):
            if not self.append(plain_token(id)):
                return count
        return len(ids)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether its tokens depend on nothing but the logits, the temperature, the cuts and its dice: all that a
        device needs to choose them without the host, and the host looks at nothing else of the logits."""
        return not self.params.adjusts and self.params.logprobs is None

    @functools.cached_property
    def takes_best(self) -> bool:
        """Whether its next token is the likeliest of the target's own logits."""
        return self.params.greedy and not self.params.adjusts

    def fail(self, reason: str) -> None:
        self.finish, self.error = "error", reason

    def law(self, logits: Tensor, guessed: Seq[int] = ()) -> Tensor:
        """The distribution of the token after the committed ones and `guessed`."""
        return sampling.warp(self.adjusted(logits, guessed), self.params)

    def adjusted(self, logits: Tensor, guessed: Seq[int] = ()) -> Tensor:
        """Logits [vocab] after the committed tokens and `guessed`, as the parameters and the grammar change them."""
        if not self.params.adjusts:
            return logits
        mask = None if self.matcher is None else self.matcher.mask(guessed)
        return sampling.adjust(logits, [*self.tokens, *guessed], self.prompt, self.params, self.ends, mask)

    def best(self, logits: Tensor, guessed: Seq[int] = ()) -> int:
        """The greedy choice after the committed tokens and `guessed`."""
        if not self.params.adjusts:
            return int(logits.argmax())
        if self.matcher is not None and not self.params.penalises:
            [best] = sampling.likeliest(logits.unsqueeze(0))
            if self.matcher.allows(guessed, best):  # the usual case: it is then the likeliest allowed token, too
                return best
            if (mask := self.matcher.mask(guessed)) is not None:
                return sampling.likeliest_allowed(logits, mask)
        return int(self.adjusted(logits, guessed).argmax())

    def draw(self, law: Tensor, depth: int, index: int = 0) -> int:
        """A drafter's draw from its own law for the token `depth` positions past the first undecided one; `index` tells
        the draws for one position apart.

        Under the coupled rule it uses the target's own noise, so that it mostly draws the target's token.
        """
        position = len(self.tokens) + depth
        if self.rule == "coupled":
            return self.dice.choose(law, position)
        return self.dice.draw(law, position, DRAFT, index)


def logprobs(logits: Tensor, token: int, alternatives: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of `token` under the unchanged logits [vocab], and those of the likeliest tokens."""
    scores = torch.log_softmax(logits.float(), -1)
    values, ids = scores.topk(min(alternatives, scores.shape[0]))
    return float(scores[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


def guessed_tokens(draft: Draft, node: int) -> list[int]:
    """The draft's tokens from the root down to `node`."""
    return [draft.tokens[i] for i in draft.path(node)]
