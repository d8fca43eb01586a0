"""Our engine behind a tokenizer of six letters, with a model that needs no weights."""

from __future__ import annotations

import threading
from functools import partial

from tiny import Markov, new_engine

from outrider import drafters
from outrider.backends.local import Local
from outrider.drafters.base import BuildContext
from outrider.engine.scheduler import Limits

LETTERS = "abcdef"


class Letters:
    """A tokenizer with one token per letter."""

    chat_template = None

    def encode(self, text, add_special_tokens):
        return [LETTERS.index(letter) for letter in text if letter in LETTERS]

    def decode(self, ids, skip_special_tokens):
        return "".join(LETTERS[id] for id in ids)


def backend(spec="ngram:min_n=1,length=4", tokenizer=True, model=None, ends=frozenset(), **limits):
    model = model or Markov(seed=3)

    def drafter(spec):
        return drafters.build(spec, BuildContext(model, lambda name, quantize: Markov(seed=3)))

    engine = new_engine(model, drafter(spec), Limits(**limits))
    return Local(engine, lambda spec: partial(drafter, spec), Letters() if tokenizer else None, ends)


class Slow(Markov):
    """A model that waits to be told to go on, and never comes to an end of itself."""

    context = 100_000

    def __init__(self):
        super().__init__(seed=3)
        self.go = threading.Semaphore(0)

    def forward(self, feeds, layers=()):
        assert self.go.acquire(timeout=20)
        return super().forward(feeds, layers)
