"""What both audits share: prompts as tokens, runs of the engine, and where two texts part, with the margin there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider import drafters
from outrider.backends.local import Local
from outrider.core.dice import Dice
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.request import Result
from outrider.llm import LLM
from outrider.models.base import Feed, RowContract

Tokens = list[int]
Progress = Callable[[str, int, int], None]  # (what is being done, steps done, steps in all)


@dataclass(frozen=True)
class Difference:
    """Where an output first parts from plain decoding."""

    prompt: str
    position: int  # in the output
    plain: int | None  # token ids; None: it had already ended
    drafted: int | None
    margin: float | None  # logits by which plain decoding preferred its token (with its noise, where it samples)

    @property
    def description(self) -> str:
        margin = "one had ended" if self.margin is None else f"margin {self.margin:.4g} logits"
        tokens = f"plain {self.plain}, drafted {self.drafted}"
        return f"{self.prompt!r} parts at token {self.position}: {tokens}; {margin}"


@dataclass
class Ticker:
    progress: Progress | None
    total: int = 0
    done: int = field(default=0, init=False)

    def tick(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(what, self.done, self.total)


class Subject:
    """The model under audit, with its engine."""

    def __init__(self, llm: LLM) -> None:
        if llm.settings.pace:
            raise OutriderError("an audit tries drafts whether they pay or not: open the model with pace=False")
        self.llm, self.engine = llm, llm.engine

    @property
    def backend(self) -> Local:
        assert isinstance(self.llm.backend, Local), "the engine is our own, or `llm.engine` would have said so"
        return self.llm.backend

    @property
    def promised(self) -> bool:
        """Whether the model states that its rows do not depend on what else is in a pass."""
        model = self.engine.model
        return isinstance(model, RowContract) and model.rows_alone

    def tokens(self, text: str, raw: bool) -> Tokens:
        """A prompt through the chat template, where the model has one and `raw` does not forbid it."""
        if raw or not getattr(self.backend.tokenizer, "chat_template", None):
            return self.backend.encode(text)
        return self.backend.render([{"role": "user", "content": text}])

    def run(
        self,
        prompts: Sequence[Tokens],
        params: SamplingParams | Sequence[SamplingParams],
        draft: str,
        predictions: Sequence[Tokens] | None = None,
    ) -> list[Result]:
        """All prompts in one batch. `predictions`: for a drafter that drafts from what the caller expects."""
        expected = predictions if drafters.reads_prediction(draft) else None
        results = self.llm.generate(list(prompts), params, draft=draft, prediction=expected, progress=False)
        failed = next((result for result in results if result.finish_reason == "error"), None)
        if failed is not None:
            raise OutriderError(f"{draft}: {failed.error}")
        return list(results)

    def logits(self, contexts: Sequence[Tokens]) -> list[Tensor]:
        """The model's logits after each context, past engine and drafter. The engine's own ids begin at 0."""
        model = self.engine.model
        feeds = [Feed(-1 - i, context) for i, context in enumerate(contexts)]
        try:
            return [output.logits[0].float().cpu() for output in model.forward(feeds)]
        finally:
            for feed in feeds:
                model.free(feed.id)

    def difference(
        self, name: str, prompt: Tokens, params: SamplingParams, plain: Tokens, other: Tokens
    ) -> Difference | None:
        """Where `other` parts from what plain decoding wrote after the prompt."""
        place = parting(plain, other)
        if place is None:
            return None
        own, instead = ([*tokens, None][place] if place <= len(tokens) else None for tokens in (plain, other))
        margin = None
        if own is not None and instead is not None:
            margin = self._margin(params, prompt + plain[:place], own, instead)
        return Difference(name, place, own, instead, margin)

    def _margin(self, params: SamplingParams, context: Tokens, own: int, other: int) -> float:
        logits = self._last_logits(context)
        margin = float(logits[own] - logits[other])
        if params.greedy:
            return margin
        noise = Dice(params.seed).noise(len(context), torch.tensor([own, other])).log()
        return margin / params.temperature - float(noise[0] - noise[1])

    def _last_logits(self, context: Tokens) -> Tensor:
        """The same for one context, in chunks as the engine feeds a prompt: a long one fits no single pass."""
        model, chunk = self.engine.model, self.engine.scheduler.limits.chunk
        try:
            for begin in range(0, len(context), chunk):
                [output] = model.forward([Feed(-1, context[begin : begin + chunk])])
            return output.logits[0].float().cpu()
        finally:
            model.free(-1)


def parting(plain: Tokens, other: Tokens) -> int | None:
    """The first place where two texts differ; None: they are the same."""
    pairs = itertools.zip_longest(plain, other)
    return next((place for place, (own, instead) in enumerate(pairs) if own != instead), None)


def altered(output: Tokens) -> Tokens:
    """A prediction of the output: something to accept, something to refuse, something to realign."""
    return [output[i - 1] if i % 8 == 5 else token for i, token in enumerate(output)]
