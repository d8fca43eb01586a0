"""Triton's interpreter without what it repeats for nothing: the same values in less than half the time."""

import dataclasses
import functools
import types

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """Once in a process. The interpreter of an older Triton, which patches in another way, is left as it is."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    # Overflows are looked for in every sum of integers, and `device_assert` drops what was found unless it debugs.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _Patch()
    # What follows has no state, and few different arguments.
    core.pointer_type.__hash__ = core.block_type.__hash__ = core.dtype.__hash__  # equal types have equal names
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    block = functools.cache(lambda element, *shape: core.block_type(element, list(shape)))
    core.block_type.with_element_ty = lambda self, element: block(element, *self.shape)
    interpreter.InterpreterBuilder.get_block_ty = lambda self, element, shape: block(element, *shape)


class _Patch:
    """While a kernel runs, the language's functions are the interpreter's. They are made once, not for every kernel
    and every function that it calls."""

    def __init__(self) -> None:
        anywhere = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": core})
        self._scope = interpreter._patch_lang(anywhere)
        self._values = [(obj, name, getattr(obj, name)) for obj, name, _ in self._scope._changes]
        self._scope.restore()

    def __call__(self, fn):
        if self._scope._changes:  # a kernel that runs calls another function
            return interpreter._LangPatchScope()
        for change in self._values:
            self._scope.set_attr(*change)
        return self._scope
