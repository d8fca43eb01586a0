"""An EAGLE-3 head in the kernels: its layers, norms and matrices, so that a whole chain or tree is one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.eagle.runner import Grown, ShownStates
from outrider.drafters.eagle.tree import TreeGrowth
from outrider.models.native import structs
from outrider.models.native.library import library
from outrider.models.native.packed import Packed, use_torch_threads
from outrider.models.native.stack import BYTES, NativeStack, pointer
from outrider.models.paged_cache import PagedSlot
from outrider.models.stack import Layer, StackConfig


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """What a head has beside its layers; norms are float32. A chain or tree needs output and embedding packed."""

    fc: Packed
    output: Packed | None  # its first rows are those of `ids`
    embedding: Packed | None
    ids: Tensor  # the tokens that it can write
    norm: Tensor
    embedding_norm: Tensor
    input_norms: Tensor | None  # [blocks, hidden]
    joined_norm: Tensor | None  # [blocks * hidden]
    norm_residual: bool
    norm_output: bool

    def struct(self, hidden: int) -> structs.HeadStruct:
        return structs.HeadStruct(
            fc=self.fc.joint,
            output=structs.JoinedMatrices() if self.output is None else self.output.joint,
            embedding=None if self.embedding is None else ctypes.addressof(self.embedding.joint.parts[0]),
            input_norms=_address(self.input_norms),
            joined_norm=_address(self.joined_norm),
            embedding_norm=_address(self.embedding_norm),
            norm=_address(self.norm),
            ids=_address(self.ids),
            tokens=len(self.ids),
            blocks=self.fc.inputs // hidden,
            norm_residual=self.norm_residual,
            norm_output=self.norm_output,
        )


@dataclass(frozen=True, eq=False)
class TakenSpan:
    """What is taken in of one sequence."""

    slot: PagedSlot
    start: int  # where its tokens begin
    tokens: Sequence[int]
    shown: Sequence[ShownStates]  # the target's states before them


class NativeHead(NativeStack):
    def __init__(self, config: StackConfig, layers: Sequence[Layer], weights: HeadWeights) -> None:
        super().__init__(config, layers, weights.fc.inputs)
        self._weights = weights  # what the structure points into
        self._head = weights.struct(config.hidden_size)
        kernels = library()
        self._states, self._normed = kernels.outrider_states, kernels.outrider_normed
        self._trees, self._share = kernels.outrider_trees, kernels["outrider_threads"]
        self._chain, self._share.argtypes = kernels["outrider_chain"], [ctypes.c_int64]
        places, number = ctypes.c_void_p, ctypes.c_int64
        self._chain.argtypes = [*[places] * 8, number, ctypes.c_double, *[places] * 3]
        self._addresses = tuple(map(ctypes.addressof, (self.shape, self.structs, self._head)))
        self._turns: tuple[Tensor, Tensor] | None = None  # of the last chain
        self._turned = 0, 0  # where they are
        self._most, self._written, self._stated = 0, (ctypes.c_int64 * 0)(), (ctypes.c_float * 0)()

    @property
    def chains(self) -> bool:
        """Whether it has all that a chain or a tree needs."""
        return self._weights.output is not None and self._weights.embedding is not None

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """Its norms outside the layers."""
        weights = self._weights
        return weights.norm, weights.embedding_norm, weights.input_norms, weights.joined_norm

    def states(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] what the layers read of the target's own, [rows, blocks, hidden]."""
        rows = len(hidden)
        x = torch.empty(rows, self.config.hidden_size)
        hidden = hidden.float()
        work = self.workspace(rows, 0)
        use_torch_threads()
        self._states(
            ctypes.byref(self.shape),
            ctypes.byref(self._head),
            _addresses(_places([(hidden, range(rows))])),
            ctypes.c_int64(rows),
            pointer(x),
            ctypes.byref(work.struct),
        )
        return x

    def normed(self, x: Tensor) -> Tensor:
        """The last norm of x [rows, hidden], which is overwritten."""
        self._normed(ctypes.byref(self.shape), ctypes.byref(self._head), ctypes.c_int64(len(x)), pointer(x))
        return x

    def writing(self, output: structs.JoinedMatrices, ids: Tensor) -> structs.HeadStruct:
        """The same head with another output matrix, whose rows are those of the tokens `ids`; both must be kept."""
        head = structs.HeadStruct.from_buffer_copy(self._head)
        head.output, head.ids, head.tokens = output, ids.data_ptr(), len(ids)
        return head

    def chain(
        self,
        slot: PagedSlot,
        start: int,
        tokens: Sequence[int],
        shown: Sequence[ShownStates],
        turns: tuple[Tensor, Tensor],
        length: int,
        stop: float,
        head: structs.HeadStruct | None = None,
    ) -> list[tuple[int, float]]:
        """Take in tokens that begin at `start`, each with the target's states before it, and write up to `length` more
        with their probabilities, until their product is below `stop`. `turns`: cos and sin of all positions;
        `head`: one of `writing`."""
        rows, threads = len(tokens), torch.get_num_threads()
        end = start + rows + length
        assert end - 1 <= slot.size
        work = self.workspace(rows, end, threads)
        if length > self._most:
            self._most, self._written, self._stated = length, (ctypes.c_int64 * length)(), (ctypes.c_float * length)()
        if self._turns is not turns:
            self._turns, self._turned = turns, (turns[0].data_ptr(), turns[1].data_ptr())
        shown = [(hidden if hidden.dtype == torch.float32 else hidden.float(), chosen) for hidden, chosen in shown]
        places = _places(shown)
        numbers = array("q", [*tokens, *places, *self.numbers_of(slot, start, 0, rows)])
        at = numbers.buffer_info()[0]
        after = at + BYTES * (rows + len(places))
        self._share(threads)
        count = self._chain(
            self._addresses[0],
            self._addresses[1],
            self._addresses[2] if head is None else ctypes.addressof(head),
            after,
            at,
            at + BYTES * rows,
            *self._turned,
            length,
            stop,
            self._written,
            self._stated,
            ctypes.addressof(work.struct),
        )
        if count < 0:
            raise IndexError("a token that the embedding does not have")
        return list(zip(self._written[:count], self._stated[:count], strict=True))

    def trees(
        self,
        spans: Sequence[TakenSpan],
        turns: tuple[Tensor, Tensor],
        growth: TreeGrowth,
        sizes: Sequence[int],
        head: structs.HeadStruct | None = None,
    ) -> list[Grown]:
        """Take in the tokens of each span, as `chain` does, and let a tree of up to `sizes` nodes grow after it: those
        of `tree.grow`."""
        rows, most, places, longest = 0, max(sizes), [], 0
        for span, size in zip(spans, sizes, strict=True):
            end = span.start + len(span.tokens) + growth.rows(size)
            assert end <= span.slot.size
            places.append(self.place(span.slot, span.start, slice(rows, rows + len(span.tokens))))
            rows, longest = rows + len(span.tokens), max(longest, end)
        work = self.workspace(max(rows, len(spans) * growth.width), longest)
        shown = [(hidden.float(), chosen) for span in spans for hidden, chosen in span.shown]
        written, parents = ((ctypes.c_int64 * (len(spans) * most))() for _ in range(2))
        stated, counts = (ctypes.c_float * (len(spans) * most))(), (ctypes.c_int64 * len(spans))()
        use_torch_threads()
        failed = self._trees(
            ctypes.byref(self.shape),
            self.structs,
            ctypes.byref(self._head if head is None else head),
            (structs.SpanStruct * len(spans))(*places),
            ctypes.c_int64(len(spans)),
            (ctypes.c_int64 * rows)(*(token for span in spans for token in span.tokens)),
            _addresses(_places(shown)),
            pointer(turns[0]),
            pointer(turns[1]),
            ctypes.byref(structs.GrowthStruct(**vars(growth))),
            (ctypes.c_int64 * len(sizes))(*sizes),
            ctypes.c_int64(most),
            written,
            parents,
            stated,
            counts,
            ctypes.byref(work.struct),
        )
        if failed:
            raise IndexError("a token that the embedding does not have")
        own = (slice(place * most, place * most + count) for place, count in enumerate(counts))
        return [Grown(written[each], parents[each], stated[each]) for each in own]


def _places(shown: Sequence[ShownStates]) -> list[int]:
    """Where each state of each row lies, [rows][blocks]; float32, each without gaps."""
    places: list[int] = []
    for hidden, rows in shown:
        assert hidden.dtype == torch.float32
        base, (row_size, block_size, gap) = hidden.data_ptr(), hidden.stride()
        assert gap == 1
        blocks = [base + 4 * block * block_size for block in range(hidden.shape[1])]
        places += [block + 4 * row * row_size for row in rows for block in blocks]
    return places


def _addresses(places: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(places))(*places)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
