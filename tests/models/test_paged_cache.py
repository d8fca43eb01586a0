"""Pages of a CPU: whatever sequences share, each reads its own text, and what is kept stays within the budget."""

import ctypes
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outrider.models.paged_cache import SIZE, PagedCache
from outrider.models.prefix_file import PrefixFile

LAYERS, HEADS, DIM = 2, 3, 4
PAGE_BYTES = 2 * LAYERS * HEADS * DIM * 4 * SIZE


def cache(pages=8):
    return PagedCache(LAYERS, HEADS, DIM, pages * PAGE_BYTES)


def mark(tokens):
    """What a row of these tokens would hold: it depends on all of them, as keys and values do."""
    return float(hash(tuple(tokens)) % (1 << 20))


def write(cache, id, text, count, nodes=()):
    """Feed the next `count` tokens of the text, and nodes: what each node's row is to hold."""
    seen = cache.length(id)
    assert seen + count <= len(text)
    slot = cache.extend(id, count + len(nodes))
    marks = [*(mark(text[: seen + i + 1]) for i in range(count)), *nodes]
    for place, value in enumerate(marks, seen):
        row(slot, place)[:] = [value] * DIM


def row(slot, place, layer=LAYERS - 1, head=HEADS - 1, values=1):
    """A row as the kernels find it: by the address of its page, and the distances from layer to layer and so on."""
    offset = (((layer * HEADS + head) * 2 + values) * slot.values + place % SIZE * DIM) * 4
    address = ctypes.cast(slot.address, ctypes.POINTER(ctypes.c_int64))[place // SIZE]
    return (ctypes.c_float * DIM).from_address(address + offset)


def read(cache, id):
    slot = cache.extend(id, 0)
    return [row(slot, place)[0] for place in range(slot.length)]


def expected(text, length):
    return [mark(text[: i + 1]) for i in range(length)]


def text(*parts, size=SIZE):
    """Tokens: a page's worth of each part."""
    return [part * 1000 + i for part in parts for i in range(size)]


def finished(cache, id, tokens):
    write(cache, id, tokens, len(tokens) - cache.length(id))
    cache.name(id, tokens)
    cache.free(id)


class TestSharing:
    def test_a_prefix_of_a_running_sequence_is_taken(self):
        held, first = cache(), text(1, 2, 3)
        write(held, 0, first, len(first))
        held.name(0, first)
        other = [*text(1, 2), *text(9)]
        assert held.begin(1, other) == 2 * SIZE
        assert read(held, 1) == expected(other, 2 * SIZE)
        assert held._holders[1].pages == held._holders[0].pages[:2]

    def test_a_prefix_of_an_ended_sequence_is_taken(self):
        held, first = cache(), text(1, 2, 3)
        finished(held, 0, first)
        assert held.begin(1, [*first, 7]) == 3 * SIZE
        assert read(held, 1) == expected(first, 3 * SIZE)

    def test_a_prefix_of_another_tenant_is_not(self):
        held, first = cache(), text(1, 2, 3)
        write(held, 0, first, len(first))
        held.name(0, first, "one")
        assert held.begin(1, [*first, 7], "other") == held.begin(2, [*first, 7]) == 0
        assert held.begin(3, [*first, 7], "one") == 3 * SIZE

    def test_never_all_of_it(self):
        held, first = cache(), text(1, 2)
        finished(held, 0, first)
        assert held.begin(1, first) == SIZE
        assert held.begin(2, first[:SIZE]) == 0

    def test_only_committed_tokens_are_shared(self):
        held, first = cache(), text(1, 2)
        write(held, 0, first, SIZE + 4, nodes=[5.0] * (SIZE - 4))
        held.name(0, first[: SIZE + 4])
        assert held.begin(1, [*first, 7]) == SIZE

    def test_the_same_page_after_another_beginning_is_another_page(self):
        held = cache()
        finished(held, 0, text(1, 2))
        assert held.begin(1, text(2, 2, 2)) == 0
        assert held.begin(2, text(3, 2, 2)) == 0

    def test_a_sequence_takes_more_of_its_prefix_as_another_computes_it(self):
        held, first = cache(), text(1, 2, 3)
        write(held, 0, first, SIZE)
        held.name(0, first)
        assert held.begin(1, first) == SIZE
        write(held, 0, first, SIZE)
        held.name(0, first)
        assert held.begin(1, first) == SIZE
        assert read(held, 1) == expected(first, 2 * SIZE)

    def test_in_the_middle_of_a_page_nothing_is_taken(self):
        held, first = cache(), text(1, 2, 3)
        finished(held, 0, first)
        held._known, known = {}, held._known
        write(held, 1, first, 5)
        held._known = known
        assert held.begin(1, first) == 0
        assert read(held, 1) == expected(first, 5)

    def test_after_a_whole_page_of_its_own_that_has_no_name_nothing_is_taken(self):
        held, first = cache(), text(1, 2, 3)
        finished(held, 0, first)
        write(held, 1, first, SIZE)
        assert held.begin(1, first) == 0
        assert read(held, 1) == expected(first, SIZE)

    def test_a_page_that_was_computed_twice_is_kept_once(self):
        held, first = cache(), text(1, 2)
        for id in (0, 1):
            write(held, id, first, len(first))
        for id in (0, 1):
            held.name(id, first)
        assert held._holders[0].pages == held._holders[1].pages
        assert held.free_count == 8 - 2
        assert read(held, 1) == expected(first, len(first))

    def test_what_a_sequence_writes_after_a_shared_prefix_is_its_own(self):
        held, first = cache(), text(1, 2)
        finished(held, 0, first)
        texts = {id: [*first, *text(id)] for id in (3, 4)}
        for id, own in texts.items():
            held.begin(id, own)
            write(held, id, own, SIZE - 3)
        assert [read(held, id) for id in texts] == [expected(own, 3 * SIZE - 3) for own in texts.values()]


class TestEviction:
    def test_the_longest_unused_goes_first(self):
        held = cache(4)
        for part in (1, 2, 3, 4):
            finished(held, part, text(part))
        held.begin(9, text(1, 5))
        held.free(9)  # used just now
        finished(held, 5, text(5))
        assert [held.begin(10 + part, text(part, 5)) for part in (1, 2, 3, 4)] == [SIZE, 0, SIZE, SIZE]

    def test_the_end_of_a_text_goes_before_its_beginning(self):
        held, first = cache(4), text(1, 2, 3, 4)
        finished(held, 0, first)
        finished(held, 1, text(7, 8))
        assert held.begin(2, [*first, 1]) == 2 * SIZE
        assert read(held, 2) == expected(first, 2 * SIZE)

    def test_what_a_sequence_holds_is_never_evicted(self):
        held, first = cache(4), text(1, 2)
        finished(held, 0, first)
        held.begin(1, [*first, 5])
        for part in range(10, 20):
            finished(held, part, text(part, part + 100))
        assert read(held, 1) == expected(first, 2 * SIZE)

    def test_a_running_sequence_gets_what_it_needs_beyond_the_budget(self):
        """The scheduler decides what runs; a draft model's cache may be larger than the target's."""
        held, first = cache(2), text(*range(6))
        write(held, 0, first, len(first))
        assert read(held, 0) == expected(first, len(first))

    def test_memory_is_taken_as_it_is_needed_and_no_more_than_the_budget(self):
        held = PagedCache(30, 3, 64, 1 << 30)
        assert held._blocks == []
        held.extend(0, 1)
        assert 0 < held._blocks[0].nbytes <= 32 << 20
        held = cache(3)
        for part in range(20):
            finished(held, part, text(part, part + 100))
        assert sum(block.nbytes for block in held._blocks) == 3 * PAGE_BYTES


def test_pages_that_depend_on_the_token_after_them():
    """As those of an EAGLE head do: they are shared once that token is known, by texts that have it too."""
    made, tokens = PagedCache(LAYERS, HEADS, DIM, 8 * PAGE_BYTES, ahead=1), text(1, 2)
    write(made, 0, tokens, SIZE)
    made.name(0, tokens[:SIZE])
    assert made.begin(1, tokens) == 0
    made.name(0, tokens[: SIZE + 1])
    assert made.begin(2, tokens) == SIZE
    assert made.begin(3, [*tokens[:SIZE], 7, 8]) == 0


class TestCrop:
    def test_a_branch_is_moved_together(self):
        held, own = cache(), text(1)
        write(held, 0, own, SIZE - 2, nodes=[1.0, 2.0, 3.0, 4.0, 5.0])  # over the end of a page
        held.crop(0, SIZE - 2, [0, 2, 4])
        assert read(held, 0) == [*expected(own, SIZE - 2), 1.0, 3.0, 5.0]

    def test_the_keys_of_a_head_lie_side_by_side(self):
        """So a long text is read in runs, not in pieces of one page."""
        held = cache()
        slot = held.extend(0, 3 * SIZE)
        addresses = ctypes.cast(slot.address, ctypes.POINTER(ctypes.c_int64))[:3]
        assert [place - addresses[0] for place in addresses] == [0, 4 * SIZE * DIM, 8 * SIZE * DIM]

    def test_all_of_a_row_is_moved(self):
        held = cache()
        slot = held.extend(0, 4)
        with torch.inference_mode():
            page = held.page(slot, 0).view(torch.float32).view(LAYERS, HEADS, 2, SIZE, DIM)
            page.copy_(torch.arange(SIZE).view(SIZE, 1).expand(page.shape))
        held.crop(0, 1, [1])
        places = [(layer, head, values) for layer in range(LAYERS) for head in range(HEADS) for values in (0, 1)]
        assert [list(row(slot, 1, *place)) for place in places] == [[2.0] * DIM] * len(places)

    @pytest.mark.parametrize("length", [0, 5, SIZE, SIZE + 5, 2 * SIZE])
    def test_back_into_what_others_share_leaves_theirs_as_it_is(self, length):
        held, first = cache(), text(1, 2, 3)
        write(held, 0, first, len(first))
        held.name(0, first)
        held.begin(1, first)
        held.crop(1, length)
        own = [*first[:length], *text(8, 9)]
        write(held, 1, own, 40)
        held.name(1, own)
        assert read(held, 1) == expected(own, length + 40)
        assert read(held, 0) == expected(first, len(first))
        held.free(0)
        assert held.begin(2, [*own[: length + 40], 1]) == (length + 40) // SIZE * SIZE

    def test_a_crop_to_more_than_there_is_keeps_all(self):
        held = cache()
        write(held, 0, text(1), 2)
        held.crop(0, 9)
        held.crop(7, 3)  # of nobody
        assert held.length(0) == 2


def test_what_is_freed_is_gone():
    held = cache()
    write(held, 0, text(1), 2)
    held.free(0)
    held.free(0)
    assert (held.length(0), held.free_count) == (0, 8)


def test_a_long_sequence_has_a_longer_table():
    held, own = cache(100), text(*range(70))
    write(held, 0, own, len(own))
    assert read(held, 0) == expected(own, len(own))


def test_its_price_per_token():
    assert cache().bytes_per_token == 2 * LAYERS * HEADS * DIM * 4
    assert PagedCache(LAYERS, HEADS, 64, 1 << 20, bits=8).bytes_per_token == 2 * LAYERS * HEADS * (64 + 4 * 4)
    assert PagedCache(LAYERS, HEADS, 8, 1 << 20, bits=8).bytes_per_token == 2 * LAYERS * HEADS * (32 + 2 * 4)


def test_what_is_forgotten_is_shared_with_nobody_and_its_memory_is_free():
    held, first = cache(), text(1, 2, 3)
    finished(held, 0, first)
    write(held, 1, text(4, 5), 2 * SIZE)
    held.name(1, text(4, 5))
    held.forget_prefixes()
    assert held.begin(2, [*first, 1]) == held.begin(3, text(4, 5, 6)) == 0
    assert held.free_count == 8 - 2
    held.crop(1, SIZE + 5)
    assert read(held, 1) == expected(text(4, 5), SIZE + 5)


def test_what_follows_pages_that_were_forgotten_is_told_apart():
    """Two texts that begin otherwise and go on alike: their keys differ, so neither takes the other's page."""
    held, texts = cache(), (text(1, 3, 9), text(2, 3, 9))
    for id, tokens in enumerate(texts):
        write(held, id, tokens, 2 * SIZE)
        held.name(id, tokens[: 2 * SIZE])
    held.forget_prefixes()
    for id, tokens in enumerate(texts):
        held.crop(id, SIZE + 1)
        write(held, id, tokens, SIZE - 1)
        held.name(id, tokens[: 2 * SIZE])
    for id, tokens in enumerate(texts):
        assert read(held, id) == expected(tokens, 2 * SIZE)


PARTS = st.lists(st.integers(0, 2), min_size=1, max_size=5)  # of a text, so that texts often begin alike
IDS = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.tuples(st.just("begin"), IDS, PARTS),
    st.tuples(st.just("feed"), IDS, st.integers(1, 50), st.lists(st.booleans(), max_size=5)),
    st.tuples(st.just("crop"), IDS, st.integers(0, 200), PARTS),
    st.tuples(st.just("free"), IDS),
    st.tuples(st.just("forget"), IDS),
    st.tuples(st.just("restart"), IDS, st.integers(1, 12), st.integers(0, 12)),
)


