"""A smaller model that writes ahead. It has a cache of its own, and its law follows the request's sampling options."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Scope, Sequence
from outrider.core.verify import decision
from outrider.drafters.base import BuildContext, Drafter, RetokenizedModel, Step
from outrider.drafters.confidence import judged_chain
from outrider.drafters.retokenize import Translation
from outrider.drafters.rounds.base import RoundGuesser
from outrider.models.base import Feed, Model, Paged, SharesPrefixes, one_part

CHUNK = 512  # prompt tokens in one pass: the target's default
READ_AT_ONCE = 2048  # tokens of several texts that one pass takes in before rounds on a device begin


class ModelDrafter(Drafter):
    """A chain from any model that shares the target's vocabulary."""

    name = "draft_model"
    takes_adapters = False  # whether it runs the adapter of a sequence: the target's own layers do

    def __init__(self, model: Model, vocab_size: int, length: int, greedy: bool) -> None:
        if length < 1:
            raise OutriderError(f"{self.name}:length must be at least 1, not {length}")
        self._model, self._vocab, self._length, self._greedy = model, vocab_size, length, greedy
        # it can share only what it reads as the target does: the target's tokens, all of which it knows
        known = model.vocab_size >= vocab_size
        self._prefixes = model if known and isinstance(model, SharesPrefixes) else None
        # by sequence: tokens that were committed when it was last drafted for, and the draft
        self._written: dict[int, tuple[int, list[int]]] = {}
        self._guesser = _on_device(self, model, vocab_size, length)

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        return () if self._guesser is None else (self._guesser,)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        writers = [
            _ModelDraft(seq, self._count(seq, budget), self._greedy) for seq, budget in zip(seqs, budgets, strict=True)
        ]
        active = [writer for writer in writers if writer.length > 0]
        for writer in active:
            self._written[writer.seq.id] = len(writer.seq.tokens), writer.tokens
        feeds = [self._feed(w.seq, self._unseen(w.seq)) for w in active]
        if active and isinstance(self._model, Paged) and all(map(self._can_write, active)):
            self._write(self._model, active, feeds)
            active = []
        while active:
            outputs = self._model.forward(feeds)
            for writer, output in zip(active, outputs, strict=True):
                writer.write(_fit(output.logits[0], self._vocab))
            active = [writer for writer in active if len(writer.tokens) < writer.length]
            feeds = [self._feed(w.seq, self._known(w.tokens[-1:])) for w in active]
        return [writer.draft() for writer in writers]

    def _feed(self, seq: Sequence, tokens: list[int]) -> Feed:
        return Feed(seq.id, tokens, adapter=seq.adapter if self.takes_adapters else None)

    def _scope(self, seq: Sequence) -> Scope:
        """Sequences of the same scope may share its cache."""
        return seq.scope if self.takes_adapters else seq.tenant

    def _can_write(self, writer: _ModelDraft) -> bool:
        """Whether the draft model can write this chain by itself, without a look at the logits in between."""
        return self._model.vocab_size == self._vocab and writer.seq.plain and not self.draws(writer.seq)

    def _write(self, model: Paged, writers: Seq[_ModelDraft], feeds: Seq[Feed]) -> None:
        behind = [replace(feed, tokens=feed.tokens[:-1]) for feed in feeds if len(feed.tokens) > 1]
        if behind:
            self._model.forward(behind)
        (written,) = model.write(
            [feed.id for feed in feeds],
            [feed.tokens[-1] for feed in feeds],
            [None if writer.guesses else writer.seq.dice for writer in writers],
            [writer.seq.params for writer in writers],
            one_part(max(writer.length for writer in writers)),
            lambda: None,
            adapters=[feed.adapter for feed in feeds],
        )
        for writer, tokens in zip(writers, written.tokens.T.tolist(), strict=True):
            writer.tokens += tokens[: writer.length]

    def _count(self, seq: Sequence, budget: int) -> int:
        """How many tokens to write; none past the draft model's own context, which may be shorter than the target's."""
        return min(budget, self._length, self._model.context - len(seq.tokens) + 1)

    def _known(self, tokens: list[int]) -> list[int]:
        """A token that the draft model lacks is read as some other: what follows is a guess anyway."""
        return [token if token < self._model.vocab_size else 0 for token in tokens]

    def begin_alike(self, seq: Sequence) -> None:
        """A text that is not read yet takes what others have of its beginning."""
        if self._prefixes is not None and not self._model.length(seq.id):
            self._prefixes.begin(seq.id, seq.tokens, self._scope(seq))

    def _unseen(self, seq: Sequence) -> list[int]:
        """The tokens that the draft model has not seen; all but the last chunk of a long stretch are run here."""
        self.begin_alike(seq)
        tokens = self._known(seq.tokens[self._model.length(seq.id) :])
        while len(tokens) > CHUNK:
            self._model.forward([self._feed(seq, tokens[:CHUNK])])
            tokens = tokens[CHUNK:]
        return tokens

    def read(self, seqs: Seq[Sequence]) -> None:
        """All but the last token of these texts, before rounds on a device begin."""
        feeds, rows = list[Feed](), 0
        for seq in seqs:
            tokens = self._unseen(seq)[:-1]
            if feeds and rows + len(tokens) > READ_AT_ONCE:
                self._model.forward(feeds)
                feeds, rows = [], 0
            if tokens:
                feeds.append(self._feed(seq, tokens))
                rows += len(tokens)
        if feeds:
            self._model.forward(feeds)

    def temperature(self, seq: Sequence) -> float:
        """Of its choice under the target's own noise in rounds; 0: it guesses the likeliest token, or draws."""
        return seq.params.temperature if not self._greedy and decision(seq) == "coupled" else 0.0

    def draws(self, seq: Sequence) -> bool:
        """Whether it draws from its law, which verification needs to know."""
        return not self._greedy and decision(seq) == "rejection"

    def unread(self, seq: Sequence) -> int:
        return max(0, len(seq.tokens) - 1 - self._model.length(seq.id))

    def observe(self, step: Step) -> None:
        committed, written = self._written.pop(step.seq.id, (0, []))
        if committed and step.verdict is not None:
            same = sum(kept for _, kept in judged_chain(written, step.seq.tokens[committed:]))
            # the last token is run again, for what follows it
            last = min(len(step.seq.tokens) - 1, self._model.length(step.seq.id))
            self._model.crop(step.seq.id, min(committed + same, last))
            self.shares(step.seq)

    def shares(self, seq: Sequence) -> None:
        """Others may take what the cache has of its committed tokens."""
        if self._prefixes is not None:
            self._prefixes.seen(seq.id, seq.tokens, self._scope(seq))

    def forget(self, id: int) -> None:
        self._written.pop(id, None)
        self._model.free(id)


