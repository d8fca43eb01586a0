"""Medusa (Cai et al. 2024): heads on the target's last state, each of which guesses one place further ahead.

What they say of one place does not depend on the places before it, so a draft is a tree of the likeliest combinations:
a tree of ranks that was measured once (`outrider tune-tree`), or else the tree that is likeliest now.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outrider.core.draft import EMPTY, Draft, judged_tree
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter, Step
from outrider.drafters.confidence import StatedCalibration
from outrider.drafters.heads import files
from outrider.drafters.heads.chooser import Chooser
from outrider.drafters.heads.output import OutputMatrix, bits
from outrider.drafters.medusa.head import MedusaHead, Paths
from outrider.drafters.rounds.base import RoundGuesser
from outrider.models.base import Paged, Readable

RANKS = 10  # likeliest tokens of each head that a tree may use: as in the trees of the Medusa paper


def grow_paths(rates: Seq[Seq[float]], nodes: int) -> Paths:
    """The tree of `nodes` nodes that keeps most, one node after the other. `rates[j][r]`: how often the token of
    rank r is the right one j places ahead."""
    if not rates or not rates[0]:
        return ()
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-rates[0][0], (0,))]
    while heap and len(paths) < nodes:
        value, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(rates[depth - 1]):  # the next sibling
            above = value / rates[depth - 1][rank] if rates[depth - 1][rank] else 0.0
            heapq.heappush(heap, (above * rates[depth - 1][rank + 1], (*path[:-1], rank + 1)))
        if depth < len(rates):
            heapq.heappush(heap, (value * rates[depth][0], (*path, 0)))
    return tuple(paths)


class Medusa(Drafter):
    name = "medusa"
    reports_acceptance = has_weights = True

    @dataclass(frozen=True)
    class Options:
        head: str = ""  # folder; "": the head that is shipped for the target
        nodes: int = 16  # of the tree
        length: int = 0  # how deep it may be; 0: one level for each head
        vocab: int = 0  # write only the first `vocab` of the tokens that the heads know; 0: all
        quantize: Literal["auto", "none", "int8", "int4"] = "auto"  # auto: int4 beside a packed target
        allow_pickle: bool = False

    @classmethod
    def fetch(cls, options: Options, context: BuildContext) -> None:
        context.fetch_head(cls.name, options.head, options.allow_pickle)

    def __init__(self, options: Options, context: BuildContext) -> None:
        _check(options)
        head = context.head("medusa", options.head, options.allow_pickle)
        if not isinstance(head, MedusaHead):
            raise files.other_kind(head, options.head)
        self._begin(head, context, options)

    def _begin(self, head: MedusaHead, context: BuildContext, options: Options) -> None:
        target = context.readable("a Medusa head")
        if options.vocab:
            head.narrow(options.vocab)
        self._nodes, self._normed = options.nodes, target.normed
        self._dtype = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).dtype
        self._blocks = head.blocks[: options.length or None].to(target.device, self._dtype)
        self.layers = (target.num_layers - 1,)
        self._outputs = _outputs(head, target, bits(options.quantize, target), self._dtype)
        self._ids, self._vocab = head.draft_ids.to(target.device), target.vocab_size
        self._tree = tuple(path for path in head.tree if len(path) <= len(self._blocks))
        self._ranks = min(max((RANKS, *(max(path) + 1 for path in self._tree))), len(self._ids))
        self._last: dict[int, Tensor] = {}  # [hidden] the target's final state before each sequence's last token
        self._drafted: dict[int, tuple[Draft, int]] = {}  # the last draft, and how many tokens were committed then
        self._calibrations = [StatedCalibration() for _ in self._blocks]  # by depth
        self._guesser = _in_rounds(self, self._best, self._tree[: self._nodes], target)

    @property
    def guessers(self) -> tuple[RoundGuesser, ...]:
        return () if self._guesser is None else (self._guesser,)

    def follows(self, seq: Sequence) -> bool:
        """Whether rounds can begin: the state before its last token is known."""
        return seq.id in self._last

    def state(self, seq: Sequence) -> Tensor:
        return self._last[seq.id]

    def took(self, seq: Sequence, state: Tensor) -> None:
        """Rounds are over: the state before its last token is this one now."""
        self._last[seq.id] = state.clone()
        self._drafted.pop(seq.id, None)

    @property
    def takes_prefixes(self) -> bool:
        return True  # its heads read the last state alone, and the last token of a prompt is always run

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = [EMPTY] * len(seqs)
        asked = [i for i, seq in enumerate(seqs) if budgets[i] > 0 and seq.id in self._last]
        if asked:
            tokens, stated = self._offers([seqs[i] for i in asked])
            for row, i in enumerate(asked):
                drafts[i] = self._draft(tokens[row], stated[row], min(budgets[i], self._nodes))
                self._drafted[seqs[i].id] = drafts[i], len(seqs[i].tokens)
        return [self._calibrated(draft) for draft in drafts]

    def observe(self, step: Step) -> None:
        if step.hidden is None or step.verdict is None:
            return
        nodes = len(step.tokens)
        row = nodes + step.verdict.path[-1] if step.verdict.path else nodes - 1
        self._last[step.seq.id] = step.hidden[row, 0].clone()
        self._learn(step)

    def forget(self, id: int) -> None:
        self._last.pop(id, None)
        self._drafted.pop(id, None)

    @torch.inference_mode()
    def _offers(self, seqs: Seq[Sequence]) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """Per sequence and head: the likeliest tokens, and the probabilities that the head states."""
        logits = self._logits(torch.stack([self._last[seq.id] for seq in seqs]))
        best = torch.softmax(logits, -1).topk(self._ranks)
        tokens, stated = self._ids[best.indices].tolist(), best.values.tolist()
        for row, seq in enumerate(seqs):
            if not (seq.params.greedy or seq.rule == "rejection"):
                tokens[row], stated[row] = self._with_noise(seq, logits[row])
        return tokens, stated

    def _logits(self, last: Tensor) -> Tensor:
        """[n, hidden] -> [n, heads, draft vocabulary]"""
        normed = self._normed(last).to(self._dtype)
        return torch.stack(
            [output(block(normed)) for block, output in zip(self._blocks, self._outputs, strict=False)], 1
        )

    def _best(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of each head and their probabilities, [n, heads, ranks]; nothing waits for a device."""
        logits = self._logits(last).float()
        values, places = logits.topk(self._ranks)
        return self._ids[places], torch.exp(values - logits.logsumexp(-1, keepdim=True))

    def _with_noise(self, seq: Sequence, logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Under the coupled rule the target's own noise is known: [heads, draft vocabulary] -> tokens and stated
        probabilities."""
        chooser, path = Chooser(seq, len(logits), False), list[int]()
        tokens, stated = [], []
        for row in logits:
            full = row.new_full((self._vocab,), float("-inf")).index_copy_(0, self._ids, row)
            try:
                offered, scores = chooser.offers(full, path, self._ranks)
            except Exception:  # of a processor, or no token is left that the head may write: the target will judge
                break
            tokens.append(offered.tolist())
            stated.append(scores.exp().tolist())
            path.append(tokens[-1][0])
        return tokens, stated

    def _draft(self, tokens: list[list[int]], stated: list[list[float]], nodes: int) -> Draft:
        """The measured tree, or the tree that is likeliest now. It ends before a head whose numbers overflowed."""
        sound = next((i for i, row in enumerate(stated) if not all(map(math.isfinite, row))), len(stated))
        tokens, stated = tokens[:sound], stated[:sound]
        paths = self._tree[:nodes] or grow_paths(stated, nodes)
        paths = tuple(
            p for p in paths if len(p) <= len(tokens) and all(r < len(t) for r, t in zip(p, tokens, strict=False))
        )
        place = {(): -1, **{path: node for node, path in enumerate(paths)}}
        return Draft(
            tuple(tokens[len(path) - 1][path[-1]] for path in paths),
            tuple(place[path[:-1]] for path in paths),
            acceptance=tuple(stated[len(path) - 1][path[-1]] for path in paths),
        )

    def _calibrated(self, draft: Draft) -> Draft:
        levels = zip(draft.depths(), draft.acceptance, strict=True)
        return replace(draft, acceptance=tuple(self._calibrations[depth - 1].probability(p) for depth, p in levels))

    def _learn(self, step: Step) -> None:
        draft, length = self._drafted.pop(step.seq.id, (EMPTY, 0))
        depths = draft.depths()
        for node, kept in judged_tree(draft.tokens, draft.parents, step.seq.tokens[length:] if draft else ()):
            self._calibrations[depths[node] - 1].learn(draft.acceptance[node], kept)


def _in_rounds(
    states: Medusa, offers: Callable[[Tensor], tuple[Tensor, Tensor]], tree: Paths, target: Readable
) -> RoundGuesser | None:
    """The heads without the host: beside a target that writes in rounds, with a tree that was measured."""
    if not tree or not isinstance(target, Paged):
        return None
    from outrider.drafters.medusa.device_guesser import MedusaGuesser

    return MedusaGuesser(states, offers, tree, target.device)


def _outputs(head: MedusaHead, target: Readable, bits: int, dtype: torch.dtype) -> list[OutputMatrix]:
    """One for each head; where they share the target's, the same."""
    if head.config.own_output:
        return [OutputMatrix(own.weight.to(target.device), bits, dtype) for own in head.outputs]
    shared = OutputMatrix(target.output_rows(head.draft_ids.to(target.device)), bits, dtype)
    return [shared] * head.config.num_heads


def _check(options: Medusa.Options) -> None:
    for name, least in (("nodes", 1), ("length", 0), ("vocab", 0)):
        if getattr(options, name) < least:
            raise OutriderError(f"medusa:{name} must be at least {least}, not {getattr(options, name)}")
