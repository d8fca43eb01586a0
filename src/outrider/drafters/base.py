"""The interface of a drafter: it proposes drafts, observes what became of them, and forgets sequences that have ended.

To add a method, write one file with a class like the ones in this folder, and one line in the table (`__init__.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.heads import files
from outrider.drafters.history.store import HistoryStore
from outrider.drafters.rounds.base import JudgedSteps as JudgedSteps, RoundGuesser, WritesRounds
from outrider.models.base import Anatomy, Model, Readable
from outrider.models.paged_cache import PagedCache
from outrider.models.tokenizer import Tokenizer

# Probability to be reached from which on the end of another drafter's guess is continued: below it hardly a node is
# worth its row on a CPU, and to look at one takes up to 0.1 ms.
CONTINUED = 0.2
CONTINUATIONS = 2  # of these ends, at most: the likeliest


@dataclass(frozen=True, eq=False)
class RetokenizedModel:
    """A draft model of another vocabulary than the target's: text goes between them (`retokenize.py`)."""

    model: Model
    tokenizer: Tokenizer
    target: Tokenizer


@dataclass(frozen=True)
class BuildContext:
    """What a drafter may be built from."""

    target: Model
    # (name, folder or file; none, int8 or int4; a tokenizer's folder if given)
    load: Callable[..., Model | RetokenizedModel]
    name: str = ""  # what the target is called
    heads: Mapping[str, Any] = field(default_factory=dict)  # heads in memory, by name; all others lie in folders
    histories: HistoryStore = field(default_factory=HistoryStore)  # of the target's texts; all its drafters share them
    cache_bytes: int = 1 << 27  # for the drafter's own keys and values, if it has a `cache_share`
    # As `load`, but only what takes no device; what it returns does the rest. None: `load` does all of it.
    fetch: Callable[..., Callable[[], Model | RetokenizedModel]] | None = None
    fetched: dict[tuple[str | bool, ...], Any] = field(default_factory=dict)  # by what was asked for, until it is taken

    def readable(self, what: str) -> Readable:
        """The target, if heads can be built beside it. `what`: the kind of head, for the message."""
        if not isinstance(getattr(self.target, "anatomy", None), Anatomy):
            raise OutriderError(
                f"{what} reads the weights of a llama-like target; this one is none, use another drafter"
            )
        return cast(Readable, self.target)

    def head(self, kind: str, name: str, allow_pickle: bool) -> Any:
        """A head of that kind: from memory, from a folder, or the head that is shipped for the target."""
        found = self.fetched.pop((kind, name, allow_pickle), None)
        if isinstance(found, OutriderError):
            raise found
        if found is not None:
            return found
        target = self.readable(f"a head for {kind}")
        if name in self.heads:
            return deepcopy(self.heads[name])
        return files.find(kind, name, target, self.name, allow_pickle)

    def model(self, *named: str) -> Model | RetokenizedModel:
        """A draft model; `named`: as for `load`."""
        found = self.fetched.pop(named, None)
        return self.load(*named) if found is None else found()

    def fetch_head(self, kind: str, name: str, allow_pickle: bool) -> None:
        """Read it now; where it cannot be had, `head` says so again without another look."""
        key = kind, name, allow_pickle
        try:
            self.fetched[key] = self.head(*key)
        except OutriderError as error:
            self.fetched[key] = error
            raise

    def fetched_heads(self, name: str) -> list[str]:
        """The kinds that were looked for under that name, in this order: only the last one may be there."""
        return [str(kind) for kind, *named in self.fetched if named == [name, False]]

    def fetch_model(self, *named: str) -> None:
        """Read it now, as far as no device is needed; `model` then does the rest."""
        if self.fetch is not None:
            self.fetched[named] = self.fetch(*named)


@dataclass(eq=False, slots=True)
class Step:
    """What happened to one sequence in one pass of the target."""

    seq: Sequence  # with the kept tokens already committed
    tokens: Seq[int]  # committed tokens that were fed
    draft: Draft
    verdict: Verdict | None  # None: a chunk of a long prompt, nothing to judge; else the path is cut where it ended
    hidden: Tensor | None  # [len(tokens) + len(draft), layers, hidden] of the layers that the drafter asked for
    rests: bool = False  # no draft from hidden states is expected soon, so drafters may read the states later