class DraftModel(ModelDrafter):
    """A model of its own file. A model of another vocabulary reads and guesses through text."""

    has_weights = True

    @dataclass(frozen=True)
    class Options:
        model: str  # name, folder, hub id or GGUF file
        length: int = 5
        greedy: bool = False  # guess the likeliest token even where the request samples
        quantize: Literal["none", "int8", "int4"] = "none"  # dense weights, rounded on loading
        tokenizer: str = ""  # folder or file to take its tokenizer from; "": its own

    @classmethod
    def fetch(cls, options: Options, context: BuildContext) -> None:
        context.fetch_model(*_named(options))

    def __init__(self, options: Options, context: BuildContext) -> None:
        model = context.model(*_named(options))
        self._translation: Translation | None = None
        if isinstance(model, RetokenizedModel):
            self._translation = Translation(model.target, model.tokenizer)
            super().__init__(model.model, model.model.vocab_size, options.length, greedy=True)
        else:
            super().__init__(model, context.target.vocab_size, options.length, options.greedy)

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        return () if self._translation is not None else super().guessers

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        words = self._translation
        if words is None:
            return super().propose(seqs, budgets)
        asked = [i for i, budget in enumerate(budgets) if budget > 0]
        written = super().propose([self._read(words, seqs[i]) for i in asked], [budgets[i] for i in asked])
        drafts = [EMPTY] * len(seqs)
        for i, draft in zip(asked, written, strict=True):
            drafts[i] = Draft.chain(words.write(seqs[i], draft.tokens)).cut(budgets[i])
        return drafts

    def _read(self, words: Translation, seq: Sequence) -> Sequence:
        """The sequence in the draft model's own tokens, whose cache then has what is still the text."""
        reading = words.read(seq)
        unseen = max(0, len(reading.seq.tokens) - 1)  # the last token is run again, for what follows it
        self._model.crop(seq.id, min(reading.same, unseen, self._model.length(seq.id)))
        return reading.seq

    def _count(self, seq: Sequence, budget: int) -> int:
        """The text may take more of these tokens than of the target's, and the scheduler has reserved memory for the
        target's alone."""
        if self._translation is not None:
            page = self._model.page if isinstance(self._model, SharesPrefixes) else 1
            if not seq.tokens or self._translation.held(self._length + page) > self._model.capacity:
                return 0
        return super()._count(seq, budget)

    def observe(self, step: Step) -> None:
        if self._translation is None:
            super().observe(step)

    def forget(self, id: int) -> None:
        super().forget(id)
        if self._translation is not None:
            self._translation.forget(id)


def _named(options: DraftModel.Options) -> tuple[str, ...]:
    """As it is loaded."""
    return (options.model, options.quantize, *filter(None, [options.tokenizer]))


def _on_device(drafter: ModelDrafter, model: Model, vocab_size: int, length: int) -> RoundGuesser | None:
    """A draft model that runs on a device, and knows the target's tokens."""
    if not isinstance(model, Paged) or model.vocab_size != vocab_size:
        return None
    from outrider.drafters.rounds.model import ModelGuesser  # needs Triton, as such a model does
    from outrider.models.cuda.model import CudaLlama

    return ModelGuesser(drafter, model, length) if isinstance(model, CudaLlama) else None


class _ModelDraft:
    """The draft of one sequence as it grows."""

    def __init__(self, seq: Sequence, length: int, greedy: bool) -> None:
        self.seq, self.length = seq, length
        self.tokens: list[int] = []
        self._laws: list[Tensor] = []
        self.guesses = greedy or seq.params.greedy

    def write(self, logits: Tensor) -> None:
        try:
            if self.guesses:
                self.tokens.append(self.seq.best(logits, self.tokens))
                return
            law = self.seq.law(logits, self.tokens)
        except Exception:  # of a processor, or no token is left that the draft model may write: the target will judge
            self.length = len(self.tokens)
            return
        self._laws.append(law)
        self.tokens.append(self.seq.draw(law, len(self.tokens)))

    def draft(self) -> Draft:
        if not self.tokens:
            return EMPTY
        # the coupled rule looks at tokens alone
        drawn = bool(self._laws) and self.seq.rule == "rejection"
        return Draft.chain(self.tokens, torch.stack(self._laws) if drawn else None)


def _fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Vocabularies padded to different sizes: drop what the target lacks, and never draw what the draft model lacks."""
    short = vocab_size - logits.shape[0]
    if short <= 0:
        return logits[:vocab_size]
    return torch.cat([logits, logits.new_full((short,), float("-inf"))])
