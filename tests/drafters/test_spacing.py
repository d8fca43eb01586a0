"""How a JSON text is spaced, and what is guessed of it."""

import json

import pytest

from outrider.drafters.spacing import (
    ALIGNED,
    BEGUN,
    CLOSED,
    FIRST,
    LINES,
    NESTED_LINE,
    NESTED_LINES,
    ONE_LINE,
    SEEN,
    TIGHT,
    JsonSpacing,
)

VALUE = {"name": "a, b: [c]", "list": [1, 2], "deep": {"x": {"y": '\\"', "z": []}, "w": "{"}, "more": [[1], [2]]}


def after(text):
    spacing = JsonSpacing()
    spacing.read(text)
    return spacing


def gaps(text, value=None):
    return after(text).gaps(None if value is None else value[0])


class TestGuesses:
    def test_the_first_bracket_is_open(self):
        assert gaps(b"{", b'"') == [(b"", ONE_LINE), (b"\n  ", LINES)]

    def test_nothing_before_colons_and_commas_unless_the_text_has_it(self):
        assert gaps(b'{"a"', b":") == [(b"", TIGHT)]
        assert gaps(b'{"a" : 1, "b"', b":") == [(b" ", TIGHT)]

    def test_after_a_colon_as_before(self):
        assert gaps(b'{"a":') == [(b" ", FIRST)]
        assert gaps(b'{"a":1, "b":') == [(b"", SEEN)]

    def test_a_first_comma_keeps_to_the_lines_of_the_bracket(self):
        assert gaps(b'{\n    "a": 1,') == [(b"\n    ", ALIGNED)]
        assert gaps(b'{"a": 1,') == [(b" ", FIRST)]

    def test_lines_of_a_list_are_not_those_of_the_object_around_it(self):
        text = b'{\n  "a": [\n    1,\n    2\n  ],'
        assert gaps(text) == [(b"\n  ", ALIGNED)]
        assert gaps(b'{\n  "a": 1,\n  "b": [1,') == [(b" ", FIRST)]

    def test_a_bracket_closes_on_the_line_of_what_is_around_it(self):
        assert gaps(b'{\n  "a": [\n    1', b"]") == [(b"\n  ", CLOSED)]
        assert gaps(b'{\n  "a": [1', b"]") == [(b"", CLOSED)]
        assert gaps(b'{\n  "a": 1', b"}") == [(b"\n", CLOSED)]
        assert gaps(b'{"a": 1', b"}") == [(b"", CLOSED)]

    def test_a_bracket_inside_another_goes_one_step_in(self):
        assert gaps(b'{\n\t"a": [', b'"') == [(b"", NESTED_LINE), (b"\n\t\t", NESTED_LINES)]
        assert gaps(b'{\n    "a": {\n        "b": [', b'"')[1] == (b"\n            ", NESTED_LINES)
        assert gaps(b'{"a": [', b'"') == [(b"", SEEN)]

    def test_of_the_second_such_bracket_it_is_known(self):
        assert gaps(b'{\n  "a": [1],\n  "b": [', b'"') == [(b"", SEEN)]

    def test_spaces_that_have_begun_are_completed(self):
        assert gaps(b'{\n  "a": 1,\n ', b'"') == [(b" ", BEGUN)]
        assert gaps(b'{\n  "a": 1,\n  ', b'"') == [(b"", BEGUN)]
        assert gaps(b'{\n  "a": 1, ', b'"') == [(b"", BEGUN)]  # other ones: no more is known of them

    def test_strings_are_not_read(self):
        assert gaps(b'{"a": "x:y,\\"{[", "b":') == [(b" ", SEEN)]
        assert not after(b'{"a": "b').inside
        assert after(b'{"a": "b"').inside
        assert not after(b'{"a": "b"}').inside

    def test_a_quote_in_words_before_the_json_ends_with_its_line(self):
        assert gaps(b'I say: "so\n{"a":1,"b":') == [(b"", SEEN)]

    def test_a_copy_reads_by_itself(self):
        spacing = after(b'{"a": 1,')
        spacing.copy().read(b'\n"b":')
        assert spacing.gaps(None) == [(b" ", FIRST)]


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":"), (" , ", " : ")])
def test_in_a_regular_text_hardly_a_gap_is_guessed_wrong(indent, separators):
    """Read byte by byte: at each place outside of strings where spaces may stand, one guess is what comes."""
    separators = (separators[0].rstrip() if indent else separators[0], separators[1])
    text = json.dumps([VALUE, VALUE], indent=indent, separators=separators).encode()
    wrong = []
    spacing = JsonSpacing()
    for place, byte in enumerate(text):
        if spacing.inside and text[place - 1] not in b" \n\t":
            rest = text[place:]
            gap = rest[: len(rest) - len(rest.lstrip())]
            value = rest.lstrip()[0]
            if (text[place - 1] in b'{[,:"]}' or gap) and gap not in [each for each, _ in spacing.gaps(value)]:
                wrong.append(text[:place][-20:])
        spacing.read(bytes([byte]))
    assert len(wrong) <= 6, wrong  # the first of each kind
