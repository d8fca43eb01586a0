"""An EAGLE head with packed weights, run by the kernels: beside a packed target a draft step must cost little."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.core.sequence import Scope
from outrider.drafters.eagle.head import EagleHead, EagleLayer
from outrider.drafters.eagle.native_head import HeadWeights, NativeHead, TakenSpan
from outrider.drafters.eagle.runner import Grown, HeadOutput, ShownStates
from outrider.drafters.eagle.tree import TreeGrowth
from outrider.drafters.eagle.vocabulary import Lexicon, TextVocabulary
from outrider.drafters.heads.output import OutputMatrix, pack
from outrider.models.base import Readable
from outrider.models.native import structs
from outrider.models.native.packed import TILE, Packed
from outrider.models.native.stack import NativeStack
from outrider.models.paged_cache import SIZE, PagedCache
from outrider.models.prefix_file import digest
from outrider.models.quant import quantise
from outrider.models.stack import Layer, Pass, StackConfig

_POSITIONS = 1024  # positions of the rotary tables to begin with
WARMED = 8  # tokens before the first chain, which is written for nobody; enough for the kernels of several rows
NOBODY = -1  # no sequence has this id


class PackedRunner:
    def __init__(self, head: EagleHead, target: Readable, bits: int, common: int = 0, places: int = 0) -> None:
        """`common`: tokens that every chain can be written with, beside those of its text; 0: all that the head writes,
        and no others. `places`: rows up to which keys of ended sequences are kept."""
        config = self.config = head.config
        head.float()
        self._rope, self._final = head.rope, target.normed
        self._embed = head.embed_tokens if config.own_embedding else target.embed
        output = head.lm_head.weight if config.own_output else target.output_rows(head.draft_ids)
        self._output = OutputMatrix(output, bits, torch.float32)
        self._norm = None if config.first else head.norm.weight.detach().contiguous()
        self._fc = pack(head.fc.weight, bits, head.fc.bias)
        self._embedding_norm = None if config.first else head.decoder[0].input_layernorm.weight.detach().contiguous()
        self._stack = self._start(head, target, [_layer(layer, bits) for layer in head.decoder])
        sizes = config.depth, config.num_kv_heads, config.head_dim
        memory = places * 2 * 4 * math.prod(sizes)  # bytes: keys and values in float32
        self._cache = PagedCache(*sizes, memory, ahead=1)  # a row joins a state with the token after it
        self._lengths: dict[int, int] = {}  # committed rows
        self._kept: dict[int, int] = {}  # of these, the rows when others were last told of them
        self._lexicon = self._words_of(head, target, bits, common) if common else None
        self._words: dict[int, _Own] = {}
        self._turned, self._positions = (torch.empty(0), torch.empty(0)), 0  # cos and sin, and of how many positions

    def _start(self, head: EagleHead, target: Readable, layers: Seq[Layer]) -> NativeStack:
        if self._norm is None or self._embedding_norm is None:
            return NativeStack(_sizes(head), layers)
        output, embedding = self._output.linear, getattr(getattr(target, "weights", None), "embedding", None)
        shared = isinstance(embedding, Packed) and not self.config.own_embedding
        weights = HeadWeights(
            fc=self._fc,
            output=output if isinstance(output, Packed) else None,
            embedding=embedding if shared else None,
            ids=head.draft_ids.long().contiguous(),
            norm=self._norm,
            embedding_norm=self._embedding_norm,
            input_norms=_stacked(head.fc_norm) if self.config.norm_inputs else None,
            joined_norm=head.input_norm.weight.detach() if self.config.norm_joined else None,
            norm_residual=self.config.norm_residual,
            norm_output=self.config.norm_output,
        )
        return NativeHead(_sizes(head), layers, weights)

    def _words_of(self, head: EagleHead, target: Readable, bits: int, common: int) -> Lexicon | None:
        """None where a chain is written with all tokens."""
        output, ids = self._output.linear, head.draft_ids
        if self.config.own_output or not isinstance(output, Packed) or len(head.learned) <= common:
            return None
        if min(common, len(ids)) < TILE:  # fewer than one tile: write with exactly the tokens that were asked for
            return None
        if bool((ids.diff() > 0).all()):  # sorted by id, not by frequency: the common ones are unknown
            common = len(ids)
        return Lexicon(output, ids, head.learned, common, target.output_rows, bits)

    @property
    def pages(self) -> PagedCache:
        """Its keys and values."""
        return self._cache

    def identity(self, target: str) -> str:
        """A digest of all that the bits of its keys and values depend on. `target`: that of the target."""
        own = self._embed.weight if isinstance(self._embed, torch.nn.Embedding) else None
        norms = self._stack.norms if isinstance(self._stack, NativeHead) else ()
        rope = self._rope.frequencies
        return digest(target, repr(self.config), *self._fc.numbers, *self._stack.numbers, *norms, own, rope)

    def begin(self, id: int, tokens: Seq[int], scope: Scope) -> int:
        """Take what is kept of the rows of this text; how many there are now."""
        self._cache.begin(id, tokens, scope)
        return self._cache.length(id)

    def resume(self, id: int, tokens: Seq[int]) -> None:
        """Go on from its first rows, one less than these tokens of its text."""
        rows = len(tokens) - 1
        self._cache.crop(id, rows)
        if rows != self._lengths.get(id, 0):
            self._lengths[id] = self._kept[id] = rows
            self._read(id, tokens)

    def keep(self, id: int, tokens: Seq[int], scope: Scope) -> None:
        """The rows of these tokens may be taken by others."""
        rows = self._lengths[id]
        if rows // SIZE > self._kept.get(id, 0) // SIZE:  # a page is full that was not
            self._kept[id] = rows
            self._cache.name(id, tokens[: rows + 1], scope)

    def free(self, id: int) -> None:
        self._kept.pop(id, None)
        self._cache.free(id)
        self._lengths.pop(id, None)
        self._words.pop(id, None)

    @torch.inference_mode()
    def extend(self, ids: Seq[int], tokens: Seq[Seq[int]], hidden: Tensor) -> HeadOutput:
        positions: list[int] = []
        parents: list[int] = []
        slots, ends = [], []
        for id, each in zip(ids, tokens, strict=True):
            begin, count = self._lengths.get(id, 0), len(each)
            self._cache.crop(id, begin)
            slots.append(self._cache.extend(id, count))
            positions += range(begin, begin + count)
            parents += range(-1, count - 1)
            ends.append(len(positions) - 1)
            self._lengths[id] = begin + count
            self._read(id, each)
        states = self._states(hidden)
        flat = torch.tensor([token for each in tokens for token in each])
        rows = _rows([len(each) for each in tokens])
        x = self._run(flat, states, Pass((), slots, rows, positions, parents), last=len(ids) == 1)
        return self._ahead(x if len(ends) == len(x) else x[ends])

    @torch.inference_mode()
    def step(self, ids: Seq[int], tokens: Tensor, states: Tensor, trails: Tensor) -> HeadOutput:
        count, depth = len(tokens) // len(ids), trails.shape[1]
        slots = [self._cache.extend(id, count) for id in ids]
        lengths = [self._lengths[id] for id in ids]
        positions = [length + depth for length in lengths for _ in range(count)]
        batch = Pass((), slots, _rows([count] * len(ids)), positions, [-1] * len(tokens))
        seen = None
        if count > 1 or slots[0].length - lengths[0] > depth + 1:  # not a chain, in which a row sees all before it
            seen = _Trails(lengths, trails.view(len(ids), count, depth))
        return self._ahead(self._run(tokens, states.clone(), batch, seen))

    @property
    def chains(self) -> bool:
        """Whether it can write a chain or a tree in one call."""
        return isinstance(self._stack, NativeHead) and self._stack.chains

    def chain(
        self, id: int, tokens: Seq[int], shown: Seq[ShownStates], length: int, stop: float
    ) -> list[tuple[int, float]]:
        """As `extend` of one sequence, then its likeliest tokens with their probabilities, up to `length` of them and
        until their product is below `stop`; these are forgotten again."""
        assert isinstance(self._stack, NativeHead)
        begin = self._lengths.get(id, 0)
        end = begin + len(tokens)
        slot = self._cache.extend(id, len(tokens) + length - 1)
        turns = self._tables(end + length)
        self._read(id, tokens)
        head = None if self._lexicon is None else self._words[id].head(self._stack)
        chain = self._stack.chain(slot, begin, tokens, shown, turns, length, stop, head)
        slot.length = self._lengths[id] = end  # drops the rows of earlier and current drafts
        return chain

    @torch.inference_mode()
    def trees(
        self, ids: Seq[int], tokens: Seq[Seq[int]], shown: Seq[Seq[ShownStates]], growth: TreeGrowth, sizes: Seq[int]
    ) -> list[Grown]:
        """As `extend`, then a tree of up to `sizes` nodes after each sequence; these are forgotten again. One sequence
        has a vocabulary of its own, as a chain has."""
        assert isinstance(self._stack, NativeHead)
        spans = []
        for id, own, states, size in zip(ids, tokens, shown, sizes, strict=True):
            begin = self._lengths.get(id, 0)
            self._cache.crop(id, begin)
            spans.append(TakenSpan(self._cache.extend(id, len(own) + growth.rows(size)), begin, own, states))
            self._read(id, own)
        turns = self._tables(max(span.start + len(span.tokens) for span in spans) + growth.depth)
        alone = self._lexicon is not None and len(ids) == 1
        head = self._words[ids[0]].head(self._stack) if alone else None
        try:
            return self._stack.trees(spans, turns, growth, sizes, head)
        finally:
            for id, span in zip(ids, spans, strict=True):
                span.slot.length = self._lengths[id] = span.start + len(span.tokens)

    def warm(self, layers: int) -> None:
        """Write one chain for nobody, or the first request would wait for it: the first chain takes ten times as long
        as later ones (LOG, 2026-11-17, the first draft of a head). `layers`: of the target, whose states it reads."""
        if self.chains:
            rare = [] if self._lexicon is None else list(self._lexicon.rare)[:1]
            tokens = [*rare, *[0] * WARMED][:WARMED]
            states = torch.zeros(WARMED, layers, self.config.hidden_size)
            self.chain(NOBODY, tokens, [(states, range(WARMED))], 2, 0.0)
            self.free(NOBODY)

    def _read(self, id: int, tokens: Seq[int]) -> None:
        """They are in the sequence's text."""
        if self._lexicon is not None:
            if id not in self._words:
                self._words[id] = _Own(self._lexicon)
            self._words[id].words.add(tokens)

    def _states(self, hidden: Tensor) -> Tensor:
        """The states that a step reads, of the target's own [rows, layers, hidden]."""
        if isinstance(self._stack, NativeHead):
            return self._stack.states(hidden)
        return self._final(hidden[:, 0]).clone()

    def _run(self, tokens: Tensor, x: Tensor, batch: Pass, trails: _Trails | None = None, last: bool = False) -> Tensor:
        """[rows, hidden] after the layers; x is overwritten. `last`: only the last row's result is wanted."""
        embedded = self._embed(tokens)
        head_inputs = structs.HeadInputs(last=int(last))
        if self.config.first:
            x = self._fc(torch.cat([embedded, x], 1))
        else:
            assert self._embedding_norm is not None
            head_inputs.embedded, head_inputs.embedding_norm = embedded.data_ptr(), self._embedding_norm.data_ptr()
            head_inputs.replaces = int(self.config.norm_residual)
        if trails is not None:
            trails.into(head_inputs)
        cos, sin = self._turns(batch.positions)
        return self._stack.run(x.contiguous(), batch, cos, sin, (), head_inputs)[0]

    def _turns(self, positions: Seq[int]) -> tuple[Tensor, Tensor]:
        last = max(positions)
        cos, sin = self._tables(last + 1)
        if len(positions) == 1:
            return cos[last : last + 1], sin[last : last + 1]
        place = torch.tensor(positions)
        return cos[place], sin[place]

    def _tables(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of at least `count` positions."""
        if count > self._positions:
            self._turned, self._positions = self._rope.tables(2 * count + _POSITIONS), 2 * count + _POSITIONS
        return self._turned

    def _ahead(self, x: Tensor) -> HeadOutput:
        if self._norm is None:
            return HeadOutput(x, self._output(x))
        logits = self._output(x, self._norm, self.config.norm_eps)
        if self.config.norm_output and isinstance(self._stack, NativeHead):
            x = self._stack.normed(x)
        return HeadOutput(x, logits)


class _Own:
    """What one sequence's chains are written with."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.words = TextVocabulary(lexicon)
        self._head: structs.HeadStruct | None = None
        self._ids = torch.empty(0)  # that it points to

    def head(self, stack: NativeHead) -> structs.HeadStruct:
        if self._head is None or self.words.changed:
            output, self._ids = self.words.output()
            self._head = stack.writing(output, self._ids)
        return self._head


class _Trails:
    """What each row of a tree sees of the rows before it, as the kernels read it."""

    def __init__(self, lengths: Seq[int], trails: Tensor) -> None:
        """`trails` [b, rows, depth]: ancestors among the drafted rows of each sequence."""
        self._seen = (ctypes.c_int64 * len(lengths))(*lengths)
        starts = torch.tensor(lengths, dtype=torch.int32).view(-1, 1, 1)
        self._places = (trails + starts).to(torch.int32).contiguous()

    def into(self, head_inputs: structs.HeadInputs) -> None:
        head_inputs.seen = ctypes.addressof(self._seen)
        head_inputs.trails, head_inputs.length = self._places.data_ptr(), self._places.shape[2]


def _stacked(norms: torch.nn.Module) -> Tensor:
    return torch.stack([weight.detach() for weight in norms.parameters()])


def _sizes(head: EagleHead) -> StackConfig:
    config = head.config
    return StackConfig(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps)


def _layer(layer: EagleLayer, bits: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    norm = None if layer.bare else layer.hidden_norm if layer.joins else layer.input_layernorm
    return Layer(
        attention_norm=None if norm is None else norm.weight.detach(),  # type: ignore[arg-type]
        qkv=Packed([quantise(part.weight, bits) for part in qkv], [part.bias for part in qkv]),
        output=pack(attention.o_proj.weight, bits),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=Packed([quantise(part.weight, bits) for part in (mlp.gate_proj, mlp.up_proj)], [None, None]),
        down=pack(mlp.down_proj.weight, bits),
    )


def _rows(counts: Seq[int]) -> list[slice]:
    out, start = [], 0
    for count in counts:
        out.append(slice(start, start + count))
        start += count
    return out