class Drafter:
    """Drafts nothing: with this one the engine decodes plainly. Every method is a subclass."""

    @dataclass(frozen=True)
    class Options:
        """What can be written after the colon in `--draft NAME:key=value,...`."""

    name = "none"
    drafts: bool = False  # whether it proposes anything; true of every subclass that has its own `propose`
    layers: tuple[int, ...] = ()  # layers of the target whose hidden states `observe` reads
    reads_prediction: bool = False  # it drafts from the sequence's `prediction`, the text that the caller expects
    reads_grammar: bool = False  # it drafts from the grammar of a request, and nothing for a request without one
    reports_acceptance: bool = False  # its drafts say how likely each node is kept, and it stops where that is low
    sees_all: bool = True  # `observe` is called after every step; False: after those alone in which it was asked
    is_free: bool = False  # a draft costs next to nothing (no model runs), so it may be asked at every step
    has_weights: bool = False  # it holds weights beside the target's, a head's or a model's: few idle ones are kept
    # Share of `cache_memory` for its own keys and values; the target has the remainder. A drafter that a request names
    # gets part of such a share in addition (`build.local`).
    cache_share: float = 0.0
    variants: tuple[str, ...] = ()  # "key=value,...": options with which it drafts in another way; audits try each
    for_measurement: bool = False  # it is told the answer: for benchmarks and tests, not for users
    some_may_write: bool = False  # whether members that can `write` may do so without the other members
    writer: WritesRounds | None = None  # on a device: what writes with its `guessers`
    parts: tuple[str, ...] = ()  # the drafters that may take part, where it is made of others

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        cls.drafts = cls.propose is not Drafter.propose

    def __init__(self, options: Options, context: BuildContext) -> None:
        """Build the drafter; anything wrong with the options is an OutriderError."""

    @classmethod
    def share(cls, options: Any, target: str) -> float:
        """Its `cache_share` with these options, beside the target of that name."""
        return cls.cache_share

    @classmethod
    def fetch(cls, options: Any, context: BuildContext) -> None:
        """Before it is built: what takes no device, such as to download and read files, into the context. Steps go on
        meanwhile; while a drafter is built on a device they wait. Reading is all that the target may be used for."""

    @classmethod
    def build(cls, options: Any, context: BuildContext) -> Drafter:
        """The drafter of these options: of this class, or several that guess together."""
        return cls(options, context)

    @property
    def members(self) -> tuple[Drafter, ...]:
        """The drafters that the engine asks, each by itself; of most drafters it is the drafter itself."""
        return (self,)

    def merge(self, seq: Sequence, found: Seq[tuple[Drafter, Draft]]) -> Draft:
        """The drafts of its members for one sequence as one."""
        return found[0][1] if found else EMPTY

    def extended(self, seq: Sequence, draft: Draft) -> Draft:
        """The draft of all members, which says whose each node is and how likely; with nodes of its own after those of
        others, if it has any."""
        return draft

    def merged(self, step: Step) -> None:
        """Learn what became of the draft that `merge` made; the members observe the step by themselves."""

    @property
    def takes_prefixes(self) -> bool:
        """Whether the target may take the beginning of a prompt from its cache, where it shows no states of it."""
        return not self.layers

    def prefix(self, seq: Sequence) -> int:
        """If it takes prefixes: how many tokens of a prompt the target may have seen without showing their states.
        Asked before every step until the prompt is run."""
        return len(seq.tokens)

    def begin(self, seq: Sequence, seen: int) -> None:
        """After an answer of `prefix` that was not 0: the target has seen this number of the prompt's tokens, and will
        show the states of the tokens after them."""

    def serves(self, seq: Sequence) -> bool:
        """Whether it can draft for this sequence at all: not where it needs a grammar or a prediction that is not
        there."""
        lacking = (self.reads_grammar and seq.matcher is None) or (self.reads_prediction and not seq.prediction)
        return self.drafts and not lacking

    def prefix_caches(self, target: str) -> dict[str, PagedCache]:
        """The caches that must have a prefix, too, for the target to take it, by a digest of what their bits depend on.
        `target`: that of the target."""
        return {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """A draft for each sequence, of at most `budgets[i]` nodes."""
        return [EMPTY] * len(seqs)

    def weigh(self, row: float, guess: float) -> None:
        """What a node costs, in tokens that could be written in the same time: its row of the target's pass, and a pass
        of the drafter's own. Where a drafter `reports_acceptance`, called before `propose` once both were measured; it
        may end its drafts by it."""

    def unread(self, seq: Sequence) -> int:
        """How many tokens of a sequence it has to read before it can draft: a draft model's whole prompt, at first."""
        return 0

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        """What drafts on the target's device without the host, where it can."""
        return ()

    def may_write(self, seqs: Seq[Sequence], budget: int) -> bool:
        """Whether it can `write` these sequences once their prompts are read, with drafts of up to `budget` nodes."""
        return self.writer is not None and self.writer.serves(seqs, budget)

    def writes(self, seqs: Seq[Sequence]) -> bool:
        """Whether it can `write` such sequences now."""
        return self.writer is not None and self.writer.can(seqs)

    def write(
        self, seqs: Seq[Sequence], wait: Callable[[], None], going: Callable[[int], bool]
    ) -> Iterator[list[JudgedSteps]]:
        """Several steps of each sequence on the target's device, without the host: drafts, passes and verdicts, part
        after part. The target's cache then has what was kept. `wait` is called while the device works; `going(passes)`
        is asked before each further part whether it may begin after this number of passes. Yields nothing if it cannot
        write now."""
        return iter(()) if self.writer is None else self.writer.write(seqs, wait, going)

    def observe(self, step: Step) -> None:
        """Learn what the target made of a draft. The draft may be cut, and may hold nodes of other drafters, so a
        drafter compares its own guesses with the committed tokens."""

    def forget(self, id: int) -> None:
        """The sequence has ended."""


def likely_ends(draft: Draft, name: str) -> list[int]:
    """The ends of other drafters' guesses in a joint draft that the drafter `name` should continue; the likeliest
    first."""
    reach, inner, sources = draft.reach(), set(draft.parents), draft.sources
    ends = [n for n in range(len(draft)) if n not in inner and sources[n] != name and reach[n] >= CONTINUED]
    return sorted(ends, key=lambda node: -reach[node])[:CONTINUATIONS]
