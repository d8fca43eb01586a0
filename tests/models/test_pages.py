"""Pages of a GPU's cache: who holds which, shared beginnings, nothing ever lost. Bookkeeping: no GPU needed."""

import random

import pytest

from outrider.core.errors import OutriderError
from outrider.models.cuda.pages import TRASH, PageTable


def text(seed, count):
    luck = random.Random(seed)
    return [luck.randrange(50) for _ in range(count)]


def held(pages, id):
    return list(pages._holders[id].pages)


def test_a_sequence_gets_pages_as_it_grows_and_gives_them_back():
    pages = PageTable(10, 4, 3, 40)
    pages.extend(1, 5)
    assert len(held(pages, 1)) == 2
    assert pages.length(1) == 5
    pages.extend(1, 3)
    assert len(held(pages, 1)) == 2  # 8 tokens fill two pages
    pages.extend(1, 1)
    assert len(held(pages, 1)) == 3
    assert pages.free_count == 10 - 1 - 3
    assert TRASH not in held(pages, 1)
    pages.free(1)
    assert pages.free_count == 9
    assert pages.length(1) == 0


def test_the_table_says_where_tokens_lie():
    pages = PageTable(10, 4, 3, 40)
    holder = pages.extend(7, 10)
    assert pages.table[holder.slot, :3].tolist() == held(pages, 7)
    assert holder.slot in pages.changed
    assert pages.flat(7, 6) == held(pages, 7)[1] * 4 + 2
    assert not pages.table[pages.padding].any()


def test_a_new_sequence_shares_what_others_have_of_its_beginning_but_never_all():
    pages = PageTable(20, 4, 5, 60)
    first = text(1, 12)
    pages.extend(1, 12)
    pages.name(1, first)
    pages.begin(2, [*first, 1, 2])
    assert held(pages, 2) == held(pages, 1)
    assert pages.length(2) == 12
    pages.begin(3, first)
    assert pages.length(3) == 8  # the last token must be run
    other = [*first[:4], 99, *first[5:], 1]
    pages.begin(4, other)
    assert pages.length(4) == 4


def test_a_beginning_of_another_tenant_is_not_shared():
    pages, first = PageTable(20, 4, 5, 60), text(1, 12)
    pages.extend(1, 12)
    pages.name(1, first, "one")
    assert [pages.begin(2, first, "two"), pages.begin(3, first), pages.begin(4, first, "one")] == [0, 0, 8]


def test_after_forgetting_nothing_is_shared_and_all_pages_can_be_had():
    pages = PageTable(20, 4, 5, 60)
    tokens = text(1, 12)
    pages.extend(1, 12)
    pages.extend(2, 8)
    pages.name(1, tokens)
    pages.name(2, text(2, 8))
    pages.free(1)  # idle now; 2 still holds its pages
    free = pages.free_count
    pages.forget_prefixes()
    assert pages.free_count == free
    pages.begin(3, [*tokens, 1])
    pages.begin(4, [*text(2, 8), 1])
    assert pages.length(3) == pages.length(4) == 0
    pages.name(2, text(2, 8))  # what 2 names from now on hangs on a page that nobody finds
    pages.free(2)
    assert pages.free_count == 19


def test_only_committed_full_pages_are_shared():
    pages = PageTable(20, 4, 5, 60)
    tokens = text(1, 12)
    pages.extend(1, 12)
    pages.name(1, tokens[:7])  # what comes after is a draft
    assert pages._holders[1].known == 1
    pages.begin(2, [*tokens, 1])
    assert pages.length(2) == 4


def test_the_same_page_after_another_beginning_is_another_page():
    pages = PageTable(20, 4, 5, 60)
    end = text(3, 4)
    pages.extend(1, 8)
    pages.name(1, [*text(1, 4), *end])
    pages.begin(2, [*end, *end, 5])
    assert pages.length(2) == 0


def test_pages_that_nobody_holds_are_known_until_they_are_needed():
    pages = PageTable(7, 4, 3, 40)
    tokens = text(1, 8)
    pages.extend(1, 8)
    pages.name(1, tokens)
    pages.free(1)
    assert pages.free_count == 6
    pages.begin(2, [*tokens, 1])
    assert pages.length(2) == 8
    pages.free(2)
    pages.extend(3, 24)  # takes all six
    pages.free(3)
    pages.begin(4, [*tokens, 1])
    assert pages.length(4) == 0


def test_a_full_cache_and_too_many_sequences_are_said_so():
    pages = PageTable(4, 4, 2, 40)
    pages.extend(1, 12)
    with pytest.raises(OutriderError, match="the cache is full: 1 pages of 4 tokens are needed, 0 free"):
        pages.extend(2, 1)
    with pytest.raises(OutriderError, match="more than 2 sequences at once"):
        pages.extend(3, 1)


def test_nothing_is_lost_whatever_happens():
    luck, pages = random.Random(0), PageTable(40, 4, 8, 60)
    texts = [text(n % 3, 50) for n in range(200)]
    live = {}
    for id, tokens in enumerate(texts):
        pages.begin(id, tokens)
        live[id] = tokens
        while pages.length(id) < 30 and pages.free_count > 10:
            pages.extend(id, luck.randrange(1, 6))
            pages.crop(id, pages.length(id) - luck.randrange(0, 1))
            pages.name(id, tokens[: pages.length(id)])
        if len(live) > 5 or pages.free_count <= 10:
            gone = luck.choice(list(live))
            pages.free(gone)
            del live[gone]
        for one, known in live.items():  # sequences share pages only where their texts agree
            for two, other in live.items():
                for place, (a, b) in enumerate(zip(held(pages, one), held(pages, two), strict=False)):
                    if a == b and one != two:
                        assert known[: 4 * place + 4] == other[: 4 * place + 4]
    for id in list(live):
        pages.free(id)
    assert pages.free_count == 39


def test_a_token_that_was_not_run_yet_fills_no_page():
    """The engine names one more token than the cache has seen: the newest is run with the next pass."""
    pages = PageTable(20, 4, 5, 60)
    tokens = text(3, 8)
    pages.extend(1, 7)
    pages.name(1, tokens)
    pages.begin(2, [*tokens, 1])
    assert pages.length(2) == 4


def test_a_page_that_is_taken_again_is_given_to_nobody_else():
    pages = PageTable(6, 4, 5, 60)
    tokens = text(4, 4)
    pages.extend(1, 4)
    pages.name(1, tokens)
    pages.free(1)
    pages.begin(2, [*tokens, 1])
    pages.extend(3, 16)  # all the rest
    assert not set(held(pages, 2)) & set(held(pages, 3))
    assert pages.free_count == 0


def test_the_end_of_a_text_is_forgotten_before_its_beginning():
    pages = PageTable(5, 4, 5, 60)
    tokens = text(5, 16)
    pages.extend(1, 16)
    pages.name(1, tokens)
    pages.free(1)
    pages.extend(2, 8)  # two of the four pages are needed
    pages.begin(3, [*tokens, 1])
    assert pages.length(3) == 8
