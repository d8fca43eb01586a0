"""One line for whatever another library raises."""

from __future__ import annotations

from outrider.core.errors import LONGEST, OutriderError, one_line


def test_an_error_of_many_lines_becomes_one() -> None:
    assert one_line(ValueError("line 1\n\n   line 2\ttab ")) == "line 1 line 2 tab"
    assert one_line(ValueError("line 1\nline 2"), named=True) == "ValueError: line 1 line 2"
    assert one_line(OutriderError("too long; shorten it"), named=True) == "too long; shorten it"


def test_an_error_without_text_is_its_name() -> None:
    assert one_line(MemoryError()) == "MemoryError"
    assert one_line(MemoryError(), named=True) == "MemoryError"


def test_a_long_error_is_cut() -> None:
    assert len(one_line(ValueError("x" * 10**6))) == LONGEST
    assert len(one_line(ValueError("x" * 10**6), named=True)) == LONGEST + len("ValueError: ")
