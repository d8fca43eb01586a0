"""Whole passes in one call of the kernels: what the layers and torch around them give, bit by bit."""

import ctypes

import numpy as np
import packs
import pytest
import torch

from outrider.core.draft import EMPTY, Draft
from outrider.models.base import Feed
from outrider.models.llama import Llama
from outrider.models.native import model as native
from outrider.models.native.library import library
from outrider.models.native.packed import use_torch_threads

pytestmark = pytest.mark.native

CHAIN = Draft.chain((5, 1, 7, 7, 2))
BRANCHES = Draft((1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 1, -1, 4, 2))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return packs.packed(packs.reference("llama", seed=4), 4)


def texts(*counts):
    return [
        torch.randint(packs.VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()
        for count in counts
    ]


def passes(forward, model, layers):
    """Prompts, then drafts of several sequences in one pass, and of one alone."""
    first, second, third = texts(40, 3, 17)
    found = [
        forward([Feed(0, first), Feed(1, second, CHAIN)], layers),
        forward([Feed(0, [3], BRANCHES), Feed(2, third), Feed(3, [1])], layers),
        forward([Feed(0, [9], CHAIN)], layers),
        forward([Feed(3, [4])], layers),
    ]
    given = [(output.logits, output.hidden) for outputs in found for output in outputs]
    for id in range(4):
        model.free(id)
    return given, [output.best for outputs in found for output in outputs]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("layers", [(), (0, 2)])
def test_they_have_the_bits_of_the_layers_with_torch_around_them(model, threads, layers, count):
    threads(count)
    ours, best = passes(model.forward, model, layers)
    theirs, _ = passes(lambda *given: Llama.forward(model, *given), model, layers)
    for (logits, hidden), (expected, states), likeliest in zip(ours, theirs, best, strict=True):
        assert torch.equal(logits, expected)
        assert likeliest == expected.argmax(-1).tolist()
        assert hidden is states is None or torch.equal(hidden, states)


def largest(logits):
    logits, best = np.ascontiguousarray(logits, np.float32), (ctypes.c_int64 * len(logits))()
    use_torch_threads()
    library().outrider_likeliest(
        ctypes.c_void_p(logits.ctypes.data), ctypes.c_int64(len(logits)), ctypes.c_int64(logits.shape[1]), best
    )
    return list(best)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 7, 16, 17, 255, 256, 257, 700, 1600])
def test_the_likeliest_is_the_first_of_equals(threads, size, count):
    threads(count)
    random = np.random.default_rng(size)
    logits = random.integers(-3, 4, (60, size)).astype(np.float32)  # hardly any row without ties
    logits[0], logits[1], logits[2], logits[3] = 0.0, -np.inf, np.inf, -1e30
    logits[4, ::2], logits[5, ::2] = -0.0, np.inf
    assert largest(logits) == logits.argmax(-1).tolist()
    for row in range(60):  # the last place, and one alone in each part
        logits[row] = -5.0 - row
        logits[row, random.integers(size)] = -4.0 - row
    logits[7, -1] = 9.0
    assert largest(logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_logit_that_is_no_number_is_the_likeliest_as_it_is_for_numpy(threads, count):
    threads(count)
    random = np.random.default_rng(5)
    logits = random.standard_normal((40, 1000)).astype(np.float32)
    for row in range(1, 40):
        logits[row, random.integers(1000, size=1 + row % 3)] = np.nan
        logits[row, random.integers(1000, size=row % 2)] = np.inf
    assert largest(logits) == logits.argmax(-1).tolist()


def test_weights_that_are_not_numbers_give_the_token_that_they_gave():
    theirs = packs.reference("llama")
    with torch.no_grad():
        theirs.model.layers[0].input_layernorm.weight[3] = float("nan")
    [output] = packs.packed(theirs, 4).forward([Feed(0, [1, 2, 3])])
    assert output.best == output.logits.numpy().argmax(-1).tolist() == [0]


@pytest.mark.parametrize("rows", [1, native.KEPT + 4])
def test_logits_stay_what_they_were_in_later_passes(model, rows):
    """Whether they were looked at in time or not."""
    draft = Draft.chain([1] * (rows - 1))
    expected = [model.forward([Feed(0, [token], draft)])[0].logits.clone() for token in range(4)]
    model.free(0)
    seen, late = [], []
    for token in range(4):
        [output] = model.forward([Feed(0, [token], draft)])
        late.append(output) if token % 2 else seen.append(output.logits[-1:])
    model.free(0)
    for logits, wanted in zip(seen, expected[::2], strict=True):
        assert torch.equal(logits, wanted[-1:])
    for output, wanted in zip(late, expected[1::2], strict=True):
        assert torch.equal(output.logits, wanted)


def test_memory_for_logits_is_used_again_where_nobody_has_them(model):
    runner = model._native
    for _ in range(2):
        model.forward([Feed(0, [1])])
    memory = runner._logits
    runner_sees = memory.ctypes.data
    del memory
    for _ in range(3):
        assert model.forward([Feed(0, [1])])[0].best
        assert runner._logits.ctypes.data == runner_sees
    kept = model.forward([Feed(0, [1])])[0].logits
    model.forward([Feed(0, [1])])
    assert runner._logits.ctypes.data != runner_sees == kept.data_ptr()
    model.forward([Feed(0, [1], Draft.chain([1] * 2 * native.KEPT))])
    model.forward([Feed(0, [1])])
    assert len(runner._logits) == native.KEPT
    model.free(0)


def test_a_token_that_is_not_there_is_named(model):
    with pytest.raises(IndexError, match=f"token {packs.VOCAB} of a vocabulary of {packs.VOCAB}"):
        model.forward([Feed(8, [1, packs.VOCAB], EMPTY)])
    model.free(8)
