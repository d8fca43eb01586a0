"""Kernels compiled before they run, for a GPU that is not there: nothing is launched."""

import threading

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from outrider.models.cuda.compiling import compile_first, is_noting

GPU = torch.device("cuda", 0)


class NoDevice:
    """What Triton asks of a driver before a kernel is launched; to launch one is an error."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def _copy(from_ptr, to_ptr, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < size), mask=at < size)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is unset, which Triton 3.9 warns of
    monkeypatch.setattr(driver, "_active", NoDevice())
    return jit.JITFunction(_copy)


def launch(kernel, block=16):
    values = torch.zeros(block)
    kernel[(1,)](values, torch.empty_like(values), block, block)


def compiled(kernel):
    return len(kernel.device_caches[0][0])


def test_what_is_noted_is_compiled_and_not_launched(kernel):
    seen = []

    def work():
        for block in (16, 32, 16):
            launch(kernel, block)
        seen.append((is_noting(), compiled(kernel)))

    compile_first(work, GPU)
    assert (seen, compiled(kernel), is_noting()) == ([(True, 0)], 2, False)
    compile_first(work, GPU)  # what is compiled is not launched, either, nor compiled again
    assert (seen[-1], compiled(kernel)) == ((True, 2), 2)
    with pytest.raises(AttributeError):  # the driver has nothing that could launch it
        launch(kernel)


def test_other_threads_launch_meanwhile(kernel):
    tried = []

    def elsewhere():
        try:
            launch(kernel)
        except AttributeError:
            tried.append((is_noting(), compiled(kernel)))

    def work():
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()

    compile_first(work, GPU)
    assert tried == [(False, 1)]


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(kernel, monkeypatch):
    monkeypatch.setattr(jit.JITFunction, "preload", lambda self, data: 1 / 0)
    compile_first(lambda: launch(kernel), GPU)
    assert compiled(kernel) == 0


def test_after_an_error_kernels_are_launched_again(kernel):
    run = jit.JITFunction.run

    def work():
        raise ValueError("of the work itself")

    with pytest.raises(ValueError, match="of the work itself"):
        compile_first(work, GPU)
    assert (jit.JITFunction.run, knobs.runtime.jit_cache_hook, is_noting()) == (run, None, False)


def test_without_a_gpu_nothing_is_done(kernel):
    compile_first(lambda: pytest.fail("not to be done"), torch.device("cpu"))
