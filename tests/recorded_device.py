"""A GPU without a GPU: every launch of a kernel is recorded, as Triton would look it up, and no kernel runs.

Tensors lie on the CPU and say that they lie on a GPU, one of Hopper's kind. What a launch is compiled for is told by
Triton's own code, so that a key that was not seen before is a kernel that would be compiled then and there.
"""

import contextlib
import functools
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import interpreter, jit

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
HOPPER = GPUTarget("cuda", 90, 32)


class Launches:
    """Keys of kernels, and how many graphs were captured."""

    def __init__(self):
        self.keys = {}  # key: the kernel's name
        self.captured = 0

    def record(self, kernel, args, options):
        name, binder = _binder(kernel)
        given, specialization, rest = binder(*args, **options)
        key = name, str(specialization), str(sorted(rest.items()))
        self.keys.setdefault(key, name)
        if name == "_judge":  # what the host reads: each round writes one token
            given["out_ptr"][:, :, 0] = 1


@functools.cache
def _binder(kernel):
    kind = kernel if isinstance(kernel, jit.JITFunction) else jit.JITFunction(kernel.fn, **kernel.kwargs)
    return kind.fn.__name__, jit.create_function_from_signature(kind.signature, kind.params, make_backend(HOPPER))


class _OnCpu(TorchFunctionMode):
    """Tensors of a GPU are on the CPU, and say that they are not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.device.__get__:
            return GPU
        if function == torch.Tensor.is_cuda.__get__:
            return True
        args = tuple(_here(each) for each in args)
        kwargs = {key: _here(each) for key, each in kwargs.items() if key != "pin_memory"}
        if function in (torch.empty, torch.empty_like, torch.Tensor.new_empty):
            return function(*args, **kwargs).zero_()
        return function(*args, **kwargs)


def _here(value):
    return CPU if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")) else value


class _Graph:
    def __init__(self, launches):
        self._launches = launches

    def capture_begin(self, *_, **__): ...

    def capture_end(self):
        self._launches.captured += 1

    def replay(self): ...


@contextlib.contextmanager
def recorded_device():
    from outrider.models.cuda import launch

    launches, anything = Launches(), mock.MagicMock()

    def run(self, *args, grid, warmup, **options):
        launches.record(self, args, options)

    cuda = dict(
        CUDAGraph=lambda: _Graph(launches), Stream=anything, Event=anything, stream=anything, synchronize=anything,
        current_stream=anything, default_stream=anything, graph_pool_handle=anything,
        get_device_capability=lambda device=None: (9, 0), mem_get_info=lambda device=None: (1 << 37, 1 << 37),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for kind in (interpreter.InterpretedFunction, jit.JITFunction):
            stack.enter_context(mock.patch.object(kind, "run", run))
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        launch.early.cache_clear()
        stack.callback(launch.early.cache_clear)
        stack.enter_context(_OnCpu())
        yield launches
