"""Tokens to text as they come: whole characters, and nothing of a stop string."""

import pytest
from hypothesis import given, strategies as st

from outrider.backends.text import HELD, Writer


class Bytes:
    """A tokenizer with one token per byte."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")


def write(text, stop=(), take=True):
    """The chunks, and whether the stop string was seen with the last token."""
    writer, chunks, ended = Writer(Bytes(), stop), [], False
    for byte in text.encode():
        ended = writer.push(byte)
        if take:
            chunks.append(writer.take())
        if ended:
            break
    chunks.append(writer.take(last=True))
    assert "".join(chunks) == writer.text
    return writer.text, ended, chunks


@given(st.text(max_size=12))
def test_the_chunks_are_the_text(text):
    written, ended, chunks = write(text)
    assert written == text.encode().decode(errors="replace")
    assert not ended
    assert "\ufffd" not in "".join(chunks).replace("\ufffd" * text.count("\ufffd"), "")


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2), st.booleans())
def test_the_text_ends_before_the_first_stop_string(text, stops, take):
    """First is the one that is complete first, and of those the one that begins first."""
    written, ended, _ = write(text, stops, take)
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert ended == bool(found)
    assert written == (text[: min(found)[1]] if found else text)


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_the_order_of_the_stop_strings_does_not_matter(stops):
    assert write("cab", stops)[0] == "c"


def test_what_may_become_a_stop_string_is_held_back():
    _, _, chunks = write("one EN two END", ["END"])
    assert chunks == ["o", "n", "e", " ", "", "", "EN ", "t", "w", "o", " ", "", "", "", ""]


def test_what_was_held_back_comes_out_at_the_end():
    assert write("the EN", ["END"])[0] == "the EN"


@pytest.mark.parametrize("text", ["é", "日本", "👩‍👩‍👧", "a\u0301"])
def test_characters_of_many_bytes_come_whole(text):
    _, _, chunks = write(text)
    assert "\ufffd" not in "".join(chunks)


def test_stop_strings_before_the_least_number_of_tokens_do_not_count():
    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return "".join("ab"[i] for i in ids)

    writer = Writer(Words(), ["b"], least=3)
    assert [writer.push(token) for token in (0, 1, 0, 1)] == [False, False, False, True]
    assert writer.take(last=True) == "aba"


def test_a_stop_string_that_the_last_of_the_least_tokens_completes_counts():
    writer = Writer(Bytes(), ["b"], least=2)
    assert [writer.push(token) for token in b"ab"] == [False, True]
    assert writer.take(last=True) == "a"


INVALID = st.lists(st.sampled_from([b"\x80", b"\xe2", b"\x9c\x93", b"\xf0\x9f", b"a", "✓".encode(), b"\xff"]))


@given(INVALID.map(b"".join), st.booleans())
def test_bytes_that_are_no_text_come_as_a_decoder_of_the_whole_writes_them(given, stops):
    writer, chunks = Writer(Bytes(), ["never"] if stops else ()), []
    for count, byte in enumerate(given, 1):
        writer.push(byte)
        chunks.append(writer.take())
        told = len("".join(chunks).encode("utf-8", "surrogatepass"))
        assert len(given[:count].decode(errors="replace").encode()) - told <= 3 * HELD  # bytes: each may be U+FFFD
    chunks.append(writer.take(last=True))
    assert "".join(chunks) == writer.text == given.decode(errors="replace")


def test_what_is_held_back_is_bounded_and_read_once():
    """A model of random weights writes half characters for ever: each token costs a few short decodes, not all."""
    sizes = []

    class Counting(Bytes):
        def decode(self, ids, skip_special_tokens):
            sizes.append(len(ids))
            return super().decode(ids, skip_special_tokens)

    writer = Writer(Counting(), ["never"])
    for _ in range(500):
        writer.push(0x80)
    assert len(writer.take()) >= 500 - HELD
    assert max(sizes) <= 4 * HELD
    assert len(sizes) <= 500 * 2 * HELD
