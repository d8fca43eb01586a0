"""Memory in large pages: the same numbers, side by side, and given back."""

import gc
import mmap
import weakref

import pytest
import torch

from outrider.models import large_pages
from outrider.models.large_pages import PAGE, Arena, large


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1])
def test_there_is_enough_of_it_and_it_is_empty(size):
    tensor = large(size)
    assert len(tensor) >= size
    assert not tensor.any()
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * len(tensor)


@pytest.mark.skipif(not hasattr(large_pages.mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_it_begins_where_a_large_page_can():
    assert large(5).data_ptr() % PAGE == 0


def tensors(seed, rows):
    random = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randint(0, 255, (rows, 3, 5), generator=random, dtype=torch.uint8),
        "scales": torch.randn(rows, 7, generator=random).half(),
        "super": torch.randint(-9, 9, (rows,), generator=random, dtype=torch.int8),
    }


def test_copies_are_the_same_and_do_not_overlap():
    arena, asked = Arena(), [tensors(seed, 1 + 37 * seed) for seed in range(20)]
    placed = [arena.copies(each) for each in asked]
    for each, copies in zip(asked, placed, strict=True):
        assert each.keys() == copies.keys()
        for name, tensor in each.items():
            assert torch.equal(copies[name], tensor)
            assert copies[name].dtype == tensor.dtype
            assert copies[name].data_ptr() % large_pages.ALIGN == 0


def test_what_is_larger_than_a_chunk_has_its_own(monkeypatch):
    monkeypatch.setattr(large_pages, "CHUNK", PAGE)
    arena, small = Arena(), tensors(1, 9)
    many = {"q": torch.arange(PAGE, dtype=torch.int32)}
    first, big, second = arena.copies(small), arena.copies(many), arena.copies(small)
    assert torch.equal(big["q"], many["q"])
    for name, tensor in small.items():
        assert torch.equal(first[name], tensor)
        assert torch.equal(second[name], tensor)
    distance = second["q"].data_ptr() - first["q"].data_ptr()
    assert 0 < distance < PAGE  # the chunk that was begun is used on


@pytest.mark.skipif(not hasattr(large_pages.mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")
def test_a_chunk_goes_back_with_the_last_tensor_in_it(monkeypatch):
    made = []

    class Watched(mmap.mmap):
        def __new__(cls, *args):
            made.append(weakref.ref(new := super().__new__(cls, *args)))
            return new

    monkeypatch.setattr(large_pages.mmap, "mmap", Watched)
    monkeypatch.setattr(large_pages, "CHUNK", PAGE)
    arena = Arena()
    held = [arena.copies({"q": torch.zeros(PAGE // 2, dtype=torch.uint8)}) for _ in range(4)]
    assert len(made) == 2  # two in each
    del held[0]
    gc.collect()
    assert made[0]() is not None
    del held[0]
    gc.collect()
    assert made[0]() is None
    assert made[1]() is not None
