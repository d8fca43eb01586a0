"""What the engine and the drafters know of a model: run new tokens, forget refused ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from outrider.core.adapter import ReadyAdapter
from outrider.core.dice import Dice
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.sequence import Scope
from outrider.core.verify_batch import Best, Chooser
from outrider.models.adapters.adapter import Adapter, AdapterBase


@dataclass(eq=False, slots=True)  # not frozen: to make one would take three times as long
class Feed:
    """What one sequence brings to a pass."""

    id: int
    tokens: Sequence[int]  # committed, not yet seen by the cache; at least one
    draft: Draft = EMPTY
    adapter: ReadyAdapter | None = None  # of all its rows; the same in every pass of a sequence


class Output:
    """What a pass gives for one feed."""

    # The likeliest token of each row of the logits, the first of equals, if the pass has them
    best: list[int] | None = None

    def __init__(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self._logits = logits
        self.hidden = hidden  # [len(tokens) + len(draft), layers, hidden] residuals after the layers asked for

    @property
    def logits(self) -> Tensor:
        """[1 + len(draft), vocab] after the last committed token, then after each node."""
        return self._logits


class Outputs(Sequence[Output]):
    """What a pass gave: the rows of all feeds in one tensor, and each feed's own part when it is asked for."""

    def __init__(
        self,
        logits: Tensor,
        starts: Sequence[int],
        hidden: Tensor | None = None,
        rows: Sequence[int] = (),
        best: Best | None = None,
        choose: Chooser | None = None,
        first: bool = False,
    ) -> None:
        self.logits, self.starts = logits, starts  # [judged rows, vocab]; where each feed's begin, and their number
        self.hidden, self.rows = hidden, rows  # [rows, layers, hidden]; where each feed's begin, and their number
        self.best = best  # argmax of the judged rows, if the pass has it already
        self.choose = choose  # the device's own way to draw the tokens of many rows
        self.first = first  # of its shape: it also compiled and captured, so its time says nothing about the next

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, feed: int) -> Output:  # type: ignore[override]
        if not 0 <= feed < len(self):
            raise IndexError(feed)
        return Output(self.logits[self.starts[feed] : self.starts[feed + 1]], self.states(feed))

    def states(self, feed: int) -> Tensor | None:
        """One feed's part of `hidden`."""
        return None if self.hidden is None else self.hidden[self.rows[feed] : self.rows[feed + 1]]


def batched(outputs: Sequence[Output]) -> TypeGuard[Outputs]:
    """Whether a pass gave them all in one tensor. To ask a list whether it is of an abstract class takes 10 us."""
    return type(outputs) is not list and isinstance(outputs, Outputs)


class Model(Protocol):
    vocab_size: int
    num_layers: int
    context: int  # the longest sequence it was made for
    capacity: int  # how many tokens its cache may hold, over all sequences

    def length(self, id: int) -> int:
        """How many tokens of the sequence the cache has seen."""
        ...

    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> Sequence[Output]:
        """One pass. Afterwards the cache has seen the feeds' tokens and nodes."""
        ...

    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        """Keep the first `length` tokens and, of the nodes fed after them, those of `path`; forget the rest."""
        ...

    def free(self, id: int) -> None:
        """Forget the sequence; unknown ids are fine."""
        ...

    def first(self, layers: int) -> Model:
        """The model's own first layers with its output matrix: the same weights, a cache of its own."""
        ...


def check_context(model: Model, feeds: Sequence[Feed]) -> int:
    """Refuse feeds that would make a sequence longer than the model's context, before the cache has changed. Returns
    the length up to which positions are needed, or more."""
    longest = 0
    for feed in feeds:
        seen = model.length(feed.id) + len(feed.tokens)
        end = seen + len(feed.draft.tokens)
        if end > model.context:  # a tree has fewer levels than nodes
            end = seen + max(feed.draft.depths(), default=0)
            if end > model.context:
                raise OutriderError(
                    f"sequence {feed.id} would have {end} tokens, but the model's context is {model.context}"
                )
        longest = max(longest, end)
    return longest


