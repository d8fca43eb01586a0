"""Models that break the promise of the company audit in one way each: small wrappers around a real model."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.core.dice import RESIDUAL
from outrider.core.sampling import SamplingParams, warp
from outrider.models.base import Feed, Output, WrittenTokens

NEAR = 0.45  # logits: gaps below it flip, so that the margin of every flip is below 0.5


def flipped(logits, most=NEAR):
    """The two likeliest tokens change places where they nearly tie."""
    logits = logits.clone()
    values, ids = logits.float().topk(2)
    for row in ((values[:, 0] - values[:, 1]) < most).nonzero().flatten().tolist():
        first, second = ids[row].tolist()
        logits[row, first], logits[row, second] = logits[row, second].clone(), logits[row, first].clone()
    return logits


class Wrapped:
    """The model itself, behind the same protocols."""

    def __init__(self, model):
        self.model = model
        self.rows_alone, self.boundaries = model.rows_alone, model.boundaries

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, feeds, layers=()):
        outputs = self.model.forward([self.fed(feed) for feed in feeds], layers)
        return [
            Output(flipped(output.logits), output.hidden) if self.wrong(feed, feeds) else output
            for feed, output in zip(feeds, outputs, strict=True)
        ]

    def fed(self, feed):
        """What the model is given in place of a feed."""
        return feed

    def wrong(self, feed, feeds):
        """Whether near ties of the feed fall otherwise in this pass. The pass is over: lengths count its rows."""
        return False


class CountsItsNeighbours(Wrapped):
    def wrong(self, feed, feeds):
        return len(feeds) > 1


class FlipsWhereDrafted(Wrapped):
    def wrong(self, feed, feeds):
        return bool(feed.draft)


class MindsALongNeighbour(Wrapped):
    def wrong(self, feed, feeds):
        return any(self.length(other.id) > 400 for other in feeds if other.id != feed.id)


class ErrsAtABoundary(Wrapped):
    """At 127 to 130 tokens, and only in company."""

    def wrong(self, feed, feeds):
        return len(feeds) > 1 and 127 <= self.length(feed.id) <= 130


class SumsByChunk(Wrapped):
    """The keys of a chunk of more than 200 tokens are others than those of the same tokens in smaller chunks."""

    def fed(self, feed):
        if len(feed.tokens) <= 200:
            return feed
        return replace(feed, tokens=[feed.tokens[0] ^ 1, *feed.tokens[1:]])


class SharesPrefixes(Wrapped):
    """With pages: a sequence that begins like another one takes over its keys, as on a GPU."""

    page = 8

    def __init__(self, model):
        super().__init__(model)
        self.known, self.counts, self.shared = set(), {}, 0

    def begin(self, id, tokens, tenant=""):
        if self.length(id):
            return 0
        most = (len(tokens) - 1) // self.page
        count = next((n for n in range(most, 0, -1) if tuple(tokens[: n * self.page]) in self.known), 0)
        if count:
            self.shared += 1
            self.model.forward([Feed(id, self.kept(tokens[: count * self.page]))])
        return count * self.page

    def kept(self, tokens):
        """What the cache has of a prefix."""
        return tokens

    def seen(self, id, tokens, tenant=""):
        full = min(len(tokens), self.length(id)) // self.page
        for count in range(self.counts.get(id, 0) + 1, full + 1):
            self.known.add(tuple(tokens[: count * self.page]))
        self.counts[id] = full

    def forget_prefixes(self):
        self.known.clear()

    def write(self, ids, last, dice, temperatures, plan, wait, layers=(), adapters=(), draws=()):
        while steps := plan(0):
            wait()
            rows = [self._write(*each, steps) for each in zip(ids, last, dice, temperatures, draws, strict=True)]
            last = [row[-1] for row in rows]
            yield WrittenTokens(torch.tensor(rows).T)

    def _write(self, id, token, dice, temperature, draws, steps):
        written = []
        for _ in range(steps):
            [output] = self.model.forward([Feed(id, [token])])
            law = warp(output.logits[0], SamplingParams(temperature=temperature))
            if dice is None:
                token = int(law.argmax())
            else:
                at = self.length(id)
                token = dice.draw(law, at, RESIDUAL) if draws else dice.choose(law, at)
            written.append(token)
        return written


class ReturnsOtherKeys(SharesPrefixes):
    def kept(self, tokens):
        return [tokens[0] ^ 1, *tokens[1:]]
