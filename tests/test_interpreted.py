"""Triton's interpreter as tests run it where there is no GPU: hastened."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import interpreted  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels are compiled")


@triton.jit
def _mix(x, other):
    return tl.sum(x * other, 1) + tl.max(other, 1)


@triton.jit
def _kernel(from_ptr, to_ptr, fails: tl.constexpr, size: tl.constexpr):
    at = tl.arange(0, size)
    x = tl.load(from_ptr + at, mask=at < size - 1, other=7)
    tl.static_assert(not fails)
    tl.store(to_ptr + at, _mix(x[:, None], x[None, :] + tl.zeros((size, size), tl.int32)))


def test_kernels_that_call_functions_have_their_values_again_and_again():
    """Of integers that overflow, too: nobody asserts that they do not."""
    for first in (3, 2**30, -5):
        given = torch.arange(first, first + 8, dtype=torch.int32)
        found = torch.empty_like(given)
        _kernel[(1,)](given, found, False, 8)
        seen = torch.cat([given[:7], torch.tensor([7], dtype=torch.int32)])
        assert torch.equal(found, seen * seen.sum(dtype=torch.int32) + seen.max())


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_kernel_the_language_is_what_it_was(fails):
    before = tl.arange, tl.core.reduce, tl.tensor.__add__, tl.static_range
    given = torch.zeros(8, dtype=torch.int32)
    try:
        _kernel[(1,)](given, given, fails, 8)
    except triton.runtime.errors.InterpreterError:
        assert fails
    assert (tl.arange, tl.core.reduce, tl.tensor.__add__, tl.static_range) == before
    with pytest.raises(ValueError, match="forget to add"):
        tl.arange(0, 8)


SCALARS = ["int1", "int8", "int32", "int64", "uint8", "uint32", "uint64", "float16", "bfloat16", "float32"]
SHAPES = [((4, 1), (1, 2)), ((4,), (2, 4)), ((2,), ()), ((), (4,)), ((), ()), ((2, 2), (2, 2))]
CONSTANTS = [0, 3, -2, 255, 2**31, -(2**40), 2.5, -0.0, float("inf"), True, tl.constexpr(2), tl.constexpr(1.5)]


def tensor(name, shape, seed):
    """Numbers of any size, as a load brings them; a scalar is of one element."""
    dtype, draw = getattr(tl, name), np.random.default_rng(seed)
    kind = interpreter._get_np_dtype(dtype)
    if name == "int1":
        data = draw.random(shape or (1,)) < 0.5
    elif kind.kind == "f":
        data = (draw.standard_normal(shape or (1,)) * 10.0 ** draw.integers(-3, 4)).astype(kind)
    else:
        data = draw.integers(1, 2**63 - 1, shape or (1,)).astype(kind) | kind.type(1)  # no divisor is 0
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(compute, left, right):
    """Its type and numbers, or what is wrong. Truths are numbers of other types within the interpreter."""
    try:
        found = compute(left, right)
    except Exception as error:
        return type(error), str(error)
    if isinstance(found, bool):  # the language has compared nothing
        return found
    data = found.handle.data.astype(bool) if found.dtype == tl.int1 else found.handle.data
    return found.type, found.shape, data.dtype, data.shape, data.tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers of any size overflow
@pytest.mark.parametrize("operator", [*interpreted.OPERATORS, *(f"r{each}" for each in interpreted.ARITHMETIC)])
def test_a_quick_operator_is_the_interpreters_own(operator):
    name = f"__{operator}__"
    own = getattr(tl.tensor, name).__wrapped__
    pairs = [(left, right, shapes) for left in SCALARS for right in SCALARS for shapes in SHAPES]
    scope, made = interpreter._patch_lang(_kernel.fn), 0
    try:
        quick, semantic = getattr(tl.tensor, name), interpreter.interpreter_semantic
        for seed in range(3):  # the first two types are known after the first
            cases = [(tensor(a, one, seed), tensor(b, two, seed + 9)) for a, b, (one, two) in pairs]
            cases += [(tensor(a, shape, seed), each) for a in SCALARS for shape in ((4,), ()) for each in CONSTANTS]
            for left, right in cases:
                slow = outcome(lambda x, y: own(x, y, _semantic=semantic), left, right)
                assert outcome(quick, left, right) == slow, (operator, left.type, right)
                made += not isinstance(slow[0], type)
    finally:
        scope.restore()
    assert made


def test_pointers_move_by_the_size_of_what_they_point_to():
    scope = interpreter._patch_lang(_kernel.fn)
    try:
        for element, size in ((tl.int1, 1), (tl.int8, 1), (tl.float16, 2), (tl.float32, 4), (tl.int64, 8)):
            pointer = tl.pointer_type(element)
            at = tl.tensor(interpreter.TensorHandle(np.array([1000], np.uint64), pointer), pointer)
            for offset in (tensor("int32", (4,), 0), tensor("int64", (2, 2), 1), tensor("uint8", (4,), 2), -3, 2**33):
                steps = offset.handle.data.astype(np.uint64) if isinstance(offset, tl.tensor) else np.array([offset])
                wanted = np.uint64(1000) + steps.astype(np.uint64) * np.uint64(size)
                for _ in range(2):
                    for found in (at + offset, offset + at):
                        assert found.dtype == pointer
                        assert found.handle.data.tolist() == wanted.tolist()
    finally:
        scope.restore()
