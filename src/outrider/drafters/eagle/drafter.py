"""EAGLE (Li et al. 2024, 2025): a decoder layer that reads the target's own states and writes ahead (`head.py`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.draft import EMPTY, Draft, judged_tree
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.core.verify import decision
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.combined import Combined
from outrider.drafters.confidence import LONGEST, StatedCalibration
from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.drafters.eagle.runner import (
    DraftRequest,
    DraftShape,
    HeadOutput,
    KeepsPrefixes,
    Runner,
    ShownStates,
    WritesDrafts,
    gathered,
)
from outrider.drafters.eagle.torch_runner import DenseRunner
from outrider.drafters.eagle.tree import NEVER, TreeGrowth, grow
from outrider.drafters.heads import files
from outrider.drafters.heads.chooser import Chooser
from outrider.drafters.heads.output import bits
from outrider.drafters.ngram import Ngram
from outrider.drafters.rounds.base import LoopedRounds, RoundGuesser
from outrider.models.base import Paged, Readable
from outrider.models.native.packed import packable
from outrider.models.paged_cache import PagedCache

# Rows of the target's states that may wait before the head takes them in: a chunk of a prompt at a time; where the
# kernels do it, soon, since a prompt belongs to the time before the first token.
PENDING, NATIVE_PENDING = 512, 64
# Rows that may wait of all sequences together while no draft is expected: 60 MB of SmolLM2, 150 of a model of 1.5B.
# Rows beyond that are dropped, and the head starts over with the next states that the target shows.
RESTING = 8192
JOIN_EVERY = 16  # passes whose waiting rows are copied together, which frees the states of these passes
# A row that waits keeps the states of its whole pass in memory. It is copied at once if these take more than LARGE
# bytes and more than MOST_OF times the bytes of the row: a pass in which another sequence's prompt was read.
LARGE, MOST_OF = 1 << 20, 8
# Rows that may be taken in for each token that a text may still have: a row takes 0.04 ms beside SmolLM2, and a draft
# saves up to 1 ms. Without it prompts were read for the last two tokens of a batch (LOG, 2026-11-18, several at once).
REPAID = 16
LENGTH = 5  # tokens of a chain where the options say nothing
FEW = (
    8  # sequences up to which each chain is a call of its own beside a packed target (LOG, 2026-11-18, several at once)
)
DEEPEST = 16  # levels of a tree, at most; it ends earlier where no deeper node can be among its best
# Levels of a tree that a GPU grows without the host, which does not end early: with 8 levels a tree of 24 keeps 3 %
# more than with 5; by the time of its kernels it takes 13 % longer, which is an estimate (LOG, 2026-11-17).
DEVICE_DEPTH = 5
NODES = 64  # bits of a path there
# Temperature of the head's law in trees. A greedy target always takes its likeliest token, so the head's likely tokens
# are kept more often than their probability.
SHARPNESS = 0.75
# Beside a packed target: probability to be reached below which a step of the head costs more than it brings, in chains
# and in trees, where the sharper law states more; and below which a node is worth no row of the target's, whatever its
# parent is (LOG, 2026-11-17, a tree is one call on a CPU).
STOP, TREE_STOP, LEAST_REACH = 0.4, 0.55, 0.15  # until costs are measured, see `weigh`
# How likely the next node is where its parent is kept (0.68 to 0.74 of the shipped head at depths 1 to 3): what a node
# must be likely to be reached for a step of the head after it, and the row of what that brings, to pay.
FOLLOWED = 0.7
# Steps of the head that a level of a tree takes as long as: it runs several nodes and chooses among all (LOG,
# 2026-11-20, trees beside chains).
LEVEL_NODES = 1.5
# How much lower than its probability the head states what a chain reaches: greedy targets take likely tokens more often
# than they state (the ratio of the two stops that were found by trying).
CHAIN_STATED = STOP / TREE_STOP
# Bounds of what costs make of both thresholds: beyond them a few odd measurements would end all drafts or none.
STOPS, LEASTS = (0.1, 0.8), (0.15, 0.4)
NARROW = 8192  # vocabulary of a head beside a packed target: the output matrix is most of what a draft step reads
# Vocabulary of a draft for one sequence there; the tokens of the text itself come with it (`vocabulary.py`).
COMMON = 4096


class Eagle(Drafter):
    name = "eagle"
    reports_acceptance = has_weights = True
    cache_share = 1 / 8
    variants = ("tree=16",)

    @dataclass(frozen=True)
    class Options:
        head: str = ""  # folder; "": the head that is shipped for the target
        length: int = 0  # of a chain, or how deep a tree may be; 0: 5 and 16
        tree: int = 0  # nodes; 0: a chain
        width: int = 6  # nodes of a tree that are followed at each depth
        stop: float = -1.0  # end below nodes less likely to be reached; -1: beside a packed target by what nodes cost
        vocab: int = 0  # write only the first tokens of its vocabulary, and on a CPU those of the text; 0: what suits
        lookup: int = 0  # copy from the text where at least this many tokens match; 0: never
        greedy: bool = False  # guess the likeliest token even where the request samples
        quantize: Literal["auto", "none", "int8", "int4"] = "auto"  # auto: int4 beside a packed target
        allow_pickle: bool = False

    def __init__(self, options: Options, context: BuildContext) -> None:
        _check(options)
        head = context.head("eagle", options.head, options.allow_pickle)
        if not isinstance(head, EagleHead):
            raise files.other_kind(head, options.head)
        self._begin(head, context, options)

    def _begin(self, head: EagleHead, context: BuildContext, options: Options) -> None:
        target = context.readable("an EAGLE head")
        self._options, self._seen = options, context.target.length
        shape = _shape(options, target)
        self._length = shape.depth
        if options.vocab or target.packed:
            head.narrow(options.vocab or NARROW)
        self.layers = head.config.layers or (target.num_layers - 1,)
        common = options.vocab or (COMMON if target.packed else 0)
        self._places = _places(head, target, options.quantize, shape, context.cache_bytes)
        self._runner = start(head, target, options.quantize, common, self._places, shape)
        if self._packed is not None:
            self._packed.warm(len(self.layers))
        self._guesser = in_rounds(self, self._runner)
        self._stop, self._least = shape.stop, min(shape.stop, LEAST_REACH)
        self._ids, self._vocab = head.draft_ids.to(target.device), target.vocab_size
        self._states: dict[int, _EagleState] = {}
        self._guessing, self._drawing = StatedCalibration(), StatedCalibration()

    # The runner, if it can do that: to ask for a protocol takes 10 us between two passes.

    @functools.cached_property
    def _packed(self) -> PackedRunner | None:
        return self._runner if isinstance(self._runner, PackedRunner) else None

    @functools.cached_property
    def _keeps(self) -> KeepsPrefixes | None:
        return self._runner if isinstance(self._runner, KeepsPrefixes) else None

    @functools.cached_property
    def _writes(self) -> WritesDrafts | None:
        return self._runner if isinstance(self._runner, WritesDrafts) else None

    @classmethod
    def fetch(cls, options: Options, context: BuildContext) -> None:
        context.fetch_head(cls.name, options.head, options.allow_pickle)

    @classmethod
    def build(cls, options: Options, context: BuildContext) -> Drafter:
        """With `lookup` it is two drafters together."""
        _check(options)
        head = cls(replace(options, lookup=0), context)
        if not options.lookup:
            return head
        sizes = Ngram.Options(max_n=min(options.lookup + 2, LONGEST), min_n=options.lookup)
        return Combined(cls.name, [head, Ngram(sizes, context)])

    @property
    def takes_prefixes(self) -> bool:
        return self._keeps is not None

    def prefix_caches(self, target: str) -> dict[str, PagedCache]:
        return {} if self._packed is None else {self._packed.identity(target): self._packed.pages}

    def prefix(self, seq: Sequence) -> int:
        """The head's own keys of that prefix, while it has taken in all that the target has seen."""
        state = self._states.get(seq.id, _EagleState(0))
        if self._keeps is None or state.waiting or self._seen(seq.id) != state.taken:
            return 0
        return self._keeps.begin(seq.id, seq.tokens, seq.scope)

    def begin(self, seq: Sequence, seen: int) -> None:
        assert self._keeps is not None
        self._keeps.resume(seq.id, seq.tokens[: seen + 1])
        if seen:
            self._states[seq.id] = _EagleState(0, seen)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self._restart_long()
        most = self._options.tree or self._length
        choosers = {
            i: Chooser(seq, min(budgets[i], most), self._options.greedy)
            for i, seq in enumerate(seqs)
            if budgets[i] > 0 and self._ready(seq)
        }
        others = self._at_once(self._on_device(list(choosers.values())))
        if others:
            self._write(others, self._catch_up([chooser.seq for chooser in others]))
        drafts = [EMPTY] * len(seqs)
        for i, chooser in choosers.items():
            drafts[i] = chooser.draft(self._drawing if chooser.draws else self._guessing)
            state = self._states[chooser.seq.id]
            state.written, state.length = chooser, len(chooser.seq.tokens)
        return drafts

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        return () if self._guesser is None else (self._guesser,)

    def temperature(self, seq: Sequence) -> float:
        """Of its choice under the target's own noise in rounds; 0: it guesses the likeliest tokens, or draws."""
        return seq.params.temperature if not self._options.greedy and decision(seq) == "coupled" else 0.0

    def draws(self, seq: Sequence) -> bool:
        """Whether it draws from its law, which verification needs to know."""
        return not self._options.greedy and decision(seq) == "rejection"

    def follows(self, seq: Sequence) -> bool:
        """Whether rounds can begin: the target has shown all up to the last token."""
        return self._ready(seq)

    def catch_up(self, seqs: Seq[Sequence], most: int) -> bool:
        """Take in what was shown, until no more than `most` rows wait; False: some text begins anew in the head."""
        self._restart_long()
        if not all(map(self._ready, seqs)):
            return False
        late = [seq for seq in seqs if self._states[seq.id].waiting > most]
        if late:
            self._take_in(late, keep=1)
        return True

    def waiting(self, seq: Sequence) -> tuple[list[int], list[ShownStates]]:
        """The tokens that the head has not taken in, and the states before them."""
        state = self._states[seq.id]
        return seq.tokens[state.first + state.taken + 1 :], state.joined()

    def took(self, seq: Sequence, rounds: LoopedRounds) -> None:
        """The head has taken in all but the tokens of the last round."""
        state = self._states[seq.id]
        state.taken += state.waiting + sum(map(len, rounds.tokens[:-1]))
        assert rounds.states is not None
        state.pending, state.loose = [(rounds.states, rounds.rows)], 1
        state.waiting, state.written = len(rounds.tokens[-1]), None

    def calibrate(self, seq: Sequence, rounds: LoopedRounds) -> None:
        """How sure the head was in the first round, and what was kept."""
        first, calibration = rounds.round(0), self._drawing if self.draws(seq) else self._guessing
        own = first.sources.count(self.name)  # its nodes come first
        for node, kept in judged_tree(first.tokens[:own], first.parents[:own], rounds.tokens[0]):
            calibration.learn(first.acceptance[node], kept)

    def weigh(self, row: float, guess: float) -> None:
        """Beside a packed target, where rows and steps of the head cost most, drafts end where one more no longer
        pays."""
        if self._packed is not None and self._options.stop < 0.0:
            self._stop, self._least = thresholds(row, guess, bool(self._options.tree))

    def unread(self, seq: Sequence) -> int:
        state = self._states.get(seq.id)
        return 0 if state is None else max(0, state.waiting - 1)

    def observe(self, step: Step) -> None:
        if step.hidden is None:
            return
        state = self._states.get(step.seq.id)
        count, path = len(step.tokens), () if step.verdict is None else step.verdict.path
        rows = [0] if count == 1 and not path else [*range(count), *(count + node for node in path)]
        if state is None:
            end = self._seen(step.seq.id) if step.verdict is None else len(step.seq.tokens) - 1
            state = self._states[step.seq.id] = _EagleState(max(end - len(rows), 0))
        state.show(step.hidden, rows)
        if step.verdict is not None:
            self._learn(state, step)
        if step.rests:
            if state.waiting > RESTING // len(self._states):
                self._let_go(step.seq.id)
            return
        most = PENDING if self._packed is None else NATIVE_PENDING
        if state.waiting > most and _repays(state.waiting, step.seq):
            # a prompt, or long not asked: all but the last, from which a draft begins
            self._restart_long()
            if step.seq.id in self._states:
                self._take_in([step.seq], keep=1)

    def forget(self, id: int) -> None:
        self._let_go(id)

    def _let_go(self, id: int) -> None:
        self._states.pop(id, None)
        self._runner.free(id)

    def _restart_long(self) -> None:
        """Keep the head's keys within a memory budget of their own: a sequence with more than its equal share (keys
        lie in slots as long as the longest) begins anew in the head, with the states that the target shows next. It
        drafts with a shorter context; what is written is the same."""
        share = self._places // max(len(self._states), 1)
        for id in [id for id, state in self._states.items() if state.taken + state.waiting > share]:
            self._let_go(id)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has shown its states up to the last token, and no draft began from there yet."""
        state = self._states.get(seq.id)
        return state is not None and 0 < state.waiting == len(seq.tokens) - 1 - state.first - state.taken

    def _catch_up(self, seqs: Seq[Sequence]) -> HeadOutput:
        return self._take_in(seqs, keep=0)

    def _take_in(self, seqs: Seq[Sequence], keep: int) -> HeadOutput:
        """Run what the target has shown, but for the last `keep` rows: each state with the token after it."""
        tokens, hidden = [], []
        for seq in seqs:
            some, shown = self.shown(seq, keep)
            tokens.append(some)
            hidden += shown
        ahead = self._runner.extend([seq.id for seq in seqs], tokens, gathered(hidden))
        for seq in seqs:
            self.keep_prefix(seq)
        return ahead

    def keep_prefix(self, seq: Sequence) -> None:
        """What the head has taken in of this text is there for others, if it is all from the beginning."""
        if self._keeps is not None and not self._states[seq.id].first:
            self._keeps.keep(seq.id, seq.tokens, seq.scope)

    def shown(self, seq: Sequence, keep: int) -> tuple[list[int], list[ShownStates]]:
        """The tokens to be taken in, and the target's states before them."""
        state = self._states[seq.id]
        count, first = state.waiting - keep, state.first + state.taken + 1
        return seq.tokens[first : first + count], state.take(keep)

    def _on_device(self, choosers: list[Chooser]) -> list[Chooser]:
        """Drafts are written without the host where that can be; the choosers that are left."""
        runner = self._writes
        able = [] if runner is None else [chooser for chooser in choosers if chooser.by_rows]
        if runner is None or not able:
            return choosers
        taken = [self.shown(chooser.seq, keep=0) for chooser in able]
        tokens, shown = [some for some, _ in taken], [states for _, states in taken]
        for chooser, grown in zip(
            able, runner.write([w.seq.id for w in able], tokens, shown, list(map(_request, able))), strict=True
        ):
            self.keep_prefix(chooser.seq)
            chooser.tokens, chooser.parents, chooser.stated = grown.tokens, grown.parents, grown.acceptance
        return [chooser for chooser in choosers if not chooser.by_rows]

    def _at_once(self, choosers: list[Chooser]) -> list[Chooser]:
        """Catch up and write in one call where that can be: plain trees, and plain chains of few sequences, a call for
        each, of a packed head. The choosers that are left."""
        runner = self._packed
        if runner is None or not runner.chains:
            return choosers
        trees = [chooser for chooser in choosers if chooser.plain and self._branches(chooser)]
        if trees:
            self._whole_trees(runner, trees)
            return [chooser for chooser in choosers if chooser not in trees]
        if len(choosers) > FEW or not all(chooser.plain for chooser in choosers):
            return choosers
        for chooser in choosers:
            self._whole_chain(runner, chooser)
        return []

    def _whole_chain(self, runner: PackedRunner, chooser: Chooser) -> None:
        tokens, shown = self.shown(chooser.seq, keep=0)
        chain = runner.chain(chooser.seq.id, tokens, shown, chooser.length, self._stop)
        self.keep_prefix(chooser.seq)
        for token, stated in chain:
            if not chooser.put(token, stated):
                break

    def _whole_trees(self, runner: PackedRunner, choosers: Seq[Chooser]) -> None:
        taken = [self.shown(chooser.seq, keep=0) for chooser in choosers]
        tokens, shown = [some for some, _ in taken], [states for _, states in taken]
        growth = TreeGrowth(self._length, self._width, SHARPNESS, self._stop, self._least)
        ids, sizes = [w.seq.id for w in choosers], [w.length for w in choosers]
        for chooser, grown in zip(choosers, runner.trees(ids, tokens, shown, growth, sizes), strict=True):
            self.keep_prefix(chooser.seq)
            chooser.tokens, chooser.parents, chooser.stated = grown.tokens, grown.parents, grown.acceptance

    def _branches(self, chooser: Chooser) -> bool:
        """Whether its draft is a tree. Drawn tokens form chains: which of several draws to verify would have to be
        decided without looking at them."""
        return bool(self._options.tree) and chooser.length > 1 and not chooser.draws

    @property
    def _width(self) -> int:
        """Nodes of a tree that are followed at each depth."""
        return min(self._options.width, self._options.tree, len(self._ids))

    def _write(self, choosers: Seq[Chooser], ahead: HeadOutput) -> None:
        trees = [i for i, chooser in enumerate(choosers) if self._branches(chooser)]
        chains = sorted(set(range(len(choosers))) - set(trees))
        blind = ahead.logits.device.type != "cpu" and all(chooser.plain for chooser in choosers)
        for some, write in ((chains, self._blind_chains if blind else self._chains), (trees, self._trees)):
            if some:
                write([choosers[i] for i in some], ahead.pick(some))

    def _chains(self, choosers: Seq[Chooser], ahead: HeadOutput) -> None:
        for depth in range(self._length):
            self._choose(choosers, ahead.logits)
            going = [i for i, w in enumerate(choosers) if depth + 1 == len(w.tokens) < w.length and self._goes_on(w)]
            if not going or depth + 1 == self._length:
                return
            choosers, ahead = [choosers[i] for i in going], ahead.pick(going)
            device = ahead.states.device
            tokens = torch.tensor([w.tokens[-1] for w in choosers], device=device)
            trails = torch.arange(depth, device=device).expand(len(choosers), -1)
            ahead = self._runner.step([w.seq.id for w in choosers], tokens, ahead.states, trails)

    def _blind_chains(self, choosers: Seq[Chooser], ahead: HeadOutput) -> None:
        """The same on a device, without waiting for it: whole chains, looked at when they are done."""
        ids, device, found = [w.seq.id for w in choosers], ahead.logits.device, []
        length = min(self._length, max(chooser.length for chooser in choosers))
        for depth in range(length):
            stated, places = torch.softmax(ahead.logits, -1).max(-1)
            tokens = self._ids[places]
            found.append(torch.stack([tokens.double(), stated.double()], -1))
            if depth + 1 < length:
                trails = torch.arange(depth, device=device).expand(len(ids), -1)
                ahead = self._runner.step(ids, tokens, ahead.states, trails)
        for chooser, chain in zip(choosers, torch.stack(found, 1).tolist(), strict=True):
            for token, stated in chain[: chooser.length]:
                if not chooser.put(int(token), stated) or not self._goes_on(chooser):
                    break

    def _goes_on(self, chooser: Chooser) -> bool:
        return chooser.reach >= self._stop

    def _choose(self, choosers: Seq[Chooser], logits: Tensor) -> None:
        """One more token for each chooser."""
        plain = [i for i, chooser in enumerate(choosers) if chooser.plain]
        if plain:
            laws = torch.softmax(logits if len(plain) == len(choosers) else logits[plain], -1)
            stated, places = laws.max(-1)
            chosen = zip(plain, self._ids[places].tolist(), stated.tolist(), strict=True)
            for i, token, probability in chosen:
                choosers[i].put(token, probability)
        for i, chooser in enumerate(choosers):
            if not chooser.plain:
                chooser.write(self._full(logits[i]))

    def _full(self, logits: Tensor) -> Tensor:
        """[draft vocabulary] -> [vocab]: what the head cannot write has probability 0."""
        if len(self._ids) == self._vocab:
            return logits
        return logits.new_full((self._vocab,), float("-inf")).index_copy_(0, self._ids, logits)

    def _trees(self, choosers: Seq[Chooser], ahead: HeadOutput) -> None:
        def offers(logits: Tensor, paths: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            return self._offers(choosers, logits, paths, self._width)

        ids, sizes = [w.seq.id for w in choosers], [w.length for w in choosers]
        for chooser, grown in zip(
            choosers,
            grow(self._runner, ids, ahead, offers, self._length, sizes, self._stop, self._least),
            strict=True,
        ):
            chooser.tokens, chooser.parents, chooser.stated = grown.tokens, grown.parents, grown.acceptance

    def _offers(self, choosers: Seq[Chooser], logits: Tensor, paths: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each row and the logarithms of their probabilities, [rows, width]. Each chooser
        has the same number of rows."""
        logarithms, places = torch.log_softmax(logits / SHARPNESS, -1).topk(width)
        tokens, each = self._ids[places], len(logits) // len(choosers)
        for row in range(len(logits)):
            chooser = choosers[row // each]
            if not chooser.plain:
                tokens[row], logarithms[row] = self._offered(
                    chooser, self._full(logits[row]), paths[row].tolist(), width
                )
        return tokens, logarithms.where(~logarithms.isnan(), NEVER)  # what overflowed is never kept

    def _offered(self, chooser: Chooser, logits: Tensor, path: list[int], width: int) -> tuple[Tensor, Tensor]:
        """Exactly `width` tokens; where there are fewer, some have probability 0."""
        try:
            tokens, logarithms = chooser.offers(logits, path, width)
        except Exception:  # of a processor, or no token is left that the head may write: the target will judge
            tokens, logarithms = self._ids[:0], logits[:0]
        short = width - len(tokens)
        return F.pad(tokens, (0, short)), F.pad(logarithms, (0, short), value=NEVER)

    def _learn(self, state: _EagleState, step: Step) -> None:
        """How sure the head was of the tokens that came to be judged, and whether they were kept."""
        written, state.written = state.written, None
        if written is None or not written.tokens:
            return
        calibration = self._drawing if written.draws else self._guessing
        shown = len(step.draft) if written.draws else len(written.tokens)  # a draw that was not shown was not judged
        after = step.seq.tokens[state.length :]
        for node, kept in judged_tree(written.tokens[:shown], written.parents, after):
            calibration.learn(written.stated[node], kept)


def _places(head: EagleHead, target: Readable, quantize: str, shape: DraftShape, memory: int) -> int:
    """Tokens whose keys and values the head may hold in `memory` bytes: in pages (of float32 beside a packed target) or
    in buffers of torch, which double in number and in length and so may take four times what they hold."""
    dtype = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).dtype
    in_pages = isinstance(target, Paged) and _fits_device(head, shape)
    size = torch.float32.itemsize if bits(quantize, target) else dtype.itemsize * (1 if in_pages else 4)
    return memory // (2 * size * head.config.depth * head.config.num_kv_heads * head.config.head_dim)


def _request(chooser: Chooser) -> DraftRequest:
    seq = chooser.seq
    return DraftRequest(chooser.length, len(seq.tokens), chooser.temperature, seq.dice.key)


def _shape(options: Eagle.Options, target: Readable) -> DraftShape:
    usual_stop = 0.0 if not target.packed else TREE_STOP if options.tree else STOP
    stop = options.stop if options.stop >= 0.0 else usual_stop
    if not options.tree:
        length = options.length or LENGTH
        return DraftShape(length, 1, length, 1.0, stop)
    width = min(options.width, options.tree)
    usual = min(DEVICE_DEPTH, NODES // width + 1) if isinstance(target, Paged) else DEEPEST
    return DraftShape(options.length or usual, width, options.tree, 1.0 / SHARPNESS, stop)


def start(
    head: EagleHead, target: Readable, quantize: str, common: int = 0, places: int = 0, shape: DraftShape | None = None
) -> Runner:
    """The head at work beside its target. `common`, `places`: as a PackedRunner has them. `shape`: of its drafts, where
    a device may write whole ones."""
    count = bits(quantize, target)
    matrices = [weight for weight in (*head.fc.parameters(), *head.layers.parameters()) if weight.dim() == 2]
    if count and all(packable(*matrix.shape) for matrix in matrices):
        return PackedRunner(head, target, count, common, places)
    if shape is not None and isinstance(target, Paged) and _fits_device(head, shape):
        from outrider.drafters.eagle.device_runner import DeviceRunner  # needs Triton, as such a target does
        from outrider.models.cuda.model import CudaLlama

        if isinstance(target, CudaLlama):
            return DeviceRunner(head, target, min(places, target.capacity), shape)
    return DenseRunner(head, target)


def in_rounds(texts: Eagle, runner: Runner) -> RoundGuesser | None:
    """The head without the host, where that can be."""
    if not isinstance(runner, WritesDrafts):
        return None
    from outrider.drafters.eagle.device_guesser import HeadGuesser
    from outrider.drafters.heads.device_runner import DeviceHeadRunner

    return HeadGuesser(texts, runner) if isinstance(runner, DeviceHeadRunner) else None


def _fits_device(head: EagleHead, shape: DraftShape) -> bool:
    """Whether the GPU's kernels run it: a head of the third form, no more drafted rows than a path has bits."""
    writes = len(head.draft_ids) >= shape.width
    return not head.config.first and writes and shape.width * (shape.depth - 1) <= NODES and shape.nodes <= NODES


@dataclass(eq=False)
class _EagleState:
    """What the target has shown of one sequence, and what of that the head has taken in."""

    first: int  # the place of the first state; not 0 where the target knew the beginning already
    taken: int = 0
    pending: list[ShownStates] = field(default_factory=list)
    loose: int = 0  # of the pending pieces, the last ones that are of one pass each
    waiting: int = 0  # rows that are pending
    written: Chooser | None = None  # the last draft, in full
    length: int = 0  # tokens that were committed then

    def show(self, hidden: Tensor, rows: list[int]) -> None:
        """Add rows of a pass. They keep the states of the whole pass in memory, so rows of earlier passes are copied
        now and then."""
        whole = hidden.untyped_storage().nbytes()
        if whole > LARGE and whole > MOST_OF * hidden[:1].nbytes * len(rows):
            every = list(range(len(rows)))
            # the first rows need no list of them on a device, which the host would wait for
            hidden = hidden[: len(rows)].clone() if rows == every else hidden[torch.tensor(rows, device=hidden.device)]
            rows = every
        self.pending.append((hidden, rows))
        self.waiting, self.loose = self.waiting + len(rows), self.loose + 1
        if self.loose > JOIN_EVERY:
            self.pending[-self.loose : -1], self.loose = [_own(self.pending[-self.loose : -1])], 1

    def joined(self) -> list[ShownStates]:
        """What is pending, in two pieces at most."""
        if len(self.pending) > 2:
            self.pending, self.loose = [_own(self.pending[:-1]), self.pending[-1]], 1
        return list(self.pending)

    def take(self, keep: int) -> list[ShownStates]:
        """All but the last `keep` rows."""
        taken, self.pending, self.loose = self.pending, [], 0
        if keep:
            hidden, rows = _own(taken)
            taken, self.pending = [(hidden, rows[:-keep])], [(hidden[-keep:].clone(), list(range(keep)))]
            self.loose = 1
        self.taken, self.waiting = self.taken + self.waiting - keep, keep
        return taken


def thresholds(row: float, guess: float, tree: bool) -> tuple[float, float]:
    """How likely a node must be reached for the head to go on after it, and to be drafted at all. `row`, `guess`: the
    prices of `weigh`."""
    level = guess * (LEVEL_NODES if tree else 1.0)
    stop = _between((row + level) / FOLLOWED, *STOPS) * (1.0 if tree else CHAIN_STATED)
    return stop, min(stop, _between(row, *LEASTS))


def _between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def _repays(waiting: int, seq: Sequence) -> bool:
    """Whether to take in so many rows before a draft is asked for: a prompt, which others may share; and later what was
    left while others ran beside it, unless the text ends soon."""
    return len(seq.output) <= 1 or waiting < REPAID * seq.left


def _own(pending: Seq[ShownStates]) -> ShownStates:
    hidden = gathered(pending)
    return hidden, list(range(len(hidden)))


def _check(options: Eagle.Options) -> None:
    for name, least in (("length", 0), ("tree", 0), ("width", 1), ("vocab", 0), ("lookup", 0)):
        if getattr(options, name) < least:
            raise OutriderError(f"eagle:{name} must be at least {least}, not {getattr(options, name)}")
    if options.lookup > LONGEST:
        raise OutriderError(f"eagle:lookup must be at most {LONGEST}, not {options.lookup}")
    if not 0.0 <= options.stop < 1.0 and options.stop != -1.0:
        raise OutriderError(f"eagle:stop must be at least 0 and below 1, not {options.stop}")
