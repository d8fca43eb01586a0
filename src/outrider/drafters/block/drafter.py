"""`block`: one call of a head guesses a whole block of tokens, as a chain or a tree (`head.py`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.block.head import BlockHead
from outrider.drafters.block.runner import BlockRunner
from outrider.drafters.confidence import StatedCalibration
from outrider.drafters.eagle.drafter import NARROW, NODES, SHARPNESS, STOP, Eagle, in_rounds
from outrider.drafters.eagle.runner import DraftShape, HeadOutput, gathered
from outrider.drafters.eagle.tree import NEVER
from outrider.drafters.heads import files
from outrider.drafters.heads.chooser import Chooser, offers_with_noise
from outrider.drafters.heads.kinds import BLOCK
from outrider.drafters.heads.output import bits
from outrider.models.base import Paged, Readable

if TYPE_CHECKING:  # needs Triton, as a target on a device does
    from outrider.drafters.block.device_runner import BlockDeviceRunner


class BlockDrafter(Eagle):
    """It reads the target's states as the EAGLE drafter does, but runs another head, whose steps along a draft cost
    next to nothing. Each token is drawn from the head's law given the tokens before it."""

    name = BLOCK
    variants = ("tree=16",)

    @dataclass(frozen=True)
    class Options:
        head: str = ""  # folder; "": the head beside the model, or that is shipped for it
        length: int = 0  # of a chain, or how deep a tree may be; 0: as long as the head's block
        tree: int = 0  # nodes; 0: a chain
        width: int = 6  # nodes of a tree that are followed at each depth
        stop: float = -1.0  # end below nodes less likely to be reached; -1: 0.4 beside a packed target, else 0
        vocab: int = 0  # write only the first tokens of its vocabulary; 0: 8192 beside a packed target, else all
        greedy: bool = False  # guess the likeliest token even where the request samples
        quantize: Literal["auto", "none", "int8", "int4"] = "auto"  # auto: int4 beside a packed target

    def __init__(self, options: Options, context: BuildContext) -> None:
        _check(options)
        head = context.head(BLOCK, options.head, False)
        if not isinstance(head, BlockHead):
            raise files.other_kind(head, options.head)
        self._start(head, context, options)

    def _start(self, head: BlockHead, context: BuildContext, options: Options) -> None:
        target = context.readable("a block head")
        self._options: BlockDrafter.Options = options  # type: ignore[assignment]
        self._seen = context.target.length
        if options.vocab or target.packed:
            head.narrow(options.vocab or NARROW)
        shape = _shape(head, options, target)
        self._length, self._stop, self._least = shape.depth, shape.stop, shape.stop
        self.layers = head.config.layers
        self._places = _places(head, target, context.cache_bytes, shape)
        self._runner: BlockRunner | BlockDeviceRunner = start(head, target, options.quantize, self._places, shape)
        self._guesser = in_rounds(self, self._runner)
        self._ids, self._vocab = head.draft_ids.to(target.device), target.vocab_size
        self._states = {}
        self._guessing, self._drawing = StatedCalibration(), StatedCalibration()

    @classmethod
    def fetch(cls, options: Options, context: BuildContext) -> None:  # type: ignore[override]
        context.fetch_head(cls.name, options.head, False)

    @classmethod
    def build(cls, options: Options, context: BuildContext) -> BlockDrafter:  # type: ignore[override]
        return cls(options, context)

    def _choose(self, choosers: Seq[Chooser], logits: Tensor) -> None:
        """One more token for each chooser; choosers that share the target's noise are computed together."""
        if not all(chooser.shares_noise for chooser in choosers):
            super()._choose(choosers, logits)
            return
        tokens, logarithms = offers_with_noise(choosers, logits, self._ids, len(choosers[0].tokens), 1)
        chosen = zip(choosers, tokens[:, 0].tolist(), logarithms[:, 0].exp().tolist(), strict=True)
        for chooser, token, stated in chosen:
            chooser.put(token, stated)

    def _offers(self, choosers: Seq[Chooser], logits: Tensor, paths: Tensor, width: int) -> tuple[Tensor, Tensor]:
        if not all(chooser.shares_noise for chooser in choosers):
            return super()._offers(choosers, logits, paths, width)
        tokens, logarithms = offers_with_noise(choosers, logits, self._ids, paths.shape[1], width)
        return tokens, logarithms.nan_to_num(NEVER)  # what overflowed is never kept

    def _take_in(self, seqs: Seq[Sequence], keep: int) -> HeadOutput:
        """Where no draft follows, no block is run."""
        if not keep:
            return super()._take_in(seqs, keep)
        shown = [self.shown(seq, keep) for seq in seqs]
        hidden = gathered([states for _, some in shown for states in some])
        self._runner.read([seq.id for seq in seqs], [tokens for tokens, _ in shown], hidden)
        for seq in seqs:
            self.keep_prefix(seq)
        return HeadOutput(hidden[:0], hidden[:0])


def start(
    head: BlockHead, target: Readable, quantize: str, places: int, shape: DraftShape
) -> BlockRunner | BlockDeviceRunner:
    """The head at work beside its target."""
    if isinstance(target, Paged) and _fits_device(head, shape):
        from outrider.drafters.block.device_runner import BlockDeviceRunner  # needs Triton, as such a target does
        from outrider.models.cuda.model import CudaLlama

        if isinstance(target, CudaLlama) and not bits(quantize, target):
            return BlockDeviceRunner(head, target, min(places, target.capacity), shape)
    return BlockRunner(head, target, shape.depth, quantize)


def _fits_device(head: BlockHead, shape: DraftShape) -> bool:
    """Whether the GPU's kernels run it: drafts no larger than a pass of the target takes."""
    return len(head.draft_ids) >= shape.width and max(shape.nodes, head.config.block) <= NODES


def _shape(head: BlockHead, options: BlockDrafter.Options, target: Readable) -> DraftShape:
    block = head.config.block
    length = min(options.length or block, block)
    stop = options.stop if options.stop >= 0.0 else STOP if target.packed else 0.0
    if not options.tree:
        return DraftShape(length, 1, length, 1.0, stop)
    return DraftShape(length, min(options.width, options.tree), options.tree, 1.0 / SHARPNESS, stop)


def _places(head: BlockHead, target: Readable, memory: int, shape: DraftShape) -> int:
    """Tokens whose keys and values the head may hold in `memory` bytes: in pages, or in buffers of torch, which double
    in number and length and so may take four times what they hold."""
    dtype = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).dtype
    config, in_pages = head.config, isinstance(target, Paged) and _fits_device(head, shape)
    size = dtype.itemsize * (1 if in_pages else 4)
    return memory // (2 * size * config.depth * config.num_kv_heads * config.head_dim)


def _check(options: BlockDrafter.Options) -> None:
    for name, least in (("length", 0), ("tree", 0), ("width", 1), ("vocab", 0)):
        if getattr(options, name) < least:
            raise OutriderError(f"block:{name} must be at least {least}, not {getattr(options, name)}")
    if not 0.0 <= options.stop < 1.0 and options.stop != -1.0:
        raise OutriderError(f"block:stop must be at least 0 and below 1, not {options.stop}")
