"""Triton's interpreter as tests run it where there is no GPU: hastened."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

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