class Naive:
    """The simplest cache there is: every sequence has rows of its own, each a function of its text."""

    def __init__(self, pages):
        self.held, self.texts, self.lengths, self.most, self.pages = cache(pages), {}, {}, 0, pages

    def begin(self, id, parts):
        own = self.texts.setdefault(id, text(*parts, size=24))  # pages end in the middle of parts
        self.lengths[id] = self.lengths.get(id, 0) + self.held.begin(id, own)
        assert self.lengths[id] < len(own) or not self.held.begin(id, own)

    def feed(self, id, count, nodes):
        """Tokens, then nodes, of which those that are true are kept if all tokens before them are there."""
        own, seen = self.texts[id], self.lengths[id]
        count = min(count, len(own) - seen)
        nodes = nodes if seen + count == len(own) else []
        kept = [node for node, keep in enumerate(nodes) if keep]
        longer = [*own, *(5000 + node for node in kept)]
        rows = [mark(longer[: len(own) + kept.index(n) + 1]) if n in kept else -1.0 for n in range(len(nodes))]
        write(self.held, id, own, count, rows)
        self.held.crop(id, seen + count, kept)
        self.texts[id], self.lengths[id] = longer, seen + count + len(kept)
        self.held.name(id, longer)

    def crop(self, id, length, parts):
        """And go on with another text."""
        self.held.crop(id, length)
        self.lengths[id] = min(self.lengths[id], length)
        self.texts[id] = [*self.texts[id][: self.lengths[id]], *text(*parts, size=24)]

    def free(self, id):
        self.held.free(id)
        del self.texts[id], self.lengths[id]

    def forget(self, id):
        self.held.forget_prefixes()

    def restart(self, id, pages, most):
        """All sequences are gone; what a file of at most so many pages keeps is there, in a cache of another size."""
        named = self.held.named
        with tempfile.TemporaryDirectory() as folder:
            first = PrefixFile(Path(folder) / "cache", {"model": self.held}, most * (PAGE_BYTES + 4 * SIZE))
            first._named = -1
            first.close()
            kept = min(most, len(self.held.known_pages()))
            self.held = cache(pages)
            PrefixFile(Path(folder) / "cache", {"model": self.held}, 0).close()
        assert self.held.named == 0 <= named
        assert len(self.held.known_pages()) == min(kept, pages)
        self.texts, self.lengths, self.most, self.pages = {}, {}, 0, pages

    def check(self):
        pages = self.pages
        held = self.held
        for id, own in self.texts.items():
            assert read(held, id) == expected(own, self.lengths[id])
        self.most = max(self.most, len(held._users))
        assert len(held._idle) + len(held._users) + len(held._free) == held._unused  # no page is lost or had twice
        assert held._unused <= max(pages, self.most + 1)  # a crop needs one more for a moment


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATIONS, min_size=20, max_size=50), st.integers(1, 12))
def test_whatever_happens_every_sequence_reads_its_own_text(operations, pages):
    naive = Naive(pages)
    for kind, id, *how in operations:
        if kind in ("begin", "restart") or id in naive.texts:
            getattr(naive, kind)(id, *how)
            naive.check()
