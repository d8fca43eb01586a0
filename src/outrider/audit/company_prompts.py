"""The prompts of a company audit for one model, by its plan: groups, with critical lengths, batches and chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from outrider.audit.company_plan import BOUNDARIES, LONG, PROMPTS, CompanyPlan
from outrider.audit.compare import Tokens
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.engine.scheduler import Limits
from outrider.models.base import Model, RowContract, SharesPrefixes

LONGEST_ON_CPU = (
    1024  # tokens of the longest sequence where nothing else is asked for: a longer one takes minutes there
)
ACROSS = 16  # tokens that are written after a prompt of critical length: drafts of the usual lengths cross the boundary
NEIGHBOURS = 4  # short prompts beside long ones


@dataclass(frozen=True)
class Layout:
    """How the prompts of a group are handed in."""

    batch: int  # prompts at once
    chunk: int  # prompt tokens that one step takes in
    again: bool = False  # whether the same call follows, with the prompts in the cache
    least: int = 0  # tokens of the shortest prompt: alone a shorter one has the same passes in either chunk


@dataclass(frozen=True)
class PromptGroup:
    name: str
    names: tuple[str, ...]  # of the prompts
    prompts: tuple[Tokens, ...]
    layouts: tuple[Layout, ...]
    max_tokens: int
    ignore_eos: bool = False  # write all tokens, so that boundaries are crossed
    share: tuple[int, int] = (0, 1)  # which of all prompts these are, as in the plan

    def params(self, index: int, temperature: float, seed: int) -> SamplingParams:
        """How prompt `index` is continued. A greedy text needs no seed, but a drafter may draw."""
        first, step = self.share
        return SamplingParams(
            self.max_tokens, temperature, seed=seed + first + step * index, ignore_eos=self.ignore_eos
        )

    def calls(self, layout: Layout, seed: int) -> list[list[int]]:
        """The prompts of each call, in shuffled order. A batch larger than the group has prompts more than once."""
        order = [place for place, prompt in enumerate(self.prompts) if len(prompt) >= layout.least]
        if layout.batch > 1:
            random.Random(f"{seed} {self.name} {layout.batch}").shuffle(order)
        order = list(islice(cycle(order), max(len(order), layout.batch if order else 0)))
        return [order[begin : begin + layout.batch] for begin in range(0, len(order), layout.batch)]


class PromptPlanner:
    """The groups of prompts for one model. Sizes come from the model and from the engine's own limits."""

    def __init__(self, plan: CompanyPlan, model: Model, limits: Limits, on_gpu: bool) -> None:
        self._plan, self._chunk, self._again = plan, limits.chunk, isinstance(model, SharesPrefixes)
        most = min(model.context, model.capacity - limits.budget)
        usual = 0 if on_gpu else LONGEST_ON_CPU
        self.longest = min(most, (usual if plan.longest is None else plan.longest) or most)
        sizes = {model.page} if isinstance(model, SharesPrefixes) else set()
        sizes |= set(model.boundaries) if isinstance(model, RowContract) else set()
        self.boundaries = tuple(sorted(sizes | {*plan.chunks, self._chunk}))
        self._across = min(plan.max_tokens, ACROSS)

    def groups(self, names: Sequence[str], prompts: Sequence[Tokens]) -> list[PromptGroup]:
        most = self.longest - self._plan.max_tokens
        fitting = [(name, prompt) for name, prompt in zip(names, prompts, strict=True) if len(prompt) <= most]
        if not fitting:
            raise OutriderError(f"no prompt has at most {most} tokens; give shorter prompts or a larger --longest")
        kept = tuple(prompt for _, prompt in fitting)
        made = [*self._shared(fitting), *self._critical(kept), self._long(kept)]
        return [group for group in made if group.name in self._plan.groups]

    def _shared(self, fitting: Sequence[tuple[str, Tokens]]) -> Iterator[PromptGroup]:
        """The plan's share of the prompts, each with the seed that it has among all of them."""
        share = self._plan.share
        if own := fitting[share[0] :: share[1]]:
            names, prompts = zip(*own, strict=True)
            yield PromptGroup(PROMPTS, names, prompts, self._own(), self._plan.max_tokens, share=share)

    def _own(self) -> tuple[Layout, ...]:
        """Every batch; the largest with every other chunk as well."""
        sizes = self._plan.batches
        usual = [Layout(size, self._chunk, self._again) for size in sizes]
        most = max(sizes)
        others = ((chunk, min(chunk, self._chunk)) for chunk in self._plan.chunks if chunk != self._chunk)
        return *usual, *(Layout(most, chunk, least=smaller + 1 if most == 1 else 0) for chunk, smaller in others)

    def _together(self, count: int) -> tuple[Layout, ...]:
        """Alone, and all together with every chunk."""
        others = (Layout(count, chunk) for chunk in self._plan.chunks if chunk != self._chunk)
        return Layout(1, self._chunk, self._again), Layout(count, self._chunk, self._again), *others

    def _critical(self, prompts: Sequence[Tokens]) -> Iterator[PromptGroup]:
        """Prompts just below, at and above each boundary."""
        near = {size + step for size in self.boundaries for step in (-1, 0, 1)}
        lengths = sorted(length for length in near if 0 < length <= self.longest - self._across)
        if lengths:
            made = tuple(_text(prompts, length) for length in lengths)
            names = tuple(f"{length} tokens" for length in lengths)
            yield PromptGroup(BOUNDARIES, names, made, self._together(len(made)), self._across, ignore_eos=True)

    def _long(self, prompts: tuple[Tokens, ...]) -> PromptGroup:
        """One sequence to the end of the context, one four fifths as long that begins elsewhere, and short ones."""
        lengths = [self.longest - self._across, max(1, self.longest * 4 // 5 - self._across)]
        long = [_text(prompts[place:] + prompts[:place], length) for place, length in enumerate(lengths)]
        short = [prompt for prompt in prompts if len(prompt) <= lengths[0]][:NEIGHBOURS]
        names = (*(f"{length} tokens" for length in lengths), *(f"neighbour {n}" for n in range(1, len(short) + 1)))
        layouts = self._together(len(names))
        return PromptGroup(LONG, names, (*long, *short), layouts, self._across, ignore_eos=True)


def _text(prompts: Sequence[Tokens], length: int) -> Tokens:
    """The prompts one after the other, over and over, as far as `length` goes."""
    return list(islice(chain.from_iterable(cycle(prompts)), length))
