"""What a chain can be written with: the common tokens and those of the text, whatever order they came in."""

from __future__ import annotations

import ctypes

import pytest
import torch

from outrider.drafters.eagle.vocabulary import FEW, Lexicon, TextVocabulary
from outrider.drafters.heads.output import pack
from outrider.models.native.library import library
from outrider.models.native.packed import TILE, PackedWorkspace

pytestmark = pytest.mark.native

SIZE, VOCAB, COMMON = 64, 400, 48


def lexicon(bits: int = 8) -> tuple[Lexicon, torch.Tensor, list[int]]:
    torch.manual_seed(0)
    matrix = torch.randn(VOCAB, SIZE)
    ids = torch.randperm(VOCAB)  # by how often they are used
    learned = ids[:300]
    made = Lexicon(pack(matrix[learned[:96]], 8), learned[:96], learned, COMMON, lambda some: matrix[some], bits)
    return made, matrix, ids.tolist()


def written(words: TextVocabulary) -> list[int]:
    joint, ids = words.output()
    assert joint.outputs == len(ids) == sum(joint.parts[part].outputs for part in range(joint.count))
    assert all(joint.parts[part].outputs % TILE == 0 for part in range(joint.count))
    found: list[int] = ids.tolist()
    return found


def test_a_new_text_has_the_common_ones() -> None:
    made, _, ids = lexicon()
    assert written(TextVocabulary(made)) == ids[:COMMON]


def test_rare_ones_are_there_once_they_are_in_the_text() -> None:
    made, _, ids = lexicon()
    words = TextVocabulary(made)
    words.add([ids[100], ids[3], ids[100], ids[60]])
    assert set(written(words)) == {*ids[:COMMON], ids[100], ids[60]}
    words.add([ids[299]])
    assert set(written(words)) == {*ids[:COMMON], ids[100], ids[60], ids[299]}


def test_a_token_that_the_head_has_not_learned_is_never_written() -> None:
    made, _, ids = lexicon()
    words = TextVocabulary(made)
    words.add([ids[300], ids[399]])
    assert written(words) == ids[:COMMON]


def test_many_and_few_end_up_the_same() -> None:
    made, _, ids = lexicon()
    rare = ids[COMMON:300]
    assert len(rare) > 3 * FEW
    one, other = TextVocabulary(made), TextVocabulary(made)
    one.add(rare)
    for token in rare:
        other.add([token])
        other.output()
    assert set(written(one)) == set(written(other)) == set(ids[:300])


def test_it_changes_only_when_something_new_comes() -> None:
    made, _, ids = lexicon()
    words = TextVocabulary(made)
    words.add([ids[70]])
    words.output()
    words.add([ids[70], ids[0], ids[350]])
    assert not words.changed
    words.add([ids[71]])
    assert words.changed


def logits(words: TextVocabulary, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a state makes of each row, and the token of each."""
    joint, tokens = words.output()
    y, work = torch.empty(1, joint.outputs), PackedWorkspace(1, SIZE)
    library().outrider_linear(
        ctypes.byref(joint), ctypes.c_void_p(x.data_ptr()), None, ctypes.c_float(0.0), ctypes.c_int64(1),
        ctypes.c_void_p(y.data_ptr()), ctypes.byref(work.struct),
    )  # fmt: skip
    return y[0], tokens


def test_rows_are_those_of_their_tokens() -> None:
    made, matrix, ids = lexicon()
    words = TextVocabulary(made)
    words.add(ids[100:180])  # of a prompt
    words.add([ids[200], ids[210]])  # and what came later
    assert words.output()[0].count == 3
    x = torch.randn(1, SIZE)
    found, tokens = logits(words, x)
    torch.testing.assert_close(found, matrix[tokens] @ x[0], atol=0.15, rtol=0.05)


@pytest.mark.parametrize("bits", [4, 8])
def test_tokens_that_come_one_by_one_have_the_same_rows(bits: int) -> None:
    made, _, ids = lexicon(bits)
    one_by_one, x = TextVocabulary(made), torch.randn(1, SIZE)
    for count in range(1, FEW + 1):  # more than one tile, and more than one pair of them
        rare = ids[COMMON : COMMON + count]
        one_by_one.add(rare[-1:])
        together = TextVocabulary(made)
        together.add(rare)
        for ours, expected in zip(logits(one_by_one, x), logits(together, x), strict=True):
            assert torch.equal(ours, expected)