@runtime_checkable
class RowContract(Protocol):
    """What a model of ours states about its rows; a model without it states nothing."""

    @property
    def rows_alone(self) -> bool:
        """Whether texts must not depend on what else is in a pass (docs/decisions/0004)."""
        ...

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Lengths of a sequence, in tokens, at which the forward goes another way: pages, blocks and chunks of keys."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A model that runs rows of different adapters, and of none, in one pass."""

    # The most adapters that can be ready at once, where their number is fixed; None: only their bytes count
    adapter_slots: int | None

    @property
    def adapter_base(self) -> AdapterBase: ...

    def reserve_adapters(self, budget: int) -> int:
        """Adapters that are ready at once will take up to `budget` bytes; what they may take in fact."""
        ...

    def adapter_bytes(self, adapter: Adapter) -> int:
        """What it takes when it is ready; refuses an adapter that fits the model and cannot be run here."""
        ...

    def adapt(self, adapter: Adapter, key: str) -> ReadyAdapter:
        """Make an adapter that was checked against `adapter_base` ready for passes. Any thread may call it while passes
        run."""
        ...

    def release(self, ready: ReadyAdapter) -> None:
        """No feed will carry it any more."""
        ...


@runtime_checkable
class SharesPrefixes(Protocol):
    """A model whose cache is made of pages, which sequences that begin alike share."""

    page: int  # tokens: a sequence takes memory for a multiple of this number

    def begin(self, id: int, tokens: Sequence[int], scope: Scope = "") -> int:
        """A sequence is about to be fed: what the cache has of its beginning, from others of its scope, counts as
        seen. Returns how many tokens were added so; may be asked again before every feed. `scope`: its tenant, and
        its adapter if it has one."""
        ...

    def seen(self, id: int, tokens: Sequence[int], scope: Scope = "") -> None:
        """`tokens` are committed: others of its scope that begin so may share what the cache holds of them."""
        ...

    def forget_prefixes(self) -> None:
        """What others may share now is forgotten: the next prompts are computed afresh."""
        ...


@dataclass(frozen=True, eq=False)
class WrittenTokens:
    """What a model wrote by itself."""

    tokens: Tensor  # [steps, sequences], on the host
    hidden: Tensor | None = None  # [steps, sequences, layers, hidden]: the states that each token was chosen from
    first: bool = False  # whether it took longer than it will again


def one_part(steps: int) -> Callable[[int], int]:
    """A plan of `Paged.write`: as many tokens, and no more."""
    plan = chain([steps], repeat(0))
    return lambda unread: next(plan)


@runtime_checkable
class Paged(SharesPrefixes, Protocol):
    """Such a model on a device of its own, which can also write by itself."""

    def prepare(self, layers: Sequence[int] = (), rows: int = 0, adapted: bool = False) -> None:
        """Do now what the first passes would wait for. `layers`: as of `forward`. `rows`: of the largest pass with a
        prompt. `adapted`: whether adapters will come."""
        ...

    def write(
        self,
        ids: Sequence[int],
        last: Sequence[int],
        dice: Sequence[Dice | None],
        params: Sequence[SamplingParams],
        plan: Callable[[int], int],
        wait: Callable[[], None],
        layers: Sequence[int] = (),
        adapters: Sequence[ReadyAdapter | None] = (),
        draws: Sequence[bool] = (),
    ) -> Iterator[WrittenTokens]:
        """Each sequence writes some tokens after its `last` one, without the host, part after part: the caller looks at
        one part while the device is at the next. `dice`: None: the likeliest token; else one of the law that `params`
        make of the logits, where temperature and cuts count. `plan` says how many tokens the next part has, where some
        are not read yet; 0: no more. `wait` is called while the device works. `layers`: as of `forward`. `adapters`:
        one for each sequence; (): none has one. `draws`: whether each draws its tokens as rejection does where nothing
        is drafted; (): all dice choose."""
        ...


@dataclass(frozen=True)
class Anatomy:
    """The sizes of a llama-like model that a head beside it has to match."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    bias: bool  # whether queries, keys and values have one


class Readable(Protocol):
    """A model that heads can be built beside: its sizes, and its weights wherever and however they are kept."""

    vocab_size: int
    num_layers: int
    context: int
    device: torch.device

    @property
    def anatomy(self) -> Anatomy: ...

    @property
    def packed(self) -> bool:
        """Whether its weights are quantised, and run by the native kernels."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[n, hidden]"""
        ...

    def normed(self, x: Tensor) -> Tensor:
        """The last norm, before the output matrix."""
        ...

    def output_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output matrix, [n, hidden]."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A dense copy of a weight by its Hugging Face name."""
        ...
