"""EAGLE (Li et al. 2024, 2025): a decoder layer that reads the target's own states and writes ahead (`head.py`)."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.drafters.eagle.runner import Ahead, Runner, Shown, gathered
from outrider.drafters.eagle.torch_runner import DenseRunner
from outrider.drafters.eagle.tree import grow
from outrider.drafters.eagle.with_lookup import Lookup
from outrider.drafters.heads.chooser import Writer
from outrider.drafters.heads.output import bits
from outrider.drafters.trust import Trust
from outrider.models.base import Readable
from outrider.models.native.packed import packable

PIECE = 512  # states of the target that may wait to be taken in
SOON = 64  # where the kernels do that: a prompt belongs to the time before the first token
NEVER = -1e9  # the logarithm of no chance
DEEP = 16  # levels of a tree, at most; it ends where no deeper node can be among its best
SHARP = 0.75  # a greedy target always takes its likeliest token, so a head's likely ones hold oftener than their chance
CUT = 8192  # tokens that a head writes on a CPU, where it writes trees or for many sequences
COMMON = 4096  # and with the tokens of the text itself, where it writes a chain for one


class Eagle(Drafter):
    name = "eagle"
    reports_acceptance = has_heads = True

    @dataclass(frozen=True)
    class Options:
        head: str = ""  # folder; "": the one that is shipped for the target
        length: int = 0  # of a chain, or how deep a tree may be; 0: 5 and 16
        tree: int = 0  # nodes; 0: a chain
        width: int = 6  # nodes of a tree that are followed at each depth
        stop: float = -1.0  # no drafting below nodes with less chance; -1: 0.4 beside a packed target, else 0
        vocab: int = 0  # write only the first so many of its tokens, and on a CPU those of the text; 0: what suits
        lookup: int = 0  # copy from the text where at least so many tokens match; 0: never
        greedy: bool = False  # guess the likeliest token even where the request samples
        quantize: Literal["auto", "none", "int8", "int4"] = "auto"  # auto: int4 beside a packed target
        allow_pickle: bool = False

    def __init__(self, options: Options, context: BuildContext) -> None:
        _check(options)
        head = context.head("eagle", options.head, options.allow_pickle)
        if not isinstance(head, EagleHead):
            raise OutriderError(f"{options.head} holds a Medusa head; write medusa:head={options.head}")
        self._begin(head, context, options)

    def _begin(self, head: EagleHead, context: BuildContext, options: Options) -> None:
        target = context.readable("an EAGLE head")
        self._options, self._seen = options, context.target.length
        self._length = options.length or (DEEP if options.tree else 5)
        packed = bool(getattr(target, "packed", False))
        if options.vocab or packed:
            head.narrow(options.vocab or CUT)
        self.layers = head.config.layers or (target.num_layers - 1,)
        self._runner = start(head, target, options.quantize, options.vocab or (COMMON if packed else 0))
        self._stop = options.stop if options.stop >= 0.0 else 0.4 if packed else 0.0
        self._ids, self._vocab = head.draft_ids.to(target.device), target.vocab_size
        self._states: dict[int, _State] = {}
        self._guessing, self._drawing = Trust(), Trust()
        self._lookup = Lookup(options.lookup, context) if options.lookup else None

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        copies = self.propose_cheap(seqs, budgets)
        asked = [
            i for i, copy in enumerate(copies) if budgets[i] > 0 and self._ready(seqs[i]) and self._wants(seqs[i], copy)
        ]
        most = self._options.tree or self._length
        writers = {i: Writer(seqs[i], min(budgets[i], most), self._options.greedy) for i in asked}
        begin = time.perf_counter()
        if writers and not self._at_once(list(writers.values())):
            self._write(list(writers.values()), self._catch_up([seqs[i] for i in asked]))
        if writers and self._lookup is not None:
            self._lookup.spend((time.perf_counter() - begin) / len(writers))
        drafts = list(copies)
        for i, writer in writers.items():
            draft = writer.draft(self._drawing if writer.draws else self._guessing)
            # nodes that were drawn come alone: verification has to know the law of every one
            if self._lookup is not None and draft and copies[i] and draft.probs is None:
                draft = self._lookup.merge(seqs[i], draft, copies[i])
            drafts[i] = draft or copies[i]
            state = self._states[writer.seq.id]
            state.written, state.length = writer, len(writer.seq.tokens)
        return drafts

    def propose_cheap(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._looked_up(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, step: Step) -> None:
        if self._lookup is not None:
            self._lookup.observe(step)
        if step.hidden is None:
            return
        state = self._states.get(step.seq.id)
        count, path = len(step.tokens), () if step.verdict is None else step.verdict.path
        rows = [*range(count), *(count + node for node in path)]
        if state is None:
            end = self._seen(step.seq.id) if step.verdict is None else len(step.seq.tokens) - 1
            state = self._states[step.seq.id] = _State(max(end - len(rows), 0))
        state.show(step.hidden, rows)
        if step.verdict is not None:
            self._learn(state, step)
        most = SOON if isinstance(self._runner, PackedRunner) else PIECE
        if state.waiting > most:  # a prompt, or long not asked: all but the last, from which a draft begins
            self._take_in([step.seq], keep=1)

    def forget(self, id: int) -> None:
        self._states.pop(id, None)
        self._runner.free(id)
        if self._lookup is not None:
            self._lookup.forget(id)

    def _looked_up(self, seq: Sequence, budget: int) -> Draft:
        return EMPTY if self._lookup is None else self._lookup.propose(seq, budget)

    def _wants(self, seq: Sequence, copy: Draft) -> bool:
        """Whether the head is asked as well."""
        return self._lookup is None or not self._lookup.enough(seq, copy)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has shown its states up to the last token, and no draft began from there yet."""
        state = self._states.get(seq.id)
        return state is not None and 0 < state.waiting == len(seq.tokens) - 1 - state.first - state.taken

    def _catch_up(self, seqs: Seq[Sequence]) -> Ahead:
        return self._take_in(seqs, keep=0)

    def _take_in(self, seqs: Seq[Sequence], keep: int) -> Ahead:
        """Run what the target has shown, but for the last `keep` rows: each state with the token after it."""
        tokens, hidden = [], []
        for seq in seqs:
            some, shown = self._shown(seq, keep)
            tokens.append(some)
            hidden += shown
        return self._runner.extend([seq.id for seq in seqs], tokens, gathered(hidden))

    def _shown(self, seq: Sequence, keep: int) -> tuple[list[int], list[Shown]]:
        """The tokens to be taken in, and the target's states before them."""
        state = self._states[seq.id]
        count, first = state.waiting - keep, state.first + state.taken + 1
        return seq.tokens[first : first + count], state.take(keep)

    def _at_once(self, writers: Seq[Writer]) -> bool:
        """Catch up and write in one call where that can be: the plain chain of one sequence, of a packed head."""
        runner, writer = self._runner, writers[0]
        if len(writers) > 1 or self._options.tree or not writer.plain:
            return False
        if not isinstance(runner, PackedRunner) or not runner.chains:
            return False
        tokens, shown = self._shown(writer.seq, keep=0)
        for token, chance in runner.chain(writer.seq.id, tokens, shown, writer.length, self._stop):
            writer.put(token, chance)
        return True

    def _write(self, writers: Seq[Writer], ahead: Ahead) -> None:
        """Drawn tokens come as chains: which of several draws are shown would have to be decided without a look."""
        trees = [i for i, w in enumerate(writers) if self._options.tree and w.length > 1 and not w.draws]
        chains = sorted(set(range(len(writers))) - set(trees))
        blind = ahead.logits.device.type != "cpu" and all(writer.plain for writer in writers)
        for some, write in ((chains, self._blind_chains if blind else self._chains), (trees, self._trees)):
            if some:
                write([writers[i] for i in some], ahead.pick(some))

    def _chains(self, writers: Seq[Writer], ahead: Ahead) -> None:
        for depth in range(self._length):
            self._choose(writers, ahead.logits)
            going = [i for i, w in enumerate(writers) if depth + 1 == len(w.tokens) < w.length and self._goes_on(w)]
            if not going or depth + 1 == self._length:
                return
            writers, ahead = [writers[i] for i in going], ahead.pick(going)
            device = ahead.states.device
            tokens = torch.tensor([w.tokens[-1] for w in writers], device=device)
            trails = torch.arange(depth, device=device).expand(len(writers), -1)
            ahead = self._runner.step([w.seq.id for w in writers], tokens, ahead.states, trails)

    def _blind_chains(self, writers: Seq[Writer], ahead: Ahead) -> None:
        """The same on a device, without waiting for it: whole chains, looked at when they are done."""
        ids, device, said = [w.seq.id for w in writers], ahead.logits.device, []
        for depth in range(self._length):
            chances, places = torch.softmax(ahead.logits, -1).max(-1)
            tokens = self._ids[places]
            said.append(torch.stack([tokens.double(), chances.double()], -1))
            if depth + 1 < self._length:
                trails = torch.arange(depth, device=device).expand(len(ids), -1)
                ahead = self._runner.step(ids, tokens, ahead.states, trails)
        for writer, chain in zip(writers, torch.stack(said, 1).tolist(), strict=True):
            for token, chance in chain[: writer.length]:
                writer.put(int(token), chance)
                if not self._goes_on(writer):
                    break

    def _goes_on(self, writer: Writer) -> bool:
        return writer.reach >= self._stop

    def _choose(self, writers: Seq[Writer], logits: Tensor) -> None:
        """One more token for each."""
        plain = [i for i, writer in enumerate(writers) if writer.plain]
        if plain:
            laws = torch.softmax(logits if len(plain) == len(writers) else logits[plain], -1)
            chances, places = laws.max(-1)
            chosen = zip(plain, self._ids[places].tolist(), chances.tolist(), strict=True)
            for i, token, chance in chosen:
                writers[i].put(token, chance)
        for i, writer in enumerate(writers):
            if not writer.plain:
                writer.write(self._full(logits[i]))

    def _full(self, logits: Tensor) -> Tensor:
        """[draft vocabulary] -> [vocab]: what the head cannot write has no chance."""
        if len(self._ids) == self._vocab:
            return logits
        return logits.new_full((self._vocab,), float("-inf")).index_copy_(0, self._ids, logits)

    def _trees(self, writers: Seq[Writer], ahead: Ahead) -> None:
        options = self._options
        width = min(options.width, options.tree, len(self._ids))

        def offers(logits: Tensor, paths: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            return self._offers(writers, logits, paths, width)

        ids, sizes = [w.seq.id for w in writers], [w.length for w in writers]
        for writer, grown in zip(
            writers, grow(self._runner, ids, ahead, offers, self._length, sizes, self._stop), strict=True
        ):
            writer.tokens, writer.parents, writer.said = grown.tokens, grown.parents, grown.acceptance

    def _offers(self, writers: Seq[Writer], logits: Tensor, paths: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each row and the logarithms of their chances, [rows, width]; each writer has the
        same number of rows."""
        chances, places = torch.log_softmax(logits / SHARP, -1).topk(width)
        tokens, each = self._ids[places], len(logits) // len(writers)
        for row in range(len(logits)):
            writer = writers[row // each]
            if not writer.plain:
                tokens[row], chances[row] = self._offered(writer, self._full(logits[row]), paths[row].tolist(), width)
        return tokens, chances

    def _offered(self, writer: Writer, logits: Tensor, path: list[int], width: int) -> tuple[Tensor, Tensor]:
        """Exactly `width`; where there are less, some that have no chance."""
        try:
            tokens, chances = writer.offers(logits, path, width)
        except Exception:  # of a processor, or no token is left that the head may write: the target will judge
            tokens, chances = self._ids[:0], logits[:0]
        short = width - len(tokens)
        return F.pad(tokens, (0, short)), F.pad(chances, (0, short), value=NEVER)

    def _learn(self, state: _State, step: Step) -> None:
        """How sure the head was of the tokens that came to be judged, and whether they were kept."""
        written, state.written = state.written, None
        if written is None or not written.tokens:
            return
        trust = self._drawing if written.draws else self._guessing
        shown = len(step.draft) if written.draws else len(written.tokens)  # a draw that was not shown was not judged
        node = -1
        for token in step.seq.tokens[state.length :]:
            below = [i for i in range(node + 1, shown) if written.parents[i] == node]
            for i in below:
                trust.learn(written.said[i], written.tokens[i] == token)
            node = next((i for i in below if written.tokens[i] == token), shown)


def start(head: EagleHead, target: Readable, quantize: str, common: int = 0) -> Runner:
    """The head at work beside its target. `common`: as a PackedRunner has it."""
    count = bits(quantize, target)
    matrices = [weight for weight in (*head.fc.parameters(), *head.layers.parameters()) if weight.dim() == 2]
    if count and all(packable(*matrix.shape) for matrix in matrices):
        return PackedRunner(head, target, count, common)
    return DenseRunner(head, target)


@dataclass(eq=False)
class _State:
    """What the target has shown of one sequence, and what of that the head has taken in."""

    first: int  # the place of the first state; not 0 where the target knew the beginning already
    taken: int = 0
    pending: list[Shown] = field(default_factory=list)
    waiting: int = 0  # rows that are pending
    written: Writer | None = None  # the last draft, in full
    length: int = 0  # tokens that were committed then

    def show(self, hidden: Tensor, rows: list[int]) -> None:
        """Rows of a pass, which hang on to all of it: what lay here before is copied."""
        self.pending = [*([] if not self.pending else [_own(self.pending)]), (hidden, rows)]
        self.waiting += len(rows)

    def take(self, keep: int) -> list[Shown]:
        """All but the last `keep` rows."""
        taken, self.pending = self.pending, []
        if keep:
            hidden, rows = _own(taken)
            taken, self.pending = [(hidden, rows[:-keep])], [(hidden[-keep:].clone(), list(range(keep)))]
        self.taken, self.waiting = self.taken + self.waiting - keep, keep
        return taken


def _own(pending: Seq[Shown]) -> Shown:
    hidden = gathered(pending)
    return hidden, list(range(len(hidden)))


def _check(options: Eagle.Options) -> None:
    for name, least in (("length", 0), ("tree", 0), ("width", 1), ("vocab", 0), ("lookup", 0)):
        if getattr(options, name) < least:
            raise OutriderError(f"eagle:{name} must be at least {least}, not {getattr(options, name)}")
    if not 0.0 <= options.stop < 1.0 and options.stop != -1.0:
        raise OutriderError(f"eagle:stop must be at least 0 and below 1, not {options.stop}")
