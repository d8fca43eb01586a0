"""Any causal model of transformers: OPT, GPT-2, Gemma 3, Phi, Falcon, GPT-NeoX, Bloom, ...

A model runs in one of two ways; a probe at construction finds out which one gives the model's own logits.

*Together*: all short feeds in one padded pass, trees included. This needs a model that makes its masks through the mask
interface of transformers: ours takes the model's own rule (causal, sliding window, chunks), asks it about the tokens'
positions instead of their places, and takes away what trees and padding hide.

*Alone*: a model that makes masks or positions by itself (ALiBi, older code) gets one chain at a time and nothing but a
cache. A tree is run branch by branch.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from outrider.core.draft import EMPTY, ROOT, Draft
from outrider.core.errors import OutriderError
from outrider.models.base import Feed, Output, check_context

FEW = 32  # new tokens up to which feeds share a padded pass: the padding of short feeds costs little
FIRST = 64  # tokens that a new buffer holds; it doubles when it is full
UNBOUNDED = 1 << 20  # the context of a model that has no longest sequence


class TransformersModel:
    def __init__(self, model: PreTrainedModel, memory: int = 1 << 30) -> None:
        """`memory`: bytes that keys and values may take. `model` itself is left as it is; its weights are shared."""
        _refuse(model)
        self._source, self._memory = model, memory
        self._model = _twin(model)
        config = model.config.get_text_config(decoder=True)
        self.num_layers: int = config.num_hidden_layers
        self.context = _context(config)
        self.dtype, self.device = model.dtype, model.device
        self._takes_keep = "logits_to_keep" in _arguments(model)
        self._slots: dict[int, _KeptStates] = {}
        probe = _Probe(self._model, model.device)
        self.vocab_size = probe.vocab_size
        self._together = _fits_together(model) and self._passes(probe, _attention(model))
        if not self._together and not self._passes(probe, model.config._attn_implementation):
            raise OutriderError(
                f"{type(model).__name__} gives other logits when it goes on from a cache than when it sees all tokens "
                f"at once ({probe.failure}); use another model"
            )
        self.capacity = memory // (2 * probe.bytes_per_token)  # a buffer that doubles may be half empty

    def length(self, id: int) -> int:
        slot = self._slots.get(id)
        return slot.length if slot else 0

    @torch.inference_mode()
    def crop(self, id: int, length: int, path: Sequence[int] = ()) -> None:
        if id in self._slots:
            self._slots[id].crop(length, path)

    def free(self, id: int) -> None:
        self._slots.pop(id, None)

    def first(self, layers: int) -> TransformersModel:
        model = _twin(self._source)
        parent, name = _decoder_layers(model)
        setattr(parent, name, getattr(parent, name)[:layers])
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
        config.num_hidden_layers = layers
        try:
            return TransformersModel(model, self._memory)
        except RuntimeError as error:  # weights that hold something for every layer, as in Gemma 3n
            raise OutriderError(f"{type(model).__name__} does not run on its first {layers} layers alone") from error

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[Output]:
        check_context(self, feeds)
        outputs: dict[int, Output] = {}
        for group in self._groups(feeds):
            run = self._run_together if self._together else self._run_alone
            outputs.update(zip((feed.id for feed in group), run(group, layers), strict=True))
            for feed in group:
                self._slots[feed.id].length += len(feed.tokens) + len(feed.draft)
        return [outputs[feed.id] for feed in feeds]

    def _groups(self, feeds: Sequence[Feed]) -> list[list[Feed]]:
        """Which feeds share a pass: short ones do, where padding costs little."""
        few: list[Feed] = []
        many: list[Feed] = []
        for feed in feeds:
            (few if self._together and len(feed.tokens) + len(feed.draft) <= FEW else many).append(feed)
        return [*filter(None, [few]), *([feed] for feed in many)]

    def _run_together(self, feeds: Sequence[Feed], layers: Sequence[int]) -> list[Output]:
        rows = [self._row(feed) for feed in feeds]
        logits, hidden = self._pass(rows, max(1 + len(feed.draft) for feed in feeds), layers)
        outputs = []
        for index, (feed, row) in enumerate(zip(feeds, rows, strict=True)):
            states = None if hidden is None else hidden[index, -len(row.tokens) :]
            outputs.append(Output(logits[index, -1 - len(feed.draft) :], states))
        return outputs

    def _run_alone(self, feeds: Sequence[Feed], layers: Sequence[int]) -> list[Output]:
        (feed,) = feeds
        begin = self.length(feed.id)
        logits = torch.empty(1 + len(feed.draft), self.vocab_size, device=self.device)
        states: list[tuple[Sequence[int], Tensor]] = []  # places and their hidden states
        for chain in _chains(feed.draft):
            row = self._row(feed, chain)
            some, hidden = self._pass([row], len(chain), layers)
            logits[[1 + node for node in chain]] = some[0]  # the root's row is 0
            if hidden is not None:
                states.append((row.places, hidden[0]))
        return [Output(logits, _gather(states, begin, len(feed.tokens) + len(feed.draft)) if layers else None)]

    def _row(self, feed: Feed, chain: Sequence[int] | None = None) -> _Row:
        """The whole feed, or that chain of its draft; a chain that begins at the root brings the committed tokens."""
        slot = self._slots.setdefault(feed.id, _KeptStates())
        begin, draft = slot.length, feed.draft
        base = begin + len(feed.tokens)  # the place of the draft's first node
        if chain is None:
            tokens = [*feed.tokens, *draft.tokens]
            return _Row(slot, begin, tokens, range(begin, begin + len(tokens)), draft)
        nodes = [node for node in chain if node != ROOT]
        tokens, places = [draft.tokens[node] for node in nodes], [base + node for node in nodes]
        if chain[0] == ROOT:
            return _Row(slot, begin, [*feed.tokens, *tokens], _as_range([*range(begin, base), *places]))
        trunk = [base + node for node in draft.path(draft.parents[nodes[0]])]
        return _Row(slot, base, tokens, _as_range(places), trunk=trunk)

    def _pass(self, rows: Sequence[_Row], keep: int, layers: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits [rows, keep, vocab] of the last tokens, hidden states [rows, tokens, layers, hidden] of all."""
        width = max(len(row.tokens) for row in rows)
        tokens = torch.tensor([[0] * (width - len(row.tokens)) + row.tokens for row in rows], device=self.device)
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "past_key_values": Cache(layers=[_PassLayer(index, rows) for index in range(self.num_layers)]),
            "use_cache": True,
        }
        if self._takes_keep:
            arguments["logits_to_keep"] = keep
        sight = _Sight(rows, width, self.device) if self._together else None
        if sight is not None:
            arguments["position_ids"] = sight.queries[:, 0, :, 0]
        token = _SIGHT.set(sight)
        try:
            with self._tapped(layers) as taps:
                logits = self._model(**arguments).logits[:, -keep:].float()
        finally:
            _SIGHT.reset(token)
        return logits, torch.stack([taps[layer] for layer in layers], 2) if layers else None

    @contextmanager
    def _tapped(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """What the layers give out during a pass, [rows, tokens, hidden] each."""
        taps: dict[int, Tensor] = {}
        handles = []
        if layers:
            parent, name = _decoder_layers(self._model)
            handles = [getattr(parent, name)[layer].register_forward_hook(_tap(taps, layer)) for layer in layers]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    def _passes(self, probe: _Probe, attention: str | None) -> bool:
        """Whether the model, run in this way, gives its own logits."""
        self._together = attention in (SDPA, EAGER)
        self._model.config._attn_implementation = attention
        try:
            return probe.passes(self.forward, self._slots)
        finally:
            self._slots.clear()


def _refuse(model: PreTrainedModel) -> None:
    """An OutriderError for a model that can be seen to be of no use."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise OutriderError(f"{name} is an encoder-decoder model; Outrider needs a decoder-only causal model")
    if not model.can_generate():
        raise OutriderError(f"{name} has no output matrix to write tokens with; load it with AutoModelForCausalLM")
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if model._is_stateful or any(not issubclass(kind, DynamicLayer) for kind in kinds):
        raise OutriderError(
            f"{name} keeps a recurrent state that cannot forget refused tokens; use an attention-only model"
        )
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        raise OutriderError(f"{name} caches more than keys and values, which cannot be cropped; use another model")
    if "past_key_values" not in _arguments(model):
        raise OutriderError(f"{name} takes no cache; use another model")


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under modules and a config of its own: what is set there does not show in the caller's model."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared).eval()
    twin.config.return_dict = True
    return twin


def _arguments(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _context(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or UNBOUNDED
    if rope.get("rope_type") == "longrope":
        # past this length it turns all keys by other angles, the cached ones too: what is in the cache would be wrong
        return int(min(longest, rope["original_max_position_embeddings"]))
    return int(longest)


def _decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module that holds the list of decoder layers, and the list's name in it."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    raise OutriderError(f"{type(model).__name__} has no list of {count} layers, so single layers cannot be reached")


def _tap(taps: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        taps[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def _chains(draft: Draft) -> list[list[int]]:
    """The tree cut into chains. The first begins with the root; each other goes on from a node of one before it."""
    chains = [[ROOT]]
    for node, parent in enumerate(draft.parents):
        chain = next((chain for chain in chains if chain[-1] == parent), None)
        if chain is None:
            chains.append([node])
        else:
            chain.append(node)
    return chains


def _gather(states: Sequence[tuple[Sequence[int], Tensor]], begin: int, count: int) -> Tensor:
    """[count, layers, hidden] in the order of the places, of which the first is `begin`."""
    gathered = states[0][1].new_empty(count, *states[0][1].shape[1:])
    for places, hidden in states:
        gathered[[place - begin for place in places]] = hidden
    return gathered


# Keys and values


class _Buffer:
    """One layer's keys, or values, of one sequence: [heads, size, dim], growing."""

    def __init__(self, like: Tensor) -> None:
        self.data = like.new_zeros(like.shape[0], FIRST, like.shape[2])

    def reserve(self, size: int) -> None:
        if size > self.data.shape[1]:
            heads, old, dim = self.data.shape
            data = self.data.new_zeros(heads, max(size, 2 * old), dim)
            data[:, :old] = self.data
            self.data = data

    def move(self, sources: Tensor, start: int) -> None:
        # indexing copies before it writes, so a move onto a place that is still to be read is safe
        self.data[:, start : start + len(sources)] = self.data[:, sources.to(self.data.device)]


@dataclass(eq=False)
class _KeptStates:
    """All that is kept of one sequence. Layers may differ in heads and sizes, keys and values too."""

    length: int = 0  # tokens and nodes
    buffers: dict[tuple[int, str], _Buffer] = field(default_factory=dict)

    def crop(self, length: int, path: Sequence[int]) -> None:
        if any(node != place for place, node in enumerate(path)):
            sources = torch.tensor(path) + length
            for buffer in self.buffers.values():
                buffer.move(sources, length)
        self.length = min(self.length, length + len(path))

    @property
    def bytes_per_token(self) -> int:
        return sum(b.data.shape[0] * b.data.shape[2] * b.data.itemsize for b in self.buffers.values())


@dataclass(frozen=True, eq=False)
class _Row:
    """One sequence's part of a pass."""

    slot: _KeptStates
    begin: int  # the tokens go on from the first `begin` places of the slot
    tokens: list[int]
    places: Sequence[int]  # where they go
    draft: Draft = EMPTY  # the tree that the last of them are; otherwise they are a chain
    trunk: Sequence[int] = ()  # places of nodes that they go on from as well

    @property
    def seen(self) -> int:
        """How many keys there are when the pass begins."""
        return self.begin + len(self.trunk)

    def extend(self, index: int, kind: str, new: Tensor) -> Tensor:
        """Keep a layer's new keys or values [heads, tokens, dim]; all that the tokens may see, [heads, keys, dim]."""
        buffer = self.slot.buffers.get((index, kind))
        if buffer is None:
            buffer = self.slot.buffers[index, kind] = _Buffer(new)
        buffer.reserve(self.places[-1] + 1)
        if isinstance(self.places, range) and self.places.start == self.begin:
            buffer.data[:, self.begin : self.places.stop] = new
            return buffer.data[:, : self.places.stop]
        buffer.data[:, list(self.places)] = new
        return torch.cat([buffer.data[:, : self.begin], buffer.data[:, list(self.trunk)], new], 1)


def _as_range(places: list[int]) -> Sequence[int]:
    """As a range, where the places lie side by side: a view is cheaper than a copy."""
    side_by_side = range(places[0], places[0] + len(places))
    return side_by_side if places == list(side_by_side) else places


class _PassLayer(DynamicLayer):
    """What a layer of the model takes for its cache during a pass. It keeps all tokens, whatever the layer's window."""

    def __init__(self, index: int, rows: Sequence[_Row]) -> None:
        super().__init__()
        self._index, self._rows = index, rows
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._join("keys", key_states), self._join("values", value_states)
        return self.keys, self.values

    def _join(self, kind: str, states: Tensor) -> Tensor:
        """[rows, heads, new, dim], padded on the left -> [rows, heads, seen, dim], padded on the right."""
        parts = [row.extend(self._index, kind, states[i, :, -len(row.tokens) :]) for i, row in enumerate(self._rows)]
        if len(parts) == 1:
            return parts[0].unsqueeze(0)
        # zeros, not empty: masked attention multiplies the padding by 0, and 0 * nan is nan
        joined = states.new_zeros(len(parts), states.shape[1], max(part.shape[1] for part in parts), states.shape[3])
        for i, part in enumerate(parts):
            joined[i, :, : part.shape[1]] = part
        return joined

    def get_seq_length(self) -> int:
        return max(row.seen for row in self._rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(row.seen + len(row.tokens) for row in self._rows), 0


# Attention


class _Sight:
    """Which keys each query of one padded pass may see, before the model's own rule: their positions, and a mask."""

    def __init__(self, rows: Sequence[_Row], width: int, device: torch.device) -> None:
        count, longest = len(rows), max(row.begin + len(row.tokens) for row in rows)
        queries = torch.zeros(count, 1, width, 1, dtype=torch.long)
        keys = torch.zeros(count, 1, 1, longest, dtype=torch.long)
        visible = torch.zeros(count, 1, width, longest, dtype=torch.bool)
        for i, row in enumerate(rows):
            new = len(row.tokens)
            base, end = row.begin + new - len(row.draft), row.begin + new  # the nodes' first place, and past their last
            positions = torch.tensor([*range(row.begin, base), *(base - 1 + depth for depth in row.draft.depths())])
            queries[i, 0, -new:, 0] = positions
            keys[i, 0, 0, : row.begin] = torch.arange(row.begin)
            keys[i, 0, 0, row.begin : end] = positions
            visible[i, 0, -new:, :base] = True  # the model's own rule is causal
            visible[i, 0, width - len(row.draft) :, base:end] = row.draft.mask()
        self.rows = torch.arange(count, device=device).view(-1, 1, 1, 1)
        self.heads = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        self.queries, self.keys, self.visible = queries.to(device), keys.to(device), visible.to(device)


_SIGHT: ContextVar[_Sight | None] = ContextVar("sight", default=None)


def _mask(*, mask_function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
    """The mask that a model asks for, [rows, 1, queries, keys]: 0 or a very low number to add to the scores."""
    sight = _SIGHT.get()
    assert sight is not None
    allowed = sight.visible & mask_function(sight.rows, sight.heads, sight.queries, sight.keys)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The plain attention of the model's own file."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


SDPA, EAGER = "outrider_sdpa", "outrider_eager"
AttentionInterface.register(SDPA, sdpa_attention_forward)
AttentionInterface.register(EAGER, _eager)
AttentionMaskInterface.register(SDPA, _mask)
AttentionMaskInterface.register(EAGER, _mask)


def _fits_together(model: PreTrainedModel) -> bool:
    return bool(model._supports_attention_backend) and "position_ids" in _arguments(model)


def _attention(model: PreTrainedModel) -> str:
    """Ours that computes what the caller's does."""
    return EAGER if model.config._attn_implementation == "eager" or not model._supports_sdpa else SDPA


class _Probe:
    """A few tokens with two branches, in three chunks and beside a second sequence, against one plain forward."""

    HEAD, BRANCHES = (3, 4, 5, 6), ((7, 8), (9, 10))
    TREE = Draft((7, 9, 8, 10), (ROOT, ROOT, 0, 1))
    ROWS = ((0, 3), (0, 4), (1, 4), (0, 5), (1, 5))  # where the plain logits of the root and of each node stand

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        vocab = model.config.get_text_config(decoder=True).vocab_size
        self._fold: Callable[[Sequence[int]], list[int]] = lambda tokens: [token % vocab for token in tokens]
        whole = torch.tensor([self._fold(self.HEAD + branch) for branch in self.BRANCHES], device=device)
        with torch.inference_mode():
            logits = model(input_ids=whole, use_cache=False).logits.float()
        self._plain = torch.stack([logits[row, place] for row, place in self.ROWS])  # [1 + nodes, vocab]
        head = logits[:, : len(self.HEAD)]
        self._leak = float((head[0] - head[1]).abs().max())  # a causal model does not see the branches from above them
        # sums in another order differ by rounding; a wrong mask or a wrong position differs by much more
        share = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1
        self._tolerance = share * float(self._plain.abs().max())
        self.vocab_size = logits.shape[-1]
        self.bytes_per_token, self.failure = 1, ""

    def passes(self, forward: Callable[[Sequence[Feed]], list[Output]], slots: dict[int, _KeptStates]) -> bool:
        tree = Draft(tuple(self._fold(self.TREE.tokens)), self.TREE.parents)
        head = self._fold(self.HEAD)
        try:
            forward([Feed(0, head[:1])])
            forward([Feed(0, head[1:3])])
            outputs = forward([Feed(0, head[3:], tree), Feed(1, head, tree)])
        except Exception as error:  # a model may refuse what it is given in any way it likes
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            return False
        self.bytes_per_token = slots[0].bytes_per_token
        furthest = max(self._leak, *(float((output.logits - self._plain).abs().max()) for output in outputs))
        self.failure = f"they differ by {furthest:.2g}"
        return furthest <= self._tolerance
